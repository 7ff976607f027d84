"""A Flower grid inside the process, and the deployments, clients and records that the tests of ``fedhdp.flower`` share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity
from helpers import tiny_data

from fedhdp.client import LocalTraining
from fedhdp.clips import AdaptiveClip
from fedhdp.data import Examples
from fedhdp.flower import Arrays, Deployment, Trainer, client_app, initial_arrays, jax_trainer, run_deployment
from fedhdp.models import mlp
from fedhdp.privacy.calibration import PrivacyLevel
from fedhdp.privacy.costs import PrivacyCost
from fedhdp.privacy.ledger import Ledger
from fedhdp.results.metrics import MetricRow
from fedhdp.results.schema import Summary
from fedhdp.results.store import VariantDirectory, read_arrays

FIRST_NODE = 100  # the node of client 0
SIZES = [4, 4, 8, 8, 8, 4, 8, 4]
LEVEL_OF = ["open"] * 2 + ["mid"] * 3 + ["strict"] * 3
MODEL, TRAINING, SEED = mlp(12, 5, 3), LocalTraining(epochs=2, batch_size=4, learning_rate=0.3), 3
DATA = tiny_data(SIZES)
PLAIN_MODEL = {"w": np.zeros((2, 3), np.float32), "b": np.ones(3, np.float32)}
LEVELS = {
    "open": PrivacyLevel(sampling_rate=0.5, noise_multiplier=0.0),
    "mid": PrivacyLevel(sampling_rate=0.6, noise_multiplier=0.5, weight=0.5, pull=0.2),
    "strict": PrivacyLevel(sampling_rate=0.5, noise_multiplier=1.0, weight=0.3),
}
TWO_LEVELS = {
    "strict": PrivacyLevel(sampling_rate=1.0, noise_multiplier=1.0),
    "open": PrivacyLevel(sampling_rate=1.0, noise_multiplier=0.0),
}  # always sampled
PRIVATE = {"noise_seed": None, "cohort_seed": None}


def set_flower_internals(message: Message | None = None, message_id: str = "") -> None:
    """Set what Flower sets in a ServerApp's process and when it sends a message. No other code uses Flower's internals."""
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
    if message is not None:
        message.metadata.__dict__["_message_id"] = message_id


set_flower_internals()


class Node:
    """A SuperNode: a ClientApp, its owner's configuration, and its state."""

    def __init__(self, id: int, app: ClientApp, **node_config: object):
        self.id, self.app = id, app
        self.context = Context(1, id, node_config, RecordDict(), {})  # type: ignore[arg-type]
        self.received: list[Message] = []

    def answer(self, message: Message) -> Message:
        """The app's reply; an exception becomes an error reply, as in Flower."""
        self.received.append(message)
        try:
            return self.app(message, self.context)
        except Exception as error:
            return Message(Error(2, str(error)), reply_to=message)

    def received_of(self, kind: str) -> list[Message]:
        """The messages of a type."""
        return [message for message in self.received if message.metadata.message_type == kind]


class InProcessGrid(Grid):
    """Nodes that answer at once.

    ``tamper(message, reply, node)`` returns the replies that arrive. ``on_push(messages)`` is called before messages are
    sent.
    """

    def __init__(self, nodes: Iterable[Node]):
        self.nodes = {node.id: node for node in nodes}
        self.tamper: Callable[[Message, Message, Node], list[Message]] = lambda message, reply, node: [reply]
        self.on_push: Callable[[list[Message]], None] = lambda messages: None
        self.pushed: list[Message] = []
        self._replies: dict[str, list[Message]] = {}

    def set_run(self, run: object) -> None:
        """Not needed."""

    @property
    def run(self) -> object:
        """Not available."""
        raise NotImplementedError

    def create_message(self, *args: object, **kwargs: object) -> Message:
        """Not available: messages are made by their constructor."""
        raise NotImplementedError

    def get_node_ids(self) -> list[int]:
        """The connected nodes."""
        return list(self.nodes)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Pass each message to its node's app."""
        messages = list(messages)
        self.on_push(messages)
        for message in messages:
            set_flower_internals(message, f"message {len(self.pushed)}")
            self.pushed.append(message)
            node = self.nodes.get(message.metadata.dst_node_id)
            if node is not None:
                replies = self.tamper(message, node.answer(message), node)
                self._replies[message.metadata.message_id] = replies
        return [message.metadata.message_id for message in messages]

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """The replies, in reverse order."""
        return [reply for name in sorted(message_ids, reverse=True) for reply in self._replies.pop(name, [])]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        """Push and pull."""
        return self.pull_messages(self.push_messages(messages))

    def pushed_of(self, kind: str) -> list[Message]:
        """The messages of a type that were sent."""
        return [message for message in self.pushed if message.metadata.message_type == kind]


class Clock:
    """The time of a test: sleeping moves it."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        """The seconds so far."""
        return self.now

    def sleep(self, seconds: float) -> None:
        """Move the time."""
        self.now += seconds


class SlowGrid(InProcessGrid):
    """Nodes that take their time: ``seconds(message)`` to reply, after which a message may have expired.

    ``at(seconds, action)`` acts at a time.
    """

    def __init__(self, nodes: Iterable[Node], clock: Clock, seconds: Callable[[Message], float] = lambda message: 0.0):
        super().__init__(nodes)
        self.clock, self.seconds = clock, seconds
        self.times: list[tuple[float, str, int]] = []  # of the messages, with their type and node
        self._ready_at: dict[str, float] = {}
        self._actions: list[tuple[float, Callable[[], object]]] = []

    def at(self, seconds: float, action: Callable[[], object]) -> None:
        """Act at a time, when the server next asks for the nodes."""
        self._actions.append((seconds, action))

    def get_node_ids(self) -> list[int]:
        """The connected nodes, after the actions that are due."""
        due = [action for seconds, action in self._actions if seconds <= self.clock.now]
        self._actions = [(seconds, action) for seconds, action in self._actions if seconds > self.clock.now]
        for action in due:
            action()
        return super().get_node_ids()

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Pass each message to its node's app, unless it would expire before the reply."""
        messages = list(messages)
        names = super().push_messages(messages)
        for name, message in zip(names, messages, strict=True):
            metadata, seconds = message.metadata, self.seconds(message)
            self.times.append((self.clock.now, metadata.message_type, metadata.dst_node_id))
            self._ready_at[name] = self.clock.now + seconds if seconds <= metadata.ttl else float("inf")
        return names

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """The replies that are ready."""
        return super().pull_messages(name for name in message_ids if self._ready_at[name] <= self.clock.now)

    def times_of(self, kind: str, node: int) -> list[float]:
        """When messages of a type were sent to a node."""
        return [seconds for seconds, *message in self.times if message == [kind, node]]


class Crash(BaseException):
    """The sudden end of a ServerApp."""


def make_deployment(tmp_path: Path, **changes: object) -> Deployment:
    """Three rounds with three levels, repeatable, in a directory of the test."""
    fields: dict = {
        "out": str(tmp_path / "run"),
        "ledger": str(tmp_path / "ledger"),
        "rounds": 3,
        "levels": LEVELS,
        "clip": AdaptiveClip(initial=0.3),
        "training": TRAINING,
        "seed": SEED,
        "cohort_seed": SEED,
        "noise_seed": 7,
        "reply_timeout_seconds": 0.3,
        "enroll_timeout_seconds": 0.3,
    }
    tmp_path.mkdir(exist_ok=True)
    return Deployment(**(fields | changes))


def client_examples(examples: Examples, number: int) -> tuple[np.ndarray, np.ndarray]:
    """One client's part of the data."""
    rows = slice(examples.start_K[number], examples.start_K[number] + examples.count_K[number])
    return examples.x_N[rows], examples.y_N[rows]


def jax_trainer_of(context: Context, training: LocalTraining = TRAINING) -> Trainer:
    """The simulator's trainer of a node's client."""
    number = int(context.node_config["partition-id"])
    test = client_examples(DATA.test, number)
    train, batches = client_examples(DATA.train, number), (SEED, number)
    return jax_trainer(MODEL, training, *train, test=test, batches=batches, input_scale=DATA.input_scale)


def plain_trainer(context: Context) -> Trainer:
    """A trainer without a framework: it adds ½ to the global model and ¼ to the personal model."""

    def fit(parameters: Arrays, personal: Arrays, pull: float, round: int) -> tuple[Arrays, Arrays]:
        trained = {name: array + 0.5 for name, array in parameters.items()}
        return trained, {name: array + 0.25 for name, array in personal.items()}

    return Trainer(fit, lambda arrays: float(arrays["w"].mean()))


JAX_APP, PLAIN_APP = client_app(jax_trainer_of), client_app(plain_trainer)


def plain_node(id: int, **node_config: object) -> Node:
    """A node with the trainer that needs no framework."""
    return Node(id, PLAIN_APP, **node_config)


def strict_node(tmp_path: Path, **node_config: object) -> Node:
    """Node 1, with the level strict and a directory."""
    return plain_node(1, privacy="strict", directory=str(tmp_path / "client"), **node_config)


def make_grid(state_dir: Path | None = None, app: ClientApp = PLAIN_APP) -> InProcessGrid:
    """Eight clients of three levels, with directories if a directory for these is given."""
    nodes = []
    for number, level in enumerate(LEVEL_OF):
        directory = {} if state_dir is None else {"directory": str(state_dir / f"client {number}")}
        nodes.append(Node(FIRST_NODE + number, app, **{"partition-id": number, "privacy": level}, **directory))
    return InProcessGrid(nodes)


def with_open_node(node: Node) -> InProcessGrid:
    """A node beside an open one, so that rounds go on when the first declines."""
    return InProcessGrid([node, plain_node(2, privacy="open")])


def run_jax(grid: InProcessGrid, deployment: Deployment) -> Summary:
    """Run a deployment with the JAX model."""
    return run_deployment(grid, deployment, initial_arrays(MODEL, SEED))


def run_plain(grid: InProcessGrid, deployment: Deployment) -> Summary:
    """Run a deployment with the model that needs no framework."""
    return run_deployment(grid, deployment, PLAIN_MODEL)


def with_records(reply: Message, **records: object) -> Message:
    """The reply with these records in addition or instead."""
    return Message(content=RecordDict({**reply.content, **records}), metadata=reply.metadata)


def is_train(message: Message) -> bool:
    """Whether a message requests training."""
    return message.metadata.message_type == "train"


def is_train_of(message: Message, round: int) -> bool:
    """Whether a message requests training in a round, which are counted from 0."""
    return is_train(message) and message.metadata.group_id == str(round)


def before_round(round: int, action: Callable[[], object]) -> Callable[[list[Message]], None]:
    """An ``on_push`` that acts when the messages of a round are about to be sent."""

    def on_push(messages: list[Message]) -> None:
        if any(is_train_of(message, round) for message in messages):
            action()

    return on_push


def crash() -> None:
    """End the ServerApp."""
    raise Crash


def record_updates(grid: InProcessGrid, node: Node) -> list[bool]:
    """A list that collects whether each training reply of a node has an update."""
    has_update: list[bool] = []

    def tamper(message: Message, reply: Message, sender: Node) -> list[Message]:
        if sender is node and is_train(message):
            has_update.append(reply.has_content() and "update" in reply.content)
        return [reply]

    grid.tamper = tamper
    return has_update


def is_declined(reply: Message) -> bool:
    """Whether a reply declines the round."""
    return "declined" in reply.content["request"]


def saved_model(deployment: Deployment) -> Arrays:
    """The final model in the run directory."""
    return read_arrays(Path(deployment.out) / "fedhdp" / "model.npz")


def saved_history(deployment: Deployment) -> list[MetricRow]:
    """The history in the run directory."""
    return VariantDirectory(Path(deployment.out) / "fedhdp").history()


def saved_values(deployment: Deployment, group: str, metric: str) -> list[float]:
    """A metric of a group, round by round."""
    return [row.value for row in saved_history(deployment) if (row.group, row.metric) == (group, metric)]


def open_ledger(path: str | Path, read_only: bool = True) -> Ledger:
    """A ledger."""
    return Ledger(path, read_only=read_only)


def ledger_costs(deployment: Deployment, level: str) -> list[PrivacyCost]:
    """What the deployment's ledger has charged to a level."""
    with open_ledger(deployment.ledger) as ledger:
        return list(ledger.costs(level))


def client_costs(directory: Path) -> list[PrivacyCost]:
    """What a client's own ledger has charged."""
    with open_ledger(directory / "client.ledger") as ledger:
        return list(ledger.costs("this client"))


def charged_rounds(deployment: Deployment) -> int:
    """The rounds in the deployment's ledger."""
    with open_ledger(deployment.ledger) as ledger:
        return sum(run.charged for run in ledger.runs())


def registered_levels(deployment: Deployment) -> list[str]:
    """The clients' levels in the deployment's ledger, in the order of enrollment."""
    with open_ledger(deployment.ledger) as ledger:
        return list(ledger.registrations().values())


def is_equal(first: Arrays, second: Arrays) -> bool:
    """Whether two models are equal to the bit."""
    return set(first) == set(second) and all((first[name] == second[name]).all() for name in first)

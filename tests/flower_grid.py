"""A Flower grid inside the process: it hands every message to the real ClientApp at once, or does what a test asks."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1  # as in a ServerApp's process


class Node:
    """A SuperNode: a ClientApp, what its owner configured, and a state that lives as long as it does."""

    def __init__(self, id: int, app: ClientApp, **node_config: object):
        self.id, self.app = id, app
        self.context = Context(1, id, node_config, RecordDict(), {})  # type: ignore[arg-type]
        self.heard: list[Message] = []

    def answer(self, message: Message) -> Message:
        """What the app makes of a message; an app that raises is an error, as in Flower."""
        self.heard.append(message)
        try:
            return self.app(message, self.context)
        except Exception as error:
            return Message(Error(2, str(error)), reply_to=message)


class InProcessGrid(Grid):
    """Nodes that answer at once; ``tamper`` may change, drop or double a reply on its way."""

    def __init__(self, nodes: Iterable[Node]):
        self.nodes = {node.id: node for node in nodes}
        self.tamper: Callable[[Message, Message, Node], list[Message]] = lambda message, reply, node: [reply]
        self.on_push: Callable[[list[Message]], None] = lambda messages: None
        self.pushed: list[Message] = []
        self._replies: dict[str, list[Message]] = {}

    def set_run(self, run: object) -> None:
        """Nothing depends on it."""

    @property
    def run(self) -> object:
        """There is none."""
        raise NotImplementedError

    def create_message(self, *args: object, **others: object) -> Message:
        """Messages are made by their constructor."""
        raise NotImplementedError

    def get_node_ids(self) -> list[int]:
        """Who is connected."""
        return list(self.nodes)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Hand each message to its node's app."""
        messages = list(messages)
        self.on_push(messages)
        for message in messages:
            message.metadata.__dict__["_message_id"] = f"message {len(self.pushed)}"
            self.pushed.append(message)
            node = self.nodes.get(message.metadata.dst_node_id)
            if node is not None:
                replies = self.tamper(message, node.answer(message), node)
                self._replies[message.metadata.message_id] = replies
        return [message.metadata.message_id for message in messages]

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """The replies, in no helpful order."""
        return [reply for name in sorted(message_ids, reverse=True) for reply in self._replies.pop(name, [])]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        """Both at once."""
        return self.pull_messages(self.push_messages(messages))

"""The deployment on Flower, without processes: the real ServerApp code and the real ClientApp over an in-process grid."""

from __future__ import annotations

import fcntl
import itertools
import json
import math
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import jax
import msgspec
import numpy as np
import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedhdp[flower]'")

from flower_grid import InProcessGrid, Node
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from helpers import tiny_data
from msgspec.structs import replace

from fedhdp.client import LocalTraining
from fedhdp.experiments.runner import resume
from fedhdp.flower.client_app import Trainer, client_app
from fedhdp.flower.client_state import Folder, Memory, Promise, check
from fedhdp.flower.config import Deployment, from_run_config
from fedhdp.flower.protocol import (
    Declined,
    Offer,
    Order,
    as_record,
    ask_choice,
    decline_message,
    flat,
    from_record,
    order_message,
    read_order,
    unflat,
)
from fedhdp.flower.registry import Registry
from fedhdp.flower.server_app import serve, start_billing
from fedhdp.flower.strategy import FedHDP
from fedhdp.flower.trainer import built_in, score_with, start_model
from fedhdp.mechanism import SERVER, AdaptiveClip
from fedhdp.models import mlp
from fedhdp.privacy.accounting import PrivacyCost, compose, privacy_cost
from fedhdp.privacy.calibration import PrivacyLevel
from fedhdp.privacy.ledger import Budget, Ledger
from fedhdp.results import store as results
from fedhdp.results.schema import Summary
from fedhdp.server import ServerOptimizer
from fedhdp.simulation import simulate

SIZES = [4, 4, 8, 8, 8, 4, 8, 4]
LEVELS = ["open"] * 2 + ["mid"] * 3 + ["strict"] * 3
MODEL, TRAINING, SEED = mlp(12, 5, 3), LocalTraining(epochs=2, batch_size=4, learning_rate=0.3), 3
POPULATION = tiny_data(SIZES)
OFFER = {
    "open": PrivacyLevel(sampling_rate=0.5, noise_multiplier=0.0),
    "mid": PrivacyLevel(sampling_rate=0.6, noise_multiplier=0.5, weight=0.5, pull=0.2),
    "strict": PrivacyLevel(sampling_rate=0.5, noise_multiplier=1.0, weight=0.3),
}


def of_client(examples, k: int):
    mine = slice(examples.start_K[k], examples.start_K[k] + examples.count_K[k])
    return examples.x_N[mine], examples.y_N[mine]


def trainer(context: Context) -> Trainer:
    k = int(context.node_config["partition-id"])
    test = of_client(POPULATION.test, k)
    return built_in(MODEL, TRAINING, *of_client(POPULATION.train, k), test=test, batches=(SEED, k))


def add_one(context: Context) -> Trainer:
    """A trainer without any framework: everything moves by a half, the personal model by a quarter."""

    def fit(parameters, personal, pull, round):
        return {k: v + 0.5 for k, v in parameters.items()}, {k: v + 0.25 for k, v in personal.items()}

    return Trainer(fit, lambda arrays: float(arrays["w"].mean()))


APP = client_app(trainer)
PLAIN = client_app(add_one)
PLAIN_MODEL = {"w": np.zeros((2, 3), np.float32), "b": np.ones(3, np.float32)}


def deployment(tmp_path: Path, **others) -> Deployment:
    fields = {
        "out": str(tmp_path / "run"),
        "ledger": str(tmp_path / "ledger"),
        "rounds": 3,
        "levels": OFFER,
        "clip": AdaptiveClip(initial=0.3),
        "training": TRAINING,
        "seed": SEED,
        "cohort_seed": SEED,
        "noise_seed": 7,
        "reply_seconds": 0.3,
        "gather_seconds": 0.3,
    }
    return Deployment(**(fields | others))


UNSEEDED = {"noise_seed": None, "cohort_seed": None}


def everyone(tmp_path: Path | None = None, app: ClientApp = APP) -> InProcessGrid:
    nodes = []
    for k, level in enumerate(LEVELS):
        folder = {} if tmp_path is None else {"directory": str(tmp_path / f"client {k}")}
        nodes.append(Node(100 + k, app, **{"partition-id": k, "privacy": level}, **folder))
    return InProcessGrid(nodes)


def run_round(grid: InProcessGrid, wanted: Deployment) -> Summary:
    return serve(grid, wanted, start_model(MODEL, SEED))


def play_plain(grid: InProcessGrid, wanted: Deployment) -> Summary:
    return serve(grid, wanted, PLAIN_MODEL)


def model_of(wanted: Deployment) -> dict[str, np.ndarray]:
    return results.read_arrays(Path(wanted.out) / "fedhdp" / "model.npz")


def history_of(wanted: Deployment):
    return results.VariantDirectory(Path(wanted.out) / "fedhdp").history()


def charged(wanted: Deployment) -> int:
    with Ledger(wanted.ledger, read_only=True) as ledger:
        return sum(run.charged for run in ledger.runs())


def trains(messages: list[Message]) -> bool:
    return any(message.metadata.message_type == "train" for message in messages)


class Crash(BaseException):
    """The end of a ServerApp."""


def crash_in(round: int) -> Callable[[list[Message]], None]:
    """A server that ends while it sends out this round."""

    def crash(messages: list[Message]) -> None:
        if trains(messages) and messages[0].metadata.group_id == str(round):
            raise Crash

    return crash


def haunted(message: Message, reply: Message, node: Node) -> list[Message]:
    """To each reply another, to a message that was never sent."""
    ghost = Message(RecordDict(), 1, "train")
    ghost.metadata.__dict__["_message_id"] = "a message of last year"
    return [reply, Message(reply.content, reply_to=ghost)] if trains([message]) else [reply]


def equal(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    return set(a) == set(b) and all((a[name] == b[name]).all() for name in a)


# The same algorithm


def test_flower_and_the_simulator_give_the_same_global_model_from_the_same_seeds(tmp_path):
    step = ServerOptimizer(momentum=0.9, average=0.5)
    wanted = deployment(tmp_path, rounds=4, server=step, evaluate_every=2, cohort_seed=7)
    summary = run_round(everyone(), wanted)
    mechanism = wanted.mechanism({"open": 2, "mid": 3, "strict": 3})
    simulated = simulate(POPULATION, MODEL, mechanism, TRAINING, wanted.server, 4, seed=SEED, noise_seed=7)
    deployed = model_of(wanted)
    assert set(deployed) == set(simulated.parameters)
    moved = start_model(MODEL, SEED)["first/w"] - deployed["global/first/w"]
    assert abs(moved).max() > 0.01
    for name, array in simulated.parameters.items():
        np.testing.assert_allclose(deployed[name], array, atol=2e-6)
    found = {(row.group, row.model, row.metric): row.value for row in simulated.history}
    (variant,) = summary.variants
    for group in variant.groups:
        assert group.global_accuracy == pytest.approx(found[group.name, "global", "accuracy"], abs=1e-6)
        assert group.personal_accuracy == pytest.approx(found[group.name, "personal", "accuracy"], abs=1e-6)
    theirs = simulated.result("", 1e-4).groups
    assert [(g.epsilon, g.epsilon_pld, g.epsilon_basis) for g in variant.groups] == [
        (g.epsilon, g.epsilon_pld, g.epsilon_basis) for g in theirs
    ]
    assert variant.repeatable


def test_without_seeds_cohorts_and_noise_come_from_the_operating_system(tmp_path):
    models, cohorts = [], []
    for name in "ab":
        wanted = deployment(tmp_path / name, cohort_seed=None, noise_seed=None, rounds=6)
        (tmp_path / name).mkdir()
        summary = play_plain(everyone(app=PLAIN), wanted)
        assert not summary.variants[0].repeatable
        models.append(flat(model_of(wanted)))
        cohorts.append([row.value for row in history_of(wanted) if row.metric == "drawn"])
    assert (models[0] != models[1]).all()
    assert cohorts[0] != cohorts[1]


def test_without_a_seed_every_round_has_noise_of_its_own(tmp_path):
    fresh, seeded = (FedHDP(deployment(tmp_path, noise_seed=seed), None, None, "", PLAIN_MODEL) for seed in (None, 7))
    keys = [[tuple(np.asarray(jax.random.key_data(one._noise_key()))) for _ in range(4)] for one in (fresh, seeded)]
    assert [len(set(those)) for those in keys] == [4, 1]
    seeded.round = 1
    assert tuple(np.asarray(jax.random.key_data(seeded._noise_key()))) not in keys[1]


@pytest.mark.parametrize("seeds", [{"noise_seed": None}, {"cohort_seed": None}, {}])
def test_with_either_seed_nothing_is_promised_and_the_ledger_is_charged_as_without_noise(tmp_path, seeds):
    wanted = deployment(tmp_path, **seeds)
    assert wanted.repeatable
    assert play_plain(everyone(app=PLAIN), wanted).variants[0].repeatable
    with Ledger(wanted.ledger, read_only=True) as ledger:
        assert {spent[0] for name in OFFER for spent in ledger.costs(name)} == {0.0}


def test_flowers_own_loop_can_run_the_strategy(tmp_path):
    wanted = deployment(tmp_path)
    grid, ledger = everyone(app=PLAIN), Ledger(wanted.ledger)
    with ledger:
        registry = Registry(wanted, ledger, "run")
        registry.wait_for_enough(grid)
        strategy = FedHDP(wanted, registry, start_billing(wanted, ledger, "run"), "run", PLAIN_MODEL)
        strategy.let_in(grid)
        result = strategy.start(grid, as_record(PLAIN_MODEL), num_rounds=3)
    other = deployment(tmp_path / "other", ledger=str(tmp_path / "another"))
    play_plain(everyone(app=PLAIN), other)
    assert equal({f"global/{k}": v for k, v in from_record(result.arrays).items()}, model_of(other))


def test_a_client_needs_no_framework(tmp_path):
    levels = {"open": PrivacyLevel(sampling_rate=1.0, noise_multiplier=0.0)}
    wanted = deployment(tmp_path, levels=levels, clip=100.0, rounds=2)
    grid = InProcessGrid([Node(1, PLAIN), Node(2, PLAIN)])
    play_plain(grid, wanted)
    np.testing.assert_allclose(model_of(wanted)["global/w"], np.full((2, 3), 1.0), rtol=1e-6)
    personal = Memory(grid.nodes[1].context.state).personal(PLAIN_MODEL)["w"]
    np.testing.assert_allclose(personal, np.full((2, 3), 0.5))  # from the first global model, then a quarter twice


# What does not count


def without(client: int, of_round: int):
    """Lose a client's reply of one round."""

    def tamper(message: Message, reply: Message, node: Node) -> list[Message]:
        return [] if is_of(message, node, client, of_round) else [reply]

    return tamper


def is_of(message: Message, node: Node, client: int, of_round: int) -> bool:
    here = message.metadata.message_type == "train" and message.metadata.group_id == str(of_round)
    return here and node.id == 100 + client


def changed(reply: Message, **arrays: np.ndarray) -> Message:
    """The reply with other arrays in its update."""
    update = dict(reply.content.array_records["update"].items())
    update |= {name.replace("_", "/"): Array(array) for name, array in arrays.items()}
    return with_records(reply, update=ArrayRecord(update))


def with_records(reply: Message, **records) -> Message:
    content = RecordDict({**reply.content, **records})
    return Message(content=content, metadata=reply.metadata)


def bytes_as_array(content: bytes) -> Array:
    return Array(dtype="float32", shape=(12, 5), stype="numpy.ndarray", data=content)


def header_of(shape: str) -> bytes:
    text = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}".ljust(117).encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text


WEIGHTS = np.zeros((12, 5), np.float32)
RUBBISH = {
    "not a number": (lambda r: changed(r, first_w=WEIGHTS * math.nan), "not finite"),
    "infinite": (lambda r: changed(r, first_w=WEIGHTS + math.inf), "not finite"),
    "a norm that is infinite": (lambda r: changed(r, first_w=WEIGHTS + np.float32(3e38)), "not finite"),
    "a wrong shape": (lambda r: changed(r, first_w=WEIGHTS.T), "wrong shape"),
    "too large": (lambda r: changed(r, first_w=np.zeros((1000, 1000), np.float32)), "wrong shape"),
    "a header that lies": (
        lambda r: with_records(
            r, update=ArrayRecord({**r.content["update"], "first/w": bytes_as_array(header_of("(9999999999, 99)"))})
        ),
        "wrong shape",
    ),
    "more than its header says": (
        lambda r: with_records(
            r,
            update=ArrayRecord(
                {**r.content["update"], "first/w": bytes_as_array(header_of("(12, 5)") + bytes(4 * 60 + 100_000))}
            ),
        ),
        "wrong shape",
    ),
    "doubles": (lambda r: changed(r, first_w=WEIGHTS.astype(np.float64)[:, :2]), "wrong dtype"),
    "integers": (lambda r: changed(r, first_w=WEIGHTS.astype(np.int32)), "wrong dtype"),
    "no numbers at all": (
        lambda r: with_records(r, update=ArrayRecord({**r.content["update"], "first/w": bytes_as_array(b"rubbish")})),
        "malformed",
    ),
    "pickled objects": (
        lambda r: with_records(
            r,
            update=ArrayRecord(
                {**r.content["update"], "first/w": bytes_as_array(header_of("(12, 5)").replace(b"'<f4'", b"'|O' "))}
            ),
        ),
        "wrong dtype",
    ),
    "an array too many": (lambda r: changed(r, more=WEIGHTS), "malformed"),
    "no update": (
        lambda r: Message(content=RecordDict({"order": r.content["order"]}), metadata=r.metadata),
        "malformed",
    ),
    "nothing": (lambda r: Message(content=RecordDict(), metadata=r.metadata), "malformed"),
    "unasked scores": (lambda r: with_records(r, scores=MetricRecord({"global": 1.0})), "malformed"),
    "an old token": (lambda r: with_records(r, order=ConfigRecord({"token": "0" * 16})), "replayed"),
}


@pytest.fixture(scope="module")
def lost_one(tmp_path_factory):
    """The model when one client's reply never comes, and a client and round for which that matters."""
    wanted = deployment(tmp_path_factory.mktemp("lost"))
    grid, drawn = everyone(), []
    grid.tamper = lambda message, reply, node: (
        (drawn.append((node.id - 100, message.metadata.group_id)) if trains([message]) else None) or [reply]
    )
    run_round(grid, wanted)
    whole = model_of(wanted)
    client = next(k for k, of_round in drawn if of_round == "1")
    wanted = deployment(tmp_path_factory.mktemp("lost too"))
    grid = everyone()
    grid.tamper = without(client, 1)
    run_round(grid, wanted)
    assert not equal(whole, model_of(wanted))
    return client, model_of(wanted)


@pytest.mark.parametrize("kind", RUBBISH)
def test_rubbish_is_refused_and_counted_and_the_client_counts_as_absent(tmp_path, lost_one, kind):
    spoil, name = RUBBISH[kind]
    client, model = lost_one
    wanted, grid = deployment(tmp_path), everyone()
    grid.tamper = lambda message, reply, node: [spoil(reply) if is_of(message, node, client, 1) else reply]
    (variant,) = run_round(grid, wanted).variants
    assert equal(model_of(wanted), model)
    assert {group.name: group.refused for group in variant.groups if group.refused} == {LEVELS[client]: 1}
    told = {(row.group, row.metric): row.value for row in history_of(wanted) if row.metric.startswith("refused:")}
    assert told == {(LEVELS[client], f"refused: {name}"): 1.0}


def test_an_answer_to_a_message_that_was_never_sent_is_refused_and_counted(tmp_path):
    plain, wanted = deployment(tmp_path / "a"), deployment(tmp_path / "b")
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    run_round(everyone(), plain)
    grid = everyone()
    grid.tamper = haunted
    run_round(grid, wanted)
    assert equal(model_of(plain), model_of(wanted))
    sent = sum(row.value for row in history_of(wanted) if row.metric == "sent")
    strange = [row.value for row in history_of(wanted) if (row.group, row.metric) == (SERVER, "refused: replayed")]
    assert strange[-1] == sent > 0


def test_what_was_counted_before_a_crash_is_counted_after_it(tmp_path):
    wanted, grid = deployment(tmp_path, levels=ALWAYS), everyone(tmp_path, PLAIN)
    grid.tamper = haunted
    grid.on_push = crash_in(2)
    with pytest.raises(Crash):
        play_plain(grid, wanted)
    grid.on_push = lambda messages: None
    play_plain(grid, wanted)
    strange = [row.value for row in history_of(wanted) if (row.group, row.metric) == (SERVER, "refused: replayed")]
    clients = len(LEVELS)
    assert strange == [clients, 2 * clients, 3 * clients]


def test_a_second_reply_to_the_same_message_is_refused_and_the_first_counts(tmp_path):
    plain, doubled = deployment(tmp_path / "a"), deployment(tmp_path / "b")
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    run_round(everyone(), plain)
    grid = everyone()
    grid.tamper = lambda message, reply, node: [reply, reply] if trains([message]) else [reply]
    (variant,) = run_round(grid, doubled).variants
    assert equal(model_of(plain), model_of(doubled))
    sent = sum(row.value for row in history_of(doubled) if row.metric == "sent")
    assert sum(group.refused for group in variant.groups) == sent > 0


def test_an_answer_of_an_earlier_round_is_not_taken_for_a_new_one(tmp_path, lost_one):
    client, model = lost_one
    wanted, grid, kept = deployment(tmp_path), everyone(), {}

    def replay(message, reply, node):
        old = kept.setdefault(node.id, reply) if trains([message]) else reply
        if is_of(message, node, client, 1):  # the words of another round, in an envelope of this one
            other = next(iter(kept.values())) if old is reply else old
            return [Message(content=other.content, metadata=reply.metadata)] if other is not reply else []
        return [reply]

    grid.tamper = replay
    (variant,) = run_round(grid, wanted).variants
    assert equal(model_of(wanted), model)
    assert sum(group.refused for group in variant.groups) == 1


def test_a_client_that_fails_or_is_late_counts_as_absent_and_is_not_refused(tmp_path, lost_one):
    client, model = lost_one
    wanted, grid = deployment(tmp_path), everyone()
    broken = Node(100 + client, APP)
    grid.tamper = lambda message, reply, node: (
        [broken.answer(message)] if is_of(message, node, client, 1) else [reply]  # it has no data: its app raises
    )
    (variant,) = run_round(grid, wanted).variants
    assert equal(model_of(wanted), model)
    assert sum(group.refused for group in variant.groups) == 0


def test_an_update_is_clipped_by_the_server_whatever_the_client_did(tmp_path):
    levels = {"open": PrivacyLevel(sampling_rate=1.0, noise_multiplier=0.0)}
    wanted = deployment(tmp_path, levels=levels, clip=0.1, rounds=1)

    def greedy(context):
        return Trainer(lambda parameters, *_: ({k: v + 1e6 for k, v in parameters.items()}, None))

    play_plain(InProcessGrid([Node(1, client_app(greedy))]), wanted)
    moved = flat(model_of(wanted)) - flat({f"global/{k}": v for k, v in PLAIN_MODEL.items()})
    assert np.linalg.norm(moved) == pytest.approx(0.1, rel=1e-4)


# Choices


def held(wanted: Deployment) -> list[str]:
    with Ledger(wanted.ledger, read_only=True) as ledger:
        return list(ledger.registrations().values())


def test_nodes_that_do_not_say_get_the_strictest_level(tmp_path):
    silent, unknown = Node(1, PLAIN), Node(2, PLAIN, privacy="ultra")
    grid = InProcessGrid([silent, unknown, Node(5, PLAIN, privacy="open")])
    wanted = deployment(tmp_path)
    play_plain(grid, wanted)
    assert sorted(held(wanted)) == ["open", "strict", "strict"]


def test_nodes_that_fail_to_answer_take_no_part_and_are_asked_again(tmp_path):
    mute, slow = Node(3, ClientApp(), privacy="open"), Node(4, PLAIN, privacy="open")
    levels = {name: replace(level, sampling_rate=1.0) for name, level in OFFER.items()}
    wanted, grid = deployment(tmp_path, levels=levels), InProcessGrid([mute, slow, Node(5, PLAIN, privacy="strict")])
    late = lambda message, node: node is slow and len(heard(slow, "query")) == 1  # noqa: E731
    grid.tamper = lambda message, reply, node: [] if late(message, node) else [reply]
    play_plain(grid, wanted)
    assert sorted(held(wanted)) == ["open", "strict"]
    assert len(heard(mute, "query")) == 4  # before the first round, and before each
    assert len(heard(slow, "query")) == 2
    assert not heard(mute, "train")
    assert heard(slow, "train")


def test_the_strictest_level_is_the_one_of_the_least_epsilon_not_the_first_or_last(tmp_path):
    levels = {
        "b": PrivacyLevel(sampling_rate=0.5, noise_multiplier=1.0),
        "a": PrivacyLevel(sampling_rate=0.05, noise_multiplier=1.0),
        "c": PrivacyLevel(sampling_rate=0.5, epsilon=math.inf),
    }
    assert deployment(tmp_path, levels=levels).strictness == ("a", "b", "c")


def test_a_choice_is_never_loosened_and_a_client_that_wants_more_privacy_is_left_alone(tmp_path):
    def nodes(**levels: str):
        made = [
            Node(i, PLAIN, privacy=level, directory=str(tmp_path / who))
            for i, (who, level) in enumerate(levels.items(), 1)
        ]
        return InProcessGrid(made)

    all_in = {name: replace(level, sampling_rate=1.0) for name, level in OFFER.items()}
    play_plain(nodes(anna="strict", ben="open", cleo="mid"), deployment(tmp_path, levels=all_in, rounds=1))
    again = deployment(tmp_path, levels=all_in, rounds=1, out=str(tmp_path / "again"))
    grid = nodes(anna="open", ben="strict", cleo="mid")
    play_plain(grid, again)
    assert held(again) == ["strict", "open", "mid"]
    told = {m.metadata.dst_node_id: m.content["order"]["level"] for m in grid.pushed if trains([m])}
    assert told == {1: "strict", 3: "mid"}


def test_a_node_that_goes_before_it_has_answered_is_not_registered(tmp_path):
    wanted = deployment(tmp_path)
    grid = InProcessGrid([Node(1, PLAIN, privacy="open"), Node(2, PLAIN)])
    grid.tamper = lambda message, reply, node: [] if node.id == 2 else [reply]
    with Ledger(wanted.ledger) as ledger:
        registry = Registry(wanted, ledger, "run")
        registry.listen(grid)
        del grid.nodes[2]
        registry.wait_for_enough(grid)
        assert list(registry.members.values()) == ["open"]


def test_nobody_can_claim_to_be_a_node_of_another_number(tmp_path):
    impostor = client_app(add_one)
    wanted = deployment(tmp_path)
    with Ledger(wanted.ledger) as ledger:
        registry = Registry(wanted, ledger, "run")
        grid = InProcessGrid([Node(1, PLAIN), Node(2, impostor)])
        grid.tamper = lambda message, reply, node: [
            with_records(reply, choice=ConfigRecord({"client": "node 1"})) if node.id == 2 else reply
        ]
        registry.listen(grid)
        assert registry.node_of == {"node 1": 1, "node 2": 2}


def test_a_client_is_known_again_after_a_restart_and_by_nobody_else_while_it_is_connected(tmp_path):
    wanted = deployment(tmp_path, rounds=1)
    first, copy = (Node(i, PLAIN, privacy="open", directory=str(tmp_path / "me")) for i in (1, 2))
    with Ledger(wanted.ledger) as ledger:
        registry = Registry(wanted, ledger, "run")
        grid = InProcessGrid([first, copy])
        registry.listen(grid)
        assert list(registry.node_of.values()) == [1]
        del grid.nodes[1]
        registry.listen(grid)
        assert list(registry.node_of.values()) == [2]
        assert len(registry.members) == 1


# Paying


def test_every_round_is_charged_before_anything_of_it_is_sent(tmp_path):
    wanted, grid, seen = deployment(tmp_path, rounds=4), everyone(app=PLAIN), []
    grid.on_push = lambda messages: seen.append((trains(messages), charged(wanted))) if trains(messages) else None
    play_plain(grid, wanted)
    assert seen
    assert [count for _, count in seen] == [
        int(m) + 1 for m in dict.fromkeys(m.metadata.group_id for m in grid.pushed if trains([m]))
    ]


def test_a_round_in_which_nobody_is_drawn_or_reachable_is_charged_too(tmp_path):
    levels = {"strict": PrivacyLevel(sampling_rate=0.0, noise_multiplier=1.0)}
    wanted, grid = deployment(tmp_path, levels=levels), InProcessGrid([Node(1, PLAIN)])
    play_plain(grid, wanted)
    assert charged(wanted) == 3
    assert not trains(grid.pushed)


def budgeted(tmp_path, on_budget_exhausted: str) -> Deployment:
    levels = {name: replace(level, sampling_rate=1.0) for name, level in OFFER.items()}
    mechanism = deployment(tmp_path, levels=levels).mechanism({"open": 2, "mid": 3, "strict": 3})
    two_rounds = compose([privacy_cost(mechanism, mechanism.groups[1], 2)], 1e-4)
    budgets = {"mid": Budget(two_rounds * 1.001, 1e-4)}
    return deployment(
        tmp_path, levels=levels, rounds=5, budgets=budgets, on_budget_exhausted=on_budget_exhausted, **UNSEEDED
    )


def test_a_run_stops_before_the_round_that_would_pass_a_budget(tmp_path):
    wanted = budgeted(tmp_path, "stop")
    (variant,) = play_plain(everyone(app=PLAIN), wanted).variants
    assert variant.rounds == 2
    assert "would exceed the budget of 'mid'" in variant.stopped
    assert charged(wanted) == 2


def test_a_later_deployment_tightens_a_promised_budget_and_never_loosens_it(tmp_path):
    wanted = [(5.0, 1e-4), (9.0, 1e-4), (5.0, 1e-3), (9.0, 1e-6), (3.0, 1e-3), (4.0, 1e-5)]
    kept = []
    for budget in wanted:
        with Ledger(tmp_path / "ledger") as ledger:
            billing = start_billing(deployment(tmp_path, budgets={"mid": Budget(*budget)}), ledger, "run")
            ledger.register("a client", "mid")
            billing.admit({"a client": "mid"})
            kept.append(msgspec.structs.astuple(ledger.budget("mid")))
    assert kept == [(5.0, 1e-4)] * 3 + [(5.0, 1e-6), (3.0, 1e-6), (3.0, 1e-6)]


def test_an_epsilon_is_told_at_its_levels_own_delta(tmp_path):
    levels = OFFER | {"mid": replace(OFFER["mid"], delta=1e-6)}
    wanted = deployment(tmp_path, levels=levels, rounds=2, **UNSEEDED)
    (variant,) = play_plain(everyone(app=PLAIN), wanted).variants
    mid, strict = variant.groups[1:]
    assert (mid.delta, strict.delta) == (1e-6, 1e-4)
    with Ledger(wanted.ledger, read_only=True) as ledger:
        for group in (mid, strict):
            assert group.epsilon == pytest.approx(compose(ledger.costs(group.name), group.delta))
            assert group.epsilon_pld == pytest.approx(compose(ledger.costs(group.name), group.delta, "pld"))


def test_a_group_whose_budget_is_spent_is_left_out_and_sent_nothing(tmp_path):
    wanted, grid = replace(budgeted(tmp_path, "drop_group"), evaluate_every=4), everyone(app=PLAIN)
    (variant,) = play_plain(grid, wanted).variants
    assert variant.rounds == 5
    asked = {m.content["order"]["level"] for m in grid.pushed if m.metadata.message_type == "evaluate"}
    assert asked == {"open", "strict"}
    rounds = {group.name: group.rounds for group in variant.groups}
    assert rounds == {"open": 5, "mid": 2, "strict": 5}
    late = {m.content["order"]["level"] for m in grid.pushed if trains([m]) and int(m.metadata.group_id) >= 2}
    assert late == {"open", "strict"}
    mid, strict = variant.groups[1:]
    assert (mid.sampling_rate, mid.rounds) == (1.0, 2)  # what it was promised, not what it has since
    assert "q 1," in mid.epsilon_basis
    with Ledger(wanted.ledger, read_only=True) as ledger:
        assert strict.epsilon == pytest.approx(compose(ledger.costs("strict"), 1e-4))


def test_what_a_group_that_is_left_out_was_owed_is_not_added_any_more(tmp_path):
    levels = {
        "mid": PrivacyLevel(sampling_rate=1.0, noise_multiplier=0.7),
        "strict": PrivacyLevel(sampling_rate=1.0, noise_multiplier=5.0),
    }
    two = Budget(compose([PrivacyCost(5.0, 1.0, "poisson", 2)], 1e-4) * 1.001, 1e-4)
    still = client_app(lambda context: Trainer(lambda parameters, personal, pull, round: (parameters, None)))
    model, moved = {"w": np.zeros(20_000, np.float32)}, []
    nodes = [Node(number, still, privacy=level) for number, level in enumerate(("mid", "strict"), 1)]
    others = {
        "budgets": {"strict": two},
        "on_budget_exhausted": "drop_group",
        "clip": 1.0,
        "rounds": 4,
        "levels": levels,
    }
    grid = InProcessGrid(nodes)
    grid.on_push = lambda messages: moved.append(read_order(messages[0])[0]["w"]) if trains(messages) else None
    wanted = deployment(tmp_path, **others, **UNSEEDED)
    serve(grid, wanted, model)
    noise = [np.std(after - before) for before, after in itertools.pairwise(moved)]
    last = np.std(model_of(wanted)["global/w"] - moved[-1])
    np.testing.assert_allclose([*noise, last], [2.5, 2.5, 0.7, 0.7], rtol=0.03)  # over both of them, then over one


# Coming late, and going on


def test_a_client_that_joins_late_takes_part_and_the_epsilons_of_both_mechanisms_add_up(tmp_path):
    levels = {name: replace(level, sampling_rate=1.0) for name, level in OFFER.items()}
    wanted, grid = deployment(tmp_path, levels=levels, rounds=4, **UNSEEDED), everyone(app=PLAIN)
    late = grid.nodes.pop(107)

    def join(messages):
        if trains(messages) and messages[0].metadata.group_id == "1":
            grid.nodes[107] = late

    grid.on_push = join
    (variant,) = play_plain(grid, wanted).variants
    rounds = [int(m.metadata.group_id) for m in late.heard if trains([m])]
    assert rounds == [2, 3]
    assert [group.clients for group in variant.groups] == [2, 3, 3]
    with Ledger(wanted.ledger, read_only=True) as ledger:
        assert [run.charged for run in ledger.runs()] == [2, 2]
        assert [run.mechanism.clients for run in ledger.runs()] == [7, 8]
        assert variant.groups[2].epsilon == pytest.approx(compose(ledger.costs("strict"), 1e-4))


@pytest.mark.parametrize("moment", ["while sending", "after the replies"])
def test_a_run_that_crashed_goes_on_to_the_same_model_and_what_was_sent_twice_is_charged_twice(
    tmp_path, moment, monkeypatch
):
    server = ServerOptimizer("adam", learning_rate=0.1, average=0.9)
    whole = deployment(tmp_path / "whole", rounds=5, server=server)
    broken = deployment(tmp_path / "broken", rounds=5, server=server)
    (tmp_path / "whole").mkdir(), (tmp_path / "broken").mkdir()
    play_plain(everyone(tmp_path / "whole", PLAIN), whole)
    grid = everyone(tmp_path / "broken", PLAIN)

    if moment == "while sending":
        grid.on_push = crash_in(2)
        with pytest.raises(Crash):
            play_plain(grid, broken)
    else:
        append = results.VariantDirectory.append_history

        def append_or_crash(self, rows):
            append(self, rows)
            if any(row.round == 3 for row in rows):
                raise Crash

        with monkeypatch.context() as patch:
            patch.setattr(results.VariantDirectory, "append_history", append_or_crash)
            with pytest.raises(Crash):
                play_plain(grid, broken)
    assert charged(broken) == 3
    again = everyone(tmp_path / "broken", PLAIN)
    again.nodes = {node.id + 1000: node for node in again.nodes.values()}  # other nodes, the same clients
    for id, node in again.nodes.items():
        node.id = id
    (variant,) = play_plain(again, broken).variants
    assert variant.rounds == 5
    assert charged(broken) == 6
    assert equal(model_of(whole), model_of(broken))
    assert [row for row in history_of(whole) if row.metric == "clip"] == [
        row for row in history_of(broken) if row.metric == "clip"
    ]
    assert held(broken) == LEVELS


def test_a_crash_in_the_first_round_of_a_newcomer_is_charged_under_a_name_of_its_own(tmp_path):
    levels = {name: replace(level, sampling_rate=1.0) for name, level in OFFER.items()}
    wanted, grid = deployment(tmp_path, levels=levels, rounds=4, **UNSEEDED), everyone(tmp_path, PLAIN)
    late = {id: grid.nodes.pop(id) for id in (106, 107)}

    def join_and_crash(messages):
        if trains(messages) and messages[0].metadata.group_id == "1":
            grid.nodes[107] = late[107]
        if trains(messages) and messages[0].metadata.group_id == "2":
            raise Crash

    grid.on_push = join_and_crash
    with pytest.raises(Crash):
        play_plain(grid, wanted)
    (variant,) = play_plain(everyone(tmp_path, PLAIN), wanted).variants
    assert [group.clients for group in variant.groups] == [2, 3, 3]
    with Ledger(wanted.ledger, read_only=True) as ledger:
        assert [(run.charged, run.mechanism.clients) for run in ledger.runs()] == [(2, 6), (1, 7), (2, 8)]
    assert variant.groups[2].rounds == 5
    assert "3 mechanisms composed" in variant.groups[2].epsilon_basis


def test_the_simulator_says_how_a_deployment_goes_on(tmp_path):
    wanted = deployment(tmp_path)
    play_plain(everyone(app=PLAIN), wanted)
    with pytest.raises(results.DamagedRunError, match="a deployment goes on when its ServerApp is submitted again"):
        resume(Path(wanted.out), lambda progress: True)


def test_a_folder_of_another_deployment_is_refused_and_a_finished_one_is_left_alone(tmp_path):
    wanted = deployment(tmp_path, rounds=1)
    first = play_plain(everyone(app=PLAIN), wanted)
    with pytest.raises(ValueError, match="holds a run of another deployment"):
        play_plain(everyone(app=PLAIN), replace(wanted, rounds=2))
    grid = everyone(app=PLAIN)
    patient = replace(wanted, reply_seconds=9.0, least_clients=2, ledger=str(tmp_path / "." / "ledger"))
    assert play_plain(grid, wanted) == play_plain(grid, patient) == first
    assert not grid.pushed


def test_a_checkpoint_of_another_model_is_refused_also_where_it_has_as_many_numbers(tmp_path):
    wanted, grid = deployment(tmp_path, rounds=3), everyone(tmp_path, PLAIN)
    grid.on_push = crash_in(2)
    with pytest.raises(Crash):
        play_plain(grid, wanted)
    scrambled = {"w": np.zeros(3, np.float32), "b": np.ones((2, 3), np.float32)}
    with pytest.raises(ValueError, match="the checkpoint is of another model"):
        serve(everyone(tmp_path, PLAIN), wanted, scrambled)


@pytest.mark.parametrize("model", [{}, {"w": np.array([0.0, np.nan], np.float32)}])
def test_a_model_that_cannot_start_is_refused_before_anything_is_kept(tmp_path, model):
    with pytest.raises(ValueError, match="start model must be of one array or more, all finite"):
        serve(everyone(app=PLAIN), deployment(tmp_path), model)
    assert not (tmp_path / "run").exists()


def test_a_folder_in_which_a_crash_left_the_runs_name_alone_is_begun_anew(tmp_path):
    wanted = deployment(tmp_path, rounds=1)
    play_plain(everyone(app=PLAIN), wanted)
    crashed = Path(wanted.out) / "run.json"
    (tmp_path / "other").mkdir()
    shutil.copy(crashed, tmp_path / "other" / "run.json")
    again = replace(wanted, out=str(tmp_path / "other"))
    assert play_plain(everyone(app=PLAIN), again).variants[0].rounds == 1


def test_a_node_is_one_client_however_many_identities_it_gives(tmp_path):
    many = Node(1, PLAIN, privacy="strict")
    wanted, grid = deployment(tmp_path, levels=ALWAYS, rounds=4), InProcessGrid([many, Node(2, PLAIN)])

    def forget(messages):
        for message in messages:
            if message.metadata.dst_node_id == 1:
                many.context.node_config["directory"] = str(tmp_path / f"folder {len(grid.pushed)}")

    grid.on_push = forget
    play_plain(grid, wanted)
    assert len(heard(many, "query")) == 2  # it declines what it was not asked about, and is asked again
    assert len(held(wanted)) == 2
    assert len(heard(many, "train")) == 1  # the first it declines, and then it is nobody who was promised anything


def test_what_a_client_says_is_one_line_in_the_log(tmp_path, caplog):
    grid = InProcessGrid([one_client(tmp_path)])
    grid.tamper = lambda message, reply, node: (
        [decline_message(message, read_order(message)[1], "no\nround 99/99: epsilon 0.001")]
        if trains([message])
        else [reply]
    )
    with caplog.at_level("INFO", "flwr"):
        play_plain(grid, deployment(tmp_path, levels=ALWAYS, rounds=1))
    said = [record.getMessage() for record in caplog.records if "declines" in record.getMessage()]
    assert said
    assert not any("\n" in line for line in said)


def test_an_older_ledger_than_the_checkpoint_is_refused(tmp_path):
    wanted, grid = deployment(tmp_path, rounds=3), everyone(tmp_path, PLAIN)

    grid.on_push = crash_in(2)
    with pytest.raises(Crash):
        play_plain(grid, wanted)
    Path(wanted.ledger).unlink()
    with pytest.raises(ValueError, match="only 0 are charged"):
        play_plain(everyone(tmp_path, PLAIN), wanted)


def test_an_older_ledger_is_refused_also_where_somebody_joins(tmp_path):
    levels = {name: replace(level, sampling_rate=1.0) for name, level in OFFER.items()}  # so that somebody is sent to
    wanted, old = deployment(tmp_path, levels=levels, rounds=4, **UNSEEDED), tmp_path / "old"
    grid = everyone(tmp_path, PLAIN)
    del grid.nodes[107]

    def crash(messages):
        if trains(messages) and messages[0].metadata.group_id == "1":
            shutil.copy(wanted.ledger, old)
        if trains(messages) and messages[0].metadata.group_id == "3":
            raise Crash

    grid.on_push = crash
    with pytest.raises(Crash):
        play_plain(grid, wanted)
    shutil.copy(old, wanted.ledger)
    with pytest.raises(ValueError, match="has completed 3 rounds, but only 2 are charged"):
        play_plain(everyone(tmp_path, PLAIN), wanted)


# The client's side


def heard(node: Node, kind: str) -> list[Message]:
    return [message for message in node.heard if message.metadata.message_type == kind]


def beside(node: Node) -> InProcessGrid:
    """A client and another without wishes, so that rounds go on when the first declines."""
    return InProcessGrid([node, Node(2, PLAIN, privacy="open")])


def sent_by(grid: InProcessGrid, node: Node) -> list[bool]:
    """Whether a client has sent an update, each time that it was asked to train."""
    updates: list[bool] = []
    grid.tamper = lambda message, reply, of: (
        (
            updates.append(reply.has_content() and "update" in reply.content)
            if of is node and trains([message])
            else None
        )
        or [reply]
    )
    return updates


def one_client(tmp_path, **config) -> Node:
    return Node(1, PLAIN, privacy="strict", directory=str(tmp_path / "me"), **config)


ALWAYS = {
    "strict": PrivacyLevel(sampling_rate=1.0, noise_multiplier=1.0),
    "open": PrivacyLevel(sampling_rate=1.0, noise_multiplier=0.0),
}


def test_a_reply_carries_the_update_and_the_scores_when_asked_and_nothing_else(tmp_path):
    wanted, grid, replies = (
        deployment(tmp_path, levels=ALWAYS, evaluate_every=2),
        InProcessGrid([one_client(tmp_path)]),
        [],
    )
    grid.tamper = lambda message, reply, node: (
        (replies.append((message, reply)) if trains([message]) else None) or [reply]
    )
    play_plain(grid, wanted)
    assert [set(reply.content) for _, reply in replies] == [{"order", "update"}] * 2 + [{"order", "update", "scores"}]
    for message, reply in replies:
        assert dict(reply.content["order"]) == {"token": message.content["order"]["token"]}
        assert set(reply.content["update"]) == set(PLAIN_MODEL)
    assert set(replies[-1][1].content["scores"]) == {"global", "personal"}


@pytest.mark.parametrize("said", [False, "false", "no", 0])
def test_an_owner_may_keep_scores_to_itself(tmp_path, said):
    wanted = deployment(tmp_path, levels=ALWAYS, evaluate_every=1)
    (variant,) = play_plain(InProcessGrid([one_client(tmp_path, scores=said)]), wanted).variants
    assert variant.groups[0].personal_accuracy is None
    assert variant.groups[0].refused == 0


def test_a_client_whose_budget_is_spent_tells_no_scores_either(tmp_path):
    node = one_client(tmp_path, epsilon=1e-4, scores=True)
    wanted = deployment(tmp_path, levels=ALWAYS, evaluate_every=1, **UNSEEDED)
    grid = beside(node)
    play_plain(grid, wanted)
    assert not heard(node, "train")  # it says so when it is asked, and is sent nothing
    assert not heard(node, "evaluate")
    (asked,) = heard(grid.nodes[2], "evaluate")
    asked.content["order"].update(level="strict", noise_multiplier=1.0)
    for charged in (0, 1, 3):  # whatever the server says was charged
        asked.content["order"]["charged"] = charged
        assert "declined" in node.answer(asked).content["order"]


def test_a_client_that_has_trained_as_often_as_its_budget_allows_tells_no_scores_whatever_is_said_to_be_charged(
    tmp_path,
):
    two = compose([PrivacyCost(1.0, 1.0, "poisson", 2)], 1e-5) * 1.001
    node = one_client(tmp_path, epsilon=two, scores=True)
    grid = beside(node)
    play_plain(grid, deployment(tmp_path, levels=ALWAYS, clip=1.0, evaluate_every=1, **UNSEEDED))
    assert len(heard(node, "train")) == 3  # the last of them is declined
    (asked,) = heard(node, "evaluate")
    for charged in (0, 2, 3):
        asked.content["order"]["charged"] = charged
        assert "declined" in node.answer(asked).content["order"]


def test_who_has_a_budget_tells_no_scores_unless_the_owner_says_so(tmp_path):
    told = []
    for name, config in {"not said": {}, "said": {"scores": True}}.items():
        node = one_client(tmp_path / name, epsilon=1000.0, **config)
        wanted = deployment(tmp_path, levels=ALWAYS, evaluate_every=1, out=str(tmp_path / name / "run"), **UNSEEDED)
        (variant,) = play_plain(InProcessGrid([node]), replace(wanted, ledger=str(tmp_path / name / "l"))).variants
        told.append(variant.groups[0].global_accuracy is not None)
    assert told == [False, True]


def test_a_budget_that_is_lowered_during_a_run_ends_the_clients_part_in_it(tmp_path):
    for name, config in {"lowered": {"epsilon": 1000.0}, "first": {}}.items():
        (tmp_path / name).mkdir()
        node = one_client(tmp_path / name, **config)
        grid = beside(node)
        updates = sent_by(grid, node)

        def lower(messages, node=node):
            if trains(messages) and messages[0].metadata.group_id == "1":
                node.context.node_config["epsilon"] = 0.5

        grid.on_push = lower
        play_plain(grid, deployment(tmp_path / name, levels=ALWAYS, rounds=4, **UNSEEDED))
        assert updates == [True, False]  # it declines, is asked, says that it is spent, and is sent nothing more


def test_a_client_with_a_budget_takes_no_part_in_a_run_from_seeds_and_one_without_counts_it_as_no_privacy(tmp_path):
    for name, config, sent in (("with", {"epsilon": 50.0}, 0), ("without", {}, 2)):
        node = one_client(tmp_path / name, **config)
        wanted = deployment(tmp_path / name, levels=ALWAYS, rounds=2, cohort_seed=None)
        (tmp_path / name).mkdir(exist_ok=True)
        play_plain(beside(node), wanted)
        replies = [row.value for row in history_of(wanted) if (row.group, row.metric) == ("strict", "replies")]
        assert sum(replies) == sent
        assert {
            noise for message in heard(node, "query") for noise in message.content["offer"]["noise_multiplier"]
        } == {0.0}
        assert {message.content["order"]["noise_multiplier"] for message in heard(node, "train")} <= {0.0}
    with Ledger(tmp_path / "without" / "me" / "client.ledger", read_only=True) as ledger:
        assert {multiplier for multiplier, *_ in ledger.costs("this client")} == {0.0}


def test_a_client_says_that_it_is_spent_by_the_servers_count_of_rounds_too(tmp_path):
    node = one_client(tmp_path, epsilon=compose([PrivacyCost(1.0, 0.5, "poisson", 5)], 1e-5) * 1.001)
    said = []
    for charged in (0, 4, 5, 6):
        reply = node.answer(ask_choice(1, Offer("run", charged, ["strict"], [1.0], [0.5], 20), 1.0))
        said.append(reply.content["choice"]["spent"])
    assert said == [False, False, True, True]


def test_a_personal_model_of_another_shape_is_an_error(tmp_path):
    def other(parameters, personal, pull, round):
        return parameters, {"w": personal["w"].reshape(-1), "b": personal["b"]}

    node = Node(1, client_app(lambda context: Trainer(other)), privacy="strict", directory=str(tmp_path / "me"))
    wanted = deployment(tmp_path, levels=ALWAYS, rounds=1)
    play_plain(InProcessGrid([node]), wanted)
    assert [row.value for row in history_of(wanted) if row.metric == "replies"] == [0.0]
    assert list((tmp_path / "me").glob("personal-*")) == []


def test_an_order_at_rate_zero_costs_nothing_and_is_declined(tmp_path):
    node = one_client(tmp_path, epsilon=0.01)
    offer = Offer("run", 0, ["strict"], [0.0], [0.0], 100)
    node.answer(ask_choice(1, offer, 1.0))
    order = Order("token", "run", 0, 1, "strict", 0.0, 0.0, 0.05)
    reply = node.answer(order_message("train", 1, as_record(PLAIN_MODEL), order, 1.0))
    assert "update" not in reply.content


@pytest.mark.parametrize(
    "offer",
    [
        {"level": ["open", "strict"], "noise_multiplier": [0.0, 5.0], "sampling_rate": [0.5, 0.5]},
        {"level": ["a", "a"], "noise_multiplier": [1.0, 1.0], "sampling_rate": [0.5, 0.5]},
        {"level": ["a", "b"], "noise_multiplier": [1.0], "sampling_rate": [0.5, 0.5]},
        {"level": ["a"], "noise_multiplier": [math.nan], "sampling_rate": [0.5]},
        {"level": ["a"], "noise_multiplier": [1.0], "sampling_rate": [1.5]},
        {"level": [], "noise_multiplier": [], "sampling_rate": []},
    ],
)
def test_an_offer_that_is_not_in_order_is_not_answered(tmp_path, offer):
    node = one_client(tmp_path)
    message = ask_choice(1, Offer("run", 0, ["strict"], [1.0], [0.5], 1), 1.0)
    message.content["offer"].update(offer)
    assert node.answer(message).has_error()
    assert Folder(tmp_path / "me").promises() == {}


def test_a_level_that_had_noise_is_not_trained_at_without_by_client_or_server(tmp_path):
    node, updates = one_client(tmp_path), []
    grid = InProcessGrid([node])
    grid.tamper = lambda message, reply, node: (
        (updates.append("update" in reply.content) if trains([message]) else None) or [reply]
    )
    wanted = deployment(tmp_path, levels=ALWAYS, rounds=1, **UNSEEDED)
    play_plain(grid, wanted)
    loose = {
        "strict": PrivacyLevel(sampling_rate=1.0, noise_multiplier=0.0),
        "open": PrivacyLevel(sampling_rate=1.0, noise_multiplier=5.0),
    }
    other = replace(wanted, levels=loose, out=str(tmp_path / "two"))
    with pytest.raises(ValueError, match="clients registered for 'strict' with noise"):
        play_plain(grid, other)
    play_plain(grid, replace(other, ledger=str(tmp_path / "another"), out=str(tmp_path / "three")))
    assert updates == [True, False]


def test_a_model_that_is_trained_in_place_is_sent_as_it_should_be(tmp_path):
    def in_place(context: Context) -> Trainer:
        def fit(parameters, personal, pull, round):
            for model, step in ((parameters, 0.5), (personal, 0.25)):
                for array in model.values():
                    array += step
            return parameters, personal

        return Trainer(fit)

    models = []
    for name, app in (("in place", client_app(in_place)), ("plain", PLAIN)):
        folder = tmp_path / name
        node = Node(1, app, privacy="strict", directory=str(folder / "me"))
        wanted = deployment(folder, levels=ALWAYS, rounds=2)
        folder.mkdir()
        play_plain(InProcessGrid([node]), wanted)
        models.append((model_of(wanted), Folder(folder / "me").personal(PLAIN_MODEL)))
    assert all(equal(one, other) for one, other in zip(*models))


def test_a_personal_model_that_is_not_finite_is_not_kept(tmp_path):
    def diverging(context: Context) -> Trainer:
        return Trainer(
            lambda parameters, personal, pull, round: (parameters, {k: v / round for k, v in personal.items()})
        )

    node = Node(1, client_app(diverging), privacy="strict", directory=str(tmp_path / "me"))
    with np.errstate(divide="ignore", invalid="ignore"):
        play_plain(InProcessGrid([node]), deployment(tmp_path, levels=ALWAYS, rounds=2))
    assert all(np.isfinite(array).all() for array in Folder(tmp_path / "me").personal(PLAIN_MODEL).values())


def test_the_personal_model_survives_a_restart_and_a_new_run(tmp_path):
    play_plain(InProcessGrid([one_client(tmp_path)]), deployment(tmp_path, levels=ALWAYS, rounds=2))
    personal = Folder(tmp_path / "me").personal(PLAIN_MODEL)
    np.testing.assert_allclose(personal["w"], np.full((2, 3), 0.5))
    play_plain(
        InProcessGrid([one_client(tmp_path)]), deployment(tmp_path, levels=ALWAYS, rounds=1, out=str(tmp_path / "two"))
    )
    np.testing.assert_allclose(Folder(tmp_path / "me").personal(PLAIN_MODEL)["w"], np.full((2, 3), 0.75))


def test_a_client_declines_rounds_once_its_own_budget_is_spent_whatever_the_server_says(tmp_path):
    three = compose([PrivacyCost(1.0, 1.0, "poisson", 3)], 1e-5)
    node = one_client(tmp_path, epsilon=three * 1.001, delta=1e-5)
    wanted = deployment(tmp_path, levels=ALWAYS, rounds=5, clip=1.0, **UNSEEDED)
    grid = beside(node)
    updates = sent_by(grid, node)
    (variant,) = play_plain(grid, wanted).variants
    assert updates == [True, True, True, False]  # and is sent nothing after that
    assert variant.groups[0].refused == 0
    Path(wanted.ledger).unlink()  # a server that has forgotten everything
    updates.clear()
    play_plain(grid, replace(wanted, out=str(tmp_path / "two")))
    assert updates == []
    last = heard(node, "train")[-1]  # one that takes no notice
    assert "declined" in node.answer(last).content["order"]


@pytest.mark.parametrize(("first", "then"), [(1.0, 100.0), (100.0, 1.0)])
def test_a_clients_budget_is_the_least_that_its_owner_ever_wanted(tmp_path, first, then):
    three = compose([PrivacyCost(1.0, 1.0, "poisson", 3)], 1e-5) * 1.001
    wanted, updates = deployment(tmp_path, levels=ALWAYS, rounds=2, clip=1.0, **UNSEEDED), []
    for factor, out in ((first, "one"), (then, "two")):
        node = one_client(tmp_path, epsilon=three * factor, delta=1e-5)
        grid = beside(node)
        sent = sent_by(grid, node)
        play_plain(grid, replace(wanted, out=str(tmp_path / out)))
        updates += sent
    assert updates == [True, True, True, False]


@pytest.mark.parametrize("rate", [0.4, 1e-6])
def test_a_client_counts_every_round_of_a_run_also_those_after_it_was_last_drawn(tmp_path, rate):
    node, levels = one_client(tmp_path), {"strict": PrivacyLevel(sampling_rate=rate, noise_multiplier=1.0)}
    for out in ("one", "two"):
        wanted = deployment(tmp_path, levels=levels, rounds=8, clip=1.0, out=str(tmp_path / out))
        play_plain(InProcessGrid([node]), wanted)
    assert len(heard(node, "train")) < 16
    with Ledger(tmp_path / "me" / "client.ledger", read_only=True) as ledger:
        assert sum(rounds for *_, rounds in ledger.costs("this client")) == 16


def test_a_client_that_is_sent_the_same_round_again_and_again_counts_each_of_them(tmp_path):
    wanted, node = deployment(tmp_path, levels=ALWAYS, rounds=2), one_client(tmp_path)
    play_plain(InProcessGrid([node]), wanted)
    message = heard(node, "train")[0]  # the server says that one round is charged
    assert all("update" in node.answer(message).content for _ in range(3))
    with Ledger(tmp_path / "me" / "client.ledger", read_only=True) as ledger:
        assert sum(rounds for *_, rounds in ledger.costs("this client")) == 5


def test_promises_of_two_runs_that_are_made_at_once_are_both_kept(tmp_path):
    kept, begun, order = Folder(tmp_path / "me"), threading.Event(), []

    def other() -> None:
        begun.set()
        with Folder(tmp_path / "me").alone():
            order.append("other")
            kept.keep_promises(kept.promises() | {"b": Promise(1.0, 0.1)})

    thread = threading.Thread(target=other)
    with kept.alone():
        mine = kept.promises() | {"a": Promise(1.0, 0.1)}
        thread.start()
        begun.wait()
        time.sleep(0.05)
        order.append("mine")
        kept.keep_promises(mine)
    thread.join()
    assert order == ["mine", "other"]
    assert set(kept.promises()) == {"a", "b"}


def test_a_client_counts_what_it_was_promised_and_is_not_told_what_others_choices_give_it(tmp_path):
    levels = {
        "strict": PrivacyLevel(sampling_rate=1.0, noise_multiplier=4.0),
        "relaxed": PrivacyLevel(sampling_rate=0.5, noise_multiplier=0.7),
    }
    node = Node(1, PLAIN, privacy="relaxed", directory=str(tmp_path / "me"))
    wanted, grid = deployment(tmp_path, levels=levels, rounds=12, clip=1.0, **UNSEEDED), InProcessGrid([node])

    def join(messages):
        if trains(messages) and int(messages[0].metadata.group_id) >= 5:
            grid.nodes[2] = grid.nodes.get(2) or Node(2, PLAIN, privacy="strict")

    grid.on_push = join
    play_plain(grid, wanted)
    orders = [dict(message.content["order"]) for message in heard(node, "train")]
    assert all(set(order) == set(orders[0]) for order in orders)
    assert {order["noise_multiplier"] for order in orders} == {0.7}
    with Ledger(tmp_path / "me" / "client.ledger", read_only=True) as ledger:
        ((multiplier, rate, _, rounds),) = ledger.costs("this client")
    assert (multiplier, rate, rounds) == (0.7, 0.5, 12)


def test_a_client_that_comes_late_does_not_count_the_rounds_before(tmp_path):
    grid = InProcessGrid([Node(2, PLAIN, privacy="strict")])

    def join(messages):
        if trains(messages) and messages[0].metadata.group_id == "3":
            grid.nodes[1] = one_client(tmp_path)

    grid.on_push = join
    play_plain(grid, deployment(tmp_path, levels=ALWAYS, rounds=6))
    with Ledger(tmp_path / "me" / "client.ledger", read_only=True) as ledger:
        assert sum(rounds for *_, rounds in ledger.costs("this client")) == 2


def test_a_client_whose_owner_wants_more_privacy_sends_nothing_from_then_on(tmp_path):
    node = Node(1, PLAIN, privacy="open", directory=str(tmp_path / "me"))
    grid, updates = InProcessGrid([node, Node(2, PLAIN, privacy="strict")]), []

    def turn_strict(messages):  # on the way to the second round, at the same node
        if trains(messages) and messages[0].metadata.group_id == "1":
            node.context.node_config["privacy"] = "strict"

    grid.on_push = turn_strict
    grid.tamper = lambda message, reply, of: (
        (updates.append("update" in reply.content) if of is node and trains([message]) else None) or [reply]
    )
    play_plain(grid, deployment(tmp_path, levels=ALWAYS, rounds=4))
    assert updates == [True, False]  # it declines, is asked what it wants, and is sent nothing more
    assert len(heard(node, "query")) == 2


def test_nothing_is_charged_while_nobody_can_be_reached(tmp_path, monkeypatch):
    wanted, grid = deployment(tmp_path, levels=ALWAYS, rounds=3), InProcessGrid([one_client(tmp_path)])
    away, waited = {}, []

    def vanish(messages):
        if trains(messages) and messages[0].metadata.group_id == "1" and not waited:
            away.update(grid.nodes)

    def come_back(seconds):
        if seconds == 1.0:
            waited.append(charged(wanted))
            if len(waited) == 3:
                grid.nodes = dict(away)

    grid.on_push = vanish
    monkeypatch.setattr("fedhdp.flower.registry.time.sleep", come_back)
    listen = Registry.listen

    def listen_or_lose(self, grid, again=False):
        if away and len(waited) < 3:
            grid.nodes = {}
        listen(self, grid, again)

    monkeypatch.setattr(Registry, "listen", listen_or_lose)
    (variant,) = play_plain(grid, wanted).variants
    assert waited == [2, 2, 2]
    assert (variant.rounds, charged(wanted)) == (3, 3)


def test_a_run_that_died_before_its_summary_is_not_run_again(tmp_path):
    wanted = deployment(tmp_path, rounds=2)
    first = play_plain(everyone(tmp_path, PLAIN), wanted)
    (Path(wanted.out) / results.SUMMARY).unlink()
    again = play_plain(everyone(tmp_path, PLAIN), wanted)
    assert again.variants == first.variants
    assert charged(wanted) == 2


def test_personal_models_of_several_kinds_are_kept_beside_each_other(tmp_path):
    folder, other = Folder(tmp_path / "me"), {"other": np.ones(2, np.float32)}
    folder.make_personal_store(other)
    play_plain(InProcessGrid([one_client(tmp_path)]), deployment(tmp_path, levels=ALWAYS, rounds=1))
    assert equal(folder.personal(other), other)
    assert set(folder.personal(PLAIN_MODEL)) == set(PLAIN_MODEL)
    assert folder.personal({"w": np.zeros(7)}) is None


def test_a_new_folder_is_its_owners_alone(tmp_path):
    assert Folder(tmp_path / "me").path.stat().st_mode & 0o777 == 0o700


def test_an_identity_is_made_while_no_other_process_can_make_one(tmp_path, monkeypatch):
    def made_alone(size: int) -> str:
        with open(tmp_path / "me" / ".lock", "w") as lock, pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return "ab" * size

    monkeypatch.setattr("fedhdp.flower.client_folder.secrets.token_hex", made_alone)
    reply = one_client(tmp_path).answer(ask_choice(1, Offer("run", 0, ["strict"], [1.0], [0.5], 1), 1.0))
    assert reply.content["choice"]["client"] == "ab" * 16


def test_a_client_that_does_not_say_is_promised_the_strictest_level_also_where_another_has_more_noise(tmp_path):
    levels = {
        "rare": PrivacyLevel(sampling_rate=0.01, noise_multiplier=0.9),
        "often": PrivacyLevel(sampling_rate=1.0, noise_multiplier=1.0),
    }
    wanted = deployment(tmp_path, levels=levels, rounds=1, **UNSEEDED)
    assert wanted.strictest == "rare"
    play_plain(InProcessGrid([Node(1, PLAIN, directory=str(tmp_path / "me"))]), wanted)
    (promise,) = Folder(tmp_path / "me").promises().values()
    assert (promise.noise_multiplier, promise.sampling_rate) == (0.9, 0.01)


def test_half_a_budget_is_an_error_and_nothing_is_sent(tmp_path):
    node, wanted = one_client(tmp_path), deployment(tmp_path, levels=ALWAYS, rounds=1)
    play_plain(InProcessGrid([node]), wanted)
    reply = one_client(tmp_path, delta=1e-5).answer(heard(node, "train")[0])
    assert "a delta and no epsilon" in reply.error.reason


def test_a_budget_without_a_place_to_count_in_means_that_nothing_is_sent(tmp_path):
    node = Node(1, PLAIN, privacy="strict", epsilon=100.0)
    grid = beside(node)
    play_plain(grid, deployment(tmp_path, levels=ALWAYS))
    assert heard(node, "train") == []
    (asked, *_) = heard(grid.nodes[2], "train")
    asked.content["order"].update(level="strict")
    assert "update" not in node.answer(asked).content


@pytest.mark.parametrize("change", [{"noise_multiplier": 0.5}, {"sampling_rate": 1.5}])
def test_a_client_declines_a_round_that_is_looser_than_it_was_promised(tmp_path, change):
    wanted, node = deployment(tmp_path, levels=ALWAYS, rounds=2, **UNSEEDED), one_client(tmp_path)
    grid, answered = InProcessGrid([node]), []

    def loosen(messages):
        for message in messages:
            if trains([message]) and message.metadata.group_id == "1":
                message.content["order"].update(change)

    grid.on_push = loosen
    grid.tamper = lambda message, reply, node: (
        (answered.append("update" in reply.content) if trains([message]) else None) or [reply]
    )
    play_plain(grid, wanted)
    assert answered == [True, False]


@pytest.mark.parametrize("noise", [0.999, 0.0, math.nan])
def test_a_client_takes_no_noise_that_is_less_or_no_number(noise):
    promise = Promise(1.0, 0.5, levels=["strict"])
    promises = {"run": promise}
    order = Order("token", "run", 0, 1, "strict", 1.0, 0.5, 0.05)
    assert check(order, promises, "strict") == promise
    for looser in (replace(order, noise_multiplier=noise), replace(order, sampling_rate=0.5 + max(noise, 1e-6))):
        with pytest.raises(Declined, match="less privacy than was promised"):
            check(looser, promises, "strict")
    with pytest.raises(Declined, match="less privacy than was promised"):
        check(replace(order, sampling_rate=math.nan), promises, "strict")


def test_what_a_client_was_promised_first_holds_when_it_is_asked_again(tmp_path):
    wanted, node = deployment(tmp_path, levels=ALWAYS, rounds=1, **UNSEEDED), one_client(tmp_path)
    play_plain(InProcessGrid([node]), wanted)
    first = Folder(tmp_path / "me").promises()
    (question,) = heard(node, "query")
    question.content["offer"]["noise_multiplier"] = [0.1, 0.0]
    node.answer(question)
    assert Folder(tmp_path / "me").promises() == first
    assert next(iter(first.values())).noise_multiplier == 1.0


def test_after_a_crash_before_the_last_scores_clients_are_told_what_was_charged(tmp_path):
    wanted, grid = deployment(tmp_path, levels=ALWAYS, evaluate_every=3, **UNSEEDED), everyone(tmp_path, PLAIN)

    def crash(messages):
        if any(message.metadata.message_type == "evaluate" for message in messages):
            raise Crash

    grid.on_push = crash
    with pytest.raises(Crash):
        play_plain(grid, wanted)
    grid.on_push = lambda messages: None
    grid.pushed.clear()
    play_plain(grid, wanted)
    asked = [m.content["order"]["charged"] for m in grid.pushed if m.metadata.message_type == "evaluate"]
    assert asked
    assert set(asked) == {charged(wanted)} == {3}


def test_a_pull_at_which_personal_models_run_away_is_not_deployed(tmp_path):
    with pytest.raises(ValueError, match=r"pull of 'strict' must be below .* personal models run away"):
        deployment(tmp_path, levels={"strict": PrivacyLevel(sampling_rate=1.0, noise_multiplier=1.0, pull=100.0)})


def test_a_client_that_was_never_asked_declines(tmp_path):
    wanted, node = deployment(tmp_path, levels=ALWAYS, rounds=1), one_client(tmp_path)
    grid = InProcessGrid([node])
    play_plain(grid, wanted)
    (message,) = heard(node, "train")
    (tmp_path / "me" / "promises.json").unlink()
    assert "was not asked in this run" in node.answer(message).content["order"]["declined"]


# Configuration and files


def test_a_deployment_is_read_from_flat_keys_and_what_is_wrong_is_named():
    flat_keys = {
        "out": "runs/one",
        "ledger": "population.ledger",
        "rounds": 5,
        "clip.initial": 0.5,
        "levels.opted out.epsilon": math.inf,
        "levels.opted out.sampling-rate": 0.5,
        "levels.strict.noise-multiplier": 1.0,
        "levels.strict.sampling-rate": 0.5,
        "training.epochs": 2,
        "app.data": "the app's own",
    }
    read = from_run_config(flat_keys)
    assert read.levels["opted out"] == PrivacyLevel(sampling_rate=0.5, epsilon=math.inf)
    assert read.training.epochs == 2
    assert read.strictest == "strict"
    with pytest.raises(ValueError, match=r"run_config: unknown field training\.epoch = 3; did you mean epochs\?"):
        from_run_config(flat_keys | {"training.epoch": 3})
    with pytest.raises(ValueError, match="either a noise_multiplier or an epsilon"):
        from_run_config(flat_keys | {"levels.strict.epsilon": 3.0})
    with pytest.raises(ValueError, match="rounds must be at least 1, got 0"):
        from_run_config(flat_keys | {"rounds": 0})


def test_a_deployments_folder_reads_like_a_simulations(tmp_path):
    wanted = deployment(tmp_path, evaluate_every=1)
    score = score_with(MODEL, POPULATION.server_x_N, POPULATION.server_y_N)
    summary = serve(everyone(), wanted, start_model(MODEL, SEED), score)
    assert results.read_value(Path(wanted.out) / results.SUMMARY, Summary) == summary
    assert results.VariantDirectory(Path(wanted.out) / "fedhdp").result() == summary.variants[0]
    assert summary.variants[0].server_accuracy == pytest.approx(
        score({name.removeprefix("global/"): array for name, array in model_of(wanted).items()})
    )
    assert {row.metric for row in history_of(wanted)} >= {"clip", "drawn", "sent", "replies", "refused", "epsilon"}
    assert not (Path(wanted.out) / "fedhdp" / results.CHECKPOINT).exists()
    assert json.loads((Path(wanted.out) / results.RUN).read_text())["id"].startswith("run-")


def test_the_servers_own_test_set_is_looked_at_without_asking_clients(tmp_path):
    wanted, grid = deployment(tmp_path, score_every=1), everyone(app=PLAIN)
    serve(grid, wanted, PLAIN_MODEL, lambda arrays: float(arrays["w"].mean()))
    looked = [row.round for row in history_of(wanted) if (row.group, row.metric) == (SERVER, "accuracy")]
    assert looked == [1, 2, 3]
    assert not any(message.content["order"]["evaluate"] for message in grid.pushed if trains([message]))


def test_a_model_that_is_no_dictionary_is_refused_in_words(tmp_path):
    with pytest.raises(TypeError, match="a dictionary of named NumPy arrays, not a list"):
        serve(everyone(app=PLAIN), deployment(tmp_path), list(PLAIN_MODEL.values()))


def test_a_model_goes_into_a_row_and_back():
    assert equal(unflat(flat(PLAIN_MODEL), PLAIN_MODEL), PLAIN_MODEL)

"""Replies that do not count, and how they are counted."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedhdp[flower]'")

from flower_helpers import (
    FIRST_NODE,
    JAX_APP,
    LEVEL_OF,
    LEVELS,
    PLAIN_MODEL,
    TWO_LEVELS,
    Crash,
    InProcessGrid,
    Node,
    before_round,
    crash,
    is_equal,
    is_train,
    is_train_of,
    make_deployment,
    make_grid,
    plain_node,
    run_jax,
    run_plain,
    saved_history,
    saved_model,
    saved_values,
    set_flower_internals,
    strict_node,
    with_records,
)
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from helpers import raises_field

from fedhdp.flower import Arrays, Trainer, client_app
from fedhdp.flower.protocol import LevelOffer, decline_message, flatten, parse_request, unflatten
from fedhdp.mechanism import SERVER
from fedhdp.privacy.calibration import PrivacyLevel


def only_records(reply: Message, *names: str) -> Message:
    return Message(content=RecordDict({name: reply.content[name] for name in names}), metadata=reply.metadata)


def with_arrays(reply: Message, **arrays: np.ndarray | Array) -> Message:
    """The reply with some arrays of its update replaced; ``first_w`` stands for ``first/w``."""
    update = dict(reply.content.array_records["update"].items())
    for name, array in arrays.items():
        update[name.replace("_", "/")] = array if isinstance(array, Array) else Array(array)
    return with_records(reply, update=ArrayRecord(update))


def encoded(content: bytes) -> Array:
    return Array(dtype="float32", shape=(12, 5), stype="numpy.ndarray", data=content)


def header(shape: str, dtype: str = "'<f4'") -> bytes:
    text = f"{{'descr': {dtype}, 'fortran_order': False, 'shape': {shape}, }}".ljust(117).encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text


ZEROS = np.zeros((12, 5), np.float32)
INVALID_REPLIES = {
    "not a number": (lambda reply: with_arrays(reply, first_w=ZEROS * math.nan), "not finite"),
    "infinite": (lambda reply: with_arrays(reply, first_w=ZEROS + math.inf), "not finite"),
    "transposed": (lambda reply: with_arrays(reply, first_w=ZEROS.T), "wrong shape"),
    "too large": (lambda reply: with_arrays(reply, first_w=np.zeros((1000, 1000), np.float32)), "wrong shape"),
    "huge by its header": (
        lambda reply: with_arrays(reply, first_w=encoded(header("(9999999999, 99)"))),
        "wrong shape",
    ),
    "longer than its header": (
        lambda reply: with_arrays(reply, first_w=encoded(header("(12, 5)") + bytes(4 * 60 + 100_000))),
        "wrong shape",
    ),
    "float64": (lambda reply: with_arrays(reply, first_w=ZEROS.astype(np.float64)[:, :2]), "wrong dtype"),
    "int32": (lambda reply: with_arrays(reply, first_w=ZEROS.astype(np.int32)), "wrong dtype"),
    "no array": (lambda reply: with_arrays(reply, first_w=encoded(b"rubbish")), "malformed"),
    "pickled objects": (lambda reply: with_arrays(reply, first_w=encoded(header("(12, 5)", "'|O' "))), "wrong dtype"),
    "extra array": (lambda reply: with_arrays(reply, extra=ZEROS), "malformed"),
    "no update": (lambda reply: only_records(reply, "request"), "malformed"),
    "no records": (lambda reply: only_records(reply), "malformed"),
    "unrequested scores": (
        lambda reply: with_records(reply, scores=MetricRecord({"global/accuracy": 1.0})),
        "malformed",
    ),
    "wrong token": (lambda reply: with_records(reply, request=ConfigRecord({"token": "0" * 16})), "replayed"),
}


def is_round_1_of(client: int, message: Message, node: Node) -> bool:
    return is_train_of(message, 1) and node.id == FIRST_NODE + client


@pytest.fixture(scope="module")
def absent_client(tmp_path_factory):
    """A client that is sampled in round 1, and the final model when its reply of that round is lost."""
    complete, lossy = (make_deployment(tmp_path_factory.mktemp(name)) for name in ("complete", "lossy"))
    grid = make_grid(app=JAX_APP)
    run_jax(grid, complete)
    client = next(m.metadata.dst_node_id - FIRST_NODE for m in grid.pushed if is_train_of(m, 1))
    grid = make_grid(app=JAX_APP)
    grid.tamper = lambda message, reply, node: [] if is_round_1_of(client, message, node) else [reply]
    run_jax(grid, lossy)
    assert not is_equal(saved_model(complete), saved_model(lossy))
    return client, saved_model(lossy)


@pytest.mark.parametrize("name", INVALID_REPLIES)
def test_invalid_reply_counts_as_absent(tmp_path, absent_client, name):
    make_invalid, kind = INVALID_REPLIES[name]
    client, model = absent_client
    deployment, grid = make_deployment(tmp_path), make_grid(app=JAX_APP)
    grid.tamper = lambda message, reply, node: [make_invalid(reply) if is_round_1_of(client, message, node) else reply]
    (variant,) = run_jax(grid, deployment).variants
    assert is_equal(saved_model(deployment), model)
    assert {group.name: group.refused for group in variant.groups if group.refused} == {LEVEL_OF[client]: 1}
    rows = [row for row in saved_history(deployment) if row.metric.startswith("refused:")]
    assert {(row.group, row.metric, row.value) for row in rows} == {(LEVEL_OF[client], f"refused: {kind}", 1.0)}


@pytest.mark.parametrize("arithmetic", ["float32", "exact"])
def test_finite_update_whose_norm_overflows(tmp_path, absent_client, arithmetic):
    """In single precision it is absent. Exact arithmetic has its norm, and clips it as any other."""
    client, _ = absent_client

    def model_and_refused(name: str, tampered: Callable[[Message], list[Message]]) -> tuple[Arrays, int]:
        deployment, grid = make_deployment(tmp_path / name, arithmetic=arithmetic), make_grid(app=JAX_APP)
        grid.tamper = lambda message, reply, node: tampered(reply) if is_round_1_of(client, message, node) else [reply]
        (variant,) = run_jax(grid, deployment).variants
        return saved_model(deployment), sum(group.refused for group in variant.groups)

    def constant(value: float) -> Callable[[Message], list[Message]]:
        return lambda reply: [with_arrays(reply, first_w=ZEROS + np.float32(value), first_b=np.zeros(5, np.float32))]

    overflowing, refused = model_and_refused("overflowing", constant(2.0**127))
    absent, _ = model_and_refused("absent", lambda reply: [])
    large, _ = model_and_refused("large", constant(2.0**40))
    assert refused == (arithmetic == "float32")
    assert is_equal(overflowing, absent if arithmetic == "float32" else large)
    assert not is_equal(absent, large)


def add_unsolicited(message: Message, reply: Message, node: Node) -> list[Message]:
    """Beside each training reply another one, to a message that was never sent."""
    if not is_train(message):
        return [reply]
    unsent = Message(RecordDict(), 1, "train")
    set_flower_internals(unsent, "a message of another run")
    return [reply, Message(reply.content, reply_to=unsent)]


def test_unsolicited_reply_is_refused(tmp_path):
    reference, deployment = make_deployment(tmp_path / "reference"), make_deployment(tmp_path / "other")
    run_jax(make_grid(app=JAX_APP), reference)
    grid = make_grid(app=JAX_APP)
    grid.tamper = add_unsolicited
    run_jax(grid, deployment)
    assert is_equal(saved_model(reference), saved_model(deployment))
    sent = sum(sum(saved_values(deployment, level, "sent")) for level in LEVELS)
    assert saved_values(deployment, SERVER, "refused: replayed")[-1] == sent > 0


def test_refusals_survive_a_crash(tmp_path):
    deployment, grid = make_deployment(tmp_path, levels=TWO_LEVELS), make_grid(tmp_path)
    grid.tamper = add_unsolicited
    grid.on_push = before_round(2, crash)
    with pytest.raises(Crash):
        run_plain(grid, deployment)
    grid.on_push = lambda messages: None
    run_plain(grid, deployment)
    clients = len(grid.nodes)
    assert saved_values(deployment, SERVER, "refused: replayed") == [clients, 2 * clients, 3 * clients]


def test_duplicate_reply_is_refused(tmp_path):
    reference, deployment = make_deployment(tmp_path / "reference"), make_deployment(tmp_path / "other")
    run_jax(make_grid(app=JAX_APP), reference)
    grid = make_grid(app=JAX_APP)
    grid.tamper = lambda message, reply, node: [reply, reply] if is_train(message) else [reply]
    (variant,) = run_jax(grid, deployment).variants
    assert is_equal(saved_model(reference), saved_model(deployment))
    sent = sum(sum(saved_values(deployment, level, "sent")) for level in LEVELS)
    assert sum(group.refused for group in variant.groups) == sent > 0


def test_reply_of_an_earlier_round_is_refused(tmp_path, absent_client):
    client, model = absent_client
    deployment, grid, first_replies = make_deployment(tmp_path), make_grid(app=JAX_APP), {}

    def tamper(message: Message, reply: Message, node: Node) -> list[Message]:
        if is_train_of(message, 0):
            first_replies[node.id] = reply
        if not is_round_1_of(client, message, node):
            return [reply]
        earlier = first_replies.get(node.id) or next(iter(first_replies.values()))
        return [Message(content=earlier.content, metadata=reply.metadata)]

    grid.tamper = tamper
    (variant,) = run_jax(grid, deployment).variants
    assert is_equal(saved_model(deployment), model)
    assert sum(group.refused for group in variant.groups) == 1


def test_failing_client_counts_as_absent(tmp_path, absent_client):
    client, model = absent_client
    deployment, grid = make_deployment(tmp_path), make_grid(app=JAX_APP)
    without_data = Node(FIRST_NODE + client, JAX_APP)  # its app raises
    grid.tamper = lambda message, reply, node: (
        [without_data.answer(message)] if is_round_1_of(client, message, node) else [reply]
    )
    (variant,) = run_jax(grid, deployment).variants
    assert is_equal(saved_model(deployment), model)
    assert sum(group.refused for group in variant.groups) == 0


def test_server_clips_every_update(tmp_path):
    def unclipped(context):
        return Trainer(lambda parameters, *_: ({name: array + 1e6 for name, array in parameters.items()}, None))

    levels = {"open": PrivacyLevel(sampling_rate=1.0, noise_multiplier=0.0)}
    deployment = make_deployment(tmp_path, levels=levels, clip=0.1, rounds=1)
    run_plain(InProcessGrid([Node(1, client_app(unclipped))]), deployment)
    model = {name.removeprefix("global/"): array for name, array in saved_model(deployment).items()}
    update_P = flatten({name: model[name] for name in PLAIN_MODEL}) - flatten(PLAIN_MODEL)
    assert np.linalg.norm(update_P) == pytest.approx(0.1, rel=1e-4)


def test_decline_reason_is_one_log_line(tmp_path, caplog):
    def tamper(message: Message, reply: Message, node: Node) -> list[Message]:
        if not is_train(message):
            return [reply]
        return [decline_message(message, parse_request(message)[1], "no\nround 99/99: epsilon 0.001")]

    grid = InProcessGrid([strict_node(tmp_path)])
    grid.tamper = tamper
    with caplog.at_level("INFO", "flwr"):
        run_plain(grid, make_deployment(tmp_path, levels=TWO_LEVELS, rounds=1))
    lines = [record.getMessage() for record in caplog.records if "declines" in record.getMessage()]
    assert lines
    assert not any("\n" in line for line in lines)


def test_malformed_enrollment_gets_the_strictest_level(tmp_path):
    grid = InProcessGrid([plain_node(1, privacy="open")])
    grid.tamper = lambda message, reply, node: [
        reply if is_train(message) else with_records(reply, enrollment=ConfigRecord({"level": 3, "client_id": "a/b"}))
    ]
    run_plain(grid, make_deployment(tmp_path, levels=TWO_LEVELS, rounds=1))
    assert {message.content["request"]["level"] for message in grid.pushed_of("train")} == {"strict"}


@pytest.mark.parametrize(
    ("field", "levels", "noise_multipliers", "sampling_rates"),
    [
        ("levels", ["open", "strict"], [0.0, 5.0], [0.5, 0.5]),
        ("levels", ["a", "a"], [1.0, 1.0], [0.5, 0.5]),
        ("levels", ["a", "b"], [1.0], [0.5, 0.5]),
        ("levels", [], [], []),
        ("noise_multipliers", ["a"], [math.nan], [0.5]),
        ("sampling_rates", ["a"], [1.0], [1.5]),
    ],
)
def test_offer_is_validated(field, levels, noise_multipliers, sampling_rates):
    with raises_field(field):
        LevelOffer("run", 0, levels, noise_multipliers, sampling_rates, 1)


def test_flatten_and_unflatten_are_inverse():
    assert is_equal(unflatten(flatten(PLAIN_MODEL), PLAIN_MODEL), PLAIN_MODEL)

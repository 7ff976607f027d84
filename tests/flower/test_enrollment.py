"""Which level a client is enrolled at, and who is admitted."""

from __future__ import annotations

import math

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedhdp[flower]'")

from flower_helpers import (
    LEVELS,
    TWO_LEVELS,
    InProcessGrid,
    Node,
    before_round,
    charged_rounds,
    make_deployment,
    open_ledger,
    plain_node,
    registered_levels,
    run_plain,
    strict_node,
)
from flwr.app import ConfigRecord, Message, RecordDict
from msgspec.structs import replace

from fedhdp.flower.registry import Registry
from fedhdp.privacy.calibration import PrivacyLevel

ALWAYS_SAMPLED = {name: replace(level, sampling_rate=1.0) for name, level in LEVELS.items()}


def test_default_is_the_strictest_level(tmp_path):
    deployment = make_deployment(tmp_path)
    grid = InProcessGrid([plain_node(1), plain_node(2, privacy="ultra"), plain_node(5, privacy="open")])
    run_plain(grid, deployment)
    assert sorted(registered_levels(deployment)) == ["open", "strict", "strict"]


def test_a_level_of_a_million_letters_is_not_logged(tmp_path, monkeypatch):
    lines = []
    monkeypatch.setattr("fedhdp.flower.registry.log", lambda level, text, *values: lines.append(text % values))
    deployment = make_deployment(tmp_path)
    run_plain(InProcessGrid([plain_node(1, privacy="a\n" * 500_000), plain_node(2)]), deployment)
    assert registered_levels(deployment) == ["strict", "strict"]
    assert max(map(len, lines)) < 1000
    assert "\n" not in "".join(lines)


def test_strictest_level_has_the_smallest_epsilon(tmp_path):
    levels = {
        "b": PrivacyLevel(sampling_rate=0.5, noise_multiplier=1.0),
        "a": PrivacyLevel(sampling_rate=0.05, noise_multiplier=1.0),
        "c": PrivacyLevel(sampling_rate=0.5, epsilon=math.inf),
    }
    assert make_deployment(tmp_path, levels=levels).levels_by_strictness == ("a", "b", "c")


def test_level_is_never_loosened(tmp_path):
    def grid_of(**level_of: str) -> InProcessGrid:
        clients = enumerate(level_of.items(), 1)
        return InProcessGrid(
            plain_node(i, privacy=level, directory=str(tmp_path / name)) for i, (name, level) in clients
        )

    first = make_deployment(tmp_path, levels=ALWAYS_SAMPLED, rounds=1)
    second = replace(first, out=str(tmp_path / "second"))
    run_plain(grid_of(anna="strict", ben="open", cleo="mid"), first)
    grid = grid_of(anna="open", ben="strict", cleo="mid")
    run_plain(grid, second)
    assert registered_levels(second) == ["strict", "open", "mid"]
    requests = {m.metadata.dst_node_id: m.content["request"]["level"] for m in grid.pushed_of("train")}
    assert requests == {1: "strict", 3: "mid"}  # ben wants more privacy than his updates had, so he is left alone


def test_node_that_disconnects_is_not_enrolled(tmp_path):
    deployment = make_deployment(tmp_path)
    grid = InProcessGrid([plain_node(1, privacy="open"), plain_node(2)])
    grid.tamper = lambda message, reply, node: [] if node.id == 2 else [reply]
    with open_ledger(deployment.ledger, read_only=False) as ledger:
        registry = Registry(deployment, ledger, "run")
        registry.poll(grid)
        del grid.nodes[2]
        registry.wait_for_clients(grid)
        assert list(registry.members.values()) == ["open"]


def test_client_id_cannot_be_a_node(tmp_path):
    deployment = make_deployment(tmp_path)
    grid = InProcessGrid([plain_node(1), plain_node(2)])

    def tamper(message: Message, reply: Message, node: Node) -> list[Message]:
        impostor = RecordDict({"enrollment": ConfigRecord({"client_id": "node 1"})})
        return [Message(content=impostor, metadata=reply.metadata) if node.id == 2 else reply]

    grid.tamper = tamper
    with open_ledger(deployment.ledger, read_only=False) as ledger:
        registry = Registry(deployment, ledger, "run")
        registry.poll(grid)
        assert registry.node_of == {"node 1": 1, "node 2": 2}


def test_client_is_recognized_after_a_restart(tmp_path):
    deployment = make_deployment(tmp_path, rounds=1)
    node, copy = (plain_node(id, privacy="open", directory=str(tmp_path / "client")) for id in (1, 2))
    grid = InProcessGrid([node, copy])
    with open_ledger(deployment.ledger, read_only=False) as ledger:
        registry = Registry(deployment, ledger, "run")
        registry.poll(grid)
        assert list(registry.node_of.values()) == [1]  # the copy is not admitted while the client is connected
        del grid.nodes[1]
        registry.poll(grid)
        assert list(registry.node_of.values()) == [2]
        assert len(registry.members) == 1


def test_node_is_one_client(tmp_path):
    changing = plain_node(1, privacy="strict")
    deployment = make_deployment(tmp_path, levels=TWO_LEVELS, rounds=4)
    grid = InProcessGrid([changing, plain_node(2)])

    def on_push(messages: list[Message]) -> None:
        for message in messages:
            if message.metadata.dst_node_id == 1:
                changing.context.node_config["directory"] = str(tmp_path / f"directory {len(grid.pushed)}")

    grid.on_push = on_push
    run_plain(grid, deployment)
    assert len(changing.received_of("query")) == 2  # it declines what it was promised nothing for
    assert len(registered_levels(deployment)) == 2
    assert len(changing.received_of("train")) == 1


def test_client_with_a_stricter_request_is_sent_nothing(tmp_path):
    node = plain_node(1, privacy="open", directory=str(tmp_path / "client"))
    grid, has_update = InProcessGrid([node, plain_node(2, privacy="strict")]), []

    def tamper(message: Message, reply: Message, sender: Node) -> list[Message]:
        if sender is node and message.metadata.message_type == "train":
            has_update.append("update" in reply.content)
        return [reply]

    grid.tamper = tamper
    grid.on_push = before_round(1, lambda: node.context.node_config.update(privacy="strict"))
    run_plain(grid, make_deployment(tmp_path, levels=TWO_LEVELS, rounds=4))
    assert has_update == [True, False]
    assert len(node.received_of("query")) == 2


def test_nothing_is_charged_while_no_client_is_reachable(tmp_path, monkeypatch):
    deployment = make_deployment(tmp_path, levels=TWO_LEVELS)
    grid, charged, disconnected = InProcessGrid([strict_node(tmp_path)]), [], {}
    poll = Registry.poll

    def disconnect() -> None:
        if not charged:
            disconnected.update(grid.nodes)

    def poll_without_nodes(self, grid: InProcessGrid) -> None:
        if disconnected and len(charged) < 3:
            grid.nodes = {}
        poll(self, grid)

    def sleep(seconds: float) -> None:
        if seconds == 1.0:
            charged.append(charged_rounds(deployment))
            if len(charged) == 3:
                grid.nodes = dict(disconnected)

    grid.on_push = before_round(1, disconnect)
    monkeypatch.setattr("fedhdp.flower.registry.time.sleep", sleep)
    monkeypatch.setattr(Registry, "poll", poll_without_nodes)
    (variant,) = run_plain(grid, deployment).variants
    assert charged == [2, 2, 2]
    assert (variant.rounds, charged_rounds(deployment)) == (3, 3)


def levels_of(registry: Registry, grid: InProcessGrid) -> list[str]:
    registry.poll(grid)
    return sorted(registry.members.values())


def test_a_full_level_admits_no_new_client_and_every_known_one(tmp_path):
    deployment = make_deployment(tmp_path, max_clients={"open": 2})
    nodes = [plain_node(i, privacy="open", directory=str(tmp_path / str(i))) for i in range(1, 6)]
    with open_ledger(deployment.ledger, read_only=False) as ledger:
        assert levels_of(Registry(deployment, ledger, "run"), InProcessGrid(nodes)) == ["open", "open"]
        strict = plain_node(9, privacy="strict")
        registry = Registry(deployment, ledger, "second")
        assert levels_of(registry, InProcessGrid([*nodes, strict])) == ["open", "open", "strict"]
        assert ledger.clients("open") == 2


def test_clients_beyond_an_hours_registrations_wait(tmp_path, monkeypatch):
    deployment = make_deployment(tmp_path, max_registrations_per_hour=2)
    now = 1e6
    monkeypatch.setattr("fedhdp.flower.registry.time.monotonic", lambda: now)
    grid = InProcessGrid(plain_node(i, privacy="open") for i in range(1, 6))
    with open_ledger(deployment.ledger, read_only=False) as ledger:
        registry = Registry(deployment, ledger, "run")
        sizes = []
        for hour in range(4):
            now = 1e6 + hour * 3600
            sizes.append(len(levels_of(registry, grid)))
            now += 1800
            assert len(levels_of(registry, grid)) == sizes[-1]
        assert sizes == [2, 4, 5, 5]


def test_nodes_that_are_not_allowed_are_sent_nothing(tmp_path):
    deployment = make_deployment(tmp_path, allowed_nodes=(1, 3))
    grid = InProcessGrid(plain_node(i) for i in range(1, 5))
    with open_ledger(deployment.ledger, read_only=False) as ledger:
        assert len(levels_of(Registry(deployment, ledger, "run"), grid)) == 2
    assert {message.metadata.dst_node_id for message in grid.pushed} == {1, 3}

"""Nodes that are slow, absent, late or silent: when they are queried again, and what a run that waits says."""

from __future__ import annotations

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedhdp[flower]'")

from flower_helpers import (
    PRIVATE,
    TWO_LEVELS,
    Clock,
    Node,
    SlowGrid,
    charged_rounds,
    is_train,
    ledger_costs,
    make_deployment,
    open_ledger,
    plain_node,
    registered_levels,
    run_plain,
)
from flwr.app import Error, Message
from flwr.clientapp import ClientApp

from fedhdp.flower import Deployment
from fedhdp.flower import protocol as protocol_module
from fedhdp.flower import registry as registry_module
from fedhdp.privacy.ledger import Budget

SECONDS = 10.0  # to answer the first query


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(registry_module, "time", clock)
    monkeypatch.setattr(protocol_module, "time", clock)
    return clock


def deployment_of(tmp_path, **changes) -> Deployment:
    fields = {"levels": TWO_LEVELS, "enroll_timeout_seconds": SECONDS, "reply_timeout_seconds": 60.0, **PRIVATE}
    return make_deployment(tmp_path, **(fields | changes))


def seconds_of(kind: str, **seconds_of_node: float):
    """The time that nodes take for messages of a type; ``node_2=30.0``."""

    def seconds(message: Message) -> float:
        is_kind = message.metadata.message_type == kind
        return seconds_of_node.get(f"node_{message.metadata.dst_node_id}", 0.0) if is_kind else 0.0

    return seconds


def runs_of(deployment: Deployment) -> list[tuple[int, int]]:
    """The charged rounds and the clients of each run in the ledger."""
    with open_ledger(deployment.ledger) as ledger:
        return [(run.charged, run.mechanism.clients) for run in ledger.runs()]


def test_slow_client_is_awaited(tmp_path, clock):
    nodes = [plain_node(1, privacy="open"), plain_node(2, privacy="strict")]
    grid = SlowGrid(nodes, clock, seconds_of("query", node_2=2.5 * SECONDS))
    deployment = deployment_of(tmp_path, min_available_clients=2)
    (variant,) = run_plain(grid, deployment).variants
    assert grid.times_of("query", 2) == pytest.approx([0, SECONDS, 3 * SECONDS], abs=1)
    assert runs_of(deployment) == [(3, 2)]
    assert [group.clients for group in variant.groups] == [1, 1]


def test_slow_client_joins_a_run_under_way(tmp_path, clock):
    nodes = [plain_node(1, privacy="open"), plain_node(2, privacy="strict")]
    slow_query, slow_round = seconds_of("query", node_2=1.5 * SECONDS), seconds_of("train", node_1=2 * SECONDS)
    grid = SlowGrid(nodes, clock, lambda message: slow_query(message) + slow_round(message))
    deployment = deployment_of(tmp_path, rounds=4)
    run_plain(grid, deployment)
    assert grid.times_of("query", 2) == pytest.approx([0, SECONDS], abs=1)
    assert runs_of(deployment) == [(1, 1), (3, 2)]  # it answers during the first round
    assert len(grid.times_of("train", 2)) == 3


def test_absent_client_is_queried_at_growing_intervals(tmp_path, clock):
    nodes = [plain_node(1, privacy="open"), plain_node(2, privacy="strict")]
    query, train = seconds_of("query", node_2=1e9), seconds_of("train", node_1=50.0)
    grid = SlowGrid(nodes, clock, lambda message: query(message) + train(message))
    deployment = deployment_of(tmp_path, rounds=8)
    run_plain(grid, deployment)
    times = [SECONDS * factor for factor in (0, 1, 3, 7, 15, 23, 31, 39)]
    assert grid.times_of("query", 2) == pytest.approx(times, abs=8)
    assert registered_levels(deployment) == ["open"]
    assert runs_of(deployment) == [(8, 1)]


def test_errors_do_not_bring_queries_forward(tmp_path, clock):
    failing = Node(2, ClientApp(), privacy="open")
    grid = SlowGrid([plain_node(1, privacy="open"), failing], clock, seconds_of("train", node_1=SECONDS))
    run_plain(grid, deployment_of(tmp_path, rounds=5))
    assert grid.times_of("query", 2) == pytest.approx([0, SECONDS, 3 * SECONDS], abs=2)
    assert grid.times_of("train", 1)[0] == pytest.approx(0, abs=1)  # an error is not awaited


def test_client_of_round_five_trains_from_round_six_on(tmp_path, clock):
    grid = SlowGrid([plain_node(1, privacy="open")], clock, seconds_of("train", node_1=20.0))
    grid.at(4.5 * 20.0, lambda: grid.nodes.update({2: plain_node(2, privacy="strict")}))
    deployment = deployment_of(tmp_path, rounds=8)
    (variant,) = run_plain(grid, deployment).variants
    assert grid.times_of("query", 2)[0] < 5 * 20.0
    assert len(grid.times_of("train", 2)) == 3
    assert runs_of(deployment) == [(5, 1), (3, 2)]
    assert sum(cost.rounds for cost in ledger_costs(deployment, "strict")) == 3
    assert {group.name: group.rounds for group in variant.groups} == {"strict": 3, "open": 8}


def test_client_that_comes_back_trains_again(tmp_path, clock):
    nodes = [plain_node(1, privacy="open"), plain_node(2, privacy="strict", directory=str(tmp_path / "client"))]
    grid = SlowGrid(nodes, clock, seconds_of("train", node_1=20.0))
    again = plain_node(3, privacy="strict", directory=str(tmp_path / "client"))
    grid.at(30.0, lambda: grid.nodes.pop(2))
    grid.at(70.0, lambda: grid.nodes.update({3: again}))
    deployment = deployment_of(tmp_path, rounds=6)
    run_plain(grid, deployment)
    assert (len(grid.times_of("train", 2)), len(grid.times_of("train", 3))) == (2, 2)
    assert runs_of(deployment) == [(6, 2)]  # it stays in the promise while it is away


def test_client_at_an_old_connection_is_queried_when_that_ends(tmp_path, clock):
    first, second = (plain_node(id, privacy="strict", directory=str(tmp_path / "client")) for id in (2, 3))
    grid = SlowGrid([plain_node(1, privacy="open"), first], clock, seconds_of("train", node_1=20.0))
    grid.at(30.0, lambda: grid.nodes.update({3: second}))
    grid.at(50.0, lambda: grid.nodes.pop(2))
    run_plain(grid, deployment_of(tmp_path, rounds=4))
    assert grid.times_of("query", 3) == pytest.approx([30.0, 50.0], abs=2)
    assert len(grid.times_of("train", 3)) == 1


def test_run_says_what_it_waits_for(tmp_path, clock, caplog):
    nodes = [plain_node(1, privacy="open"), plain_node(2, privacy="strict")]
    grid = SlowGrid(nodes, clock, seconds_of("query", node_2=1e9))
    grid.at(100.0, lambda: grid.nodes.update({3: plain_node(3, privacy="open")}))
    deployment = deployment_of(tmp_path, min_available_clients=2)
    with caplog.at_level("INFO", "flwr"):
        run_plain(grid, deployment)
    waits = [record.getMessage() for record in caplog.records if "waiting for" in record.getMessage()]
    assert len(waits) == 4
    assert all("needs 2 clients, 1 enrolled" in line and "without an answer (2)" in line for line in waits)
    assert "waiting for 90 s" in waits[-1]
    assert registered_levels(deployment) == ["open", "open"]


def test_wait_for_replies_is_logged(tmp_path, clock, caplog):
    nodes = [plain_node(1, privacy="open"), plain_node(2, privacy="strict")]
    grid = SlowGrid(nodes, clock, seconds_of("train", node_2=50.0))
    with caplog.at_level("INFO", "flwr"):
        run_plain(grid, deployment_of(tmp_path, rounds=1))
    waits = [record.getMessage() for record in caplog.records if "waiting for" in record.getMessage()]
    assert len(waits) == 1
    assert "1 of 2 clients" in waits[0]


def test_failing_client_is_named(tmp_path, clock, caplog):
    grid = SlowGrid([plain_node(1, privacy="open"), plain_node(2, privacy="open")], clock)
    grid.tamper = lambda message, reply, node: (
        [Message(Error(5, "gone"), reply_to=message)] if node.id == 2 and is_train(message) else [reply]
    )
    with caplog.at_level("INFO", "flwr"):
        run_plain(grid, deployment_of(tmp_path, rounds=1))
    assert "client node 2 (open, node 2) fails with error 5" in caplog.text
    assert "1 failed" in caplog.text


def test_late_level_without_budget_does_not_end_the_run(tmp_path, clock):
    grid = SlowGrid([plain_node(1, privacy="open")], clock, seconds_of("train", node_1=20.0))
    grid.at(30.0, lambda: grid.nodes.update({2: plain_node(2, privacy="strict")}))
    deployment = deployment_of(tmp_path, rounds=4, budgets={"strict": Budget(0.1, 1e-4)})
    (variant,) = run_plain(grid, deployment).variants
    assert (variant.rounds, variant.stopped) == (4, None)
    assert not grid.times_of("train", 2)
    assert charged_rounds(deployment) == 4


def test_late_level_that_had_noise_does_not_end_the_run(tmp_path, clock):
    deployment = deployment_of(tmp_path, rounds=4)
    noisy = TWO_LEVELS | {"open": TWO_LEVELS["strict"]}
    run_plain(
        SlowGrid([plain_node(9, privacy="open")], clock), deployment_of(tmp_path, levels=noisy, out=f"{tmp_path}/first")
    )
    grid = SlowGrid([plain_node(1, privacy="strict")], clock, seconds_of("train", node_1=20.0))
    grid.at(clock.now + 30.0, lambda: grid.nodes.update({2: plain_node(2, privacy="open")}))
    (variant,) = run_plain(grid, deployment).variants
    assert variant.rounds == 4
    assert not grid.times_of("train", 2)

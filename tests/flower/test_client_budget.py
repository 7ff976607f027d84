"""A client's own ledger and lifetime budget, whatever the server counts."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedhdp[flower]'")

from flower_helpers import (
    PRIVATE,
    TWO_LEVELS,
    InProcessGrid,
    before_round,
    client_costs,
    is_declined,
    is_train,
    make_deployment,
    plain_node,
    record_updates,
    run_plain,
    saved_values,
    strict_node,
    with_open_node,
)
from flwr.app import Message
from msgspec.structs import replace

from fedhdp.flower.protocol import LevelOffer, offer_message
from fedhdp.privacy.accounting import compose
from fedhdp.privacy.calibration import PrivacyLevel
from fedhdp.privacy.costs import PrivacyCost


def epsilon_of(rounds: int, sampling_rate: float = 1.0) -> float:
    """A budget that allows this many rounds at noise multiplier 1."""
    return compose([PrivacyCost(1.0, sampling_rate, "poisson", rounds)], 1e-5) * 1.001


def charged(directory: Path) -> int:
    return sum(cost.rounds for cost in client_costs(directory))


# Budgets


def test_rounds_beyond_the_budget_are_declined(tmp_path):
    node = strict_node(tmp_path, epsilon=epsilon_of(3), delta=1e-5)
    deployment = make_deployment(tmp_path, levels=TWO_LEVELS, rounds=5, clip=1.0, **PRIVATE)
    grid = with_open_node(node)
    has_update = record_updates(grid, node)
    (variant,) = run_plain(grid, deployment).variants
    assert has_update == [True, True, True, False]  # and nothing further is sent
    assert variant.groups[0].refused == 0

    Path(deployment.ledger).unlink()  # a server that has lost its ledger
    has_update.clear()
    run_plain(grid, replace(deployment, out=str(tmp_path / "second")))
    assert has_update == []
    assert is_declined(node.answer(node.received_of("train")[-1]))


@pytest.mark.parametrize("factors", [(1.0, 100.0), (100.0, 1.0)])
def test_smallest_budget_holds(tmp_path, factors):
    deployment = make_deployment(tmp_path, levels=TWO_LEVELS, rounds=2, clip=1.0, **PRIVATE)
    has_update = []
    for run, factor in enumerate(factors):
        node = strict_node(tmp_path, epsilon=epsilon_of(3) * factor, delta=1e-5)
        grid = with_open_node(node)
        run_updates = record_updates(grid, node)
        run_plain(grid, replace(deployment, out=str(tmp_path / f"run {run}")))
        has_update += run_updates
    assert has_update == [True, True, True, False]


@pytest.mark.parametrize("config", [{"epsilon": 1000.0}, {}])
def test_budget_that_is_lowered_during_a_run_holds(tmp_path, config):
    node = strict_node(tmp_path, **config)
    grid = with_open_node(node)
    has_update = record_updates(grid, node)
    grid.on_push = before_round(1, lambda: node.context.node_config.update(epsilon=0.5))
    run_plain(grid, make_deployment(tmp_path, levels=TWO_LEVELS, rounds=4, **PRIVATE))
    assert has_update == [True, False]


def test_exhausted_client_is_sent_nothing_and_declines_evaluation(tmp_path):
    node = strict_node(tmp_path, epsilon=1e-4, scores=True)
    grid = with_open_node(node)
    run_plain(grid, make_deployment(tmp_path, levels=TWO_LEVELS, evaluate_every=1, **PRIVATE))
    assert not node.received_of("train")
    assert not node.received_of("evaluate")
    (message,) = grid.nodes[2].received_of("evaluate")
    message.content["request"].update(level="strict", noise_multiplier=1.0)
    for charged_rounds in (0, 1, 3):  # whatever the server claims
        message.content["request"]["charged_rounds"] = charged_rounds
        assert is_declined(node.answer(message))


def test_client_whose_budget_is_used_up_declines_evaluation(tmp_path):
    node = strict_node(tmp_path, epsilon=epsilon_of(2), scores=True)
    run_plain(with_open_node(node), make_deployment(tmp_path, levels=TWO_LEVELS, clip=1.0, evaluate_every=1, **PRIVATE))
    assert len(node.received_of("train")) == 3  # the last of them is declined
    (message,) = node.received_of("evaluate")
    for charged_rounds in (0, 2, 3):
        message.content["request"]["charged_rounds"] = charged_rounds
        assert is_declined(node.answer(message))


def test_enrollment_counts_the_servers_rounds(tmp_path):
    node = strict_node(tmp_path, epsilon=epsilon_of(5, sampling_rate=0.5))
    is_exhausted = []
    for charged_rounds in (0, 4, 5, 6):
        offer = LevelOffer("run", charged_rounds, ["strict"], [1.0], [0.5], 20)
        reply = node.answer(offer_message(1, offer, 1.0))
        is_exhausted.append(reply.content["enrollment"]["budget_exhausted"])
    assert is_exhausted == [False, False, True, True]


def test_delta_without_epsilon_is_an_error(tmp_path):
    node = strict_node(tmp_path)
    run_plain(InProcessGrid([node]), make_deployment(tmp_path, levels=TWO_LEVELS, rounds=1))
    reply = strict_node(tmp_path, delta=1e-5).answer(node.received_of("train")[0])
    assert "delta 1e-05 without epsilon" in reply.error.reason


def test_budget_without_a_directory_declines(tmp_path):
    node = plain_node(1, privacy="strict", epsilon=100.0)
    grid = with_open_node(node)
    run_plain(grid, make_deployment(tmp_path, levels=TWO_LEVELS))
    assert node.received_of("train") == []
    message = grid.nodes[2].received_of("train")[0]
    message.content["request"].update(level="strict")
    assert is_declined(node.answer(message))


@pytest.mark.parametrize(("config", "replies"), [({"epsilon": 50.0}, 0), ({}, 2)])
def test_repeatable_run_promises_no_noise(tmp_path, config, replies):
    node = strict_node(tmp_path, **config)
    deployment = make_deployment(tmp_path, levels=TWO_LEVELS, rounds=2, cohort_seed=None)
    run_plain(with_open_node(node), deployment)
    offers = [message.content["offer"] for message in node.received_of("query")]
    requests = [message.content["request"] for message in node.received_of("train")]
    assert sum(saved_values(deployment, "strict", "replies")) == replies
    assert {noise for offer in offers for noise in offer["noise_multipliers"]} == {0.0}
    assert {request["noise_multiplier"] for request in requests} <= {0.0}
    if not config:
        assert {cost.noise_multiplier for cost in client_costs(tmp_path / "client")} == {0.0}


# Counting


@pytest.mark.parametrize("rate", [0.4, 1e-6])
def test_every_round_is_charged_sampled_or_not(tmp_path, rate):
    node, levels = strict_node(tmp_path), {"strict": PrivacyLevel(sampling_rate=rate, noise_multiplier=1.0)}
    for name in ("first", "second"):
        deployment = make_deployment(tmp_path, levels=levels, rounds=8, clip=1.0, out=str(tmp_path / name))
        run_plain(InProcessGrid([node]), deployment)
    assert len(node.received_of("train")) < 16
    assert charged(tmp_path / "client") == 16


def test_every_repeated_request_is_charged(tmp_path):
    node = strict_node(tmp_path)
    run_plain(InProcessGrid([node]), make_deployment(tmp_path, levels=TWO_LEVELS, rounds=2))
    message = node.received_of("train")[0]  # the server claims that one round is charged
    assert all("update" in node.answer(message).content for _ in range(3))
    assert charged(tmp_path / "client") == 5


def test_late_client_does_not_charge_earlier_rounds(tmp_path):
    grid = InProcessGrid([plain_node(2, privacy="strict")])
    grid.on_push = before_round(3, lambda: grid.nodes.update({1: strict_node(tmp_path)}))
    run_plain(grid, make_deployment(tmp_path, levels=TWO_LEVELS, rounds=6))
    assert charged(tmp_path / "client") == 2


def test_client_charges_its_promise(tmp_path):
    levels = {
        "strict": PrivacyLevel(sampling_rate=1.0, noise_multiplier=4.0),
        "relaxed": PrivacyLevel(sampling_rate=0.5, noise_multiplier=0.7),
    }
    node = plain_node(1, privacy="relaxed", directory=str(tmp_path / "client"))
    grid = InProcessGrid([node])

    def on_push(messages: list[Message]) -> None:
        if any(map(is_train, messages)) and int(messages[0].metadata.group_id) >= 5:
            grid.nodes.setdefault(2, plain_node(2, privacy="strict"))

    grid.on_push = on_push
    run_plain(grid, make_deployment(tmp_path, levels=levels, rounds=12, clip=1.0, **PRIVATE))
    requests = [dict(message.content["request"]) for message in node.received_of("train")]
    assert all(set(request) == set(requests[0]) for request in requests)
    assert {request["noise_multiplier"] for request in requests} == {0.7}
    (cost,) = client_costs(tmp_path / "client")
    assert (cost.noise_multiplier, cost.sampling_rate, cost.rounds) == (0.7, 0.5, 12)

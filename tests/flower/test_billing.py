"""What a deployment charges, and when."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedhdp[flower]'")

from flower_helpers import (
    LEVELS,
    PRIVATE,
    InProcessGrid,
    Node,
    before_round,
    charged_rounds,
    is_train,
    ledger_costs,
    make_deployment,
    make_grid,
    open_ledger,
    plain_node,
    run_plain,
    saved_model,
)
from flwr.app import Message
from msgspec.structs import astuple, replace

from fedhdp.flower import Deployment, Trainer, client_app, run_deployment
from fedhdp.flower.protocol import parse_request
from fedhdp.flower.serverapp import start_billing
from fedhdp.privacy.accounting import compose
from fedhdp.privacy.calibration import PrivacyLevel
from fedhdp.privacy.costs import PrivacyCost, privacy_cost
from fedhdp.privacy.ledger import Budget

ALWAYS_SAMPLED = {name: replace(level, sampling_rate=1.0) for name, level in LEVELS.items()}


def test_round_is_charged_before_it_is_sent(tmp_path):
    deployment, grid, charged = make_deployment(tmp_path, rounds=4), make_grid(), {}

    def on_push(messages: list[Message]) -> None:
        if any(map(is_train, messages)):
            charged[int(messages[0].metadata.group_id)] = charged_rounds(deployment)

    grid.on_push = on_push
    run_plain(grid, deployment)
    assert charged
    assert charged == {round: round + 1 for round in charged}


def test_round_without_clients_is_charged(tmp_path):
    levels = {"strict": PrivacyLevel(sampling_rate=0.0, noise_multiplier=1.0)}
    deployment, grid = make_deployment(tmp_path, levels=levels), InProcessGrid([plain_node(1)])
    run_plain(grid, deployment)
    assert charged_rounds(deployment) == 3
    assert not grid.pushed_of("train")


def with_budget_of_two_rounds(tmp_path, on_budget_exhausted: str) -> Deployment:
    """Five rounds, of which the budget of the group ``mid`` allows two."""
    mechanism = make_deployment(tmp_path, levels=ALWAYS_SAMPLED).mechanism({"open": 2, "mid": 3, "strict": 3})
    epsilon = compose([privacy_cost(mechanism, mechanism.groups[1], 2)], 1e-4) * 1.001
    fields = {"levels": ALWAYS_SAMPLED, "rounds": 5, "budgets": {"mid": Budget(epsilon, 1e-4)}}
    return make_deployment(tmp_path, on_budget_exhausted=on_budget_exhausted, **fields, **PRIVATE)


def test_run_stops_at_a_budget(tmp_path):
    deployment = with_budget_of_two_rounds(tmp_path, "stop")
    (variant,) = run_plain(make_grid(), deployment).variants
    assert variant.rounds == 2
    assert "'mid'" in variant.stopped
    assert charged_rounds(deployment) == 2


def test_budgets_are_only_lowered(tmp_path):
    recorded = []
    for budget in [(5.0, 1e-4), (9.0, 1e-4), (5.0, 1e-3), (9.0, 1e-6), (3.0, 1e-3), (4.0, 1e-5)]:
        deployment = make_deployment(tmp_path, budgets={"mid": Budget(*budget)})
        with open_ledger(deployment.ledger, read_only=False) as ledger:
            ledger.register("a client", "mid")
            start_billing(deployment, ledger, "run", 9).admit({"a client": "mid"})
            recorded.append(astuple(ledger.budget("mid")))
    assert recorded == [(5.0, 1e-4)] * 3 + [(5.0, 1e-6), (3.0, 1e-6), (3.0, 1e-6)]


def test_epsilon_is_at_the_delta_of_its_level(tmp_path):
    levels = LEVELS | {"mid": replace(LEVELS["mid"], delta=1e-6)}
    deployment = make_deployment(tmp_path, levels=levels, rounds=2, **PRIVATE)
    (variant,) = run_plain(make_grid(), deployment).variants
    _, mid, strict = variant.groups
    assert (mid.delta, strict.delta) == (1e-6, 1e-4)
    for group in (mid, strict):
        costs = ledger_costs(deployment, group.name)
        assert group.epsilon == pytest.approx(compose(costs, group.delta))


def test_a_level_that_asks_for_its_budget_reaches_its_last_round(tmp_path):
    levels = LEVELS | {"mid": PrivacyLevel(sampling_rate=0.5, epsilon=3.0)}
    changes = {"levels": levels, "budgets": {"mid": Budget(3.0, 1e-4)}, "rounds": 8}
    (variant,) = run_plain(make_grid(), make_deployment(tmp_path, **changes, **PRIVATE)).variants
    mid = next(group for group in variant.groups if group.name == "mid")
    assert (variant.rounds, variant.stopped, mid.rounds) == (8, None, 8)
    assert (mid.accountant, mid.epsilon_target) == ("rdp", 3.0)
    assert mid.epsilon <= 3.0


def test_group_with_an_exhausted_budget_is_dropped(tmp_path):
    deployment = replace(with_budget_of_two_rounds(tmp_path, "drop_group"), evaluate_every=4)
    grid = make_grid()
    (variant,) = run_plain(grid, deployment).variants
    evaluated = {message.content["request"]["level"] for message in grid.pushed_of("evaluate")}
    late = [message for message in grid.pushed_of("train") if int(message.metadata.group_id) >= 2]
    _, mid, strict = variant.groups
    assert variant.rounds == 5
    assert evaluated == {message.content["request"]["level"] for message in late} == {"open", "strict"}
    assert {group.name: group.rounds for group in variant.groups} == {"open": 5, "mid": 2, "strict": 5}
    assert mid.sampling_rate == 1.0  # the promise, not what it is since the group was dropped
    assert "q 1," in mid.epsilon_basis
    assert strict.epsilon == pytest.approx(compose(ledger_costs(deployment, "strict"), 1e-4))


def test_noise_for_a_dropped_group_is_not_added(tmp_path):
    levels = {
        "mid": PrivacyLevel(sampling_rate=1.0, noise_multiplier=0.7, weight=1.0),
        "strict": PrivacyLevel(sampling_rate=1.0, noise_multiplier=5.0, weight=1.0),
    }
    two_rounds = Budget(compose([PrivacyCost(5.0, 1.0, "poisson", 2)], 1e-4) * 1.001, 1e-4)
    fields = {"budgets": {"strict": two_rounds}, "on_budget_exhausted": "drop_group", "clip": 1.0, "rounds": 4}
    deployment = make_deployment(tmp_path, levels=levels, **fields, **PRIVATE)
    app = client_app(lambda context: Trainer(lambda parameters, personal, pull, round: (parameters, None)))
    grid = InProcessGrid(Node(number, app, privacy=level) for number, level in enumerate(levels, 1))
    models = []

    def on_push(messages: list[Message]) -> None:
        if any(map(is_train, messages)):
            models.append(parse_request(messages[0])[0]["w"])

    grid.on_push = on_push
    run_deployment(grid, deployment, {"w": np.zeros(20_000, np.float32)})
    models.append(saved_model(deployment)["global/w"])
    noise = [np.std(after - before) for before, after in itertools.pairwise(models)]
    np.testing.assert_allclose(noise, [2.5, 2.5, 0.7, 0.7], rtol=0.03)  # divided by two clients, then by one


def test_mechanisms_before_and_after_a_late_client_are_composed(tmp_path):
    deployment, grid = make_deployment(tmp_path, levels=ALWAYS_SAMPLED, rounds=4, **PRIVATE), make_grid()
    late = grid.nodes.pop(107)
    grid.on_push = before_round(1, lambda: grid.nodes.update({107: late}))
    (variant,) = run_plain(grid, deployment).variants
    assert [int(message.metadata.group_id) for message in late.received_of("train")] == [2, 3]
    assert [group.clients for group in variant.groups] == [2, 3, 3]
    with open_ledger(deployment.ledger) as ledger:
        assert [(run.charged, run.mechanism.clients) for run in ledger.runs()] == [(2, 7), (2, 8)]
    assert variant.groups[2].epsilon == pytest.approx(compose(ledger_costs(deployment, "strict"), 1e-4))


def test_theory_weights_follow_the_clients_who_have_enrolled(tmp_path):
    levels = {name: replace(level, weight=None) for name, level in ALWAYS_SAMPLED.items()}
    deployment, grid = make_deployment(tmp_path, levels=levels, rounds=4, **PRIVATE), make_grid()
    late = grid.nodes.pop(107)
    grid.on_push = before_round(1, lambda: grid.nodes.update({107: late}))
    (variant,) = run_plain(grid, deployment).variants
    counts, parameters = [{"open": 2, "mid": 3, "strict": number} for number in (2, 3)], 9
    expected = [deployment.mechanism(clients, parameters) for clients in counts]
    with open_ledger(deployment.ledger) as ledger:
        assert [run.mechanism for run in ledger.runs()] == expected
    weights = [group.weight for group in variant.groups]
    assert weights == [group.weight for group in expected[1].groups]
    assert weights[0] == 1 > weights[2] > 0
    assert weights != [group.weight for group in expected[0].groups]

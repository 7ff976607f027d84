"""Plans: calibrated noise, weights of least error, and the documented formulas."""

from __future__ import annotations

import math

import msgspec
import pytest
from helpers import raises_field
from msgspec.structs import replace

from fedhdp.privacy.accounting import epsilon
from fedhdp.theory.planning import LevelShare, estimate_error, plan, with_optimal_weights

LEVELS = (LevelShare("none", math.inf, 0.05), LevelShare("relaxed", 8.0, 0.35), LevelShare("strict", 2.0, 0.6))


@pytest.fixture(scope="module")
def planned():
    return plan(2000, 100, 500, 1e-4, LEVELS)


def test_levels_get_their_target_epsilons(planned):
    assert [level.clients for level in planned.levels] == [100, 700, 1200]
    assert epsilon(planned.mechanism, 500, 1e-4, "pld") == {level.name: level.epsilon for level in planned.levels}
    for level, share in zip(planned.levels, LEVELS, strict=True):
        assert level.epsilon <= share.epsilon
        assert level.opted_out or level.epsilon >= 0.99 * share.epsilon


@pytest.mark.parametrize("noise", ["shared", "per_group"])
@pytest.mark.parametrize("factor", [0.5, 0.9, 1.1, 2.0])
def test_weights_minimize_the_error(planned, noise, factor):
    best = with_optimal_weights(replace(planned.mechanism, noise=noise), 500, 39_760)
    least = estimate_error(best, 500, 39_760).error
    for changed in range(len(best.groups)):
        groups = [replace(g, weight=g.weight * factor) if i == changed else g for i, g in enumerate(best.groups)]
        assert estimate_error(replace(best, groups=tuple(groups)), 500, 39_760).error > least


def test_weight_of_one_private_level_is_the_documented_formula():
    result = plan(2000, 100, 500, 1e-4, (LevelShare("none", math.inf, 0.05), LevelShare("private", 3.6, 0.95)))
    z, q = result.mechanism.update_noise_multiplier(result.mechanism.groups[1]), 0.05
    expected = 1 / (1 + z**2 * 39_760 / (1900 * (q + q**2 * 500)))
    assert result.levels[1].weight == pytest.approx(expected)
    assert result.levels[1].weight_per_group == pytest.approx(expected)
    shared, per_group = (
        msgspec.structs.astuple(result.error_estimates[name]) for name in ("fedhdp", "fedhdp_per_group")
    )
    assert shared == pytest.approx(per_group)


def test_noise_is_that_of_the_server(planned):
    params = planned.mechanism.round_params
    assert planned.error_estimates["fedhdp"].noise_per_parameter == pytest.approx(
        params.update_noise_stddev / params.expected_weight
    )
    assert planned.error_estimates["fedhdp"].noise_per_round == pytest.approx(
        planned.error_estimates["fedhdp"].noise_per_parameter * math.sqrt(39_760)
    )


def test_order_of_the_algorithms(planned):
    errors = {name: estimate.error for name, estimate in planned.error_estimates.items()}
    assert errors["non_private"] < errors["fedhdp"] < errors["fedhdp_per_group"] < errors["hdp_fedavg"]
    assert errors["hdp_fedavg"] <= errors["dp_fedavg"]


def test_every_level_helps_the_others(planned):
    now = planned.error_estimates["fedhdp"].error
    for cost in planned.costs:
        assert now < cost.without.error
        assert cost.opted_out is None or cost.opted_out.error < now


def test_single_level():
    result = plan(100, 10, 20, 1e-3, (LevelShare("all", 4.0, 1.0),))
    assert result.levels[0].weight == 1
    assert result.costs[0].without is None
    assert result.error_estimates["fedhdp"] == result.error_estimates["dp_fedavg"]


def test_all_opted_out():
    result = plan(100, 10, 20, 1e-3, (LevelShare("a", math.inf, 0.5), LevelShare("b", math.inf, 0.5)))
    assert [level.weight for level in result.levels] == [1, 1]
    assert result.error_estimates["fedhdp"].noise == 0


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("clients", {"clients": 0}),
        ("cohort", {"cohort": 3000}),
        ("cohort", {"cohort": math.nan}),
        ("rounds", {"rounds": 0}),
        ("delta", {"delta": 2.0}),
        ("parameters", {"parameters": 0}),
        ("levels", {"levels": ()}),
        ("shares", {"levels": LEVELS[:2]}),
        ("share of 'none'", {"clients": 10, "cohort": 5}),
    ],
)
def test_invalid_values(field, changes):
    arguments = {"clients": 2000, "cohort": 100, "rounds": 10, "delta": 1e-4, "levels": LEVELS}
    with raises_field(field):
        plan(**(arguments | changes))


@pytest.mark.parametrize(
    ("field", "epsilon", "share"),
    [
        ("epsilon", 0.0, 0.5),
        ("epsilon", math.nan, 0.5),
        ("share", 1.0, 0.0),
        ("share", 1.0, 1.5),
        ("share", 1.0, math.nan),
    ],
)
def test_invalid_levels(field, epsilon, share):
    with raises_field(f"{field} of 'strict'"):
        LevelShare("strict", epsilon, share)

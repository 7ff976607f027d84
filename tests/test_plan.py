"""Plans: the noise meets the levels, the weights are the best there are, and the formula of the docs is what is computed."""

import io
import math

import msgspec
import pytest
from msgspec.structs import replace
from rich.console import Console

from fedhdp.cli._output import print_table, table
from fedhdp.privacy.accounting import epsilon
from fedhdp.theory.planning import Level, estimate_error, plan, with_optimal_weights

LEVELS = (Level("none", math.inf, 0.05), Level("relaxed", 8.0, 0.35), Level("strict", 2.0, 0.6))


@pytest.fixture(scope="module")
def planned():
    return plan(2000, 100, 500, 1e-4, LEVELS)


def test_every_level_gets_the_epsilon_it_asked_for_and_all_clients_have_a_level(planned):
    assert [level.clients for level in planned.levels] == [100, 700, 1200]
    assert epsilon(planned.mechanism, 500, 1e-4, "pld") == {level.name: level.epsilon_pld for level in planned.levels}
    for level, asked in zip(planned.levels, LEVELS):
        assert level.epsilon_pld <= asked.epsilon
        assert level.opted_out or level.epsilon_pld >= 0.99 * asked.epsilon


@pytest.mark.parametrize("noise", ["shared", "per_group"])
@pytest.mark.parametrize("factor", [0.5, 0.9, 1.1, 2.0])
def test_no_other_weights_let_less_error_through(planned, noise, factor):
    best = with_optimal_weights(replace(planned.mechanism, noise=noise), 500, 39_760)
    least = estimate_error(best, 500, 39_760).error
    for changed in range(len(best.groups)):
        groups = [replace(g, weight=g.weight * factor) if i == changed else g for i, g in enumerate(best.groups)]
        assert estimate_error(replace(best, groups=tuple(groups)), 500, 39_760).error > least


def test_with_one_private_level_the_weight_is_the_formula_of_the_docs():
    made = plan(2000, 100, 500, 1e-4, (Level("none", math.inf, 0.05), Level("private", 3.6, 0.95)))
    z, q = made.mechanism.update_noise_multiplier(made.mechanism.groups[1]), 0.05
    expected = 1 / (1 + z**2 * 39_760 / (1900 * (q + q**2 * 500)))
    assert made.levels[1].weight == pytest.approx(expected)
    assert made.levels[1].weight_per_group == pytest.approx(expected)
    shared, per_group = (msgspec.structs.astuple(made.error_estimates[name]) for name in ("fedhdp", "fedhdp_per_group"))
    assert shared == pytest.approx(per_group)


def test_what_reaches_the_model_is_what_the_server_adds(planned):
    terms = planned.mechanism.round_params
    assert planned.error_estimates["fedhdp"].noise_per_parameter == pytest.approx(
        terms.update_noise_stddev / terms.expected_weight
    )
    assert planned.error_estimates["fedhdp"].noise_of_a_round == pytest.approx(
        planned.error_estimates["fedhdp"].noise_per_parameter * math.sqrt(39_760)
    )


def test_one_noise_for_all_lets_less_error_through_than_one_for_each_and_both_less_than_the_baselines(planned):
    errors = {name: found.error for name, found in planned.error_estimates.items()}
    assert errors["non_private"] < errors["fedhdp"] < errors["fedhdp_per_group"] < errors["hdp_fedavg"]
    assert errors["hdp_fedavg"] <= errors["dp_fedavg"]


def test_clients_who_are_weighed_rightly_help_the_others_and_would_help_more_without_noise(planned):
    now = planned.error_estimates["fedhdp"].error
    for cost in planned.costs:
        assert now < cost.without.error
        assert cost.opted_out is None or cost.opted_out.error < now


def test_a_single_level_has_weight_one_and_no_world_without_it():
    made = plan(100, 10, 20, 1e-3, (Level("all", 4.0, 1.0),))
    assert made.levels[0].weight == 1
    assert made.costs[0].without is None
    assert made.error_estimates["fedhdp"] == made.error_estimates["dp_fedavg"]


def test_where_nobody_asks_for_privacy_there_is_no_noise_and_all_weigh_the_same():
    made = plan(100, 10, 20, 1e-3, (Level("a", math.inf, 0.5), Level("b", math.inf, 0.5)))
    assert [level.weight for level in made.levels] == [1, 1]
    assert made.error_estimates["fedhdp"].noise == 0


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"clients": 0}, "clients"),
        ({"cohort": 3000}, "cohort"),
        ({"cohort": math.nan}, "cohort"),
        ({"rounds": 0}, "rounds"),
        ({"delta": 2.0}, "delta"),
        ({"parameters": 0}, "parameters"),
        ({"levels": ()}, "levels"),
        ({"levels": LEVELS[:2]}, "shares"),
        ({"clients": 10, "cohort": 5}, "share of 'none'"),
    ],
)
def test_a_bad_number_is_named_with_its_value(changes, named):
    asked = {"clients": 2000, "cohort": 100, "rounds": 10, "delta": 1e-4, "levels": LEVELS}
    with pytest.raises(ValueError, match=f"^{named} must be .*, got "):
        plan(**(asked | changes))


@pytest.mark.parametrize(("epsilon", "share"), [(0.0, 0.5), (math.nan, 0.5), (1.0, 0.0), (1.0, 1.5), (1.0, math.nan)])
def test_a_level_that_is_none_is_refused_by_name(epsilon, share):
    with pytest.raises(ValueError, match="of 'strict' must be"):
        Level("strict", epsilon, share)


@pytest.mark.parametrize("width", [24, 40, 64, 200])
def test_a_table_in_a_narrow_terminal_keeps_its_names_and_cuts_no_number(width):
    shown = table(("level",), ("clients", "ε asked", "noise z\nof a round", "ε PLD"))
    rows = [("a level of many words", "1,950", "12.25", "4.0025", "1.9957"), ("open", "50", "∞", "0", "∞")]
    for row in rows:
        shown.add_row(*row)
    out = Console(width=width, file=io.StringIO())
    print_table(out, shown)
    said = out.file.getvalue()
    assert max(map(len, said.splitlines())) <= width
    assert said.count("open") == said.count("─\n") == {24: 4, 40: 2, 64: 1, 200: 1}[width]  # a name in every piece
    assert all(number in said for row in rows for number in row[1:])
    assert "…" not in said

"""Mechanisms that change from round to round: every round is priced with its own."""

from __future__ import annotations

import itertools

import dp_accounting as dp
import pytest
from helpers import raises_field
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from fedhdp.mechanism import Mechanism, PrivacyGroup, mechanism_at
from fedhdp.privacy.accounting import compose, epsilon
from fedhdp.privacy.budget import Budget, RunBilling
from fedhdp.privacy.costs import PrivacyCost, composed_costs, merge_costs, privacy_costs
from fedhdp.privacy.ledger import Ledger
from fedhdp.privacy.reports import account_mechanisms, rounds_allowed
from fedhdp.privacy.tuning import Tuning

MILD, STRICT = PrivacyGroup("mild", 300, 0.6, 0.1, weight=0.2), PrivacyGroup("strict", 200, 2.0, 0.1, weight=0.2)
BASE = Mechanism((MILD, STRICT), clip=1.0)


def weighted(weight: float) -> Mechanism:
    """The mechanism with this weight of the mild group, which the strict group's noise covers."""
    return replace(BASE, groups=(replace(MILD, weight=weight), STRICT))


def ramp(round: int) -> Mechanism:
    """A weight that grows from 0.2 to 0.5 in seven rounds."""
    return weighted(0.2 + 0.05 * min(round, 6))


def epsilon_of(mechanism, rounds: int, group: str = "mild", accountant: str = "rdp") -> float:
    """The epsilon after some rounds of a function of the round."""
    costs = composed_costs(mechanism_at(mechanism, round) for round in range(rounds))
    return compose(costs[group], 1e-5, accountant)


def test_epsilon_of_a_schedule_is_the_sum_of_its_rounds():
    accountant = dp.rdp.RdpAccountant()
    for round in range(12):
        noise = privacy_costs(ramp(round))["mild"].noise_multiplier
        accountant.compose(dp.PoissonSampledDpEvent(0.1, dp.GaussianDpEvent(noise)))
    assert epsilon_of(ramp, 12) == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-6)


@pytest.mark.parametrize("accountant", ["rdp", "pld"])
def test_epsilon_of_a_schedule_is_between_those_of_its_extremes(accountant):
    low, high = (epsilon(weighted(weight), 12, 1e-5, accountant)["mild"] for weight in (0.2, 0.5))
    assert low < epsilon_of(ramp, 12, accountant=accountant) < high
    noise = {privacy_costs(ramp(round))["strict"].noise_multiplier for round in range(12)}
    assert max(noise) - min(noise) < 1e-12  # its noise is its own, whatever the other's weight
    assert len(composed_costs(map(ramp, range(12)))["strict"]) == 1


def test_a_raised_weight_costs_more_from_that_round_on():
    def raised(round: int) -> Mechanism:
        return weighted(0.5 if round >= 5 else 0.2)

    for rounds in range(1, 6):
        assert epsilon_of(raised, rounds) == epsilon(weighted(0.2), rounds, 1e-5, "rdp")["mild"]
    for rounds in range(6, 9):
        assert epsilon_of(raised, rounds) > epsilon(weighted(0.2), rounds, 1e-5, "rdp")["mild"]
        before, after = privacy_costs(weighted(0.2), 5)["mild"], privacy_costs(weighted(0.5), rounds - 5)["mild"]
        assert epsilon_of(raised, rounds) == compose([after, before], 1e-5, "rdp")


def test_a_group_that_is_promised_noise_has_it_in_every_round():
    """A group's weight may take any values: it never costs more than the noise that it asked for."""
    asked = compose([PrivacyCost(0.6, 0.1, "poisson", 12)], 1e-5, "rdp")
    assert epsilon_of(lambda round: weighted(10.0 ** (round - 6)), 12) <= asked * (1 + 1e-9)


costs = st.builds(
    PrivacyCost,
    noise_multiplier=st.sampled_from([0.5, 0.5 * (1 + 1e-12), 0.50001, 0.502, 1.0, 2.0]),
    sampling_rate=st.sampled_from([0.1, 0.2]),
    sampling=st.just("poisson"),
    rounds=st.integers(1, 5),
)


@settings(deadline=None)
@given(st.lists(costs, max_size=8), st.sampled_from([0.0, 1e-9, 1e-3, 0.01]))
def test_merged_costs_are_never_less(several, tolerance):
    merged = merge_costs(several, tolerance)
    assert sum(cost.rounds for cost in merged) == sum(cost.rounds for cost in several)
    exact = compose(several, 1e-5, "rdp")
    assert exact * (1 - 1e-9) <= compose(merged, 1e-5, "rdp") <= exact * (1 + 5 * tolerance + 1e-9)
    for first, second in itertools.pairwise(merged):
        alike = first.sampling_rate == second.sampling_rate
        assert not (alike and second.noise_multiplier <= first.noise_multiplier * (1 + tolerance))


def billing_of(mechanism, ledger: Ledger | None = None, **options) -> RunBilling:
    defaults = {"repeatable": False, "on_exhausted": "stop", "delta_of": lambda group: 1e-5, "accountant": "rdp"}
    return RunBilling(mechanism, ledger, "run", **(defaults | options))


def test_a_run_is_billed_round_by_round(tmp_path):
    with Ledger(tmp_path / "ledger") as ledger:
        billing = billing_of(ramp, ledger)
        for round in range(9):
            assert billing.charge_next([ramp(round)]) == [ramp(round)]
        charged = ledger.costs("mild")
        assert compose(charged, 1e-5, "rdp") == pytest.approx(epsilon_of(ramp, 9), rel=1e-9)
        assert sorted(cost.rounds for cost in charged) == [1, 1, 1, 1, 1, 1, 3]
    unbilled = billing_of(ramp)
    assert unbilled.epsilon(9) == pytest.approx({"mild": epsilon_of(ramp, 9), "strict": epsilon_of(ramp, 9, "strict")})
    assert unbilled.costs("mild", 0) == ()


def test_replayed_rounds_count_with_the_mechanisms_that_they_ran():
    billing = billing_of(ramp, replayed_rounds=[4, 5, 5])
    expected = composed_costs(map(ramp, [*range(9), 4, 5, 5]))["mild"]
    assert billing.costs("mild", 9) == expected
    assert sum(cost.rounds for cost in expected) == 12


def test_progress_shows_a_bound():
    billing = billing_of(lambda round: weighted(0.2 * 1.002**round), accountant="pld")
    exact = compose(billing.costs("mild", 30), 1e-5, "pld")
    assert len(billing.costs("mild", 30)) == 30
    assert exact <= billing.epsilon(30)["mild"] <= exact * 1.05


def test_a_dropped_group_stays_dropped(tmp_path):
    """A function of the round returns it in every round, so it is dropped in every round."""
    with Ledger(tmp_path / "ledger") as ledger:
        budget = Budget(epsilon(ramp(0), 2, 1e-5, "rdp")["mild"], 1e-5)
        ledger.lower_budget("mild", budget)
        billing = billing_of(ramp, ledger, on_exhausted="drop_group")
        rates = [billing.charge_next([ramp(round)])[0].groups[0].sampling_rate for round in range(5)]
        assert rates[0] == 0.1
        assert rates[2:] == [0.0] * 3
        assert compose(ledger.costs("mild"), 1e-5, "rdp") <= budget.epsilon
        assert billing.rounds_left() == {"mild": 0}


def test_reports_compose_the_rounds():
    reports = account_mechanisms([("ramp", ramp), ("constant", BASE)], 12, lambda group: 1e-5, "rdp", tuning=Tuning(3))
    mild, strict = reports[0].groups
    assert (mild.epsilon, mild.mechanisms, strict.mechanisms) == (epsilon_of(ramp, 12), 7, 1)
    assert mild.noise_multiplier == privacy_costs(ramp(6))["mild"].noise_multiplier
    assert mild.rounds == 12
    assert mild.epsilon_tuned > reports[1].groups[0].epsilon_tuned * 0.999  # trials at the least noise of all
    assert reports[1].groups[0].epsilon == epsilon(BASE, 12, 1e-5, "rdp")["mild"]


def test_rounds_that_a_budget_allows_follow_the_schedule(tmp_path):
    budget = Budget(epsilon_of(ramp, 7), 1e-5)
    with Ledger(tmp_path / "ledger") as ledger:
        assert rounds_allowed(ledger, [ramp], {"mild": budget}, 20) == [{"mild": 7}]
        assert rounds_allowed(ledger, [ramp], {"mild": budget}, 5) == [{"mild": 5}]
    assert rounds_allowed(None, [weighted(0.2)], {"mild": budget}, 20)[0]["mild"] > 7


def test_a_function_returns_a_mechanism():
    with raises_field("mechanism"):
        mechanism_at(lambda round: 0.5, 3)  # type: ignore[arg-type, return-value]

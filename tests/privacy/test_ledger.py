"""The ledger's charges, budgets and groups, against restored checkpoints, renamed groups and crashes."""

from __future__ import annotations

import math
import shutil

import msgspec
import pytest
from helpers import raises_field
from ledger_helpers import MECHANISM, ROUND, rounds_of

from fedhdp.errors import LedgerError
from fedhdp.privacy.accounting import compose, rounds_left
from fedhdp.privacy.costs import PrivacyCost, privacy_costs
from fedhdp.privacy.ledger import Budget, BudgetError, Ledger

LAX, STRICT, OPEN = MECHANISM.groups


@pytest.fixture
def path(tmp_path):
    return tmp_path / "population.ledger"


@pytest.fixture
def ledger(path):
    with Ledger(path) as ledger:
        ledger.begin("run", MECHANISM)
        yield ledger


def test_charge_is_durable(path, ledger):
    for _ in range(3):
        ledger.charge("run", ROUND)
    ledger.close()
    with Ledger(path) as reopened:
        assert reopened.groups() == ("lax", "strict", "open")
        for name in reopened.groups():
            assert reopened.costs(name) == (ROUND[name]._replace(rounds=3),)
        [run] = reopened.runs()
        assert (run.mechanism, run.charged) == (MECHANISM, 3)


def test_costs_of_all_runs_compose(ledger):
    other = msgspec.structs.replace(MECHANISM, clip=1.0)
    ledger.begin("other", other)
    for _ in range(20):
        ledger.charge("run", ROUND)
        ledger.charge("other", privacy_costs(other))
    costs = [privacy_costs(MECHANISM, 20)["strict"], privacy_costs(other, 20)["strict"]]
    assert compose(ledger.costs("strict"), 1e-5) == compose(costs, 1e-5)
    assert compose(ledger.costs("open"), 1e-5) == math.inf
    assert ledger.costs("lax", "run") == (ROUND["lax"]._replace(rounds=20),)


def test_several_rounds_at_once(ledger):
    for rounds in (5, 3):
        ledger.charge("run", privacy_costs(MECHANISM, rounds))
    assert rounds_of(ledger, "lax") == 8
    assert [run.charged for run in ledger.runs()] == [8]


def test_every_group_of_a_run_is_charged(ledger):
    with raises_field("costs", LedgerError) as error:
        ledger.charge("run", {"lax": ROUND["lax"], "open": ROUND["open"]})
    assert error.value.value == "strict"
    assert (rounds_of(ledger, "lax"), ledger.runs()[0].charged) == (0, 0)


def test_charged_rounds_by_prefix(ledger):
    for run in ("a/1", "a/2", "ab"):
        ledger.begin(run, MECHANISM)
        ledger.charge(run, ROUND)
    assert [ledger.charged_rounds(prefix) for prefix in ("a/", "a", "x")] == [2, 3, 0]


def test_the_budget_is_checked_before_the_round(ledger):
    ledger.promise("strict", 0.5, 1e-5)
    budget = ledger.budget("strict")
    allowed = rounds_left((), ROUND["strict"], budget)
    assert allowed > 2
    for done in range(allowed):
        assert rounds_left(ledger.costs("strict"), ROUND["strict"], budget) == allowed - done
        ledger.charge("run", ROUND)
    with pytest.raises(BudgetError) as error:
        ledger.charge("run", ROUND)
    assert error.value.groups == ("strict",)
    assert [rounds_of(ledger, name) for name in ledger.groups()] == [allowed] * 3  # no group paid for the refused round
    assert ledger.runs()[0].charged == allowed
    assert compose(ledger.costs("strict"), 1e-5) <= 0.5


def test_budget_error_names_every_group(ledger):
    for name in ("lax", "strict", "open"):
        ledger.promise(name, 1e-3, 1e-5)
    with pytest.raises(BudgetError) as error:
        ledger.charge("run", ROUND)
    assert error.value.groups == ("lax", "strict", "open")
    assert "\n" not in str(error.value)


def test_an_unsampled_group_is_never_refused(ledger):
    ledger.promise("strict", 1e-3, 1e-5)
    ledger.charge("run", ROUND | {"strict": ROUND["strict"]._replace(sampling_rate=0.0)})
    assert rounds_of(ledger, "lax") == 1
    assert compose(ledger.costs("strict"), 1e-5) == 0


def test_a_group_of_weight_0_is_charged_for_its_clip_bits(ledger):
    ledger.promise("strict", 1e-3, 1e-5)
    groups = (LAX, msgspec.structs.replace(STRICT, weight=0.0), OPEN)
    with pytest.raises(BudgetError) as error:
        ledger.charge("run", privacy_costs(msgspec.structs.replace(MECHANISM, groups=groups)))
    assert error.value.groups == ("strict",)


def test_a_budget_holds_over_all_runs(ledger):
    ledger.promise("lax", 3.0, 1e-5)
    allowed = rounds_left((), ROUND["lax"], Budget(3.0, 1e-5))
    ledger.charge("run", ROUND | {"lax": ROUND["lax"]._replace(rounds=allowed)})
    ledger.begin("later", MECHANISM)
    with pytest.raises(BudgetError) as error:
        ledger.charge("later", ROUND)
    assert error.value.groups == ("lax",)


def test_a_budget_is_lowered_and_never_raised(ledger):
    ledger.promise("lax", 3.0, 1e-5)
    ledger.promise("lax", 2.0, 1e-5)
    for epsilon, delta in ((2.5, 1e-5), (2.0, 1e-4)):
        with raises_field("budget", LedgerError):
            ledger.promise("lax", epsilon, delta)
    assert ledger.budget("lax") == Budget(2.0, 1e-5)
    assert ledger.budget("strict") is None


def test_lower_budget_keeps_the_smaller_of_both(ledger):
    budgets = [(5.0, 1e-4), (9.0, 1e-4), (5.0, 1e-3), (9.0, 1e-6), (3.0, 1e-3), (4.0, 1e-5)]
    results = []
    for budget in budgets:
        ledger.lower_budget("lax", Budget(*budget))
        results.append(msgspec.structs.astuple(ledger.budget("lax")))
    assert results == [(5.0, 1e-4)] * 3 + [(5.0, 1e-6), (3.0, 1e-6), (3.0, 1e-6)]


@pytest.mark.parametrize(
    ("epsilon", "delta", "field"),
    [(-1, 1e-5, "epsilon"), (math.nan, 1e-5, "epsilon"), (1, 0, "delta"), (1, 1, "delta"), (1, math.nan, "delta")],
)
def test_invalid_budget(epsilon, delta, field):
    with raises_field(field):
        Budget(epsilon, delta)


def test_accountant_state_is_not_lost_on_resume(path, ledger):
    for _ in range(5):
        ledger.charge("run", ROUND)
    ledger.close()
    with Ledger(path) as reopened:  # the checkpoint of round 2 was restored: rounds 3 to 5 are run once more
        reopened.begin("run", MECHANISM, completed=2)
        for _ in range(3):
            reopened.charge("run", ROUND)
        assert rounds_of(reopened, "lax") == 8


def test_a_restored_ledger_is_refused(path, ledger):
    ledger.charge("run", ROUND)
    shutil.copy(path, old := path.with_suffix(".old"))
    ledger.charge("run", ROUND)
    ledger.begin("run", MECHANISM, completed=2)
    with Ledger(old) as restored, raises_field("completed", LedgerError):
        restored.begin("run", MECHANISM, completed=2)


def test_a_run_keeps_its_mechanism(ledger):
    with raises_field("run", LedgerError):
        ledger.begin("run", msgspec.structs.replace(MECHANISM, clip=1.0))


def test_another_population_is_refused(path):
    with Ledger(path) as ledger:
        ledger.begin("one", MECHANISM, population="letters")
        ledger.begin("two", MECHANISM, population="letters")
        with raises_field("population", LedgerError):
            ledger.begin("three", MECHANISM, population="digits")


def test_clients_cannot_escape_their_budget_in_another_group(ledger):
    renamed = (msgspec.structs.replace(LAX, name="fresh"), STRICT, OPEN)
    grown = (msgspec.structs.replace(LAX, clients=61), STRICT, OPEN)
    for groups, client in ((renamed, "0"), (grown, "60")):
        with raises_field("members", LedgerError) as error:
            ledger.begin("another", msgspec.structs.replace(MECHANISM, groups=groups))
        assert error.value.value == client
    assert [run.name for run in ledger.runs()] == ["run"]


def test_unknown_run_or_group(ledger):
    with raises_field("run", LedgerError):
        ledger.charge("walk", ROUND)
    with raises_field("group", LedgerError):
        ledger.charge("run", ROUND | {"unknown": ROUND["lax"]})
    for method in (ledger.clients, ledger.budget):
        with raises_field("group", LedgerError):
            method("unknown")
    assert rounds_of(ledger, "strict") == 0


@pytest.mark.parametrize(
    ("cost", "field"),
    [
        (PrivacyCost(math.nan, 0.1, "poisson"), "noise_multiplier"),
        (PrivacyCost(1.0, math.nan, "poisson"), "sampling_rate"),
        (PrivacyCost(1.0, 0.1, "poisson", -5), "rounds"),
        (PrivacyCost(1.0, 0.1, "poisson", 0.5), "rounds"),  # type: ignore[arg-type]
        (PrivacyCost(1.0, 0.1, "shuffled"), "sampling"),
    ],
)
def test_invalid_cost(ledger, cost, field):
    with raises_field(field):
        ledger.charge("run", ROUND | {"lax": cost})
    assert rounds_of(ledger, "strict") == 0


@pytest.mark.parametrize("has_budget", [False, True])
def test_poisson_and_fixed_sampling_are_not_charged_together(ledger, has_budget):
    ledger.charge("run", ROUND)
    if has_budget:
        ledger.promise("lax", 30.0, 1e-5)
    with raises_field("sampling", LedgerError):
        ledger.charge("run", ROUND | {"lax": ROUND["lax"]._replace(sampling="fixed")})
    assert rounds_of(ledger, "lax") == 1


def test_a_budget_promised_before_the_first_run_holds_from_its_first_round(path):
    with Ledger(path) as ledger:
        ledger.promise("strict", 0.5, 1e-5)
        assert (ledger.groups(), ledger.clients("strict")) == (("strict",), 0)
        ledger.begin("run", MECHANISM)
        assert ledger.groups() == ("lax", "strict", "open")
        assert ledger.clients("strict") == 30
        allowed = rounds_left((), ROUND["strict"], Budget(0.5, 1e-5))
        ledger.charge("run", ROUND | {"strict": ROUND["strict"]._replace(rounds=allowed)})
        with pytest.raises(BudgetError) as error:
            ledger.charge("run", ROUND)
        assert error.value.groups == ("strict",)


def test_a_budget_promised_before_the_first_run_is_never_raised(path):
    with Ledger(path) as ledger:
        ledger.promise("strict", 2.0, 1e-5)
        ledger.promise("strict", 1.0, 1e-5)
        with raises_field("budget", LedgerError):
            ledger.promise("strict", 2.0, 1e-5)
        assert ledger.budget("strict") == Budget(1.0, 1e-5)


def test_clients_stay_in_a_promised_group_after_its_first_run(path):
    with Ledger(path) as ledger:
        ledger.promise("strict", 0.5, 1e-5)
        ledger.begin("run", MECHANISM)
        with raises_field("members", LedgerError):
            ledger.begin("another", msgspec.structs.replace(MECHANISM, groups=(STRICT, LAX, OPEN)))
        assert ledger.clients("strict") == 30


def test_a_promise_is_not_bypassed_under_a_misspelt_name(path):
    groups = (LAX, msgspec.structs.replace(STRICT, name="Strict"), OPEN)
    misspelt = msgspec.structs.replace(MECHANISM, groups=groups)
    with Ledger(path) as ledger:
        for name in ("lax", "strict"):
            ledger.promise(name, 0.5, 1e-5)
        for refused in (lambda: ledger.check_groups(groups), lambda: ledger.begin("run", misspelt)):
            with raises_field("groups", LedgerError) as error:
                refused()
            assert error.value.value == "Strict"
        assert (ledger.runs(), ledger.clients("lax")) == ((), 0)
        ledger.promise("Strict", 0.5, 1e-5)  # so they are other clients
        ledger.begin("run", misspelt)
        ledger.begin("run", misspelt)


def test_a_group_without_clients_cannot_be_charged(ledger):
    ledger.promise("later", 5.0, 1e-5)
    with raises_field("group", LedgerError):
        ledger.charge("run", ROUND | {"later": ROUND["lax"]})
    assert rounds_of(ledger, "lax") == 0

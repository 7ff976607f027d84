"""Billing: what is run was charged, and what a budget refuses is not run."""

from __future__ import annotations

import math

import pytest
from helpers import raises_field
from ledger_helpers import MECHANISM, ROUND, rounds_of
from msgspec.structs import replace

from fedhdp.errors import LedgerError
from fedhdp.mechanism import Mechanism, PrivacyGroup
from fedhdp.privacy.accounting import compose, rounds_left
from fedhdp.privacy.budget import Budget, BudgetExhausted, DeploymentBilling, RunBilling, drop_groups
from fedhdp.privacy.costs import privacy_costs, without_noise
from fedhdp.privacy.ledger import Ledger

SMALL = Budget(3.0, 1e-5)
ROUNDS = rounds_left((), ROUND["lax"], SMALL)  # how many rounds of MECHANISM the group "lax" may run


@pytest.fixture
def ledger(tmp_path):
    with Ledger(tmp_path / "ledger") as ledger:
        yield ledger


def delta_of(group: str) -> float:
    return 1e-5


def run_billing(ledger: Ledger | None, **options) -> RunBilling:
    defaults = {"repeatable": False, "on_exhausted": "stop", "delta_of": delta_of, "accountant": "rdp"}
    return RunBilling(MECHANISM, ledger, "run", **(defaults | options))


def test_drop_groups_keeps_groups_and_samples_none_of_them():
    dropped = drop_groups(MECHANISM, ["strict"])
    assert [group.name for group in dropped.groups] == ["lax", "strict", "open"]
    assert [group.sampling_rate for group in dropped.groups] == [0.1, 0.0, 0.1]
    assert [group.name for group in dropped.sampled_groups] == ["lax", "open"]


def test_a_round_is_charged_and_returned(ledger):
    billing = run_billing(ledger)
    mechanisms = [MECHANISM, replace(MECHANISM, groups=tuple(replace(g, pull=1.0) for g in MECHANISM.groups))]
    assert billing.charge_next(mechanisms) == mechanisms
    assert rounds_of(ledger, "lax") == 1  # they share one training
    assert billing.costs("lax", 1) == (ROUND["lax"],)


def test_two_trainings_are_not_charged_as_one(ledger):
    billing = run_billing(ledger)
    weighted = replace(MECHANISM, groups=tuple(replace(group, weight=1.0) for group in MECHANISM.groups))
    with raises_field("mechanisms"):
        billing.charge_next([MECHANISM, weighted])
    assert rounds_of(ledger, "lax") == 0


def test_without_a_ledger_nothing_is_charged():
    billing = run_billing(None, replayed_rounds=[0, 1])
    assert billing.charge_next([MECHANISM]) == [MECHANISM]
    assert billing.rounds_left() == {}
    assert billing.costs("lax", 5) == (ROUND["lax"]._replace(rounds=7),)
    assert billing.epsilon(5) == {
        name: math.inf if name == "open" else compose([cost], 1e-5)
        for name, cost in privacy_costs(MECHANISM, 7).items()
    }


def test_stop_before_the_round_that_exceeds_a_budget(ledger):
    billing = run_billing(ledger)
    ledger.lower_budget("lax", SMALL)
    for charged in range(ROUNDS):
        assert billing.rounds_left() == {"lax": ROUNDS - charged}
        billing.charge_next([MECHANISM])
    with pytest.raises(BudgetExhausted):
        billing.charge_next([MECHANISM])
    assert [rounds_of(ledger, name) for name in ledger.groups()] == [ROUNDS] * 3
    assert billing.epsilon(ROUNDS)["lax"] <= SMALL.epsilon


def test_an_exhausted_group_is_dropped_from_every_mechanism(ledger):
    billing = run_billing(ledger, on_exhausted="drop_group")
    ledger.lower_budget("lax", SMALL)
    mechanisms = [MECHANISM, MECHANISM]
    for _ in range(ROUNDS + 2):
        mechanisms = billing.charge_next(mechanisms)
    assert mechanisms == [drop_groups(MECHANISM, ["lax"])] * 2
    sampled = [cost for cost in ledger.costs("lax") if cost.sampling_rate > 0]
    assert sum(cost.rounds for cost in sampled) == ROUNDS
    assert rounds_of(ledger, "strict") == ROUNDS + 2
    assert billing.epsilon(ROUNDS + 2)["lax"] <= SMALL.epsilon


def test_rounds_left_without_the_noise_of_a_dropped_group(ledger):
    lax, strict, opted_out = MECHANISM.groups
    covered = replace(MECHANISM, groups=(replace(lax, weight=0.05), strict, opted_out))  # by the noise of strict
    options = {"repeatable": False, "on_exhausted": "drop_group", "delta_of": delta_of, "accountant": "rdp"}
    billing = RunBilling(covered, ledger, "run", **options)
    ledger.lower_budget("lax", SMALL)
    ledger.lower_budget("strict", Budget(0.0, 1e-5))
    assert billing.charge_next([covered]) == [drop_groups(covered, ["strict"])]
    assert privacy_costs(covered)["lax"].noise_multiplier > 3
    assert billing.rounds_left() == {"lax": ROUNDS - 1, "strict": 0}


def test_a_repeatable_run_has_no_rounds_left(ledger):
    billing = run_billing(ledger, repeatable=True)
    ledger.lower_budget("lax", SMALL)
    assert billing.rounds_left() == {"lax": 0}


def test_a_repeatable_run_is_accounted_with_the_noise_that_is_left(ledger):
    billing = run_billing(ledger, repeatable=True, on_exhausted="drop_group")
    ledger.lower_budget("lax", SMALL)
    [dropped] = billing.charge_next([MECHANISM])
    strict = privacy_costs(dropped, 3)["strict"]
    assert billing.costs("strict", 3) == (strict,)
    assert strict.noise_multiplier < ROUND["strict"].noise_multiplier
    assert billing.costs("lax", 3) == (privacy_costs(MECHANISM, 3)["lax"],)


def test_the_last_group_ends_the_run(ledger):
    billing = run_billing(ledger, on_exhausted="drop_group")
    for name in ledger.groups():
        ledger.lower_budget(name, Budget(1e-3, 1e-5))
    with pytest.raises(BudgetExhausted):
        billing.charge_next([MECHANISM])
    assert rounds_of(ledger, "lax") == 0


def test_a_repeatable_round_is_charged_without_noise(ledger):
    run_billing(ledger)
    billing = run_billing(ledger, repeatable=True, replayed_rounds=[0, 1, 2], begin=False)
    billing.charge_next([MECHANISM])
    assert ledger.costs("lax") == (without_noise(ROUND)["lax"],)
    assert billing.costs("lax", 1) == (ROUND["lax"],)  # as if it were private; the replayed rounds are the same rounds


def test_a_resumed_run_needs_every_completed_and_replayed_round_in_the_ledger(ledger):
    run_billing(ledger).charge_next([MECHANISM])
    run_billing(ledger, completed=1)
    with raises_field("completed", LedgerError):
        run_billing(ledger, completed=1, replayed_rounds=[0])
    run_billing(ledger, completed=9, begin=False)  # another billing has opened the run


def build(clients) -> Mechanism:
    levels = {"open": (0.0, 1.0), "mid": (1.0, 1.0), "strict": (2.0, 1.0)}
    return Mechanism(
        tuple(PrivacyGroup(name, clients[name], *levels[name]) for name in levels if clients[name]), clip=1.0
    )


def deployment_billing(ledger: Ledger, segments=(), dropped_groups=(), **options) -> DeploymentBilling:
    defaults = {"build_mechanism": build, "repeatable": False, "on_exhausted": "stop", "delta_of": delta_of}
    return DeploymentBilling(ledger, "run", segments, dropped_groups, **(defaults | {"budgets": {}} | options))


def register(ledger: Ledger, **members: str) -> dict[str, str]:
    for client, level in members.items():
        ledger.register(client, level)
    return members


def test_joining_clients_begin_a_new_segment(ledger):
    billing = deployment_billing(ledger)
    billing.admit(register(ledger, anna="open", ben="mid"))
    assert billing.charge_next() == build({"open": 1, "mid": 1, "strict": 0})
    billing.completed()
    billing.admit(register(ledger, anna="open", ben="mid", cleo="strict"))
    for _ in range(2):
        assert billing.charge_next() == build({"open": 1, "mid": 1, "strict": 1})
        billing.completed()
    assert [(segment.name, segment.rounds) for segment in billing.segments] == [("run/1", 1), ("run/2", 2)]
    assert billing.charged == 3
    assert billing.epsilon()["mid"] == compose(billing.costs("mid"), 1e-5) == compose(ledger.costs("mid"), 1e-5)
    assert billing.epsilon()["open"] == math.inf


def test_a_deployment_drops_an_exhausted_level(ledger):
    members = register(ledger, anna="open", ben="mid")
    budget = Budget(compose([privacy_costs(build({"open": 1, "mid": 1, "strict": 0}), 2)["mid"]], 1e-5), 1e-5)
    billing = deployment_billing(ledger, on_exhausted="drop_group", budgets={"mid": budget})
    billing.admit(members)
    mechanisms = []
    for _ in range(4):
        mechanisms.append(billing.charge_next())
        billing.completed()
    assert [mechanism == drop_groups(billing.full_mechanism, ["mid"]) for mechanism in mechanisms] == [
        False,
        False,
        True,
        True,
    ]
    assert billing.dropped_groups == {"mid"}
    assert sum(cost.rounds for cost in billing.costs("mid") if cost.sampling_rate > 0) == 2


@pytest.mark.parametrize(("on_exhausted", "dropped"), [("stop", set()), ("drop_group", {"mid"})])
def test_a_deployment_ends_before_the_first_round(ledger, on_exhausted, dropped):
    billing = deployment_billing(ledger, on_exhausted=on_exhausted, budgets={"mid": Budget(0.0, 1e-5)})
    billing.admit(register(ledger, ben="mid"))
    with pytest.raises(BudgetExhausted):
        billing.charge_next()
    assert billing.dropped_groups == dropped
    assert billing.charged == 0


def test_a_resumed_deployment_continues_its_segment(ledger):
    members = register(ledger, anna="open", ben="mid")
    billing = deployment_billing(ledger)
    billing.admit(members)
    billing.charge_next()
    billing.completed()
    billing.charge_next()  # and a crash
    resumed = deployment_billing(ledger, billing.segments)
    resumed.admit(members)
    resumed.charge_next()
    resumed.completed()
    assert [(segment.name, segment.rounds) for segment in resumed.segments] == [("run/1", 2)]
    assert resumed.charged == 3
    billing.segments[0].rounds = 9
    with raises_field("completed", LedgerError):
        deployment_billing(ledger, billing.segments).admit(members)


def test_refused_members_change_nothing(ledger):
    billing = deployment_billing(ledger)
    billing.admit(register(ledger, anna="open", ben="mid"))
    for _ in range(2):  # also the second time, although the members are the same
        with raises_field("members", LedgerError):
            billing.admit({"anna": "open", "ben": "strict"})
    assert billing.charge_next() == build({"open": 1, "mid": 1, "strict": 0})
    assert [segment.name for segment in billing.segments] == ["run/1"]


def test_a_repeatable_deployment(ledger):
    billing = deployment_billing(ledger, repeatable=True)
    billing.admit(register(ledger, ben="mid"))
    billing.charge_next()
    billing.completed()
    assert {cost.noise_multiplier for cost in ledger.costs("mid")} == {0.0}
    assert billing.costs("mid") == [privacy_costs(build({"open": 0, "mid": 1, "strict": 0}))["mid"]]


def test_a_deployment_lowers_budgets_when_clients_are_admitted(ledger):
    billing = deployment_billing(ledger, budgets={"mid": SMALL})
    assert ledger.groups() == ()
    billing.admit(register(ledger, ben="mid"))
    assert ledger.budget("mid") == SMALL

"""Reports: the numbers that the command line prints."""

from __future__ import annotations

from ledger_helpers import MECHANISM, ROUND
from msgspec.structs import replace

from fedhdp.privacy.accounting import rounds_left
from fedhdp.privacy.budget import drop_groups
from fedhdp.privacy.costs import privacy_costs
from fedhdp.privacy.ledger import Budget, Ledger
from fedhdp.privacy.reports import group_standing, rounds_allowed


def test_a_dropped_group_has_the_rounds_left_of_its_last_run(tmp_path):
    with Ledger(tmp_path / "ledger") as ledger:
        ledger.begin("run/1", MECHANISM)
        ledger.promise("lax", 3.0, 1e-5)
        while (left := group_standing(ledger, "lax", 1e-5).rounds_left) > 0:
            ledger.charge("run/1", privacy_costs(MECHANISM))
        dropped = drop_groups(MECHANISM, ["lax"])
        ledger.begin("run/2", dropped)
        ledger.charge("run/2", privacy_costs(dropped))
        assert group_standing(ledger, "lax", 1e-5).rounds_left == left == 0


def test_rounds_allowed_are_what_can_be_charged(tmp_path):
    budgets = {"lax": Budget(8.0, 1e-5)}
    trainings = [MECHANISM, replace(MECHANISM, clip=2.0), MECHANISM]
    with Ledger(tmp_path / "ledger") as ledger:
        assert rounds_allowed(None, trainings, budgets, 10_000) == rounds_allowed(ledger, trainings, budgets, 10_000)
        ledger.begin("earlier", MECHANISM)
        ledger.charge("earlier", privacy_costs(MECHANISM, 3))
        ledger.promise("lax", 9.0, 1e-6)
        budget = Budget(8.0, 1e-6)  # the smaller of both
        total = rounds_left(ledger.costs("lax"), ROUND["lax"], budget)
        assert rounds_allowed(ledger, trainings, budgets, 2) == [{"lax": 2}] * 3
        assert total > 6
        assert rounds_allowed(ledger, trainings, budgets, 10_000) == [{"lax": total}, {"lax": 0}, {"lax": 0}]
        assert rounds_allowed(ledger, trainings[:1], {}, 1) == [{"lax": 1}]
    assert rounds_allowed(None, trainings, {}, 5) == [{}, {}, {}]

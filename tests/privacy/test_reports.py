"""Reports: the numbers that the command line prints."""

from __future__ import annotations

from ledger_helpers import MECHANISM

from fedhdp.privacy.accounting import privacy_costs
from fedhdp.privacy.budget import drop_groups
from fedhdp.privacy.ledger import Ledger
from fedhdp.privacy.reports import group_standing


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

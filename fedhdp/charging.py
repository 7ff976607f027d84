"""A round is charged before anything of it can be seen, and what follows when a budget is spent.

Shared by simulated runs and deployments: they differ in what they are charged under, and in how they go on without a group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal

from msgspec.structs import replace

from fedhdp.accounting import exposed, spends
from fedhdp.ledger import BudgetError, Ledger
from fedhdp.mechanism import Mechanism

WhenSpent = Literal["stop", "leave_out"]


class BudgetSpent(Exception):
    """No further round can be paid for."""


def charge_round(
    ledger: Ledger,
    due: Callable[[], tuple[str, Mechanism]],
    repeatable: bool,
    when_spent: WhenSpent,
    leave_out: Callable[[tuple[str, ...]], None],
) -> None:
    """Charge the next round to every group, durably: the run and the mechanism that are due, without those who are spent.

    ``leave_out`` has the mechanism that is due go on without some groups. A repeatable round has noise that anybody can
    compute, and is charged as what it is. ``BudgetSpent`` when the run is to stop, or nobody is left to go on with.
    """
    while True:
        run, mechanism = due()
        once = spends(mechanism)
        try:
            return ledger.charge(run, exposed(once) if repeatable else once)
        except BudgetError as error:
            if when_spent == "stop":
                raise BudgetSpent(str(error)) from error
            if all(group.sampling_rate == 0 for group in without(mechanism, error.groups).groups):
                raise BudgetSpent(f"{error}; nobody is left") from error
            leave_out(error.groups)


def without(mechanism: Mechanism, names: Iterable[str]) -> Mechanism:
    """The mechanism in which nobody of these groups is drawn."""
    left_out = set(names)
    groups = (replace(group, sampling_rate=0.0) if group.name in left_out else group for group in mechanism.groups)
    return replace(mechanism, groups=tuple(groups))

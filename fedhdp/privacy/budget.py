"""A round is charged before anything of it can be seen, and what follows when a budget is spent.

Shared by simulated runs and deployments: they differ in what they are charged under, and in how they go on without a group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal

from msgspec.structs import replace

from fedhdp.mechanism import Mechanism
from fedhdp.privacy.accounting import privacy_costs, without_noise
from fedhdp.privacy.ledger import BudgetError, Ledger

OnBudgetExhausted = Literal["stop", "leave_out"]


class BudgetExhausted(Exception):
    """No further round can be paid for."""


def charge_round(
    ledger: Ledger,
    due: Callable[[], tuple[str, Mechanism]],
    repeatable: bool,
    when_spent: OnBudgetExhausted,
    leave_out: Callable[[tuple[str, ...]], None],
) -> None:
    """Charge the next round to every group, durably: the run and the mechanism that are due, without those who are spent.

    ``leave_out`` has the mechanism that is due go on without some groups. A repeatable round has noise that anybody can
    compute, and is charged as what it is. ``BudgetExhausted`` when the run is to stop, or nobody is left to go on with.
    """
    while True:
        run, mechanism = due()
        once = privacy_costs(mechanism)
        try:
            return ledger.charge(run, without_noise(once) if repeatable else once)
        except BudgetError as error:
            if when_spent == "stop":
                raise BudgetExhausted(str(error)) from error
            if all(group.sampling_rate == 0 for group in without(mechanism, error.groups).groups):
                raise BudgetExhausted(f"{error}; nobody is left") from error
            leave_out(error.groups)


def without(mechanism: Mechanism, names: Iterable[str]) -> Mechanism:
    """The mechanism in which nobody of these groups is drawn."""
    left_out = set(names)
    groups = (replace(group, sampling_rate=0.0) if group.name in left_out else group for group in mechanism.groups)
    return replace(mechanism, groups=tuple(groups))

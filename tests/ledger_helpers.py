"""A mechanism for tests of the ledger, and what they run in other processes."""

from __future__ import annotations

import contextlib
import multiprocessing.queues
import multiprocessing.synchronize
import subprocess
import sys
from pathlib import Path

from fedhdp.clips import AdaptiveClip
from fedhdp.mechanism import Mechanism, PrivacyGroup
from fedhdp.privacy.costs import privacy_costs
from fedhdp.privacy.ledger import BudgetError, Ledger

MECHANISM = Mechanism(
    groups=(
        PrivacyGroup("lax", 60, 1.0, 0.1, weight=0.5),
        PrivacyGroup("strict", 30, 2.0, 0.1, weight=0.1),
        PrivacyGroup("open", 10, 0.0, 0.1),
    ),
    clip=AdaptiveClip(1.0),
)
ROUND = privacy_costs(MECHANISM)


def rounds_of(ledger: Ledger, group: str) -> int:
    """How many rounds a group was charged for."""
    return sum(cost.rounds for cost in ledger.costs(group))


def charge_until_exhausted(
    path: Path, run: str, start: multiprocessing.synchronize.Barrier, results: multiprocessing.queues.Queue
) -> None:
    """Charge one round after another, together with other processes, until a budget is exhausted."""
    with Ledger(path) as ledger:
        ledger.begin(run, MECHANISM)
        start.wait()
        charged = 0
        with contextlib.suppress(BudgetError):
            while True:
                ledger.charge(run, ROUND)
                charged += 1
        results.put((run, charged))


def start_process(statements: str, *arguments: object) -> subprocess.Popen:
    """Run statements about ``MECHANISM``, ``ROUND`` and a new ledger in another process."""
    code = (
        f"import os, signal, sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from ledger_helpers import MECHANISM, ROUND, Ledger\n"
        "import fedhdp.privacy.ledger\n"
        f"{statements}"
    )
    return subprocess.Popen([sys.executable, "-c", code, *map(str, arguments)], stdout=subprocess.PIPE)

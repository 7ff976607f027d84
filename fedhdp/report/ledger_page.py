"""The page of a ledger: each group's spending over time, its runs, and how long its budget lasts at the present pace."""

from __future__ import annotations

import datetime
import math
from collections.abc import Sequence
from typing import NamedTuple

from fedhdp.privacy.accounting import format_epsilon
from fedhdp.privacy.attack import attack_curve
from fedhdp.privacy.costs import PrivacyCost
from fedhdp.privacy.ledger import Ledger, Run
from fedhdp.privacy.reports import GroupStanding, group_standing, restored_note
from fedhdp.privacy.spending import PACE_WEEKS, Spending, rounds_per_week, spending, weeks_left
from fedhdp.report.charts import Axes, Charts, Line, Reference, caption, empty
from fedhdp.report.html import Content, Html, Page, Panel, Section, card, isolated, join, name, short, table
from fedhdp.report.privacy import ATTACK_AXES, ATTACKER, TRUST, curve_line, format_mu, found_sentence

FOOTER = "Made by fedhdp. This file loads nothing from anywhere."
UNITS = {
    "days": datetime.timedelta(days=1),
    "hours": datetime.timedelta(hours=1),
    "minutes": datetime.timedelta(minutes=1),
}  # of the axis of time: the first of which two have passed


class Account(NamedTuple):
    """A group in the ledger: its standing, its spending over time, and for how many weeks its budget lasts."""

    standing: GroupStanding
    points: list[Spending]
    pace: float  # rounds in a week
    weeks: float | None

    @property
    def costs(self) -> list[PrivacyCost]:
        """What it was charged."""
        return [PrivacyCost(**charge) for charge in self.standing.charges]

    @property
    def left(self) -> str:
        """What is left, in words."""
        rounds = self.standing.rounds_left
        if self.standing.budget is None:
            return "no budget"
        if self.standing.is_exhausted:
            return "exhausted"
        if rounds is None or rounds == math.inf:
            return "–" if rounds is None else "any number of rounds"
        return f"{int(rounds):,} round{'' if rounds == 1 else 's'}"

    @property
    def lasts(self) -> str:
        """For how long that lasts, in words."""
        if self.weeks is None or self.standing.is_exhausted:
            return ""
        if self.weeks == math.inf:
            return "no round in the last four weeks" if self.pace == 0 else "for ever"
        return f"{self.weeks:.1f} weeks at {_rate(self.pace)} rounds a week"


def ledger_page(ledger: Ledger, delta: float, now: datetime.datetime | None = None) -> str:
    """The page of a ledger.

    Args:
        ledger: The ledger.
        delta: The delta for groups without a budget.
        now: The time at which the pace is taken; None: the present.
    """
    now = now or datetime.datetime.now(datetime.UTC)
    charts, accounts = Charts(), [_account(ledger, group, delta, now) for group in ledger.groups()]
    start = min((account.points[0].time for account in accounts if account.points), default=now)
    unit = next((unit for unit, length in UNITS.items() if now - start >= 2 * length), "minutes")
    spent = [_spending_panel(charts, number, account, (start, now), unit) for number, account in enumerate(accounts)]
    attacks = [_attack_panel(charts, account) for account in accounts if account.standing.epsilon is not None]
    sections = [
        Section(
            "spending", "What was spent over time", f"Since {start:%Y-%m-%d %H:%M} UTC, over all runs, by RDP.", spent
        ),
        Section("promise", "What this means for a client", TRUST, attacks),
        Section("groups", "Groups", "", [Panel("What is left", _groups(accounts), wide=True)]),
        Section("runs", "Runs", "", [Panel("All runs, the oldest first", _runs(ledger.runs()), wide=True)]),
    ]
    spending_words = [f"{isolated(account.standing.group)}: {_spent(account)}" for account in accounts]
    lead = "; ".join(spending_words) or "Nobody is in it yet"
    data: dict[str, object] = {"charts": charts.data, "version": ""}
    title = f"{ledger.path.name} on {now:%Y-%m-%d}"
    cards = [_card(account) for account in accounts]
    notice = restored_note(ledger)
    return Page(f"{title} – fedhdp", name(title), f"{lead}.", cards, sections, data, FOOTER, notice).render()


def _account(ledger: Ledger, group: str, delta: float, now: datetime.datetime) -> Account:
    standing = group_standing(ledger, group, delta)
    points = spending(ledger, group, standing.delta)
    pace = rounds_per_week(points, now)
    return Account(standing, points, pace, weeks_left(standing.rounds_left, pace))


def _spent(account: Account) -> str:
    standing = account.standing
    if standing.epsilon is None:
        return "no epsilon, since costs do not compose"
    budget = "" if standing.budget is None else f" of {format_epsilon(standing.budget.epsilon, 2)}"
    return f"ε {format_epsilon(standing.epsilon, 2)}{budget} spent"


def _card(account: Account) -> Html:
    standing = account.standing
    epsilon = "–" if standing.epsilon is None else f"ε {format_epsilon(standing.epsilon, 2)}"
    budget = "no budget" if standing.budget is None else f"budget ε {format_epsilon(standing.budget.epsilon, 2)}"
    mu = "" if standing.epsilon is None else f", μ {format_mu(attack_curve(account.costs, 'rdp'))}"
    left = "" if standing.budget is None else f"left: {account.left}"
    return card(name(short(standing.group, 30)), epsilon, f"{budget}, δ {standing.delta:g}{mu}", left, account.lasts)


def _rate(pace: float) -> str:
    return f"{pace:,.0f}" if pace >= 100 else f"{pace:.3g}"


def _spending_panel(
    charts: Charts, number: int, account: Account, period: tuple[datetime.datetime, datetime.datetime], unit: str
) -> Panel:
    """A group's epsilon over a period, in this unit of time."""
    standing, (start, end) = account.standing, period
    points = [((point.time - start) / UNITS[unit], point.epsilon) for point in account.points]
    finite = [(x, y) for x, y in points if math.isfinite(y)]
    group = name(short(standing.group))
    if not finite or len(finite) < len(points):
        words = (
            "Without noise nothing limits the spending." if points and not finite else standing.note or "No rounds yet."
        )
        return Panel(join([group, ": no epsilon to draw"]), empty(words))
    steps = [(0.0, 0.0)]
    for x, y in finite:
        steps += [(x, steps[-1][1]), (x, y)]
    steps.append((max((end - start) / UNITS[unit], steps[-1][0]), steps[-1][1]))
    line = Line(standing.group, "c-fedhdp", (0, 0), steps, value=f"ε {format_epsilon(finite[-1][1], 2)}")
    budget = standing.budget
    is_finite = budget is not None and math.isfinite(budget.epsilon)
    references = (
        [Reference(f"budget: ε {format_epsilon(budget.epsilon)}", budget.epsilon)] if budget and is_finite else []
    )
    axes = Axes(
        f"{unit} since the first run", "ε", y_range=(0.0, 0.0), format=lambda value: f"ε {format_epsilon(value, 3)}"
    )
    figure = charts.add(f"spending-{number}", [line], axes, references, unit="ε over all runs")
    share = f", {finite[-1][1] / budget.epsilon:.0%} of its budget" if budget and is_finite and budget.epsilon else ""
    title = join([group, f" spent ε {format_epsilon(finite[-1][1], 2)}{share}"])
    return Panel(title, join([figure, caption(account.lasts and f"What is left lasts {account.lasts}.")]))


def _attack_panel(charts: Charts, account: Account) -> Panel:
    curve, group = attack_curve(account.costs, "rdp"), account.standing.group
    line = curve_line(curve, group, "c-fedhdp", (0, 0))
    figure = charts.add(f"attack-{len(charts.data)}", [line], ATTACK_AXES, unit="clients found, %, at most")
    return Panel(found_sentence(group, curve), join([figure, caption(ATTACKER, "Dashed: guessing.")]))


def _groups(accounts: Sequence[Account]) -> Html:
    header = ["group", "clients", "budget", "δ", "ε", "rounds", "left", "rounds a week", "weeks left"]
    rows: list[list[Content]] = []
    for account in accounts:
        s = account.standing
        budget = "none" if s.budget is None else format_epsilon(s.budget.epsilon)
        rounds = sum(charge["rounds"] for charge in s.charges)
        weeks = "–" if account.weeks is None else "∞" if account.weeks == math.inf else f"{account.weeks:.1f}"
        epsilon = "–" if s.epsilon is None else format_epsilon(s.epsilon)
        numbers = [
            f"{s.clients:,}",
            budget,
            f"{s.delta:g}",
            epsilon,
            f"{rounds:,}",
            account.left,
            _rate(account.pace),
            weeks,
        ]
        rows.append([name(s.group), *numbers])
    words = (
        f"left: rounds like the costliest of the group's last run. The pace is that of the last {PACE_WEEKS:g} weeks."
    )
    return join([table(header, rows), caption(words)])


def _runs(runs: Sequence[Run]) -> Html:
    rows: list[list[Content]] = [[name(r.name), r.started[:16].replace("T", " "), f"{r.charged:,}"] for r in runs]
    return (
        table(["run", "started (UTC)", "rounds charged"], rows, texts=1, sortable=True)
        if rows
        else empty("No runs yet.")
    )

"""The page of an audit: what attacks found of canaries beside the claims, measurements of the noise, and mutants."""

from __future__ import annotations

import math
from collections.abc import Sequence

from scipy.special import ndtr, ndtri

from fedhdp.privacy.accounting import format_epsilon, pluralize
from fedhdp.privacy.attack import RATES, AttackCurve, curve_of_epsilon
from fedhdp.privacy.audit.results import Attack, AuditReport, GroupAudit
from fedhdp.report.charts import Charts, Line, caption
from fedhdp.report.html import Content, Html, Page, Panel, Section, card, join, name, short, table
from fedhdp.report.privacy import ATTACK_AXES, ATTACKER

FOOTER = "Made by fedhdp. This file loads nothing from anywhere."
ATTACKS = ("unknown_coins", "known_coins", "clip_bits", "training")


def audit_page(report: AuditReport) -> str:
    """The page of an audit."""
    charts = Charts()
    curves = [_curve_panel(charts, number, group) for number, group in enumerate(report.groups)]
    sections = [
        Section(
            "attacks", "What attacks found", ATTACKER, [*curves, Panel("All attacks", _attacks(report), wide=True)]
        ),
        Section(
            "checks", "What was measured of the noise", "", [Panel(_checks_title(report), _checks(report), wide=True)]
        ),
    ]
    if report.mutants:
        panel = Panel("Faults that were put into the server", _mutants(report), wide=True)
        sections.append(Section("mutants", "Faulty servers", "An audit that catches no fault proves nothing.", [panel]))
    title = f"audit of {report.experiment}{f', {report.variant}' if report.variant else ''}"
    size = f"{pluralize(report.runs, 'run')} of {pluralize(report.rounds)}"
    verdict = "No claim was refuted" if report.holds else "A claim was refuted, or a fault was not caught"
    footer = f"fedhdp {report.version}; coins of seed {report.seed}; {report.seconds:.0f} s. {FOOTER}"
    cards = [_card(group) for group in report.groups]
    data: dict[str, object] = {"charts": charts.data, "version": ""}
    lead = f"{verdict}, in {size}, where a sound system passes with probability {report.confidence:g} or more."
    return Page(f"{title} – fedhdp", name(title), lead, cards, sections, data, footer).render()


def _card(group: GroupAudit) -> Html:
    known = [bound for bound in group.lower_bounds.values() if bound is not None]
    lower = f"attacks show ε of at least {max(known, default=0.0):.2g}"
    verdict = "holds" if group.holds else "REFUTED"
    claim = f"ε {format_epsilon(group.claimed_epsilon, 2)}"
    return card(join([name(short(group.name, 30)), ", claim"]), claim, f"{lower}, δ {group.delta:g}", verdict)


def _curve_panel(charts: Charts, number: int, group: GroupAudit) -> Panel:
    """The attack on all rounds beside the curve that the claim allows."""
    attack = group.unknown_coins
    measured = [(100 * x, 100 * y) for x, y in sorted(attack.roc) if x >= RATES[0]]
    claim = _claimed_curve(attack, group)
    allowed = [(100 * x, 100 * y) for x, y in zip(claim.false_positive_rates, claim.true_positive_rates, strict=True)]
    lines = [
        Line(
            "what the claim allows",
            "c-claim",
            (0, 0),
            allowed,
            value=f"ε {format_epsilon(group.claimed_epsilon, 2)}",
        ),
        Line("what the attack found", "c-fedhdp", (1, 1), measured, value=f"AUC {attack.auc:.3f}"),
    ]
    figure = charts.add(f"attack-{number}", lines, ATTACK_AXES, unit="canaries found, %")
    verdict = "does not refute the claim" if attack.holds else "refutes the claim"
    title = join([name(short(group.name)), f": the attack {verdict}"])
    words = f"{attack.with_canary:,} scores with a canary, {attack.without_canary:,} without. With so few, the"
    words += " curve may be above the claim by chance, which the bounds below allow for. Dashed: guessing."
    return Panel(title, join([figure, caption(words)]))


def _claimed_curve(attack: Attack, group: GroupAudit) -> AttackCurve:
    """The curve of the claim: that of its epsilon at every false-positive rate, and of its μ where that is less."""
    curve = curve_of_epsilon(group.claimed_epsilon, group.delta)
    if not math.isfinite(attack.claimed_mu):
        return curve
    gaussian = [float(ndtr(attack.claimed_mu + ndtri(rate))) for rate in RATES]
    found = tuple(min(pair) for pair in zip(gaussian, curve.true_positive_rates, strict=True))
    return curve._replace(true_positive_rates=found)


def _attacks(report: AuditReport) -> Html:
    methods = list(dict.fromkeys(method for group in report.groups for method in group.unknown_coins.lower_bounds))
    header = [
        "group",
        "attack",
        "ε claimed",
        "μ claimed",
        *(f"ε shown, {method}" for method in methods),
        "AUC",
        "TPR at 1%",
        "result",
    ]
    rows: list[list[Content]] = []
    for group in report.groups:
        for kind in ATTACKS:
            attack: Attack | None = getattr(group, kind)
            if attack is not None:
                bounds = [_number(attack.lower_bounds.get(method)) for method in methods]
                claims = [format_epsilon(attack.claimed_epsilon), _number(attack.claimed_mu)]
                rates = [f"{attack.auc:.3f}", f"{attack.tpr_at_1_percent_fpr:.3f}"]
                words = kind.replace("_", " ")
                rows.append([name(group.name), words, *claims, *bounds, *rates, group.verdict(attack)])
    words = "unknown coins: all rounds, who was sampled is secret. known coins: one round whose cohort is known. clip bits: "
    words += "those of one round."
    return join([table(header, rows, texts=2), caption(words)])


def _checks_title(report: AuditReport) -> str:
    off = sum(not check.holds for check in report.checks)
    return "Every measurement is as promised" if not off else f"{off} measurements are off the promise"


def _checks(report: AuditReport) -> Html:
    rows: list[list[Content]] = [
        [
            check.name,
            check.about,
            _number(check.measured),
            _number(check.promised),
            f"{check.p_value:.2g}",
            "holds" if check.holds else "OFF",
        ]
        for check in report.checks
    ]
    return table(["measured", "of what", "value", "promised", "p", "result"], rows, texts=2)


def _mutants(report: AuditReport) -> Html:
    rows: Sequence[Sequence[Content]] = [
        [mutant.name, mutant.about, ", ".join(mutant.caught_by), "caught" if mutant.caught else "MISSED"]
        for mutant in report.mutants
    ]
    return table(["mutant", "what is wrong", "caught by", "result"], rows, texts=3)


def _number(value: float | None) -> str:
    return "–" if value is None else "∞" if value == math.inf else f"{value:.4g}"

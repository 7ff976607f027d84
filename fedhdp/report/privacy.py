"""What the promise means, in words and as attack curves; and epsilon over rounds against budgets."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

from fedhdp.privacy.accounting import compose, format_epsilon, is_accounting_installed
from fedhdp.privacy.attack import AttackCurve, attack_curve, curve_of_epsilon, format_found
from fedhdp.privacy.costs import ADJACENCY, SAMPLER, PrivacyCost
from fedhdp.report.charts import Axes, Charts, Line, Reference, caption, empty
from fedhdp.report.html import Content, Html, Panel, Section, definitions, element, join, name, short, table
from fedhdp.report.rows import Row, Study, accountant_of
from fedhdp.results.schema import GroupResult

CURVE_POINTS = 24  # of epsilon over rounds
TRUST = (
    "The server sees each client's update before the noise. It is trusted to add the noise and to publish nothing else. "
    "Who sees only what it publishes, all models and clips, learns no more than this page says."
)
EARLIER = (
    "The run began with another run's model. Its ε, μ and curves are of its own rounds; "
    "the lines below the table compose both."
)
ATTACKER = (
    "The attacker knows the algorithm, all other clients' data and everything that the server publishes, and decides for "
    "one client whether it took part."
)
ATTACK_AXES = Axes(
    "clients accused wrongly, % (false positives)",
    "clients found, % (true positives)",
    x_log=True,
    y_range=(0.0, 100.0),
    fixed=True,
    format="{:.1f}%".format,
    diagonal=True,
)
cached_curve = functools.lru_cache(maxsize=256)(attack_curve)


def curve_of(row: Row, group: str) -> AttackCurve | None:
    """The attack curve of a group, by the costs of its rounds; else by its epsilon alone; None where neither is known."""
    result = row.group(group)
    if not is_accounting_installed() or result.epsilon is None:
        return None
    costs = row.costs(group)
    if costs is None:
        return curve_of_epsilon(result.epsilon, result.delta or 0.0)
    return cached_curve(tuple(costs), accountant_of(result))


def format_mu(curve: AttackCurve | None) -> str:
    """A curve's μ, rounded up."""
    return "–" if curve is None else format_epsilon(curve.mu, 2)


def format_noise(multiplier: float) -> str:
    """A noise multiplier; infinite for clients whose updates are not used."""
    return "∞" if multiplier == math.inf else f"{multiplier:.4g}"


def found_sentence(group: str, curve: AttackCurve) -> str:
    """What a curve means for a reader; an empty group is the clients that the page is about."""
    if curve.found_at_one_percent >= 1:
        whose = f"the clients of “{short(group)}”" if group else "these clients"
        return f"Nothing limits what an attacker finds out about {whose}: they have no noise."
    whose = f"clients of “{short(group)}”" if group else "of these clients"
    found = format_found(curve.found_at_one_percent)
    return f"An attacker who may be wrong once in a hundred finds at most {found} in 100 {whose}."


def promise_section(study: Study, charts: Charts) -> Section:
    """What the promise means: unit, neighbour, trust, numbers, and an attack curve for each group."""
    panels = [Panel("The promise in words", _words(study), wide=True)]
    panels += [_attack_panel(study, charts, number, group) for number, group in enumerate(study.groups)]
    panels.append(Panel("Its numbers, by group", _numbers(study), wide=True))
    lead = "Each group has its own protection. An epsilon is for one variant, shown alone, over all of its rounds."
    return Section("promise", "What is promised to clients", lead, panels)


def _words(study: Study) -> Html:
    samplings = dict.fromkeys(row.mechanism.sampling for row in study.rows if row.mechanism is not None)
    pairs: list[tuple[Content, Content]] = [
        ("Unit", "one client with all of its data, over all rounds"),
        ("Neighbours", "; ".join(ADJACENCY[sampling] for sampling in samplings) or "not known"),
        ("Sampling", "; ".join(SAMPLER[sampling] for sampling in samplings) or "not known"),
        ("Who is trusted", TRUST),
        *([("Earlier runs", EARLIER)] if any(row.result.start_covered is not None for row in study.rows) else []),
        ("Not covered", "what this page marks as not to be published; the choice of a group, and group sizes"),
    ]
    return definitions(pairs)


def _numbers(study: Study) -> Html:
    """A line for each group's distinct numbers, with the variants that have them."""
    lines: dict[tuple[Content, ...], list[str]] = {}
    for group in study.groups:
        for row in study.rows:
            result = next((part for part in row.result.groups if part.name == group), None)
            if result is not None:
                lines.setdefault(_number_cells(row, result), []).append(row.name)
    header = ["group", "variants", "clients", "q", "z", "T", "δ", "ε asked", "ε", "μ", "accountant"]
    body = [[name(str(cells[0])), join(map(name, names), ", "), *cells[1:]] for cells, names in lines.items()]
    note = (
        "q: a client's probability to take part in a round. z: noise over what one client can change, both queries of a "
        "round together. T: rounds. μ: the Gaussian mechanism that permits at least as much as the attack curve."
    )
    return join([table(header, body, texts=2), caption(note)])


def _number_cells(row: Row, result: GroupResult) -> tuple[Content, ...]:
    costs = row.costs(result.name)
    z = costs[0].noise_multiplier if costs else result.noise_multiplier
    asked = "–" if result.epsilon_target is None else format_epsilon(result.epsilon_target)
    had = "not known" if result.epsilon is None else format_epsilon(result.epsilon, 3)
    return (
        result.name,
        f"{result.clients:,}" if result.clients else "–",
        f"{result.sampling_rate:g}",
        format_noise(z),
        f"{result.rounds:,}",
        "–" if result.delta is None else f"{result.delta:g}",
        asked,
        had,
        format_mu(curve_of(row, result.name)),
        (result.accountant or "–").upper(),
    )


def _attack_panel(study: Study, charts: Charts, number: int, group: str) -> Panel:
    lines, sentences = [], []
    for row in study.rows:
        if not row.has(group):
            continue
        curve = curve_of(row, group)
        if curve is None:
            continue
        lines.append(curve_line(curve, row.name, row.style, (row.number,), row.dash))
        sentences.append((row, found_sentence(group, curve)))
    if not lines:
        return Panel(join(["Attacks on ", name(short(group))]), empty("dp-accounting is not installed: no curve."))
    figure = charts.add(f"attack-{number}", lines, ATTACK_AXES, unit="clients found, %, at most")
    return Panel(
        _main_sentence(sentences), join([figure, caption(ATTACKER, "Dashed: guessing.", _basis(study, group))])
    )


def curve_line(curve: AttackCurve, label: str, style: str, numbers: tuple[int, ...], dash: int = 0) -> Line:
    """An attack curve as a line, in percent."""
    points = zip(curve.false_positive_rates, curve.true_positive_rates, strict=True)
    found = f"{format_found(curve.found_at_one_percent)} in 100"
    return Line(label, style, numbers, [(100 * x, 100 * y) for x, y in points], dash=dash, value=found)


def _main_sentence(sentences: Sequence[tuple[Row, str]]) -> str:
    """The sentence of the last FedHDP, which is what the page is about; else of the last row."""
    own = [sentence for row, sentence in sentences if row.result.algorithm == "fedhdp"]
    return own[-1] if own else sentences[-1][1]


def _basis(study: Study, group: str) -> str:
    if all(row.costs(group) is not None for row in study.rows if row.has(group)):
        return "The curve is an upper bound, by the same accountant as ε."
    return "An upper bound; where the rounds' costs differ from each other, by ε and δ alone."


def epsilon_section(study: Study, charts: Charts) -> Section:
    """Epsilon over rounds of each group, against its budget or the epsilon that it asked for."""
    panels = [_epsilon_panel(study, charts, number, group) for number, group in enumerate(study.groups)]
    return Section(
        "epsilon", "What was spent", "Epsilon grows with every round that a client could have been in.", panels
    )


def _epsilon_panel(study: Study, charts: Charts, number: int, group: str) -> Panel:
    lines, unlimited = [], []
    references: dict[tuple[str, float], Reference] = {}
    for row in study.rows:
        result = next((part for part in row.result.groups if part.name == group), None)
        if result is None:
            continue
        points = _epsilon_points(row, result)
        if result.unprotected:
            unlimited.append(short(row.name))
        elif points:
            lines.append(
                Line(
                    row.name,
                    row.style,
                    (row.number,),
                    points,
                    dash=row.dash,
                    value=f"ε {format_epsilon(points[-1][1], 2)}",
                )
            )
        for label, epsilon in _limits(study, result):
            references[label, epsilon] = Reference(f"{label}: ε {format_epsilon(epsilon)}", epsilon)
    note = f"No noise, so ε is ∞: {', '.join(unlimited)}." if unlimited else ""
    if not lines:
        words = note or "Nothing was spent, or ε is not known."
        return Panel(join([name(short(group)), ": no epsilon to draw"]), empty(words))
    axes = Axes("round", "ε", y_range=(0.0, 0.0), format=lambda value: f"ε {format_epsilon(value, 3)}")
    figure = charts.add(f"epsilon-{number}", lines, axes, list(references.values()), unit="ε (privacy loss)")
    title = join([name(short(group)), _spent_words(study, group, lines, list(references.values()))])
    return Panel(title, join([figure, caption(note)]))


def _spent_words(study: Study, group: str, lines: Sequence[Line], references: Sequence[Reference]) -> str:
    """What the page's main row spent; else the largest epsilon of the others."""
    main = study.main
    own = [line for line in lines if main.number in line.numbers]
    if not own and main.has(group) and main.group(group).unprotected:
        return f": no noise with {short(main.name, 28)}, so ε is ∞ there"
    spent = max(line.points[-1][1] for line in own or lines)
    return f" spent ε {format_epsilon(spent, 2)}{_of_limit(references, spent)}"


def _epsilon_points(row: Row, result: GroupResult) -> list[tuple[float, float]]:
    """Epsilon over rounds: as the run recorded it, or composed from the cost of its rounds."""
    recorded = row.series(result.name, "global", "epsilon")
    if recorded:
        return [(float(point.round), point.mean) for point in recorded]
    if result.epsilon in (None, math.inf) or result.delta is None or not result.rounds:
        return []
    costs = row.costs(result.name)
    if costs is None:
        return [(float(result.rounds), float(result.epsilon or 0.0))]
    [cost] = costs
    numbers = sorted({max(1, round(cost.rounds * i / CURVE_POINTS)) for i in range(1, CURVE_POINTS + 1)})
    return [(0.0, 0.0), *((float(n), _composed(cost, n, result)) for n in numbers)]


def _composed(cost: PrivacyCost, rounds: int, result: GroupResult) -> float:
    return compose([cost._replace(rounds=rounds)], result.delta or 0.0, accountant_of(result))


def _limits(study: Study, result: GroupResult) -> list[tuple[str, float]]:
    """The budget of a group over all runs, and the epsilon that it asked for."""
    limits = []
    for run in study.runs:
        budget = run.settings.get(f"budgets.{result.name}.epsilon")
        if isinstance(budget, int | float) and math.isfinite(budget):
            limits.append(("budget over all runs", float(budget)))
    if result.epsilon_target is not None and math.isfinite(result.epsilon_target):
        limits.append(("asked for", result.epsilon_target))
    return list(dict.fromkeys(limits))


def _of_limit(references: Sequence[Reference], spent: float) -> str:
    finite = [reference.y for reference in references]
    return f", {spent / min(finite):.0%} of its limit" if finite else ""


def privacy_notes(study: Study) -> Html:
    """What a reader must know of several variants shown together."""
    private = [row for row in study.rows if any(not g.unprotected and g.rounds for g in row.result.groups)]
    has_ledger = any(run.settings.get("ledger") for run in study.runs)
    words = []
    if len(private) >= 2 and not has_ledger:
        words.append(
            "The variants used the same cohorts. Each ε is for its variant shown alone; several shown together cost more."
        )
    if private and study.seeds > 1:
        words.append(
            "Each ε is for the run of one seed. Of the same clients the runs of several seeds cost as much as one run of "
            "all their rounds."
        )
    return element("p", " ".join(words), class_="caption") if words else Html("")

"""Pages of what is promised before anything is run: a plan, the epsilons of an experiment, and of given rounds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from fedhdp.privacy.accounting import Accountant, format_epsilon, pluralize
from fedhdp.privacy.attack import attack_curve
from fedhdp.privacy.costs import PrivacyCost, privacy_costs
from fedhdp.privacy.reports import GroupReport, LevelReport, MechanismReport
from fedhdp.privacy.rounds import RoundsReport
from fedhdp.report.charts import Axes, Charts, Line, Reference, caption
from fedhdp.report.html import (
    Content,
    Html,
    Page,
    Panel,
    Section,
    card,
    isolated,
    join,
    name,
    short,
    style_of,
    table,
    with_isolated,
)
from fedhdp.report.privacy import (
    ATTACK_AXES,
    ATTACKER,
    TRUST,
    curve_line,
    format_mu,
    format_noise,
    found_sentence,
)
from fedhdp.theory.planning import ErrorEstimate, Plan, describe_gain

ALGORITHMS = {
    "fedhdp": ("FedHDP, planned weights", "c-fedhdp"),
    "fedhdp_per_group": ("FedHDP, noise per group", "c-fedhdp"),
    "hdp_fedavg": ("HDP-FedAvg, equal weights", "c-hdp-fedavg"),
    "dp_fedavg": ("DP-FedAvg, strictest for all", "c-dp-fedavg"),
    "non_private": ("non-private", "c-non-private"),
}
OWN = "c-fedhdp"
FOOTER = "Made by fedhdp. This file loads nothing from anywhere."


def _render(title: str, lead: Content, cards: Sequence[Html], sections: Sequence[Section], charts: Charts) -> str:
    data: dict[str, object] = {"charts": charts.data, "version": ""}
    return Page(f"{title} – fedhdp", name(title), lead, cards, sections, data, FOOTER).render()


def _attack_panel(charts: Charts, group: str, cost: PrivacyCost, accountant: Accountant) -> Panel:
    """The attack curve of one group."""
    curve = attack_curve([cost], accountant)
    return _curves_panel(charts, found_sentence(group, curve), [curve_line(curve, "all rounds", OWN, (0, 0))])


def _curves_panel(charts: Charts, title: str, lines: Sequence[Line]) -> Panel:
    figure = charts.add(f"attack-{len(charts.data)}", lines, ATTACK_AXES, unit="clients found, %, at most")
    return Panel(title, join([figure, caption(ATTACKER, "Dashed: guessing.")]))


def _epsilon_card(
    group: str, epsilon: float, costs: Sequence[PrivacyCost], accountant: Accountant, *details: str
) -> Html:
    curve = attack_curve(costs, accountant)
    return card(
        join([name(short(group, 30)), ", privacy"]),
        f"ε {format_epsilon(epsilon, 2)}",
        f"μ {format_mu(curve)}",
        *details,
    )


def plan_page(plans: Mapping[str, Plan]) -> str:
    """The page of a plan, or of several by the name of their set of levels."""
    charts = Charts()
    first = next(iter(plans.values()))
    costs = {key: privacy_costs(plan.mechanism, plan.rounds) for key, plan in plans.items()}
    cards = [
        _epsilon_card(f"{key}: {level.name}" if len(plans) > 1 else level.name, level.epsilon, [costs[key][level.name]],
                      plan.accountant, f"{level.clients:,} clients, weight {level.weight:.2g}")
        for key, plan in plans.items() for level in plan.levels
    ]  # fmt: skip
    panels = [
        _attack_panel(charts, _title(level.name, key, len(plans)), costs[key][level.name], plan.accountant)
        for key, plan in plans.items()
        for level in plan.levels
    ]
    levels = Panel("Levels", _levels_table(plans), wide=True)
    errors = [_errors_panel(charts, key, plan, len(plans) > 1) for key, plan in plans.items()]
    choices = [
        Panel(_title("Error if a level's clients chose otherwise", key, len(plans)), _choices(p), wide=True)
        for key, p in plans.items()
    ]
    sections = [
        Section("promise", "What each level would be promised", TRUST, [*panels, levels]),
        Section(
            "error",
            "What it would cost the model",
            "Expected error in units of the clip, by theory: nothing was run.",
            [*errors, *choices],
        ),
    ]
    heading = f"plan: {first.clients:,} clients, cohort {first.cohort:g}, {pluralize(first.rounds)}"
    return _render(heading, _plan_lead(plans), cards, sections, charts)


def _plan_lead(plans: Mapping[str, Plan]) -> str:
    """The gain of the levels; for several sets of levels, the error of each."""
    if len(plans) == 1:
        [plan] = plans.values()
        return with_isolated(describe_gain(plan), [level.name for level in plan.levels])
    errors = {key: plan.error_estimates["fedhdp"].error for key, plan in plans.items()}
    ordered = sorted(errors, key=lambda key: errors[key])
    parts = [f"{isolated(key)} {errors[key]:.3g}" for key in ordered]
    return f"Expected error of the model by set of levels, the least first: {', '.join(parts)}."


def _title(words: str, key: str, count: int) -> str:
    return f"{short(key)}: {words}" if count > 1 else words


def _levels_table(plans: Mapping[str, Plan]) -> Html:
    sets = ["set"] * (len(plans) > 1)
    header = [*sets, "level", "clients", "cohort", "ε asked", "ε", "noise z", "weight r", "share of the mean"]
    rows: list[list[Content]] = []
    for key, plan in plans.items():
        for level in plan.levels:
            numbers = [f"{level.clients:,}", f"{level.expected_cohort_size:.4g}", format_epsilon(level.target_epsilon)]
            numbers += [format_epsilon(level.epsilon), format_epsilon(level.noise_multiplier), f"{level.weight:.2g}"]
            rows.append([*[name(key)][: len(sets)], name(level.name), *numbers, f"{level.weight_share:.0%}"])
    plan = next(iter(plans.values()))
    words = (
        f"Noise keeps ε at δ {plan.delta:g} by {plan.accountant.upper()}: Poisson sampling, add or remove one client."
    )
    return join([table(header, rows, texts=1 + len(sets)), caption(words)])


def _errors_panel(charts: Charts, key: str, plan: Plan, several: bool) -> Panel:
    """The parts of each algorithm's error, as points."""
    places = ("noise", "sampling", "weighting bias", "error")
    lines = []
    for i, (algorithm, (label, style)) in enumerate(ALGORITHMS.items()):
        estimate = plan.error_estimates[algorithm]
        values = (estimate.noise, estimate.sampling, estimate.weighting_bias, estimate.error)
        points = [(float(place), value) for place, value in enumerate(values)]
        lines.append(Line(label, style, (i, i), points, dash=i, value=f"{estimate.error:.3g}"))
    axes = Axes(
        "part of the error, and all together",
        "error",
        joined=False,
        places=places,
        y_range=(0.0, 0.0),
        format="{:.3g}".format,
    )
    figure = charts.add(f"error-{len(charts.data)}", lines, axes, unit="error of the model, in clips")
    best = min(
        ALGORITHMS,
        key=lambda algorithm: plan.error_estimates[algorithm].error if algorithm != "non_private" else math.inf,
    )
    title = f"Least error with noise: {ALGORITHMS[best][0]}"
    return Panel(
        _title(title, key, 2 if several else 1), join([figure, caption("No intervals: closed forms.")]), wide=False
    )


def _choices(plan: Plan) -> Html:
    header = ["level", "as planned", "opted out", "without them", "equal weights", "equal weights, without them"]
    planned, equal = plan.error_estimates["fedhdp"], plan.error_estimates["hdp_fedavg"]

    def text(estimate: ErrorEstimate | None) -> str:
        return "–" if estimate is None else f"{estimate.error:.3g}"

    rows = [
        [name(cost.name), *map(text, (planned, cost.opted_out, cost.without, equal, cost.equal_weights_without))]
        for cost in plan.costs
    ]
    return table(header, rows)


def mechanisms_page(
    title: str, reports: Sequence[MechanismReport], algorithms: Mapping[str, str], notes: Sequence[str] = ()
) -> str:
    """The page of an experiment's epsilons, before it is run.

    Args:
        title: The experiment.
        reports: The epsilons of variants.
        algorithms: The algorithm of each variant.
        notes: Sentences below the numbers.
    """
    charts, rows = Charts(), list[list[Content]]()
    for report in reports:
        label = join([name(variant) for variant in report.variants], ", ")
        for group in report.groups:
            asked = "–" if group.epsilon_target is None else format_epsilon(group.epsilon_target)
            numbers = [
                f"{group.clients:,}",
                f"{group.sampling_rate:g}",
                format_noise(group.noise_multiplier),
                f"{group.rounds:,}",
            ]
            rows.append([label, name(group.group), *numbers, f"{group.delta:g}", asked, format_epsilon(group.epsilon)])
    header = ["variants", "group", "clients", "q", "z", "T", "δ", "ε asked", "ε"]
    main = next((r for r in reversed(reports) if "fedhdp" in map(algorithms.get, r.variants)), reports[-1])
    groups = main.groups
    accountant: Accountant = "rdp" if groups[0].accountant == "rdp" else "pld"
    cards = [_epsilon_card(g.group, g.epsilon, [_cost(g)], accountant, f"δ {g.delta:g}") for g in groups]
    names = dict.fromkeys(group.group for report in reports for group in report.groups)
    panels = [_group_curves(charts, group, reports, main, algorithms, accountant) for group in names]
    basis = f"Neighbours: {groups[0].adjacency}; {accountant.upper()} accountant. z is the smallest of all rounds."
    numbers_panel = Panel("Numbers", join([table(header, rows, texts=2), caption(basis, *notes)]), wide=True)
    sections = [Section("promise", "What would be promised", TRUST, [*panels, numbers_panel])]
    lead = "; ".join(f"{isolated(g.group)}: ε {format_epsilon(g.epsilon, 2)}" for g in groups)
    variants = ", ".join(map(isolated, main.variants))
    return _render(f"{title}, before it is run", f"{lead} ({variants}).", cards, sections, charts)


def _cost(group: GroupReport) -> PrivacyCost:
    return PrivacyCost(group.noise_multiplier, group.sampling_rate, group.sampling, group.rounds)


def _group_curves(
    charts: Charts,
    group: str,
    reports: Sequence[MechanismReport],
    main: MechanismReport,
    algorithms: Mapping[str, str],
    accountant: Accountant,
) -> Panel:
    """A group's attack curves under all mechanisms; the title is about the main one, if it has the group."""
    lines, sentences = [], dict[bool, str]()
    for number, report in enumerate(reports):
        for of_group in (g for g in report.groups if g.group == group):
            curve = attack_curve([_cost(of_group)], accountant)
            for variant in report.variants:  # lines with the same points are drawn as one
                lines.append(curve_line(curve, variant, style_of(algorithms[variant]), (number, number)))
            sentences[report is main] = found_sentence(group, curve)
    return _curves_panel(charts, sentences.get(True) or sentences[False], lines)


def levels_page(title: str, reports: Sequence[LevelReport], rounds: int, sampling: str) -> str:
    """The page of a deployment's levels, before it is run."""
    charts = Charts()
    costs = {r.level: (PrivacyCost(r.noise_multiplier, r.sampling_rate, sampling, rounds),) for r in reports}
    panels = [_attack_panel(charts, r.level, costs[r.level][0], "rdp") for r in reports]
    header = ["level", "q", "z", "weight", "δ", "ε asked", "ε", "budget"]
    rows: list[list[Content]] = []
    for r in reports:
        known = [
            format_epsilon(value) if value is not None else "–" for value in (r.epsilon_target, r.epsilon, r.budget)
        ]
        rows.append(
            [
                name(r.level),
                f"{r.sampling_rate:g}",
                format_noise(r.noise_multiplier),
                "theory's" if r.weight is None else f"{r.weight:g}",
                f"{r.delta:g}",
                *known,
            ]
        )
    note = "Each level guarantees this whatever levels others choose."
    sections = [
        Section(
            "promise",
            "What each level is promised",
            TRUST,
            [*panels, Panel("Levels", join([table(header, rows), caption(note)]), wide=True)],
        )
    ]
    cards = [_epsilon_card(r.level, r.epsilon, costs[r.level], "rdp", f"δ {r.delta:g}") for r in reports]
    lead = "; ".join(f"{isolated(r.level)}: ε {format_epsilon(r.epsilon, 2)}" for r in reports)
    return _render(f"{title}: levels after {pluralize(rounds)}", f"{lead}.", cards, sections, charts)


def rounds_page(report: RoundsReport) -> str:
    """The page of rounds with given numbers."""
    charts = Charts()
    trainings = report.trainings or 1
    cost = PrivacyCost(report.noise_multiplier, report.sampling_rate, report.sampling, report.rounds * trainings)
    accountant: Accountant = "rdp" if report.accountant == "rdp" else "pld"
    panels = [_attack_panel(charts, "", cost, accountant)]
    unit = "round" if report.trainings is None else "training"
    points = [(float(point.trainings or point.rounds), point.epsilon) for point in report.curve]
    if points and all(math.isfinite(epsilon) for _, epsilon in points):
        line = Line("epsilon", OWN, (0, 0), [(0.0, 0.0), *points], value=f"ε {format_epsilon(report.epsilon, 2)}")
        asked = report.target_epsilon
        references = [] if asked is None else [Reference(f"asked for: ε {format_epsilon(asked)}", asked)]
        axes = Axes(unit, "ε", y_range=(0.0, 0.0), format=lambda value: f"ε {format_epsilon(value, 3)}")
        figure = charts.add("epsilon", [line], axes, references, unit="ε (privacy loss)")
        panels.append(Panel(f"ε over {unit}s: {format_epsilon(report.epsilon, 2)} at the end", figure))
    header = ["noise z", "q", "T", "δ", "ε", "sampling", "neighbours", "accountant"]
    rounds = f"{report.rounds:,}" if report.trainings is None else f"{trainings} × {report.rounds:,}"
    numbers = [format_epsilon(report.noise_multiplier), f"{report.sampling_rate:g}", rounds, f"{report.delta:g}"]
    row: list[Content] = [
        *numbers,
        format_epsilon(report.epsilon),
        report.sampling,
        report.adjacency,
        report.accountant.upper(),
    ]
    notes = [report.tuning] if report.tuning else []
    panels.append(Panel("Numbers", join([table(header, [row]), caption(*notes)]), wide=True))
    noise = f"noise of {format_epsilon(report.noise_multiplier)} times the L2 sensitivity"
    lead = f"ε {format_epsilon(report.epsilon, 2)} at δ {report.delta:g}, with {noise}."
    cards = [_epsilon_card("these clients", report.epsilon, [cost], accountant, f"δ {report.delta:g}")]
    return _render("cost of rounds", lead, cards, [Section("promise", "What is promised", TRUST, panels)], charts)

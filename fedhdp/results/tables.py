"""The results of a run as a table with the paper's columns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

from fedhdp.errors import require
from fedhdp.privacy.accounting import format_epsilon
from fedhdp.results.metrics import half_interval
from fedhdp.results.schema import GroupResult, MetricInfo, VariantResult

Cells = Sequence[str]


class _Columns(NamedTuple):
    """Which columns a table has."""

    metric: MetricInfo
    groups: list[str]  # as the table shows them: the last of the mechanism first
    models: dict[str, str]  # by the letter in the header
    server_models: dict[str, str]  # evaluated on the server's test set, by the suffix in the header

    def header(self) -> list[str]:
        """The names of the columns."""
        name = "Acc" if self.metric.name == "accuracy" else self.metric.name
        header = ["algorithm", *(f"{name}_{suffix}" for suffix in self.server_models)]
        for letter in self.models:
            header += [f"{letter}: {name}" for name in self.groups] + ([f"Δ_{letter}"] if len(self.groups) == 2 else [])
        return header + [f"ε {name}" for name in self.groups]


def table_cells(
    variants: list[VariantResult],
    variances: bool = True,
    other_seeds: Sequence[list[VariantResult]] = (),
    metric: str | None = None,
) -> tuple[list[str], list[list[str]]]:
    """Format a metric of results as the cells of a table, with the variance across clients in parentheses.

    Acc_g is the accuracy on the server's test set, if it has one, and Acc_avg that of the averaged model; another metric's
    columns have its name. For each group follow the clients' means on their own data: with the global model (g), where the
    server has no test set with the averaged model (a), with their personal models (l) and, where clients hold out data,
    with the pull that each chose (c). With two groups, Δ says by how much the less private are better off than the more
    private. As in the paper, a variance of rates is that of fractions, times 100.

    Args:
        variants: A row each; all have the same groups.
        variances: Whether to show variances.
        other_seeds: The same variants with other seeds. A cell is then the mean, with half of its 95% interval.
        metric: The metric's name. None: the first of the variants' metrics.

    Returns:
        The header and the rows.

    Raises:
        InvalidValueError: If there are no variants, or their groups differ, or they do not have the metric.
    """
    columns, rows = _columns(variants, other_seeds, metric), []
    for seeds in zip(variants, *other_seeds, strict=True):
        values_by_column = zip(*(_values(variant, columns) for variant in seeds), strict=True)
        cells = [_format_cell(columns.metric, values, variances) for values in values_by_column]
        groups = zip(*(reversed(variant.groups) for variant in seeds), strict=True)
        rows.append([seeds[0].name, *cells, *map(_epsilon, groups)])
    return columns.header(), rows


def _columns(variants: list[VariantResult], other_seeds: Sequence[list[VariantResult]], metric: str | None) -> _Columns:
    require(len(variants) > 0, "variants", variants, "one or more")
    names = [group.name for group in variants[0].groups]
    for variant in (variant for seed in (variants, *other_seeds) for variant in seed):
        groups = [group.name for group in variant.groups]
        require(groups == names, f"groups of {variant.name!r}", groups, f"the same in all variants, {names}")
    metrics = {info.name: info for variant in reversed(variants) for info in variant.metrics}
    shown = variants[0].metrics[0].name if metric is None else metric
    require(shown in metrics, "metric", shown, f"one that was measured ({', '.join(metrics)})")
    all_groups = [group for variant in variants for group in variant.groups]
    server_models = {
        suffix: model
        for suffix, model in (("g", "global"), ("avg", "average"))
        if any(variant.value(shown, model) is not None for variant in variants)
    }
    models = {"g": "global"}
    for letter, model in (("a", "average"), ("l", "personal"), ("c", "chosen")):
        if model == "average" and server_models:
            continue  # shown on the server's test set
        if any(group.value(shown, model) is not None for group in all_groups):
            models[letter] = model
    return _Columns(metrics[shown], names[::-1], models, server_models)


def _values(variant: VariantResult, columns: _Columns) -> list[tuple[float | None, float | None]]:
    """The numbers of a row, each with its variance across clients where it has one."""
    name, sign = columns.metric.name, 1 if columns.metric.higher_is_better else -1
    values: list[tuple[float | None, float | None]] = []
    values += [(variant.value(name, model), None) for model in columns.server_models.values()]
    for model in columns.models.values():
        means = [group.value(name, model) for group in variant.groups]
        variances = [group.value(f"{name}_variance", model) for group in variant.groups]
        values += list(zip(reversed(means), reversed(variances), strict=True))
        if len(means) == 2:
            first, last = means
            values.append((None if first is None or last is None else sign * (first - last), None))
    return values


def legend(header: Cells, metric: MetricInfo, variances: bool = True, seeds: str = "") -> list[str]:
    """What a table shows: a line about the metric, and one about whose model and data each column is of.

    Args:
        header: The names of the columns.
        metric: The metric of the table.
        variances: Whether the table has variances.
        seeds: How many seeds its means are of.
    """
    details = [seeds] if seeds else []
    if variances:
        details.append("variance across clients in parentheses")
    shown = f"{metric.name}{' in %' if metric.percent else ''}"
    parts = [f"{name}: the server's test set" for name in header if name.endswith("_g") and name[0] != "Δ"]
    letters = "g and l" if any(name.startswith("l:") for name in header) else "g"
    models = "the global and with personal models" if letters != "g" else "the global model"
    parts.append(f"{letters}: clients' own data, with {models}")
    if any(name.startswith("a:") for name in header):
        parts.append("a: with the averaged model")
    if any(name.startswith("c:") for name in header):
        parts.append("c: with the pull that each client chose")
    parts += [f"{name}: the averaged model" for name in header if name.endswith("_avg")]
    return [", ".join([shown, *details]), "; ".join(parts)]


def footnotes(variants: list[VariantResult], metric: str | None = None) -> list[str]:
    """The assumptions of the epsilons, runs that stopped early, refused updates, and noise that is not private.

    Args:
        variants: The variants of a table.
        metric: The metric that it shows; None: each variant's first.
    """
    lines: dict[str, list[str]] = {}
    for variant in variants:
        for note in variant.notes:
            lines.setdefault(note, []).append(variant.name)
        for group in variant.groups:
            if group.surplus is not None:
                line = f"{group.name} has more noise than it asked for, {group.surplus}"
                lines.setdefault(line, []).append(variant.name)
        if variant.algorithm == "dp_fedavg" and any(map(_has_less_epsilon, variant.groups)):
            line = "every group has the noise of the strictest, which the algorithm gives to all"
            lines.setdefault(line, []).append(variant.name)
    notes = [*_clients_left_out(variants, metric), *_epsilon_notes(variants)]
    notes += [f"{line} {_brackets(names)}" for line, names in lines.items()]
    if any(group.epsilon_target is not None for variant in variants for group in variant.groups):
        notes.insert(0, "ε: asked for → had")
    for variant in variants:
        refused = sum(group.refused for group in variant.groups)
        if variant.stopped:
            notes.append(f"{variant.name}: stopped after round {variant.rounds}: {variant.stopped}")
        if refused:
            notes.append(f"{variant.name}: updates refused, not finite or out of range: {refused}")
    notes += [f"inputs: {line}" for line in dict.fromkeys(variant.preparation for variant in variants) if line]
    if any(variant.repeatable for variant in variants):
        notes.append("noise and cohorts were drawn from a given seed: repeatable, and therefore not private")
    return notes


def _brackets(names: Sequence[str]) -> str:
    """The variants that a footnote is about, in brackets; of many the first."""
    unique = list(dict.fromkeys(names))
    remainder = [f"and {len(unique) - 2} more"] if len(unique) > 3 else []
    return f"[{'; '.join([*unique[: 2 if remainder else 3], *remainder])}]"


def _epsilon_notes(variants: Sequence[VariantResult]) -> list[str]:
    """The assumptions of each epsilon, with all groups and variants that have it."""
    holders: dict[tuple[str, str], dict[str, list[str]]] = {}
    for variant in variants:
        for group in variant.groups:
            if group.epsilon is not None and group.epsilon_basis is not None:
                names = holders.setdefault((format_epsilon(group.epsilon, 3), group.epsilon_basis), {})
                names.setdefault(group.name, []).append(variant.name)
    notes = []
    for (epsilon, basis), names in holders.items():
        groups: dict[str, list[str]] = {}
        for group_name, of_variants in names.items():
            groups.setdefault(_brackets(of_variants), []).append(group_name)
        notes += [f"ε {', '.join(alike)} = {epsilon}: {basis} {brackets}" for brackets, alike in groups.items()]
    return notes


def _clients_left_out(variants: Sequence[VariantResult], metric: str | None) -> list[str]:
    """How many clients the means of a metric count, where these are not all; over variants and seeds."""
    counts: dict[tuple[str, str, int], list[float]] = {}
    for variant in variants:
        for group in variant.groups:
            name = metric or variant.metrics[0].name
            count = group.value(f"{name}_clients")
            if count is not None:
                counts.setdefault((name, group.name, group.clients), []).append(count)
    parts: dict[str, list[str]] = {}
    for (name, group_name, clients), values in counts.items():
        low, high = f"{min(values):.0f}", f"{max(values):.0f}"
        if min(values) < clients:
            count_text = low if low == high else f"{low} to {high}"
            parts.setdefault(name, []).append(f"{count_text} of {clients} of {group_name}")
    reason = "others have no test examples, did not answer, or it is undefined there"
    return [f"{name} counts these clients: {', '.join(texts)}; {reason}" for name, texts in parts.items()]


def _has_less_epsilon(group: GroupResult) -> bool:
    """Whether a group had clearly less epsilon than it asked for; calibration is within 1%."""
    return (
        group.epsilon is not None and group.epsilon_target is not None and group.epsilon < 0.97 * group.epsilon_target
    )


def format_table(
    variants: list[VariantResult], other_seeds: Sequence[list[VariantResult]] = (), metric: str | None = None
) -> str:
    """Format results as plain text, with the metric's name, a legend and footnotes.

    Args:
        variants: A row each; all have the same groups.
        other_seeds: The same variants with other seeds (see `table_cells`).
        metric: The metric's name. None: the first of the variants' metrics.

    Returns:
        The lines, of any width.
    """
    header, rows = table_cells(variants, other_seeds=other_seeds, metric=metric)
    shown = _columns(variants, other_seeds, metric).metric
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    cells = [header, ["─" * width for width in widths], *rows]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    notes = footnotes([variant for seed in (variants, *other_seeds) for variant in seed], metric)
    return "\n".join([*legend(header, shown), *lines, *notes])


def _format_cell(metric: MetricInfo, values: Sequence[tuple[float | None, float | None]], variances: bool) -> str:
    """The mean over seeds with half of its interval and the mean variance across clients."""
    means = [value for value, _ in values if value is not None]
    spreads = [variance for _, variance in values if variance is not None]
    if not means:
        return "–"
    half = half_interval(means)
    text = metric.format(fmean(means)) + ("" if half is None else f" ±{metric.format(half)}")
    return text + (f" ({metric.format(fmean(spreads))})" if variances and spreads else "")


def _epsilon(seeds: Sequence[GroupResult]) -> str:
    """The epsilon that a group asked for, if it asked for one, and its largest among the seeds."""
    epsilons = [math.inf if group.unprotected else group.epsilon for group in seeds]
    known = [epsilon for epsilon in epsilons if epsilon is not None]
    text = format_epsilon(max(known), 2) if known else "–"
    target = seeds[0].epsilon_target
    if target is None or target == math.inf == max(known, default=None):
        return text
    return f"{format_epsilon(target)} → {text}"


def format_markdown(header: Cells, rows: Sequence[Cells], notes: Sequence[str] = (), texts: int = 1) -> str:
    """Format cells as a Markdown table: the first columns are text, the others are numbers."""
    lines = [header, [*["---"] * texts, *["---:"] * (len(header) - texts)], *rows]
    table = "\n".join(f"| {' | '.join(map(_markdown, line))} |" for line in lines)
    return "\n".join([table, *(f"\n{_markdown(note)}" for note in notes)]) + "\n"


def _markdown(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ")
    return escaped.replace("<", "&lt;").replace("*", "\\*").replace("_", "\\_")


def format_latex(header: Cells, rows: Sequence[Cells], notes: Sequence[str] = (), texts: int = 1) -> str:
    """Format cells as a LaTeX table of the package ``booktabs``: the first columns are text, the others are numbers."""
    columns = "l" * texts + "r" * (len(header) - texts)
    lines = [rf"\begin{{tabular}}{{{columns}}}", r"\toprule", _latex_row(header), r"\midrule"]
    lines += [*map(_latex_row, rows), r"\bottomrule", r"\end{tabular}"]
    return "\n".join(["% needs \\usepackage{booktabs}", *lines, *(rf"\par {_latex(note)}" for note in notes)]) + "\n"


def _latex_row(cells: Cells) -> str:
    return " & ".join(map(_latex, cells)) + r" \\"


_LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "\n": " ",
    "–": "--",
    "±": r"$\pm$",
    "→": r"$\to$",
    "∞": r"$\infty$",
    "ε": r"$\varepsilon$",
    "Δ": r"$\Delta$",
    "δ": r"$\delta$",
    "λ": r"$\lambda$",
    **{character: f"\\{character}" for character in "&%$#_{}"},
}


def _latex(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in text)

"""The results of a run as a table with the paper's columns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

from fedhdp.errors import require
from fedhdp.privacy.accounting import format_epsilon
from fedhdp.results.metrics import half_interval
from fedhdp.results.schema import GroupResult, VariantResult


class _Columns(NamedTuple):
    """Which columns a table has."""

    groups: list[str]  # as the table shows them: the last of the mechanism first
    models: dict[str, str]  # by the letter in the header
    averaged: bool  # whether there is an averaged model

    def header(self) -> list[str]:
        """The names of the columns."""
        header = ["algorithm", "Acc_g", *(["Acc_avg"] if self.averaged else [])]
        for letter in self.models:
            header += [f"{letter}: {name}" for name in self.groups] + ([f"Δ_{letter}"] if len(self.groups) == 2 else [])
        return header + [f"ε {name}" for name in self.groups]


def table_cells(
    variants: list[VariantResult], variances: bool = True, other_seeds: Sequence[list[VariantResult]] = ()
) -> tuple[list[str], list[list[str]]]:
    """Format results as the cells of a table: percentages, with the variance across clients in parentheses.

    Acc_g is the accuracy on the server's test set and Acc_avg that of the averaged model. For each group follow the
    clients' accuracies on their own data: with the global model (g), with their personal models (l) and, where clients
    hold out data, with the pull that each chose (c). With two groups, Δ is the accuracy of the less private minus that of
    the more private. As in the paper, a variance is that of fractions, times 100.

    Args:
        variants: A row each; all have the same groups.
        variances: Whether to show variances.
        other_seeds: The same variants with other seeds. A cell is then the mean, with half of its 95% interval.

    Returns:
        The header and the rows.

    Raises:
        InvalidValueError: If there are no variants, or their groups differ.
    """
    columns = _columns(variants, other_seeds)
    rows = []
    for seeds in zip(variants, *other_seeds, strict=True):
        cells = [_percent(values, variances) for values in zip(*(_scores(v, columns) for v in seeds), strict=True)]
        groups = zip(*(reversed(variant.groups) for variant in seeds), strict=True)
        rows.append([seeds[0].name, *cells, *map(_epsilon, groups)])
    return columns.header(), rows


def _columns(variants: list[VariantResult], other_seeds: Sequence[list[VariantResult]]) -> _Columns:
    require(len(variants) > 0, "variants", variants, "one or more")
    names = [group.name for group in variants[0].groups]
    for variant in (variant for seed in (variants, *other_seeds) for variant in seed):
        groups = [group.name for group in variant.groups]
        require(groups == names, f"groups of {variant.name!r}", groups, f"the same in all variants, {names}")
    all_groups = [group for variant in variants for group in variant.groups]
    models = {"g": "global"}
    for letter, model in (("l", "personal"), ("c", "chosen")):
        if any(getattr(group, f"{model}_accuracy") is not None for group in all_groups):
            models[letter] = model
    averaged = any(variant.server_average_accuracy is not None for variant in variants)
    return _Columns(names[::-1], models, averaged)


def _scores(variant: VariantResult, columns: _Columns) -> list[tuple[float | None, float | None]]:
    """The numbers of a row, each with its variance across clients where it has one."""
    scores: list[tuple[float | None, float | None]] = [(variant.server_accuracy, None)]
    if columns.averaged:
        scores.append((variant.server_average_accuracy, None))
    for model in columns.models.values():
        accuracies = [getattr(group, f"{model}_accuracy") for group in variant.groups]
        variances = [getattr(group, f"{model}_variance") for group in variant.groups]
        scores += list(zip(reversed(accuracies), reversed(variances), strict=True))
        if len(accuracies) == 2:
            scores.append((None if None in accuracies else accuracies[0] - accuracies[1], None))
    return scores


def footnotes(variants: list[VariantResult]) -> list[str]:
    """The assumptions of the epsilons, runs that stopped early, refused updates, and noise that is not private."""
    lines: dict[str, list[str]] = {}
    for variant in variants:
        for group in variant.groups:
            if group.epsilon is not None and group.epsilon_basis is not None:
                line = f"ε {group.name} = {format_epsilon(group.epsilon, 3)}: {group.epsilon_basis}"
                lines.setdefault(line, []).append(variant.name)
            if group.surplus is not None:
                line = f"ε {group.name} is smaller than it need be, at {group.surplus}"
                lines.setdefault(line, []).append(variant.name)
            elif variant.algorithm == "dp_fedavg" and (group.epsilon or 0.0) < 0.97 * (group.epsilon_target or 0.0):
                line = "ε of every group is that of the strictest, whose noise the algorithm gives to all"
                lines.setdefault(line, []).append(variant.name)
    notes = [f"{line} [{'; '.join(dict.fromkeys(names))}]" for line, names in lines.items()]
    if any(group.epsilon_target is not None for variant in variants for group in variant.groups):
        notes.insert(0, "ε: asked for → had")
    for variant in variants:
        refused = sum(group.refused for group in variant.groups)
        if variant.stopped:
            notes.append(f"{variant.name}: stopped after round {variant.rounds}: {variant.stopped}")
        if refused:
            notes.append(f"{variant.name}: updates refused, not finite or out of range: {refused}")
    if any(variant.repeatable for variant in variants):
        notes.append("noise and cohorts were drawn from a given seed: repeatable, and therefore not private")
    return notes


def format_table(variants: list[VariantResult], other_seeds: Sequence[list[VariantResult]] = ()) -> str:
    """Format results as plain text, with footnotes.

    Args:
        variants: A row each; all have the same groups.
        other_seeds: The same variants with other seeds (see `table_cells`).

    Returns:
        The lines, of any width.
    """
    header, rows = table_cells(variants, other_seeds=other_seeds)
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    cells = [header, ["─" * width for width in widths], *rows]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    return "\n".join([*lines, *footnotes([variant for seed in (variants, *other_seeds) for variant in seed])])


def _percent(values: Sequence[tuple[float | None, float | None]], variances: bool) -> str:
    """The mean over seeds in percent, with half of its interval and the mean variance across clients."""
    scores = [score for score, _ in values if score is not None]
    spreads = [variance for _, variance in values if variance is not None]
    if not scores:
        return "–"
    half = half_interval(scores)
    text = f"{100 * fmean(scores):.2f}" + ("" if half is None else f" ±{100 * half:.2f}")
    return text + (f" ({100 * fmean(spreads):.2f})" if variances and spreads else "")


def _epsilon(seeds: Sequence[GroupResult]) -> str:
    """The epsilon that a group asked for, if it asked for one, and its largest among the seeds."""
    epsilons = [math.inf if group.unprotected else group.epsilon for group in seeds]
    known = [epsilon for epsilon in epsilons if epsilon is not None]
    had = format_epsilon(max(known), 2) if known else "–"
    target = seeds[0].epsilon_target
    if target is None or target == math.inf == max(known, default=None):
        return had
    return f"{format_epsilon(target)} → {had}"

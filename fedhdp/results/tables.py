"""The results of a run as a table in the paper's columns."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from fedhdp.errors import require
from fedhdp.privacy.accounting import format_epsilon
from fedhdp.results.metrics import half_interval
from fedhdp.results.schema import GroupResult, VariantResult


def table(
    variants: list[VariantResult], variances: bool = True, others: Sequence[list[VariantResult]] = ()
) -> tuple[list[str], list[list[str]]]:
    """The header and the cells of a table in the paper's columns: percentages, with the variance in parentheses.

    Acc_g is on the server's test set, Acc_avg that of the averaged model where there is one; then each group's clients on
    their own, with the global model (g), with their personal models (l) and, where they hold something out, with the pull
    that each chose (c). With two groups, Δ is what the less private gain over the more private. As in the paper, a
    variance is that of accuracies as fractions, times 100. ``others`` are the same variants with other seeds: a cell is
    then the mean with half of its 95% interval.
    """
    require(len(variants) > 0, "variants", variants, "one or more")
    names = [group.name for group in variants[0].groups]
    for variant in (one for seed in (variants, *others) for one in seed):
        theirs = [group.name for group in variant.groups]
        require(theirs == names, f"groups of {variant.name!r}", theirs, f"those of the first in the table, {names}")
    groups = [group for variant in variants for group in variant.groups]
    known = {m: any(getattr(group, f"{m}_accuracy") is not None for group in groups) for m in ("personal", "chosen")}
    models = {"g": "global"} | ({"l": "personal"} if known["personal"] else {})
    models |= {"c": "chosen"} if known["chosen"] else {}
    averaged = any(variant.server_average_accuracy is not None for variant in variants)
    header = ["algorithm", "Acc_g", *(["Acc_avg"] if averaged else [])]
    for short in models:
        header += [f"{short}: {name}" for name in reversed(names)] + ([f"Δ_{short}"] if len(names) == 2 else [])
    header += [f"ε {name}" for name in reversed(names)]
    rows = []
    for seeds in zip(variants, *others, strict=True):
        columns = zip(*(_measured(variant, list(models.values()), averaged) for variant in seeds), strict=True)
        cells = [_percent(column, variances) for column in columns]
        rows.append([seeds[0].name, *cells, *(_epsilon(*same) for same in zip(*(reversed(v.groups) for v in seeds)))])
    return header, rows


def _measured(variant: VariantResult, models: list[str], averaged: bool) -> list[tuple[float | None, float | None]]:
    """The numbers of a row, each with its variance across clients where it has one."""
    found: list[tuple[float | None, float | None]] = [(variant.server_accuracy, None)]
    found += [(variant.server_average_accuracy, None)] if averaged else []
    for model in models:
        accuracy = [getattr(group, f"{model}_accuracy") for group in variant.groups]
        variance = [getattr(group, f"{model}_variance") for group in variant.groups]
        found += list(zip(reversed(accuracy), reversed(variance)))
        if len(accuracy) == 2:
            found.append((None if None in accuracy else accuracy[0] - accuracy[1], None))
    return found


def footnotes(variants: list[VariantResult]) -> list[str]:
    """What the epsilons rest on, and what else a reader of the table must know."""
    lines: dict[str, list[str]] = {}
    for variant in variants:
        for group in variant.groups:
            if group.epsilon is not None:
                pld = "" if group.epsilon_pld is None else f", by PLD {format_epsilon(group.epsilon_pld, 3)}"
                said = f"ε {group.name} = {format_epsilon(group.epsilon, 3)}{pld}: {group.epsilon_basis}"
                lines.setdefault(said, []).append(variant.name)
    notes = [f"{said} [{'; '.join(dict.fromkeys(names))}]" for said, names in lines.items()]
    for variant in variants:
        refused = sum(group.refused for group in variant.groups)
        notes += [f"{variant.name}: stopped after round {variant.rounds}: {variant.stopped}"] if variant.stopped else []
        notes += [f"{variant.name}: updates refused, since not finite or not in order: {refused}"] if refused else []
    if any(variant.repeatable for variant in variants):
        notes.append("noise and cohorts came from a given seed: repeatable, and therefore not private")
    return notes


def format_table(variants: list[VariantResult], others: Sequence[list[VariantResult]] = ()) -> str:
    """The table as plain text, with what its epsilons rest on beneath it; ``others`` are of other seeds."""
    header, rows = table(variants, others=others)
    widths = [max(map(len, column)) for column in zip(header, *rows)]
    lines = [header, ["─" * width for width in widths], *rows]
    shown = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in lines]
    return "\n".join([*shown, *footnotes([variant for seed in (variants, *others) for variant in seed])])


def _percent(seeds: Sequence[tuple[float | None, float | None]], variances: bool) -> str:
    """A number, or the mean of one of each seed with half of its interval; the variance across clients behind it."""
    known, spread = ([number for number in column if number is not None] for column in zip(*seeds))
    if not known:
        return "–"
    half = half_interval(known)
    text = f"{100 * fmean(known):.2f}" + ("" if half is None else f" ±{100 * half:.2f}")
    return text + (f" ({100 * fmean(spread):.2f})" if variances and spread else "")


def _epsilon(*seeds: GroupResult) -> str:
    """A group's epsilon, the largest of all seeds."""
    if any(group.opted_out for group in seeds):
        return "∞"
    known = [group.epsilon for group in seeds if group.epsilon is not None]
    return format_epsilon(max(known), 2) if known else "–"

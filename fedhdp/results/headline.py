"""A run in a few sentences: what FedHDP gains over DP-FedAvg, and for whom."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from fedhdp.mechanism import SERVER
from fedhdp.results.schema import MetricInfo, VariantResult

Seeds = Sequence[VariantResult]  # the same variant with each seed


def mean_value(seeds: Seeds, metric: str, model: str, group: str = SERVER) -> float | None:
    """The mean over seeds of a metric of a model, on the server's test set or on a group's clients."""
    values = []
    for result in seeds:
        owners = [result] if group == SERVER else [part for part in result.groups if part.name == group]
        values += [owner.value(metric, model) for owner in owners]
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def headline(variants: Sequence[Seeds]) -> list[str]:
    """Sentences on the best FedHDP among variants, beside DP-FedAvg; the best of all where there is no FedHDP.

    Args:
        variants: Each variant with all its seeds.

    Returns:
        Sentences; none where nothing was measured.
    """
    info = variants[0][0].metrics[0]
    owner = _owner(variants, info)
    if owner is None:
        return []
    scored = [(seeds, value) for seeds in variants if (value := mean_value(seeds, info.name, *owner)) is not None]
    candidates = [pair for pair in scored if pair[0][0].algorithm in ("fedhdp", "")] or scored
    best, value = max(candidates, key=lambda pair: pair[1] if info.higher_is_better else -pair[1])
    rival = next((pair for pair in scored if pair[0][0].algorithm == "dp_fedavg"), None)
    place = "the server's test set" if owner[1] == SERVER else f"the data of {owner[1]} clients"
    rounds = max(result.rounds for result in best)
    sentence = f"{best[0].name} has {_text(info, value)} {info.name} on {place} after {rounds:,} rounds"
    if rival is None or rival[0] is best:
        return [f"{sentence}."]
    gain = value - rival[1]
    sentences = [f"{sentence}, {_change(info, gain)} {rival[0][0].name} ({_text(info, rival[1])})."]
    return sentences + _for_whom(best, rival[0], info)


def _owner(variants: Sequence[Seeds], info: MetricInfo) -> tuple[str, str] | None:
    """The model and whose data the sentence is about: the server's, else those of the group with most clients."""
    groups = sorted(variants[0][0].groups, key=lambda group: -group.clients)
    for model, name in (("global", SERVER), *(("global", group.name) for group in groups)):
        if any(mean_value(seeds, info.name, model, name) is not None for seeds in variants):
            return model, name
    return None


def _for_whom(best: Seeds, rival: Seeds, info: MetricInfo) -> list[str]:
    """What each group's clients have on their own data, with the global model and with personal ones."""
    sentences: list[str] = []
    for model, words in (("global", "the global model"), ("personal", "personal models")):
        parts = []
        for group in reversed(best[0].groups):
            value, other = (mean_value(seeds, info.name, model, group.name) for seeds in (best, rival))
            if value is not None and other is not None:
                parts.append(f"{group.name} {_text(info, value)} ({_signed(info, value - other)})")
        if parts:
            reference = "" if sentences else f"; in brackets the difference from {rival[0].name}"
            sentences.append(f"On clients' own data with {words}: {', '.join(parts)}{reference}.")
    return sentences


def _text(info: MetricInfo, value: float) -> str:
    return f"{info.format(value, 1)}{'%' if info.percent else ''}"


def _signed(info: MetricInfo, difference: float) -> str:
    text = info.format(abs(difference), 1)
    sign = "±" if text == info.format(0.0, 1) else "+" if difference > 0 else "−"
    return f"{sign}{text}"


def _change(info: MetricInfo, gain: float) -> str:
    """A difference in words: 7.2 points more than."""
    unit = " points" if info.percent else ""
    return f"{info.format(abs(gain), 1)}{unit} {'more' if gain >= 0 else 'less'} than"

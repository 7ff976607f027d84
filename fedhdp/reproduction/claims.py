"""The paper's claims about who is above whom, checked one by one on our numbers and on the paper's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec

View = dict[tuple[str, str, float | None], dict[str, float]]  # (part, algorithm, weight) to numbers by column
Found = tuple[bool, str] | None  # whether it holds, with the numbers; None: something is not measured
Verdict = Literal["held", "not held", "not measured"]


class Ordering(msgspec.Struct, frozen=True):
    """A claim, whether it held, and in how many seeds; the same for the paper's numbers."""

    claim: str
    verdict: Verdict
    numbers: str
    seeds_held: int
    seeds: int
    papers_verdict: Verdict
    papers_numbers: str


def orderings(
    table: str, ours: View, by_seed: list[View], papers: View, others: View, papers_others: View, bar: float
) -> list[Ordering]:
    """All claims about a table, by the means over seeds and seed by seed; others: its pair's; bar: the paper's best."""
    claims = dict(LEVELS if table == "levels" else CLAIMS)
    found = [_ordering(claim, check, ours, by_seed, papers) for claim, check in claims.items()]
    if table in ("noniid-mnist", "skewed-mnist"):
        found.append(_skewed_wants_more(table, ours, papers, others, papers_others))
    if table == "noniid-mnist":
        found.append(_ordering(BEYOND, lambda view: beyond(view, bar), ours, by_seed, {}))
    return found


def _ordering(claim: str, check: Callable[[View], Found], ours: View, by_seed: list[View], papers: View) -> Ordering:
    each = [found for found in map(check, by_seed) if found is not None]
    mine, theirs = _verdict(check(ours)), _verdict(check(papers))
    return Ordering(claim, *mine, sum(held for held, _ in each), len(each), *theirs)


def _verdict(found: Found) -> tuple[Verdict, str]:
    return ("not measured", "") if found is None else ("held" if found[0] else "not held", found[1])


def _of(view: View, algorithm: str) -> dict[str, float]:
    return view.get(("paper", algorithm, None), {})


def by_weight(view: View) -> dict[float, float]:
    """FedHDP's global accuracy at each weight of the paper's rows."""
    rows = ((weight, row) for (part, name, weight), row in view.items() if part == "paper" and name == "fedhdp")
    return {weight: row["acc_g"] for weight, row in rows if weight is not None and "acc_g" in row}


def best_weight(view: View) -> float | None:
    """The weight at which FedHDP's global model is best."""
    found = by_weight(view)
    return max(found, key=lambda weight: found[weight]) if found else None


def _above(baseline: str, name: str) -> Callable[[View], Found]:
    def check(view: View) -> Found:
        best, other = best_weight(view), _of(view, baseline).get("acc_g")
        if best is None or other is None:
            return None
        accuracy = by_weight(view)[best]
        return accuracy > other, f"r={best:g}: {accuracy:.2f}, {name} {other:.2f}"

    return check


def interior(view: View) -> Found:
    """Whether a weight is better than both 0 and that of equals, which is HDP-FedAvg; as good as one is not."""
    found = by_weight(view)
    equal = _of(view, "hdp_fedavg").get("acc_g")
    if equal is not None:
        found[1.0] = equal
    if not {0.0, 1.0} <= found.keys() or len(found) < 3:
        return None
    best = max(found, key=lambda weight: found[weight])
    said = ", ".join(f"r={weight:g}: {found[weight]:.2f}" for weight in dict.fromkeys((0.0, best, 1.0)))
    return found[best] > max(found[0.0], found[1.0]), said


def opting_out_pays(view: View) -> Found:
    """Whether opted-out clients have the better global model at the best weight."""
    row = view.get(("paper", "fedhdp", best_weight(view)), {})
    if not {"acc_g_np", "acc_g_p"} <= row.keys():
        return None
    return row["acc_g_np"] > row["acc_g_p"], f"opted out {row['acc_g_np']:.2f}, private {row['acc_g_p']:.2f}"


def personal_above_global(view: View) -> Found:
    """Whether both groups' personal models, at their best pull, are above the global model at the best weight."""
    row = view.get(("paper", "fedhdp", best_weight(view)), {})
    if not {"acc_g_np", "acc_g_p", "acc_l_np", "acc_l_p"} <= row.keys():
        return None
    held = row["acc_l_p"] > row["acc_g_p"] and row["acc_l_np"] > row["acc_g_np"]
    pairs = (f"{name} {row[f'acc_l_{key}']:.2f} and {row[f'acc_g_{key}']:.2f}" for name, key in GROUPS)
    return held, ", ".join(pairs)


def _skewed_wants_more(table: str, ours: View, papers: View, others: View, papers_others: View) -> Ordering:
    """Whether the best weight on skewed data is above that on data that is not."""
    found, printed = [(best_weight(ours), best_weight(others)), (best_weight(papers), best_weight(papers_others))]
    if table != "skewed-mnist":
        found, printed = found[::-1], printed[::-1]
    verdict = _verdict(_larger(*found))
    return Ordering(
        SKEWED, *verdict, int(verdict[0] == "held"), int(verdict[0] != "not measured"), *_verdict(_larger(*printed))
    )


def _larger(skewed: float | None, plain: float | None) -> Found:
    if skewed is None or plain is None:
        return None
    return skewed > plain, f"skewed r={skewed:g}, not skewed r={plain:g}"


def beyond(view: View, bar: float) -> Found:
    """Whether a row of ours is above the best that the paper prints."""
    own = {
        (part, weight): row["acc_g"] for (part, _, weight), row in view.items() if part != "paper" and "acc_g" in row
    }
    if not own:
        return None
    best = max(own, key=lambda key: own[key])
    return own[best] > bar, f"{best[0]} r={best[1]:g}: {own[best]:.2f}, the paper {bar:.2f}"


def _shared_is_better(part: str) -> Callable[[View], Found]:
    def check(view: View) -> Found:
        shared, own = (view.get((part, f"{part}: FedHDP, {kind}", None), {}).get("acc_g") for kind in KINDS)
        if shared is None or own is None:
            return None
        return shared > own, f"shared {shared:.2f}, per group {own:.2f}"

    return check


GROUPS = (("private", "p"), ("opted out", "np"))
KINDS = ("shared noise", "noise per group")
SKEWED = "skewed data wants a larger weight than data that is not"
BEYOND = "a row of ours is above the paper's best"
CLAIMS: dict[str, Callable[[View], Found]] = {
    "FedHDP at its best r is above DP-FedAvg, globally": _above("dp_fedavg", "DP-FedAvg"),
    "FedHDP at its best r is above HDP-FedAvg, globally": _above("hdp_fedavg", "HDP-FedAvg"),
    "the best r is between none (0) and equal (1)": interior,
    "opting out pays: the global model is better for those who did": opting_out_pays,
    "personal models are above the global one, for both groups": personal_above_global,
}
LEVELS = {
    f"{name} levels: shared noise is above noise per group": _shared_is_better(name) for name in ("three", "five")
}

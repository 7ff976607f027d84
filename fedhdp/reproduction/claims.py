"""The paper's claims about the order of its rows, checked on measured numbers and on the paper's."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal

import msgspec

from fedhdp.reproduction.levels import LEVEL_TABLES, OURS, rival_labels

View = dict[tuple[str, str, float | None], dict[str, float]]  # (part, algorithm, weight) to numbers by column
Check = tuple[bool, str] | None  # whether a claim holds, with its numbers; None: not measured
Verdict = Literal["held", "not held", "not measured"]


class ClaimResult(msgspec.Struct, frozen=True):
    """Whether a claim held in the means and in how many seeds, and whether it holds in the paper's numbers."""

    claim: str
    verdict: Verdict
    numbers: str
    seeds_held: int
    seeds: int
    paper_verdict: Verdict
    paper_numbers: str


def check_claims(table: str, measured: View, by_seed: list[View], paper: View, paper_best: float) -> list[ClaimResult]:
    """Check each claim about a table on the means over seeds, on each seed's numbers, and on the paper's.

    ``paper_best`` is the paper's best global accuracy of FedHDP.
    """
    checks = LEVEL_CLAIMS if table == "levels" else CLAIMS
    results = [_check_claim(claim, check, measured, by_seed, paper) for claim, check in checks.items()]
    if table == "noniid-mnist":
        results.append(_check_claim(EXTENSION_CLAIM, exceeds_paper(paper_best), measured, by_seed, {}))
    return results


def check_skewed_claim(measured: tuple[View, View], paper: tuple[View, View]) -> ClaimResult:
    """Check that the best weight is larger on skewed data; each pair is (skewed, not skewed)."""
    verdict = _verdict(_is_larger(*map(best_weight, measured)))
    seeds = int(verdict[0] != "not measured")
    paper_verdict = _verdict(_is_larger(*map(best_weight, paper)))
    return ClaimResult(SKEWED_CLAIM, *verdict, int(verdict[0] == "held"), seeds, *paper_verdict)


def _check_claim(
    claim: str, check: Callable[[View], Check], measured: View, by_seed: Iterable[View], paper: View
) -> ClaimResult:
    seeds = [result[0] for result in map(check, by_seed) if result is not None]
    return ClaimResult(claim, *_verdict(check(measured)), sum(seeds), len(seeds), *_verdict(check(paper)))


def _verdict(check: Check) -> tuple[Verdict, str]:
    return ("not measured", "") if check is None else ("held" if check[0] else "not held", check[1])


def _accuracy_of(view: View, algorithm: str) -> float | None:
    return view.get(("paper", algorithm, None), {}).get("acc_g")


def accuracy_by_weight(view: View) -> dict[float, float]:
    """FedHDP's global accuracy at each weight of the paper's rows."""
    rows = ((weight, row) for (part, name, weight), row in view.items() if (part, name) == ("paper", "fedhdp"))
    return {weight: row["acc_g"] for weight, row in rows if weight is not None and "acc_g" in row}


def best_weight(view: View) -> float | None:
    """The weight with FedHDP's best global accuracy."""
    accuracy = accuracy_by_weight(view)
    return max(accuracy, key=lambda weight: accuracy[weight]) if accuracy else None


def _exceeds(baseline: str, name: str) -> Callable[[View], Check]:
    def check(view: View) -> Check:
        best, baseline_accuracy = best_weight(view), _accuracy_of(view, baseline)
        if best is None or baseline_accuracy is None:
            return None
        accuracy = accuracy_by_weight(view)[best]
        return accuracy > baseline_accuracy, f"r={best:g}: {accuracy:.2f}, {name} {baseline_accuracy:.2f}"

    return check


def best_weight_is_interior(view: View) -> Check:
    """Whether a weight is better than 0 and than 1, which is HDP-FedAvg."""
    accuracy = accuracy_by_weight(view)
    equal = _accuracy_of(view, "hdp_fedavg")
    if equal is not None:
        accuracy[1.0] = equal
    if not {0.0, 1.0} <= accuracy.keys() or len(accuracy) < 3:
        return None
    best = max(accuracy, key=lambda weight: accuracy[weight])
    numbers = ", ".join(f"r={weight:g}: {accuracy[weight]:.2f}" for weight in dict.fromkeys((0.0, best, 1.0)))
    return accuracy[best] > max(accuracy[0.0], accuracy[1.0]), numbers


def opting_out_gains(view: View) -> Check:
    """Whether opted-out clients have the better global model at the best weight."""
    row = view.get(("paper", "fedhdp", best_weight(view)), {})
    if not {"acc_g_np", "acc_g_p"} <= row.keys():
        return None
    return row["acc_g_np"] > row["acc_g_p"], f"opted out {row['acc_g_np']:.2f}, private {row['acc_g_p']:.2f}"


def personal_exceeds_global(view: View) -> Check:
    """Whether both groups' personal models, at their best pull, exceed the global model at the best weight."""
    row = view.get(("paper", "fedhdp", best_weight(view)), {})
    if not {"acc_g_np", "acc_g_p", "acc_l_np", "acc_l_p"} <= row.keys():
        return None
    holds = all(row[f"acc_l_{code}"] > row[f"acc_g_{code}"] for _, code in GROUPS)
    pairs = (f"{name} {row[f'acc_l_{code}']:.2f} and {row[f'acc_g_{code}']:.2f}" for name, code in GROUPS)
    return holds, ", ".join(pairs)


def _is_larger(skewed: float | None, plain: float | None) -> Check:
    if skewed is None or plain is None:
        return None
    return skewed > plain, f"skewed r={skewed:g}, not skewed r={plain:g}"


def exceeds_paper(paper_best: float) -> Callable[[View], Check]:
    """A check whether an extension is above the paper's best global accuracy."""

    def check(view: View) -> Check:
        accuracy = {
            (part, r): row["acc_g"]
            for (part, name, r), row in view.items()
            if part != "paper" and name == "fedhdp" and "acc_g" in row
        }
        if not accuracy:
            return None
        best = max(accuracy, key=lambda key: accuracy[key])
        return accuracy[best] > paper_best, f"{best[0]} r={best[1]:g}: {accuracy[best]:.2f}, the paper {paper_best:.2f}"

    return check


def _shared_exceeds_per_group(part: str) -> Callable[[View], Check]:
    def check(view: View) -> Check:
        rows = (view.get((part, f"{part}: FedHDP, {kind}", None), {}) for kind in ("shared noise", "noise per group"))
        shared, per_group = (row.get("acc_g") for row in rows)
        if shared is None or per_group is None:
            return None
        return shared > per_group, f"shared {shared:.2f}, per group {per_group:.2f}"

    return check


def _exceeds_rivals(part: str) -> Callable[[View], Check]:
    def check(view: View) -> Check:
        accuracy = {
            row: values["acc_g"] for (of_part, row, _), values in view.items() if of_part == part if "acc_g" in values
        }
        rivals, ours = rival_labels(part, list(accuracy)), accuracy.get(f"{part}: {OURS}")
        if ours is None or not rivals:
            return None
        best = max(rivals, key=lambda row: accuracy[row])
        return ours > accuracy[best], f"FedHDP {ours:.2f}, {best.partition(': ')[2]} {accuracy[best]:.2f}"

    return check


GROUPS = (("private", "p"), ("opted out", "np"))
SKEWED_CLAIM = "the best r is larger on skewed data"
EXTENSION_CLAIM = "an extension is above the paper's best"
CLAIMS: dict[str, Callable[[View], Check]] = {
    "global model: FedHDP at its best r is above DP-FedAvg": _exceeds("dp_fedavg", "DP-FedAvg"),
    "global model: FedHDP at its best r is above HDP-FedAvg": _exceeds("hdp_fedavg", "HDP-FedAvg"),
    "global model: the best r is between 0 and 1": best_weight_is_interior,
    "global model: opted-out clients have the higher accuracy": opting_out_gains,
    "personal models are above the global model, in both groups": personal_exceeds_global,
}
LEVEL_CLAIMS = {
    claim: check
    for name in LEVEL_TABLES
    for claim, check in (
        (f"{name} levels: shared noise is above noise per group", _shared_exceeds_per_group(name)),
        (f"{name} levels: FedHDP is above every rival", _exceeds_rivals(name)),
    )
}

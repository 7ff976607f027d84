"""How far rows of a table are apart, seed by seed: the mean difference, and half of its 95% interval.

A table's own intervals are of each row alone; rows of one seed share its clients and often its cohorts, so that their
difference is known better, or worse, than two intervals say. Rows are named as in the table; one alone is shown as it
is. --column: any of the table's summary.json.

    python examples/differences.py docs/results/noniid-mnist-20-seeds "momentum r=0.01" "poisson r=0.01"
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import mean, stdev

from fedhdp.results.metrics import half_interval


def by_seed(table: Path, row: str, column: str) -> dict[int, float]:
    """A row's numbers by seed."""
    rows = json.loads((table / "summary.json").read_text(encoding="utf-8"))["rows"]
    found = [one for one in rows if one["row"] == row and one["pull"] is None and column in one]
    if not found:
        raise SystemExit(f"{table} has no row {row!r} with {column}; there are {', '.join(one['row'] for one in rows)}")
    if "seeds" not in found[0]:
        raise SystemExit(f"{table} has means and deviations alone: it was made before seeds were kept one by one")
    return dict(zip(found[0]["seeds"], found[0][column], strict=True))


def main() -> None:
    """Print one difference."""
    parser = argparse.ArgumentParser(description="How far two rows of a table are apart, seed by seed.")
    parser.add_argument("table", type=Path)
    parser.add_argument("row")
    parser.add_argument("other", nargs="?")
    parser.add_argument("--column", default="acc_g")
    asked = parser.parse_args()
    first = by_seed(asked.table, asked.row, asked.column)
    second = by_seed(asked.table, asked.other, asked.column) if asked.other else dict.fromkeys(first, 0.0)
    apart = [first[seed] - second[seed] for seed in first if seed in second]
    spread = f" ±{half_interval(apart):.2f}, deviation {stdev(apart):.2f}" if len(apart) > 1 else ""
    print(f"{mean(apart):+.2f}{spread}; above 0 in {sum(one > 0 for one in apart)} of {len(apart)} seeds")


if __name__ == "__main__":
    main()

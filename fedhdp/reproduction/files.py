"""The files of a compared table.

OUT/table.json     everything
OUT/table.csv      a line for each number
OUT/table.md       for people
OUT/table.png      accuracy against the weight
OUT/summary.json   each seed's numbers, time, machine: a few kilobytes
"""

from __future__ import annotations

import csv
import io
from pathlib import Path

import msgspec

from fedhdp.reproduction.comparison import Comparison
from fedhdp.reproduction.figures import draw
from fedhdp.reproduction.render import markdown
from fedhdp.results import store as results

COLUMNS = (
    "part",
    "row",
    "weight",
    "pull",
    "column",
    "mean",
    "sd",
    "seeds",
    "low",
    "high",
    "paper",
    "difference",
    "holds",
)


def numbers_csv(found: Comparison) -> str:
    """A line for each number."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for line in found.lines:
        key = (line.key.part, line.key.row, line.key.weight, line.key.pull)
        for column, cell in line.cells.items():
            spread = (cell.sd, len(cell.values), cell.low, cell.high)
            writer.writerow([*key, column, cell.mean, *spread, cell.paper, cell.difference, cell.holds])
    return text.getvalue()


def summary(found: Comparison) -> bytes:
    """What to keep of a table: each seed's numbers, with how, on what and how fast they were made."""
    rows = []
    for line in found.lines:
        which = {"part": line.key.part, "row": line.key.row, "pull": line.key.pull, "seeds": line.seeds}
        kept = {c: [round(value, 3) for value in cell.values] for c, cell in line.cells.items()}
        rows.append(msgspec.json.encode(which | kept).decode())
    head = {
        "table": found.table,
        "data": found.data,
        "rounds": found.rounds,
        "sampling": found.sampling,
        "seeds": found.seeds,
        "seconds_a_seed": {part: round(value, 1) for part, value in found.seconds.items()},
        "machines": found.machines,
        "fedhdp": found.version,
        "orderings": {one.claim: one.verdict for one in found.orderings},
        "cells": "one number for each seed",
    }
    begin = msgspec.json.format(msgspec.json.encode(head), indent=2).decode().rstrip("}\n")
    return (begin + ',\n  "rows": [\n    ' + ",\n    ".join(rows) + "\n  ]\n}\n").encode()


def write(out: Path, found: Comparison) -> list[Path]:
    """Write all files of a table and return them."""
    texts = {
        "table.csv": numbers_csv(found).encode(),
        "table.md": markdown(found).encode(),
        "summary.json": summary(found),
    }
    for name, content in texts.items():
        results.atomic_write(out / name, content)
    results.write_value(out / "table.json", found)
    draw(found, out / "table.png")
    return [out / name for name in (*texts, "table.json", "table.png")]

"""The figures of the theory: closed forms, simulated points, and the numbers behind them."""

from __future__ import annotations

import csv

import numpy as np
import pytest
from figure_checks import overhang

from fedhdp.reproduction.theory.figures import theory_figures


@pytest.mark.slow
def test_figures_and_their_numbers(tmp_path, drawn):
    paths = theory_figures(tmp_path, trials=400)
    assert [overhang(figure) for figure in drawn] == [0.0] * 8  # four figures, each as SVG and PNG
    assert sorted(path.suffix for path in paths) == [".csv"] * 4 + [".png"] * 4 + [".svg"] * 4
    assert all(path.stat().st_size > 1000 for path in paths)
    far = checked = 0
    for path in paths[2::3]:
        rows = list(csv.DictReader(path.read_text().splitlines()))
        for curve in {(row["panel"], row["curve"]) for row in rows}:
            of = [row for row in rows if (row["panel"], row["curve"]) == curve]
            line = [(float(row["x"]), float(row["y"])) for row in of if row["kind"] == "closed form"]
            for row in of:
                if row["kind"] == "simulated":
                    distance = float(row["y"]) - np.interp(float(row["x"]), *zip(*line, strict=True))
                    far += abs(distance) > 3 * float(row["standard_error"])
                    checked += 1
                elif row["kind"] == "optimum":
                    assert float(row["y"]) <= min(y for _, y in line) * (1 + 1e-12)
    assert checked == 2 * 4 * 11 + 3 * 13 + 2 * 4 * 13
    assert far <= 0.03 * checked

"""The files of a table, and its figure."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from figure_checks import overhang
from matplotlib.figure import Figure
from reproduction_runs import write_runs

from fedhdp.reproduction import figures, render, tables
from fedhdp.reproduction.comparison import compare
from fedhdp.reproduction.summary import SUMMARY, encode_summary, read_summary
from fedhdp.reproduction.tables import TABLES, TableRow

RESULTS = Path(__file__).parents[2] / "docs" / "results"


def half_a_point_per_seed(row: TableRow, seed: int) -> float:
    """A difference between seeds."""
    return 0.5 * seed


@pytest.mark.parametrize("name", [*TABLES, "levels"])
def test_files_of_a_table(name, tmp_path):
    comparison = compare(write_runs(tmp_path, name, 2, shift=half_a_point_per_seed), name)
    paths = render.write(tmp_path, comparison)
    assert all(path.stat().st_size > 0 for path in paths)
    assert (tmp_path / "table.png").read_bytes()[:4] == b"\x89PNG"
    with (tmp_path / "table.csv").open(newline="") as file:
        assert len(list(csv.DictReader(file))) == sum(len(line.cells) for line in comparison.lines)
    page = (tmp_path / "table.md").read_text()
    for wide in (True, False):
        for text in (render.global_table(comparison, wide), render.personal_table(comparison, wide)):
            assert {len(row) for row in text.rows} == {len(text.header)}
            assert all(row[0] in page for row in text.rows)
    assert f"data: {comparison.data}" in page


@pytest.mark.parametrize("name", ["noniid-mnist", "levels"])
def test_table_is_rendered_from_its_summary(name, tmp_path):
    comparison = compare(write_runs(tmp_path, name, 2, shift=half_a_point_per_seed), name)
    content = encode_summary(comparison)
    (tmp_path / SUMMARY).write_bytes(content)
    read = read_summary(tmp_path / SUMMARY, name)
    assert render.markdown(read) == render.markdown(comparison)
    assert encode_summary(read) == content
    assert len(content) < 1_000 * len(read.lines)


def test_outliers_at_weight_zero_are_annotated(tmp_path):
    comparison = compare(write_runs(tmp_path, "skewed-mnist", 1, "paper"), "skewed-mnist")
    axis, table = Figure().subplots(), TABLES["skewed-mnist"]
    weights = [row.weight for row in tables.paper_rows(table) if row.weight is not None]
    figures._against_weight(axis, comparison, table, "acc_g", weights)
    assert axis.get_ylim()[0] > 80
    assert [text.get_text() for text in axis.texts] == ["r = 0, far below: 10.3 to 10.3"]


@pytest.mark.parametrize("name", ["femnist-handwriting", "fmnist-writers-basis", "levels", "noniid-mnist"])
def test_nothing_of_a_published_figure_is_cut_off(name, tmp_path, drawn):
    figures.draw(read_summary(RESULTS / name / SUMMARY), tmp_path / "table.png")
    assert [overhang(figure) for figure in drawn] == [0.0]

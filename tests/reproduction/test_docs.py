"""The page of results is what the command makes, and numbers in findings come from the summaries."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers import raises_field

from fedhdp.errors import RunError
from fedhdp.reproduction import page, render
from fedhdp.reproduction.causes import BASE_TABLES, CauseRow, Causes, causes_table, write_causes
from fedhdp.reproduction.comparison import load
from fedhdp.reproduction.summary import SUMMARY, difference_of_rows, read_summary

DOCS = Path(__file__).parents[2] / "docs"
RESULTS = DOCS / "results"
TABLES = sorted(path.parent.name for path in RESULTS.glob(f"*/{SUMMARY}"))


def test_page_is_what_the_command_makes():
    assert (DOCS / "results.md").read_text() == page.render_page(RESULTS)


@pytest.mark.parametrize("name", [name for name in TABLES if name not in BASE_TABLES])
def test_whole_tables_are_what_the_command_makes(name):
    assert (RESULTS / name / "table.md").read_text() == render.markdown(read_summary(RESULTS / name / SUMMARY))


def test_findings_are_short():
    for name in TABLES:
        assert len((RESULTS / name / page.FINDINGS).read_text().splitlines()) <= 25


@pytest.mark.parametrize(
    ("table", "row", "other", "difference"),
    [
        ("noniid-mnist-20-seeds", "momentum r=0.01", "poisson r=0.01", (1.2, 0.4)),
        ("noniid-mnist-20-seeds", "average r=0.025", "poisson r=0.025", (0.5, 0.2)),
        ("noniid-mnist-20-seeds", "pld r=0.01", "poisson r=0.01", (-0.1, 0.3)),
        ("levels", "three: FedHDP, shared noise", "three: FedHDP, noise per group", (0.2, 0.4)),
    ],
)
def test_difference_of_rows(table, row, other, difference):
    cell = difference_of_rows(read_summary(RESULTS / table / SUMMARY), [row, other])
    assert (round(cell.mean, 1), round(cell.half, 1)) == difference


@pytest.fixture(scope="module")
def comparison():
    return load(RESULTS / "noniid-mnist-20-seeds", "noniid-mnist")


@pytest.mark.parametrize(
    ("text", "filled"),
    [
        ("{{FedHDP r=0.025}}", "92.00 ±0.22"),
        ("{{FedHDP r=0.025 / paper}}", "−0.34 ±0.22"),
        ("{{paper DP-FedAvg+Ditto}}", "88.33"),
        ("a {{DP-FedAvg+Ditto | acc_g_p}} b", "a 88.04 ±0.33 b"),
        ("{{momentum r=0.01 - poisson r=0.01}}", "+1.16 ±0.40"),
    ],
)
def test_numbers_of_findings(comparison, text, filled):
    assert page.fill_in(text, comparison) == filled


@pytest.mark.parametrize("text", ["{{FedHDP r=0.3}}", "{{FedHDP r=0.01 @0.05}}", "{{FedHDP r=0.01 | acc_x}}"])
def test_numbers_that_a_table_does_not_have_are_refused(comparison, text):
    with raises_field("--docs", RunError):
        page.fill_in(text, comparison)


def test_summary_of_another_table_is_refused():
    with raises_field("--out", RunError):
        load(RESULTS / "noniid-mnist-20-seeds", "skewed-mnist")
    with raises_field("--out", RunError):
        read_summary(RESULTS / "causes" / SUMMARY)


def test_causes_are_written_and_read(tmp_path):
    row = CauseRow("base", "late", (93.1, 85.7, 91.7, 90.2), (0.1, None, 0.2, 0.3))
    causes = Causes("causes", "the command", 500, 3, "0.1.0", (row,))
    write_causes(tmp_path, causes)
    assert page.read_table(tmp_path / SUMMARY) == causes
    text = causes_table(causes)
    assert text.rows[0] == ["base", "93.10 ±0.10", "85.70", "91.70 ±0.20", "90.20 ±0.30"]
    assert text.rows[1] == ["the paper", "93.80", "88.33", "92.33", "90.86"]

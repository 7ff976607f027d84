"""Cells, intervals, epsilons and notes of a compared table."""

from __future__ import annotations

import json
import math

import pytest
from reproduction_runs import line_of, write_runs

from fedhdp.experiments.presets import OPTED_OUT, PRIVATE
from fedhdp.reproduction import extensions, runs
from fedhdp.reproduction.comparison import compare
from fedhdp.reproduction.render import footnotes, title
from fedhdp.reproduction.summary import encode_summary, make_cell, row_reports
from fedhdp.reproduction.tables import TABLES, TableRow
from fedhdp.results.schema import GroupResult, VariantResult


def test_cell_has_mean_deviation_and_students_interval():
    cell = make_cell([90.0, 91.0, 92.0], 93.0)
    assert (cell.mean, cell.sd, cell.difference) == (91.0, 1.0, -2.0)
    assert cell.half == pytest.approx(4.302653 / math.sqrt(3), rel=1e-5)
    assert cell.covers_paper
    assert not make_cell([90.0, 91.0, 92.0], 93.5).covers_paper


def test_cell_of_one_seed_has_no_interval():
    cell = make_cell([90.0], 90.1)
    assert (cell.sd, cell.low, cell.covers_paper) == (None, None, None)
    assert cell.difference == pytest.approx(-0.1)


@pytest.mark.parametrize("name", TABLES)
def test_papers_numbers_have_no_difference(tmp_path, name):
    comparison = compare(write_runs(tmp_path, name, seeds=1, rows="paper"), name)
    count = 0
    for line in comparison.lines:
        pooled = line.key.algorithm in ("non_private", "dp_fedavg")
        for column, cell in line.cells.items():
            if cell.paper is None or (pooled and column.startswith("var")):
                continue
            tolerance = 5.0 if column.startswith("delta") else 1e-6  # the paper's differences have typing errors
            assert cell.difference == pytest.approx(0, abs=tolerance), (line.key, column)
            count += 1
        assert line.close is (True if line.key.pull is None else None)
    assert count > 100


def test_global_model_is_beside_the_mean_of_three_published_runs(tmp_path):
    def shift(row: TableRow, seed: int) -> float:
        return seed - 2.5

    comparison = compare(write_runs(tmp_path, "noniid-mnist", rows="paper", shift=shift), "noniid-mnist")
    line = line_of(comparison, "FedHDP r=0.01")
    cell = line.cells["acc_g"]
    assert cell.paper == pytest.approx((92.48 + 92.45 + 92.41) / 3)
    assert cell.difference == pytest.approx(-1.5)
    assert (cell.sd, cell.count) == (pytest.approx(1.0), 3)
    assert line.close is False
    assert line_of(comparison, "FedHDP r=0.01", 0.25).cells["acc_l_p"].paper == 98.62


@pytest.mark.parametrize(("algorithm", "code"), [("non_private", "np"), ("dp_fedavg", "p")])
def test_baselines_are_compared_over_all_clients(algorithm, code):
    columns = runs._columns(VariantResult("x", algorithm, 1, 1.0, False, two_groups()), "g", "global")
    variance = 100 * ((0.01 + 3 * 0.03) / 4 + 0.25 * 0.75 * 0.2**2)
    assert columns == {f"acc_g_{code}": pytest.approx(75.0), f"var_g_{code}": pytest.approx(variance)}


def test_gain_of_opting_out():
    columns = runs._columns(VariantResult("x", "fedhdp", 1, 1.0, False, two_groups()), "g", "global")
    assert columns["delta_g"] == pytest.approx(20.0)


def two_groups() -> list[GroupResult]:
    """100 opted-out clients with accuracy 0.9, 300 private ones with 0.7."""
    return [
        GroupResult(
            OPTED_OUT, 100, True, *(0.0,) * 4, values={"global/accuracy": 0.9, "global/accuracy_variance": 0.01}
        ),
        GroupResult(
            PRIVATE, 300, False, *(0.0,) * 4, values={"global/accuracy": 0.7, "global/accuracy_variance": 0.03}
        ),
    ]


def test_missing_epsilons_are_computed(tmp_path):
    comparison = compare(write_runs(tmp_path, "noniid-mnist", 1, "fedhdp:0.01,pld"), "noniid-mnist")
    costs = {cost.part: cost for cost in comparison.costs}
    assert costs["paper"].epsilon == pytest.approx(22.4, abs=0.1)
    assert "fixed cohorts without replacement, replace one client" in costs["paper"].basis
    assert costs["paper"].poisson_epsilon == pytest.approx(3.608, abs=1e-3)
    assert costs["pld"].epsilon == pytest.approx(extensions.EPSILON, abs=0.01)
    assert costs["pld"].poisson_epsilon is None
    notes = " ".join(footnotes(comparison))
    assert "with Poisson sampling at the same noise 3.61" in notes
    assert "the paper states ε = 3.6 at delta 1e-4, which holds for Poisson sampling" in notes


def test_epsilons_are_unknown_without_an_accountant(tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "is_accounting_installed", lambda: False)
    comparison = compare(write_runs(tmp_path, "noniid-mnist", 1, "fedhdp:0.01"), "noniid-mnist")
    assert comparison.costs[0].epsilon is None
    assert "ε private: not known without dp-accounting [FedHDP r=0.01]" in footnotes(comparison)


def test_unfinished_part_is_named(tmp_path):
    write_runs(tmp_path, "noniid-mnist", 2, "fedhdp:0.01")
    (tmp_path / "seed-1/paper/summary.json").unlink()
    comparison = compare(tmp_path, "noniid-mnist")
    assert (comparison.seeds, comparison.unfinished) == ((0,), ("seed-1/paper",))
    assert "not finished: seed-1/paper" in title(comparison)


def test_claims_compare_rows_on_common_seeds(tmp_path):
    def shift(row: TableRow, seed: int) -> float:
        return 20.0 * seed

    first = compare(write_runs(tmp_path, "fmnist", range(1), "paper", shift), "fmnist")
    assert first.claims[0].numbers == "r=0.025: 85.97, DP-FedAvg 73.16"
    second = compare(write_runs(tmp_path, "fmnist", range(1, 2), "dp-fedavg,fedhdp:0.5", shift), "fmnist")
    assert second.claims == first.claims
    assert second.seeds == (0, 1)
    assert line_of(second, "DP-FedAvg+Ditto").cells["acc_g"].mean == pytest.approx(83.16, abs=0.01)
    rows = json.loads(encode_summary(second))["rows"]
    seeds = {row["row"]: row["seeds"] for row in rows if row["pull"] is None}
    assert (seeds["DP-FedAvg+Ditto"], seeds["HDP-FedAvg+Ditto"]) == ([0, 1], [0])
    assert "different seeds: claims compare them on the common seeds 0" in footnotes(second)[-1]
    assert "different seeds" not in " ".join(footnotes(first))


def test_rows_for_programs_have_accuracy_seeds_and_epsilons_by_group(tmp_path):
    table = compare(write_runs(tmp_path, "noniid-mnist", 2, "non-private,dp-fedavg,pld"), "noniid-mnist")
    rows = {row.row: row for row in row_reports(table)}
    ours, baseline, without = (rows[name] for name in ("pld r=0.01", "DP-FedAvg+Ditto", "Non-Private+Ditto"))
    assert ours.server_accuracy == line_of(table, "pld r=0.01").cells["acc_g"].mean
    assert (ours.seeds, ours.accountant) == ((0, 1), "pld")
    assert ours.epsilon == {OPTED_OUT: math.inf, PRIVATE: pytest.approx(extensions.EPSILON, abs=0.01)}
    assert baseline.epsilon[OPTED_OUT] == baseline.epsilon[PRIVATE] == pytest.approx(22.4, abs=0.1)
    assert without.epsilon == {OPTED_OUT: math.inf, PRIVATE: math.inf}
    assert without.accountant is None

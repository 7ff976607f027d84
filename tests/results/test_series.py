"""Lines to plot: their points, their labels, and keys that are not there."""

from __future__ import annotations

import pytest
from helpers import raises_field
from run_files import WEIGHTS, write_run

from fedhdp.errors import RunError
from fedhdp.experiments import Variant
from fedhdp.results.figures import _interval_text, _places, _styles
from fedhdp.results.series import Lines, Point, Series, make_lines
from fedhdp.results.stored import read_runs


@pytest.fixture
def runs(tmp_path):
    return read_runs([write_run(tmp_path / f"seed-{seed}", seed) for seed in range(3)])


def test_weight_is_resolved_and_baselines_are_single_points(runs):
    lines = make_lines(runs, "weight", "accuracy")
    assert lines.x == "mechanism.groups.private.weight"
    baseline, fedhdp = lines.groups["server"]
    assert (baseline.label, len(baseline.points)) == ("DP-FedAvg", 1)
    assert (fedhdp.label, [point.x for point in fedhdp.points]) == ("FedHDP", list(WEIGHTS))
    assert fedhdp.points[0].mean == pytest.approx(0.21)
    assert fedhdp.points[0].half_interval == pytest.approx(4.3027 * 0.01 / 3**0.5, rel=1e-4)
    assert {point.seeds for point in fedhdp.points} == {3}


def test_rounds_are_one_line_for_each_variant(runs):
    lines = make_lines(runs, "round", "accuracy", "personal", ["private"])
    assert [line.label for line in lines.groups["private"]][:2] == ["DP-FedAvg", "FedHDP weight=0.01"]
    assert [point.x for point in lines.groups["private"][0].points] == [6, 12]


def test_setting_of_runs_joins_them(tmp_path):
    runs = read_runs([write_run(tmp_path / str(rounds), rounds=rounds) for rounds in (12, 24)])
    lines = make_lines(runs, "rounds", "accuracy")
    assert [[point.x for point in line.points] for line in lines.groups["server"]] == [[12, 24]] * 4
    both = make_lines(runs, "weight", "accuracy")
    labels = [line.label for line in both.groups["server"]]
    assert "FedHDP, rounds=24" in labels
    assert len(set(labels)) == len(labels) == 4


def test_other_variants_at_the_same_value_are_no_seeds(tmp_path):
    variants = (Variant("a", weights={"private": 0.1}), Variant("b", weights={"private": 0.1}))
    runs = [write_run(tmp_path / name, variants=variants, rounds=rounds) for name, rounds in (("x", 12), ("y", 24))]
    lines = make_lines(read_runs(runs), "rounds", "accuracy")
    assert [[point.seeds for point in line.points] for line in lines.groups["server"]] == [[1, 1], [1, 1]]


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (("nosuch", "accuracy"), "--x"),
        (("rounds", "accuracy"), "--x"),
        (("weight", "f2"), "--y"),
        (("weight", "accuracy", "averaged"), "--model"),
        (("weight", "accuracy", "global", ["strict"]), "--group"),
    ],
)
def test_unknown_names_are_refused(arguments, field, runs):
    with raises_field(field, RunError):
        make_lines(runs, *arguments)


def series(algorithm: str, *points: Point, label: str = "") -> Series:
    return Series(label or algorithm, algorithm, list(points))


def test_interval_is_named():
    three, one = Point(1, 0.5, 0.1, 3), Point(2, 0.5, None, 1)
    assert _interval_text(Lines("x", {"server": [series("a", one, one)]})) == "one seed: no error bars"
    text = _interval_text(Lines("x", {"server": [series("a", three, three)]}))
    assert text == "bars: 95% interval of the mean over 3 seeds"
    single = Lines("round", {"server": [series("a", three), series("b", three)]})
    assert _interval_text(single).startswith("bars: ")  # one evaluation: points with bars, no levels
    level = Lines("x", {"server": [series("a", three), series("b", three, three)]})
    assert _interval_text(level).startswith("bars and bands: ")
    assert "none for points of one seed" in _interval_text(Lines("x", {"server": [series("a", three, one)]}))


def test_colour_is_the_algorithms():
    alone = _styles([series("fedhdp")])
    beside = _styles([series("other"), series("dp_fedavg"), series("fedhdp"), series("fedhdp", label="second")])
    assert alone["fedhdp", "fedhdp"]["color"] == beside["fedhdp", "fedhdp"]["color"]
    assert len({style["color"] for style in beside.values()}) == 4


def test_text_infinity_and_zero_have_places():
    points = [Point(x, 0.5, None, 1) for x in (0.0, 0.01, 1.0)]
    assert _places(Lines("x", {"server": [series("a", *points)]})) == {0.0: 0, 0.01: 1, 1.0: 2}
    points = [Point(x, 0.5, None, 1) for x in (0.01, float("inf"))]
    assert _places(Lines("x", {"server": [series("a", *points)]})) == {0.01: 0, float("inf"): 1}
    assert _places(Lines("x", {"server": [series("a", Point(0.1, 0.5, None, 1))]})) is None

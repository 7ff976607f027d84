"""The paper's claims, on its own numbers and on others."""

from __future__ import annotations

import math

import pytest
from reproduction_runs import write_runs

from fedhdp.reproduction.claims import check_claims
from fedhdp.reproduction.comparison import compare
from fedhdp.reproduction.page import fill_in
from fedhdp.reproduction.render import rivals_table, write
from fedhdp.reproduction.tables import TableRow


def test_claims_hold_in_the_papers_numbers(tmp_path):
    for name in ("skewed-mnist", "noniid-mnist"):
        write(tmp_path / name, compare(write_runs(tmp_path / name, name, 2, "paper"), name))
    claims = compare(tmp_path / "skewed-mnist", "skewed-mnist").claims
    assert [claim.verdict for claim in claims] == ["held"] * 6
    assert [claim.paper_verdict for claim in claims] == ["held"] * 6
    assert claims[0].numbers == "r=0.1: 89.46, DP-FedAvg 88.50"
    assert claims[0].seeds_held == claims[0].seeds == 2
    assert claims[5].numbers == "skewed r=0.1, not skewed r=0.01"


def test_claim_that_does_not_hold_has_its_numbers(tmp_path):
    def shift(row: TableRow, seed: int) -> float:
        return -10.0 * (row.algorithm == "fedhdp" and row.weight != 0) - 4.0 * (row.algorithm == "hdp_fedavg")

    claims = compare(write_runs(tmp_path, "noniid-mnist", 2, "paper", shift), "noniid-mnist").claims
    verdicts = ["held", "held", "not held", "held", "held", "not measured", "not measured"]
    assert [claim.verdict for claim in claims] == verdicts
    assert claims[2].numbers == "r=0: 90.71, r=1: 84.54"
    assert claims[2].seeds_held == 0


def test_claim_without_its_rows_is_not_measured(tmp_path):
    claims = compare(write_runs(tmp_path, "fmnist", 1, "fedhdp:0.01,dp-fedavg"), "fmnist").claims
    assert [claim.verdict for claim in claims] == ["held", "not measured", "not measured", "held", "held"]


@pytest.mark.parametrize(("accuracy", "verdict"), [(84.0, "not held"), (84.1, "held")])
def test_weight_as_good_as_equal_ones_is_not_between(accuracy, verdict):
    view = {
        ("paper", "fedhdp", 0.0): {"acc_g": 78.0},
        ("paper", "fedhdp", 0.1): {"acc_g": accuracy},
        ("paper", "hdp_fedavg", None): {"acc_g": 84.0},
    }
    _, above, between, *_ = check_claims("fmnist", view, [view], {}, math.inf)
    assert (above.verdict, between.verdict) == (verdict, verdict)


def test_shared_noise_is_compared_with_noise_per_group():
    accuracies = {"shared noise": 92.0, "noise per group": 91.0}
    view = {("three", f"three: FedHDP, {kind}", None): {"acc_g": value} for kind, value in accuracies.items()}
    two, _, three, rivals, *_ = check_claims("levels", view, [view], {}, math.inf)
    assert (three.verdict, three.numbers) == ("held", "shared 92.00, per group 91.00")
    assert two.verdict == rivals.verdict == "not measured"


@pytest.mark.parametrize(("rival", "verdict"), [(91.9, "held"), (92.1, "not held")])
def test_fedhdp_is_compared_with_its_best_rival(rival, verdict):
    accuracies = {"FedHDP, shared noise": 92.0, "Threshold": 80.0, "WeiAvg, ε∞=100": rival, "DP-FedAvg+Ditto": 99.0}
    view = {("two", f"two: {row}", None): {"acc_g": value} for row, value in accuracies.items()}
    _, claim, *_ = check_claims("levels", view, [view], {}, math.inf)
    assert (claim.verdict, claim.numbers) == (verdict, f"FedHDP 92.00, WeiAvg, ε∞=100 {rival:.2f}")
    assert claim.seeds_held == (verdict == "held")


def test_page_says_which_rivals_win(tmp_path):
    def shift(row: TableRow, seed: int) -> float:
        return {"weiavg": 2.0 + 0.1 * seed, "gdpfed": -3.0, "idp_scale": 0.5 * (seed - 1)}.get(row.algorithm, 0.0)

    comparison = compare(write_runs(tmp_path, "levels", 3, "two", shift), "levels")
    cells = dict(rivals_table(comparison).rows)
    assert cells["WeiAvg, ε∞=100"].startswith("**+2.10 ±")
    assert cells["GDPFed"].startswith("-3.00 ±")
    assert cells["IDP-Scale, ε∞=100"].startswith("+0.00 ±")
    sentence = fill_in("{{rivals}}", comparison)
    assert sentence.startswith("Rivals win in 4 of 11 rows: two: PFA, ε∞=100 (+2.10 ±")
    assert "two: WeiAvg, ε∞=1000 (+2.10 ±" in sentence
    even = compare(write_runs(tmp_path / "even", "levels", 3, "two"), "levels")
    assert fill_in("{{rivals}}", even).startswith("None of 11 rows of rivals")

"""``fedhdp account``: rounds, experiments and Flower apps, as text and as JSON."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fedhdp.privacy.accounting import gaussian_epsilon

ROOT = Path(__file__).parents[2]
APP = ROOT / "examples" / "flower_app"
TINY = ROOT / "tests" / "tiny.toml"
ROUNDS = ("--rounds", "500", "--delta", "1e-4")
EPSILON = ("account", "--noise-multiplier", 1.5, "--sampling-rate", 0.05, *ROUNDS)


def words(text: str) -> str:
    """A text without its line breaks."""
    return " ".join(text.split())


@pytest.mark.parametrize(
    ("rate", "noise", "rdp", "pld"), [(0.05, 1.5, 3.608, 3.24), (0.03, 4, 0.576, 0.511), (0.03, 1, 4.122, 3.627)]
)
def test_the_papers_settings(run_json, rate, noise, rdp, pld):
    arguments = ("account", "--noise-multiplier", noise, "--sampling-rate", rate, *ROUNDS)
    assert run_json(*arguments)["epsilon"] == pytest.approx(pld, abs=3e-3)
    assert run_json(*arguments, "--accountant", "rdp")["epsilon"] == pytest.approx(rdp, abs=6e-4)


def test_rounds_as_json(run_json):
    report = run_json(*EPSILON)
    expected = {
        "unprotected": False,
        "target_epsilon": None,
        "delta": 1e-4,
        "noise_multiplier": 1.5,
        "sampling_rate": 0.05,
        "rounds": 500,
        "sampling": "poisson",
        "adjacency": "add or remove one client",
        "accountant": "pld",
        "tuning": None,
    }
    assert report | expected == report
    assert [point["rounds"] for point in report["curve"]] == list(range(50, 501, 50))
    assert report["curve"][-1]["epsilon"] == report["epsilon"]


def test_rounds_as_text(run_cli):
    text = words(run_cli(*EPSILON).stdout)
    for part in ("3.238", "0.0001", "500 rounds", "1.5 times the L2 sensitivity", "q 0.05", "PLD"):
        assert part in text


def test_fixed_cohorts(run_cli, run_json):
    report = run_json(*EPSILON, "--sampling", "fixed")
    assert report["epsilon"] == pytest.approx(8.03, abs=5e-3)
    assert report["noise_in_clips"] == 3
    assert report["epsilon_if_noise_in_clips"] == pytest.approx(22.4, abs=5e-2)
    assert report["adjacency"] == "replace one client"
    text = words(run_cli(*EPSILON, "--sampling", "fixed").stdout)
    for part in ("8.03", "this noise is 3 clips", "1.5 clips", "22.41"):
        assert part in text


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--accountant", "rdp"), ("--sampling", "fixed"), ("--tuning-trials", 5)])
def test_noise_for_an_epsilon(run_json, options):
    options = ("--sampling-rate", 0.05, *ROUNDS, *options)
    report = run_json("account", "--epsilon", 3.6, *options)
    again = run_json("account", "--noise-multiplier", report["noise_multiplier"], *options)
    assert (report["target_epsilon"], report["epsilon"]) == (3.6, again["epsilon"])
    assert 0.99 * 3.6 <= again["epsilon"] <= 3.6


@pytest.mark.parametrize("option", [("--noise-multiplier", 0), ("--epsilon", "inf")])
def test_opting_out(run_cli, run_json, option):
    arguments = ("account", *option, "--sampling-rate", 0.05, *ROUNDS)
    report = run_json(*arguments)
    assert (report["epsilon"], report["unprotected"], report["noise_multiplier"]) == ("inf", True, 0)
    assert "opting out" in run_cli(*arguments).stdout


def test_tuning(run_json):
    tuned = run_json(*EPSILON, "--tuning-trials", 10, "--tuning-shape", 1)
    ten_runs = run_json(*EPSILON[:-4], "--rounds", 5000)
    assert run_json(*EPSILON)["epsilon"] < tuned["epsilon"] < ten_runs["epsilon"]
    assert tuned["tuning"] == "best of 10 trials on average (geometric)"


def test_repeated_trainings(run_cli, run_json):
    arguments = ("account", "--noise-multiplier", 2, "--sampling-rate", 0.1, "--delta", "1e-5", "--rounds", 10)
    report = run_json(*arguments, "--trainings", 104)
    assert (report["trainings"], report["rounds"], report["accountant"]) == (104, 10, "rdp")
    assert report["epsilon"] == gaussian_epsilon(2.0, 0.1, 1040, 1e-5, "rdp") == report["curve"][-1]["epsilon"]
    for point in report["curve"]:
        assert point["rounds"] == 10 * point["trainings"]
        assert point["epsilon"] == gaussian_epsilon(2.0, 0.1, point["rounds"], 1e-5, "rdp")
    assert [point["trainings"] for point in run_json(*arguments, "--trainings", 3)["curve"]] == [1, 2, 3]
    assert "104 trainings of 10 rounds" in words(run_cli(*arguments, "--trainings", 104).stdout)
    noise = run_json("account", "--epsilon", 3, *arguments[3:], "--trainings", 104)
    assert 0.99 * 3 <= noise["epsilon"] <= 3


def test_an_experiment(run_cli, run_json):
    document = run_json("account", "quickstart", "--tuning-trials", 10)
    assert [report["variants"] for report in document["mechanisms"]] == [
        ["Non-Private+Ditto"],
        ["DP-FedAvg+Ditto"],
        ["HDP-FedAvg+Ditto", "FedHDP r=0.01"],
    ]
    opted_out, private = document["mechanisms"][2]["groups"]
    assert (opted_out["group"], opted_out["unprotected"], opted_out["epsilon"]) == ("opted out", True, "inf")
    assert private["epsilon"] == pytest.approx(gaussian_epsilon(1.5, 0.05, 500, 1e-4, "pld"))
    assert (document["accountant"], private["epsilon_target"], private["surplus"]) == ("pld", None, None)
    assert private["epsilon_tuned"] > private["epsilon"]
    text = run_cli("account", "quickstart").stdout
    assert re.search(r"private +1,900 +0\.05 +1\.5 +0\.0001 +3\.238", text)


@pytest.mark.slow
def test_an_experiment_with_deltas_by_group(run_json, tmp_path):
    path = tmp_path / "fixed.toml"
    path.write_text(
        'name = "fixed"\nrounds = 20\nvariants = [{name = "only"}]\ndata = {name = "handwriting", clients = 100}\n'
        'mechanism = {clip = 1.0, sampling = "fixed", groups = ['
        '{name = "a", clients = 50, sampling_rate = 0.1, noise_multiplier = 4.0, delta = 1e-6},'
        '{name = "b", clients = 50, sampling_rate = 0.1, epsilon = 5.0}]}'
    )
    [report] = run_json("account", path, "--rounds", 10)["mechanisms"]
    a, b = report["groups"]
    assert (a["delta"], b["delta"], a["rounds"], a["accountant"]) == (1e-6, 1e-4, 10, "rdp")
    assert a["epsilon"] == gaussian_epsilon(max(2.0, b["noise_multiplier"]), 0.1, 10, 1e-6, sampling="fixed")
    assert 0 < b["epsilon"] <= 5


def test_asked_and_had(run_cli, run_json, tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(
        'rounds = 20\nvariants = [{algorithm = "hdp_fedavg"}, {algorithm = "fedhdp"}]\n'
        'ledger = "l"\nbudgets = {strict = {epsilon = 2.0, delta = 1e-4}}\n'
        'data = {name = "handwriting", clients = 100}\nmechanism = {clip = 1.0, groups = ['
        '{name = "open", clients = 10, sampling_rate = 0.1, epsilon = inf},'
        '{name = "mild", clients = 40, sampling_rate = 0.1, epsilon = 8.0, weight = 1.0},'
        '{name = "strict", clients = 50, sampling_rate = 0.1, epsilon = 3.0}]}'
    )
    document = run_json("account", path)
    (hdp_fedavg, fedhdp) = document["mechanisms"]
    assert document["accountant"] == "rdp"  # as the ledger's
    assert document["theory_weights"].keys() == {"open", "strict"}
    assert [group["epsilon_target"] for group in fedhdp["groups"]] == ["inf", 8.0, 3.0]
    assert 0.98 * 3 <= fedhdp["groups"][2]["epsilon"] <= 3
    assert "'strict'" in hdp_fedavg["groups"][1]["surplus"]
    assert fedhdp["groups"][1]["surplus"] is None
    assert 0 < document["rounds_allowed"]["HDP-FedAvg"]["strict"] < 20
    assert document["rounds_allowed"]["FedHDP"] == {"strict": 0}  # the first variant has used the budget
    text = words(run_cli("account", path).stdout)
    for part in ("ε asked", "RDP accountant", "'strict' requires covers it", "the theory's: open 1", "of 20 rounds"):
        assert part in text


def test_an_experiment_that_drops_groups(run_cli, run_json, tmp_path):
    path = tmp_path / "dropping.toml"
    budget = "\n[budgets.private]\nepsilon = 3.0\ndelta = 1e-4\n"
    path.write_text(f'ledger = "l"\non_budget_exhausted = "drop_group"\n{TINY.read_text()}{budget}')
    for file, drops_groups in ((path, True), (TINY, False)):
        assert run_json("account", file)["drops_groups"] == drops_groups
        assert ("budget is exhausted is dropped" in words(run_cli("account", file).stdout)) == drops_groups


@pytest.mark.slow
def test_a_flower_app(run_cli, run_json):
    document = run_json("account", APP)
    strict, relaxed, opted_out = document["levels"]
    assert [level["level"] for level in document["levels"]] == ["strict", "relaxed", "open"]  # the strictest first
    assert (strict["epsilon"], relaxed["epsilon"]) == (pytest.approx(2, rel=0.01), pytest.approx(8, rel=0.01))
    assert strict["epsilon"] == gaussian_epsilon(strict["noise_multiplier"], 0.8, 5, 1e-4, "rdp")
    assert (opted_out["opted_out"], opted_out["epsilon"]) == (True, "inf")
    longer = run_json("account", APP / "pyproject.toml", "--rounds", 50)
    assert longer["levels"][0]["noise_multiplier"] > 2 * strict["noise_multiplier"]
    assert "strict (default)" in run_cli("account", APP).stdout


def test_a_flower_app_by_noise_with_a_budget_and_a_seed(run_cli, run_json, tmp_path):
    text = (APP / "pyproject.toml").read_text().replace("epsilon = 2.0", "noise-multiplier = 3.0\ndelta = 1e-6")
    budget = "\n[tool.flwr.app.config.budgets.strict]\nepsilon = 4.0\ndelta = 1e-4\n"
    (tmp_path / "pyproject.toml").write_text(text + budget)
    strict = run_json("account", tmp_path)["levels"][0]
    assert (strict["epsilon"], strict["delta"]) == (gaussian_epsilon(3.0, 0.8, 5, 1e-6, "rdp"), 1e-6)
    assert strict["budget"] == 4.0
    (tmp_path / "pyproject.toml").write_text(text.replace("clip = 2.0", "clip = 2.0\nnoise-seed = 1"))
    assert run_json("account", tmp_path)["repeatable"]
    assert "nothing is private" in run_cli("account", tmp_path).stdout


def test_an_experiment_with_a_noise_seed_protects_nothing(run_cli, run_json, tmp_path):
    (tmp_path / "seeded.toml").write_text(re.sub(r"^noise_seed.*\n", "", TINY.read_text(), flags=re.MULTILINE))
    for file, repeatable in ((TINY, True), (tmp_path / "seeded.toml", False)):
        assert run_json("account", file)["repeatable"] == repeatable
        assert ("nothing is private" in run_cli("account", file).stdout) == repeatable


VALID = {"--noise-multiplier": 1.5, "--sampling-rate": 0.05, "--rounds": 500, "--delta": 1e-4}


@pytest.mark.parametrize(
    ("changes", "field", "value"),
    [
        ({"--sampling-rate": 1.5}, "sampling_rate", "1.5"),
        ({"--sampling-rate": "nan"}, "sampling_rate", "nan"),
        ({"--noise-multiplier": -1}, "noise_multiplier", "-1.0"),
        ({"--noise-multiplier": "nan"}, "noise_multiplier", "nan"),
        ({"--rounds": -5}, "rounds", "-5"),
        ({"--delta": 0}, "delta", "0.0"),
        ({"--delta": "nan"}, "delta", "nan"),
        ({"--accountant": "exact"}, "--accountant", "exact"),
        ({"--sampling": "shuffled"}, "--sampling", "shuffled"),
        ({"--sampling": "fixed", "--accountant": "pld"}, "accountant", "pld"),
        ({"--accountant": "pld", "--tuning-trials": 5}, "accountant", "pld"),
        ({"--tuning-trials": 0.5}, "trials", "0.5"),
        ({"--tuning-shape": 1}, "--tuning-shape", "1"),
        ({"--epsilon": 3}, "--noise-multiplier", "--epsilon 3"),
        ({"--noise-multiplier": None}, "--noise-multiplier", "neither"),
        ({"--noise-multiplier": None, "--epsilon": 0}, "epsilon", "0.0"),
        ({"--rounds": None}, "--rounds", "none"),
        ({"--trainings": 0}, "trainings", "0"),
        ({"--trainings": 2, "--tuning-trials": 5}, "trainings", "2"),
        ({"--trainings": 2, "--accountant": "pld"}, "accountant", "pld"),
    ],
)
def test_invalid_options(run_refused, changes, field, value):
    options = {name: option for name, option in (VALID | changes).items() if option is not None}
    err = run_refused("account", *(part for pair in options.items() for part in pair), "--json")
    assert field in err
    assert value in err


@pytest.mark.parametrize(
    ("arguments", "field", "value"),
    [
        (("nothing",), "nothing", "quickstart"),
        (("nothing.toml",), "nothing.toml", "cannot be read"),
        (("quickstart", "--epsilon", "3"), "--epsilon", "3"),
        ((".",), "pyproject.toml", "cannot be read"),
        ((APP, "--epsilon", "3"), "--epsilon", "3"),
        ((APP, "--tuning-trials", "3"), "--tuning-trials", "3"),
        ((APP, "--rounds", "0"), "rounds", "0"),
        ((ROOT / "pyproject.toml",), "pyproject.toml", "[tool.flwr.app.config]"),
    ],
)
def test_invalid_experiment(run_refused, monkeypatch, tmp_path, arguments, field, value):
    monkeypatch.chdir(tmp_path)
    err = run_refused("account", *arguments)
    assert field in err
    assert value in err

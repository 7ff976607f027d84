"""The commands of a privacy officer, as they are typed: account, plan, ledger."""

import contextlib
import json
import re
import sqlite3
import sys
import warnings
from pathlib import Path

import msgspec
import pytest

from fedhdp.errors import LedgerError
from fedhdp.experiments.config import from_toml
from fedhdp.mechanism import Mechanism, PrivacyGroup
from fedhdp.privacy import accounting
from fedhdp.privacy.accounting import privacy_costs
from fedhdp.privacy.ledger import Budget, Ledger

with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # typer's, about names in click
    from fedhdp import cli

ROOT = Path(__file__).parents[1]
APP = ROOT / "examples" / "flower_app"
TINY = Path(__file__).parent / "tiny.toml"
ROUNDS = ("--rounds", "500", "--delta", "1e-4")


@pytest.fixture
def fedhdp(monkeypatch, capfdbinary):
    """Type a command: what it printed, what it complained of, and its exit status."""

    def typed(*arguments: object) -> tuple[str, str, int]:
        monkeypatch.setattr(sys, "argv", ["fedhdp", *map(str, arguments)])
        capfdbinary.readouterr()
        with pytest.raises(SystemExit) as left:
            cli.main()
        sys.stdout.flush()
        out, err = capfdbinary.readouterr()
        return out.decode(), err.decode(), left.value.code or 0

    return typed


@pytest.fixture
def answer(fedhdp):
    """Type a command that answers in JSON, and nothing but JSON."""

    def asked(*arguments: object) -> dict:
        out, err, status = fedhdp(*arguments, "--json")
        assert (err, status) == ("", 0)
        return json.loads(out, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))

    return asked


@pytest.mark.parametrize(
    ("rate", "noise", "rdp", "pld"), [(0.05, 1.5, 3.608, 3.24), (0.03, 4, 0.576, 0.511), (0.03, 1, 4.122, 3.627)]
)
def test_the_papers_three_settings_cost_what_they_should(answer, rate, noise, rdp, pld):
    asked = ("account", "--noise-multiplier", noise, "--sampling-rate", rate, *ROUNDS)
    assert answer(*asked)["epsilon"] == pytest.approx(rdp, abs=6e-4)
    assert answer(*asked, "--accountant", "pld")["epsilon"] == pytest.approx(pld, abs=3e-3)


def test_an_answer_holds_all_that_its_epsilon_rests_on(answer):
    found = answer("account", "--noise-multiplier", 1.5, "--sampling-rate", 0.05, *ROUNDS)
    assert (
        found
        | {
            "opted_out": False,
            "delta": 1e-4,
            "noise_multiplier": 1.5,
            "sampling_rate": 0.05,
            "rounds": 500,
            "sampling": "poisson",
            "adjacency": "add or remove one client",
            "accountant": "rdp",
            "tuning": None,
        }
        == found
    )
    assert [point["rounds"] for point in found["curve"]] == list(range(50, 501, 50))
    assert found["curve"][-1]["epsilon"] == found["epsilon"]


def test_fixed_cohorts_are_priced_by_replacing_one_client_and_the_text_says_what_that_means(fedhdp, answer):
    asked = ("account", "--noise-multiplier", 1.5, "--sampling-rate", 0.05, *ROUNDS, "--sampling", "fixed")
    found = answer(*asked)
    assert found["epsilon"] == pytest.approx(8.03, abs=5e-3)
    assert found["epsilon_were_the_noise_in_clips"] == pytest.approx(22.4, abs=5e-2)
    assert found["adjacency"] == "replace one client"
    words = " ".join(fedhdp(*asked)[0].split())
    assert "8.03" in words
    assert "two clips, so this noise is 3 clips" in words
    assert "A mechanism whose noise is 1.5 clips has half the multiplier here and pays epsilon 22.41." in words


@pytest.mark.parametrize("sampling", [(), ("--accountant", "pld"), ("--sampling", "fixed"), ("--tuning-trials", 5)])
def test_the_noise_for_an_epsilon_costs_that_epsilon_and_not_more(answer, sampling):
    rest = ("--sampling-rate", 0.05, *ROUNDS, *sampling)
    found = answer("account", "--epsilon", 3.6, *rest)
    again = answer("account", "--noise-multiplier", found["noise_multiplier"], *rest)
    assert found["epsilon"] == again["epsilon"]
    assert 0.99 * 3.6 <= again["epsilon"] <= 3.6


def test_who_opted_out_has_no_epsilon_in_json_and_is_said_to_have_opted_out(fedhdp, answer):
    for way in (("--noise-multiplier", 0), ("--epsilon", "inf")):
        asked = ("account", *way, "--sampling-rate", 0.05, *ROUNDS)
        found = answer(*asked)
        assert (found["epsilon"], found["opted_out"], found["noise_multiplier"]) == (None, True, 0)
        assert "opting out" in fedhdp(*asked)[0]


def test_tuning_costs_more_than_one_run_and_names_how_trials_are_drawn(answer):
    asked = ("account", "--noise-multiplier", 1.5, "--sampling-rate", 0.05, *ROUNDS)
    tuned = answer(*asked, "--tuning-trials", 10, "--tuning-shape", 1)
    assert answer(*asked)["epsilon"] < tuned["epsilon"] < answer(*asked[:-4], "--rounds", 5000)["epsilon"]
    assert tuned["tuning"] == "best of 10 trials on average (geometric)"


def test_an_experiment_is_a_table_of_its_groups_once_for_variants_that_cost_the_same(fedhdp, answer):
    found = answer("account", "quickstart", "--tuning-trials", 10)
    assert [part["variants"] for part in found["mechanisms"]] == [
        ["Non-Private+Ditto"],
        ["DP-FedAvg+Ditto"],
        ["HDP-FedAvg+Ditto", "FedHDP r=0.01"],
    ]
    opted_out, private = found["mechanisms"][2]["groups"]
    assert (opted_out["group"], opted_out["opted_out"], opted_out["epsilon"]) == ("opted out", True, None)
    assert private["epsilon"] == pytest.approx(accounting.gaussian_epsilon(1.5, 0.05, 500, 1e-4))
    assert private["epsilon_pld"] == pytest.approx(accounting.gaussian_epsilon(1.5, 0.05, 500, 1e-4, "pld"))
    assert private["epsilon_tuned"] > private["epsilon"]
    words = fedhdp("account", "quickstart")[0]
    assert re.search(r"private +1,900 +0\.05 +1\.5 +0\.0001 +3\.609 +3\.238", words)


def test_an_experiment_of_ones_own_is_priced_at_each_groups_own_delta_and_at_other_rounds(answer, tmp_path):
    fixed = tmp_path / "fixed.toml"
    fixed.write_text(
        'name = "fixed"\nrounds = 20\nvariants = [{name = "only"}]\ndata = {name = "handwriting", clients = 100}\n'
        'mechanism = {clip = 1.0, sampling = "fixed", groups = ['
        '{name = "a", clients = 50, sampling_rate = 0.1, noise_multiplier = 4.0, delta = 1e-6},'
        '{name = "b", clients = 50, sampling_rate = 0.1, epsilon = 5.0}]}'
    )
    [only] = answer("account", fixed, "--rounds", 10)["mechanisms"]
    a, b = only["groups"]
    assert (a["delta"], b["delta"], a["rounds"], a["epsilon_pld"]) == (1e-6, 1e-4, 10, None)
    assert a["epsilon"] == accounting.gaussian_epsilon(max(2.0, b["noise_multiplier"]), 0.1, 10, 1e-6, sampling="fixed")
    assert 0 < b["epsilon"] <= 5


GOOD = {"--noise-multiplier": 1.5, "--sampling-rate": 0.05, "--rounds": 500, "--delta": 1e-4}


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"--sampling-rate": 1.5}, "sampling_rate must be .* got 1.5"),
        ({"--sampling-rate": "nan"}, "sampling_rate must be .* got nan"),
        ({"--noise-multiplier": -1}, "noise_multiplier must be .* got -1.0"),
        ({"--noise-multiplier": "nan"}, "noise_multiplier must be .* got nan"),
        ({"--rounds": -5}, "rounds must be .* got -5"),
        ({"--delta": 0}, "delta must be .* got 0.0"),
        ({"--delta": "nan"}, "delta must be .* got nan"),
        ({"--accountant": "exact"}, "accountant must be .* got 'exact'"),
        ({"--sampling": "shuffled"}, "sampling must be .* got 'shuffled'"),
        ({"--sampling": "fixed", "--accountant": "pld"}, "accountant must be 'rdp' .* got 'pld'"),
        ({"--tuning-trials": 0.5}, "trials must be .* got 0.5"),
        ({"--tuning-shape": 1}, "--tuning-shape needs --tuning-trials, got 1"),
        ({"--epsilon": 3}, "either .* got --noise-multiplier 1.5 and --epsilon 3"),
        ({"--noise-multiplier": None}, "either .* got neither"),
        ({"--noise-multiplier": None, "--epsilon": 0}, "epsilon must be .* got 0.0"),
        ({"--rounds": None}, "--rounds must be given"),
    ],
)
def test_what_cannot_be_priced_is_said_in_one_line_that_names_it(fedhdp, changes, complaint):
    numbers = {name: value for name, value in (GOOD | changes).items() if value is not None}
    out, err, status = fedhdp("account", *(part for pair in numbers.items() for part in pair), "--json")
    assert (out, status, err.count("\n")) == ("", 2, 1)
    assert re.search(complaint, err)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("account", "nothing"), "there is no experiment 'nothing'"),
        (("account", "nothing.toml"), "nothing.toml cannot be read"),
        (("account", "quickstart", "--epsilon", "3"), "takes no --epsilon 3"),
        (("account", "."), r"pyproject.toml cannot be read"),
        (("account", APP, "--epsilon", "3"), "it takes no --epsilon 3"),
        (("account", APP, "--tuning-trials", "3"), "--tuning-trials is for experiments"),
        (("account", APP, "--rounds", "0"), "rounds must be at least 1, got 0"),
        (("account", APP.parent.parent / "pyproject.toml"), r"it has no \[tool.flwr.app.config\]"),
        (("plan", "--level", "strict:two:60%"), "--level must be .* got 'strict:two:60%'"),
        (("plan", "--level", "strict:2"), "--level must be .* got 'strict:2'"),
        (("plan", "--level", "strict:2:60%"), "shares must be .* got 0.6"),
        (("plan", "--level", "strict:-2:100%"), "epsilon of 'strict' must be .* got -2.0"),
        (("ledger", "show", "nothing.ledger"), "nothing.ledger: cannot be opened"),
        (("ledger", "promise", "a.ledger", "strict", "--epsilon", "nan", "--delta", "0.1"), "epsilon must be .* nan"),
    ],
)
def test_a_command_that_cannot_be_followed_says_so_in_one_line(fedhdp, monkeypatch, tmp_path, arguments, complaint):
    monkeypatch.chdir(tmp_path)
    out, err, status = fedhdp(*arguments)
    assert (out, status, err.count("\n")) == ("", 2, 1)
    assert re.search(complaint, err)


def test_a_flower_app_is_priced_level_by_level_before_anything_is_sent(fedhdp, answer, tmp_path):
    found = answer("account", APP)
    strict, relaxed, open_ = found["levels"]  # the strictest first: who says nothing gets it
    assert [level["level"] for level in found["levels"]] == ["strict", "relaxed", "open"]
    assert (strict["epsilon_pld"], relaxed["epsilon_pld"]) == (pytest.approx(2, rel=0.01), pytest.approx(8, rel=0.01))
    assert strict["epsilon"] == accounting.gaussian_epsilon(strict["noise_multiplier"], 0.8, 5, 1e-4)
    assert (open_["opted_out"], open_["epsilon"]) == (True, None)
    longer = answer("account", APP / "pyproject.toml", "--rounds", 50)
    assert longer["levels"][0]["noise_multiplier"] > 2 * strict["noise_multiplier"]
    changed = (APP / "pyproject.toml").read_text().replace("epsilon = 2.0", "noise-multiplier = 3.0\ndelta = 1e-6")
    budget = "\n[tool.flwr.app.config.budgets.strict]\nepsilon = 4.0\ndelta = 1e-4\n"
    (tmp_path / "pyproject.toml").write_text(changed + budget)
    by_noise = answer("account", tmp_path)["levels"][0]
    assert (by_noise["epsilon"], by_noise["delta"]) == (accounting.gaussian_epsilon(3.0, 0.8, 5, 1e-6), 1e-6)
    assert by_noise["budget"] == 4.0
    words = fedhdp("account", APP)[0].splitlines()
    page = (ROOT / "docs" / "how-to" / "flower.md").read_text()
    assert all(line.rstrip() in page for line in words[:6])
    (tmp_path / "pyproject.toml").write_text(changed.replace("clip = 2.0", "clip = 2.0\nnoise-seed = 1"))
    assert "nothing of this is promised" in fedhdp("account", tmp_path)[0]


PLAN = ("plan", "--level", "none:inf:5%", "--level", "relaxed:8:35%", "--level", "strict:2:0.6")


def test_a_plan_is_a_table_for_people_and_json_for_programs(fedhdp, answer):
    found = answer(*PLAN)
    assert [level["clients"] for level in found["levels"]] == [100, 700, 1200]
    assert found["levels"][0]["epsilon_asked"] is None
    assert found["reach"]["fedhdp"]["error"] < found["reach"]["dp_fedavg"]["error"]
    words = fedhdp(*PLAN)[0]
    for part in ("relaxed", "0.9025", "0.046", "DP-FedAvg"):
        assert part in words


def test_a_delta_that_allows_to_show_somebody_whole_is_remarked_on(fedhdp):
    assert "could be shown whole" not in fedhdp(*PLAN)[0]
    assert "delta 0.01 with 2,000 clients: one who is drawn at random" in fedhdp(*PLAN, "--delta", "0.01")[0]


def test_a_plan_is_written_as_an_experiment_with_its_levels_and_weights(fedhdp, answer):
    found = answer(*PLAN)
    experiment = from_toml(fedhdp(*PLAN, "--toml")[0], "plan.toml")
    mechanism = experiment.mechanism.build(experiment.rounds, experiment.delta)
    assert mechanism == msgspec.convert(found["mechanism"], Mechanism)
    assert (experiment.data.clients, experiment.rounds, experiment.model.hidden) == (2000, 500, 50)


MECHANISM = Mechanism((PrivacyGroup("open", 10, 0.0, 0.1), PrivacyGroup("strict", 30, 2.0, 0.1)), clip=1.0)


def test_a_ledger_shows_budget_spending_and_rounds_left_from_before_the_first_run(fedhdp, answer, tmp_path):
    file = tmp_path / "population.ledger"
    out, _, status = fedhdp("ledger", "promise", file, "strict", "--epsilon", 1, "--delta", 1e-5)
    assert status == 0
    assert "waits" in out
    [strict] = answer("ledger", "show", file)["groups"]
    assert (strict["budget"], strict["epsilon"], strict["clients"]) == ({"epsilon": 1.0, "delta": 1e-5}, 0, 0)
    with Ledger(file) as ledger:
        ledger.begin("first", MECHANISM)
        ledger.charge("first", privacy_costs(MECHANISM, 7))
    found = answer("ledger", "show", file)
    opened, strict = found["groups"]
    assert (opened["group"], opened["opted_out"], opened["epsilon"]) == ("open", True, None)
    once = privacy_costs(MECHANISM)["strict"]
    assert strict["epsilon"] == accounting.gaussian_epsilon(2.0, 0.1, 7, 1e-5)
    assert strict["epsilon_pld"] == accounting.gaussian_epsilon(2.0, 0.1, 7, 1e-5, "pld")
    assert strict["rounds_left"] == accounting.rounds_left([once._replace(rounds=7)], once, Budget(1.0, 1e-5)) > 0
    assert strict["spent"] == [{"noise_multiplier": 2.0, "sampling_rate": 0.1, "sampling": "poisson", "rounds": 7}]
    assert [run["run"] for run in found["runs"]] == ["first"]
    words = fedhdp("ledger", "show", file)[0]
    assert re.search(rf"strict +30 +1 +1e-05 +\S+ +\S+ +7 +{strict['rounds_left']}\b", words)


def test_a_promise_is_lowered_and_never_raised(fedhdp, answer, tmp_path):
    file = tmp_path / "population.ledger"
    for epsilon, status in ((3, 0), (2, 0), (4, 2)):
        assert fedhdp("ledger", "promise", file, "strict", "--epsilon", epsilon, "--delta", 1e-5)[2] == status
    assert answer("ledger", "show", file)["groups"][0]["budget"]["epsilon"] == 2


def test_a_ledger_of_mixed_cohorts_is_shown_with_a_note_instead_of_an_epsilon(answer, tmp_path):
    file = tmp_path / "population.ledger"
    with Ledger(file) as ledger:
        for name, sampling in (("first", "poisson"), ("second", "fixed")):
            mechanism = msgspec.structs.replace(MECHANISM, sampling=sampling)
            ledger.begin(name, mechanism)
            with contextlib.nullcontext() if name == "first" else pytest.raises(LedgerError, match="does not compose"):
                ledger.charge(name, privacy_costs(mechanism))
    with sqlite3.connect(file) as written:  # as files were written before that was refused
        columns = '"group", noise_multiplier, sampling_rate'
        written.execute(f"INSERT INTO charges SELECT 'second', {columns}, 'fixed', 1, latest FROM charges")
    written.close()
    strict = answer("ledger", "show", file)["groups"][1]
    assert (strict["epsilon"], strict["epsilon_pld"], strict["opted_out"]) == (None, None, False)
    assert "do not compose" in strict["note"]


def test_names_are_shown_as_they_are_written(fedhdp, tmp_path):
    file = tmp_path / "population.ledger"
    assert "[red]:smile:" in fedhdp("ledger", "promise", file, "[red]:smile:", "--epsilon", 1, "--delta", 0.1)[0]
    assert "[red]:smile:" in fedhdp("ledger", "show", file)[0]


def test_an_experiment_that_leaves_groups_out_is_priced_with_the_warning_that_others_may_pay_more(fedhdp, tmp_path):
    text, leaving = TINY.read_text(), tmp_path / "leaving.toml"
    budget = "\n[budgets.private]\nepsilon = 3.0\ndelta = 1e-4\n"
    leaving.write_text(f'ledger = "l"\non_budget_exhausted = "drop_group"\n{text}{budget}')
    for file, warned in ((leaving, True), (TINY, False)):
        out, _, status = fedhdp("account", file)
        assert (status, "may pay more than this" in " ".join(out.split())) == (0, warned)

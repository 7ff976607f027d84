"""`fedhdp plan` as users see it."""

from __future__ import annotations

import re

import msgspec
import pytest

from fedhdp.experiments.toml import from_toml
from fedhdp.mechanism import Mechanism

PLAN = ("plan", "--level", "none:inf:5%", "--level", "relaxed:8:35%", "--level", "strict:2:0.6")


@pytest.mark.slow
def test_levels_errors_and_costs(run_cli):
    code, out, err = run_cli(*PLAN)
    assert (code, err) == (0, "")
    for text in ("0.9026", "2.119", "ε asked", "weighting bias", "DP-FedAvg, strictest for all", "'strict'"):
        assert text in out


def test_noise_is_never_rounded_down(run_cli, run_json):
    text = run_cli(*PLAN).stdout
    for level in run_json(*PLAN)["levels"][1:]:
        (noise,) = re.findall(rf"{level['name']} +\S+ +\S+ +\S+ +\S+ +(\S+)", text.partition("Expected error")[0])
        assert level["noise_multiplier"] <= float(noise) < level["noise_multiplier"] + 1e-3


def test_json(run_json):
    levels = run_json(*PLAN)["levels"]
    assert [(level["name"], level["clients"]) for level in levels] == [
        ("none", 100),
        ("relaxed", 700),
        ("strict", 1200),
    ]


def test_toml_is_an_experiment(run_cli, run_json):
    document = run_json(*PLAN)
    experiment = from_toml(run_cli(*PLAN, "--toml").stdout, "plan.toml")
    mechanism = experiment.build_mechanism()
    assert mechanism == msgspec.convert(document["mechanism"], Mechanism)
    assert (experiment.data.clients, experiment.rounds, experiment.model.hidden) == (2000, 500, 50)


@pytest.mark.slow
def test_large_delta_is_warned_about(run_cli):
    assert "with 2,000 clients" not in run_cli(*PLAN).stdout
    assert "delta 0.01 with 2,000 clients" in run_cli(*PLAN, "--delta", "0.01").stdout


@pytest.mark.parametrize(
    ("level", "field", "value"),
    [
        ("strict:2", "--level", "'strict:2'"),
        ("strict:two:60%", "--level", "'strict:two:60%'"),
        ("strict:2:60%", "share", "0.6"),
        ("strict:0:100%", "epsilon of 'strict'", "0.0"),
        ("a:1:150%", "share of 'a'", "1.5"),
    ],
)
def test_invalid_level(run_refused, level, field, value):
    err = run_refused("plan", "--level", level)
    assert field in err
    assert value in err


SETS = ("--compare", "now=none:inf:5%,strict:2:95%", "--compare", "none:inf:5%,mild:8:50%,strict:2:45%")


def test_compare(run_cli, run_json):
    plans = run_json("plan", *SETS, "--level", "all:4:1")["plans"]
    assert list(plans) == ["levels", "now", "set 3"]
    assert [level["name"] for level in plans["set 3"]["levels"]] == ["none", "mild", "strict"]
    alone = run_json("plan", "--level", "none:inf:5%", "--level", "strict:2:95%")
    assert plans["now"] == alone
    text = run_cli("plan", *SETS).stdout
    for plan in (plans["now"], plans["set 3"]):
        assert f"{plan['error_estimates']['fedhdp']['error']:.3g}" in text


def test_noise_by_the_accountant_of_a_ledger(run_cli, run_json):
    document = run_json("plan", "--level", "none:inf:5%", "--level", "strict:2:95%", "--accountant", "rdp")
    assert document["accountant"] == "rdp"
    text = run_cli("plan", "--level", "none:inf:5%", "--level", "strict:2:95%", "--accountant", "rdp", "--toml").stdout
    experiment = from_toml(text, "plan.toml")
    assert experiment.build_mechanism() == msgspec.convert(document["mechanism"], Mechanism)


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ((), "--level"),
        (("--compare", "a:1:1"), "--compare"),
        (("--compare", "a:1:1", "--compare", "b:1"), "'b:1'"),
        (("--compare", "x=a:1:1", "--compare", "x=b:1:1"), "'x'"),
        (("--compare", "a:1:1", "--compare", "b:1:1", "--toml"), "--toml"),
        (("--compare", "a:1:1", "--compare", "b:1:50%"), "shares"),
    ],
)
def test_invalid_sets(run_refused, arguments, field):
    assert field in run_refused("plan", *arguments)


def test_json_and_toml_exclude_each_other(run_refused):
    assert "--json" in run_refused("plan", "--level", "a:1:1", "--json", "--toml")


def test_suggested_training_is_an_experiment_on_a_basis(run_cli, run_json):
    """The suggestion that is printed is the one that the experiment has."""
    levels = ("plan", "--level", "none:inf:5%", "--level", "private:3.6:95%", "--training")
    suggested = run_json(*levels, "--json")["training"]
    experiment = from_toml(run_cli(*levels, "--toml").stdout, "plan.toml")
    assert experiment.model.basis.size == suggested["basis_size"]
    assert experiment.training.epochs == suggested["epochs"]
    assert experiment.server.optimizer["learning_rate"] == suggested["server_rate"]
    assert experiment.server.average == suggested["average"]
    assert [variant.algorithm for variant in experiment.variants] == ["fedhdp"]
    text = run_cli(*levels).stdout
    for setting in suggested["rests_on"]:
        assert setting in text


def test_the_server_is_slower_where_a_round_has_more_noise(run_json):
    """Nobody opts out, so that no weight can keep the noise low."""
    sets = (("none:inf:5%", "private:3.6:95%"), ("mild:3.6:50%", "strict:2:50%"))
    plans = [run_json("plan", "--level", first, "--level", other, "--training", "--json") for first, other in sets]
    noises = [plan["error_estimates"]["fedhdp"]["noise_per_parameter"] for plan in plans]
    rates = [plan["training"]["server_rate"] for plan in plans]
    assert noises[0] < noises[1]
    assert rates[0] == 0.4 > rates[1] > 0


def test_training_is_suggested_for_one_set_of_levels(run_refused):
    assert "--training" in run_refused("plan", "--compare", "a:1:1", "--compare", "b:1:1", "--training")

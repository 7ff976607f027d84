"""``fedhdp plan`` as JSON, as an experiment, and its warning about delta."""

from __future__ import annotations

import msgspec
import pytest

from fedhdp.experiments.config import from_toml
from fedhdp.mechanism import Mechanism

PLAN = ("plan", "--level", "none:inf:5%", "--level", "relaxed:8:35%", "--level", "strict:2:0.6")


def test_clients_by_level(run_json):
    levels = run_json(*PLAN)["levels"]
    assert [level["clients"] for level in levels] == [100, 700, 1200]


def test_a_plan_as_an_experiment(run_cli, run_json):
    document = run_json(*PLAN)
    experiment = from_toml(run_cli(*PLAN, "--toml").stdout, "plan.toml")
    mechanism = experiment.mechanism.build(experiment.rounds, experiment.delta)
    assert mechanism == msgspec.convert(document["mechanism"], Mechanism)
    assert (experiment.data.clients, experiment.rounds, experiment.model.hidden) == (2000, 500, 50)


def test_a_large_delta_is_warned_about(run_cli):
    assert "with 2,000 clients" not in run_cli(*PLAN).stdout
    assert "delta 0.01 with 2,000 clients" in run_cli(*PLAN, "--delta", "0.01").stdout


@pytest.mark.parametrize(
    ("level", "field", "value"), [("strict:two:60%", "--level", "strict:two:60%"), ("strict:2:60%", "share", "0.6")]
)
def test_invalid_level(run_refused, level, field, value):
    err = run_refused("plan", "--level", level)
    assert field in err
    assert value in err

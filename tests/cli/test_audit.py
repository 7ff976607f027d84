"""``fedhdp audit``: tables, JSON, exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedhdp.experiments import audit
from fedhdp.experiments.audit.run import audit_mechanism
from fedhdp.experiments.audit.system import SOUND

TINY = Path(__file__).parents[1] / "tiny.toml"
QUICK = ("audit", TINY, "--runs", 1, "--confidence", "0.999999")


def test_experiment_as_json(run_cli):
    code, out, _ = run_cli(*QUICK, "--json")
    report = json.loads(out)
    assert code == 0
    assert report["holds"]
    assert report["mutants"] == []
    for group in report["groups"]:
        assert {"name", "claimed_epsilon", "lower_bounds", "holds"} <= set(group)
        assert set(group["lower_bounds"]) == {"Clopper-Pearson", "Gaussian", "one run"}
        assert group["known_coins"]["roc"][0] == [0, 0]
        assert group["known_coins"]["roc"][-1] == [1, 1]
        assert group["opted_out"] == (group["claimed_epsilon"] == "inf")


def test_experiment_as_text(run_cli):
    code, out, _ = run_cli(*QUICK)
    assert code == 0
    for part in ("unknown coins", "known coins", "noise variance", "simulator: devices", "too few", "Coins of seed 0"):
        assert part in out
    assert max(map(len, out.splitlines())) <= 100


def test_bound_above_its_claim_ends_with_1(run_cli, monkeypatch):
    def without_noise(schedule, *arguments, **options):
        silent = SOUND._replace(round_params=lambda m: m.round_params._replace(update_noise_stddev=0.0))
        return audit_mechanism(schedule, *arguments, **(options | {"functions": silent}))

    monkeypatch.setattr(audit.run, "audit_mechanism", without_noise)
    code, out, _ = run_cli(*QUICK)
    assert code == 1
    assert "OFF" in out
    code, out, _ = run_cli(*QUICK, "--json")
    assert code == 1
    assert not json.loads(out)["holds"]


def test_mutants(run_cli, monkeypatch):
    [name, *others] = audit.MUTANTS
    for other in others:
        monkeypatch.delitem(audit.MUTANTS, other)
    monkeypatch.setitem(audit.MUTANTS, "harmless", audit.MUTANTS[name]._replace(make=lambda: SOUND))
    code, out, _ = run_cli("audit", "--mutants", "--json", "--confidence", "0.999999")
    assert code == 1
    assert {mutant["name"]: mutant["caught"] for mutant in json.loads(out)["mutants"]} == {
        name: True,
        "harmless": False,
    }


def test_refused(run_refused):
    assert "--mutants" in run_refused("audit")
    assert "--training" in run_refused("audit", "--mutants", "--training")
    assert "variant must be one of" in run_refused(*QUICK, "--variant", "other")
    assert "runs" in run_refused("audit", TINY, "--runs", 0)
    assert "canaries" in run_refused("audit", TINY, "--canaries", 0)
    assert "there is no experiment" in run_refused("audit", "nothing")


@pytest.mark.slow
def test_training(run_cli):
    code, out, _ = run_cli(*QUICK, "--training", "--json")
    assert code == 0
    for group in json.loads(out)["groups"]:
        assert group["training"]["with_canary"] + group["training"]["without_canary"] >= 2

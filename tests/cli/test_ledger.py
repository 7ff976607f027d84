"""``fedhdp ledger``: budgets, epsilons and rounds left, as text and as JSON."""

from __future__ import annotations

import json
import math
import re

import msgspec
import pytest
from helpers import raises_field

from fedhdp.errors import LedgerError
from fedhdp.mechanism import Mechanism, PrivacyGroup
from fedhdp.privacy.accounting import gaussian_epsilon, rounds_left
from fedhdp.privacy.costs import privacy_costs
from fedhdp.privacy.ledger import Budget, Ledger
from fedhdp.privacy.reports import group_standing

MECHANISM = Mechanism((PrivacyGroup("open", 10, 0.0, 0.1), PrivacyGroup("strict", 30, 2.0, 0.1)), clip=1.0)


@pytest.fixture
def file(tmp_path):
    return tmp_path / "population.ledger"


def test_a_promise_before_the_first_run(run_cli, run_json, file):
    assert run_cli("ledger", "promise", file, "strict", "--epsilon", 1, "--delta", 1e-5).code == 0
    [strict] = run_json("ledger", "show", file)["groups"]
    assert (strict["budget"], strict["epsilon"], strict["clients"]) == ({"epsilon": 1.0, "delta": 1e-5}, 0, 0)


def test_show(run_cli, run_json, file):
    with Ledger(file) as ledger:
        ledger.promise("strict", 1.0, 1e-5)
        ledger.begin("first", MECHANISM)
        ledger.charge("first", privacy_costs(MECHANISM, 7))
    document = run_json("ledger", "show", file)
    opted_out, strict = document["groups"]
    assert (opted_out["group"], opted_out["unprotected"], opted_out["epsilon"]) == ("open", True, "inf")
    round_cost = privacy_costs(MECHANISM)["strict"]
    left = rounds_left([round_cost._replace(rounds=7)], round_cost, Budget(1.0, 1e-5))
    assert strict["epsilon"] == gaussian_epsilon(2.0, 0.1, 7, 1e-5, "rdp")
    assert strict["rounds_left"] == left > 0
    assert strict["charges"] == [{"noise_multiplier": 2.0, "sampling_rate": 0.1, "sampling": "poisson", "rounds": 7}]
    assert [run["run"] for run in document["runs"]] == ["first"]
    text = run_cli("ledger", "show", file).stdout
    assert re.search(rf"strict +30 +1 +1e-05 +\S+ +7 +{left}\b", text)


def test_group_standing(file):
    with Ledger(file) as ledger:
        ledger.begin("first", MECHANISM)
        ledger.charge("first", privacy_costs(MECHANISM, 7))
        strict = group_standing(ledger, "strict", 1e-6)
        assert (strict.epsilon, strict.delta) == (gaussian_epsilon(2.0, 0.1, 7, 1e-6, "rdp"), 1e-6)
        assert (strict.budget, strict.rounds_left) == (None, None)
        assert strict.charges == [privacy_costs(MECHANISM, 7)["strict"]._asdict()]
        assert group_standing(ledger, "open", 1e-6).epsilon == math.inf
        with raises_field("group", LedgerError):
            group_standing(ledger, "unknown", 1e-6)


def test_a_promise_is_never_raised(run_cli, run_json, file):
    for epsilon, code in ((3, 0), (2, 0), (4, 2)):
        assert run_cli("ledger", "promise", file, "strict", "--epsilon", epsilon, "--delta", 1e-5).code == code
    assert run_json("ledger", "show", file)["groups"][0]["budget"]["epsilon"] == 2


def test_a_promise_that_is_exceeded_already(run_cli, file):
    with Ledger(file) as ledger:
        ledger.begin("first", MECHANISM)
        ledger.charge("first", privacy_costs(MECHANISM, 7))
    out = run_cli("ledger", "promise", file, "strict", "--epsilon", 0.01, "--delta", 1e-5, "--yes").stdout
    assert "No further round" in out


@pytest.fixture
def charged(file):
    """A ledger in which the group strict has a budget and was charged for seven rounds."""
    with Ledger(file) as ledger:
        ledger.promise("strict", 3.0, 1e-5)
        ledger.begin("first", MECHANISM)
        ledger.charge("first", privacy_costs(MECHANISM, 7))
    return file


def promise_of(file, group: str = "strict") -> Budget | None:
    with Ledger(file, read_only=True) as ledger:
        return ledger.budget(group)


def test_a_dry_run_changes_nothing(run_cli, charged, tmp_path):
    round_cost = privacy_costs(MECHANISM)["strict"]
    left = rounds_left([round_cost._replace(rounds=7)], round_cost, Budget(2.0, 1e-5))
    before = charged.read_bytes()
    arguments = ("ledger", "promise", charged, "strict", "--delta", 1e-5, "--dry-run")
    out = " ".join(run_cli(*arguments, "--epsilon", 2).stdout.split())
    assert f"with {left} rounds left" in out
    assert "instead of epsilon 3 at delta 1e-05" in out
    assert "No further round" in run_cli(*arguments, "--epsilon", 0.01).stdout  # asks for nothing
    assert run_cli(*arguments, "--epsilon", 4).code == 2  # as without --dry-run
    assert charged.read_bytes() == before
    assert run_cli("ledger", "promise", tmp_path / "new", "a", "--epsilon", 1, "--delta", 0.1, "--dry-run").code == 0
    assert not (tmp_path / "new").exists()


def test_a_budget_that_ends_a_group_is_confirmed(run_cli, run_refused, charged, monkeypatch):
    arguments = ("ledger", "promise", charged, "strict", "--epsilon", 0.01, "--delta", 1e-5)
    assert "--yes" in run_refused(*arguments)  # nobody can be asked
    monkeypatch.setattr("fedhdp.cli.ledger._can_ask", lambda: True)
    for answer, code, epsilon in ((False, 1, 3.0), (True, 0, 0.01)):
        monkeypatch.setattr("typer.confirm", lambda question, answer=answer: answer)
        assert run_cli(*arguments).code == code
        assert promise_of(charged).epsilon == epsilon


def test_a_budget_that_ends_a_group_after_cheap_rounds_is_confirmed(run_cli, run_refused, file):
    """A run whose weights rise begins with rounds that cost nothing: those that follow count."""
    first = msgspec.structs.replace(MECHANISM.groups[1], weight=0.0)
    with Ledger(file) as ledger:
        ledger.begin("rising", msgspec.structs.replace(MECHANISM, groups=(MECHANISM.groups[0], first)))
        ledger.charge("rising", privacy_costs(ledger.runs()[0].mechanism))
        ledger.charge("rising", privacy_costs(MECHANISM, 7))
        assert group_standing(ledger, "strict", 1e-5, Budget(1.0, 1e-5)).rounds_left < 100
    arguments = ("ledger", "promise", file, "strict", "--epsilon", 0.01, "--delta", 1e-5)
    assert "No further round" in " ".join(run_cli(*arguments, "--dry-run").stdout.split())
    assert "--yes" in run_refused(*arguments)


def test_a_budget_of_zero_is_confirmed_before_the_first_run(run_refused, file):
    assert "--yes" in run_refused("ledger", "promise", file, "strict", "--epsilon", 0, "--delta", 1e-5)
    assert not file.exists()


@pytest.mark.parametrize("name", ["server", "", "a\nb"])
@pytest.mark.parametrize("dry_run", [["--dry-run"], []])
def test_a_name_that_no_group_can_have_is_refused(run_refused, file, name, dry_run):
    """It would wait for its group for ever, and no other new group could begin."""
    run_refused("ledger", "promise", file, name, "--epsilon", 1, "--delta", 1e-5, *dry_run)
    assert not file.exists()


def test_a_budget_without_end_is_not_confirmed(run_cli, charged, monkeypatch):
    monkeypatch.setattr("typer.confirm", lambda question: pytest.fail(question))
    assert run_cli("ledger", "promise", charged, "strict", "--epsilon", 2, "--delta", 1e-5).code == 0


def test_an_unknown_group_is_refused_unless_new(run_cli, run_refused, charged):
    arguments = ("ledger", "promise", charged, "strct", "--epsilon", 2, "--delta", 1e-5)
    assert "'strct'" in run_refused(*arguments)
    assert "'strct'" in run_refused(*arguments, "--dry-run")
    with Ledger(charged, read_only=True) as ledger:
        assert ledger.groups() == ("open", "strict")
    assert run_cli(*arguments, "--new").code == 0
    assert promise_of(charged, "strct") == Budget(2.0, 1e-5)


def test_mixed_sampling_has_a_note_and_no_epsilon(run_json, file, monkeypatch):
    fixed = msgspec.structs.replace(MECHANISM, sampling="fixed")
    with Ledger(file) as ledger:
        ledger.begin("first", MECHANISM)
        ledger.charge("first", privacy_costs(MECHANISM))
        ledger.begin("second", fixed)
        with raises_field("sampling", LedgerError):
            ledger.charge("second", privacy_costs(fixed))
        monkeypatch.setattr(Ledger, "_check_sampling", lambda *_: None)
        ledger.charge("second", privacy_costs(fixed))
    strict = run_json("ledger", "show", file)["groups"][1]
    assert (strict["epsilon"], strict["unprotected"]) == (None, False)
    assert strict["note"]


def test_names_are_printed_as_they_are(run_cli, file):
    assert "[red]:smile:" in run_cli("ledger", "promise", file, "[red]:smile:", "--epsilon", 1, "--delta", 0.1).stdout
    assert "[red]:smile:" in run_cli("ledger", "show", file).stdout


def test_invalid_arguments(run_refused, tmp_path):
    assert "nothing.ledger" in run_refused("ledger", "show", tmp_path / "nothing.ledger")
    err = run_refused("ledger", "promise", tmp_path / "a", "strict", "--epsilon", "nan", "--delta", "0.1")
    assert "epsilon" in err
    assert "nan" in err


def test_a_backup_is_restored_in_place_of_a_damaged_ledger(run_cli, run_refused, file, tmp_path):
    run_cli("ledger", "promise", file, "strict", "--epsilon", 2, "--delta", 1e-4)
    assert run_cli("ledger", "backup", file, tmp_path / "copy").code == 0
    run_refused("ledger", "restore", tmp_path / "copy", file)
    file.write_bytes(b"")
    run_refused("ledger", "show", file)
    assert "damaged-1" in run_cli("ledger", "restore", tmp_path / "copy", file).stdout
    assert "Restored from a backup" in run_cli("ledger", "show", file).stdout
    assert len(json.loads(run_cli("ledger", "show", file, "--json").stdout)["restored"]) == 1
    assert promise_of(file, "strict") == Budget(2.0, 1e-4)

"""The ledger where clients register: what a client chose first holds, in all runs, and groups may grow."""

from __future__ import annotations

import sqlite3

import pytest

from fedhdp.errors import LedgerError
from fedhdp.mechanism import Mechanism, PrivacyGroup
from fedhdp.privacy._ledger_db import VERSION
from fedhdp.privacy.accounting import privacy_costs
from fedhdp.privacy.ledger import Ledger


def mechanism(**clients: int) -> Mechanism:
    return Mechanism(tuple(PrivacyGroup(name, n, 1.0, 0.5) for name, n in clients.items()), clip=1.0)


@pytest.fixture
def ledger(tmp_path):
    with Ledger(tmp_path / "ledger") as ledger:
        yield ledger


def test_the_first_choice_holds_also_after_the_file_is_opened_again(tmp_path):
    with Ledger(tmp_path / "ledger") as ledger:
        assert ledger.register("anna", "strict") == "strict"
    with Ledger(tmp_path / "ledger") as ledger:
        assert ledger.register("anna", "open") == "strict"
        assert ledger.registrations() == {"anna": "strict"}
        assert ledger.groups() == ("strict",)


def test_a_group_grows_from_run_to_run_and_keeps_what_it_has_spent(ledger):
    ledger.register("anna", "strict")
    ledger.begin("one", mechanism(strict=1), members={"anna": "strict"})
    ledger.charge("one", privacy_costs(mechanism(strict=1)))
    ledger.register("ben", "strict")
    ledger.register("cleo", "open")
    both = {"anna": "strict", "ben": "strict", "cleo": "open"}
    ledger.begin("two", mechanism(strict=2, open=1), members=both)
    ledger.charge("two", privacy_costs(mechanism(strict=2, open=1)))
    assert [len(ledger.clients(name)) for name in ("strict", "open")] == [2, 1]
    assert [sum(spent[3] for spent in ledger.costs(name)) for name in ("strict", "open")] == [2, 1]


def test_a_run_cannot_have_a_client_in_a_group_that_it_did_not_choose(ledger):
    ledger.register("anna", "strict")
    ledger.register("ben", "open")
    with pytest.raises(LedgerError, match="client 'anna' is registered for 'strict', not for 'open'"):
        ledger.begin("run", mechanism(open=2), members={"anna": "open", "ben": "open"})
    with pytest.raises(LedgerError, match="client 'cleo' is registered for None, not for 'open'"):
        ledger.begin("run", mechanism(open=1), members={"cleo": "open"})


def test_a_mechanism_must_have_as_many_clients_as_it_has_members(ledger):
    ledger.register("anna", "strict")
    with pytest.raises(ValueError, match="clients of 'strict' must be its 1 members, got 2"):
        ledger.begin("run", mechanism(strict=2), members={"anna": "strict"})


def test_a_ledger_of_numbered_clients_takes_no_registrations_and_the_other_way_round(tmp_path, ledger):
    ledger.begin("simulated", mechanism(strict=3))
    with pytest.raises(LedgerError, match="its clients are numbered"):
        ledger.register("anna", "strict")
    with Ledger(tmp_path / "other") as other:
        other.register("anna", "strict")
        with pytest.raises(LedgerError, match="its clients are registered"):
            other.begin("simulated", mechanism(strict=1))


def test_a_budget_promised_before_anybody_registered_is_kept(ledger):
    ledger.promise("strict", 1e-9, 1e-5)
    ledger.register("anna", "strict")
    ledger.begin("run", mechanism(strict=1), members={"anna": "strict"})
    with pytest.raises(LedgerError, match="would exceed the budget of 'strict'"):
        ledger.charge("run", privacy_costs(mechanism(strict=1)))


def test_a_ledger_of_the_first_version_is_taken_on_with_all_that_was_charged(tmp_path):
    path = tmp_path / "ledger"
    with Ledger(path) as ledger:
        ledger.begin("run", mechanism(strict=3))
        ledger.charge("run", privacy_costs(mechanism(strict=3)))
        before = ledger.costs("strict")
    with sqlite3.connect(path) as db:  # as version 1 left it
        db.execute("DROP TABLE registrations")
        db.execute("DROP TABLE population")
        db.execute("PRAGMA user_version = 1")
    db.close()
    with Ledger(path, read_only=True) as ledger:
        assert ledger.costs("strict") == before
        assert ledger.registrations() == {}
    with Ledger(path) as ledger:
        assert ledger.costs("strict") == before
        ledger.charge("run", privacy_costs(mechanism(strict=3)))
        assert ledger._db.execute("PRAGMA user_version").fetchone() == (VERSION,)
        tables = {name for (name,) in ledger._db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    assert tables == {"groups", "runs", "charges", "registrations", "population"}

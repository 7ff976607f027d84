"""The ledger where clients register: a client stays in its first group in all runs, and groups grow."""

from __future__ import annotations

import msgspec
import pytest
from helpers import raises_field

from fedhdp.errors import LedgerError
from fedhdp.mechanism import Mechanism, PrivacyGroup
from fedhdp.privacy.costs import privacy_costs
from fedhdp.privacy.ledger import BudgetError, Ledger


def mechanism_of(**clients: int) -> Mechanism:
    return Mechanism(tuple(PrivacyGroup(name, n, 1.0, 0.5) for name, n in clients.items()), clip=1.0)


@pytest.fixture
def ledger(tmp_path):
    with Ledger(tmp_path / "ledger") as ledger:
        yield ledger


def test_the_first_registration_holds(tmp_path):
    with Ledger(tmp_path / "ledger") as ledger:
        assert ledger.register("anna", "strict") == "strict"
    with Ledger(tmp_path / "ledger") as ledger:
        assert ledger.register("anna", "open") == "strict"
        assert ledger.registrations() == {"anna": "strict"}
        assert ledger.groups() == ("strict",)


def test_a_group_grows_and_keeps_its_cost(ledger):
    ledger.register("anna", "strict")
    ledger.begin("one", mechanism_of(strict=1), members={"anna": "strict"})
    ledger.charge("one", privacy_costs(mechanism_of(strict=1)))
    ledger.register("ben", "strict")
    ledger.register("cleo", "open")
    members = {"anna": "strict", "ben": "strict", "cleo": "open"}
    ledger.begin("two", mechanism_of(strict=2, open=1), members=members)
    ledger.charge("two", privacy_costs(mechanism_of(strict=2, open=1)))
    assert [ledger.clients(name) for name in ("strict", "open")] == [2, 1]
    assert [sum(cost.rounds for cost in ledger.costs(name)) for name in ("strict", "open")] == [2, 1]


def test_a_member_of_another_group_is_refused(ledger):
    ledger.register("anna", "strict")
    ledger.register("ben", "open")
    with raises_field("members", LedgerError) as error:
        ledger.begin("run", mechanism_of(open=2), members={"anna": "open", "ben": "open"})
    assert error.value.value == "anna"
    with raises_field("members", LedgerError) as error:
        ledger.begin("run", mechanism_of(open=1), members={"cleo": "open"})
    assert error.value.value == "cleo"


def test_the_mechanism_has_as_many_clients_as_members(ledger):
    ledger.register("anna", "strict")
    with raises_field("clients of 'strict'"):
        ledger.begin("run", mechanism_of(strict=2), members={"anna": "strict"})


def test_a_member_without_a_group_in_the_mechanism_is_refused(ledger):
    members = {"anna": ledger.register("anna", "strict"), "ben": ledger.register("ben", "open")}
    with raises_field("members", LedgerError) as error:  # anna would take part and never be charged
        ledger.begin("run", mechanism_of(open=1), members=members)
    assert error.value.value == "anna"


def test_a_level_never_loses_its_noise(ledger):
    ledger.register("anna", "strict")
    ledger.begin("one", mechanism_of(strict=1), members={"anna": "strict"})
    (strict,) = mechanism_of(strict=1).groups
    silent = Mechanism((msgspec.structs.replace(strict, noise_multiplier=0.0),), clip=1.0)
    with raises_field("noise_multiplier"):
        ledger.begin("two", silent, members={"anna": "strict"})


def test_numbered_and_registered_clients_do_not_mix(tmp_path, ledger):
    ledger.begin("simulated", mechanism_of(strict=3))
    with raises_field("members", LedgerError):
        ledger.register("anna", "strict")
    with Ledger(tmp_path / "other") as other:
        other.register("anna", "strict")
        with raises_field("members", LedgerError):
            other.begin("simulated", mechanism_of(strict=1))


def test_a_budget_promised_before_registration_holds(ledger):
    ledger.promise("strict", 1e-9, 1e-5)
    ledger.register("anna", "strict")
    ledger.begin("run", mechanism_of(strict=1), members={"anna": "strict"})
    with pytest.raises(BudgetError) as error:
        ledger.charge("run", privacy_costs(mechanism_of(strict=1)))
    assert error.value.groups == ("strict",)

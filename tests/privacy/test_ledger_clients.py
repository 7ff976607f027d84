"""The ledger knows clients by id: a client stays in its group in all runs of a file."""

from __future__ import annotations

import random
import time

import pytest
from helpers import raises_field
from hypothesis import given, settings
from hypothesis import strategies as st

from fedhdp.errors import LedgerError
from fedhdp.mechanism import Mechanism, PrivacyGroup
from fedhdp.privacy.costs import privacy_costs
from fedhdp.privacy.ledger import Ledger

IDS = ["ann", "bob", "cy", "dee", "eve"]


def mechanism_of(**clients: int) -> Mechanism:
    """Groups with noise and so many clients each."""
    return Mechanism(tuple(PrivacyGroup(name, count, 1.0, 0.1) for name, count in clients.items()), clip=1.0)


def members_of(groups: str) -> dict[str, str]:
    """The five clients' groups, by the groups' initials."""
    return dict(zip(IDS, ({"o": "open", "s": "strict"}[initial] for initial in groups), strict=True))


@pytest.fixture
def ledger(tmp_path):
    with Ledger(tmp_path / "ledger") as ledger:
        yield ledger


def test_clients_are_admitted_with_their_groups(ledger):
    ledger.begin("one", mechanism_of(open=2, strict=3), members=members_of("ososs"), admit_new=True)
    assert ledger.registrations() == members_of("ososs")
    assert (ledger.groups(), ledger.clients("open"), ledger.clients("strict")) == (("open", "strict"), 2, 3)


@settings(deadline=None)
@given(st.permutations(range(5)))
def test_order_of_the_clients_does_not_matter(tmp_path_factory, order):
    members = members_of("ososs")
    permuted = {IDS[k]: members[IDS[k]] for k in order}
    with Ledger(tmp_path_factory.mktemp("ledgers") / "ledger") as ledger:
        ledger.begin("one", mechanism_of(open=2, strict=3), members=members, admit_new=True)
        ledger.begin("two", mechanism_of(strict=3, open=2), members=permuted, admit_new=True)
        assert ledger.registrations() == members


@pytest.mark.parametrize(("groups", "client"), [("ssooo", "ann"), ("osoos", "dee")])
def test_a_client_cannot_be_in_another_group_later(ledger, groups, client):
    """A client who leaves its group would leave its spent budget behind."""
    first = mechanism_of(open=2, strict=3)
    ledger.begin("one", first, members=members_of("ososs"), admit_new=True)
    ledger.charge("one", privacy_costs(first))
    other = mechanism_of(open=groups.count("o"), strict=groups.count("s"))
    with raises_field("members", LedgerError) as error:
        ledger.begin("two", other, members=members_of(groups), admit_new=True)
    assert error.value.value == client
    assert [run.name for run in ledger.runs()] == ["one"]
    assert ledger.registrations() == members_of("ososs")


def test_clients_who_join_inherit_the_cost_and_those_absent_keep_theirs(ledger):
    first = mechanism_of(open=1, strict=1)
    ledger.begin("one", first, members={"ann": "open", "bob": "strict"}, admit_new=True)
    ledger.charge("one", privacy_costs(first))
    ledger.begin("two", mechanism_of(strict=2), members={"bob": "strict", "cy": "strict"}, admit_new=True)
    assert (ledger.clients("open"), ledger.clients("strict")) == (1, 2)
    assert sum(cost.rounds for cost in ledger.costs("strict")) == 1


def test_members_are_as_many_as_the_mechanism_says(ledger):
    with raises_field("clients of 'open'"):
        ledger.begin("one", mechanism_of(open=1, strict=3), members=members_of("ososs"), admit_new=True)
    with raises_field("members", LedgerError):
        ledger.begin("one", mechanism_of(open=2), members=members_of("ososs"), admit_new=True)
    assert ledger.registrations() == {}


def test_numbers_are_ids_in_their_population_alone(tmp_path, ledger):
    numbers = {"0": "open", "1": "strict"}
    ledger.begin("one", mechanism_of(open=1, strict=1), members=numbers, population="letters", admit_new=True)
    ledger.begin("two", mechanism_of(open=1, strict=1), members=numbers, population="letters", admit_new=True)
    with raises_field("population", LedgerError):
        ledger.begin("three", mechanism_of(open=1, strict=1), members=numbers, population="digits", admit_new=True)
    with raises_field("members", LedgerError):  # "0" as an id of its own may be someone else
        ledger.begin("three", mechanism_of(open=1, strict=1), members=numbers, admit_new=True)
    with Ledger(tmp_path / "by id") as by_id:
        by_id.begin("one", mechanism_of(open=2, strict=3), members=members_of("ososs"), admit_new=True)
        with raises_field("members", LedgerError):
            by_id.begin("two", mechanism_of(open=1, strict=1), members=numbers, population="letters", admit_new=True)
        assert by_id.register("fay", "strict") == "strict"


def test_a_level_with_noise_never_becomes_one_without(ledger):
    """Its clients chose it as it was, and an epsilon without noise is infinite for good."""
    ledger.begin("one", mechanism_of(open=2, strict=3), members=members_of("ososs"), admit_new=True)
    silent = Mechanism((PrivacyGroup("open", 2, 1.0, 0.1), PrivacyGroup("strict", 3, 0.0, 0.1)), clip=1.0)
    with raises_field("noise_multiplier"):
        ledger.begin("two", silent, members=members_of("ososs"), admit_new=True)
    assert [run.name for run in ledger.runs()] == ["one"]


@pytest.mark.slow
def test_a_million_clients(ledger):
    names = ["open"] * 50_000 + ["strict"] * 950_000
    random.Random(0).shuffle(names)
    members = {str(number): name for number, name in enumerate(names)}
    mechanism = mechanism_of(open=50_000, strict=950_000)
    start = time.process_time()
    ledger.begin("one", mechanism, members=members, population="a million", admit_new=True)
    ledger.charge("one", privacy_costs(mechanism))
    ledger.begin("two", mechanism, members=members, population="a million", admit_new=True)
    assert ledger.clients("strict") == 950_000
    assert ledger.groups() == ("open", "strict")
    assert time.process_time() - start < 60

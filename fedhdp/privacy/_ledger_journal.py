"""The journal of a ledger: what was ever written to its tables, each row chained to the one before it by a checksum.

Tables say how things stand and are what is read and charged; the journal says how they came to stand so. Damage to either,
and rows that another program changes or deletes, leave the two unlike. What nothing inside a file can show is that the
whole file is an older copy.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import sqlite3
from collections.abc import Iterable
from typing import Any, NamedTuple

TABLE = "CREATE TABLE journal (number INTEGER PRIMARY KEY, entry TEXT NOT NULL, checksum TEXT NOT NULL)"


class Contents(NamedTuple):
    """What the tables of a ledger say, in an order of their own."""

    groups: dict[str, tuple[float | None, float | None]]
    clients: dict[str, str]
    runs: dict[str, tuple[str, str, int]]
    charges: dict[tuple[Any, ...], tuple[int, str]]
    population: list[str]


def append(db: sqlite3.Connection, kind: str, *values: Any) -> None:
    """Add an entry, in the transaction that changes the tables.

    Args:
        db: The file.
        kind: ``ledger``, the first of all; ``budget`` (group, epsilon, delta); ``clients`` (groups by client);
            ``population`` (description); ``run`` (name, start, mechanism); ``charge`` (run, rounds, time, rows); or
            ``restored`` (time): a backup was put in place.
        values: What was written.
    """
    number, previous = db.execute("SELECT number, checksum FROM journal ORDER BY number DESC LIMIT 1").fetchone()
    _insert(db, number + 1, previous, [kind, *values])


def start(db: sqlite3.Connection) -> None:
    """Add the first entry."""
    _insert(db, 1, "", ["ledger", secrets.token_hex(8)])


def restorations(db: sqlite3.Connection) -> list[str]:
    """The times at which a backup was put in place."""
    entries = (json.loads(entry) for (entry,) in db.execute("SELECT entry FROM journal ORDER BY number"))
    return [values[0] for kind, *values in entries if kind == "restored"]


def identity(db: sqlite3.Connection) -> str | None:
    """The first entry, which a ledger shares with its copies alone; None where it is damaged."""
    entry, checksum = db.execute("SELECT entry, checksum FROM journal WHERE number = 1").fetchone()
    return str(entry) if checksum == _checksum("", entry) else None


def _insert(db: sqlite3.Connection, number: int, previous: str, values: list[Any]) -> None:
    entry = json.dumps(values)
    db.execute("INSERT INTO journal VALUES (?, ?, ?)", (number, entry, _checksum(previous, entry)))


def _checksum(previous: str, entry: str) -> str:
    return hashlib.sha256(f"{previous}\n{entry}".encode()).hexdigest()


def check(db: sqlite3.Connection) -> str | None:
    """What is wrong with an open ledger, or None: its pages, its tables' definitions, its journal, and its tables."""
    problem = db.execute("PRAGMA integrity_check(1)").fetchone()[0]
    if problem != "ok":
        return str(problem).replace("\n", " ")
    rows = db.execute("SELECT number, entry, checksum FROM journal ORDER BY number").fetchall()
    previous = ""
    for expected, (number, entry, checksum) in enumerate(rows, start=1):
        if number != expected or checksum != _checksum(previous, entry):
            return f"entry {expected} of its journal is missing or was changed"
        previous = checksum
    if not rows:
        return "its journal is empty"
    journal, tables = _replay(json.loads(entry) for _, entry, _ in rows), _read(db)
    for name, entries, stored in zip(Contents._fields, journal, tables, strict=True):
        if entries != stored:
            return f"the table {name} is not what the journal says was written"
    return None


def _replay(entries: Iterable[list[Any]]) -> Contents:
    """What the tables must say after all entries."""
    contents = Contents({}, {}, {}, {}, [])
    for kind, *values in entries:
        if kind == "budget":
            contents.groups[values[0]] = tuple(values[1:])
        elif kind == "clients":
            contents.clients.update(values[0])
            for group in values[0].values():
                contents.groups.setdefault(group, (None, None))
        elif kind == "population":
            contents.population.append(values[0])
        elif kind == "run":
            contents.runs[values[0]] = (values[1], values[2], 0)
        elif kind == "charge":
            run, charged, latest, rows = values
            started, mechanism, before = contents.runs[run]
            contents.runs[run] = (started, mechanism, before + charged)
            for group, noise_multiplier, sampling_rate, sampling, rounds in rows:
                key = (run, group, noise_multiplier, sampling_rate, sampling)
                contents.charges[key] = (contents.charges.get(key, (0, ""))[0] + rounds, latest)
    return contents


def _read(db: sqlite3.Connection) -> Contents:
    """What the tables say."""
    query = 'SELECT id, name FROM clients LEFT JOIN groups ON number = "group" ORDER BY clients.rowid'
    charges = 'SELECT run, "group", noise_multiplier, sampling_rate, sampling, rounds, latest FROM charges'
    return Contents(
        {name: (epsilon, delta) for name, epsilon, delta in db.execute("SELECT name, epsilon, delta FROM groups")},
        dict(db.execute(query)),
        {name: tuple(row) for name, *row in db.execute("SELECT name, started, mechanism, charged FROM runs")},
        {tuple(row[:5]): (row[5], row[6]) for row in db.execute(charges)},
        [description for (description,) in db.execute("SELECT description FROM population ORDER BY rowid")],
    )

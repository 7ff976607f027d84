"""A ledger's SQLite file: its tables, its versions, transactions that are durable or never were, and errors in words.

What is written in it, and when, is the ledger's business (`ledger`).
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from fedhdp.errors import LedgerError

APPLICATION = 0x66686470  # "fhdp"
VERSION = 3  # 2: registrations; 3: the population
SCHEMA = """
CREATE TABLE groups (
  name TEXT PRIMARY KEY, first INTEGER NOT NULL, clients INTEGER NOT NULL, epsilon REAL, delta REAL);
CREATE TABLE runs (
  name TEXT PRIMARY KEY, started TEXT NOT NULL, mechanism TEXT NOT NULL, charged INTEGER NOT NULL DEFAULT 0);
CREATE TABLE charges (
  run TEXT NOT NULL REFERENCES runs, "group" TEXT NOT NULL REFERENCES groups, noise_multiplier REAL NOT NULL,
  sampling_rate REAL NOT NULL, sampling TEXT NOT NULL, rounds INTEGER NOT NULL, latest TEXT NOT NULL,
  PRIMARY KEY (run, "group", noise_multiplier, sampling_rate, sampling));
CREATE INDEX charges_of_group ON charges ("group");
"""
ADDED = {  # by version, to older files too
    2: 'CREATE TABLE registrations (client TEXT PRIMARY KEY, "group" TEXT NOT NULL REFERENCES groups, at TEXT NOT NULL)',
    3: "CREATE TABLE population (told TEXT NOT NULL)",
}


class LedgerFile:
    """An open file; a context manager. Made where there is none, unless it is to be read only."""

    def __init__(self, path: str | Path, *, read_only: bool = False, patience: float = 60.0) -> None:
        self.path = Path(path)
        mode = "ro" if read_only else "rwc"
        with self._in_words():
            uri = f"{self.path.absolute().as_uri()}?mode={mode}"
            self._db = sqlite3.connect(uri, uri=True, timeout=patience, isolation_level=None)
        try:
            with self._in_words():
                self._db.execute("PRAGMA foreign_keys = ON")
                # EXTRA: a power cut just after a commit does not bring the journal back, and with it the budget.
                self._db.execute("PRAGMA synchronous = EXTRA")
                new = self._recognise() == 0
            if read_only and new:
                raise LedgerError(f"{self.path}: not a ledger, but an empty file")
            if not read_only:
                with self._transaction():
                    self._prepare()
        except BaseException:
            self._db.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def _recognise(self) -> int:
        """The version of the file, 0 where it is empty; a file that is no ledger, or a newer one, is refused."""
        application, version, things = (
            self._db.execute(question).fetchone()[0]
            for question in ("PRAGMA application_id", "PRAGMA user_version", "SELECT COUNT(*) FROM sqlite_master")
        )
        if (application, version, things) != (0, 0, 0) and application != APPLICATION:
            raise LedgerError(f"{self.path}: not a ledger, but another program's database")
        if version > VERSION:
            raise LedgerError(f"{self.path}: a ledger of version {version}; this fedhdp knows up to version {VERSION}")
        return version

    def _prepare(self) -> None:
        """Make the tables that are missing; inside the transaction, since another process may have made them by now."""
        version = self._recognise()
        if version < VERSION:
            added = [statement for since, statement in ADDED.items() if since > version]
            for statement in (*(SCHEMA.split(";") if version == 0 else ()), *added):
                self._db.execute(statement)
            self._db.execute(f"PRAGMA user_version = {VERSION}")
            self._db.execute(f"PRAGMA application_id = {APPLICATION}")
        self._db.execute("DELETE FROM runs WHERE FALSE")  # a file that cannot be written says so now, not at a round

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        """All or nothing, alone with the file from the first read on."""
        with self._in_words():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

    @contextlib.contextmanager
    def _in_words(self) -> Iterator[None]:
        """SQLite's errors as one line about this file."""
        try:
            yield
        except sqlite3.Error as error:
            words = {
                "SQLITE_FULL": "no room left to charge a round: the disk is full",
                "SQLITE_BUSY": "another run has held the ledger for too long",
                "SQLITE_NOTADB": "not a ledger",
                "SQLITE_CANTOPEN": "cannot be opened",
                "SQLITE_READONLY": "cannot be written, so no round can be charged",
            }
            name = "_".join(getattr(error, "sqlite_errorname", "").split("_")[:2])
            raise LedgerError(f"{self.path}: {words.get(name, 'damaged or unreadable')} ({error})") from error

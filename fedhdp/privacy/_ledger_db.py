"""The SQLite file of a ledger: its schema, durable transactions, and SQLite's errors as ``LedgerError``.

What is written, and when, is decided in ``ledger.py``.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from fedhdp.errors import LedgerError

APPLICATION = 0x66686470  # "fhdp"
VERSION = 4
SCHEMA = """
CREATE TABLE groups (number INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, epsilon REAL, delta REAL);
CREATE TABLE clients (id TEXT PRIMARY KEY, "group" INTEGER NOT NULL REFERENCES groups);
CREATE INDEX clients_of_group ON clients ("group");
CREATE TABLE runs (
  name TEXT PRIMARY KEY, started TEXT NOT NULL, mechanism TEXT NOT NULL, charged INTEGER NOT NULL DEFAULT 0);
CREATE TABLE charges (
  run TEXT NOT NULL REFERENCES runs, "group" TEXT NOT NULL REFERENCES groups (name), noise_multiplier REAL NOT NULL,
  sampling_rate REAL NOT NULL, sampling TEXT NOT NULL, rounds INTEGER NOT NULL, latest TEXT NOT NULL,
  PRIMARY KEY (run, "group", noise_multiplier, sampling_rate, sampling));
CREATE INDEX charges_of_group ON charges ("group");
CREATE TABLE population (description TEXT NOT NULL)
"""  # population: a row where the clients' ids are numbers
ERRORS = {  # by the first two words of SQLite's name
    "SQLITE_FULL": "the disk is full, so no round can be charged",
    "SQLITE_BUSY": "another process has locked the ledger for too long",
    "SQLITE_NOTADB": "not a ledger",
    "SQLITE_CANTOPEN": "cannot be opened",
    "SQLITE_READONLY": "cannot be written, so no round can be charged",
}


class LedgerFile:
    """An open file, also a context manager that closes it; see ``Ledger`` for the arguments."""

    def __init__(self, path: str | Path, *, read_only: bool = False, timeout: float = 60.0) -> None:
        self.path = Path(path)
        if read_only and not self.path.exists():
            raise self._error("there is no such file", "path", self.path)
        mode = "ro" if read_only else "rwc"
        with self._translate_errors():
            uri = f"{self.path.absolute().as_uri()}?mode={mode}"
            self._db = sqlite3.connect(uri, uri=True, timeout=timeout, isolation_level=None)
        try:
            with self._translate_errors():
                self._db.execute("PRAGMA foreign_keys = ON")
                # EXTRA: after a power cut, no journal that survived may roll a commit back and restore spent budget.
                self._db.execute("PRAGMA synchronous = EXTRA")
                is_empty = self._version() == 0
            if read_only and is_empty:
                raise self._error("not a ledger, but an empty file", "path", self.path)
            if not read_only:
                with self._transaction():
                    self._create()
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

    def _version(self) -> int:
        """The version of the file, 0 where it is empty; a file that is no ledger, or one of another version, is refused."""
        application, version, objects = (
            self._db.execute(query).fetchone()[0]
            for query in ("PRAGMA application_id", "PRAGMA user_version", "SELECT COUNT(*) FROM sqlite_master")
        )
        if (application, version, objects) != (0, 0, 0) and application != APPLICATION:
            raise self._error("not a ledger, but another program's database", "path", self.path)
        if version not in (0, VERSION):
            message = f"a ledger of version {version}, while this fedhdp reads version {VERSION} alone"
            raise self._error(message, "version", version)
        return int(version)

    def _create(self) -> None:
        """Create the tables of an empty file; in a transaction, since another process may be doing the same."""
        if self._version() == 0:
            for statement in SCHEMA.split(";"):
                self._db.execute(statement)
            self._db.execute(f"PRAGMA user_version = {VERSION}")
            self._db.execute(f"PRAGMA application_id = {APPLICATION}")
        self._db.execute("DELETE FROM runs WHERE FALSE")  # a file that cannot be written fails here, not at a round

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        """All statements or none, with the file locked from the first read on."""
        with self._translate_errors():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

    @contextlib.contextmanager
    def _translate_errors(self) -> Iterator[None]:
        """SQLite's errors as a LedgerError of one line that names the file."""
        try:
            yield
        except sqlite3.Error as error:
            name = "_".join(getattr(error, "sqlite_errorname", "").split("_")[:2])
            raise self._error(f"{ERRORS.get(name, 'damaged or unreadable')} ({error})", "path", self.path) from error

    def _error(self, message: str, field: str, value: object = None) -> LedgerError:
        return LedgerError(f"{self.path}: {message}", field, value)

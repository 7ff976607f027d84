"""The SQLite file of a ledger: its schema, durable transactions, and SQLite's errors as ``LedgerError``.

What is written, and when, is decided in ``ledger.py``.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import secrets
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

from fedhdp.errors import LedgerError, require
from fedhdp.privacy import _ledger_journal as journal

APPLICATION = 0x66686470  # "fhdp"
VERSION = 5
SCHEMA = f"""
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
CREATE TABLE population (description TEXT NOT NULL);
{journal.TABLE}
"""  # population: a row where the clients' ids are numbers
ERRORS = {  # by the first two words of SQLite's name
    "SQLITE_FULL": "the disk is full, so no round can be charged",
    "SQLITE_BUSY": "another process has locked the ledger for too long",
    "SQLITE_IOERR": "cannot be read or written",
    "SQLITE_CANTOPEN": "cannot be opened",
    "SQLITE_READONLY": "cannot be written, so no round can be charged",
}
MAX_VERSION = 1000  # above it a version is damage
DAMAGE = ("SQLITE_CORRUPT", "SQLITE_NOTADB", "SQLITE_ERROR", "")  # "": text that is not UTF-8


class DamagedLedgerError(LedgerError):
    """A ledger that is not as it was written; `fedhdp ledger restore` puts a backup in its place."""


class OtherFileError(LedgerError):
    """A file whose header is another program's, or of another version of ledgers."""


class LedgerFile:
    """An open file, also a context manager that closes it; see ``Ledger`` for the arguments."""

    def __init__(self, path: str | Path, *, read_only: bool = False, timeout: float = 60.0) -> None:
        require("\0" not in str(path), "path", str(path), "without a NUL")
        self.path = Path(path)
        if not self.path.exists():
            if read_only:
                raise self._error("there is no such file", "path", self.path)
            self._create_file()
        if self.path.is_file() and self.path.stat().st_size == 0:
            raise self._damaged("the file is empty")
        self._db = self._connect(self.path, timeout)
        try:
            with self._translate_errors():
                self._db.execute("PRAGMA foreign_keys = ON")
                # EXTRA: after a power cut, no journal that survived may roll a commit back and restore spent budget.
                self._db.execute("PRAGMA synchronous = EXTRA")
                self._check_version()
            self._check_contents()
            if read_only:
                self._db.execute("PRAGMA query_only = ON")
            else:
                with self._transaction():
                    self._db.execute("DELETE FROM runs WHERE FALSE")  # a file that cannot be written fails here
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

    def copy_to(self, other: sqlite3.Connection) -> None:
        """Copy the file, as it is at one moment, into another database."""
        with self._translate_errors():
            self._db.backup(other)

    def mark_restored(self) -> None:
        """Record that this file was put in place of another one, which may have had charges that this one does not have."""
        with self._transaction():
            self._record("restored", datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"))

    def restorations(self) -> list[str]:
        """When a backup was put in place of the ledger, which may have lost charges; the oldest first."""
        with self._translate_errors():
            return journal.restorations(self._db)

    def _connect(self, path: Path, timeout: float, mode: str = "rw") -> sqlite3.Connection:
        """Also to read: what a killed process left in the middle of a transaction is rolled back first."""
        with self._translate_errors():
            uri = f"{path.absolute().as_uri()}?mode={mode}"
            return sqlite3.connect(uri, uri=True, timeout=timeout, isolation_level=None)

    def _create_file(self) -> None:
        """Create the file, complete, unless another process does: there never is an empty one."""
        if Path(f"{self.path}-journal").exists():
            raise self._error("the file is gone, but its SQLite journal is there; restore a backup", "path", self.path)
        draft = self.path.with_name(f".{self.path.name}.{secrets.token_hex(4)}")
        try:
            with contextlib.closing(self._connect(draft, 1.0, mode="rwc")) as self._db, self._transaction():
                for statement in SCHEMA.split(";"):
                    self._db.execute(statement)
                self._db.execute(f"PRAGMA user_version = {VERSION}")
                self._db.execute(f"PRAGMA application_id = {APPLICATION}")
                journal.start(self._db)
            with contextlib.suppress(FileExistsError):
                place(draft, self.path)
        except OSError as error:
            raise self._error(f"cannot be created ({error.strerror})", "path", self.path) from error
        finally:
            draft.unlink(missing_ok=True)

    def _check_version(self) -> None:
        """Refuse a file that is no ledger, or one of another version."""
        application, version = (
            self._db.execute(query).fetchone()[0] for query in ("PRAGMA application_id", "PRAGMA user_version")
        )
        if application != APPLICATION:
            message = f"{self.path}: not a ledger, but another program's database"
            raise OtherFileError(message, "path", self.path)
        if version != VERSION:
            message = f"{self.path}: a ledger of version {version}, while this fedhdp reads version {VERSION} alone"
            # A later version's ledger may have more charges than a backup, which must not take its place.
            error = LedgerError if VERSION < version < MAX_VERSION else OtherFileError
            raise error(message, "version", version)

    def _check_contents(self) -> None:
        """Refuse a file that is damaged, or that another program has changed."""
        with self._translate_errors():
            self._db.execute("BEGIN")
            try:
                statements = {sql for (sql,) in self._db.execute("SELECT sql FROM sqlite_master WHERE sql NOT NULL")}
                expected = {statement.strip() for statement in SCHEMA.split(";")}
                problem = "its tables are not a ledger's" if statements != expected else journal.check(self._db)
            except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
                problem = str(error)
            finally:
                self._db.execute("ROLLBACK")
        if problem is not None:
            raise self._damaged(problem)

    def _record(self, kind: str, *values: Any) -> None:
        """Enter what a transaction writes into the journal."""
        journal.append(self._db, kind, *values)

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
        except UnicodeDecodeError as error:  # SQLite's message has damaged text of the file in it
            raise self._damaged(str(error)) from error
        except sqlite3.Error as error:
            name = "_".join(getattr(error, "sqlite_errorname", "").split("_")[:2])
            is_misuse = isinstance(error, sqlite3.ProgrammingError)  # of a closed file, say
            if name in DAMAGE and not is_misuse:
                raise self._damaged(str(error)) from error
            raise self._error(f"{ERRORS.get(name, 'cannot be used')} ({error})", "path", self.path) from error

    def _damaged(self, problem: str) -> DamagedLedgerError:
        what = f"{self.path}: damaged, or no ledger: {' '.join(problem.split())[:200]}"
        return DamagedLedgerError(f"{what}; `fedhdp ledger restore` puts a backup in its place", "path", self.path)

    def _error(self, message: str, field: str, value: object = None) -> LedgerError:
        return LedgerError(f"{self.path}: {message}", field, value)


def place(draft: Path, path: Path) -> None:
    """Give a complete file its name, durably; ``FileExistsError`` if there is a file of this name."""
    try:
        os.link(draft, path)
    except FileExistsError:
        raise
    except OSError:  # a file system without links
        if path.exists():
            raise FileExistsError(path) from None
        draft.rename(path)
    if os.name == "posix":
        folder = os.open(path.absolute().parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

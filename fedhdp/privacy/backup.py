"""Copies of a ledger: made while it is in use, and put in place of a damaged or missing one."""

from __future__ import annotations

import contextlib
import os
import secrets
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from fedhdp.errors import LedgerError
from fedhdp.privacy import _ledger_journal as journal
from fedhdp.privacy._ledger_db import DamagedLedgerError, OtherFileError, place
from fedhdp.privacy.ledger import Ledger


def backup(path: str | Path, copy: str | Path) -> None:
    """Copy a ledger, also while runs charge it.

    Args:
        path: The ledger.
        copy: The copy, which must not exist.

    Raises:
        LedgerError: If the ledger cannot be read, or the copy cannot be made.
    """
    copy = Path(copy)
    if copy.exists():
        raise LedgerError(f"{copy}: there is a file already", "copy", copy)
    with _draft(path, copy) as draft:
        place(draft, copy)


def restore(copy: str | Path, path: str | Path) -> Path | None:
    """Put a copy in place of a ledger that is missing or damaged; the damaged file is kept under another name.

    The ledger says from then on that it was restored, since charges may be missing (`Ledger.restorations`).

    Args:
        copy: A backup, which is checked first.
        path: The ledger.

    Returns:
        The name that the damaged file has now, or None if there was none.

    Raises:
        LedgerError: If the copy is damaged or another ledger's, or the ledger is not damaged: what was charged since the
            backup would be lost.
    """
    path = Path(path)
    with _draft(copy, path) as draft:
        if _identity(path) not in (None, _identity(draft)):
            raise LedgerError(f"{copy}: a copy of another ledger than {path}", "copy", copy)
        damaged = _name_of_damaged(path, _identity(path) is not None) if path.exists() else None
        with Ledger(draft) as ledger:
            ledger.mark_restored()
        if damaged is not None:
            path.rename(damaged)
        if (pending := Path(f"{path}-journal")).exists():  # of the damaged file; SQLite would apply it to the copy
            pending.rename(f"{damaged or path}-journal.old")
        place(draft, path)
    return damaged


def _name_of_damaged(path: Path, is_of_copy: bool) -> Path:
    """A free name for the damaged ledger; ``is_of_copy``: whether its journal begins as the backup's."""
    try:
        Ledger(path, read_only=True).close()
    except DamagedLedgerError:
        pass
    except OtherFileError:  # a damaged header, if the contents are those of the backup
        if not is_of_copy:
            raise
    else:
        raise LedgerError(f"{path}: not damaged, so no backup is put in its place", "path", path)
    return next(name for n in range(1, 10**6) if not (name := Path(f"{path}.damaged-{n}")).exists())


def _identity(path: Path) -> str | None:
    """What a ledger shares with its copies alone; None where the file is missing, or too damaged to tell."""
    try:
        with contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as db:
            return journal.identity(db)
    except (sqlite3.Error, TypeError, UnicodeDecodeError):
        return None


@contextlib.contextmanager
def _draft(source: str | Path, target: Path) -> Iterator[Path]:
    """A checked copy of a ledger beside a file that it will become."""
    draft = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        with Ledger(source, read_only=True) as ledger, contextlib.closing(sqlite3.connect(draft)) as copy:
            ledger.copy_to(copy)
        with open(draft, "rb+") as file:
            os.fsync(file.fileno())
        Ledger(draft, read_only=True).close()
        yield draft
    except (OSError, sqlite3.Error) as error:
        raise LedgerError(f"{target}: cannot be written ({error})", "path", target) from error
    finally:
        draft.unlink(missing_ok=True)

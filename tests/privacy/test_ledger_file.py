"""The ledger's file against crashes, concurrent processes, full disks and files that are no ledgers."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
import sqlite3
import tempfile
from pathlib import Path

import pytest
from helpers import raises_field
from ledger_helpers import MECHANISM, ROUND, charge_until_exhausted, rounds_of, start_process

from fedhdp.errors import LedgerError
from fedhdp.privacy._ledger_db import VERSION, DamagedLedgerError
from fedhdp.privacy.accounting import rounds_left
from fedhdp.privacy.backup import backup, restore
from fedhdp.privacy.ledger import Budget, Ledger
from fedhdp.privacy.reports import restored_note


@pytest.fixture
def path(tmp_path):
    return tmp_path / "population.ledger"


@pytest.fixture
def ledger(path):
    with Ledger(path) as ledger:
        ledger.begin("run", MECHANISM)
        yield ledger


@pytest.mark.process
def test_concurrent_processes_exceed_no_budget(path):
    budget = Budget(1.0, 1e-5)
    allowed = rounds_left((), ROUND["strict"], budget)
    assert allowed > 30
    with Ledger(path) as ledger:
        ledger.begin("before", MECHANISM)
        ledger.lower_budget("strict", budget)
        ledger.charge("before", ROUND | {"strict": ROUND["strict"]._replace(rounds=allowed - 30)})
    spawn = multiprocessing.get_context("spawn")
    start, results = spawn.Barrier(3), spawn.Queue()
    processes = [
        spawn.Process(target=charge_until_exhausted, args=(path, f"run {i}", start, results)) for i in range(3)
    ]
    for process in processes:
        process.start()
    charged = dict(results.get(timeout=60) for _ in processes)
    for process in processes:
        process.join()
    with Ledger(path) as ledger:
        assert sum(charged.values()) == 30
        assert rounds_of(ledger, "strict") == allowed
        assert {run.name: run.charged for run in ledger.runs()} == charged | {"before": allowed - 30}


@pytest.mark.process
def test_concurrent_processes_create_one_file(path):
    statements = (
        "with Ledger(sys.argv[1]) as ledger:\n"
        "    ledger.begin(sys.argv[2], MECHANISM); ledger.charge(sys.argv[2], ROUND)"
    )
    processes = [start_process(statements, path, f"run {i}") for i in range(3)]
    assert [process.communicate(timeout=60)[0] for process in processes] == [b""] * 3
    assert [process.returncode for process in processes] == [0, 0, 0]
    with Ledger(path) as ledger:
        assert rounds_of(ledger, "lax") == 3


@pytest.mark.process
def test_a_kill_after_the_charge_leaves_it(path):
    process = start_process(
        "ledger = Ledger(sys.argv[1]); ledger.begin('run', MECHANISM)\n"
        "ledger.charge('run', ROUND); ledger.charge('run', ROUND)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
        "print('result')",
        path,
    )
    assert process.communicate(timeout=60)[0] == b""
    assert process.returncode == -signal.SIGKILL
    with Ledger(path) as ledger:
        assert rounds_of(ledger, "lax") == 2


@pytest.mark.process
def test_a_kill_during_the_charge_leaves_no_charge_and_no_lock(path):
    process = start_process(
        "fedhdp.privacy.ledger.within_budget = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "ledger = Ledger(sys.argv[1])\n"
        "ledger.begin('run', MECHANISM); ledger.promise('lax', 10.0, 1e-5); ledger.charge('run', ROUND)",
        path,
    )
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    with Ledger(path, timeout=0.5) as ledger:
        assert rounds_of(ledger, "lax") == 0
        ledger.charge("run", ROUND)
        assert rounds_of(ledger, "lax") == 1


def test_a_locked_file_times_out(path, ledger):
    with (
        contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other,
        Ledger(path, timeout=0.05) as waiting,
    ):
        other.execute("BEGIN IMMEDIATE")
        with raises_field("path", LedgerError):
            waiting.charge("run", ROUND)


def test_a_full_disk_charges_nothing(path, ledger):
    ledger.charge("run", ROUND)
    pages = ledger._db.execute("PRAGMA page_count").fetchone()[0]
    ledger._db.execute(f"PRAGMA max_page_count = {pages}")  # SQLite's own way to run out of room
    charged = 0
    with raises_field("path", LedgerError):
        for number in range(10_000):
            ledger.charge("run", ROUND | {"lax": ROUND["lax"]._replace(noise_multiplier=1.0 + number)})
            charged += 1
    ledger.close()
    with Ledger(path) as reopened:
        assert rounds_of(reopened, "lax") == reopened.runs()[0].charged == charged + 1


@contextlib.contextmanager
def without_root():
    """As a user who may not write everywhere."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_read_only_file_can_be_read_alone():
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "population.ledger"
        with Ledger(path) as ledger:
            ledger.begin("run", MECHANISM)
            ledger.charge("run", ROUND)
        path.chmod(0o444)
        Path(folder).chmod(0o755)
        with without_root():
            with raises_field("path", LedgerError):
                Ledger(path)
            with Ledger(path, read_only=True) as ledger:
                assert rounds_of(ledger, "lax") == 1
                with raises_field("path", LedgerError):
                    ledger.charge("run", ROUND)


def test_a_file_that_is_no_ledger_is_left_as_it_was(tmp_path):
    (text := tmp_path / "notes.txt").write_text("not a database, by any means\n" * 100)
    database = tmp_path / "other.db"
    with contextlib.closing(sqlite3.connect(database)) as other:
        other.execute("CREATE TABLE things (name TEXT)")
    for path in (text, database):
        content = path.read_bytes()
        with raises_field("path", LedgerError):
            Ledger(path)
        assert path.read_bytes() == content


def test_a_file_that_cannot_be_opened(tmp_path):
    (empty := tmp_path / "empty").touch()
    for path, read_only in ((empty, True), (tmp_path, False), (tmp_path / "no/folder", False), (tmp_path / "no", True)):
        with raises_field("path", LedgerError):
            Ledger(path, read_only=read_only)
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize("version", [VERSION - 1, VERSION + 1])
def test_another_version_is_left_as_it_was(path, ledger, version):
    ledger._db.execute(f"PRAGMA user_version = {version}")
    ledger.close()
    content = path.read_bytes()
    with raises_field("version", LedgerError) as error:
        Ledger(path)
    assert error.value.value == version
    with raises_field("version", LedgerError):
        Ledger(path, read_only=True)
    assert path.read_bytes() == content


def test_a_damaged_file(path, ledger):
    ledger.charge("run", ROUND)
    ledger.close()
    content = bytearray(path.read_bytes())
    content[4096:] = b"\xff" * (len(content) - 4096)
    path.write_bytes(content)
    for read_only in (True, False):
        with raises_field("path", DamagedLedgerError):
            Ledger(path, read_only=read_only)


def test_a_ledger_that_became_empty_is_no_new_ledger(path, ledger):
    ledger.close()
    path.write_bytes(b"")
    for read_only in (True, False):
        with raises_field("path", DamagedLedgerError):
            Ledger(path, read_only=read_only)
    assert path.read_bytes() == b""


def test_a_ledger_that_is_gone_while_its_journal_is_there_is_no_new_ledger(path, ledger):
    ledger.close()
    path.rename(f"{path}-journal")
    with raises_field("path", LedgerError):
        Ledger(path)


DAMAGE = ("a bit", "bytes", "a page", "an end", "rows", "values")


def damage(path, rng):
    """One random damage of a kind."""
    kind, content = rng.choice(DAMAGE), bytearray(path.read_bytes())
    place = rng.randrange(len(content))
    if kind == "a bit":
        content[place] ^= 1 << rng.randrange(8)
    elif kind == "bytes":
        content[place : place + 16] = rng.randbytes(len(content[place : place + 16]))
    elif kind == "a page":
        content[place // 4096 * 4096 : (place // 4096 + 1) * 4096] = bytes(4096)
    elif kind == "an end":
        del content[place:]
    path.write_bytes(content)
    if kind in ("rows", "values"):
        with contextlib.closing(sqlite3.connect(path)) as database, database:
            table = rng.choice(("groups", "clients", "runs", "charges", "journal"))
            row = rng.choice(database.execute(f"SELECT rowid FROM {table}").fetchall())
            if kind == "rows":
                database.execute(f"DELETE FROM {table} WHERE rowid = ?", row)
            else:
                columns = [column for _, column, *_ in database.execute(f"PRAGMA table_info({table})")]
                with contextlib.suppress(sqlite3.IntegrityError):
                    database.execute(f'UPDATE {table} SET "{rng.choice(columns)}" = 1 WHERE rowid = ?', row)
    return kind


@pytest.mark.parametrize("seed", range(4))
def test_no_damage_shows_less_than_was_spent(tmp_path, path, ledger, seed):
    """Of each damaged copy: it is refused in one line, or it says what the ledger said."""
    rng, refusals = random.Random(seed), []
    ledger.promise("strict", 5.0, 1e-5)
    for _ in range(3):
        ledger.charge("run", ROUND)
    expected = {name: (ledger.costs(name), ledger.budget(name), ledger.clients(name)) for name in ledger.groups()}
    ledger.close()
    for number in range(100):
        copy = tmp_path / f"{number}.ledger"
        copy.write_bytes(path.read_bytes())
        damage(copy, rng)
        try:
            with Ledger(copy, read_only=number % 2 == 0) as other:
                shown = {name: (other.costs(name), other.budget(name), other.clients(name)) for name in other.groups()}
        except LedgerError as error:
            refusals.append(str(error))
        else:
            assert shown == expected
    assert len(refusals) > 60
    assert not [line for line in refusals if "\n" in line]


@pytest.mark.process
def test_a_kill_inside_a_transaction_leaves_a_ledger_that_can_be_read(path, ledger):
    ledger.charge("run", ROUND)
    ledger.close()
    process = start_process(
        "ledger = Ledger(sys.argv[1])\n"
        "ledger._db.execute('PRAGMA cache_size = 1')\n"  # so that pages are in the file before the end of a transaction
        "with ledger._transaction():\n"
        "    ledger._add_clients([(f'new {i}', 'lax') for i in range(20_000)])\n"
        "    os.kill(os.getpid(), signal.SIGKILL)",
        path,
    )
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    assert Path(f"{path}-journal").stat().st_size > 0
    with Ledger(path, read_only=True) as ledger:
        assert (ledger.clients("lax"), rounds_of(ledger, "lax")) == (60, 1)


def test_a_copy_of_another_ledger_takes_no_place(tmp_path, path, ledger):
    """It would show a population that has spent nothing, or something else."""
    ledger.close()
    Ledger(tmp_path / "other").close()
    with contextlib.closing(sqlite3.connect(path)) as db, db:
        db.execute("UPDATE runs SET charged = 0")
        db.execute("DELETE FROM charges")
        db.execute("DELETE FROM clients")
    damaged = path.read_bytes()
    with raises_field("copy", LedgerError):
        restore(tmp_path / "other", path)
    assert path.read_bytes() == damaged
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted([path.name, "other"])


def test_a_backup_takes_the_place_of_a_damaged_ledger_alone(tmp_path, path, ledger):
    ledger.charge("run", ROUND)
    backup(path, tmp_path / "copy")
    with raises_field("copy", LedgerError):
        backup(path, tmp_path / "copy")
    ledger.charge("run", ROUND)
    with raises_field("path", LedgerError):  # it would lose a charge
        restore(tmp_path / "copy", path)
    assert rounds_of(ledger, "lax") == 2
    ledger.close()
    path.write_bytes(path.read_bytes()[:5000])
    assert restore(tmp_path / "copy", path) == Path(f"{path}.damaged-1")
    with Ledger(path) as ledger:
        assert rounds_of(ledger, "lax") == 1
        assert len(ledger.restorations()) == 1
        assert "charges before may be missing" in restored_note(ledger)
        ledger.charge("run", ROUND)
    with Ledger(path) as ledger:  # the mark stays, and later charges follow it
        assert (rounds_of(ledger, "lax"), len(ledger.restorations())) == (2, 1)
    with Ledger(tmp_path / "copy") as ledger:
        assert (ledger.restorations(), restored_note(ledger)) == ([], "")
    path.unlink()
    assert restore(tmp_path / "copy", path) is None
    (tmp_path / "copy").write_bytes(b"nothing")
    path.unlink()
    with raises_field("path", DamagedLedgerError):
        restore(tmp_path / "copy", path)
    assert not path.exists()


@pytest.mark.parametrize("place", [60, 68, b"started TEXT"])
def test_every_damage_that_is_refused_can_be_restored(tmp_path, path, ledger, place):
    """Also where the header says another version or another program, or where a definition is no text any more."""
    ledger.charge("run", ROUND)
    backup(path, tmp_path / "copy")
    Ledger(tmp_path / "other").close()
    ledger.close()
    content = bytearray(path.read_bytes())
    place = content.index(place) if isinstance(place, bytes) else place
    content[place] ^= 0xFF
    path.write_bytes(content)
    with pytest.raises(LedgerError) as error:
        Ledger(path)
    assert "\n" not in str(error.value)
    with raises_field("copy", LedgerError):
        restore(tmp_path / "other", path)
    assert restore(tmp_path / "copy", path) == Path(f"{path}.damaged-1")
    with Ledger(path) as restored:
        assert (rounds_of(restored, "lax"), len(restored.restorations())) == (1, 1)


def test_a_ledger_whose_first_entry_is_damaged_can_be_restored(tmp_path, path, ledger):
    """It cannot say any more whose copies are its own."""
    backup(path, tmp_path / "copy")
    ledger.close()
    content = bytearray(path.read_bytes())
    content[content.index(b'["ledger", "') + 12] ^= 1
    path.write_bytes(content)
    assert restore(tmp_path / "copy", path) == Path(f"{path}.damaged-1")


def test_a_table_whose_name_is_no_text_is_refused_in_one_line_and_restored(tmp_path, path, ledger):
    """SQLite quotes the name in its message, which Python then cannot read."""
    backup(path, tmp_path / "copy")
    ledger.close()
    content = bytearray(path.read_bytes())
    content[content.index(b"tablejournal") + 5] ^= 0xFF
    path.write_bytes(content)
    with pytest.raises(LedgerError) as error:
        Ledger(path)
    assert "\n" not in str(error.value)
    assert restore(tmp_path / "copy", path) == Path(f"{path}.damaged-1")
    Ledger(path).close()


def test_a_backup_takes_no_later_versions_place(tmp_path, path, ledger):
    """It may have more charges than the backup, which an earlier fedhdp cannot see."""
    backup(path, tmp_path / "copy")
    ledger.close()
    content = bytearray(path.read_bytes())
    content[60:64] = (int.from_bytes(content[60:64], "big") + 1).to_bytes(4, "big")  # SQLite's user_version
    path.write_bytes(content)
    with raises_field("version", LedgerError):
        restore(tmp_path / "copy", path)
    assert path.read_bytes() == content


def test_a_backup_takes_no_other_programs_place(tmp_path, path, ledger):
    backup(path, tmp_path / "copy")
    other = tmp_path / "other.db"
    with contextlib.closing(sqlite3.connect(other)) as database, database:
        database.execute("CREATE TABLE notes (text TEXT)")
    content = other.read_bytes()
    with raises_field("path", LedgerError):
        restore(tmp_path / "copy", other)
    assert other.read_bytes() == content

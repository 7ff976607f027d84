"""The ledger against crashes, races, bad files and people who restore old checkpoints."""

import contextlib
import math
import multiprocessing
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec
import pytest

from fedhdp.errors import LedgerError
from fedhdp.mechanism import AdaptiveClip, Mechanism, PrivacyGroup
from fedhdp.privacy.accounting import PrivacyCost, compose, privacy_costs, rounds_left
from fedhdp.privacy.ledger import Budget, BudgetError, Ledger

MECHANISM = Mechanism(
    groups=(
        PrivacyGroup("lax", 60, 1.0, 0.1, weight=0.5),
        PrivacyGroup("strict", 30, 2.0, 0.1, weight=0.1),
        PrivacyGroup("open", 10, 0.0, 0.1),
    ),
    clip=AdaptiveClip(1.0),
)
ROUND = privacy_costs(MECHANISM)


def open_ledger(path: Path, **options) -> Ledger:
    return Ledger(path, **options)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "population.ledger"


@pytest.fixture
def ledger(path):
    with open_ledger(path) as ledger:
        ledger.begin("run", MECHANISM)
        yield ledger


def rounds_of(ledger: Ledger, group: str) -> int:
    return sum(rounds for *_, rounds in ledger.costs(group))


def test_a_charge_holds_what_its_event_is_rebuilt_from_and_survives_closing(path, ledger):
    for _ in range(3):
        ledger.charge("run", ROUND)
    ledger.close()
    with open_ledger(path) as again:
        assert again.groups() == ("lax", "strict", "open")
        for name in again.groups():
            assert again.costs(name) == (ROUND[name]._replace(rounds=3),)
        [run] = again.runs()
        assert (run.mechanism, run.charged) == (MECHANISM, 3)


def test_epsilon_over_the_ledger_composes_all_runs(ledger):
    other = msgspec.structs.replace(MECHANISM, clip=1.0)
    ledger.begin("other", other)
    for _ in range(20):
        ledger.charge("run", ROUND)
        ledger.charge("other", privacy_costs(other))
    assert compose(ledger.costs("strict"), 1e-5) == compose(
        [privacy_costs(MECHANISM, 20)["strict"], privacy_costs(other, 20)["strict"]], 1e-5
    )
    assert compose(ledger.costs("open"), 1e-5) == math.inf


def test_the_budget_is_checked_before_the_round_and_never_passed(ledger):
    ledger.promise("strict", 0.5, 1e-5)
    expected = rounds_left((), ROUND["strict"], Budget(0.5, 1e-5))
    assert expected > 2
    for done in range(expected):
        assert rounds_left(ledger.costs("strict"), ROUND["strict"], ledger.budget("strict")) == expected - done
        ledger.charge("run", ROUND)
    with pytest.raises(
        BudgetError, match=r"another round would exceed the budget of 'strict', epsilon 0\.5 at delta 1e-05"
    ) as refusal:
        ledger.charge("run", ROUND)
    assert refusal.value.groups == ("strict",)
    assert [rounds_of(ledger, name) for name in ledger.groups()] == [expected] * 3  # nobody paid for the refused round
    assert ledger.runs()[0].charged == expected
    assert compose(ledger.costs("strict"), 1e-5) <= 0.5


def test_a_refusal_names_every_group_whose_budget_would_be_passed(ledger):
    for name in ("lax", "strict", "open"):
        ledger.promise(name, 1e-3, 1e-5)
    with pytest.raises(BudgetError) as refusal:
        ledger.charge("run", ROUND)
    assert refusal.value.groups == ("lax", "strict", "open")


def test_a_run_goes_on_without_a_group_that_has_spent_its_budget(ledger):
    ledger.promise("strict", 1e-3, 1e-5)
    ledger.charge("run", ROUND | {"strict": ROUND["strict"]._replace(sampling_rate=0.0)})
    assert rounds_of(ledger, "lax") == 1
    assert compose(ledger.costs("strict"), 1e-5) == 0


def test_a_group_whose_updates_weigh_nothing_still_pays_for_its_bits(ledger):
    ledger.promise("strict", 1e-3, 1e-5)
    groups = tuple(msgspec.structs.replace(g, weight=0.0) if g.name == "strict" else g for g in MECHANISM.groups)
    with pytest.raises(BudgetError, match="strict"):
        ledger.charge("run", privacy_costs(msgspec.structs.replace(MECHANISM, groups=groups)))


def test_budgets_hold_over_all_runs_together(ledger):
    ledger.promise("lax", 3.0, 1e-5)
    allowed = rounds_left((), ROUND["lax"], Budget(3.0, 1e-5))
    ledger.charge("run", ROUND | {"lax": ROUND["lax"]._replace(rounds=allowed)})
    ledger.begin("later", MECHANISM)
    with pytest.raises(BudgetError, match="lax"):
        ledger.charge("later", ROUND)


def test_a_budget_can_be_lowered_and_never_raised(ledger):
    ledger.promise("lax", 3.0, 1e-5)
    ledger.promise("lax", 2.0, 1e-5)
    for epsilon, delta in ((2.5, 1e-5), (2.0, 1e-4)):
        with pytest.raises(LedgerError, match="was promised epsilon 2 at delta 1e-05"):
            ledger.promise("lax", epsilon, delta)
    assert ledger.budget("lax") == Budget(2.0, 1e-5)
    assert ledger.budget("strict") is None


def test_a_restored_old_checkpoint_does_not_bring_spent_budget_back(path, ledger):
    for _ in range(5):
        ledger.charge("run", ROUND)
    ledger.close()
    with open_ledger(path) as again:  # the checkpoint of round 2 was restored: rounds 3 to 5 are run once more
        again.begin("run", MECHANISM, completed=2)
        for _ in range(3):
            again.charge("run", ROUND)
        assert rounds_of(again, "lax") == 8


def test_a_restored_old_ledger_is_noticed_when_its_run_resumes(path, ledger):
    ledger.charge("run", ROUND)
    shutil.copy(path, old := path.with_suffix(".old"))
    ledger.charge("run", ROUND)
    ledger.begin("run", MECHANISM, completed=2)
    with open_ledger(old) as forgetful, pytest.raises(LedgerError, match="completed 2 rounds, but only 1 are charged"):
        forgetful.begin("run", MECHANISM, completed=2)


def test_a_run_resumes_with_its_own_mechanism_only(ledger):
    with pytest.raises(LedgerError, match="'run' has another mechanism"):
        ledger.begin("run", msgspec.structs.replace(MECHANISM, clip=1.0))


def test_a_client_cannot_escape_its_budget_under_another_groups_name(ledger):
    lax, strict, opted = MECHANISM.groups
    renamed = msgspec.structs.replace(MECHANISM, groups=(msgspec.structs.replace(lax, name="fresh"), strict, opted))
    grown = msgspec.structs.replace(MECHANISM, groups=(msgspec.structs.replace(lax, clients=61), strict, opted))
    for mechanism, name in ((renamed, "fresh"), (grown, "lax")):
        with pytest.raises(
            LedgerError, match=f"clients 0 to 59 are group 'lax' in this file.*cannot be group '{name}'"
        ):
            ledger.begin("another", mechanism)
    assert [run.name for run in ledger.runs()] == ["run"]


def test_nothing_is_charged_to_an_unknown_run_or_group_or_with_a_number_that_is_none(ledger):
    with pytest.raises(LedgerError, match="no run 'walk'"):
        ledger.charge("walk", ROUND)
    with pytest.raises(LedgerError, match="no group 'nobody'"):
        ledger.charge("run", ROUND | {"nobody": ROUND["lax"]})
    for bad in (
        PrivacyCost(math.nan, 0.1, "poisson"),
        PrivacyCost(1.0, math.nan, "poisson"),
        PrivacyCost(1.0, 0.1, "poisson", -5),
    ):
        with pytest.raises(ValueError, match="of 'lax' must be"):
            ledger.charge("run", ROUND | {"lax": bad})
    assert rounds_of(ledger, "strict") == 0


def test_a_budget_refuses_rounds_that_cannot_be_composed_with_what_was_spent(ledger):
    ledger.charge("run", ROUND)
    for promised in (False, True):  # with a budget and without
        if promised:
            ledger.promise("lax", 30.0, 1e-5)
        with pytest.raises(
            LedgerError, match="'lax' was charged with poisson sampling, which does not compose with fixed"
        ):
            ledger.charge("run", ROUND | {"lax": ROUND["lax"]._replace(sampling="fixed")})
    assert rounds_of(ledger, "lax") == 1


def test_rounds_that_are_charged_at_once_are_counted_as_many(ledger):
    for rounds in (5, 3):
        ledger.charge("run", {"lax": ROUND["lax"]._replace(rounds=rounds)})
    assert rounds_of(ledger, "lax") == 8
    assert [run.charged for run in ledger.runs()] == [8]


def race(path: Path, run: str, start, results) -> None:
    with open_ledger(path) as ledger:
        ledger.begin(run, MECHANISM)
        start.wait()
        charged = 0
        with contextlib.suppress(BudgetError):
            while True:
                ledger.charge(run, ROUND)
                charged += 1
        results.put((run, charged))


def test_processes_racing_for_the_last_rounds_lose_no_charge_and_pass_no_budget(path):
    allowed = rounds_left((), ROUND["strict"], Budget(1.0, 1e-5))
    assert allowed > 30
    with open_ledger(path) as ledger:
        ledger.begin("before", MECHANISM)
        ledger.promise("strict", 1.0, 1e-5)
        ledger.charge("before", ROUND | {"strict": ROUND["strict"]._replace(rounds=allowed - 30)})
    spawn = multiprocessing.get_context("spawn")
    start, results = spawn.Barrier(3), spawn.Queue()
    racers = [spawn.Process(target=race, args=(path, f"racer {i}", start, results)) for i in range(3)]
    for racer in racers:
        racer.start()
    charged = dict(results.get(timeout=60) for _ in racers)
    for racer in racers:
        racer.join()
    with open_ledger(path) as ledger:
        assert sum(charged.values()) == 30
        assert rounds_of(ledger, "strict") == allowed
        assert {run.name: run.charged for run in ledger.runs()} == charged | {"before": allowed - 30}


def test_processes_that_make_one_ledger_at_once_all_get_it(path):
    code = (
        "import sys; sys.path.insert(0, 'tests')\n"
        "from fedhdp.privacy.ledger import Ledger; from tests.test_ledger import MECHANISM, ROUND\n"
        "with Ledger(sys.argv[1]) as ledger:\n"
        "    ledger.begin(sys.argv[2], MECHANISM); ledger.charge(sys.argv[2], ROUND)"
    )
    root = Path(__file__).parent.parent
    makers = [subprocess.Popen([sys.executable, "-c", code, path, f"run {i}"], cwd=root) for i in range(3)]
    assert [maker.wait(60) for maker in makers] == [0, 0, 0]
    with open_ledger(path) as ledger:
        assert rounds_of(ledger, "lax") == 3


def test_a_process_killed_between_charge_and_result_leaves_the_charge(path):
    code = (
        "import os, signal, sys; sys.path.insert(0, 'tests')\n"
        "from fedhdp.privacy.ledger import Ledger; from tests.test_ledger import MECHANISM, ROUND\n"
        "ledger = Ledger(sys.argv[1]); ledger.begin('run', MECHANISM)\n"
        "ledger.charge('run', ROUND); ledger.charge('run', ROUND)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
        "print('result')"
    )
    root = Path(__file__).parent.parent
    died = subprocess.run([sys.executable, "-c", code, path], cwd=root, capture_output=True)
    assert (died.returncode, died.stdout) == (-signal.SIGKILL, b"")
    with open_ledger(path) as ledger:
        assert rounds_of(ledger, "lax") == 2


def test_a_process_killed_while_it_prices_leaves_no_charge_and_no_lock(path):
    code = (
        "import os, signal, sys; sys.path.insert(0, 'tests')\n"
        "from fedhdp.privacy.ledger import Ledger; from tests.test_ledger import MECHANISM, ROUND\n"
        "from fedhdp.privacy import ledger as module\n"
        "module.within_budget = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "ledger = Ledger(sys.argv[1])\n"
        "ledger.begin('run', MECHANISM); ledger.promise('lax', 10.0, 1e-5); ledger.charge('run', ROUND)"
    )
    root = Path(__file__).parent.parent
    assert subprocess.run([sys.executable, "-c", code, path], cwd=root).returncode == -signal.SIGKILL
    with open_ledger(path, timeout=0.5) as ledger:
        assert rounds_of(ledger, "lax") == 0
        ledger.charge("run", ROUND)
        assert rounds_of(ledger, "lax") == 1


def test_a_ledger_held_for_too_long_is_an_error_in_one_line(path, ledger):
    other = contextlib.closing(sqlite3.connect(path, isolation_level=None))
    with other as holder, open_ledger(path, timeout=0.05) as impatient:
        holder.execute("BEGIN IMMEDIATE")
        with pytest.raises(LedgerError, match="another process has locked the ledger for too long") as error:
            impatient.charge("run", ROUND)
    assert "\n" not in str(error.value)


def test_a_full_disk_charges_nothing_and_says_so(path, ledger):
    ledger.charge("run", ROUND)
    pages = ledger._db.execute("PRAGMA page_count").fetchone()[0]
    ledger._db.execute(f"PRAGMA max_page_count = {pages}")  # SQLite's own way to run out of room
    charged = 0
    with pytest.raises(LedgerError, match="the disk is full, so no round can be charged") as error:  # noqa: PT012
        for number in range(10_000):
            ledger.charge("run", ROUND | {"lax": ROUND["lax"]._replace(noise_multiplier=1.0 + number)})
            charged += 1
    assert "\n" not in str(error.value)
    ledger.close()
    with open_ledger(path) as again:
        assert rounds_of(again, "lax") == again.runs()[0].charged == charged + 1


@contextlib.contextmanager
def as_somebody_else():
    """Without root's right to write where it must not."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_file_that_cannot_be_written_is_refused_at_once_and_can_still_be_read():
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "population.ledger"
        with open_ledger(path) as ledger:
            ledger.begin("run", MECHANISM)
            ledger.charge("run", ROUND)
        path.chmod(0o444)
        Path(folder).chmod(0o755)
        with as_somebody_else():
            with pytest.raises(LedgerError, match=r"population\.ledger: cannot be written, so no round can be charged"):
                open_ledger(path)
            with open_ledger(path, read_only=True) as ledger:
                assert rounds_of(ledger, "lax") == 1
                with pytest.raises(LedgerError, match="cannot be written"):
                    ledger.charge("run", ROUND)


def test_a_file_that_is_no_ledger_is_refused_and_left_as_it_was(tmp_path):
    (text := tmp_path / "notes.txt").write_text("not a database, by any means\n" * 100)
    other = tmp_path / "other.db"
    with contextlib.closing(sqlite3.connect(other)) as database:
        database.execute("CREATE TABLE things (name TEXT)")
    for path in (text, other):
        before = path.read_bytes()
        with pytest.raises(LedgerError, match=f"{path.name}: not a ledger"):
            open_ledger(path)
        assert path.read_bytes() == before
    (empty := tmp_path / "empty").touch()
    with pytest.raises(LedgerError, match="empty file"):
        open_ledger(empty, read_only=True)
    for path in (tmp_path, tmp_path / "no" / "folder"):
        with pytest.raises(LedgerError, match="cannot be opened"):
            open_ledger(path)
    with pytest.raises(LedgerError, match="cannot be opened"):
        open_ledger(tmp_path / "missing", read_only=True)
    assert not (tmp_path / "missing").exists()


def test_a_ledger_of_a_newer_version_is_refused_and_left_as_it_was(path, ledger):
    ledger._db.execute("PRAGMA user_version = 4")
    ledger.close()
    before = path.read_bytes()
    with pytest.raises(LedgerError, match="a ledger of version 4, while this fedhdp reads versions up to 3"):
        open_ledger(path)
    assert path.read_bytes() == before


def test_a_damaged_ledger_is_an_error_in_one_line(path, ledger):
    ledger.charge("run", ROUND)
    ledger.close()
    content = bytearray(path.read_bytes())
    content[4096:] = b"\xff" * (len(content) - 4096)
    path.write_bytes(content)
    with open_ledger(path) as broken, pytest.raises(LedgerError, match="damaged or unreadable") as error:
        broken.charge("run", ROUND)
    assert "\n" not in str(error.value)


def test_a_budget_promised_before_the_first_run_holds_from_its_first_round(path):
    with open_ledger(path) as ledger:
        ledger.promise("strict", 0.5, 1e-5)
        assert (ledger.groups(), list(ledger.clients("strict"))) == (("strict",), [])
        ledger.begin("run", MECHANISM)
        assert ledger.groups() == ("lax", "strict", "open")
        assert ledger.clients("strict") == range(60, 90)
        allowed = rounds_left((), ROUND["strict"], Budget(0.5, 1e-5))
        ledger.charge("run", ROUND | {"strict": ROUND["strict"]._replace(rounds=allowed)})
        with pytest.raises(BudgetError, match="strict"):
            ledger.charge("run", ROUND)


def test_a_promise_before_the_first_run_can_be_lowered_and_never_raised(path):
    with open_ledger(path) as ledger:
        ledger.promise("strict", 2.0, 1e-5)
        ledger.promise("strict", 1.0, 1e-5)
        with pytest.raises(LedgerError, match="was promised epsilon 1 at delta 1e-05"):
            ledger.promise("strict", 2.0, 1e-5)
        assert ledger.budget("strict") == Budget(1.0, 1e-5)


def test_clients_stay_with_the_group_that_was_promised_once_it_has_been_in_a_run(path):
    with open_ledger(path) as ledger:
        ledger.promise("strict", 0.5, 1e-5)
        ledger.begin("run", MECHANISM)
        lax, strict, opted = MECHANISM.groups
        moved = msgspec.structs.replace(MECHANISM, groups=(strict, lax, opted))
        with pytest.raises(LedgerError, match="so clients 0 to 29 cannot be group 'strict'"):
            ledger.begin("another", moved)
        assert ledger.clients("strict") == range(60, 90)


def test_a_promise_is_not_bypassed_under_a_misspelt_name(path):
    lax, strict, opted = MECHANISM.groups
    misspelt = msgspec.structs.replace(MECHANISM, groups=(lax, msgspec.structs.replace(strict, name="Strict"), opted))
    with open_ledger(path) as ledger:
        for name in ("lax", "strict"):
            ledger.promise(name, 0.5, 1e-5)
        with pytest.raises(LedgerError, match=r"group 'strict' was promised a budget .* while 'Strict' is new"):
            ledger.begin("run", misspelt)
        assert (ledger.runs(), list(ledger.clients("lax"))) == ((), [])
        ledger.promise("Strict", 0.5, 1e-5)  # said in so many words that they are others
        ledger.begin("run", misspelt)
        ledger.begin("run", misspelt)


def test_nothing_is_charged_to_a_group_that_has_a_promise_and_no_clients(ledger):
    ledger.promise("later", 5.0, 1e-5)
    with pytest.raises(LedgerError, match="group 'later' has not been in a run"):
        ledger.charge("run", ROUND | {"later": ROUND["lax"]})
    assert rounds_of(ledger, "lax") == 0

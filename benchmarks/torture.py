"""Hurt fedhdp in every way that a machine can, and see what holds: nothing lost, no traceback, no charge missing.

    make torture ARGS="--minutes 20"

Each trial has a seed of its own; ``--only NAME --seed N --trials 1`` repeats one. A trial that fails prints its seed,
and the program ends with 1. A line for each kind of trial: how many were tried, how many held, and what was counted.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import multiprocessing
import os
import random
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedhdp.archives import read_npz
from fedhdp.clips import AdaptiveClip
from fedhdp.errors import FedHDPError
from fedhdp.mechanism import Mechanism, PrivacyGroup
from fedhdp.privacy.accounting import within_budget
from fedhdp.privacy.budget import Budget
from fedhdp.privacy.costs import privacy_costs
from fedhdp.privacy.ledger import Ledger

ROUNDS = 12
EXPERIMENT = f"""
rounds = {ROUNDS}
evaluate_every = 2
checkpoint_seconds = 0.0
noise_seed = 3
delta = 1e-3
data = {{ name = "handwriting", clients = 20, samples = 8, test_samples = 4, server_test = 50 }}
model = {{ hidden = 4, basis = {{ name = "cosine", size = 9 }} }}
keep_personal = true
training = {{ epochs = 1, batch_size = 4 }}
variants = [{{ algorithm = "fedhdp" }}]
[mechanism]
clip = {{ initial = 0.5 }}
groups = [
  {{ name = "open", clients = 5, sampling_rate = 0.5, noise_multiplier = 0.0 }},
  {{ name = "strict", clients = 15, sampling_rate = 0.5, noise_multiplier = 1.0, weight = 0.1 }},
]
"""
MECHANISM = Mechanism(
    (PrivacyGroup("lax", 60, 1.0, 0.1, weight=0.5), PrivacyGroup("strict", 30, 2.0, 0.1)), clip=AdaptiveClip(1.0)
)
COSTS = privacy_costs(MECHANISM)
CLI = [sys.executable, "-m", "fedhdp"]
JUMP = """
import datetime, os, time
offset = datetime.timedelta(seconds=float(os.environ["CLOCK_JUMP"]))
class Clock(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return super().now(tz) + offset
datetime.datetime, clock = Clock, time.time
time.time = lambda: clock() + offset.total_seconds()
"""
TIME_LIMIT = 900  # seconds of a command


class Failure(Exception):
    """Something that must hold does not."""


def hold(condition: bool, what: object) -> None:
    """Raise `Failure` unless the condition holds."""
    if not condition:
        raise Failure(str(what)[-2000:])


def refusal(error: FedHDPError) -> None:
    """An error is one line."""
    hold("\n" not in str(error).strip(), repr(error))


def mutate(content: bytes, rng: random.Random) -> bytes:
    """Random damage: flipped bits, random bytes, zeroed pages, truncation, a part that is missing or twice there."""
    damaged, kind = bytearray(content), rng.randrange(6)
    place = rng.randrange(max(len(damaged), 1))
    length = 2 ** rng.randrange(10)
    if kind == 0 and damaged:
        damaged[place] ^= 1 << rng.randrange(8)
    elif kind == 1:
        damaged[place : place + length] = rng.randbytes(len(damaged[place : place + length]))
    elif kind == 2:
        start = place // 4096 * 4096
        damaged[start : start + 4096] = bytes(len(damaged[start : start + 4096]))
    elif kind == 3:
        del damaged[place:]
    elif kind == 4:
        del damaged[place : place + length]
    else:
        damaged[place:place] = damaged[place : place + length]
    return bytes(damaged)


def spending(path: Path) -> dict[str, Any]:
    """What a ledger says."""
    with Ledger(path, read_only=True) as ledger:
        groups = {name: (ledger.costs(name), ledger.budget(name), ledger.clients(name)) for name in ledger.groups()}
        return {"groups": groups, "runs": [(run.name, run.charged) for run in ledger.runs()]}


def damaged_ledger(folder: Path, rng: random.Random) -> Counter[str]:
    """A damaged ledger is refused, or says what it said; with the journal of a killed transaction beside it too."""
    path, results = folder / "a.ledger", Counter[str]()
    with Ledger(path) as ledger:
        ledger.begin("run", MECHANISM)
        ledger.promise("strict", 5.0, 1e-5)
        for _ in range(rng.randrange(1, 6)):
            ledger.charge("run", COSTS)
        expected, content = spending(path), path.read_bytes()
        ledger._db.execute("PRAGMA cache_size = 1")  # so that pages are in the file before the transaction ends
        with contextlib.suppress(Failure), ledger._transaction():
            ledger._add_clients([(f"new {number}", "lax") for number in range(2000)])
            journal = Path(f"{path}-journal").read_bytes()
            killed = path.read_bytes()
            raise Failure  # which rolls it back
    for number in range(20):
        copy = folder / f"{number}.ledger"
        copy.write_bytes(mutate(content, rng))
        if number % 5 == 0:
            copy.write_bytes(content)
            with contextlib.closing(sqlite3.connect(copy)) as database, database:
                table = rng.choice(("groups", "clients", "runs", "charges", "journal"))
                rows = database.execute(f"SELECT rowid FROM {table}").fetchall()
                database.execute(f"DELETE FROM {table} WHERE rowid = ?", rng.choice(rows))
        elif number % 5 == 1:
            copy.write_bytes(killed)
            Path(f"{copy}-journal").write_bytes(journal if number == 1 else mutate(journal, rng))
        try:
            stored = spending(copy)
            with Ledger(copy) as ledger:
                ledger.charge("run", COSTS)
        except FedHDPError as error:
            refusal(error)
            results["refused"] += 1
        else:
            hold(stored == expected, "a damaged ledger says something else")
            results["unharmed"] += 1
    return results


CHARGE = f"""
import random, sys, time; sys.path.insert(0, {str(Path(__file__).parent)!r})
from torture import COSTS, MECHANISM
from fedhdp.privacy.ledger import BudgetError, Ledger
with Ledger(sys.argv[1], timeout=120) as ledger:
    ledger.begin(sys.argv[2], MECHANISM)
    print("ready", flush=True)
    sys.stdin.readline()
    try:
        while True:
            ledger.charge(sys.argv[2], COSTS); print(1, flush=True)
            time.sleep(random.random() / 100)  # a round; else one process has all turns
    except BudgetError:
        print("budget", flush=True)
"""


def contended_ledger(folder: Path, rng: random.Random) -> Counter[str]:
    """Two to six processes charge one ledger, clocks differ, some are killed: no charge is missing, no budget exceeded."""
    path, processes = folder / "a.ledger", []
    with Ledger(path) as ledger:
        ledger.begin("before", MECHANISM)
        ledger.promise("lax", 3.0, 1e-5)
    for number in range(rng.randint(2, 6)):
        command = [sys.executable, "-c", CHARGE, str(path), f"run {number}"]
        processes.append(start(command, clock(folder, rng), stdin=subprocess.PIPE))
    for process in processes:
        assert process.stdin
        assert process.stdout
        hold(process.stdout.readline() == "ready\n", "a process did not start")
    for process in processes:  # all at once
        process.stdin.write("\n")
        process.stdin.flush()
    time.sleep(rng.uniform(0.02, 1))
    killed = [process for process in processes if rng.random() < 0.4]
    for process in killed:
        process.kill()
    outputs = [process.communicate(timeout=TIME_LIMIT) for process in processes]
    for process, (_, errors) in zip(processes, outputs, strict=True):
        hold(process in killed or process.returncode == 0, errors)
    charged = dict(spending(path)["runs"])
    for number, (process, (output, _)) in enumerate(zip(processes, outputs, strict=True)):
        acknowledged, stored = output.count("1\n"), charged.get(f"run {number}", 0)
        hold(stored >= acknowledged, f"{acknowledged} charges returned, {stored} are stored")
        hold(stored <= acknowledged + (process in killed), f"{stored} stored, {acknowledged} returned")
    with Ledger(path, read_only=True) as ledger:
        hold(within_budget(ledger.costs("lax"), Budget(3.0, 1e-5)), "a budget is exceeded")
        rows = ledger._db.execute("SELECT entry FROM journal ORDER BY number").fetchall()
    runs = [values[0] for kind, *values in (json.loads(entry) for (entry,) in rows) if kind == "charge"]
    turns = sum(before != after for before, after in pairwise(runs))
    return Counter(processes=len(processes), charges=len(runs), turns=turns, killed=len(killed))


def mutated_experiment(folder: Path, rng: random.Random) -> Counter[str]:
    """A mutated experiment's file is read and its mechanism built, or it is refused in one line."""
    from fedhdp.experiments.toml import from_toml

    results = Counter[str]()
    for _ in range(500):
        text = EXPERIMENT
        for _ in range(rng.choice((1, 1, 2, 3))):
            text = mutate(text.encode(), rng).decode(errors="replace") if rng.random() < 0.5 else with_value(text, rng)
        try:
            from_toml(text, "my.toml").build_mechanism()
            results["read"] += 1
        except FedHDPError as error:
            refusal(error)
            results["refused"] += 1
        except Exception as error:
            raise Failure(f"{type(error).__name__}: {error} in {text!r}") from error
    return results


VALUES = [
    "1",
    "3",
    "0.5",
    "1e-6",
    "-1",
    "0",
    "nan",
    "inf",
    "-inf",
    "1e400",
    "1e-400",
    '""',
    '"\\u0000"',
    "[]",
    "{}",
    "true",
    "1979-05-27",
]


def with_value(text: str, rng: random.Random) -> str:
    """An experiment's file with another value for one key, of a line or of a table in a line."""
    parts = text.split(" = ")
    if len(parts) == 1:
        return text
    place = rng.randrange(1, len(parts))
    value = rng.choice([*VALUES, "9" * rng.randint(1, 400)])
    ends = [parts[place].find(end) for end in (",", " }", "\n") if end in parts[place]]
    parts[place] = value + parts[place][min(ends, default=len(parts[place])) :]
    return " = ".join(parts)


def mutated_archive(folder: Path, rng: random.Random) -> Counter[str]:
    """A mutated archive is refused, or has the arrays that it had."""
    path, file, results = folder / "a.npz", io.BytesIO(), Counter[str]()
    arrays = {"x": np.random.default_rng(0).normal(size=(50, 7)), "y": np.arange(50), "client": np.arange(50) % 5}
    np.savez_compressed(file, **arrays)
    for _ in range(100):
        path.write_bytes(mutate(file.getvalue(), rng))
        try:
            stored = read_npz(path)
        except ValueError:
            results["refused"] += 1
            continue
        except Exception as error:
            raise Failure(f"{type(error).__name__}: {error}") from error
        for name in stored.keys() & arrays.keys():
            hold(np.array_equal(stored[name], arrays[name]), f"{name} has other values")
        results["unharmed"] += 1
    return results


def mutated_reply(folder: Path, rng: random.Random) -> Counter[str]:
    """A mutated reply of a Flower client is refused, or is finite numbers of the model's size."""
    try:
        from flwr.app import ConfigRecord
        from flwr.supercore.task_identity import TaskIdentity
    except ImportError:
        return Counter({"skipped: no Flower": 1})
    from fedhdp.flower import protocol

    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1  # as in a ServerApp's process
    model = {"w": np.zeros((5, 4), np.float32), "b": np.zeros(4, np.float32)}
    request = protocol.RoundRequest("token", "run", 0, 1, "strict", 1.0, 0.5, 0.05, metrics=["accuracy"])
    results = Counter[str]()
    for _ in range(100):
        message = protocol.request_message("train", 1, protocol.to_record(model), request, 60)
        message.metadata.__dict__["_message_id"] = "1"
        update = {
            name: np.random.default_rng(1).normal(size=array.shape).astype(np.float32) for name, array in model.items()
        }
        reply = protocol.reply_message(message, request, update, {"global/accuracy": 0.5})
        record = reply.content.array_records["update"]
        name = rng.choice(["w", "b"])
        kind = rng.randrange(4)
        if kind == 0:
            record[name].data = mutate(record[name].data, rng)
        elif kind == 1:
            record[rng.choice(["w", "b", "x"])] = record[rng.choice(["w", "b"])]
        elif kind == 2:
            token = rng.choice([7, "", "other", b"token", 1.5, [1, 2]])
            reply.content["request"] = ConfigRecord({"token": token})  # type: ignore[dict-item]
        else:
            record[name].dtype, record[name].shape = rng.choice([("int64", (4,)), ("float32", (10**9,)), ("", ())])
        try:
            row_P = protocol.parse_reply(reply, request, model, is_training=True).update_P
        except protocol.RefusedReply:
            results["refused"] += 1
            continue
        except Exception as error:
            raise Failure(f"{type(error).__name__}: {error}") from error
        hold(row_P is not None and row_P.shape == (24,) and np.isfinite(row_P).all(), "an update of another shape")
        results["taken"] += 1
    return results


def clock(folder: Path, rng: random.Random) -> dict[str, str]:
    """The environment of a process whose clock is right, or years off."""
    (folder / "clock").mkdir(exist_ok=True)
    (folder / "clock" / "sitecustomize.py").write_text(JUMP)
    paths = [str(folder / "clock"), os.environ.get("PYTHONPATH", "")]
    return os.environ | {
        "CLOCK_JUMP": str(rng.choice((0, -(10**8), 10**8))),
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }


def start(command: list[str], environment: dict[str, str] | None = None, **options: Any) -> subprocess.Popen[str]:
    """Start a process whose output is kept."""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, env=environment, text=True, **pipes, **options)


def finish(process: subprocess.Popen[str], seconds: float = TIME_LIMIT) -> tuple[int, str]:
    """How a command ended, as a command may: with 0, or with 2 and one line."""
    output, errors = process.communicate(timeout=seconds)
    hold("Traceback" not in errors, errors)
    hold(process.returncode in (0, 2), f"exit {process.returncode}: {errors}")
    if process.returncode == 2:
        hold(errors.strip().split("\n")[-1].startswith("fedhdp: "), errors)
    return process.returncode, output


def fedhdp(*arguments: object) -> tuple[int, str]:
    """Run a command to its end."""
    return finish(start([*CLI, *map(str, arguments)]))


def experiment_file(folder: Path) -> Path:
    """The experiment's file."""
    path = folder / "my.toml"
    path.write_text(EXPERIMENT)
    return path


class Reference(NamedTuple):
    """A run that nothing happened to, and how long it took."""

    folder: Path
    shown: dict[str, Any]
    outcome: dict[str, Any]
    seconds: float


@cache
def reference() -> Reference:
    """The reference of this process, made once."""
    folder = Path(tempfile.mkdtemp(prefix="fedhdp-torture-reference-", dir=os.environ.get("TORTURE_FOLDER")))
    for _ in range(2):  # the first run compiles
        shutil.rmtree(folder / "run", ignore_errors=True)
        begun = time.monotonic()
        (folder / "a.ledger").unlink(missing_ok=True)
        code, _ = fedhdp("run", experiment_file(folder), "--out", folder / "run", "--ledger", folder / "a.ledger")
        hold(code == 0, "the reference run failed")
    return Reference(folder, shown(folder / "run"), outcome(folder / "run"), time.monotonic() - begun)


def shown(directory: Path) -> dict[str, Any]:
    """What `fedhdp show` shows of a run, but for times and the name of its folder; empty where it refuses."""
    code, output = fedhdp("show", directory, "--format", "json")
    return without_times(json.loads(output.replace(str(directory), "RUN"))) if code == 0 else {}


def without_times(value: Any) -> Any:
    """A document without what differs between two runs of one experiment."""
    if isinstance(value, dict):
        return {key: without_times(item) for key, item in value.items() if key not in ("seconds", "started", "id")}
    return [without_times(item) for item in value] if isinstance(value, list) else value


def outcome(directory: Path) -> dict[str, Any]:
    """All that a finished run leaves: results, histories and models."""
    contents: dict[str, Any] = {"summary": without_times(json.loads((directory / "summary.json").read_bytes()))}
    for file in sorted(directory.rglob("*")):
        name = str(file.relative_to(directory))
        if file.suffix == ".csv":
            contents[name] = file.read_text()
        elif file.suffix == ".npy":
            contents[name] = file.read_bytes()
        elif file.suffix == ".npz" and "checkpoint" not in name:
            contents |= {f"{name}/{key}": array.tobytes() for key, array in read_npz(file).items()}
    return contents


def hold_same(directory: Path) -> None:
    """Raise `Failure` unless a run left what the reference left."""
    expected, left = reference().outcome, outcome(directory)
    different = [name for name in expected.keys() | left.keys() if left.get(name) != expected.get(name)]
    hold(different == [], f"{different} are not as in a run that nothing happened to")


def hold_charged(directory: Path, ledger: Path) -> int:
    """Raise `Failure` if a round was shown and not charged; the rounds that were charged."""
    charged = sum(count for _, count in spending(ledger)["runs"]) if ledger.exists() else 0
    histories = [file.read_text().split("\n")[1:-1] for file in directory.glob("*/history.csv")]
    last = max((int(line.split(",")[0]) for lines in histories for line in lines), default=0)
    hold(charged >= last, f"{last} rounds are shown, {charged} are charged")
    return charged


def begin_and_kill(folder: Path, rng: random.Random, kills: int) -> tuple[list[str], int]:
    """A run that is killed so many times, unless it ends before; the command that resumes it, and the kills."""
    out, ledger = folder / "run", folder / "a.ledger"
    command = [*CLI, "run", str(experiment_file(folder)), "--out", str(out), "--ledger", str(ledger)]
    for number in range(kills):
        process = start(command, clock(folder, rng))
        try:
            code, _ = finish(process, rng.uniform(0.1, 1.1) * reference().seconds)
            hold(code == 0, "it was refused")
            return command, number
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
        hold_charged(out, ledger)
        if (out / "experiment.toml").exists():
            command = [*CLI, "run", "--resume", str(out)]
    return command, kills


def killed_run(folder: Path, rng: random.Random) -> Counter[str]:
    """A run that is killed again and again, under clocks that jump, ends as one that was not; every round is charged."""
    command, kills = begin_and_kill(folder, rng, 8)
    code, errors = finish(start(command, clock(folder, rng))) if kills == 8 else (0, "")
    hold(code == 0, errors)
    hold_same(folder / "run")
    charged = hold_charged(folder / "run", folder / "a.ledger")
    hold(charged >= ROUNDS, f"{charged} rounds are charged")
    return Counter(kills=kills, resumed=min(kills, 1), rounds_charged=charged)


def damaged_run(folder: Path, rng: random.Random) -> Counter[str]:
    """A run with a damaged file is refused in one line, or shown and resumed as if nothing had happened."""
    results = Counter[str]()
    for number in range(6):
        out = folder / f"{number}"
        shutil.copytree(reference().folder / "run", out)
        files = sorted(path for path in out.rglob("*") if path.is_file() and path.stat().st_size)
        damage_file(rng.choice(files), rng)
        document = shown(out)
        hold(document in ({}, reference().shown), f"other numbers are shown: {document}")
        results["shown" if document else "refused"] += 1
    command, _ = begin_and_kill(folder, rng, 1)
    files = sorted(path for path in (folder / "run").rglob("*") if path.is_file() and path.stat().st_size)
    if files:
        damage_file(rng.choice(files), rng)
    code, _ = finish(start(command))
    results["refused" if code else "resumed"] += 1
    if code == 0:
        hold_same(folder / "run")
        hold_charged(folder / "run", folder / "a.ledger")
    return results


def damage_file(file: Path, rng: random.Random) -> None:
    """Damage a file."""
    os.environ["TORTURE_FILE"] = str(file)  # in a failure's message
    file.write_bytes(mutate(file.read_bytes(), rng))


def full_disk(folder: Path, rng: random.Random) -> Counter[str]:
    """No file may grow beyond a few kilobytes: one line, nothing half there, and with more space the run goes on."""
    limited = ["bash", "-c", 'ulimit -f "$0"; exec "$@"', str(2 ** rng.randint(0, 7))]
    ledger, out = folder / "a.ledger", folder / "run"
    begin = ["run", experiment_file(folder), "--out", out, "--ledger", ledger]
    code, _ = finish(start([*limited, *CLI, *map(str, begin)]))
    hold_charged(out, ledger)
    resumed, _ = fedhdp(*(["run", "--resume", out] if (out / "experiment.toml").exists() else begin))
    hold(resumed == 0, "with space it does not go on")
    hold_same(out)
    hold_charged(out, ledger)
    return Counter({"ended early" if code else "had enough space": 1})


def read_only_folder(folder: Path, rng: random.Random) -> Counter[str]:
    """A folder that cannot be written, for results or for the ledger: one line."""
    closed = folder / "closed"
    if os.geteuid() == 0:  # who may write everywhere but there
        closed = Path("/sys")
    else:
        closed.mkdir(mode=0o555)
    before = sorted(closed.iterdir())
    places = {"--out": folder / "run", "--ledger": folder / "a.ledger"}
    places[rng.choice(list(places))] = closed / "fedhdp"
    code, _ = fedhdp("run", experiment_file(folder), *[part for option in places.items() for part in option])
    hold(code == 2, "it ran")
    hold(sorted(closed.iterdir()) == before, "something was written")
    return Counter(refused=1)


class Trial(NamedTuple):
    """A kind of trial, and its share of the time."""

    run: Callable[[Path, random.Random], Counter[str]]
    share: float


TRIALS = {
    "killed run": Trial(killed_run, 0.4),
    "mutated experiment": Trial(mutated_experiment, 0.25),
    "damaged run": Trial(damaged_run, 0.1),
    "full disk": Trial(full_disk, 0.06),
    "contended ledger": Trial(contended_ledger, 0.06),
    "damaged ledger": Trial(damaged_ledger, 0.05),
    "read-only folder": Trial(read_only_folder, 0.03),
    "mutated archive": Trial(mutated_archive, 0.03),
    "mutated reply": Trial(mutated_reply, 0.02),
}
QUICK = ("mutated experiment", "damaged ledger", "mutated archive", "mutated reply")


class Result(NamedTuple):
    """What became of a trial."""

    name: str
    seed: int
    counts: Counter[str]
    failure: str
    seconds: float


def attempt(name: str, seed: int) -> Result:
    """One trial, in a folder that is then removed."""
    begun, counts, failure = time.monotonic(), Counter[str](), ""
    folder = Path(tempfile.mkdtemp(prefix="fedhdp-torture-", dir=os.environ.get("TORTURE_FOLDER")))
    os.environ.pop("TORTURE_FILE", None)
    try:
        counts = TRIALS[name].run(folder, random.Random(f"{name} {seed}"))
    except Exception as error:
        failure = f"{type(error).__name__}: {error} {os.environ.get('TORTURE_FILE', '')}"
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return Result(name, seed, counts, failure, time.monotonic() - begun)


def main() -> int:
    """Try until the time is up; 1 if anything did not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0, help="of the first trial of each kind")
    parser.add_argument("--trials", type=int, help="of each kind, at most")
    parser.add_argument("--only", choices=TRIALS, action="append")
    parser.add_argument("--quick", action="store_true", help="without trials that start processes")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="trials at a time")
    arguments = parser.parse_args()
    names = arguments.only or (QUICK if arguments.quick else tuple(TRIALS))
    ends_at = time.monotonic() + 60 * arguments.minutes
    begun, tried, held = Counter[str](), Counter[str](), Counter[str]()
    spent = dict.fromkeys(names, 0.0)
    counts: dict[str, Counter[str]] = {name: Counter() for name in names}

    def next_name() -> str | None:
        """The kind whose turn it is: each once, then by their shares of the time."""
        is_late = time.monotonic() > ends_at
        open_names = [name for name in names if arguments.trials is None or begun[name] < arguments.trials]
        open_names = [name for name in open_names if not (is_late and begun[name])]
        return min(open_names, key=lambda name: (begun[name] > 0, spent[name] / TRIALS[name].share), default=None)

    with (
        tempfile.TemporaryDirectory(prefix="fedhdp-torture-") as folder,
        ProcessPoolExecutor(arguments.jobs, multiprocessing.get_context("spawn")) as pool,
    ):
        os.environ["TORTURE_FOLDER"] = folder
        running: set[Future[Result]] = set()
        while True:
            while len(running) < arguments.jobs and (name := next_name()):
                running.add(pool.submit(attempt, name, arguments.seed + begun[name]))
                begun[name] += 1
                spent[name] += 1.0  # until it is known
            if not running:
                break
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for result in (future.result() for future in done):
                tried[result.name] += 1
                held[result.name] += not result.failure
                spent[result.name] += result.seconds - 1.0
                counts[result.name] += result.counts
                if result.failure:
                    print(f"FAILED {result.name!r} with --seed {result.seed}: {result.failure}", flush=True)
    print(f"{'':20}{'tried':>7}{'held':>7}")
    for name in names:
        summary = ", ".join(f"{count:,} {what.replace('_', ' ')}" for what, count in counts[name].most_common())
        print(f"{name:20}{tried[name]:7,}{held[name]:7,}   {summary}")
    return int(held != tried)


if __name__ == "__main__":
    sys.exit(main())

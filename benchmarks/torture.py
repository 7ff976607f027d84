"""Hurt fedhdp in every way that a machine can, and see what holds: nothing lost, no traceback, no charge missing.

    make torture ARGS="--minutes 20"

Each trial has a seed of its own; ``--only NAME --seed N --trials 1`` repeats one. A trial that fails prints its seed,
and the program ends with 1. Counts are of trials: tried, held, and what they ended as.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np

from fedhdp.archives import read_npz
from fedhdp.clips import AdaptiveClip
from fedhdp.errors import FedHDPError
from fedhdp.mechanism import Mechanism, PrivacyGroup
from fedhdp.privacy.budget import Budget
from fedhdp.privacy.costs import privacy_costs
from fedhdp.privacy.ledger import Ledger

EXPERIMENT = """
rounds = 12
evaluate_every = 4
checkpoint_seconds = 0.0
noise_seed = 3
delta = 1e-3
data = { name = "handwriting", clients = 20, samples = 8, test_samples = 4, server_test = 50 }
model = { hidden = 4 }
training = { epochs = 1, batch_size = 4 }
variants = [{ algorithm = "fedhdp" }]
[mechanism]
clip = { initial = 0.5 }
groups = [
  { name = "open", clients = 5, sampling_rate = 0.5, noise_multiplier = 0.0 },
  { name = "strict", clients = 15, sampling_rate = 0.5, noise_multiplier = 1.0, weight = 0.1 },
]
"""
MECHANISM = Mechanism(
    (PrivacyGroup("lax", 60, 1.0, 0.1, weight=0.5), PrivacyGroup("strict", 30, 2.0, 0.1)), clip=AdaptiveClip(1.0)
)
COSTS = privacy_costs(MECHANISM)
CLI = [sys.executable, "-m", "fedhdp"]


class Failure(Exception):
    """Something that must hold does not."""


def hold(condition: bool, what: object) -> None:
    """Raise `Failure` unless the condition holds."""
    if not condition:
        raise Failure(str(what)[-2000:])


def fedhdp(*arguments: object, **options: object) -> subprocess.CompletedProcess:
    """A command, which ends as a command may: with 0, or with 2 and one line."""
    done = subprocess.run([*CLI, *map(str, arguments)], capture_output=True, text=True, timeout=300, **options)
    hold("Traceback" not in done.stderr, done.stderr)
    hold(done.returncode in (0, 2), f"exit {done.returncode}: {done.stderr}")
    if done.returncode == 2:
        hold(done.stderr.strip().split("\n")[-1].startswith("fedhdp: "), done.stderr)
    return done


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
        damaged[place // 4096 * 4096 : (place // 4096 + 1) * 4096] = bytes(4096)
    elif kind == 3:
        del damaged[place:]
    elif kind == 4:
        del damaged[place : place + length]
    else:
        damaged[place:place] = damaged[place : place + length]
    return bytes(damaged)


def spending(path: Path) -> dict:
    """What a ledger says."""
    with Ledger(path, read_only=True) as ledger:
        groups = {name: (ledger.costs(name), ledger.budget(name), ledger.clients(name)) for name in ledger.groups()}
        return {"groups": groups, "runs": [(run.name, run.charged) for run in ledger.runs()]}


def make_ledger(path: Path, rng: random.Random) -> None:
    """A ledger with a few rounds and budgets."""
    with Ledger(path) as ledger:
        ledger.begin("run", MECHANISM)
        ledger.promise("strict", 5.0, 1e-5)
        for _ in range(rng.randrange(1, 6)):
            ledger.charge("run", COSTS)


def damaged_ledger(folder: Path, rng: random.Random) -> str:
    """A damaged ledger is refused, or says what it said."""
    path = folder / "a.ledger"
    make_ledger(path, rng)
    expected, content = spending(path), path.read_bytes()
    path.write_bytes(mutate(content, rng))
    if rng.random() < 0.2:
        path.write_bytes(content)
        with contextlib.closing(sqlite3.connect(path)) as database, database:
            table = rng.choice(("groups", "clients", "runs", "charges", "journal"))
            rows = database.execute(f"SELECT rowid FROM {table}").fetchall()
            database.execute(f"DELETE FROM {table} WHERE rowid = ?", rng.choice(rows))
    try:
        found = spending(path)
        with Ledger(path) as ledger:
            ledger.charge("run", COSTS)
    except FedHDPError as error:
        hold("\n" not in str(error), error)
        return "refused"
    hold(found == expected, "a damaged ledger says something else")
    return "unharmed"


CHARGE = """
import sys, time; sys.path.insert(0, {root!r})
from benchmarks.torture import COSTS, MECHANISM
from fedhdp.privacy.ledger import BudgetError, Ledger
offset = {offset}; clock = time.time; time.time = lambda: clock() + offset
with Ledger(sys.argv[1], timeout=120) as ledger:
    ledger.begin(sys.argv[2], MECHANISM)
    try:
        while True:
            ledger.charge(sys.argv[2], COSTS); print(1, flush=True)
    except BudgetError:
        print("budget", flush=True)
"""


def contended_ledger(folder: Path, rng: random.Random) -> str:
    """Two to six processes charge one ledger, clocks differ, some are killed: no charge is missing, no budget exceeded."""
    path, root = folder / "a.ledger", str(Path(__file__).parent.parent)
    with Ledger(path) as ledger:
        ledger.begin("before", MECHANISM)
        ledger.promise("lax", 3.0, 1e-5)
    processes = []
    for number in range(rng.randint(2, 6)):
        code = CHARGE.format(root=root, offset=rng.choice((0, -(10**8), 10**8)))
        command = [sys.executable, "-c", code, str(path), f"run {number}"]
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    time.sleep(rng.uniform(2, 5))
    killed = [process for process in processes if rng.random() < 0.4]
    for process in killed:
        process.send_signal(signal.SIGKILL)
    outputs = [process.communicate(timeout=300) for process in processes]
    for process, (_, errors) in zip(processes, outputs, strict=True):
        hold(process in killed or process.returncode == 0, errors)
    charged = dict(spending(path)["runs"])
    for number, (process, (output, _)) in enumerate(zip(processes, outputs, strict=True)):
        acknowledged, stored = output.count("1\n"), charged.get(f"run {number}", 0)
        hold(stored >= acknowledged, f"{acknowledged} charges returned, {stored} are stored")
        hold(stored <= acknowledged + (process in killed), f"{stored} stored, {acknowledged} returned")
    with Ledger(path, read_only=True) as ledger:
        from fedhdp.privacy.accounting import within_budget

        hold(within_budget(ledger.costs("lax"), Budget(3.0, 1e-5)), "a budget is exceeded")
    return f"{len(killed)} of {len(processes)} killed"


def mutated_experiment(folder: Path, rng: random.Random) -> str:
    """A mutated experiment's file is read, or refused in one line."""
    from fedhdp.experiments.toml import from_toml

    results: Counter = Counter()
    for _ in range(200):
        text = EXPERIMENT
        for _ in range(rng.randint(1, 3)):
            if rng.random() < 0.5:
                text = mutate(text.encode(), rng).decode(errors="replace")
            else:
                values = [
                    "-1",
                    "0",
                    "nan",
                    "inf",
                    "9" * rng.randint(1, 400),
                    '""',
                    '"\\u0000"',
                    "[]",
                    "{}",
                    "1e400",
                    "true",
                ]
                lines = text.split("\n")
                place = rng.randrange(len(lines))
                before, equals, _ = lines[place].partition(" = ")
                lines[place] = f"{before}{equals}{rng.choice(values)}"
                text = "\n".join(lines)
        try:
            from_toml(text, "my.toml")
            results["read"] += 1
        except FedHDPError as error:
            hold("\n" not in str(error).strip() or "TOML" in str(error), f"{error!r}")
            results["refused"] += 1
        except Exception as error:
            raise Failure(f"{type(error).__name__}: {error} in {text!r}") from error
    return ", ".join(f"{count} {name}" for name, count in sorted(results.items()))


def mutated_archive(folder: Path, rng: random.Random) -> str:
    """A mutated archive is refused, or has the arrays that it had."""
    path, file = folder / "a.npz", io.BytesIO()
    arrays = {"x": np.random.default_rng(0).normal(size=(50, 7)), "y": np.arange(50), "client": np.arange(50) % 5}
    np.savez_compressed(file, **arrays)
    refused = 0
    for _ in range(100):
        path.write_bytes(mutate(file.getvalue(), rng))
        try:
            found = read_npz(path)
        except ValueError:
            refused += 1
            continue
        except Exception as error:
            raise Failure(f"{type(error).__name__}: {error}") from error
        for name in found.keys() & arrays.keys():
            hold(np.array_equal(found[name], arrays[name]), f"{name} has other values")
    return f"{refused} of 100 refused"


def mutated_reply(folder: Path, rng: random.Random) -> str:
    """A mutated reply of a Flower client is refused, or is finite numbers of the model's size."""
    try:
        from flwr.app import ConfigRecord
        from flwr.supercore.task_identity import TaskIdentity
    except ImportError:
        return "skipped: no Flower"
    from fedhdp.flower import protocol

    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1  # as in a ServerApp's process
    model = {"w": np.zeros((5, 4), np.float32), "b": np.zeros(4, np.float32)}
    request = protocol.RoundRequest("token", "run", 0, 1, "strict", 1.0, 0.5, 0.05, metrics=["accuracy"])
    refused = 0
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
            refused += 1
            continue
        except Exception as error:
            raise Failure(f"{type(error).__name__}: {error}") from error
        hold(row_P is not None and row_P.shape == (24,) and np.isfinite(row_P).all(), "an update of another shape")
    return f"{refused // 10 * 10} to {refused // 10 * 10 + 9} of 100 refused"


_REFERENCE: dict[str, dict] = {}


def experiment_file(folder: Path) -> Path:
    """The experiment's file."""
    path = folder / "my.toml"
    path.write_text(EXPERIMENT)
    return path


def values_of(directory: Path) -> dict:
    """What a finished run shows."""
    document = json.loads(fedhdp("show", directory, "--json").stdout)
    return {"text": json.dumps(document.get("variants", document), sort_keys=True)}


def killed_run(folder: Path, rng: random.Random) -> str:
    """A run that is killed again and again, and resumed, ends with the model and the charges of one that was not."""
    if not _REFERENCE:
        (whole := folder / "whole").mkdir()
        hold(fedhdp("run", experiment_file(whole), "--out", whole / "run").returncode == 0, "the reference run failed")
        _REFERENCE["models"] = models_of(whole / "run")
    out, kills = folder / "run", 0
    command = [*CLI, "run", str(experiment_file(folder)), "--out", str(out)]
    for _ in range(8):
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            _, errors = process.communicate(timeout=rng.uniform(1.5, 9))
        except subprocess.TimeoutExpired:
            process.kill()
            _, errors = process.communicate()
            kills += 1
        else:
            hold("Traceback" not in errors, errors)
            hold(process.returncode == 0, errors)
            break
        if any(out.glob("*")):
            command = [*CLI, "run", "--resume", str(out)]
    else:
        done = fedhdp(*command[len(CLI) :])
        hold(done.returncode == 0, done.stderr)
    same = all(np.array_equal(models_of(out)[name], array) for name, array in _REFERENCE["models"].items())
    hold(same, "a resumed run has another model")
    return f"{kills} kills"


def models_of(directory: Path) -> dict[str, np.ndarray]:
    """The arrays of every model file of a run."""
    files = sorted(path for path in directory.rglob("*.npz") if "checkpoint" not in path.name)
    hold(files != [], f"no models in {directory}")
    return {f"{file.relative_to(directory)}/{name}": array for file in files for name, array in read_npz(file).items()}


def damaged_run(folder: Path, rng: random.Random) -> str:
    """A run with one damaged file is shown and resumed, or refused in one line."""
    out = folder / "run"
    hold(fedhdp("run", experiment_file(folder), "--out", out).returncode == 0, "the run failed")
    files = sorted(path for path in out.rglob("*") if path.is_file() and path.stat().st_size)
    results: Counter = Counter()
    for _ in range(3):
        file = rng.choice(files)
        content = file.read_bytes()
        file.write_bytes(mutate(content, rng))
        for command in (("show", out), ("run", "--resume", out)):
            results["refused" if fedhdp(*command).returncode else "used"] += 1
        file.write_bytes(content)
    return ", ".join(f"{count} {name}" for name, count in sorted(results.items()))


def full_disk(folder: Path, rng: random.Random) -> str:
    """No file may be larger than a few kilobytes: one line, and the ledger has no charge that is half there."""
    limit = 2 ** rng.randint(10, 17)

    def limited() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    ledger = folder / "a.ledger"
    done = fedhdp(
        "run", experiment_file(folder), "--out", folder / "run", "--ledger", ledger, preexec_fn=limited, cwd=folder
    )
    if ledger.exists():
        spending(ledger)
    return "refused" if done.returncode else "ran"


def read_only_folder(folder: Path, rng: random.Random) -> str:
    """A folder that cannot be written, for results or for the ledger: one line."""
    closed = folder / "closed"
    if os.geteuid() == 0:  # who may write everywhere but there
        closed = Path("/sys")
    else:
        closed.mkdir(mode=0o555)
    before = sorted(closed.iterdir())
    places = {"--out": folder / "run", "--ledger": folder / "a.ledger"}
    places[rng.choice(list(places))] = closed / "fedhdp"
    done = fedhdp("run", experiment_file(folder), *[part for option in places.items() for part in option])
    hold(done.returncode == 2, "it ran")
    hold(sorted(closed.iterdir()) == before, "something was written")
    return "refused"


TRIALS: dict[str, Callable[[Path, random.Random], str]] = {
    "damaged ledger": damaged_ledger,
    "mutated archive": mutated_archive,
    "mutated experiment": mutated_experiment,
    "mutated reply": mutated_reply,
    "contended ledger": contended_ledger,
    "killed run": killed_run,
    "full disk": full_disk,
    "read-only folder": read_only_folder,
    "damaged run": damaged_run,
}
QUICK = ("damaged ledger", "mutated archive", "mutated experiment", "mutated reply")


def main() -> int:
    """Try until the time is up; 1 if anything did not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0, help="of the first trial")
    parser.add_argument("--trials", type=int, help="of each kind, at most")
    parser.add_argument("--only", choices=TRIALS, action="append")
    parser.add_argument("--quick", action="store_true", help="without trials that start processes")
    arguments = parser.parse_args()
    names = arguments.only or (QUICK if arguments.quick else tuple(TRIALS))
    ends_at, tried, failures = time.monotonic() + 60 * arguments.minutes, Counter[str](), Counter[str]()
    outcomes: dict[str, Counter[str]] = {name: Counter() for name in names}
    seed = arguments.seed
    while time.monotonic() < ends_at and (arguments.trials is None or seed < arguments.seed + arguments.trials):
        for name in names:
            if time.monotonic() > ends_at and tried[name]:
                continue
            folder = Path(tempfile.mkdtemp(prefix="fedhdp-torture-"))
            tried[name] += 1
            try:
                outcomes[name][TRIALS[name](folder, random.Random(f"{name} {seed}"))] += 1
            except Exception as error:
                failures[name] += 1
                print(f"FAILED {name!r} with --seed {seed}: {type(error).__name__}: {error}", flush=True)
            finally:
                shutil.rmtree(folder, ignore_errors=True)
        seed += 1
    for name in names:
        held, ended = tried[name] - failures[name], dict(outcomes[name].most_common(4))
        print(f"{name:20} tried {tried[name]:6,}  held {held:6,}  {ended}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())

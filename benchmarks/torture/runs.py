"""Trials of runs and ledgers in processes of their own: killed, out of space, read-only, damaged, contending."""

from __future__ import annotations

import io
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from common import EXPERIMENT, MECHANISM, ROUNDS, files_of, hold, mutate, spending

from fedhdp.archives import read_npz
from fedhdp.errors import FedHDPError
from fedhdp.privacy.accounting import within_budget
from fedhdp.privacy.budget import Budget
from fedhdp.privacy.ledger import Ledger
from fedhdp.results import PersonalModels, load_model

CLI = [sys.executable, "-m", "fedhdp"]
VARIANTS = ("fedhdp", "dp-fedavg")
KILLS = 10  # of a run, at most
TIME_LIMIT = 900  # seconds of a command
JUMP = """
import datetime, os, random, time
class Jumps:
    def __init__(self, seed):
        self.rng, self.offset = random.Random(seed), 0.0
    def __call__(self):
        if self.rng.random() < 0.3:
            self.offset = self.rng.choice((0.0, -1e8, 1e8, self.rng.uniform(-1e5, 1e5)))
        return self.offset
if "CLOCK_JUMPS" in os.environ:
    jumps = Jumps(int(os.environ["CLOCK_JUMPS"]))
    class Clock(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return super().now(tz) + datetime.timedelta(seconds=jumps())
    datetime.datetime, clock, clock_ns = Clock, time.time, time.time_ns
    time.time = lambda: clock() + jumps()
    time.time_ns = lambda: clock_ns() + int(jumps() * 1e9)
"""
CHARGE = f"""
import random, sys, time; sys.path.insert(0, {str(Path(__file__).parent)!r})
from common import COSTS, MECHANISM
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


class Reference(NamedTuple):
    """A run that nothing happened to, and how long it took."""

    folder: Path
    shown: dict[str, Any]
    page: str
    models: list[bytes]
    outcome: dict[str, Any]
    seconds: float


@cache
def reference() -> Reference:
    """The reference of this process, made once."""
    folder = Path(tempfile.mkdtemp(prefix="fedhdp-torture-reference-", dir=os.environ.get("TORTURE_FOLDER")))
    begun, run = time.monotonic(), folder / "run"
    code, _ = fedhdp("run", experiment_file(folder), "--out", run, "--ledger", folder / "a.ledger")
    hold(code == 0, "the reference run failed")
    seconds = time.monotonic() - begun
    return Reference(folder, shown(run), page(run), models(run), outcome(run), seconds)


def experiment_file(folder: Path) -> Path:
    """The experiment's file."""
    path = folder / "my.toml"
    path.write_text(EXPERIMENT)
    return path


def clock(folder: Path, rng: random.Random) -> dict[str, str]:
    """The environment of a process whose clock jumps by days and by years while it runs, or of one whose clock is right."""
    environment = dict(os.environ)
    if rng.random() < 0.7:
        (folder / "clock").mkdir(exist_ok=True)
        (folder / "clock" / "sitecustomize.py").write_text(JUMP)
        paths = [str(folder / "clock"), environment.get("PYTHONPATH", "")]
        environment |= {"CLOCK_JUMPS": str(rng.randrange(10**6)), "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    return environment


def start(command: list[str], environment: dict[str, str] | None = None, **options: Any) -> subprocess.Popen[str]:
    """Start a process whose output is kept."""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, env=environment, text=True, **pipes, **options)


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    """How a command ended, as a command may: with 0 and its output, or with 2 and one line, which is returned."""
    output, errors = process.communicate(timeout=TIME_LIMIT)
    hold_end(process.returncode, errors)
    return process.returncode, errors if process.returncode else output


def hold_end(code: int, errors: str) -> None:
    """Raise `Failure` unless a command ended with 0, or with 2 and one line."""
    hold("Traceback" not in errors, errors)
    hold(code in (0, 2), f"exit {code}: {errors}")
    if code == 2:
        hold(errors.strip().split("\n")[-1].startswith("fedhdp: "), errors)


def fedhdp(*arguments: object) -> tuple[int, str]:
    """Run a command to its end."""
    return finish(start([*CLI, *map(str, arguments)]))


def in_process(*arguments: object) -> tuple[int, str]:
    """Run a command in this process: the same, without the time that a process needs to start."""
    from fedhdp.cli import main

    output, errors = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2))
    previous, sys.argv, code = sys.argv, ["fedhdp", *map(str, arguments)], 0
    try:
        with redirect_stdout(output), redirect_stderr(errors):
            main()
    except SystemExit as ended:
        code = int(ended.code or 0)
    finally:
        sys.argv = previous
    output.flush()
    errors.flush()
    hold_end(code, errors.buffer.getvalue().decode())  # type: ignore[attr-defined]
    return code, output.buffer.getvalue().decode()  # type: ignore[attr-defined]


def shown(directory: Path) -> dict[str, Any]:
    """What `fedhdp show` shows of a run, but for times and the name of its folder; empty where it refuses."""
    code, output = in_process("show", directory, "--format", "json")
    return without_times(json.loads(output.replace(str(directory), "RUN"))) if code == 0 else {}


def page(directory: Path) -> str:
    """The page of a run, but for the name of its folder; empty where it refuses."""
    file = directory.parent / "page.html"
    code, _ = in_process("report", directory, "--out", file)
    return file.read_text().replace(str(directory), "RUN") if code == 0 else ""


def models(directory: Path) -> list[bytes]:
    """The global models, and all personal ones; none where a file is damaged."""
    arrays: list[np.ndarray] = []
    try:
        for variant in VARIANTS:
            arrays += load_model(directory, variant).values()
            for model in PersonalModels(directory, variant).values():
                arrays += model.values()
    except FedHDPError as error:
        hold("\n" not in str(error).strip(), repr(error))
        return []
    return [array.tobytes() for array in arrays]


def without_times(value: Any) -> Any:
    """A document without what differs between two runs of one experiment."""
    if isinstance(value, dict):
        return {key: without_times(item) for key, item in value.items() if key not in ("seconds", "started", "id")}
    return [without_times(item) for item in value] if isinstance(value, list) else value


def outcome(directory: Path) -> dict[str, Any]:
    """All that a finished run leaves: results, histories and models."""
    contents: dict[str, Any] = {"summary": without_times(json.loads((directory / "summary.json").read_bytes()))}
    for file in files_of(directory):
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
    rounds = sum(max((int(line.split(",")[0]) for line in lines), default=0) for lines in histories)
    hold(charged >= rounds, f"{rounds} rounds are shown, {charged} are charged")
    return charged


def progress(folder: Path) -> list[int]:
    """When the ledger and the checkpoints of a run were last written."""
    files = [folder / "a.ledger", *(folder / "run" / variant / "checkpoint.npz" for variant in VARIANTS)]
    return [file.stat().st_mtime_ns if file.exists() else 0 for file in files]


def wait_for_moment(process: subprocess.Popen[str], folder: Path, rng: random.Random) -> bool:
    """Wait for a random moment of a command's start, or of its rounds; whether rounds were run."""
    ends_at = time.monotonic() + (rng.uniform(0.0, reference().seconds) if rng.random() < 0.25 else TIME_LIMIT)
    writes, before = rng.randint(1, 20), progress(folder)
    last = before
    while process.poll() is None and time.monotonic() < ends_at and writes > 0:
        time.sleep(0.004)
        current = progress(folder)
        writes -= current != last
        last = current
    time.sleep(rng.uniform(0.0, 0.02))
    return progress(folder) != before


def begin_and_kill(folder: Path, rng: random.Random, kills: int) -> tuple[list[str], Counter[str]]:
    """A run that is killed so many times, unless it ends before; the command that resumes it, and the kills."""
    out, ledger = folder / "run", folder / "a.ledger"
    command = [*CLI, "run", str(experiment_file(folder)), "--out", str(out), "--ledger", str(ledger)]
    counts = Counter[str]()
    for _ in range(kills):
        process = start(command, clock(folder, rng))
        in_rounds = wait_for_moment(process, folder, rng)
        if process.poll() is not None:
            code, errors = finish(process)
            hold(code == 0, errors)
        else:
            process.kill()
            process.communicate()
            counts += Counter(kills=1, between_rounds=int(in_rounds))
        hold_charged(out, ledger)
        if (out / "experiment.toml").exists():
            command = [*CLI, "run", "--resume", str(out)]
            shown(out)
        if (out / "summary.json").exists():
            break
    return command, counts


def killed_run(folder: Path, rng: random.Random) -> Counter[str]:
    """A run that is killed again and again, under clocks that jump, ends as one that was not; every round is charged."""
    command, counts = begin_and_kill(folder, rng, int(os.environ.get("TORTURE_KILLS", KILLS)))
    code, errors = finish(start(command, clock(folder, rng)))
    hold(code == 0, errors)
    hold_same(folder / "run")
    charged = hold_charged(folder / "run", folder / "a.ledger")
    hold(charged >= len(VARIANTS) * ROUNDS, f"{charged} rounds are charged")
    return counts + Counter(resumed_to_the_end=1, rounds_charged=charged)


def damaged_run(folder: Path, rng: random.Random) -> Counter[str]:
    """A run with a damaged file is refused in one line, or shown and resumed as if nothing had happened: every file."""
    results, run = Counter[str](), folder / "finished" / "run"
    shutil.copytree(reference().folder / "run", run)
    for file in files_of(run):
        content = file.read_bytes()
        for _ in range(3):
            os.environ["TORTURE_FILE"] = str(file)  # in a failure's message
            file.write_bytes(mutate(content, rng))
            document, text, arrays = shown(run), page(run), models(run)
            hold(document in ({}, reference().shown), f"other numbers are shown: {document}")
            hold(text in ("", reference().page), "another page is drawn")
            hold(arrays in ([], reference().models), "other models are returned")
            results["unharmed" if document and text and arrays else "refused"] += 1
        file.write_bytes(content)
        results["files"] += 1
    hold(shown(run) == reference().shown, "it is not shown after all files are as they were")
    command, _ = begin_and_kill(folder, rng, 1)
    files = [path for path in (*files_of(folder / "run"), folder / "a.ledger") if path.exists()]
    if files:
        file = rng.choice(files)
        os.environ["TORTURE_FILE"] = str(file)
        file.write_bytes(mutate(file.read_bytes(), rng))
    code, _ = finish(start(command))
    results["resume_refused" if code else "resumed"] += 1
    if code == 0:
        hold_same(folder / "run")
        hold_charged(folder / "run", folder / "a.ledger")
    return results


@cache
def namespace() -> tuple[str, ...]:
    """The beginning of a command that may mount what it alone sees; empty where this machine does not allow it."""
    for command in (("unshare", "--mount"), ("unshare", "--mount", "--map-root-user")):
        with tempfile.TemporaryDirectory() as folder:
            probe = [*command, "mount", "-t", "tmpfs", "none", folder]
            if shutil.which("unshare") and subprocess.run(probe, capture_output=True, check=False).returncode == 0:
                return command
    return ()


FULL_DISK = """
disk=$1 size=$2 copies=$3 experiment=$4; shift 4
begin=(run "$experiment" --out "$disk/run" --ledger "$disk/a.ledger")
mount -t tmpfs -o size="${size}k" none "$disk" || exit 9
"$@" "${begin[@]}" 2>"$copies/1.errors" >/dev/null; echo $? >"$copies/1.code"
cp -r "$disk" "$copies/1"
mount -o remount,size=1g "$disk" || exit 9
[ -e "$disk/run/experiment.toml" ] && begin=(run --resume "$disk/run")
"$@" "${begin[@]}" 2>"$copies/2.errors" >/dev/null; echo $? >"$copies/2.code"
cp -r "$disk" "$copies/2"
"""


def full_disk(folder: Path, rng: random.Random) -> Counter[str]:
    """A run on a disk that gets full: one line, nothing half there, and with more space it goes on to the same end."""
    if not namespace():
        return limited_files(folder, rng)
    disk, copies = folder / "disk", folder / "copies"
    disk.mkdir()
    copies.mkdir()
    size = int(2 ** rng.uniform(3, 8.3))
    values = map(str, (disk, size, copies, experiment_file(folder)))
    done = subprocess.run(
        [*namespace(), "bash", "-c", FULL_DISK, "full", *values, *CLI],
        capture_output=True,
        timeout=TIME_LIMIT,
        check=False,
    )
    hold(done.returncode == 0, done.stderr)
    codes = [int((copies / f"{number}.code").read_text()) for number in (1, 2)]
    for number, code in enumerate(codes, 1):
        hold_end(code, (copies / f"{number}.errors").read_text())
        hold_charged(copies / str(number) / "run", copies / str(number) / "a.ledger")
    hold(codes[1] == 0, "with space it does not go on")
    hold_same(copies / "2" / "run")
    return Counter({"disk was full" if codes[0] else "had enough space": 1})


def limited_files(folder: Path, rng: random.Random) -> Counter[str]:
    """The same where no disk can be mounted: no file may grow beyond a few kilobytes."""
    limited = ["bash", "-c", 'ulimit -f "$0"; exec "$@"', str(2 ** rng.randint(0, 7))]
    ledger, out = folder / "a.ledger", folder / "run"
    begin = ["run", experiment_file(folder), "--out", out, "--ledger", ledger]
    code, _ = finish(start([*limited, *CLI, *map(str, begin)]))
    hold_charged(out, ledger)
    resumed, _ = fedhdp(*(["run", "--resume", out] if (out / "experiment.toml").exists() else begin))
    hold(resumed == 0, "with space it does not go on")
    hold_same(out)
    hold_charged(out, ledger)
    return Counter({"file was too large" if code else "had enough space": 1})


READ_ONLY = 'mount --bind "$1" "$1" && mount -o remount,bind,ro "$1" || exit 9; shift; exec "$@"'


@contextmanager
def read_only(folder: Path) -> Iterator[list[str]]:
    """The beginning of commands that cannot write to a folder."""
    if namespace():
        yield [*namespace(), "bash", "-c", READ_ONLY, "read-only", str(folder)]
        return
    modes = {path: path.stat().st_mode for path in (folder, *folder.rglob("*"))}
    try:
        for path, mode in modes.items():
            path.chmod(mode & ~0o222)
        yield []
    finally:
        for path, mode in modes.items():
            path.chmod(mode)


def read_only_folder(folder: Path, rng: random.Random) -> Counter[str]:
    """A folder that cannot be written, with results or a ledger: to write there is one line, and to read works."""
    if not namespace() and os.geteuid() == 0:
        return Counter({"skipped: root may write everywhere": 1})
    results = Counter[str]()
    for kind in ("new results", "new ledger", "ledger", "run to resume"):
        part = folder / kind.replace(" ", "-")
        (part / "closed").mkdir(parents=True)
        results[_write_to_closed(part, kind, rng)] += 1
    return results


def _write_to_closed(folder: Path, kind: str, rng: random.Random) -> str:
    """Try to write to a folder that is closed; what was tried."""
    closed, out, ledger = folder / "closed", folder / "run", folder / "a.ledger"
    out = closed / "run" if kind == "new results" else out
    ledger = closed / "a.ledger" if "ledger" in kind else ledger
    command, read = ["run", experiment_file(folder), "--out", out, "--ledger", ledger], []
    if kind == "ledger":
        shutil.copy(reference().folder / "a.ledger", ledger)
        read = ["ledger", "show", ledger]
    elif kind == "run to resume":
        begin_and_kill(closed, rng, 1)
        if not (closed / "run" / "experiment.toml").exists() or (closed / "run" / "summary.json").exists():
            return "not killed in time"
        command, read = ["run", "--resume", closed / "run"], ["show", closed / "run"]
    before = {path: path.read_bytes() for path in files_of(closed)}
    with read_only(closed) as prefix:
        code, _ = finish(start([*prefix, *CLI, *map(str, command)]))
        hold(code == 2, f"{kind}: it ran")
        if read:
            code, _ = finish(start([*prefix, *CLI, *map(str, read)]))
            hold(code == 0 or kind == "run to resume", "it cannot be read")  # a run without any results is not shown
    hold({path: path.read_bytes() for path in files_of(closed)} == before, f"{kind}: something was written")
    return kind


def contended_ledger(folder: Path, rng: random.Random) -> Counter[str]:
    """Two to six processes charge one ledger, clocks jump, some are killed: no charge is missing, no budget exceeded."""
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
    readings = _read_while(path, rng.uniform(0.02, 1))
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
    return Counter(processes=len(processes), charges=len(runs), turns=turns, killed=len(killed), readings=readings)


def _read_while(path: Path, seconds: float) -> int:
    """Read a ledger that others charge: every reading has the charges of the one before, or more."""
    ends_at, readings, before = time.monotonic() + seconds, 0, 0
    while time.monotonic() < ends_at:
        charged = sum(count for _, count in spending(path)["runs"])
        hold(charged >= before, f"{charged} rounds are charged, {before} were")
        readings, before = readings + 1, charged
        time.sleep(0.02)
    return readings

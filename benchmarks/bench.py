"""The engine against its peers: the same work, one after another, each in its own process and environment.

    make bench                                    a table, and the sweeps
    make bench ARGS="--quick --json"              at most 10 minutes, one JSON document on standard output
    make bench ARGS="--only fedhdp,torch"         some of them
    make bench ARGS="--figure performance.png"    a figure too

Environments are made under build/bench and kept. A peer that cannot be installed or run is null, with the reason.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import show
import work as w

HERE = Path(__file__).parent
BUILD = HERE.parent / "build" / "bench"
QUICK = 570.0, 120.0  # seconds for everything, and for one setting of one peer
PATIENT = 24 * 3600.0, 3600.0


class Contender(NamedTuple):
    """Something that is timed: its script, what it needs, how it may be set, what it can do."""

    script: str
    packages: tuple[str, ...] | None  # None: it runs in this project's own environment
    settings: dict[str, dict[str, Any]]  # each is timed, the fastest counts
    can: dict[str, str]


CORES = len(os.sched_getaffinity(0))
TORCH = "torch==2.13.0"
CONTENDERS = {  # in the order in which they run: the slowest to install last
    "fedhdp": Contender(
        "fedhdp_rounds.py",
        None,
        {"one device for each core": {}},
        {
            "privacy": "fixed clip, Gaussian noise",
            "personal": "not asked for here",
            "adaptive_clip": "not asked for here",
        },
    ),
    "fedhdp+personal": Contender(
        "fedhdp_rounds.py",
        None,
        {"one device for each core": {"personal": True}},
        {"privacy": "a noise and a weight for each group", "personal": "yes", "adaptive_clip": "yes"},
    ),
    "torch": Contender(
        "torch_loop.py",
        (TORCH, "numpy"),
        {f"{threads} thread{'s' * (threads > 1)}": {"threads": threads} for threads in sorted({1, CORES})},
        {"privacy": "fixed clip, Gaussian noise, by hand", "personal": "no", "adaptive_clip": "no"},
    ),
    "fedjax": Contender(
        "fedjax_rounds.py",
        (
            "fedjax==0.0.17",
            "jax==0.4.25",
            "jaxlib==0.4.25",
            "numpy<2",
            "scipy<1.13",
            "dm-haiku==0.0.12",
            "optax==0.2.2",
            "chex==0.1.86",
        ),
        {"jit": {}, f"pmap over {CORES} devices": {"backend": "pmap", "devices": CORES}},
        {
            "privacy": "none: neither clipping nor noise",
            "personal": "APFL, a mixture of two models, not used here; none that is pulled to the global model",
            "adaptive_clip": "no",
        },
    ),
    "pfl": Contender(
        "pfl_rounds.py",
        (TORCH, "pfl==0.6.0"),
        {f"{processes} process{'es' * (processes > 1)}": {"processes": processes} for processes in sorted({1, CORES})},
        {
            "privacy": "its central Gaussian mechanism, one noise for all",
            "personal": "no algorithm of its own; a client's state is kept, the rest is by hand",
            "adaptive_clip": "yes, not used here",
        },
    ),
    "flower": Contender(
        "flower_rounds.py",
        ("flwr==1.41.0", "ray==2.55.1", TORCH),
        {f"{CORES} workers": {"workers": CORES}},
        {
            "privacy": "its fixed clipping on the server, one noise for all",
            "personal": "no algorithm of its own; a client's state is kept, the rest is by hand",
            "adaptive_clip": "yes, not used here",
        },
    ),
}
SWEEPS: dict[str, tuple[tuple[int, ...], dict[str, int]]] = {  # along what, at which values, with what else changed
    "cohort": ((10, 30, 100, 300, 1000), {}),
    "samples": ((10, 30, 100, 300), {"clients": 500}),
    "hidden": ((10, 50, 200, 800), {"clients": 500}),
}


class Failed(Exception):
    """Why something could not be timed."""


def say(text: str) -> None:
    """Tell how far it is, where results do not go."""
    print(text, file=sys.stderr, flush=True)


def environment(name: str, packages: tuple[str, ...] | None, limit: float) -> Path:
    """The interpreter of a peer's own environment, made if it is not there as it should be."""
    if packages is None:
        return Path(sys.executable)
    home, wanted = BUILD / name, "\n".join(packages)
    done, python = home / "installed", home / "bin" / "python"
    if done.exists() and done.read_text() == wanted:
        return python
    say(f"{name}: installing {' '.join(packages)}")
    home.mkdir(parents=True, exist_ok=True)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile", *packages]
    for command in ([sys.executable, "-m", "venv", "--clear", str(home)], pip):
        try:
            made = subprocess.run(command, capture_output=True, text=True, timeout=limit)
        except subprocess.TimeoutExpired:
            raise Failed(f"not installed after {limit:.0f} s") from None
        if made.returncode:
            raise Failed(f"not installed: {last_words(made.stderr)}")
    done.write_text(wanted)
    return python


def last_words(text: str) -> str:
    """The end of what a program said, on one line."""
    return " · ".join(line.strip() for line in text.strip().splitlines()[-3:]) or "it said nothing"


def ask(python: Path, script: str, work: w.Work, options: dict, rounds: int, warm_up: int, limit: float) -> dict:
    """Run a script in its own process until it has answered; with the peak memory of all its processes."""
    with tempfile.TemporaryDirectory() as folder:
        out, errors = Path(folder) / "out.json", Path(folder) / "errors"
        command = [str(python), str(HERE / "peers" / script), "--out", str(out)]
        command += ["--work", json.dumps(dataclasses.asdict(work)), "--options", json.dumps(options)]
        command += ["--rounds", str(rounds), "--warm-up", str(warm_up)]
        surroundings = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "XLA_FLAGS")}
        surroundings["FLWR_HOME"] = str(Path(folder) / "flower")
        with errors.open("w") as log:
            process = subprocess.Popen(
                command, stdout=log, stderr=log, env=surroundings, cwd=folder, start_new_session=True
            )
            peaks: dict[int, float] = {}
            watch = threading.Thread(target=watch_memory, args=(process, peaks), daemon=True)
            watch.start()
            try:
                process.wait(timeout=limit)
            except subprocess.TimeoutExpired:
                raise Failed(f"not done after {limit:.0f} s") from None
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
                watch.join()
        if process.returncode or not out.exists():
            raise Failed(f"exit {process.returncode}: {last_words(errors.read_text(errors='replace'))}")
        told = json.loads(out.read_text())
        told["memory_mb"] = max(sum(peaks.values()), told.get("memory_mb", 0.0))
        return told


def watch_memory(process: subprocess.Popen, peaks: dict[int, float]) -> None:
    """Note the peak memory of a process and its descendants in MB, once a second; what they share counts for each."""
    while process.poll() is None:
        for pid in descendants(process.pid):
            try:
                status = Path(f"/proc/{pid}/status").read_text()
            except OSError:  # gone in the meantime
                continue
            high = [line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")]
            peaks[pid] = max(peaks.get(pid, 0.0), int(high[0]) / 1024 if high else 0.0)
        time.sleep(1)


def descendants(pid: int) -> list[int]:
    """A process and all that it started."""
    try:
        lists = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    except OSError:
        return [pid]
    return [pid] + [below for text in lists for child in text.split() for below in descendants(int(child))]


def spread(seconds: list[float]) -> dict[str, float]:
    """The median of some times, and how far they lie apart."""
    low, middle, high = statistics.quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else seconds * 3
    return {
        "median": middle,
        "min": min(seconds),
        "q1": low,
        "q3": high,
        "max": max(seconds),
        "rounds": len(seconds),
    }


def contend(name: str, work: w.Work, rounds: int, warm_up: int, ends: float, limit: float) -> dict:
    """Time one contender at each of its settings; the fastest counts."""
    contender, tried, why = CONTENDERS[name], {}, []
    began = time.monotonic()
    python = environment(name, contender.packages, max(ends - began, 1.0))
    installed = time.monotonic() - began
    for setting, options in contender.settings.items():
        say(f"{name}: {setting}")
        try:
            left = max(min(ends - time.monotonic(), limit), 1.0)
            told = ask(python, contender.script, work, options, rounds, warm_up, left)
            tried[setting] = told | {"spread": spread(told["seconds"])}
            say(f"{name}: {setting}: {tried[setting]['spread']['median']:.4f} s a round")
        except Failed as reason:
            why.append(f"{setting}: {reason}")
            say(f"{name}: {why[-1]}")
    if not tried:
        raise Failed("; ".join(why))
    best = min(tried, key=lambda setting: tried[setting]["spread"]["median"])
    told = tried[best]
    models = 2 if contender.settings[best].get("personal") else 1
    check = {"steps": told["steps"], "steps_asked": work.steps * models}
    check |= {what: told[what] for what in ("loss_before", "loss_after", "rounds_played")}
    return {
        "seconds": told["spread"]["median"],
        "spread": told["spread"],
        "setting": best,
        "settings": {setting: told["spread"]["median"] for setting, told in tried.items()},
        "failed_settings": why,
        "versions": told["versions"],
        "check": check,
        "did_the_work": told["steps"] == check["steps_asked"] and told["loss_after"] < told["loss_before"],
        "memory_mb": told["memory_mb"],
        "install_seconds": installed,
        "can": contender.can,
        "gemm_gflops": max((told.get("gemm_gflops", 0.0) for told in tried.values()), default=0.0),
    }


def sweep(names: list[str], work: w.Work, rounds: int) -> list[dict]:
    """Rounds a second and memory of this project along the size of the cohort, of a client's data and of the model."""
    points = []
    for along, (values, others) in SWEEPS.items():
        for value in values:
            point: dict[str, Any] = {"along": along, "value": value}
            for name in names:
                sized = dataclasses.replace(work, **others, **{along: value})
                say(f"{name}: {along} {value}")
                try:
                    (options,) = CONTENDERS[name].settings.values()
                    told = ask(Path(sys.executable), CONTENDERS[name].script, sized, options, rounds, 3, 600)
                    each = spread(told["seconds"])
                    measured = {"rounds_per_second": 1 / each["median"], "spread": each, "memory_mb": told["memory_mb"]}
                    point[name] = measured
                except Failed as reason:
                    point[name] = {"rounds_per_second": None, "reason": str(reason)}
            points.append(point)
    return points


def machine() -> dict[str, Any]:
    """What it was measured on, and how busy that was beforehand."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "cpu": model,
        "cores": CORES,
        "memory_gb": round(memory, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
        "load_before": os.getloadavg()[0],
    }


def bench(names: list[str], work: w.Work, quick: bool, rounds: int | None, sweeps: bool) -> dict[str, Any]:
    """Time everything that was asked for, and put it together."""
    everything, one = QUICK if quick else PATIENT
    ends = time.monotonic() + everything
    on = machine()
    say("matrix products")
    rates = ask(Path(sys.executable), "gemm.py", work, {}, 1, 0, 300)["gemm"]
    peers: dict[str, Any] = {}
    for name in CONTENDERS:
        ours = CONTENDERS[name].packages is None
        usual = 300 if ours else 5 if quick else 15  # seconds of each, not an instant of the one that is fast
        try:
            if name not in names:
                raise Failed("not asked for")
            peers[name] = contend(name, work, rounds or usual, 10 if ours else 2, ends, one)
            if peers[name]["gemm_gflops"]:
                rates[name] = peers[name]["gemm_gflops"]
        except Failed as reason:
            if name in names:
                say(f"{name}: nothing to show. {reason}")
            peers[name] = {"seconds": None, "reason": str(reason), "can": CONTENDERS[name].can}
    flops, peak = w.flops(work, models=2), max(rates.values())
    return {
        "seconds_per_round": {name: peer["seconds"] for name, peer in peers.items()},
        "naive_at_peak": flops / peak / 1e9,
        "gemm_gflops": peak,
        "gemm": rates,
        "flops_with_personal": flops,
        "peers": peers,
        "sweeps": sweep([name for name in names if CONTENDERS[name].packages is None], work, 10) if sweeps else [],
        "work": dataclasses.asdict(work),
        "machine": on,
        "command": " ".join(["make bench", f"ARGS={shlex.quote(shlex.join(sys.argv[1:]))}"][: len(sys.argv)]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="The engine against its peers.")
    parser.add_argument("--quick", action="store_true", help="at most 10 minutes, installation included; no sweeps")
    parser.add_argument("--json", action="store_true", help="one JSON document instead of a table")
    parser.add_argument("--only", default=",".join(CONTENDERS), help=f"some of {','.join(CONTENDERS)}")
    parser.add_argument("--rounds", type=int, help="timed rounds of each")
    parser.add_argument("--figure", type=Path, help="draw what was measured into this file")
    parser.add_argument("--output", type=Path, help="keep the JSON document in this file too")
    parser.add_argument("--work", type=json.loads, default={}, help="other sizes, as JSON, to try the benchmark itself")
    given = parser.parse_args()
    names = given.only.split(",")
    unknown = set(names) - set(CONTENDERS)
    if unknown:
        parser.error(f"--only knows {', '.join(CONTENDERS)}, not {', '.join(sorted(unknown))}")
    sweeps = not given.quick and not given.work
    told = bench(names, w.Work(**given.work), given.quick, given.rounds, sweeps)
    if given.output:
        given.output.write_text(json.dumps(told, indent=2) + "\n")
    if given.figure:
        show.figure(told, given.figure)
    print(json.dumps(told, indent=2) if given.json else show.table(told))


if __name__ == "__main__":
    main()

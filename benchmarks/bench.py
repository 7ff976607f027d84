"""The engine against its peers: the same work, one after another, each in its own process and environment.

    make bench                                    MNIST's network: a table, and the sweeps
    make bench ARGS="--work femnist"              FEMNIST's network; sequence: a transformer; all; or several, with commas
    make bench ARGS="--quick --json"              at most 10 minutes, one JSON document on standard output
    make bench ARGS="--only fedhdp,torch"         some of them
    make bench ARGS="--figure performance.png"    a figure too; one for each work if there are several
    make bench ARGS="--from results.json"         the tables of a document that --output wrote; nothing is timed

The document of one work is an object; that of several has an object for each by the work's name. Environments are under
build/bench. A peer that cannot be installed or run is null, with the reason. Where one of a peer's settings fails, the
table says so, and the fastest of the others counts.
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
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import show
import work as w

HERE = Path(__file__).parent
BUILD = HERE.parent / "build" / "bench"
QUICK = 570.0, 120.0  # seconds for a work, and for one setting of one peer
PATIENT = 24 * 3600.0, 3600.0


class Contender(NamedTuple):
    """A framework, or a setup of this project, that is timed."""

    script: str
    packages: tuple[str, ...] | None  # None: it runs in this project's own environment
    settings: dict[str, dict[str, Any]]  # each is timed, the fastest counts
    can: dict[str, str]
    settings_of: Mapping[str, dict[str, dict[str, Any]]] = MappingProxyType({})  # by work, where they are others

    def settings_for(self, work: w.Work) -> dict[str, dict[str, Any]]:
        """The settings that are timed for this work."""
        return self.settings_of.get(work.name, self.settings)


CORES = len(os.sched_getaffinity(0))
TORCH = "torch==2.13.0"
THREADS = {f"{threads} thread{'s' * (threads > 1)}": {"threads": threads} for threads in sorted({1, CORES})}
LAST = {f"{name}, channels last": options | {"channels_last": True} for name, options in THREADS.items()}
BUILT_IN = {"built-in network": {}}
PLAIN_JAX = {"plain JAX functions": {"network": "jax"}}  # no transformer is built in
PERSONAL = {"personal": True}
CONTENDERS = {  # in the order in which they run: the slowest to install last
    "fedhdp": Contender(
        "fedhdp_rounds.py",
        None,
        BUILT_IN,
        {"privacy": "fixed clip, Gaussian noise", "personal": "not used here", "adaptive_clip": "not used here"},
        {"sequence": PLAIN_JAX},
    ),
    "fedhdp-user": Contender(
        "fedhdp_rounds.py",
        None,
        {"Flax module": {"network": "flax"}},
        {"privacy": "fixed clip, Gaussian noise", "personal": "not used here", "adaptive_clip": "not used here"},
    ),
    "fedhdp+personal": Contender(
        "fedhdp_rounds.py",
        None,
        {name: options | PERSONAL for name, options in BUILT_IN.items()},
        {"privacy": "a noise and a weight for each group", "personal": "yes", "adaptive_clip": "yes"},
        {"sequence": {name: options | PERSONAL for name, options in PLAIN_JAX.items()}},
    ),
    "torch": Contender(
        "torch_loop.py",
        (TORCH, "numpy"),
        THREADS,
        {"privacy": "fixed clip, Gaussian noise, by hand", "personal": "no", "adaptive_clip": "no"},
        {"femnist": THREADS | LAST},
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
SWEPT = ("fedhdp", "fedhdp+personal")
Sweep = tuple[tuple[int, ...], dict[str, int]]  # the values, and what else changes
SWEEPS: dict[str, Sweep] = {  # of MNIST
    "cohort": ((10, 30, 100, 300, 1000), {}),
    "samples": ((10, 30, 100, 300), {"clients": 500}),
    "hidden": ((10, 50, 200, 800), {"clients": 500}),
}


class BenchmarkError(Exception):
    """A contender cannot be installed or timed."""


def log(text: str) -> None:
    """Print progress on standard error."""
    print(text, file=sys.stderr, flush=True)


def environment(name: str, packages: tuple[str, ...] | None, limit: float) -> Path:
    """The interpreter of a peer's own environment, which is made unless it is up to date."""
    if packages is None:
        return Path(sys.executable)
    home, requirements = BUILD / name, "\n".join(packages)
    marker, python = home / "installed", home / "bin" / "python"
    if marker.exists() and marker.read_text() == requirements:
        return python
    log(f"{name}: installing {' '.join(packages)}")
    home.mkdir(parents=True, exist_ok=True)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile", *packages]
    for command in ([sys.executable, "-m", "venv", "--clear", str(home)], pip):
        try:
            process = subprocess.run(command, capture_output=True, text=True, timeout=limit)
        except subprocess.TimeoutExpired:
            raise BenchmarkError(f"not installed after {limit:.0f} s") from None
        if process.returncode:
            raise BenchmarkError(f"not installed: {error_tail(process.stderr)}")
    marker.write_text(requirements)
    return python


def error_tail(text: str) -> str:
    """The last lines of a program's output, on one line."""
    return " · ".join(line.strip() for line in text.strip().splitlines()[-3:]) or "no output"


def run_script(python: Path, script: str, work: w.Work, options: dict, rounds: int, warm_up: int, limit: float) -> dict:
    """Run a script in its own process: its result, with the peak memory of all its processes."""
    with tempfile.TemporaryDirectory() as folder:
        out, errors = Path(folder) / "out.json", Path(folder) / "errors"
        command = [str(python), str(HERE / "peers" / script), "--out", str(out)]
        command += ["--work", json.dumps(w.as_dict(work)), "--options", json.dumps(options)]
        command += ["--rounds", str(rounds), "--warm-up", str(warm_up)]
        env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "XLA_FLAGS")}
        if python == Path(sys.executable):
            env["PYTHONPATH"] = str(HERE.parent)  # this checkout, whatever is installed
        env["FLWR_HOME"] = str(Path(folder) / "flower")
        with errors.open("w") as log_file:
            command += ["--started", str(time.monotonic())]
            process = subprocess.Popen(
                command, stdout=log_file, stderr=log_file, env=env, cwd=folder, start_new_session=True
            )
            peaks: dict[int, float] = {}
            watch = threading.Thread(target=watch_memory, args=(process, peaks), daemon=True)
            watch.start()
            try:
                process.wait(timeout=limit)
            except subprocess.TimeoutExpired:
                raise BenchmarkError(f"not done after {limit:.0f} s") from None
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
                watch.join()
        if process.returncode or not out.exists():
            raise BenchmarkError(f"exit {process.returncode}: {error_tail(errors.read_text(errors='replace'))}")
        result = json.loads(out.read_text())
        result["memory_mb"] = max(sum(peaks.values()), result.get("memory_mb", 0.0))
        return result


def watch_memory(process: subprocess.Popen, peaks: dict[int, float]) -> None:
    """Record the peak memory of a process and its descendants in MB, once a second; shared memory counts for each."""
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
    """The median, the quartiles and the extremes of some times."""
    low, middle, high = statistics.quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else seconds * 3
    extremes = {"min": min(seconds), "max": max(seconds)}
    return {"median": middle, "q1": low, "q3": high, "rounds": len(seconds)} | extremes


def time_contender(name: str, work: w.Work, rounds: int, warm_up: int, ends: float, limit: float) -> dict:
    """Time one contender at each of its settings; the fastest counts."""
    contender, results, reasons = CONTENDERS[name], {}, []
    start = time.monotonic()
    python = environment(name, contender.packages, max(ends - start, 1.0))
    installed = time.monotonic() - start
    settings = contender.settings_for(work)
    for setting, options in settings.items():
        log(f"{name}: {setting}")
        try:
            left = max(min(ends - time.monotonic(), limit), 1.0)
            result = run_script(python, contender.script, work, options, rounds, warm_up, left)
            results[setting] = result | {"spread": spread(result["seconds"])}
            log(f"{name}: {setting}: {results[setting]['spread']['median']:.4f} s a round")
        except BenchmarkError as reason:
            reasons.append(f"{setting}: {reason}")
            log(f"{name}: {reasons[-1]}")
    if not results:
        raise BenchmarkError("; ".join(reasons))
    best = min(results, key=lambda setting: results[setting]["spread"]["median"])
    result = results[best]
    models = 2 if settings[best].get("personal") else 1
    check = {"steps": result["steps"], "steps_asked": work.steps * models}
    check |= {what: result[what] for what in ("loss_before", "loss_after", "rounds_played")}
    return {
        "seconds": result["spread"]["median"],
        "spread": result["spread"],
        "setting": best,
        "settings": {setting: result["spread"]["median"] for setting, result in results.items()},
        "failed_settings": reasons,
        "start_seconds": result["start_seconds"],
        "compile_seconds": max(result["first_round_seconds"] - result["spread"]["median"], 0.0),
        "flops": w.flops(work, models),
        "versions": result["versions"],
        "check": check,
        "did_the_work": result["steps"] == check["steps_asked"] and result["loss_after"] < result["loss_before"],
        "memory_mb": result["memory_mb"],
        "install_seconds": installed,
        "can": contender.can,
        "gemm_gflops": max((result.get("gemm_gflops", 0.0) for result in results.values()), default=0.0),
    }


def sweep(names: list[str], work: w.Work, rounds: int) -> list[dict]:
    """Rounds a second and memory of this project along the size of the cohort, of a client's data and of the model."""
    points = []
    for along, (values, others) in SWEEPS.items():
        for value in values:
            point: dict[str, Any] = {"along": along, "value": value}
            for name in names:
                sized = dataclasses.replace(work, **others, **{along: value})
                log(f"{name}: {along} {value}")
                try:
                    (options,) = CONTENDERS[name].settings_for(sized).values()
                    result = run_script(Path(sys.executable), CONTENDERS[name].script, sized, options, rounds, 3, 600)
                    times = spread(result["seconds"])
                    point[name] = {"rounds_per_second": 1 / times["median"], "spread": times}
                    point[name]["memory_mb"] = result["memory_mb"]
                except BenchmarkError as reason:
                    point[name] = {"rounds_per_second": None, "reason": str(reason)}
            points.append(point)
    return points


def machine() -> dict[str, Any]:
    """The machine, and its load before the benchmark."""
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
    """Time the contenders with these names."""
    total_seconds, contender_seconds = QUICK if quick else PATIENT
    ends = time.monotonic() + total_seconds
    host = machine()
    log("matrix products")
    rates = run_script(Path(sys.executable), "gemm.py", work, {}, 1, 0, 300)["gemm"]
    peers: dict[str, Any] = {}
    for name in CONTENDERS:
        ours = CONTENDERS[name].packages is None
        usual = 5 if quick else 15
        if ours:  # seconds of each, not an instant of the one that is fast
            usual = 300 if work.name == "mnist" else 2 * usual
        try:
            if name not in names:
                raise BenchmarkError("not selected")
            peers[name] = time_contender(name, work, rounds or usual, 10 if ours else 2, ends, contender_seconds)
            if peers[name]["gemm_gflops"]:
                rates[name] = peers[name]["gemm_gflops"]
        except BenchmarkError as reason:
            if name in names:
                log(f"{name}: not timed: {reason}")
            peers[name] = {"seconds": None, "reason": str(reason), "can": CONTENDERS[name].can}
    flops, peak = w.flops(work, models=2), max(rates.values())
    return {
        "seconds_per_round": {name: peer["seconds"] for name, peer in peers.items()},
        "naive_at_peak": flops / peak / 1e9,
        "gemm_gflops": peak,
        "gemm": rates,
        "flops_with_personal": flops,
        "peers": peers,
        "sweeps": sweep([name for name in SWEPT if name in names], work, 10) if sweeps else [],
        "work": w.as_dict(work),
        "machine": host,
        "command": " ".join(["make bench", f"ARGS={shlex.quote(shlex.join(sys.argv[1:]))}"][: len(sys.argv)]),
    }


def read_results(path: Path) -> dict[str, Any]:
    """The results by work, of a document with one or several."""
    document = json.loads(path.read_text())
    return {document["work"]["name"]: document} if "work" in document else document


def main() -> None:
    parser = argparse.ArgumentParser(description="The engine against its peers.")
    parser.add_argument(
        "--quick", action="store_true", help="at most 10 minutes a work, installation included; no sweeps"
    )
    parser.add_argument("--json", action="store_true", help="one JSON document instead of tables")
    parser.add_argument("--only", default=",".join(CONTENDERS), help=f"some of {','.join(CONTENDERS)}")
    parser.add_argument("--rounds", type=int, help="timed rounds of each")
    parser.add_argument("--work", default="mnist", help=f"some of {','.join(w.WORKS)}, or all")
    parser.add_argument("--figure", type=Path, help="draw the results into this file; of several works into FILE-WORK")
    parser.add_argument("--output", type=Path, help="write the JSON document to this file too")
    parser.add_argument("--from", dest="stored", type=Path, help="time nothing: read what --output wrote")
    parser.add_argument(
        "--sizes", type=json.loads, default={}, help="other sizes, as JSON, to try the benchmark itself"
    )
    arguments = parser.parse_args()
    names = arguments.only.split(",")
    works = list(w.WORKS) if arguments.work == "all" else arguments.work.split(",")
    for option, values, known in (("--only", names, CONTENDERS), ("--work", works, w.WORKS)):
        unknown = set(values) - set(known)
        if unknown:
            parser.error(f"{option} knows {', '.join(known)}, not {', '.join(sorted(unknown))}")
    results = {} if arguments.stored is None else read_results(arguments.stored)
    works = list(results) or works
    for name in works:
        if arguments.stored is None:
            sweeps = name == "mnist" and not arguments.quick and not arguments.sizes
            work = w.from_dict({"name": name, **arguments.sizes})
            results[name] = bench(names, work, arguments.quick, arguments.rounds, sweeps)
        if arguments.figure:
            path = arguments.figure
            show.figure(results[name], path if len(works) == 1 else path.with_stem(f"{path.stem}-{name}"))
    document = results if len(works) > 1 else results[works[0]]
    if arguments.output:
        arguments.output.write_text(json.dumps(document, indent=2) + "\n")
    print(json.dumps(document, indent=2) if arguments.json else "\n\n".join(map(show.table, results.values())))


if __name__ == "__main__":
    main()

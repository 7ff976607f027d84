"""A whole deployment on one machine: a SuperLink, five SuperNodes of three privacy levels, training to a table.

    python demo.py                # everything in a temporary folder, everything stopped afterwards
    python demo.py --simulate 20  # no SuperNodes: twenty virtual clients in Flower's simulation engine
    python demo.py --keep DIR     # in a folder of your choice, which stays

``Fleet`` starts and stops the processes; the project's tests use it too.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

HERE = Path(__file__).parent
OWNERS = {"anna": "open", "ben": "relaxed", "cleo": "relaxed", "dan": "strict", "eve": None}  # Eve does not say


class Fleet:
    """Flower's processes, each in a group of its own, with logs, ports and a home of their own; nothing outlives it."""

    def __init__(self, folder: Path, connection: str = "insecure = true"):
        self.folder, self.port = folder, free_port()
        self.processes: dict[str, subprocess.Popen] = {}
        (folder / "home").mkdir(parents=True, exist_ok=True)
        self.scheme = "http" if "insecure" in connection else "https"
        (folder / "home" / "config.toml").write_text(
            f'[superlink]\ndefault = "local"\n\n[superlink.local]\naddress = "127.0.0.1:{self.port}"\n{connection}\n'
        )
        binaries = Path(sys.executable).parent
        self.env = os.environ | {
            "PATH": f"{binaries}{os.pathsep}{os.environ.get('PATH', '')}",
            "FLWR_HOME": str(folder / "home"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": "1",
            "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),  # every message is a new process
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        for name in list(self.processes):
            self.stop(name, signal.SIGTERM)
        for orphan in self.all_of("fl"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(orphan, signal.SIGKILL)

    def start(self, name: str, *command: str) -> subprocess.Popen:
        """Start a process that writes to a log of its name."""
        with open(self.log(name), "a") as log:
            process = subprocess.Popen(
                command, stdout=log, stderr=log, env=self.env, cwd=self.folder, start_new_session=True
            )
        self.processes[name] = process
        return process

    def stop(self, name: str, how: signal.Signals = signal.SIGKILL) -> None:
        """Stop a process with all that it started."""
        process = self.processes.pop(name)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, how)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def all_of(self, command: str) -> list[int]:
        """The processes of this fleet with this in their command, also those whose parents are gone."""
        found, mine = [], f"FLWR_HOME={self.env['FLWR_HOME']}\0".encode()
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if mine in (entry / "environ").read_bytes() and command.encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
        return found

    def log(self, name: str) -> Path:
        """Where a process writes."""
        return self.folder / f"{name}.log"

    def superlink(self, *options: str) -> None:
        """Start the SuperLink and wait until it serves."""
        secure = options or ("--insecure",)
        self.start("superlink", "flower-superlink", *secure, "--host", "127.0.0.1", "--port", str(self.port))
        self.wait_until(self._healthy, 60, "the SuperLink to serve")

    def _healthy(self) -> bool:
        if self.scheme == "https":
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
                return True
            return False
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=1):
            return True
        return False

    def supernode(self, name: str, *options: str, wait: bool = True, **node_config: object) -> None:
        """Start a SuperNode for an owner and wait until it is connected."""
        said = " ".join(f"{key.replace('_', '-')}={json.dumps(value)}" for key, value in node_config.items())
        secure = options or ("--insecure",)
        before = self.log(name).read_text().count("SuperNode ID:") if self.log(name).exists() else 0
        address = ("--superlink", f"127.0.0.1:{self.port}", "--host", "127.0.0.1", "--port", str(free_port()))
        self.start(name, "flower-supernode", *secure, *address, "--node-config", said)
        if wait:
            self.wait_until(
                lambda: self.log(name).read_text().count("SuperNode ID:") > before, 60, f"{name} to connect"
            )

    def flwr(self, *arguments: str) -> str:
        """What the command ``flwr`` prints."""
        done = subprocess.run(
            ["flwr", *arguments], env=self.env, cwd=self.folder, capture_output=True, text=True, timeout=120
        )
        if done.returncode:
            raise RuntimeError(f"flwr {' '.join(arguments)}: {done.stdout}{done.stderr}")
        return done.stdout

    def submit(self, app: Path, virtual_clients: int = 0, **run_config: object) -> str:
        """Start a run of an app, on the SuperNodes or with virtual clients; its id."""
        said = " ".join(f"{key.replace('_', '-')}={json.dumps(value)}" for key, value in run_config.items())
        settings = ["--run-config", said] if said else []
        if virtual_clients:
            cpus = f"client-resources-num-cpus=1 init-args-num-cpus={len(os.sched_getaffinity(0))}"
            settings += ["--federation-config", f"num-supernodes={virtual_clients} {cpus}"]
        answer = json.loads(self.flwr("run", str(app), "local", *settings, "--format", "json"))
        if "run-id" not in answer:
            raise RuntimeError(f"the run was not taken: {answer}")
        return str(answer["run-id"])

    def follow(self, run: str) -> None:
        """Have what the ServerApp says written to a log of the run."""
        self.start(f"run {run}", "flwr", "log", run, "local", "--stream")

    def status(self, run: str) -> str:
        """How a run stands: running, finished:completed, finished:failed and so on."""
        answer = json.loads(self.flwr("list", "local", "--run-id", run, "--format", "json"))
        return answer["runs"][0]["status"]

    def wait_for(self, run: str, done: Path, seconds: float) -> None:
        """Wait until a run has written a file, its last, or has failed."""
        failed_at = time.monotonic() + 15

        def is_done() -> bool:
            nonlocal failed_at
            if not done.exists() and time.monotonic() > failed_at:
                failed_at = time.monotonic() + 15
                status = self.status(run)
                if status.startswith("finished") and not done.exists():
                    raise RuntimeError(f"run {run} is {status}; see {self.log('superlink')}")
            return done.exists()

        self.wait_until(is_done, seconds, f"run {run}")

    def wait_until(self, holds, seconds: float, what: str) -> None:  # type: ignore[no-untyped-def]
        """Wait until something holds, so long and no longer."""
        until = time.monotonic() + seconds
        while not holds():
            if time.monotonic() > until:
                raise TimeoutError(f"waited {seconds:g} s for {what}; logs are in {self.folder}")
            time.sleep(0.2)


def free_port() -> int:
    """A port of this machine that nobody uses."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def main() -> None:
    """Run the demonstration."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--keep", type=Path, help="work in this folder and leave it there")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--simulate", type=int, default=0, metavar="N", help="with N virtual clients")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with contextlib.ExitStack() as stack:
        folder = arguments.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="flower-demo-")))
        fleet = stack.enter_context(Fleet(folder.resolve()))
        begun = time.monotonic()
        out, ledger = fleet.folder / "run", fleet.folder / "population.ledger"
        settings = {"out": str(out), "ledger": str(ledger), "rounds": arguments.rounds}
        if arguments.simulate:
            fleet.superlink("--insecure", "--simulation")
            run = fleet.submit(HERE, arguments.simulate, least_clients=arguments.simulate, **settings)
        else:
            fleet.superlink()
            start_owners(fleet)
            run = fleet.submit(HERE, **settings)
        print(f"run {run} at 127.0.0.1:{fleet.port}, logs in {fleet.folder}", flush=True)
        show_progress(fleet, run, out)
        print_results(out, ledger)
        print(f"{time.monotonic() - begun:.0f} seconds in all; stopping everything", flush=True)


def start_owners(fleet: Fleet) -> None:
    """A SuperNode for each owner, with the level that the owner chose."""
    for number, (owner, level) in enumerate(OWNERS.items()):
        choice = {} if level is None else {"privacy": level}
        fleet.supernode(owner, wait=False, partition_id=number, directory=str(fleet.folder / owner), **choice)
    print(", ".join(f"{owner}: {level or 'does not say'}" for owner, level in OWNERS.items()), flush=True)


def show_progress(fleet: Fleet, run: str, out: Path) -> None:
    """Wait until a run is done, and print what its ServerApp says about rounds and clients."""
    fleet.follow(run)
    with open(fleet.log(f"run {run}")) as said:

        def done() -> bool:
            for line in said:
                if "round " in line or "client" in line:
                    print(line.split(":", 1)[-1].strip(), flush=True)
            return (out / "summary.json").exists()

        fleet.wait_until(done, 240, f"run {run}")


def print_results(out: Path, ledger: Path) -> None:
    """The table, and what the ledger knows."""
    from fedhdp.results.schema import Summary
    from fedhdp.results.store import read_value
    from fedhdp.results.tables import format_table

    variants = read_value(out / "summary.json", Summary).variants
    print("\n" + format_table(variants), flush=True)
    show = [Path(sys.executable).parent / "fedhdp", "ledger", "show", ledger]
    print("\n" + subprocess.run(show, capture_output=True, text=True, check=True).stdout, flush=True)


if __name__ == "__main__":
    main()

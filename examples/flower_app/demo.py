"""A deployment on one machine: a SuperLink, five SuperNodes with three privacy levels, and a table of results.

    python demo.py                # in a temporary directory; every process is stopped afterwards
    python demo.py --simulate 20  # no SuperNodes: twenty virtual clients; needs flwr[simulation]
    python demo.py --keep DIR     # in a directory that stays

``Fleet`` starts and stops the processes; the project's tests use it too.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path

APP = Path(__file__).parent
LEVEL_OF_OWNER = {"anna": "open", "ben": "relaxed", "cleo": "relaxed", "dan": "strict", "eve": None}  # Eve chooses none


class Fleet:
    """Flower's processes, each in its own process group, with separate logs, ports and home directory.

    Args:
        directory: Where logs and Flower's home directory are.
        connection: How ``flwr`` connects to the SuperLink, in the words of Flower's config.toml.
    """

    def __init__(self, directory: Path, connection: str = "insecure = true"):
        self.directory, self.port = directory, free_port()
        self.processes: dict[str, subprocess.Popen] = {}
        (directory / "home").mkdir(parents=True, exist_ok=True)
        self.is_https = "insecure" not in connection
        (directory / "home" / "config.toml").write_text(
            f'[superlink]\ndefault = "local"\n\n[superlink.local]\naddress = "127.0.0.1:{self.port}"\n{connection}\n'
        )
        binaries = Path(sys.executable).parent
        self.env = os.environ | {
            "PATH": f"{binaries}{os.pathsep}{os.environ.get('PATH', '')}",
            "FLWR_HOME": str(directory / "home"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": "1",
            "JAX_COMPILATION_CACHE_DIR": str(directory / "compiled"),  # every message starts a process
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        for name in list(self.processes):
            self.stop(name, signal.SIGTERM)
        for process_id in self.process_ids("fl"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process_id, signal.SIGKILL)

    def start(self, name: str, *command: str) -> None:
        """Start a process that writes to a log of its name."""
        with open(self.log(name), "a") as log:
            self.processes[name] = subprocess.Popen(
                command, stdout=log, stderr=log, env=self.env, cwd=self.directory, start_new_session=True
            )

    def stop(self, name: str, stop_signal: signal.Signals = signal.SIGKILL) -> None:
        """Stop a process and all processes that it started."""
        process = self.processes.pop(name)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, stop_signal)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def process_ids(self, command: str) -> list[int]:
        """The processes of this fleet with a word in their command, orphans included; needs Linux's /proc."""
        process_ids, home = [], f"FLWR_HOME={self.env['FLWR_HOME']}\0".encode()
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if home in (entry / "environ").read_bytes() and command.encode() in (entry / "cmdline").read_bytes():
                    process_ids.append(int(entry.name))
        return process_ids

    def log(self, name: str) -> Path:
        """The log of a process."""
        return self.directory / f"{name}.log"

    def superlink(self, *options: str) -> None:
        """Start the SuperLink and wait until it serves."""
        address = ("--host", "127.0.0.1", "--port", str(self.port))
        self.start("superlink", "flower-superlink", *(options or ("--insecure",)), *address)
        self.wait_until(self._is_serving, 60, "the SuperLink to serve")

    def _is_serving(self) -> bool:
        with contextlib.suppress(OSError):
            if self.is_https:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
            else:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=1).close()
            return True
        return False

    def supernode(self, name: str, *options: str, wait: bool = True, **node_config: object) -> None:
        """Start an owner's SuperNode and, by default, wait until it is connected."""
        connections = self._connections(name)
        address = ("--superlink", f"127.0.0.1:{self.port}", "--host", "127.0.0.1", "--port", str(free_port()))
        config = ("--node-config", flower_config(node_config))
        self.start(name, "flower-supernode", *(options or ("--insecure",)), *address, *config)
        if wait:
            self.wait_until(lambda: self._connections(name) > connections, 60, f"{name} to connect")

    def _connections(self, name: str) -> int:
        return self.log(name).read_text().count("SuperNode ID:") if self.log(name).exists() else 0

    def flwr(self, *arguments: str) -> str:
        """The output of the command ``flwr``.

        Raises:
            RuntimeError: If it fails.
        """
        process = subprocess.run(
            ["flwr", *arguments], env=self.env, cwd=self.directory, capture_output=True, text=True, timeout=120
        )
        if process.returncode:
            raise RuntimeError(f"flwr {' '.join(arguments)}: {process.stdout}{process.stderr}")
        return process.stdout

    def submit(self, app: Path, virtual_clients: int = 0, **run_config: object) -> str:
        """Start a run of an app and return its id.

        Args:
            app: The app's directory.
            virtual_clients: The number of simulated clients; 0: run on the SuperNodes.
            **run_config: Changes of the app's configuration; underscores in keys become hyphens.
        """
        options = ["--run-config", flower_config(run_config)] if run_config else []
        if virtual_clients:
            resources = f"client-resources-num-cpus=1 init-args-num-cpus={os.cpu_count()}"
            options += ["--federation-config", f"num-supernodes={virtual_clients} {resources}"]
        answer = json.loads(self.flwr("run", str(app), "local", *options, "--format", "json"))
        if "run-id" not in answer:
            raise RuntimeError(f"the run was not accepted: {answer}")
        return str(answer["run-id"])

    def follow(self, run: str) -> None:
        """Write the ServerApp's output to a log of the run."""
        self.start(f"run {run}", "flwr", "log", run, "local", "--stream")

    def status(self, run: str) -> str:
        """A run's status: running, finished:completed, finished:failed and so on."""
        answer = json.loads(self.flwr("list", "local", "--run-id", run, "--format", "json"))
        return answer["runs"][0]["status"]

    def wait_for(self, run: str, condition: Callable[[], bool], seconds: float) -> None:
        """Wait until a condition holds, which a run that works will bring about.

        Raises:
            RuntimeError: If the run finishes and the condition does not hold.
            TimeoutError: If it takes longer.
        """
        next_status = time.monotonic() + 15

        def is_done() -> bool:
            nonlocal next_status
            if not condition() and time.monotonic() > next_status:
                next_status = time.monotonic() + 15
                status = self.status(run)
                if status.startswith("finished") and not condition():
                    raise RuntimeError(f"run {run} is {status}:\n{self.log(f'run {run}').read_text()}")
            return condition()

        self.wait_until(is_done, seconds, f"run {run}")

    def wait_until(self, condition: Callable[[], object], seconds: float, description: str) -> None:
        """Wait until a condition holds.

        Raises:
            TimeoutError: If it takes longer.
        """
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(f"waited {seconds:g} s for {description}; logs are in {self.directory}")
            time.sleep(0.2)


def flower_config(values: Mapping[str, object]) -> str:
    """Values in the form of ``--run-config`` and ``--node-config``."""
    return " ".join(f"{key.replace('_', '-')}={json.dumps(value)}" for key, value in values.items())


def free_port() -> int:
    """A free port of this machine."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def main() -> None:
    """Run the demonstration."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--keep", type=Path, metavar="DIR", help="work in this directory, which stays")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--simulate", type=int, default=0, metavar="N", help="with N virtual clients")
    arguments = parser.parse_args()
    if arguments.simulate and importlib.util.find_spec("ray") is None:
        parser.error("--simulate needs Flower's simulation engine: pip install 'flwr[simulation]'")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with contextlib.ExitStack() as stack:
        directory = arguments.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="flower-demo-")))
        fleet = stack.enter_context(Fleet(directory.resolve()))
        started = time.monotonic()
        out, ledger = fleet.directory / "run", fleet.directory / "population.ledger"
        run_config = {"out": str(out), "ledger": str(ledger), "rounds": arguments.rounds}
        if arguments.simulate:
            fleet.superlink("--insecure", "--simulation")
            run_config["min_available_clients"] = arguments.simulate
        else:
            fleet.superlink()
            start_supernodes(fleet)
        run = fleet.submit(APP, arguments.simulate, **run_config)
        print(f"run {run} at 127.0.0.1:{fleet.port}, logs in {fleet.directory}", flush=True)
        show_progress(fleet, run, out)
        print_results(out, ledger)
        print(f"{time.monotonic() - started:.0f} seconds in all; stopping everything", flush=True)


def start_supernodes(fleet: Fleet) -> None:
    """Start a SuperNode for each owner, with the level that the owner chose."""
    for number, (owner, level) in enumerate(LEVEL_OF_OWNER.items()):
        privacy = {} if level is None else {"privacy": level}
        fleet.supernode(owner, wait=False, partition_id=number, directory=str(fleet.directory / owner), **privacy)
    print(", ".join(f"{owner}: {level or 'no choice'}" for owner, level in LEVEL_OF_OWNER.items()), flush=True)


def show_progress(fleet: Fleet, run: str, out: Path) -> None:
    """Wait until a run is done, and print what its ServerApp logs about rounds and clients."""
    fleet.follow(run)
    with open(fleet.log(f"run {run}")) as log:

        def is_done() -> bool:
            for line in log:
                if "round " in line or "client" in line:
                    print(line.split(":", 1)[-1].strip(), flush=True)
            return (out / "summary.json").exists()

        fleet.wait_for(run, is_done, 240)


def print_results(out: Path, ledger: Path) -> None:
    """Print the table of results and the ledger."""
    from fedhdp.results.schema import Summary
    from fedhdp.results.store import read_value
    from fedhdp.results.tables import format_table

    print("\n" + format_table(read_value(out / "summary.json", Summary).variants), flush=True)
    command = [Path(sys.executable).parent / "fedhdp", "ledger", "show", ledger]
    print("\n" + subprocess.run(command, capture_output=True, text=True, check=True).stdout, flush=True)


if __name__ == "__main__":
    main()

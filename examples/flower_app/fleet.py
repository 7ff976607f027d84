"""Flower's processes on one machine: a SuperLink, SuperNodes and runs, each with a log of its own.

``demo.py``, the project's tests and its benchmark use it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path

START_SECONDS = 300  # a machine with too much to do is slow to start a process
COMMAND_SECONDS = 300
STATUS_EVERY_SECONDS = 10  # the command that tells a run's status takes a second of CPU time
EXCEPTION = re.compile(r"^[\w.]*(Error|Exception|Exit)\b.*", re.MULTILINE)
WAITING = re.compile("waiting for .*")  # how fedhdp's server says what it waits for
COLOR = re.compile(r"\x1b\[\d+m")


class FleetError(RuntimeError):
    """A process or a run failed, or makes no progress."""


class Fleet:
    """Flower's processes, each in its own process group, with separate logs, ports and home directory.

    Args:
        directory: Where logs and Flower's home directory are. Files that a run changes in it are its progress.
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
        for process in self.processes.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
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

    def log_text(self, name: str) -> str:
        """What a process has logged, without colors."""
        log = self.log(name)
        return COLOR.sub("", log.read_text(errors="replace")) if log.exists() else ""

    def reason(self, name: str, pattern: re.Pattern = EXCEPTION) -> str:
        """Why a process fails: what matches last in its log, or the log's last line, and where the log is."""
        text = self.log_text(name)
        matches = [match.group() for match in pattern.finditer(text)]
        lines = [line.strip() for line in text.splitlines() if line.strip()] or ["nothing"]
        return f"{(matches or lines)[-1]} (log: {self.log(name)})"

    def superlink(self, *options: str) -> None:
        """Start the SuperLink and wait until it serves."""
        address = ("--host", "127.0.0.1", "--port", str(self.port))
        self.start("superlink", "flower-superlink", *(options or ("--insecure",)), *address)
        self._wait_for_start("superlink", self._is_serving)

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
            self._wait_for_start(name, lambda: self._connections(name) > connections)

    def _connections(self, name: str) -> int:
        return self.log_text(name).count("SuperNode ID:")

    def _wait_for_start(self, name: str, condition: Callable[[], bool]) -> None:
        def is_started() -> bool:
            self.check_processes(name)
            return condition()

        self.wait_until(is_started, START_SECONDS, f"{name} to start")

    def check_processes(self, *names: str) -> None:
        """Raise ``FleetError`` if one of these processes has ended."""
        for name in names:
            if (status := self.processes[name].poll()) is not None:
                raise FleetError(f"{name} ended with status {status}: {self.reason(name)}")

    def flwr(self, *arguments: str) -> str:
        """The output of the command ``flwr``.

        Raises:
            FleetError: If it fails.
        """
        command = ["flwr", *arguments]
        try:
            process = subprocess.run(
                command, env=self.env, cwd=self.directory, capture_output=True, text=True, timeout=COMMAND_SECONDS
            )
        except subprocess.TimeoutExpired as error:
            raise FleetError(f"{' '.join(command)} took more than {COMMAND_SECONDS} s") from error
        if process.returncode:
            raise FleetError(f"{' '.join(command)}: {' '.join((process.stdout + process.stderr).split())}")
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
            raise FleetError(f"the run was not accepted: {answer}")
        return str(answer["run-id"])

    def follow(self, run: str) -> None:
        """Write the ServerApp's output to a log of the run."""
        self.start(f"run {run}", "flwr", "log", run, "local", "--stream")

    def status(self, run: str) -> str:
        """A run's status: running, finished:completed and so on; unknown where the machine has too much to do."""
        try:
            answer = json.loads(self.flwr("list", "local", "--run-id", run, "--format", "json"))
        except FleetError:
            return "unknown"
        return answer["runs"][0]["status"]

    def wait_for(self, run: str, condition: Callable[[], bool], seconds: float) -> None:
        """Wait until a condition holds, which a run that works will bring about.

        Args:
            run: The run.
            condition: The condition.
            seconds: How long the run may make no progress.

        Raises:
            FleetError: If the run or the SuperLink ends and the condition does not hold, or there is no progress.
        """
        next_status = time.monotonic() + STATUS_EVERY_SECONDS

        def is_done() -> bool:
            nonlocal next_status
            if condition():
                return True
            self.check_processes("superlink")
            if time.monotonic() > next_status:
                status = self.status(run)
                if status.startswith("finished") and not condition():
                    raise FleetError(f"run {run} is {status}: {self.reason(f'run {run}')}")
                next_status = time.monotonic() + STATUS_EVERY_SECONDS
            return False

        self.wait_until(is_done, seconds, f"run {run}", log=f"run {run}")

    def wait_until(
        self, condition: Callable[[], object], seconds: float, description: str, log: str | None = None
    ) -> None:
        """Wait until a condition holds.

        Args:
            condition: The condition.
            seconds: How long there may be no progress.
            description: What is waited for.
            log: The process whose log says why it takes long.

        Raises:
            FleetError: If there is no progress for so long.
        """
        progress, checked = self._progress(), time.monotonic()
        while not condition():
            if time.monotonic() > checked + seconds:
                previous, progress, checked = progress, self._progress(), time.monotonic()
                if progress == previous:
                    reason = f": {self.reason(log, WAITING)}" if log else ""
                    raise FleetError(f"no progress for {seconds:g} s in waiting for {description}{reason}")
            time.sleep(0.2)

    def _progress(self) -> dict[str, tuple[int, int]]:
        """The size and time of each file of runs and clients. Logs are left out: they also say that nothing happens."""
        files = {}
        for folder, folders, names in os.walk(self.directory):
            folders[:] = [name for name in folders if name != "home"]
            for name in names:
                path = os.path.join(folder, name)
                with contextlib.suppress(OSError):
                    if not name.endswith((".log", "-shm")):
                        files[path] = (os.stat(path).st_size, os.stat(path).st_mtime_ns)
        return files


def flower_config(values: Mapping[str, object]) -> str:
    """Values in the form of ``--run-config`` and ``--node-config``."""
    return " ".join(f"{key.replace('_', '-')}={json.dumps(value)}" for key, value in values.items())


def free_port() -> int:
    """A free port of this machine."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]

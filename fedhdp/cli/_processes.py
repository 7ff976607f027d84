"""`fedhdp run` in several processes: start them, watch them, and end all where one has died.

The command that the user starts is a supervisor. It starts its processes by the same command line, with an environment
variable that says which of the run's processes each is. Of several machines each has a supervisor with one process.
"""

from __future__ import annotations

import errno
import glob
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import IO, NamedTuple

from fedhdp.errors import ConfigError, FedHDPError

VARIABLE = "FEDHDP_PROCESS"
LOST = 75  # the exit code of a process that another one's death has ended
MAX_REASON = 200  # characters
END_SECONDS = 60.0  # for the other processes to end after the first
SLURM = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")  # as JAX has it


class Place(NamedTuple):
    """Which of a run's processes a worker is."""

    processes: int
    number: int
    coordinator: str | None  # None: as JAX finds it, under Slurm
    note: str = ""  # a file for the command that resumes the run

    def variable(self) -> str:
        """The text by which an environment variable names the place."""
        return json.dumps(self)

    @classmethod
    def of(cls, variable: str) -> Place:
        """The place that an environment variable names."""
        return cls(*json.loads(variable))


class Worker(NamedTuple):
    """A process that a supervisor has started, and what it wrote besides what the user sees."""

    place: Place
    process: subprocess.Popen[bytes]
    errors: Path

    @property
    def failure(self) -> str:
        """The last line of what it wrote."""
        lines = self.errors.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""


def run_in_processes(
    processes: int | None, coordinator: str | None, process_id: int | None, start: Callable[[], None]
) -> None:
    """Call a function in this process, or with several processes in the first of them; the others follow it."""
    if VARIABLE in os.environ:
        _work(Place.of(os.environ[VARIABLE]), start)
        return
    places = find_places(processes, coordinator, process_id, os.environ)
    if not places:
        start()
        return
    sys.exit(supervise(places))


def find_places(
    processes: int | None, coordinator: str | None, process_id: int | None, environment: Mapping[str, str]
) -> list[Place]:
    """The processes to start here; none where the run is one process.

    Raises:
        ConfigError: If the options do not fit each other.
    """
    if processes is not None and processes < 1:
        raise ConfigError(f"--processes must be at least 1, got {processes}", "processes", processes)
    if coordinator is not None or process_id is not None:
        if processes is None or coordinator is None or process_id is None:
            rule = "--coordinator, --process-id and --processes are given together, on every machine"
            raise ConfigError(rule, "coordinator", coordinator)
        if not 0 <= process_id < processes:
            message = f"--process-id must be from 0 to {processes - 1}, got {process_id}"
            raise ConfigError(message, "process_id", process_id)
        if processes == 1:
            return []
        _check_address(coordinator, process_id == 0)
        return [Place(processes, process_id, coordinator)]
    if processes is not None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        return [Place(processes, number, address) for number in range(processes)] if processes > 1 else []
    if all(name in environment for name in SLURM):
        tasks = int(environment["SLURM_NTASKS"])
        in_step = int(environment.get("SLURM_STEP_NUM_TASKS", tasks))  # 1 in the shell of salloc, whatever the job has
        return [Place(tasks, int(environment["SLURM_PROCID"]), None)] if min(tasks, in_step) > 1 else []
    return []


def _check_address(coordinator: str, is_first: bool) -> None:
    """Refuse an address that cannot be used: JAX would wait for minutes, or crash.

    Raises:
        ConfigError: If it is not HOST:PORT, the host cannot be resolved, or process 0's port is in use.
    """
    host, _, port = coordinator.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        rule = "--coordinator must be HOST:PORT with a port from 1 to 65535"
        raise ConfigError(f"{rule}, got {coordinator}", "coordinator", coordinator)
    try:
        socket.getaddrinfo(host, int(port))
    except OSError as error:
        message = f"--coordinator {coordinator}: the host name cannot be resolved ({error.strerror})"
        raise ConfigError(message, "coordinator", coordinator) from error
    if is_first and not _is_free(int(port)):
        message = f"--coordinator {coordinator}: port {port} is in use on this machine"
        raise ConfigError(message, "coordinator", coordinator)


def _is_free(port: int) -> bool:
    """Whether a server can listen on this port, on all addresses of the machine, as JAX's does."""
    families = [(socket.AF_INET, "0.0.0.0"), *([(socket.AF_INET6, "::")] if socket.has_ipv6 else [])]
    for family, everywhere in families:
        try:
            with socket.socket(family) as server:
                server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                server.bind((everywhere, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False
    return True


def supervise(places: Sequence[Place]) -> int:
    """Run this command line in these processes.

    Returns:
        The exit code of process 0, or of the only one; 1 where a process has died.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches process 0 too, which ends the run after its round
    signal.signal(signal.SIGTERM, _end)
    with tempfile.TemporaryDirectory(prefix="fedhdp-") as folder:
        note = Path(folder) / "resume"
        workers: list[Worker] = []
        try:
            for place in places:
                workers.append(_start(place._replace(note=str(note)), len(places), Path(folder)))
            return _watch(workers, note)
        finally:
            for worker in workers:
                worker.process.kill()
                worker.process.wait()


def _end(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


def _start(place: Place, local: int, folder: Path) -> Worker:
    """Start one process; those of this machine share its cores and its GPUs."""
    environment = {**os.environ, VARIABLE: place.variable()}
    if local > 1:
        from fedhdp.devices import available_cores

        environment.setdefault("JAX_NUM_CPU_DEVICES", str(max(1, available_cores() // local)))
        gpus = visible_gpus(os.environ)
        if len(gpus) >= local:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[place.number :: local])
    errors = folder / f"errors-{place.number}"
    with errors.open("wb") as file:
        quiet: int | IO[bytes] | None = None if place.number == 0 else file
        command = [sys.executable, "-m", "fedhdp", *sys.argv[1:]]
        process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=quiet, stderr=quiet)
    return Worker(place, process, errors)


def visible_gpus(environment: Mapping[str, str]) -> list[str]:
    """The GPUs that a process of this environment would see."""
    if "CUDA_VISIBLE_DEVICES" in environment:
        return [gpu for gpu in environment["CUDA_VISIBLE_DEVICES"].split(",") if gpu]
    return [str(number) for number in range(len(glob.glob("/dev/nvidia[0-9]*")))]


def _watch(workers: Sequence[Worker], note: Path) -> int:
    """Wait until the run has ended, or a process has died."""
    first = workers[0]
    while True:
        ended = [worker for worker in workers if worker.process.poll() is not None]
        if any(worker.process.returncode not in (0, LOST) for worker in ended) or first in ended:
            break
        if any(worker.process.returncode == LOST for worker in ended):
            break
        time.sleep(0.05)
    code = first.process.returncode
    if code is not None and code >= 0 and code != LOST and (first.place.number == 0 or code == 0):
        ends = time.monotonic() + END_SECONDS  # the others end too
        while time.monotonic() < ends and any(worker.process.poll() is None for worker in workers):
            time.sleep(0.05)
        return code
    time.sleep(0.5)  # for the others to die of it
    return _report([worker for worker in workers if worker.process.poll() not in (None, 0)], note)


def _report(dead: Sequence[Worker], note: Path) -> int:
    """One line that says which process died; its own error, if it has one."""
    consequences = (LOST, -signal.SIGABRT)  # what JAX does to a process when another one has died
    cause = next((worker for worker in dead if worker.process.returncode not in consequences), dead[0])
    code, place = cause.process.returncode, cause.place
    if 0 < code != LOST:
        line = cause.failure.removeprefix("fedhdp: ")
        print(f"fedhdp: process {place.number} of {place.processes}: {line}", file=sys.stderr)
        return code
    event = f"process {place.number} of {place.processes} died ({signal.Signals(-code).name})" if code < 0 else ""
    if code in consequences:
        reason = _reason_file(place)
        text = f" ({reason.read_text()})" if reason.exists() else ""
        event = (
            f"another process died or is out of reach, which ended process {place.number} of {place.processes}{text}"
        )
    resume = f"; to resume from the last checkpoint: {note.read_text()}" if note.exists() else ""
    print(f"fedhdp: {event}{resume}", file=sys.stderr)
    return 1


def note_resume(command: str) -> None:
    """Tell the supervisor, if there is one, which command resumes the run."""
    if VARIABLE in os.environ:
        place = Place.of(os.environ[VARIABLE])
        Path(place.note).write_text(command)


def _work(place: Place, start: Callable[[], None]) -> None:
    """Be one of the run's processes."""
    _hide_native_output()
    threading.Thread(target=_end_with_supervisor, args=(os.getppid(),), daemon=True).start()
    if place.number == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    from fedhdp.experiments.distributed import START_SECONDS, follow, join, leading

    try:
        where = "" if place.coordinator is None else f" at {place.coordinator}"
        reason = (
            f"not all {place.processes} connected{where} within {START_SECONDS} s, or two have the same --process-id"
        )
        _reason_file(place).write_text(reason)  # where they cannot connect, JAX aborts this process
        join(place.processes, place.number, place.coordinator)
        _reason_file(place).unlink()
        if place.number > 0:
            follow()
            return
        with leading():
            start()
    except Exception as error:
        lost, known = _is_lost(error), isinstance(error, FedHDPError | OSError)
        if not lost and place.number == 0:
            raise
        if lost:
            _reason_file(place).write_text(str(error).splitlines()[0][:MAX_REASON])
        else:  # for the supervisor, which shows it
            line = str(error) if known else f"{type(error).__name__}: {error}"
            print(line.replace("\n", " "), file=sys.stderr, flush=True)
        os._exit(LOST if lost else 2 if known else 1)  # without JAX's own shutdown, which would wait for the others


def _reason_file(place: Place) -> Path:
    """What the supervisor reads where a process ends because of another one."""
    return Path(f"{place.note}-{place.number}")


def _is_lost(error: BaseException | None) -> bool:
    """Whether another process's death is the cause of an error, which may have come up while another was handled."""
    import jax

    words = ("Gloo", "gloo", "coordination", "Coordination", "UNAVAILABLE", "Connection", "heartbeat", "NCCL")
    while error is not None:
        if isinstance(error, jax.errors.JaxRuntimeError) and any(word in str(error) for word in words):
            return True
        error = error.__context__
    return False


def _hide_native_output() -> None:
    """Let only Python write to the standard streams: libraries write there what a process's death leads to."""
    for name, number in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        stream.flush()
        visible = os.dup(number)
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, number)
        os.close(null)
        setattr(sys, name, os.fdopen(visible, "w", buffering=1, encoding="utf-8", errors="replace"))


def _end_with_supervisor(parent: int) -> None:
    """End this process where its supervisor is gone."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(LOST)

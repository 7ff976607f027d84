"""`fedhdp run` in several processes on this machine."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from experiment_helpers import FEDHDP, process, tiny
from helpers import raises_field
from msgspec.structs import replace

from fedhdp.cli._processes import VARIABLE, Place, Worker, _report, find_places, visible_gpus
from fedhdp.errors import ConfigError, RunError
from fedhdp.experiments import Experiment, to_toml
from fedhdp.experiments.distributed import Follower, Message, _fingerprints
from fedhdp.privacy.ledger import Budget, Ledger
from fedhdp.results import Summary, read_arrays, read_value
from fedhdp.results.store import VariantDirectory

LIMIT = 240  # seconds; on a quiet machine a few
ONE_DEVICE = {"JAX_NUM_CPU_DEVICES": "1"}  # of each process


def short(**changes: object) -> Experiment:
    """Three rounds of the tiny experiment."""
    return tiny(rounds=3, evaluate_every=3, checkpoint_seconds=60.0, **changes)


def written(experiment: Experiment, path: Path) -> Path:
    path.write_text(to_toml(experiment))
    return path


def finish(*commands: tuple[list[object], dict[str, str]]) -> list[str]:
    """Run these command lines at the same time: what each writes to standard error."""
    streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    started = [
        subprocess.Popen([*FEDHDP, *map(str, arguments)], env=os.environ | ONE_DEVICE | env, **streams)
        for arguments, env in commands
    ]
    try:
        errors = [process.communicate(timeout=LIMIT)[1] for process in started]
        assert [process.returncode for process in started] == [0] * len(started), errors
    finally:
        for process in started:
            process.kill()
    return errors


def assert_close(first: Path, second: Path) -> None:
    """Two runs of the tiny experiment have the same models, clients' scores and histories within float tolerance."""
    for variant in ("dp-fedavg", "fedhdp"):
        for file in ("model.npz", "scores.npz"):
            first_arrays, second_arrays = (read_arrays(run / variant / file) for run in (first, second))
            assert first_arrays.keys() == second_arrays.keys()
            for name in first_arrays:
                np.testing.assert_allclose(first_arrays[name], second_arrays[name], atol=1e-5)
        histories = [VariantDirectory(run / variant).history() for run in (first, second)]
        assert [row[:4] for row in histories[0]] == [row[:4] for row in histories[1]]
        np.testing.assert_allclose(*([row.value for row in rows] for rows in histories), atol=1e-4)


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Path:
    """The run of one process."""
    directory = tmp_path_factory.mktemp("alone") / "run"
    finish((["run", written(short(), directory.parent / "tiny.toml"), "--out", directory], {}))
    return directory


@pytest.mark.process
@pytest.mark.parametrize("processes", [2, 4])
def test_processes_of_one_machine_have_the_same_result(alone, tmp_path, processes):
    file = written(short(), tmp_path / "tiny.toml")
    (errors,) = finish((["run", file, "--out", tmp_path / "run", "--processes", processes], {}))
    assert_close(alone, tmp_path / "run")
    assert len(re.findall(r"round 3/3", errors)) == 1  # progress of one process
    assert {path.name for path in (tmp_path / "run").iterdir()} == {path.name for path in alone.iterdir()}


@pytest.mark.process
@pytest.mark.parametrize("launcher", ["slurm", "options"])
def test_one_process_on_each_machine(alone, tmp_path, launcher):
    file = written(short(), tmp_path / "tiny.toml")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    commands = []
    for number in range(2):
        arguments = ["run", file, "--out", tmp_path / "run"]
        task = {"SLURM_PROCID": str(number), "SLURM_LOCALID": "0", "SLURM_NTASKS": "2"}
        task |= {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_NODELIST": "localhost"}
        options = ["--coordinator", address, "--process-id", number, "--processes", 2]
        commands.append((arguments, task) if launcher == "slurm" else (arguments + options, {}))
    errors = finish(*commands)
    assert_close(alone, tmp_path / "run")
    assert errors[1] == ""


@pytest.mark.process
def test_ledger_is_charged_once_and_drops_a_group_in_all_processes(tmp_path):
    """Cohorts and noise are drawn, and the budget ends, as one process does it."""
    ledger = tmp_path / "ledger.db"
    experiment = replace(
        tiny(noise_seed=None, ledger=str(ledger), checkpoint_seconds=60.0, evaluate_every=12),
        budgets={"private": Budget(5.0, 1e-4)},
        variants=tiny().variants[1:],
        on_budget_exhausted="drop_group",
    )
    file = written(experiment, tmp_path / "tiny.toml")
    finish((["run", file, "--out", tmp_path / "run", "--processes", 2], {}))
    summary = read_value(tmp_path / "run" / "summary.json", Summary)
    opted_out, private = summary.variants[0].groups
    assert opted_out.rounds == 12
    assert 0 < private.rounds < 12
    with Ledger(ledger, read_only=True) as opened:
        assert sum(cost.rounds for cost in opened.costs("private") if cost.sampling_rate > 0) == private.rounds


@pytest.mark.process
def test_process_that_dies_ends_the_run_which_resumes_with_others(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "1")
    endless = written(tiny(rounds=5000, evaluate_every=5000, checkpoint_seconds=0.2), tmp_path / "tiny.toml")
    directory = tmp_path / "run"
    with process("run", endless, "--out", directory, "--processes", 2) as started:
        ends = time.monotonic() + LIMIT
        while not (directory / "dp-fedavg" / "checkpoint.npz").exists():
            assert started.poll() is None, started.stderr.read()
            assert time.monotonic() < ends
            time.sleep(0.1)
        workers = Path(f"/proc/{started.pid}/task/{started.pid}/children").read_text().split()
        os.kill(int(workers[1]), signal.SIGKILL)
        killed = time.monotonic()
        assert started.wait(LIMIT) == 1
        assert time.monotonic() - killed < 30
        line = started.stderr.read().splitlines()[-1]
    hint = f"to resume from the last checkpoint: fedhdp run --resume {directory}"
    assert line == f"fedhdp: process 1 of 2 died (SIGKILL); {hint}"
    rounds, _ = VariantDirectory(directory / "dp-fedavg").checkpoint_variants()
    options = ["--rounds", rounds + 2, "--allow-more-epsilon"]
    finish((["run", "--resume", directory, *options, "--processes", 3], {}))
    assert read_value(directory / "summary.json", Summary).variants[0].rounds == rounds + 2


@pytest.mark.process
def test_wrong_input_is_one_line(tmp_path):
    file = written(short(), tmp_path / "tiny.toml")
    file.write_text(file.read_text().replace("server_test = 50", "server_test = -1"))
    command = [*FEDHDP, "run", str(file), "--out", str(tmp_path / "run"), "--processes", "2"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    assert (ended.returncode, ended.stdout, ended.stderr.count("\n")) == (2, "", 1)
    assert "server_test" in ended.stderr
    assert not (tmp_path / "run").exists()


SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_NTASKS": "2",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
}


def test_places():
    assert find_places(None, None, None, {}) == []
    assert find_places(1, None, None, {}) == []
    two = find_places(2, None, None, {})
    assert [(place.processes, place.number) for place in two] == [(2, 0), (2, 1)]
    assert two[0].coordinator == two[1].coordinator
    for address in ("localhost:7000", "127.0.0.1:7000", "[::1]:7000"):
        assert find_places(4, address, 3, {}) == [Place(4, 3, address)]
    assert find_places(1, "localhost:7000", 0, {}) == []
    assert find_places(None, None, None, SLURM) == [Place(2, 1, None)]
    assert find_places(None, None, None, SLURM | {"SLURM_NTASKS": "1"}) == []
    assert find_places(None, None, None, SLURM | {"SLURM_STEP_NUM_TASKS": "1"}) == []  # an interactive shell
    assert find_places(1, None, None, SLURM) == []
    batch_script = {name: value for name, value in SLURM.items() if name != "SLURM_STEP_NODELIST"}
    assert find_places(None, None, None, batch_script) == []


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ((0, None, None), "processes"),
        ((2, "node1:7000", None), "coordinator"),
        ((None, "node1:7000", 0), "coordinator"),
        ((2, None, 1), "coordinator"),
        ((2, "node1:7000", 2), "process_id"),
        ((2, "node1:7000", -1), "process_id"),
        ((2, "localhost", 0), "coordinator"),
        ((2, ":7000", 0), "coordinator"),
        ((2, "localhost:", 1), "coordinator"),
        ((2, "localhost:http", 1), "coordinator"),
        ((2, "localhost:0", 1), "coordinator"),
        ((2, "localhost:65536", 1), "coordinator"),
        ((2, "no such host:7000", 1), "coordinator"),
    ],
)
def test_options_that_do_not_fit(options, field):
    with pytest.raises(ConfigError) as raised:
        find_places(*options, {})
    assert raised.value.field == field


@pytest.mark.parametrize("host", ["", "127.0.0.1"])
def test_port_that_another_process_has(host):
    """JAX would crash, or share the port with another run's process 0."""
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        taken.bind((host, 0))
        taken.listen()
        address = f"localhost:{taken.getsockname()[1]}"
        with raises_field("coordinator", ConfigError):
            find_places(2, address, 0, {})
        assert find_places(2, address, 1, {}) == [Place(2, 1, address)]  # process 0 has it
    assert find_places(2, address, 0, {}) == [Place(2, 0, address)]


@pytest.mark.process
def test_process_that_finds_no_others_is_one_line(tmp_path, capfd):
    """JAX aborts it; the supervisor says where it waited."""
    place = Place(2, 1, "localhost:1", str(tmp_path / "note"))
    code = "import fedhdp.experiments.distributed as d; d.START_SECONDS = 1; from fedhdp.cli import main; main()"
    with subprocess.Popen(
        [sys.executable, "-c", code, "run"], env=os.environ | {VARIABLE: place.variable()}
    ) as started:
        assert started.wait(LIMIT) == -signal.SIGABRT
    assert _report([Worker(place, started, tmp_path / "errors")], tmp_path / "note") == 1
    line = capfd.readouterr().err.splitlines()[-1]
    assert line.startswith(
        "fedhdp: another process died or is out of reach, which ended process 1 of 2 (not all 2 connected"
    )
    assert "at localhost:1 within 1 s" in line


def test_other_versions_or_data_are_refused():
    """A process that computes something else must not follow."""
    experiment = short()
    versions, digest = _fingerprints(experiment.load_data())
    follower = Follower()
    for wrong, field in ((("fedhdp 0.0.1", digest), "processes"), ((versions, "0" * 64), "data")):
        with raises_field(field, RunError):
            follower.make(Message("simulate", (to_toml(experiment), [0, 1], *wrong), {}))
    assert follower.simulation is None
    follower.make(Message("simulate", (to_toml(experiment), [0, 1], versions, digest), {}))
    assert follower.simulation is not None


def test_fingerprint_is_of_clients_and_counts():
    data = short().load_data()
    renamed = data._replace(client_ids=np.array([f"client {k}" for k in range(data.num_clients)]))
    others = [renamed, data._replace(train=data.test), data._replace(server_y_N=data.server_y_N[1:])]
    assert len({_fingerprints(each) for each in (data, *others)}) == 4
    assert _fingerprints(short().load_data()) == _fingerprints(data)


def test_gpus_of_an_environment():
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "2,5"}) == ["2", "5"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}) == []

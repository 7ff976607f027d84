"""Runs that are interrupted, killed or damaged: resumed to the bit, or refused."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from experiment_helpers import assert_same_run, files_of, keep_going, process, tiny
from helpers import raises_field
from msgspec.structs import replace

from fedhdp.errors import RunError
from fedhdp.experiments import Experiment, Interrupted, Progress, Watch, resume, run, run_or_resume, to_toml
from fedhdp.privacy import accounting
from fedhdp.results import DamagedRunError, RunDirectory, Summary, read_arrays, read_value
from fedhdp.results.stored import read_runs
from fedhdp.theory.pricing import RoughPricing


class Crash(Exception):
    """Stands for a loss of power."""


def until(round: int) -> Watch:
    """A watcher that interrupts the run after a round."""

    def watch(progress: Progress) -> bool:
        return progress.round < round

    return watch


def crash_after(round: int) -> Watch:
    """A watcher that crashes after a round."""

    def watch(progress: Progress) -> bool:
        if progress.round == round:
            raise Crash
        return True

    return watch


def test_interrupted_run_resumes_to_the_bit(finished_run, tmp_path):
    directory = tmp_path / "run"
    with pytest.raises(Interrupted):
        run(tiny(checkpoint_seconds=1e9), directory, until(7))
    steps = []

    def watch(progress: Progress) -> bool:
        steps.append((progress.names, progress.round))
        return True

    resume(directory, watch)
    assert steps[:3] == [(("DP-FedAvg",), 0), (("DP-FedAvg", "FedHDP"), 0), (("DP-FedAvg", "FedHDP"), 8)]
    assert_same_run(finished_run, directory)


def test_watcher_can_interrupt_before_the_first_round(finished_run, tmp_path):
    with pytest.raises(Interrupted):
        run(tiny(), tmp_path / "run", until(0))
    resume(tmp_path / "run", keep_going)
    assert_same_run(finished_run, tmp_path / "run")


def test_finished_run_is_not_repeated(finished_run):
    before = files_of(finished_run)
    summary = resume(finished_run, crash_after(0))
    assert summary.variants[0].name == "DP-FedAvg"
    assert files_of(finished_run) == before


@pytest.mark.slow
def test_replayed_rounds_are_charged_twice(tmp_path):
    experiment = tiny(rounds=8, evaluate_every=2, checkpoint_seconds=1e9, variants=tiny().variants[1:], noise_seed=None)
    with pytest.raises(Crash):
        run(experiment, tmp_path / "run", crash_after(7))  # six rounds were shown, and no checkpoint was saved
    with pytest.raises(Crash):
        resume(tmp_path / "run", crash_after(5))  # four more
    (variant,) = resume(tmp_path / "run", keep_going).variants
    private = variant.groups[1]
    assert (variant.rounds, private.rounds) == (8, 8 + 6 + 4)
    mechanism = experiment.variants[0].mechanism(experiment.build_mechanism(), RoughPricing(experiment.rounds))
    assert private.epsilon == accounting.epsilon(mechanism, 18, experiment.delta, "pld")["private"]
    with RunDirectory.open(tmp_path / "run") as directory:
        assert max(row.round for row in directory.variant(variant.name).history()) == 8


def test_edited_experiment_is_refused(tmp_path):
    with pytest.raises(Interrupted):
        run(tiny(), tmp_path / "run", until(2))
    path = tmp_path / "run" / "experiment.toml"
    text = path.read_text()
    path.write_text(text.replace("rounds = 12", "rounds = 14"))
    assert path.read_text() != text
    with pytest.raises(DamagedRunError):
        resume(tmp_path / "run", keep_going)
    path.write_text(text)
    assert resume(tmp_path / "run", keep_going).variants[0].rounds == 12


def test_run_of_another_experiment_is_refused(finished_run):
    with raises_field("out", RunError):
        run_or_resume(tiny(rounds=3), finished_run, keep_going)
    assert run_or_resume(tiny(), finished_run, crash_after(0)).variants[0].rounds == 12


def test_locked_run_is_refused(tmp_path):
    with pytest.raises(Interrupted):
        run(tiny(), tmp_path / "run", until(0))
    with RunDirectory.open(tmp_path / "run"), pytest.raises(RunError):
        resume(tmp_path / "run", keep_going)


DAMAGE = {
    "experiment.toml": b"rounds = ",
    "dp-fedavg/checkpoint.npz": b"PK\x03\x04 half a file",
    "fedhdp/history.csv": b"round,group,model,metric,value\n4,server,global\n8,server,global,accuracy,0.1\n",
    "dp-fedavg/result.json": b'{"name": "DP-FedAvg"',
    "run.json": b"{}",
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_file_is_refused_and_nothing_lost(name, tmp_path):
    directory = tmp_path / "run"
    with pytest.raises(Interrupted):
        run(tiny(), directory, until(6))
    (directory / name).write_bytes(DAMAGE[name])
    before = files_of(directory)
    with pytest.raises(DamagedRunError) as error:
        resume(directory, keep_going)
    assert name in str(error.value)
    assert "\n" not in str(error.value)
    assert files_of(directory) == before


def digit_changed(path: Path, place: int) -> None:
    """Change a digit after this place, so that the file can still be read."""
    content = bytearray(path.read_bytes())
    place = next(place for place in range(place, len(content)) if content[place : place + 1].isdigit())
    content[place] = ord("0") + (content[place] - ord("0") + 1) % 10
    path.write_bytes(bytes(content))


@pytest.mark.parametrize("name", ["dp-fedavg/history.csv", "fedhdp/history.csv", "clients.csv"])
def test_a_wrong_number_is_not_resumed_from(name, tmp_path):
    directory = tmp_path / "run"
    with pytest.raises(Interrupted):
        run(tiny(), directory, until(6))
    content = (directory / name).read_bytes()
    digit_changed(directory / name, len(content) // 2)
    with pytest.raises(DamagedRunError) as error:
        resume(directory, keep_going)
    assert name in str(error.value)
    (directory / name).write_bytes(content)
    resume(directory, keep_going)


FINISHED = ["summary.json", "run.json", "clients.csv", "experiment.toml", "fedhdp/history.csv", "fedhdp/result.json"]


@pytest.mark.parametrize("name", FINISHED)
def test_a_wrong_number_is_not_shown(name, finished_run, tmp_path):
    directory = tmp_path / "run"
    shutil.copytree(finished_run, directory)
    read_runs([directory])
    digit_changed(directory / name, 40)
    for read in (lambda: read_runs([directory]), lambda: resume(directory, keep_going)):
        with pytest.raises(DamagedRunError) as error:
            read()
        assert name in str(error.value)


def test_removed_files_are_no_damage(finished_run, tmp_path):
    """What may not be published is removed before a run is shared."""
    directory = tmp_path / "run"
    shutil.copytree(finished_run, directory)
    (directory / "clients.csv").unlink()
    (directory / "fedhdp" / "history.csv").unlink()
    read_runs([directory])


def test_personal_models_on_disk_are_deleted_at_the_end(finished_run, tmp_path, monkeypatch):
    monkeypatch.setattr("fedhdp.engine.personal_store.personal_bytes_limit", lambda: 0)
    directory, files = tmp_path / "run", []

    def watch(progress: Progress) -> bool:
        files.append(list(directory.rglob("personal.bin")))
        return progress.round != 6

    with pytest.raises(Interrupted):
        run(tiny(keep_checkpoint=False), directory, watch)
    resume(directory, keep_going)
    assert files[-1]
    assert not list(directory.rglob("personal.bin"))
    in_memory, on_disk = (read_value(path / "summary.json", Summary) for path in (finished_run, directory))
    for first, second in zip(in_memory.variants, on_disk.variants, strict=True):
        accuracies = [group.value("accuracy", "personal") for group in first.groups]
        assert [group.value("accuracy", "personal") for group in second.groups] == pytest.approx(accuracies, abs=1e-4)


def kill_when(ready: Callable[[], bool], *arguments: object) -> None:
    """Start a command and kill it as soon as a condition holds."""
    with process(*arguments) as started:
        deadline = time.monotonic() + 120
        while not ready() and started.poll() is None and time.monotonic() < deadline:
            time.sleep(0.001)
        started.send_signal(signal.SIGKILL)


def changed(path: Path) -> Callable[[], bool]:
    """Whether a file has changed since this call."""
    before = path.stat().st_mtime_ns if path.exists() else None

    def has_changed() -> bool:
        return path.exists() and path.stat().st_mtime_ns != before

    return has_changed


@pytest.mark.slow
@pytest.mark.process
def test_killed_run_resumes_to_the_bit(finished_run, tmp_path):
    directory, file = tmp_path / "killed", tmp_path / "tiny.toml"
    file.write_text(to_toml(tiny()))
    checkpoint, history = directory / "dp-fedavg" / "checkpoint.npz", directory / "fedhdp" / "history.csv"
    kill_when(checkpoint.exists, "run", file, "--out", directory)
    for path in (history, checkpoint):
        kill_when(changed(path), "run", "--resume", directory)
    assert not (directory / "summary.json").exists()
    with open(history, "a") as torn:
        torn.write("12,server,glo")
    resume(directory, keep_going)
    assert_same_run(finished_run, directory)


@pytest.fixture
def running(tmp_path):
    """A long run in another process, after its first rounds, and its directory."""
    directory, file = tmp_path / "run", tmp_path / "long.toml"
    experiment: Experiment = replace(tiny(), rounds=100_000, checkpoint_seconds=1e9)
    file.write_text(to_toml(experiment))
    history, deadline = directory / "dp-fedavg" / "history.csv", time.monotonic() + 120
    with process("run", file, "--out", directory) as started:
        while not (history.exists() and history.stat().st_size > 100) and time.monotonic() < deadline:
            time.sleep(0.05)
        yield started, directory


@pytest.mark.slow
@pytest.mark.process
def test_ctrl_c_saves_a_checkpoint(running):
    started, directory = running
    started.send_signal(signal.SIGINT)
    _, errors = started.communicate(timeout=60)
    assert started.returncode == 130
    assert f"fedhdp run --resume {directory}" in errors
    assert "Traceback" not in errors
    assert int(read_arrays(directory / "dp-fedavg" / "checkpoint.npz")["round"]) > 0


@pytest.mark.slow
@pytest.mark.process
def test_second_ctrl_c_stops_at_once(running):
    started, directory = running
    os.kill(started.pid, signal.SIGSTOP)  # so that both signals arrive in one round
    for _ in range(2):
        started.send_signal(signal.SIGINT)
    os.kill(started.pid, signal.SIGCONT)
    time.sleep(0.01)
    started.send_signal(signal.SIGINT)
    _, errors = started.communicate(timeout=60)
    assert started.returncode == 130
    assert f"fedhdp run --resume {directory}" in errors
    assert "Traceback" not in errors

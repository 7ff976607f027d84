"""Personal models in a file."""

from __future__ import annotations

import signal

import numpy as np
import pytest
from helpers import raises_field
from simulations import CHOSEN, assert_close, run_python, trained

from fedhdp.engine import personal_store
from fedhdp.errors import RunError


@pytest.mark.slow
def test_memory_mapped_models_are_those_in_memory(data, monkeypatch):
    in_memory = trained(data, CHOSEN)
    monkeypatch.setattr(personal_store, "personal_bytes_limit", lambda: 0)
    on_disk = trained(data, CHOSEN)
    assert isinstance(on_disk.store, personal_store.MemoryMappedPersonalModels)
    assert_close(in_memory, on_disk)


@pytest.mark.slow
def test_run_resumes_from_its_checkpoint_and_its_file(data, monkeypatch, tmp_path):
    uninterrupted = trained(data, CHOSEN, rounds=6)
    monkeypatch.setattr(personal_store, "personal_bytes_limit", lambda: 0)
    crashed = trained(data, CHOSEN, rounds=2, directory=tmp_path)
    crashed.save(tmp_path / "state.npz")
    crashed.run(3)
    crashed.save(tmp_path / "state.npz")
    crashed.run(5)  # two rounds after the last checkpoint
    resumed = trained(data, CHOSEN, rounds=0, directory=tmp_path)
    resumed.load(tmp_path / "state.npz")
    assert resumed.round == 3
    resumed.run(6)
    assert_close(uninterrupted, resumed)
    (tmp_path / "personal.bin").unlink()
    with raises_field("directory", RunError):
        resumed.load(tmp_path / "state.npz")


def test_file_has_at_most_two_rows_for_each_client(data, monkeypatch):
    in_memory = trained(data, CHOSEN, rounds=40)
    monkeypatch.setattr(personal_store, "personal_bytes_limit", lambda: 0)
    simulation = trained(data, CHOSEN, rounds=21)
    simulation.state_arrays()  # from here on a client needs two rows
    simulation.run(40)
    cohorts = [len(simulation.draw_cohort(number)) for number in range(40)]
    personalized = np.count_nonzero(simulation.participated_K)
    assert simulation.store.file_rows <= 2 * personalized + max(cohorts) < sum(cohorts)
    assert_close(in_memory, simulation)


KILLED = """
import os, signal, sys
from pathlib import Path
from helpers import tiny_data
from simulations import CHOSEN, trained
from fedhdp.engine import personal_store
personal_store.personal_bytes_limit = lambda: 0
data = tiny_data([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 4, 4, 4, 9, 1, 6])
simulation = trained(data, CHOSEN, rounds=3, directory=Path(sys.argv[1]))
simulation.save(Path(sys.argv[1]) / "state.npz")
simulation.run(6)
simulation.personal_models(0)  # written to the file after the checkpoint
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.process
def test_killed_run_resumes_to_the_bit(data, monkeypatch, tmp_path):
    monkeypatch.setattr(personal_store, "personal_bytes_limit", lambda: 0)
    killed = run_python(KILLED, str(tmp_path), check=False)
    assert killed.returncode == -signal.SIGKILL
    uninterrupted = trained(data, CHOSEN, rounds=6)
    resumed = trained(data, CHOSEN, rounds=0, directory=tmp_path)
    resumed.load(tmp_path / "state.npz")
    resumed.run(6)
    participated = np.flatnonzero(uninterrupted.participated_K)
    np.testing.assert_array_equal(uninterrupted.global_model(), resumed.global_model())
    np.testing.assert_array_equal(uninterrupted.personal_models(participated), resumed.personal_models(participated))

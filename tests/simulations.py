"""Small simulations that tests share, and comparisons of their states."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
from helpers import mechanism_of

from fedhdp.client import LocalTraining
from fedhdp.models import mlp
from fedhdp.simulation import Simulation

TRAINING = LocalTraining(epochs=2, batch_size=4, learning_rate=0.3, decay=0.5, decay_every=2)
MODEL = mlp(12, 5, 3)
CHOSEN = mechanism_of((4, 0.0, 1.0), (5, 0.5, 0.7), (10, 1.5, 0.2))


def trained(data, mechanism, rounds=3, **options) -> Simulation:
    """A simulation after some rounds, with a seed for every random stream."""
    options = {"training": TRAINING, "seed": 3, "noise_seed": 7} | options
    simulation = Simulation(data, options.pop("model", MODEL), mechanism, **options)
    simulation.run(rounds)
    return simulation


def read(arrays) -> dict[str, np.ndarray]:
    """The arrays of a state as they are read from a file."""
    return {name: array() if callable(array) else array for name, array in arrays.items()}


def same_server(one: Simulation, other: Simulation) -> None:
    """The servers' states are the same to the bit."""
    for a, b in zip(jax.tree.leaves(one.server_state), jax.tree.leaves(other.server_state), strict=True):
        np.testing.assert_array_equal(a, b)


def same(one: Simulation, other: Simulation) -> None:
    """The states are the same to the bit."""
    a, b = read(one.state_arrays()), read(other.state_arrays())
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name], b[name])


def assert_close(a: Simulation, b: Simulation) -> None:
    """The states are the same within float tolerance."""
    np.testing.assert_allclose(a.global_model(), b.global_model(), atol=1e-5)
    participated = np.flatnonzero(a.participated_K)
    np.testing.assert_allclose(a.personal_models(participated), b.personal_models(participated), atol=1e-5)
    for rows_a, rows_b in zip(a.evaluate(), b.evaluate(), strict=True):
        assert [row[:4] for row in rows_a] == [row[:4] for row in rows_b]
        np.testing.assert_allclose([row.value for row in rows_a], [row.value for row in rows_b], atol=1e-4)


def run_python(code: str, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run a program in a new process that finds the package and the tests' helpers."""
    tests = Path(__file__).parent
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tests), str(tests.parent)])}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=check)

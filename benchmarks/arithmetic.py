"""Single precision and exact arithmetic side by side: a round of the simulator, and the sum on a deployment's server.

python benchmarks/arithmetic.py
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from msgspec.structs import replace

from fedhdp import Simulation, server
from fedhdp.exact import ExactRound
from fedhdp.experiments import EXPERIMENTS

CLIENTS, REPEATS = 20, 5


def seconds(function: Callable[[], object]) -> float:
    """The shortest time of several calls, after one that compiles."""
    jax.block_until_ready(function())
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        jax.block_until_ready(function())
        times.append(time.perf_counter() - started)
    return min(times)


def main() -> None:
    """Print a line for each."""
    experiment = EXPERIMENTS["quickstart"]()
    data, mechanism = experiment.load_data(), experiment.build_mechanism()
    model = experiment.model.build(784, data.classes)
    print(f"{'':44}{'float32':>12}{'exact':>12}   seconds")
    times = []
    for arithmetic in ("float32", "exact"):
        simulation = Simulation(data, model, replace(mechanism, arithmetic=arithmetic), experiment.training)

        def play(simulation: Simulation = simulation) -> jax.Array:
            simulation.run_round()
            return simulation.server_state.theta_P

        times.append(seconds(play))
    print(f"{'a round of the quickstart':44}{times[0]:12.4f}{times[1]:12.4f}")
    for parameters in (39_760, 1_200_000):
        update_CP = np.random.default_rng(0).normal(size=(CLIENTS, parameters)).astype(np.float32)
        group_C, present_C = np.zeros(CLIENTS, int), np.ones(CLIENTS, bool)
        params, clip = mechanism.round_params, jnp.float32(1.0)

        @jax.jit
        def in_floats(update_CP: jax.Array, key: jax.Array) -> jax.Array:
            updates = server.dense_updates(update_CP)
            sums = server.clip_and_sum(jax.tree.map(jnp.asarray, params), clip, updates, group_C, present_C)  # noqa: B023
            return server.private_mean(params, clip, sums, key)[0]  # noqa: B023

        def in_integers(update_CP: np.ndarray = update_CP) -> np.ndarray:
            exact = replace(mechanism, arithmetic="exact").grid_params
            total = ExactRound(exact, 1.0, update_CP.shape[1], None, os.urandom)
            for update_P in update_CP:
                total.add(update_P, 0)
            return total.finish()[0]

        key = jax.random.key(0)
        both = seconds(lambda update_CP=update_CP: in_floats(update_CP, key)), seconds(in_integers)  # noqa: B023
        name = f"sum and noise, {CLIENTS} clients, {parameters:,} parameters"
        print(f"{name:44}{both[0]:12.4f}{both[1]:12.4f}")
    noises = [replace(mechanism, arithmetic=arithmetic).update_noise_stddev for arithmetic in ("float32", "exact")]
    print(f"{'noise of the quickstart, in clips':44}{noises[0]:12.6f}{noises[1]:12.6f}")


if __name__ == "__main__":
    main()

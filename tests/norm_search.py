"""A search for the client that moves a round's sum furthest beyond its clip, by rounding alone.

Its inputs are nearly constant, so that roundings agree, and its examples come in pairs with opposite labels, which the known
model thinks equally likely, so that their gradients nearly cancel. Random restarts, then mutations of the worst. On a GPU:

    PYTHONPATH=.:tests python tests/norm_search.py

Axis letters: N candidates, M examples, F inputs, R global models, P parameters.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from fedhdp.client import LocalTraining
from fedhdp.engine.chunk import Clients, client_updates
from fedhdp.engine.low_rank import FullRank, LowRank, Parametrization
from fedhdp.engine.network import Network
from fedhdp.mechanism import Mechanism, PrivacyGroup
from fedhdp.models import Model, linear, mlp, take
from fedhdp.server import Updates, clip_and_sum

PAIRS = (1, 2, 8)  # of examples with opposite labels


class Candidates(NamedTuple):
    """Clients: the size of their inputs, how far examples of a pair and inputs of an example differ, and their rate."""

    value_N: np.ndarray
    gap_N: np.ndarray
    spread_N: np.ndarray
    rate_N: np.ndarray
    seed_N: np.ndarray

    def examples(self, n: int, pairs: int, inputs: int) -> np.ndarray:
        """The inputs of a client's examples."""
        rng = np.random.default_rng(int(self.seed_N[n]))
        first_MF = 1 + self.spread_N[n] * rng.uniform(-1, 1, (pairs, inputs))
        second_MF = first_MF + self.gap_N[n] * (1 if rng.random() < 0.5 else rng.uniform(-1, 1, (pairs, inputs)))
        return (self.value_N[n] * np.concatenate([first_MF, second_MF])).astype(np.float32)


def random_candidates(rng: np.random.Generator, size: int) -> Candidates:
    """Candidates over all orders of magnitude."""
    powers = [10.0 ** rng.uniform(low, high, size) for low, high in ((-2, 2), (-6, 0), (-8, -1), (-2, 1))]
    return Candidates(*powers, rng.integers(0, 2**31, size))


def mutations(rng: np.random.Generator, worst: Candidates, size: int) -> Candidates:
    """Candidates near the worst ones."""
    parents = Candidates(*(values[rng.integers(0, len(values), size)] for values in worst))
    factors = [values * np.exp(rng.normal(0, 0.1, size)) for values in parents[:4]]
    return Candidates(*factors, parents.seed_N)


def balanced(model: Model) -> dict:
    """A model with the same output for both classes: every example's gradient is that of a coin."""
    theta = model.init(jax.random.key(1))
    first = {"w": jnp.zeros_like(theta["first"]["w"]), "b": jnp.ones_like(theta["first"]["b"])}
    if "rest" not in theta:
        return {"first": first}
    outputs = model.apply({**theta, "first": first}, jnp.zeros((1, first["w"].shape[0])), None)[0]
    bias = min(jax.tree.leaves(theta["rest"]), key=lambda leaf: leaf.size)
    rest = jax.tree.map(lambda leaf: leaf - outputs if leaf is bias else leaf, theta["rest"])
    return {"first": first, "rest": rest}


@partial(jax.jit, static_argnums=(0, 1))
def clips_moved(model: Model, kind: type[Parametrization], theta_R: dict, x_M: jax.Array, rate: jax.Array) -> tuple:
    """The sum over a client alone, as the server sums it, and its clip, which is half the norm of its update."""
    examples = len(x_M)
    training = LocalTraining(epochs=1, batch_size=examples, learning_rate=1.0, personalize=False)
    network = Network(model, jax.ShapeDtypeStruct(x_M.shape[1:], x_M.dtype), training)
    parametrization = kind(network, theta_R, np.zeros(0, int), x_M[None])
    y_CM = jnp.repeat(jnp.arange(2), examples // 2)[None]
    clients = Clients(y_CM, jnp.array([examples]), jnp.zeros((1, 0)), jax.random.split(jax.random.key(0), 1))
    rates = jnp.stack([rate, rate])
    updates, _ = client_updates(model, training, parametrization, clients, None, rates, uniform_size=True)
    update_C = jax.tree.map(lambda leaf_CR: leaf_CR[:, 0], updates.update_CR)

    def weighted_sum(scale_C: jax.Array) -> jax.Array:
        return ravel_pytree(parametrization.weighted_sum(scale_C, update_C))[0]

    clip = updates.norm_CR[0, 0] / 2
    params = Mechanism(
        (PrivacyGroup("all", clients=1, sampling_rate=1.0, noise_multiplier=0.0),), clip=1.0
    ).round_params
    of_client = Updates(updates.norm_CR[:, 0], weighted_sum)
    params = jax.tree.map(jnp.asarray, params)
    sums = clip_and_sum(params, clip, of_client, jnp.zeros(1, int), jnp.ones(1, bool))
    return sums.update_P, clip


def worst_client(
    model: Model, inputs: int, kind: type[Parametrization] = LowRank, size: int = 48, turns: int = 3, seed: int = 0
) -> float:
    """The most clips that a client was found to move the sum by."""
    rng, theta_R, worst = np.random.default_rng(seed), take(balanced(model), None), 0.0
    for pairs in PAIRS:
        candidates = random_candidates(rng, size)
        for _ in range(turns):
            moved_N = np.zeros(size)
            for n in range(size):
                x_MF = jnp.asarray(candidates.examples(n, pairs, inputs))
                update_P, clip = clips_moved(model, kind, theta_R, x_MF, jnp.float32(candidates.rate_N[n]))
                moved_N[n] = np.linalg.norm(np.asarray(update_P, np.float64)) / float(clip)
            worst = max(worst, float(np.nanmax(moved_N)))
            best = np.argsort(-moved_N)[: size // 8]
            candidates = mutations(rng, Candidates(*(values[best] for values in candidates)), size)
    return worst


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    arguments = parser.parse_args()
    print(f"{jax.devices()[0].device_kind}; clips moved, at most, by a client alone: beyond 1 the norm is too small")
    for inputs in (784, 3072, 5000, 8000, 20_000):
        for name, model in (("linear", linear(inputs, 2)), ("mlp", mlp(inputs, 20, 2))):
            for kind in (LowRank, FullRank):
                worst = max(worst_client(model, inputs, kind, seed=seed) for seed in range(arguments.seeds))
                print(f"{inputs:6} inputs  {name:6}  {kind.__name__:8}  {worst:.7f}", flush=True)

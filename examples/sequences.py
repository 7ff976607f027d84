"""Token sequences at three privacy levels: `python examples/sequences.py [ROUNDS [SEED]]`, half a minute on two cores.

Three hundred devices log what happens as sequences of twelve tokens. Four behaviours make the same tokens equally often, but
in another order: each has its own habit of what follows what. The model is an embedding and a gated recurrent unit in plain
JAX, 1,840 parameters. Over five seeds 97% of 1,000 new sequences are right without noise, 95% with FedHDP and 50 to 83% if
everybody gets the noise of the strictest. A logistic regression on the counts of tokens, without privacy, has 26%.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np

from fedhdp import (
    AdaptiveClip,
    FederatedData,
    LocalTraining,
    Mechanism,
    Model,
    PrivacyGroup,
    calibrate,
    dp_fedavg,
    fedhdp,
    non_private,
    simulate_many,
)
from fedhdp.results import format_table

DEVICES, SEQUENCES, TOKENS, LENGTH, BEHAVIOURS, WIDTH = 300, 25, 12, 12, 4, 16
LEVELS = ["open"] * 30 + ["mild"] * 120 + ["strict"] * 150
DELTA = 1e-3


def make_data(seed):
    """Devices with their own mix of behaviours. Inputs are token ids: integers reach the model as they are."""
    rng = np.random.default_rng(seed)
    habit = np.stack([rng.permutation(TOKENS) for _ in range(BEHAVIOURS)])  # the token that mostly follows another

    def sequences(behaviour):
        tokens = rng.integers(0, TOKENS, (len(behaviour), LENGTH))
        follows = rng.random(tokens.shape) < 0.6
        for step in range(1, LENGTH):
            tokens[:, step] = np.where(follows[:, step], habit[behaviour, tokens[:, step - 1]], tokens[:, step])
        return tokens

    device = np.repeat(np.arange(DEVICES), SEQUENCES)
    mixes = rng.dirichlet(np.ones(BEHAVIOURS), DEVICES)
    behaviour = np.array([rng.choice(BEHAVIOURS, p=mixes[number]) for number in device])
    level = np.array(LEVELS)[device]
    server = rng.integers(0, BEHAVIOURS, 1000)
    arrays = (sequences(behaviour), behaviour, device, level)
    return FederatedData.from_arrays(*arrays, server=(sequences(server), server), name="devices")


def init(key):
    keys = jax.random.split(key, 4)
    return {
        "token": jax.random.normal(keys[0], (TOKENS, WIDTH)),
        "input": jax.random.normal(keys[1], (WIDTH, 3 * WIDTH)) / WIDTH**0.5,
        "state": jax.random.normal(keys[2], (WIDTH, 3 * WIDTH)) / WIDTH**0.5,
        "output": jax.random.normal(keys[3], (WIDTH, BEHAVIOURS)) / WIDTH**0.5,
        "bias": jnp.zeros(3 * WIDTH),
    }


def apply(parameters, tokens, key):
    """The mean state of a gated recurrent unit, and a linear layer."""
    inputs = parameters["token"][tokens] @ parameters["input"] + parameters["bias"]

    def step(state, x):
        update_x, reset_x, new_x = jnp.split(x, 3, axis=-1)
        update_s, reset_s, new_s = jnp.split(state @ parameters["state"], 3, axis=-1)
        update, reset = jax.nn.sigmoid(update_x + update_s), jax.nn.sigmoid(reset_x + reset_s)
        state = (1 - update) * jnp.tanh(new_x + reset * new_s) + update * state
        return state, state

    _, states = jax.lax.scan(step, jnp.zeros((len(tokens), WIDTH)), inputs.swapaxes(0, 1))
    return states.mean(axis=0) @ parameters["output"]


def main(rounds=60, seed=0):
    data = make_data(seed)
    weights = {"open": 1.0, "mild": 0.1, "strict": 0.027}
    groups = (PrivacyGroup(name, LEVELS.count(name), 0.0, 0.2, weight, pull=0.1) for name, weight in weights.items())
    mechanism = Mechanism(tuple(groups), clip=AdaptiveClip(initial=1.0))
    mechanism = calibrate(mechanism, {"mild": 6.0, "strict": 1.0}, rounds, DELTA)
    training = LocalTraining(epochs=2, batch_size=10, learning_rate=1.0)

    algorithms = {"Non-Private": non_private, "DP-FedAvg": dp_fedavg, "FedHDP": fedhdp}
    mechanisms = [algorithm(mechanism) for algorithm in algorithms.values()]
    runs = simulate_many(data, Model(init, apply), mechanisms, training, rounds=rounds, seed=seed)
    print(format_table([run.result(name, DELTA) for name, run in zip(algorithms, runs, strict=True)]))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))

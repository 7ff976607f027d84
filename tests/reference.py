"""The paper's Algorithm 1 in plain Python loops and float64, one client and one batch at a time.

It knows nothing of the engine but the names of its random streams: who is sampled, in which order a client's examples
are batched, and which noise is drawn. The network and its gradient are written out by hand.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import jax
import numpy as np

from fedhdp.client import LocalTraining, shuffle
from fedhdp.clips import AdaptiveClip, LayerClip
from fedhdp.data import FederatedData
from fedhdp.mechanism import Mechanism
from fedhdp.rng import BATCHES, COHORT, NOISE, stream
from fedhdp.server import gaussian, sample_cohort

Network = dict[str, np.ndarray]  # w1, b1, w2, b2


def gradient(network: Network, x_BF: np.ndarray, y_B: np.ndarray) -> Network:
    """The gradient of the batch's mean cross-entropy for a network of one hidden layer."""
    before = x_BF @ network["w1"] + network["b1"]
    hidden = np.maximum(before, 0)
    logits = hidden @ network["w2"] + network["b2"]
    chance = np.exp(logits - logits.max(1, keepdims=True))
    chance /= chance.sum(1, keepdims=True)
    chance[np.arange(len(y_B)), y_B] -= 1
    error = chance / len(y_B)
    back = (error @ network["w2"].T) * (before > 0)
    return {"w1": x_BF.T @ back, "b1": back.sum(0), "w2": hidden.T @ error, "b2": error.sum(0)}


def flat(network: Network) -> np.ndarray:
    """The parameters in the order in which the engine ravels them."""
    return np.concatenate([network["b1"], network["w1"].ravel(), network["b2"], network["w2"].ravel()])


def unflat(theta: np.ndarray, like: Network) -> Network:
    """The inverse of ``flat``."""
    b1, w1, b2, w2 = np.split(theta, np.cumsum([like[name].size for name in ("b1", "w1", "b2")]))
    return {"b1": b1, "w1": w1.reshape(like["w1"].shape), "b2": b2, "w2": w2.reshape(like["w2"].shape)}


def descent(training: LocalTraining, eta: float, theta: Network) -> Callable[[Network, Network], Network]:
    """A step by a gradient: gradient descent in float64, or the plain loop of any other optax transformation."""
    transformation = training.transformation(eta)
    state = [transformation.init(theta)]

    def step(theta: Network, gradient: Network) -> Network:
        if training.is_plain_sgd:
            return {n: theta[n] - eta * gradient[n] for n in theta}
        gradient, floats = ({n: a.astype(np.float32) for n, a in net.items()} for net in (gradient, theta))
        update, state[0] = transformation.update(gradient, state[0], floats)
        return {n: np.asarray(theta[n] + update[n], np.float64) for n in theta}

    return step


def client_update(theta_0: Network, theta_j: Network, x: np.ndarray, y: np.ndarray, order: np.ndarray, eta: float,
                  eta_p: float, pull: float, training: LocalTraining) -> tuple[np.ndarray, Network]:  # fmt: skip
    """ClientUpdate, line by line."""
    theta = dict(theta_0)
    descend, descend_personal = descent(training, eta, theta), descent(training, eta_p, theta_j)
    batches = [order[i : i + training.batch_size] for i in range(0, len(order), training.batch_size)]
    if training.drop_remainder and len(batches) > 1 and len(batches[-1]) < training.batch_size:
        batches = batches[:-1]
    for _, batch in itertools.product(range(training.epochs), batches):
        g = gradient(theta, x[batch], y[batch])
        theta = descend(theta, {n: g[n] + training.proximal * (theta[n] - theta_0[n]) for n in theta})
    for _, batch in itertools.product(range(training.personal_epochs or training.epochs), batches):
        g = gradient(theta_j, x[batch], y[batch])
        theta_j = descend_personal(theta_j, {n: g[n] + pull * (theta_j[n] - theta_0[n]) for n in theta_j})
    return flat(theta) - flat(theta_0), theta_j


def layers_of(mechanism: Mechanism, size: int, network: Network) -> list[tuple[np.ndarray, float]]:
    """The parameters that are clipped together, as columns of ``flat``, and their clip of the first round."""
    if not isinstance(mechanism.clip, LayerClip):
        clip = mechanism.clip.initial if isinstance(mechanism.clip, AdaptiveClip) else mechanism.clip
        return [(np.arange(size), clip)]
    paths = {"first/b": "b1", "first/w": "w1", "rest/b": "b2", "rest/w": "w2"}
    path_of = np.repeat(list(paths), [network[name].size for name in paths.values()])
    clips = sorted(mechanism.clip.layers.items())
    return [(np.flatnonzero([path.startswith(layer) for path in path_of]), clip) for layer, clip in clips]


def train(data: FederatedData, mechanism: Mechanism, training: LocalTraining, network: Network, rounds: int, seed: int,
          noise_seed: int) -> tuple[np.ndarray, np.ndarray, dict[int, np.ndarray]]:  # fmt: skip
    """The global model, the clip (by layer, where there are such) and the personal models after some rounds."""
    theta, personal = network, {}
    adaptive = mechanism.clip if getattr(mechanism.clip, "learning_rate", 0) > 0 else None
    layers = layers_of(mechanism, flat(theta).size, network)
    S = [clip for _, clip in layers]
    levels = data.levels
    if levels is None:
        levels = data.draw_levels({group.name: group.clients for group in mechanism.groups}, seed).levels
    group_of = [[group.name for group in mechanism.groups].index(level) for level in levels]
    members = [np.array([k for k, i in enumerate(group_of) if i == j]) for j in range(len(mechanism.groups))]
    for t in range(rounds):
        eta, eta_p = training.rates(t)
        cohort = sample_cohort(mechanism, members, np.random.default_rng([noise_seed, COHORT, t]))
        batch_key = jax.random.wrap_key_data(stream(seed, BATCHES, t))
        sums = [np.zeros(flat(theta).size) for _ in mechanism.groups]
        bits, cohort_sizes = [], [0 for _ in mechanism.groups]
        for j in cohort:
            i = group_of[j]
            start, count = data.train.start_K[j], data.train.count_K[j]
            x = data.train.x_N[start : start + count] / 255.0
            y = data.train.y_N[start : start + count]
            order = np.asarray(shuffle(jax.random.fold_in(batch_key, int(j)), count, int(count)))
            personal.setdefault(j, theta)
            pull = mechanism.groups[i].pull
            update, personal[j] = client_update(theta, personal[j], x, y, order, eta, eta_p, pull, training)
            bits.append([])
            for (columns, _), S_l in zip(layers, S, strict=True):
                part = update[columns]
                norm = math.sqrt(float(part @ part))
                bits[-1].append(1.0 if norm <= S_l else 0.0)
                sums[i][columns] += part * S_l / max(norm, S_l)
            cohort_sizes[i] += 1

        # z_Delta: what is left for the update when the bits have taken their share of z. L bits of ±1/2 have norm √L/2.
        root_L = math.sqrt(len(layers))
        sigma_b = mechanism.bit_noise_stddev
        z = [g.noise_multiplier for g in mechanism.groups]
        z_update = [(zi**-2 - (2 * sigma_b / root_L) ** -2) ** -0.5 if zi > 0 and adaptive else zi for zi in z]
        r = [g.weight for g in mechanism.groups]
        if mechanism.noise == "shared":
            sigma = max(ri * zi for ri, zi in zip(r, z_update, strict=True))
        else:
            sigma = math.sqrt(sum((ri * zi) ** 2 for ri, zi in zip(r, z_update, strict=True)))
        expected = [g.sampling_rate * g.clients for g in mechanism.groups]
        counts = cohort_sizes if mechanism.sampling == "fixed" else expected
        key_update, key_bits = jax.random.split(jax.random.wrap_key_data(stream(noise_seed, NOISE, t)))
        noise = root_L * sigma * np.asarray(gaussian(key_update, (flat(theta).size,)), np.float64)  # in clips
        for (columns, _), S_l in zip(layers, S, strict=True):
            noise[columns] *= S_l
        denominator = sum(ri * n for ri, n in zip(r, counts, strict=True))
        update = (sum(ri * s for ri, s in zip(r, sums, strict=True)) + noise) / denominator if denominator > 0 else 0.0
        theta = unflat(flat(theta) + update, theta)
        if adaptive:
            bit_noise = sigma_b * np.asarray(gaussian(key_bits, (len(S),)))
            for number in range(len(S)):
                noisy = sum(b[number] - 0.5 for b in bits) + float(bit_noise[number])
                S[number] *= math.exp(-adaptive.learning_rate * (noisy / sum(counts) + 0.5 - adaptive.quantile))
    return flat(theta), np.array(S), {j: flat(own) for j, own in personal.items()}

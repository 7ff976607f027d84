"""PFA, projected federated averaging, as a row of `levels`: post-processing of what WeiAvg releases.

WeiAvg's round releases one noised sum (see `fedhdp.algorithms.weiavg`). The updates of clients who opted out are known to
the server one by one, so that their part of the sum is known, and the rest is the noised sum of private clients. The server
projects the mean of the latter on the directions in which the former differ:

    private = (Σ_j r_j Σ_{i∈j} clipped_i + noise, without those who opted out) / W_private
    update  = (public sum + W_private · (m + U Uᵀ (private − m))) / (W_public + W_private)

m is the mean of the public clients' clipped updates, U has the first ``directions`` singular vectors of what remains of them
without m, for each array of the model. W are public weights, as in a round's denominator. So private clients pay what WeiAvg
costs them: neither m nor U depends on their data, but through the model that was released before. A round without public
clients moves nothing. Source: Liu, Lou, Xiong, Liu & Meng, PVLDB 15(4), 2021.

Axis letters: C public clients of a cohort, D directions, G groups, M examples of a client, P parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree

from fedhdp import FederatedData, LocalTraining, Mechanism, Model, ServerOptimizer, Simulation
from fedhdp.client import Batch, ClientData, Schedule, TrainedModel, local_train, scale_inputs, shuffle
from fedhdp.errors import require
from fedhdp.experiments import runner
from fedhdp.experiments.bases import build_model
from fedhdp.experiments.batch import VariantBatch
from fedhdp.experiments.config import Experiment
from fedhdp.experiments.toml import to_toml
from fedhdp.models import Array, Parameters, parameter_sizes
from fedhdp.results import store
from fedhdp.results.provenance import provenance
from fedhdp.results.schema import Summary
from fedhdp.rng import BATCHES, process_entropy, stream
from fedhdp.server import dense_updates

DIRECTIONS = 1  # of each array, as the source's code has it
NOTE = "PFA: the server projects WeiAvg's release on the updates of those who opted out"


class PublicUpdates(NamedTuple):
    """What the server knows of a round from clients who opted out; the state of the projection."""

    sum_P: Any  # Σ_i r_i clipped_i
    mean_P: Any  # of the clipped updates
    direction_DP: Any  # orthonormal within each array; zeros where there are fewer


def summarize_public(clipped_CP: np.ndarray, weight_C: np.ndarray, sizes: Sequence[int], count: int) -> PublicUpdates:
    """The sum, the mean and the first directions of the public clients' clipped updates.

    Args:
        clipped_CP: Their updates; there may be none.
        weight_C: Their weights.
        sizes: The sizes of the model's arrays, in the order of a row of all parameters.
        count: The number of directions of each array.
    """
    clients, parameters = clipped_CP.shape
    sum_P, direction_DP = weight_C @ clipped_CP, np.zeros((count, parameters))
    if not clients:
        return PublicUpdates(sum_P, np.zeros(parameters), direction_DP)
    mean_P = clipped_CP.mean(axis=0) if clients > 1 else np.zeros(parameters)  # one update is a direction, not a mean
    for begin, end in pairwise(accumulate(sizes, initial=0)):
        _, length_D, vector_DP = np.linalg.svd(clipped_CP[:, begin:end] - mean_P[begin:end], full_matrices=False)
        rank = int(np.sum(length_D > length_D[0] * max(clients, end - begin) * np.finfo(float).eps))
        kept = min(count, rank)
        direction_DP[:kept, begin:end] = vector_DP[:kept]
    return PublicUpdates(sum_P, mean_P, direction_DP)


@lru_cache(maxsize=32)  # the same function for the same numbers, so that simulations share a compilation
def project_private(
    sizes: tuple[int, ...], count: int, public_weight: float, private_weight: float
) -> optax.GradientTransformation:
    """The transformation of WeiAvg's release into PFA's update. Its state, `PublicUpdates`, is set before each round.

    Args:
        sizes: As in `summarize_public`.
        count: As in `summarize_public`.
        public_weight: The expected weight of those who opted out, Σ r_j q_j N_j.
        private_weight: That of the others.
    """

    def init(theta_P: Array) -> PublicUpdates:
        return PublicUpdates(jnp.zeros_like(theta_P), jnp.zeros_like(theta_P), jnp.zeros((count, *theta_P.shape)))

    def update(gradient_P: Array, state: PublicUpdates, theta_P: Any = None) -> tuple[Array, PublicUpdates]:
        weight = public_weight + private_weight
        private_P = (-gradient_P * weight - state.sum_P) / private_weight
        centred_P, parts = private_P - state.mean_P, []
        for begin, end in pairwise(accumulate(sizes, initial=0)):
            direction_DP = state.direction_DP[:, begin:end]
            parts.append((direction_DP @ centred_P[begin:end]) @ direction_DP)
        projected_P = state.mean_P + jnp.concatenate(parts)
        return -(state.sum_P + private_weight * projected_P) / weight, state

    return optax.GradientTransformation(init, update)


@lru_cache(maxsize=32)
def _after_projection(projection: optax.GradientTransformation, server: ServerOptimizer) -> ServerOptimizer:
    """The server's optimizer, which gets the projected update."""
    return ServerOptimizer(optax.chain(projection, server.transformation()), server.average)


@lru_cache(maxsize=8)
def _client_update(model: Model, training: LocalTraining, input_scale: float | None) -> Callable[..., Array]:
    """A function that trains one client as the engine does, and returns its update as a row."""

    def predict(theta: Parameters, batch: Batch) -> Array:
        return model.apply(theta, batch.x_B, batch.key)

    def update(theta: Parameters, x_M: Array, y_M: Array, count: Array, key: Array, rate: Array) -> Array:
        order_M = shuffle(key, count, len(y_M))
        data = ClientData(scale_inputs(x_M[order_M], input_scale), y_M[order_M], count, key)
        optimizer, schedule = training.transformation(rate), Schedule(data, training, range(training.epochs))
        start = TrainedModel(theta, optimizer.init(theta))
        trained = local_train(predict, model.loss, start, theta, training.proximal, optimizer, schedule)
        return ravel_pytree(jax.tree.map(jnp.subtract, trained.theta, theta))[0]

    return jax.jit(update)


class PfaSimulation(Simulation):
    """A simulation of WeiAvg's mechanism whose server projects each release before it applies it.

    Args:
        data: Every client's examples.
        model: The network.
        mechanism: WeiAvg's mechanism, with one clip for all layers and a private group that is sampled.
        training: How clients train.
        server: The server's optimizer, which gets the projected update.
        directions: The number of directions of each array of the model.
        seed: As in `Simulation`.
        noise_seed: As in `Simulation`.

    Raises:
        InvalidValueError: If the mechanism is another one, or what `Simulation` raises.
    """

    def __init__(
        self,
        data: FederatedData,
        model: Model,
        mechanism: Mechanism,
        training: LocalTraining,
        server: ServerOptimizer,
        directions: int = DIRECTIONS,
        seed: int = 0,
        noise_seed: int | None = None,
    ):
        require(directions >= 1, "directions", directions, "at least 1")
        require(not mechanism.layers, "clip", mechanism.layers, "one for all layers")
        public_weight = sum(
            group.weight * mechanism.expected_cohort_size(group) for group in mechanism.groups if group.opted_out
        )
        private_weight = mechanism.expected_weight - public_weight
        require(private_weight > 0, "weight", private_weight, "above 0 for a private group that is sampled")
        self._sizes = tuple(parameter_sizes(jax.eval_shape(model.init, jax.random.key(0))).values())
        self._directions = directions
        optimizer = _after_projection(project_private(self._sizes, directions, public_weight, private_weight), server)
        entropy = process_entropy(4) if noise_seed is None else None  # a cohort is drawn twice
        super().__init__(data, model, mechanism, training, optimizer, seed, noise_seed, cohort_entropy=entropy)

    def public_updates(self) -> PublicUpdates:
        """What the next round's public clients send, summarized; nobody else's examples are read."""
        cohort, groups = self.draw_cohort(self.round), self.mechanism.groups
        opted_out_G, weight_G = (np.array([getattr(g, name) for g in groups]) for name in ("opted_out", "weight"))
        clients = cohort[opted_out_G[self.group_K[cohort]]]
        count_K, theta = self.data.train.count_K, self.model()
        x_CM, y_CM = self.data.train.take(clients, int(np.max(count_K)))
        key = jax.random.wrap_key_data(jnp.asarray(stream(self.seed, BATCHES, self.round)))
        train = _client_update(self.engine.model, self.training, self.data.input_scale)
        rows = [np.zeros((0, sum(self._sizes)), np.float32)]
        for client, x_M, y_M in zip(clients.tolist(), x_CM, y_CM, strict=True):
            of_client = (jax.random.fold_in(key, client), np.float32(self.training.rates(self.round)[0]))
            rows.append(np.asarray(train(theta, x_M, y_M, count_K[client], *of_client))[None])
        update_CP = np.concatenate(rows)
        norm_C, clip = np.asarray(dense_updates(jnp.asarray(update_CP)).norm_C), float(self.server_state.clip[0])
        is_finite_C = np.isfinite(norm_C)  # as in a round, others are absent
        scale_C = clip / np.maximum(norm_C[is_finite_C], clip)
        clipped_CP = scale_C[:, None] * update_CP[is_finite_C].astype(np.float64)
        weight_C = weight_G[self.group_K[clients[is_finite_C]]]
        return summarize_public(clipped_CP, weight_C, self._sizes, self._directions)

    def run_round(self) -> None:
        """Run one round; the projection gets the updates of its public clients first."""
        old, others = self.server_state.optimizer[0], self.server_state.optimizer[1:]
        values = (np.asarray(value, np.float32)[None] for value in self.public_updates())
        new = PublicUpdates(*(jax.device_put(value, leaf.sharding) for value, leaf in zip(values, old, strict=True)))
        self.server_state = self.server_state._replace(optimizer=(new, *others))
        super().run_round()


def run(experiment: Experiment, out: Path, watch: runner.Watch) -> Summary:
    """Run PFA into a directory, or resume it there: every variant of the experiment is a WeiAvg whose release is projected.

    Args:
        experiment: The experiment.
        out: The directory.
        watch: Called with the progress after every round; False interrupts the run.

    Raises:
        Interrupted: If the watcher interrupted it.
        FedHDPError: If the experiment cannot be run.
    """
    is_new = not (out / store.EXPERIMENT_FILE).exists()
    content = to_toml(experiment).encode()
    with store.RunDirectory.create(out, content) if is_new else store.RunDirectory.open(out) as directory:
        data = experiment.load_data()
        model, data = build_model(experiment, data, out)
        mechanisms = experiment.variant_mechanisms(experiment.build_mechanism(data), data)
        parts, results = [directory.variant(variant.name) for variant in experiment.variants], []
        for number, (part, mechanism) in enumerate(zip(parts, mechanisms, strict=True)):
            result = part.result()
            if result is None:
                assert isinstance(mechanism, Mechanism)
                training, server = experiment.overrides(number)
                settings = (training, server, DIRECTIONS, experiment.seed, experiment.noise_seed)
                simulation = PfaSimulation(data, model, mechanism, *settings)
                directory.record_clients(simulation.group_of_client())
                batch = VariantBatch(experiment, [number], simulation, parts, watch)
                batch.notes = [NOTE]
                [result] = batch.run(directory.id, None)
            results.append(result)
        summary = Summary(experiment.name, sum(result.seconds for result in results), results, *provenance())
        store.write_value(out / store.SUMMARY_FILE, summary)
        return summary

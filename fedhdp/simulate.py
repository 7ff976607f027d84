"""The loop: cohort → round → evaluate now and then → history, on one machine.

Randomness comes in one stream for each purpose, each a function of the seed and the round alone. So algorithms under one
seed see the same cohorts, batches and initial model, comparisons are paired, and a run resumes from any round. Noise is
drawn from the operating system's entropy unless a noise seed is given, which makes a run repeatable and not private.

Axis letters: K clients of the population, P parameters.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from fedhdp import server
from fedhdp.accounting import spends
from fedhdp.client import LocalTraining
from fedhdp.engine import Engine
from fedhdp.mechanism import Mechanism, require
from fedhdp.metrics import SERVER, Row, group_rows, mean_by_client
from fedhdp.models import Array, Model
from fedhdp.outcome import VariantResult, fill_in, group_results
from fedhdp.population import Population
from fedhdp.server import ServerState, ServerStep

MODEL, COHORT, BATCHES, NOISE = range(1, 5)  # the streams; 0 is the data's


def stream(seed: int, purpose: int, round: int) -> np.ndarray:
    """The key of one purpose in one round, as the two words that JAX's generator takes."""
    return np.random.SeedSequence([seed, purpose, round]).generate_state(2)


class State(NamedTuple):
    """All that a simulation carries from round to round."""

    round: int
    server: ServerState
    personal_KP: Array | None
    new_K: np.ndarray  # clients who have not taken part yet


@lru_cache(maxsize=8)
def _engine(model: Model, training: LocalTraining, step: ServerStep, inputs: int) -> Engine:
    return Engine(
        model, training, step, inputs
    )  # one for all runs that differ in numbers alone: they share a compilation


class Simulation:
    """A population, a model and a mechanism, ready to play rounds."""

    def __init__(
        self,
        population: Population,
        model: Model,
        mechanism: Mechanism,
        training: LocalTraining | None = None,
        step: ServerStep | None = None,
        seed: int = 0,
        noise_seed: int | None = None,
    ):
        clients = f"{population.clients}, the clients of {population.name}"
        require(mechanism.clients == population.clients, "groups", mechanism.clients, f"of {clients} together")
        self.population, self.mechanism, self.seed, self.noise_seed = population, mechanism, seed, noise_seed
        self.training, self.step = training or LocalTraining(), step or ServerStep()
        self.engine = _engine(model, self.training, self.step, int(np.prod(population.input_shape)))
        self.group_K = mechanism.group_of_clients
        expected = mechanism.expected_cohort / self.engine.devices
        self.slots = self.engine.slots(int(expected + 4 * expected**0.5 + 1))

    def start(self) -> State:
        """The state before the first round."""
        theta_P, _ = ravel_pytree(
            self.engine.model.init(jax.random.wrap_key_data(jnp.asarray(stream(self.seed, MODEL, 0))))
        )
        state = jax.device_put(server.start(self.mechanism, self.step, theta_P), self.engine.everywhere)
        personal_KP = self.engine.no_personal_models(self.population.clients) if self.training.personalise else None
        return State(0, state, personal_KP, np.ones(self.population.clients, bool))

    def play(self, state: State) -> State:
        """One round; the state that went in is used up."""
        clients = server.sample_cohort(self.mechanism, np.random.default_rng([self.seed, COHORT, state.round]))
        busiest = np.bincount(clients % self.engine.devices, minlength=1).max() if len(clients) else 0
        self.slots = max(self.slots, self.engine.slots(int(busiest)))  # a cohort is never cut short
        cohort = self.engine.gather(self.population, self.group_K, state.new_K, clients, self.slots)
        server_state, personal_KP = self.engine.round(
            self.population.train.alike,
            state.server,
            jax.device_put(cohort, self.engine.by_client),
            state.personal_KP,
            self.mechanism.terms,
            tuple(np.float32(rate) for rate in self.training.rates(state.round)),
            stream(self.seed, BATCHES, state.round),
            self._noise_key(state.round),
        )
        new_K = state.new_K.copy()
        new_K[clients] = False
        return State(state.round + 1, server_state, personal_KP, new_K)

    def evaluate(self, state: State) -> list[Row]:
        """The global, averaged and personal models, on the server's test set and on the clients' own."""
        names = [group.name for group in self.mechanism.groups]
        models = {"global": state.server.theta_P}
        if self.step.average is not None:
            models["average"] = server.averaged_model(self.step, state.server)
        rows = []
        for model, theta_P in models.items():
            on_server = self._scores(theta_P, self.population.server_x_N, self.population.server_y_N)
            on_clients = self._scores(theta_P, self.population.test.x_N, self.population.test.y_N)
            score_K = mean_by_client(on_clients, self.population.test.count_K)
            rows.append(Row(state.round, SERVER, model, "accuracy", float(on_server.mean())))
            rows += group_rows(state.round, model, names, self.group_K, score_K)
        if state.personal_KP is not None:
            rows += group_rows(state.round, "personal", names, self.group_K, self._personal_scores(state))
        rows.append(Row(state.round, SERVER, "global", "clip", float(state.server.clip)))
        refused = zip(names, np.asarray(state.server.refused_G))
        return rows + [Row(state.round, name, "global", "refused", float(count)) for name, count in refused]

    def pack(self, state: State) -> dict[str, np.ndarray]:
        """The state as named arrays, personal models in the order of the clients, so that any machine can go on."""
        arrays = {f"server_{i}": np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(state.server))}
        arrays |= {"round": np.array(state.round), "new_K": state.new_K}
        if state.personal_KP is not None:
            arrays["personal"] = np.asarray(state.personal_KP)[self._home(np.flatnonzero(~state.new_K))]
        return arrays

    def unpack(self, arrays: dict[str, np.ndarray]) -> State:
        """The state that was packed."""
        start = self.start()
        leaves, tree = jax.tree.flatten(start.server)
        packed = [arrays[f"server_{i}"] for i in range(len(leaves))]
        if [leaf.shape for leaf in packed] != [leaf.shape for leaf in leaves]:
            raise ValueError("the checkpoint is of another model or mechanism")
        personal_KP = start.personal_KP
        if personal_KP is not None:
            rows = np.zeros(personal_KP.shape, np.float32)
            rows[self._home(np.flatnonzero(~arrays["new_K"]))] = arrays["personal"]
            personal_KP = jax.device_put(rows, self.engine.by_client)
        server_state = jax.device_put(jax.tree.unflatten(tree, packed), self.engine.everywhere)
        return State(int(arrays["round"]), server_state, personal_KP, arrays["new_K"])

    def _home(self, clients: np.ndarray) -> np.ndarray:
        """The row of each client among the personal models of all devices."""
        each = -(-self.population.clients // self.engine.devices)
        return clients % self.engine.devices * each + clients // self.engine.devices

    def _scores(self, theta_P: Array, x_N: np.ndarray, y_N: np.ndarray) -> np.ndarray:
        spare = -len(y_N) % self.engine.devices
        x_N, y_N = (np.concatenate([a, a[:spare]]) for a in (x_N, y_N))
        scores = self.engine.scores(theta_P, *jax.device_put((x_N, y_N), self.engine.by_client))
        return np.asarray(scores)[: len(y_N) - spare]

    def _personal_scores(self, state: State) -> np.ndarray:
        test, devices = self.population.test, self.engine.devices
        home_K = self._home(np.arange(self.population.clients))
        client_K = np.zeros(-(-self.population.clients // devices) * devices, int)  # who lives where
        client_K[home_K] = np.arange(self.population.clients)
        x_KM, y_KM = test.take(client_K, int(test.count_K.max()))
        asked = jax.device_put((state.new_K[client_K], x_KM, y_KM, test.count_K[client_K]), self.engine.by_client)
        scores = np.asarray(self.engine.personal_scores(state.server.theta_P, state.personal_KP, *asked))
        return np.where(test.count_K > 0, scores[home_K], np.nan)

    def parameters(self, state: State) -> dict[str, np.ndarray]:
        """The global model, and its average if there is one, as arrays named by where they stand in the model."""
        models = {"global": state.server.theta_P}
        if self.step.average is not None:
            models["average"] = server.averaged_model(self.step, state.server)
        named = {}
        for model, theta_P in models.items():
            leaves, _ = jax.tree.flatten_with_path(self.engine.unravel(theta_P))
            for path, leaf in leaves:
                named[f"{model}/{jax.tree_util.keystr(path, simple=True, separator='/')}"] = np.asarray(leaf)
        return named

    def _noise_key(self, round: int) -> np.ndarray:
        if self.noise_seed is None:
            return np.frombuffer(os.urandom(8), np.uint32)
        return stream(self.noise_seed, NOISE, round)


class Trained(NamedTuple):
    """What a simulation came to."""

    mechanism: Mechanism
    rounds: int
    parameters: dict[str, np.ndarray]  # the global model
    history: list[Row]
    repeatable: bool

    def result(self, name: str, delta: float = 1e-4) -> VariantResult:
        """A line of a table, with each group's epsilon at this delta."""
        groups = group_results(
            self.mechanism, lambda name: [spends(self.mechanism, self.rounds)[name]], lambda name: delta
        )
        return fill_in(VariantResult(name, "", self.rounds, 0.0, self.repeatable, groups), self.history)


def simulate(
    population: Population,
    model: Model,
    mechanism: Mechanism,
    training: LocalTraining | None = None,
    step: ServerStep | None = None,
    rounds: int = 100,
    evaluate_every: int | None = None,
    seed: int = 0,
    noise_seed: int | None = None,
    on_round: Callable[[State], None] | None = None,
) -> Trained:
    """Train for some rounds and evaluate at the end, and on the way if asked."""
    simulation = Simulation(population, model, mechanism, training, step, seed, noise_seed)
    state, history = simulation.start(), []
    while state.round < rounds:
        state = simulation.play(state)
        if on_round is not None:
            on_round(state)
        if state.round == rounds or (evaluate_every and state.round % evaluate_every == 0):
            history += simulation.evaluate(state)
    parameters = simulation.parameters(state)
    return Trained(mechanism, rounds, parameters, history, repeatable=noise_seed is not None)

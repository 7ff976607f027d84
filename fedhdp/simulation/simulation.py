"""Rounds of federated learning on one machine, under one mechanism or several.

Axis letters: K clients, V mechanisms (and personal models of a client), R runs, P parameters.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from fedhdp import server
from fedhdp.client import LocalTraining
from fedhdp.data import FederatedData
from fedhdp.devices import use_cpu_cores
from fedhdp.engine.checks import check_data, check_metrics
from fedhdp.engine.evaluation import Evaluation, model_metrics
from fedhdp.engine.examples import make_example_store, make_gram_matrices, train_by_owner
from fedhdp.engine.explain import explain
from fedhdp.engine.groups import client_groups, members_by_group
from fedhdp.engine.integer_sums import exact_round
from fedhdp.engine.personal_store import MemoryMappedPersonalModels, StateArrays, make_personal_store
from fedhdp.engine.placement import Placement, make_slot_table
from fedhdp.engine.round import ExampleArrays, RoundParamsBatch
from fedhdp.errors import ModelError, RunError, require
from fedhdp.mechanism import Mechanism, ScheduledMechanism, mechanism_at
from fedhdp.models import Array, Model, Parameters, name_parameters, unname_parameters
from fedhdp.results.metrics import MetricRow, clip_rows, evaluation_rows, round_rows
from fedhdp.results.schema import MetricInfo
from fedhdp.results.store import PERSONAL_STORE_FILE, read_arrays, write_arrays
from fedhdp.rng import BATCHES, MODEL, NOISE, cohort_generator, noise_bytes, os_entropy, stream
from fedhdp.server import Optimizer, ServerState
from fedhdp.simulation.mechanisms import as_schedules, check_mechanisms, run_mechanisms, run_numbers
from fedhdp.simulation.setup import make_engine

LOGGER = logging.getLogger("fedhdp.network")
Callback = Callable[["Simulation"], bool | None]


class Simulation:
    """Federated learning on one machine: the rounds completed, the server's state and the personal models.

    Several mechanisms are simulated with the same cohorts, batches and initial model, so that comparisons are paired. A run
    is one global training: mechanisms that differ in their pulls alone share it, noise included.

    Args:
        data: Every client's examples. A client is in the group of its level's name; where the data has no levels, the seed
            draws them by the groups' numbers of clients.
        model: The network.
        mechanisms: One mechanism, or several that draw the same cohorts. Each may be a function that returns the mechanism
            of a round, the first round being 0. It depends on the round alone, and groups and first clips stay the same.
        training: How clients train.
        server_optimizer: A ServerOptimizer, an OptimizerConfig or any optax transformation. None: the update is added.
        seed: Seed of the initial model and of the batches, from 0 to 2**31 - 1.
        noise_seed: Seed of the noise and of the cohorts: repeatable and not private. None: the operating system's entropy.
        directory: Where personal models are that do not fit in memory. None: a temporary file.
        cohort_entropy: Fresh words from which several simulations draw the same cohorts. None: the simulation's own.
        initial_model: The first global model. None: the model's, from the seed.

    Raises:
        InvalidValueError: If a seed is out of range, or the mechanisms do not draw the same cohorts.
        DataError: If the data's levels are not the groups, or not of as many clients, or the data does not fit the model.

    Attributes:
        round: The number of completed rounds.
        server_state: The server's state of every run.
        group_K: Each client's group, as an index into the mechanism's groups.
        participated_K: The clients who have taken part in a round, and so have personal models.
        metrics: What is measured on test examples.
        schedules: The mechanisms as they were given: each a mechanism, or a function of the round.
        histories: For each mechanism, what the evaluations of ``run`` measured.
    """

    def __init__(
        self,
        data: FederatedData,
        model: Model,
        mechanisms: ScheduledMechanism | Sequence[ScheduledMechanism],
        training: LocalTraining | None = None,
        server_optimizer: Optimizer | None = None,
        seed: int = 0,
        noise_seed: int | None = None,
        directory: Path | None = None,
        cohort_entropy: np.ndarray | None = None,
        initial_model: Parameters | None = None,
    ):
        use_cpu_cores()
        require(0 <= seed < 2**31, "seed", seed, "at least 0 and below 2**31")
        if noise_seed is not None:
            require(0 <= noise_seed < 2**31, "noise_seed", noise_seed, "at least 0 and below 2**31")
        self.data, self.seed, self.noise_seed, self.cohort_entropy = data, seed, noise_seed, cohort_entropy
        self.training, self.server_optimizer = training or LocalTraining(), server.as_server_optimizer(server_optimizer)
        self.schedules = as_schedules(mechanisms)
        self.run_of = run_numbers(self.schedules)  # each mechanism's run
        self.round = 0
        self._first_mechanisms = [mechanism_at(schedule, 0) for schedule in self.schedules]
        self.set_mechanisms(self._first_mechanisms)
        arithmetic = self.mechanism.arithmetic
        one_process = arithmetic == "float32" or jax.process_count() == 1
        require(one_process, "arithmetic", arithmetic, "'float32' with several processes")
        self.group_K = client_groups(data, self.mechanism, seed)
        self._members_G = members_by_group(self.group_K, len(self.mechanism.groups))
        check_data(data, model)
        metrics = model_metrics(model)
        check_metrics(data, model, metrics)
        self.metrics = tuple(MetricInfo(metric.name, metric.higher_is_better, metric.percent) for metric in metrics)
        self.engine = make_engine(data, model, self.mechanism, self.training, self.server_optimizer, self.run_of)
        personalize, by_owner = self.training.personalize, train_by_owner(self.training)
        self.placement = Placement(self.engine, self.mechanism, data.train.count_K, by_owner)
        self.examples = make_example_store(self.engine, data.train, self.engine.config.sizes[-1])
        self.gram_K = make_gram_matrices(self.engine, self.examples)
        path = None if directory is None else directory / PERSONAL_STORE_FILE
        self.store = make_personal_store(self.engine, data.num_clients, path) if personalize else None
        self._evaluation = Evaluation(self.engine, data, self.group_K, self.run_of, metrics)
        self._initialize(initial_model)
        if LOGGER.isEnabledFor(logging.INFO):
            LOGGER.info(self.explain())

    def explain(self) -> str:
        """Which path the network takes through the engine, and why."""
        return explain(self.engine.network, self.engine.config.sizes[-1], self.engine.config.layers)

    @property
    def has_personal_file(self) -> bool:
        """Whether personal models are in a file, as they do not fit on the devices."""
        return isinstance(self.store, MemoryMappedPersonalModels)

    @property
    def processes(self) -> int:
        """How many processes the simulation runs in."""
        return jax.process_count()

    def group_of_client(self) -> dict[str, str]:
        """The name of each client's group, by the client's id."""
        names = np.array([group.name for group in self.mechanism.groups])
        return dict(zip(self.data.ids.tolist(), names[self.group_K].tolist(), strict=True))

    def _initialize(self, initial_model: Parameters | None) -> None:
        """Set the state before the first round."""
        key = jax.random.wrap_key_data(jnp.asarray(stream(self.seed, MODEL, 0)))
        if initial_model is not None:
            initial_model = unname_parameters(self.engine.model, name_parameters(initial_model), "initial_model")
        theta_P = ravel_pytree(self.engine.model.init(key) if initial_model is None else initial_model)[0]
        states = [server.initial_state(run, self.server_optimizer, theta_P) for run in self.runs]
        stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *states)
        self.server_state: ServerState = self.engine.put(stacked, self.engine.replicated)
        self.participated_K = np.zeros(self.data.num_clients, bool)
        self.histories: list[list[MetricRow]] = [[] for _ in self.mechanisms]
        self._done: Array | None = None  # ready when the last round is computed
        self._scores: dict[str, np.ndarray] | None = None  # what the clients measure in this round

    def _set_round(self, round: int) -> None:
        """Set the mechanisms of this round, where they are functions of the round."""
        if self._scheduled_round == round or all(isinstance(schedule, Mechanism) for schedule in self.schedules):
            return
        mechanisms = [mechanism_at(schedule, round) for schedule in self.schedules]
        for mechanism, first in zip(mechanisms, self._first_mechanisms, strict=True):
            same_clip = np.array_equal(mechanism.initial_clip, first.initial_clip)
            require(same_clip, "clip", round + 1, "the same at first in every round: the server moves it")
        self.set_mechanisms(mechanisms)

    def set_mechanisms(self, mechanisms: Sequence[Mechanism]) -> None:
        """Replace the mechanisms for the rounds that follow; those that share a run still differ in their pulls alone.

        Where mechanisms are functions of the round, for the next round.

        Raises:
            InvalidValueError: If they are not as many, do not draw the same cohorts, or have other groups, layers or runs.
        """
        check_mechanisms(mechanisms, self._first_mechanisms)
        for mechanism in mechanisms:
            self.training.check(mechanism)
        self.runs = run_mechanisms(mechanisms, self.run_of)
        self._mechanisms = tuple(mechanisms)
        self._round_params: RoundParamsBatch | None = None
        self._scheduled_round = self.round  # whose mechanisms these are, where they are functions of the round

    @property
    def mechanisms(self) -> tuple[Mechanism, ...]:
        """The mechanisms of the last round; within ``before_round`` those of the next, which `set_mechanisms` may change."""
        return self._mechanisms

    @property
    def mechanism(self) -> Mechanism:
        """The first mechanism; all draw its cohorts."""
        return self._mechanisms[0]

    def run(
        self,
        rounds: int,
        before_round: Callback | None = None,
        on_round: Callback | None = None,
        evaluate_every: int | None = None,
        on_evaluate: Callable[[Simulation, list[list[MetricRow]]], bool | None] | None = None,
    ) -> None:
        """Run rounds until ``rounds`` are completed, those before this call included.

        Args:
            rounds: The number of completed rounds at which to stop.
            before_round: Called before each round. It may call `set_mechanisms`. False ends the loop.
            on_round: Called after each round and its evaluation; `round_rows` has what the round measured. False ends the
                loop.
            evaluate_every: Evaluate every so many rounds and after the last one, into ``histories``. None: never.
            on_evaluate: Called after each evaluation, with what `evaluate` returned. False ends the loop after the round.
        """
        while self.round < rounds:
            self._set_round(self.round)
            if before_round is not None and before_round(self) is False:
                return
            self.run_round()
            ends = False
            if evaluate_every is not None and (self.round % evaluate_every == 0 or self.round == rounds):
                evaluation = self.evaluate()
                for history, rows in zip(self.histories, evaluation, strict=True):
                    history += rows
                ends = on_evaluate is not None and on_evaluate(self, evaluation) is False
            if (on_round is not None and on_round(self) is False) or ends:
                return

    def draw_cohort(self, round: int) -> np.ndarray:
        """The clients sampled in a round: secret without a noise seed, unless all groups opted out.

        The seed is no secret: it can be found from the initial model.
        """
        groups = [group for mechanism in self._mechanisms for group in mechanism.groups]
        public_seed = self.seed if all(group.opted_out for group in groups) else None
        generator = cohort_generator(round, self.noise_seed, self.cohort_entropy, public_seed)
        return server.sample_cohort(self.mechanism, self._members_G, generator)

    def run_round(self) -> None:
        """Run one round. It returns when the round is dispatched; at most one round is being computed before it."""
        self._set_round(self.round)
        if self.processes > 1:  # before they share what they draw
            self.wait()
        clients, engine = self.draw_cohort(self.round), self.engine
        layout = self.placement.layout(clients)
        x_N, y_N, start_C = self.examples.fetch(layout)
        personal, row_C = (None, layout.place_C) if self.store is None else self.store.checkout(layout)
        count_K = self.data.train.count_K
        table = make_slot_table(engine, layout, self.group_K, start_C, count_K, row_C, self.participated_K)
        keys = stream(self.seed, BATCHES, self.round)
        if not engine.config.exact:
            keys = np.stack([keys, *self._noise_keys(self.round)])
        rates, keys = engine.put((np.array(self.training.rates(self.round), np.float32), keys), engine.replicated)
        previous = self._done
        if engine.devices > 1:
            self.wait()
        inputs = (self.server_state, personal, ExampleArrays(x_N, y_N, self.gram_K), table, self._params(), rates, keys)
        if engine.config.exact:
            group_C, random_bytes = self.group_K[layout.client_C], partial(noise_bytes, self.noise_seed, self.round)
            outcome = exact_round(engine, self.runs, group_C, layout, random_bytes, *inputs)
        else:
            outcome = engine.round(*inputs)
        self.server_state, personal, self._done = outcome
        if self.store is not None:
            self.store.commit(personal, layout)
        self.participated_K[clients] = True
        self.round, self._scores = self.round + 1, None
        if previous is not None:
            previous.block_until_ready()

    def _noise_keys(self, round: int) -> list[np.ndarray]:
        """A key for each run: the same for all with a noise seed, so that they are paired, else different ones."""
        if self.noise_seed is not None:
            return [stream(self.noise_seed, NOISE, round)] * len(self.runs)
        return list(os_entropy(2 * len(self.runs)).reshape(-1, 2))

    def _params(self) -> RoundParamsBatch:
        """The numbers of all mechanisms, on the devices."""
        if self._round_params is None:
            params_R = jax.tree.map(lambda *leaves: np.stack(leaves), *(run.round_params for run in self.runs))
            pull_VG = np.stack([mechanism.round_params.pull_G for mechanism in self.mechanisms])
            batch = RoundParamsBatch(params_R, pull_VG[: len(self.engine.run_V)])
            self._round_params = self.engine.put(batch, self.engine.replicated)
        return self._round_params

    def wait(self) -> None:
        """Wait until the last round is computed.

        Several devices need this before every dispatch: the cores of a CPU share a few threads, and a round that waits in
        them for another device's sums may keep that device from computing them.
        """
        if self._done is not None:
            self._done.block_until_ready()

    def client_scores(self) -> dict[str, np.ndarray]:
        """What each client measures on its test examples.

        Returns:
            By ``MODEL/METRIC``, as "global/accuracy", arrays of the shape (clients, mechanisms). A model is global, and
            where there are such average, personal and chosen. NaN where a metric is undefined, and without test examples.
        """
        if self._scores is None:
            self.wait()
            self._scores = self._evaluation.on_clients(self._global_models(), self.participated_K, self.store)
        return self._scores

    def _global_models(self) -> dict[str, Array]:
        """The global models of all runs, and their averages if there are such."""
        models = {"global": self.server_state.theta_P}
        if self.server_optimizer.average is not None:
            models["average"] = jax.vmap(partial(server.averaged_model, self.server_optimizer))(self.server_state)
        return models

    def evaluate(self) -> list[list[MetricRow]]:
        """For each mechanism, the metrics of all models: on the server's test set, and by group on the clients' own."""
        client_values, names = self.client_scores(), [group.name for group in self.mechanism.groups]
        server_values = self._evaluation.on_server(self._global_models())
        rows = []
        for v, (r, of_round) in enumerate(zip(self.run_of, self.round_rows(), strict=True)):
            of_server = {name: float(value_R[r]) for name, value_R in server_values.items()}
            of_clients = {name: value_KV[:, v] for name, value_KV in client_values.items()}
            values = evaluation_rows(self.round, self.metrics, names, self.group_K, of_server, of_clients)
            rows.append(values + of_round)
        return rows

    def round_rows(self) -> list[list[MetricRow]]:
        """For each mechanism, what rounds measure without an evaluation: the next clip, and each group's refused updates."""
        clip_R, refused_RG = np.asarray(self.server_state.clip), np.asarray(self.server_state.refused_G)
        rows, names = [], [group.name for group in self.mechanism.groups]
        for r in self.run_of:
            refused = dict(zip(names, refused_RG[r].tolist(), strict=True))
            rows.append(round_rows(self.round, clip_rows(self.round, self.mechanism.layers, clip_R[r]), refused))
        return rows

    def global_model(self, number: int = 0) -> np.ndarray:
        """The global model of the mechanism with this number, as one row of parameters."""
        return np.asarray(self.server_state.theta_P[self.run_of[number]])

    def personal_models(self, clients: np.ndarray | int, number: int = 0) -> np.ndarray:
        """The personal models of these clients, one row each; a client who has not taken part has the global model.

        Raises:
            ModelError: If training does not personalize.
            InvalidValueError: If there is no such client.
        """
        if self.store is None:
            raise ModelError("there are no personal models: training does not personalize", "personalize", False)
        clients = np.atleast_1d(clients)
        exist = len(clients) > 0 and 0 <= min(clients) <= max(clients) < self.data.num_clients
        require(exist, "clients", clients.tolist(), f"from 0 to {self.data.num_clients - 1}")
        personal_CP = self.store.rows(clients)[:, number]
        return np.where(self.participated_K[clients, None], personal_CP, self.global_model(number))

    def model(self, client: int | None = None, number: int = 0) -> Parameters:
        """A mechanism's global model, or a client's personal one, as the parameters that the model's functions take."""
        row_P = self.global_model(number) if client is None else self.personal_models(client, number)[0]
        return self.engine.unravel(jnp.asarray(row_P))

    def named_parameters(self, number: int = 0) -> dict[str, np.ndarray]:
        """A mechanism's global model, and its average if there is one, as arrays named by their path in the model."""
        named: dict[str, np.ndarray] = {}
        for model, theta_RP in self._global_models().items():
            parameters = self.engine.unravel(theta_RP[self.run_of[number]])
            named |= {f"{model}/{name}": np.asarray(leaf) for name, leaf in name_parameters(parameters).items()}
        return named

    def state_arrays(self) -> StateArrays:
        """The state as named arrays; large ones are functions that compute them, to be called before the next round."""
        arrays: StateArrays = {f"server_{i}": np.asarray(a) for i, a in enumerate(jax.tree.leaves(self.server_state))}
        clients_K = {"participated_K": self.participated_K.copy(), "group_K": self.group_K}
        arrays = {**arrays, **clients_K, "round": np.array(self.round)}
        if self.store is None:
            return arrays
        return {**arrays, **self.store.state_arrays(np.flatnonzero(self.participated_K))}

    def restore(self, arrays: dict[str, Any]) -> None:
        """Restore the state that `state_arrays` returned. Large arrays are removed from the mapping.

        Raises:
            RunError: If the arrays are of another model, mechanism, server optimizer, number of clients or version.
        """
        for name in ("participated_K", "group_K", "round"):
            if name not in arrays:
                raise RunError(f"the checkpoint has no {name}: it is of another version of fedhdp", "checkpoint")
        leaves, tree = jax.tree.flatten(self.server_state)
        saved = [arrays[f"server_{i}"] for i in range(sum(name.startswith("server_") for name in arrays))]
        same_shapes = [leaf.shape for leaf in saved] == [leaf.shape for leaf in leaves]
        if not same_shapes or len(arrays["participated_K"]) != self.data.num_clients:
            raise RunError("the checkpoint is of another model, mechanism, server optimizer or data set", "checkpoint")
        if not np.array_equal(arrays["group_K"], self.group_K):
            raise RunError("the checkpoint has clients in other groups", "checkpoint")
        self.wait()
        self.participated_K = np.array(arrays["participated_K"])
        if self.store is not None:
            self.store.restore(arrays, np.flatnonzero(self.participated_K))
        self.server_state = self.engine.put(jax.tree.unflatten(tree, saved), self.engine.replicated)
        self.round, self._done, self._scores = int(arrays["round"]), None, None
        self._scheduled_round = -1

    def save(self, path: Path | str) -> None:
        """Write the state to a file, atomically. Personal models that do not fit in memory stay in ``directory``."""
        write_arrays(Path(path), self.state_arrays())

    def load(self, path: Path | str) -> None:
        """Restore the state that `save` wrote.

        Raises:
            RunError: If the file is damaged, or of another simulation.
        """
        self.restore(read_arrays(Path(path)))

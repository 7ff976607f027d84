"""Rounds of federated learning on one machine, under one mechanism or several.

Mechanisms that are simulated together have the same cohorts, batches and initial model, so that comparisons are paired.

Axis letters: K clients, V mechanisms (and personal models of a client), R runs, P parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from msgspec.structs import replace

from fedhdp import server
from fedhdp.client import LocalTraining
from fedhdp.data import FederatedData
from fedhdp.devices import use_cpu_cores
from fedhdp.engine.checks import check_data
from fedhdp.engine.evaluation import Evaluation, choose_pulls
from fedhdp.engine.examples import make_example_store, make_gram_matrices, should_replicate
from fedhdp.engine.personal_store import StateArrays, make_personal_store
from fedhdp.engine.placement import (
    CohortLayout,
    assign_slots,
    group_by_size,
    make_slot_table,
    partition_by_owner,
    partition_evenly,
    size_classes,
)
from fedhdp.engine.round import Engine, EngineConfig, ExampleArrays, RoundParamsBatch
from fedhdp.errors import DataError, ModelError, RunError, require
from fedhdp.mechanism import SERVER, Mechanism
from fedhdp.models import Array, Model, Parameters
from fedhdp.privacy.accounting import privacy_costs
from fedhdp.results.metrics import MetricRow, group_rows
from fedhdp.results.schema import VariantResult, account_groups, attach_metrics
from fedhdp.results.store import read_arrays, write_arrays
from fedhdp.rng import BATCHES, COHORT, MODEL, NOISE, os_entropy, stream
from fedhdp.server import Optimizer, ServerOptimizer, ServerState

Hook = Callable[["Simulation"], bool | None]


@lru_cache(maxsize=8)  # on CPUs each takes up to a thousand of the 65,530 memory maps that Linux gives a process
def _engine(model: Model, training: LocalTraining, optimizer: Optimizer, config: EngineConfig) -> Engine:
    """One engine for all simulations that differ in numbers alone: they share a compilation."""
    return Engine(model, training, optimizer, config)


class Simulation:
    """Federated learning on one machine, ready for its first round; it owns its state and changes it in place.

    The state is the number of rounds completed, the server's state and the personal models. Several mechanisms are
    simulated side by side with the same cohorts. A run is one global training: mechanisms that differ in their pulls alone
    share a run, noise included, and each has personal models of its own.

    Args:
        data: Every client's examples. A mechanism's groups take the clients in order.
        model: The network.
        mechanisms: One mechanism, or several that draw the same cohorts.
        training: How clients train.
        server_optimizer: How the server applies the noised update: a ServerOptimizer or any optax transformation.
        seed: Seed of the initial model and of the batches, from 0 to 2**31 - 1.
        noise_seed: Seed of the noise and of the cohorts: repeatable and not private. None: the operating system's entropy.
        directory: Where personal models are kept that do not fit in memory. None: a temporary file.
        cohort_entropy: Fresh words from which several simulations draw the same cohorts. None: the simulation's own.

    Raises:
        InvalidValueError: If a seed is out of range, or the mechanisms do not draw the same cohorts.
        DataError: If the groups do not have as many clients as the data, or the data does not fit the model.

    Attributes:
        round: How many rounds are completed.
        server_state: The server's state of every run.
        participated_K: The clients who have taken part in a round, and so have personal models.
        histories: For each mechanism, the metrics of the rounds that ``run`` evaluated.
    """

    def __init__(
        self,
        data: FederatedData,
        model: Model,
        mechanisms: Mechanism | Sequence[Mechanism],
        training: LocalTraining | None = None,
        server_optimizer: Optimizer | None = None,
        seed: int = 0,
        noise_seed: int | None = None,
        directory: Path | None = None,
        cohort_entropy: np.ndarray | None = None,
    ):
        use_cpu_cores()
        require(0 <= seed < 2**31, "seed", seed, "at least 0 and below 2**31")
        if noise_seed is not None:
            require(0 <= noise_seed < 2**31, "noise_seed", noise_seed, "at least 0 and below 2**31")
        self.data, self.seed, self.noise_seed, self.cohort_entropy = data, seed, noise_seed, cohort_entropy
        self.training, self.server_optimizer = training or LocalTraining(), server_optimizer or ServerOptimizer()
        mechanisms = [mechanisms] if isinstance(mechanisms, Mechanism) else list(mechanisms)
        require(len(mechanisms) >= 1, "mechanisms", len(mechanisms), "one or more")
        runs = list(dict.fromkeys(map(global_training, mechanisms)))
        self.run_of = [runs.index(global_training(mechanism)) for mechanism in mechanisms]  # each mechanism's run
        self.set_mechanisms(mechanisms)
        clients = self.mechanism.clients
        if clients != data.num_clients:
            message = f"groups have {clients} clients in total, the data has {data.num_clients}"
            raise DataError(message, "groups", clients)
        check_data(data, model)
        self.engine = self._make_engine(model)
        self.group_K = self.mechanism.client_group_indices
        self.slots = self.engine.padded_cohort_size(self._expected_slots())
        self.examples = make_example_store(self.engine, data.train, self.engine.config.sizes[-1])
        self.gram_K = make_gram_matrices(self.engine, self.examples)
        personalize = self.training.personalize
        self.store = make_personal_store(self.engine, data.num_clients, directory) if personalize else None
        self._initialize()

    def _make_engine(self, model: Model) -> Engine:
        personalize, train = self.training.personalize, self.data.train
        sizes = size_classes(train, self.training.batch_size, several=model.head is not None)
        replicated = should_replicate(train, partition_by_owner=personalize)
        run_V = tuple(self.run_of) if personalize else ()
        inputs = int(np.prod(self.data.input_shape))
        config = EngineConfig(inputs, sizes, train.uniform_size, replicated, run_V, len(self.runs))
        return _engine(model, self.training, self.server_optimizer, config)

    def _expected_slots(self) -> int:
        """How many slots each device needs for all but the rarest cohorts."""
        expected = self.mechanism.expected_cohort_size() / self.engine.devices
        fixed = self.mechanism.sampling == "fixed" and (not self.training.personalize or self.engine.devices == 1)
        spare = (0 if fixed else 4 * expected**0.5 + 1) + (len(self.engine.config.sizes) - 1) * self.engine.chunk
        return math.ceil(expected + spare)

    def _initialize(self) -> None:
        """Set the state before the first round."""
        key = jax.random.wrap_key_data(jnp.asarray(stream(self.seed, MODEL, 0)))
        theta_P = ravel_pytree(self.engine.model.init(key))[0]
        self.round = 0
        self.server_state: ServerState = self.engine.put(self._initial_server_state(theta_P), self.engine.replicated)
        self.participated_K = np.zeros(self.data.num_clients, bool)
        self.histories: list[list[MetricRow]] = [[] for _ in self.mechanisms]
        self._done: Array | None = None  # ready when the last round is computed
        self._scores: dict[str, np.ndarray] | None = None  # the clients' scores of this round

    def _initial_server_state(self, theta_P: Array) -> ServerState:
        states = [server.initial_state(run, self.server_optimizer, theta_P) for run in self.runs]
        return jax.tree.map(lambda *leaves: np.stack(leaves), *states)

    def set_mechanisms(self, mechanisms: Sequence[Mechanism]) -> None:
        """Replace the mechanisms for the rounds that follow.

        Args:
            mechanisms: As many as there are; those that share a run must still differ in their pulls alone.

        Raises:
            InvalidValueError: If they do not draw the same cohorts or do not have the same runs.
        """
        mechanisms = tuple(mechanisms)
        cohorts = {cohorts_of(mechanism) for mechanism in mechanisms}
        require(len(cohorts) == 1, "mechanisms", len(cohorts), "such that all draw the same cohorts")
        require(len(mechanisms) == len(self.run_of), "mechanisms", len(mechanisms), f"{len(self.run_of)}, as there are")
        for mechanism in mechanisms:
            self.training.check(mechanism)
        trained = dict(zip(self.run_of, map(global_training, mechanisms), strict=True))
        shared = all(trained[run] == global_training(m) for run, m in zip(self.run_of, mechanisms, strict=True))
        require(shared, "mechanisms", len(mechanisms), "such that those of a run differ in their pulls alone")
        self._mechanisms = mechanisms
        self.runs = [trained[run] for run in range(len(trained))]
        self._round_params: RoundParamsBatch | None = None

    @property
    def mechanisms(self) -> tuple[Mechanism, ...]:
        """The mechanisms of the next round. `set_mechanisms` alone changes them, so that cohorts and noise agree."""
        return self._mechanisms

    @property
    def mechanism(self) -> Mechanism:
        """The first mechanism; all draw its cohorts."""
        return self._mechanisms[0]

    def run(
        self,
        rounds: int,
        before_round: Hook | None = None,
        after_round: Hook | None = None,
        evaluate_every: int | None = None,
    ) -> None:
        """Run rounds until ``rounds`` are completed: the only round loop.

        Args:
            rounds: Stop when so many rounds are completed, those before this call included.
            before_round: Called before each round. It may call `set_mechanisms`. False ends the loop.
            after_round: Called after each round and its evaluation. False ends the loop.
            evaluate_every: Evaluate every so many rounds and after the last one, into ``histories``. None: never.
        """
        while self.round < rounds:
            if before_round is not None and before_round(self) is False:
                return
            self.run_round()
            if evaluate_every is not None and (self.round % evaluate_every == 0 or self.round == rounds):
                for history, rows in zip(self.histories, self.evaluate(), strict=True):
                    history += rows
            if after_round is not None and after_round(self) is False:
                return

    def draw_cohort(self, round: int) -> np.ndarray:
        """The clients who are sampled in a round.

        Secret unless there is a noise seed: the seed can be found from the initial model and is used again. Where no group
        is promised anything it serves.
        """
        words = [self.seed if self.noise_seed is None else self.noise_seed]
        if self.noise_seed is None and self.cohort_entropy is not None:
            words = [int(word) for word in self.cohort_entropy]
        elif self.noise_seed is None and not all(group.opted_out for m in self._mechanisms for group in m.groups):
            words = [int(word) for word in os_entropy(4)]
        return server.sample_cohort(self.mechanism, np.random.default_rng([*words, COHORT, round]))

    def run_round(self) -> None:
        """Run one round. It returns when the round is dispatched; at most one round is being computed before it."""
        clients, count_K, engine = self.draw_cohort(self.round), self.data.train.count_K, self.engine
        if not engine.config.uniform_size:  # those with most examples first, so that chunks are alike
            clients = clients[np.argsort(-count_K[clients], kind="stable")]
        partition = partition_by_owner if self.training.personalize else partition_evenly
        layout = self._layout(partition(engine, clients))
        x_N, y_N, start_C = self.examples.fetch(layout)
        personal, row_C = None, layout.place_C
        if self.store is not None:
            personal, row_C = self.store.checkout(layout)
        table = make_slot_table(engine, layout, self.group_K, start_C, count_K, row_C, self.participated_K)
        keys = np.stack([stream(self.seed, BATCHES, self.round), *self._noise_keys(self.round)])
        rates = np.array(self.training.rates(self.round), np.float32)
        rates, keys = engine.put((rates, keys), engine.replicated)
        previous = self._done
        if engine.devices > 1:
            self.wait()
        self.server_state, personal, self._done = engine.round(
            self.server_state, personal, ExampleArrays(x_N, y_N, self.gram_K), table, self._params(), rates, keys
        )
        if self.store is not None:
            self.store.commit(personal, layout)
        self.participated_K[clients] = True
        self.round, self._scores = self.round + 1, None
        if previous is not None:
            previous.block_until_ready()

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

        Several devices need it before every dispatch: the cores of a CPU share a few threads, and a round that waits in
        them for another device's sums may keep that device from computing them.
        """
        if self._done is not None:
            self._done.block_until_ready()

    def client_scores(self) -> dict[str, np.ndarray]:
        """What each kind of model scores on each client's own test examples.

        Returns:
            For "global", and where there are such "average", "personal" and "chosen": scores of the shape (clients,
            mechanisms). A client without test examples has NaN.
        """
        if self._scores is None:
            self._scores = self._score_clients()
        return self._scores

    def _score_clients(self) -> dict[str, np.ndarray]:
        self.wait()
        theta_RP, evaluation = self.server_state.theta_P, self._evaluation
        score_KT = evaluation.on_clients(theta_RP, self.participated_K, self.store)
        scores = {"global": score_KT[:, self.run_of]}
        if server.average_decay(self.server_optimizer) is not None:
            scores["average"] = evaluation.on_clients(self._averages(), self.participated_K, None)[:, self.run_of]
        if self.store is not None:
            scores["personal"] = score_KT[:, len(self.runs) :]
            if self.data.validation is not None:
                held_out_KT = evaluation.on_held_out(theta_RP, self.participated_K, self.store)
                scores["chosen"] = choose_pulls(self.run_of, held_out_KT[:, len(self.runs) :], scores["personal"])
        return scores

    def evaluate(self) -> list[list[MetricRow]]:
        """For each mechanism, the metrics of all models: on the server's test set, and by group on the clients' own."""
        client_scores, names = self.client_scores(), [group.name for group in self.mechanism.groups]
        models = {"global": self.server_state.theta_P}
        if server.average_decay(self.server_optimizer) is not None:
            models["average"] = self._averages()
        server_scores = {}
        if len(self.data.server_y_N) > 0:
            server_scores = {model: self._evaluation.on_server(theta_RP) for model, theta_RP in models.items()}
        clip_R, refused_RG = np.asarray(self.server_state.clip), np.asarray(self.server_state.refused_G)
        metrics = []
        for v, r in enumerate(self.run_of):
            of_server = partial(MetricRow, self.round, SERVER)
            rows = [of_server(model, "accuracy", float(score_R[r])) for model, score_R in server_scores.items()]
            for model, score_KV in client_scores.items():
                rows += group_rows(self.round, model, names, self.group_K, score_KV[:, v])
            rows.append(of_server("global", "clip", float(clip_R[r])))
            for name, refused in zip(names, refused_RG[r], strict=True):
                rows.append(MetricRow(self.round, name, "global", "refused", float(refused)))
            metrics.append(rows)
        return metrics

    @cached_property
    def _evaluation(self) -> Evaluation:
        return Evaluation(self.engine, self.data, self.group_K)

    def global_model(self, number: int = 0) -> np.ndarray:
        """The global model of a mechanism, as one row of parameters."""
        return np.asarray(self.server_state.theta_P[self.run_of[number]])

    def personal_models(self, clients: np.ndarray | int, number: int = 0) -> np.ndarray:
        """The personal models of these clients under a mechanism, one row each.

        A client who has not taken part has the global model.

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
        models = {"global": self.server_state.theta_P}
        if server.average_decay(self.server_optimizer) is not None:
            models["average"] = self._averages()
        named = {}
        for model, theta_RP in models.items():
            leaves, _ = jax.tree.flatten_with_path(self.engine.unravel(theta_RP[self.run_of[number]]))
            for path, leaf in leaves:
                named[f"{model}/{jax.tree_util.keystr(path, simple=True, separator='/')}"] = np.asarray(leaf)
        return named

    def _averages(self) -> Array:
        return jax.vmap(partial(server.averaged_model, self.server_optimizer))(self.server_state)

    def state_arrays(self) -> StateArrays:
        """The state as named arrays, independent of the number of devices.

        Large arrays are functions that make them, to be called before the next round.
        """
        arrays: StateArrays = {f"server_{i}": np.asarray(a) for i, a in enumerate(jax.tree.leaves(self.server_state))}
        arrays = {**arrays, "round": np.array(self.round), "participated_K": self.participated_K.copy()}
        if self.store is None:
            return arrays
        return {**arrays, **self.store.state_arrays(np.flatnonzero(self.participated_K))}

    def restore(self, arrays: dict[str, Any]) -> None:
        """Take over the state that `state_arrays` returned, from a simulation made in the same way.

        Personal models are removed from the arrays one by one, so that memory holds them once.

        Raises:
            RunError: If the arrays are of another model, mechanism, server optimizer or number of clients.
        """
        initial = self._initial_server_state(jnp.zeros(self.engine.parameters))
        leaves, tree = jax.tree.flatten(initial)
        saved = [arrays[f"server_{i}"] for i in range(sum(name.startswith("server_") for name in arrays))]
        same_shapes = [leaf.shape for leaf in saved] == [leaf.shape for leaf in leaves]
        if not same_shapes or len(arrays["participated_K"]) != self.data.num_clients:
            raise RunError("the checkpoint is of another model, mechanism, server optimizer or data set", "checkpoint")
        self.wait()
        self.participated_K = np.array(arrays["participated_K"])
        if self.store is not None:
            self.store.restore(arrays, np.flatnonzero(self.participated_K))
        self.server_state = self.engine.put(jax.tree.unflatten(tree, saved), self.engine.replicated)
        self.round, self._done, self._scores = int(arrays["round"]), None, None

    def save(self, path: Path | str) -> None:
        """Write the state to a file, atomically. Personal models that memory does not hold stay in ``directory``."""
        write_arrays(Path(path), self.state_arrays())

    def load(self, path: Path | str) -> None:
        """Restore the state that `save` wrote.

        Raises:
            RunError: If the file is damaged, or of another simulation.
        """
        self.restore(read_arrays(Path(path)))

    def _layout(self, shares: list[np.ndarray]) -> CohortLayout:
        """The slots of a cohort, given each device's share of it; more slots where they do not suffice."""
        count_K, sizes = self.data.train.count_K, self.engine.config.sizes
        while True:
            chunk = self.engine.chunk_size(self.slots // self.engine.devices)
            placed = [group_by_size(share, count_K, sizes, chunk) if len(sizes) > 1 else share for share in shares]
            needed = max(map(len, placed))
            if needed * self.engine.devices <= self.slots:
                return assign_slots(placed, self.slots)
            self.slots = self.engine.padded_cohort_size(needed)

    def _noise_keys(self, round: int) -> list[np.ndarray]:
        """A key for each run: with a noise seed the same for all, so that they are paired, else its own."""
        if self.noise_seed is not None:
            return [stream(self.noise_seed, NOISE, round)] * len(self.runs)
        return list(os_entropy(2 * len(self.runs)).reshape(-1, 2))


def global_training(mechanism: Mechanism) -> Mechanism:
    """The mechanism as the server sees it: without pulls, as personal models never reach the server."""
    return replace(mechanism, groups=tuple(replace(group, pull=0.0) for group in mechanism.groups))


def cohorts_of(mechanism: Mechanism) -> tuple:
    """What decides who is sampled: mechanisms that agree in it can be simulated together."""
    return mechanism.sampling, tuple((group.clients, group.sampling_rate) for group in mechanism.groups)


class SimulationResult(NamedTuple):
    """The outcome of a simulation under one mechanism.

    Attributes:
        mechanism: The mechanism.
        rounds: How many rounds were completed.
        parameters: The global model, as arrays named by their path in the model.
        scores: Each client's score at the end, by the kind of model (see `Simulation.client_scores`).
        history: The metrics of every evaluation.
        repeatable: Whether there was a noise seed, so that nothing is private.
    """

    mechanism: Mechanism
    rounds: int
    parameters: dict[str, np.ndarray]
    scores: dict[str, np.ndarray]
    history: list[MetricRow]
    repeatable: bool

    def result(self, name: str, delta: float = 1e-4) -> VariantResult:
        """A line of a table, with each group's epsilon at this delta."""
        groups = account_groups(
            self.mechanism, lambda name: [privacy_costs(self.mechanism, self.rounds)[name]], lambda name: delta
        )
        return attach_metrics(VariantResult(name, "", self.rounds, 0.0, self.repeatable, groups), self.history)


def simulate(
    data: FederatedData,
    model: Model,
    mechanism: Mechanism,
    training: LocalTraining | None = None,
    server_optimizer: Optimizer | None = None,
    rounds: int = 100,
    evaluate_every: int | None = None,
    seed: int = 0,
    noise_seed: int | None = None,
    on_round: Hook | None = None,
) -> SimulationResult:
    """Train under one mechanism and evaluate.

    Args:
        data: Every client's examples. The mechanism's groups take the clients in order.
        model: The network.
        mechanism: The privacy groups, and how updates are sampled, clipped, noised and weighed.
        training: How clients train.
        server_optimizer: How the server applies the noised update: a ServerOptimizer or any optax transformation.
        rounds: How many rounds.
        evaluate_every: Evaluate every so many rounds, besides the last.
        seed: Seed of the initial model and of the batches.
        noise_seed: Seed of the noise and of the cohorts: repeatable and not private. None: the operating system's entropy.
        on_round: Called with the simulation after each round. False ends the training.

    Returns:
        The global model, every client's scores and the metrics.

    Raises:
        InvalidValueError: If an argument is out of range.
        DataError: If the data does not fit the groups or the model.
    """
    message = "a Mechanism (simulate_many takes several)"
    require(isinstance(mechanism, Mechanism), "mechanism", type(mechanism).__name__, message)
    mechanisms = [mechanism]
    (result,) = simulate_many(
        data, model, mechanisms, training, server_optimizer, rounds, evaluate_every, seed, noise_seed, on_round
    )
    return result


def simulate_many(
    data: FederatedData,
    model: Model,
    mechanisms: Sequence[Mechanism],
    training: LocalTraining | None = None,
    server_optimizer: Optimizer | None = None,
    rounds: int = 100,
    evaluate_every: int | None = None,
    seed: int = 0,
    noise_seed: int | None = None,
    on_round: Hook | None = None,
) -> list[SimulationResult]:
    """Train under several mechanisms in one program, paired: with the same cohorts, batches and initial model.

    Args and errors are those of `simulate`, with several mechanisms that draw the same cohorts.

    Returns:
        A result for each mechanism, in their order.
    """
    _require_count("rounds", rounds)
    if evaluate_every is not None:
        _require_count("evaluate_every", evaluate_every)
    simulation = Simulation(data, model, mechanisms, training, server_optimizer, seed, noise_seed)
    simulation.run(rounds, after_round=on_round, evaluate_every=evaluate_every or rounds)
    results = []
    for number, (mechanism, history) in enumerate(zip(simulation.mechanisms, simulation.histories, strict=True)):
        if not history or history[-1].round != simulation.round:  # ended by on_round
            history += simulation.evaluate()[number]
        scores = {model: score_KV[:, number] for model, score_KV in simulation.client_scores().items()}
        parameters, repeatable = simulation.named_parameters(number), noise_seed is not None
        results.append(SimulationResult(mechanism, simulation.round, parameters, scores, history, repeatable))
    return results


def _require_count(field: str, value: object) -> None:
    integer = isinstance(value, int | np.integer) and not isinstance(value, bool)
    require(integer and value >= 1, field, value, "a whole number of at least 1")  # type: ignore[operator]

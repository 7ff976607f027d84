"""A population and the mechanisms that are played on it, round by round, on one machine.

Mechanisms that are played together have the same cohorts, batches and initial model, so that comparisons are paired.

Axis letters: K clients of the population, P parameters.
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
from fedhdp.engine.checks import check_data
from fedhdp.engine.devices import use_cpu_cores
from fedhdp.engine.evaluation import Evaluation, chosen
from fedhdp.engine.examples import make_example_store, make_gram_matrices, should_replicate
from fedhdp.engine.personal_store import Packed, make_personal_store
from fedhdp.engine.placement import (
    CohortLayout,
    assign_slots,
    by_size,
    make_slot_table,
    partition_by_owner,
    partition_evenly,
    size_classes,
)
from fedhdp.engine.round import Engine, EngineConfig, ExampleArrays, RoundParamsBatch
from fedhdp.errors import require
from fedhdp.mechanism import SERVER, Mechanism
from fedhdp.models import Array, Model, Parameters
from fedhdp.privacy.accounting import privacy_costs
from fedhdp.results.metrics import MetricRow, group_rows
from fedhdp.results.schema import VariantResult, account_groups, attach_metrics
from fedhdp.rng import BATCHES, COHORT, MODEL, NOISE, os_entropy, stream
from fedhdp.server import ServerOptimizer, ServerState


class State(NamedTuple):
    """All that a simulation carries from round to round."""

    round: int
    server: ServerState  # of every run
    personal: Any  # personal models, as their store keeps them; None without personalization
    uninitialized_K: np.ndarray  # clients who have not taken part yet
    done: Any = None  # ready when the round is, and still there in the next


@lru_cache(maxsize=8)  # on CPUs each takes up to a thousand of the 65,530 memory maps that Linux gives a process
def _engine(model: Model, training: LocalTraining, step: ServerOptimizer, config: EngineConfig) -> Engine:
    """One engine for all runs that differ in numbers alone: they share a compilation."""
    return Engine(model, training, step, config)


class Simulation:
    """A population, a model and one mechanism or several, ready to play rounds.

    Several mechanisms are played at once, and have to draw the same cohorts. Those that differ in their pulls alone are
    one run: they share its global model, noise and all, and each has personal models of its own. With ``repeats`` all of
    them are played as often beside one another, each time with another initial model and other noise.
    """

    def __init__(
        self,
        population: FederatedData,
        model: Model,
        mechanism: Mechanism | Sequence[Mechanism],
        training: LocalTraining | None = None,
        step: ServerOptimizer | None = None,
        seed: int = 0,
        noise_seed: int | None = None,
        folder: Path | None = None,  # of personal models that memory does not hold; None: a temporary one
        repeats: int = 1,
        cohorts: np.ndarray | None = None,  # fresh words that simulations shown side by side draw by; None: its own
    ):
        use_cpu_cores()
        require(repeats >= 1, "repeats", repeats, "at least 1")
        require(0 <= seed < 2**31, "seed", seed, "at least 0 and below 2**31")
        if noise_seed is not None:
            require(0 <= noise_seed < 2**31, "noise_seed", noise_seed, "at least 0 and below 2**31")
        self.population, self.seed, self.noise_seed, self.cohorts = population, seed, noise_seed, cohorts
        self.training, self.step = training or LocalTraining(), step or ServerOptimizer()
        once = [mechanism] if isinstance(mechanism, Mechanism) else list(mechanism)
        self.set_mechanisms(once * repeats, repeats)
        clients = f"{population.clients}, the clients of {population.name}"
        require(
            self.mechanism.clients == population.clients, "groups", self.mechanism.clients, f"of {clients} together"
        )
        check_data(population, model)
        run_V = tuple(self.run_of) if self.training.personalize else ()
        sizes = size_classes(population.train, self.training.batch_size, several=model.head is not None)
        everywhere = should_replicate(population.train, partition_by_owner=self.training.personalize)
        inputs = int(np.prod(population.input_shape))
        config = EngineConfig(inputs, sizes, population.train.uniform_size, everywhere, run_V, len(self.runs))
        self.engine = _engine(model, self.training, self.step, config)
        self.group_K = self.mechanism.client_group_indices
        expected = self.mechanism.expected_cohort / self.engine.devices
        steady = self.mechanism.sampling == "fixed" and (not self.training.personalize or self.engine.devices == 1)
        spare = (0 if steady else 4 * expected**0.5 + 1) + (len(sizes) - 1) * self.engine.chunk
        self.slots = self.engine.padded_cohort_size(math.ceil(expected + spare))
        self.examples = make_example_store(self.engine, population.train, sizes[-1])
        self.gram_K = make_gram_matrices(self.engine, self.examples)
        self.store = make_personal_store(self.engine, population.clients, folder) if self.training.personalize else None
        self._numbers: RoundParamsBatch | None = None

    def set_mechanisms(self, mechanisms: list[Mechanism], repeats: int = 1) -> None:
        """Take these mechanisms for the rounds that follow: as many, and as much alike, as before."""
        draws = {cohorts_of(one) for one in mechanisms}
        require(len(draws) == 1, "mechanisms", len(draws), "such that all draw the same cohorts")
        for one in mechanisms:
            self.training.check(one)
        self._mechanisms = tuple(mechanisms)
        each = len(mechanisms) // repeats
        trained = [(number // each, global_training(one)) for number, one in enumerate(mechanisms)]
        self.runs = list(dict.fromkeys(trained))  # what the server really runs: which repeat, and what
        self.run_of = [self.runs.index(one) for one in trained]
        self._numbers = None

    @property
    def mechanisms(self) -> tuple[Mechanism, ...]:
        """What is played; changed by ``set_mechanisms`` alone, so that cohorts and noise are always of the same promise."""
        return self._mechanisms

    @property
    def mechanism(self) -> Mechanism:
        """The first of them, whose cohorts are everybody's."""
        return self._mechanisms[0]

    def start(self) -> State:
        """The state before the first round."""
        starts = []
        for repeat, run in self.runs:
            key = jax.random.wrap_key_data(jnp.asarray(stream(self.seed, MODEL, 0, repeat)))
            starts.append(server.start(run, self.step, ravel_pytree(self.engine.model.init(key))[0]))
        state_R = jax.tree.map(lambda *each: np.stack(each), *starts)
        personal = None if self.store is None else self.store.start()
        return State(
            0, self.engine.put(state_R, self.engine.replicated), personal, np.ones(self.population.clients, bool)
        )

    def draw_cohort(self, round: int) -> np.ndarray:
        """Who is asked in a round.

        Nobody may be able to tell: a seed can be found from the initial model, and is used again. Where nothing is
        promised, it serves.
        """
        words = [self.seed if self.noise_seed is None else self.noise_seed]
        if self.noise_seed is None and self.cohorts is not None:
            words = [int(word) for word in self.cohorts]
        elif self.noise_seed is None and not all(one.opted_out for m in self._mechanisms for one in m.groups):
            words = [int(word) for word in os_entropy(4)]
        return server.sample_cohort(self.mechanism, np.random.default_rng([*words, COHORT, round]))

    def run_round(self, state: State) -> State:
        """One round; the state that went in is used up."""
        _refuse_what_is_used_up(state)
        clients = self.draw_cohort(state.round)
        count_K = self.population.train.count_K
        if not self.engine.config.uniform_size:  # those with most examples first, so that chunks are alike
            clients = clients[np.argsort(-count_K[clients], kind="stable")]
        seats = self._seats(
            (partition_by_owner if self.training.personalize else partition_evenly)(self.engine, clients)
        )
        x_N, y_N, start_C = self.examples.fetch(seats)
        personal, row_C = None, seats.place_C
        if self.store is not None:
            personal, row_C = self.store.checkout(state.personal, seats)
        table = make_slot_table(self.engine, seats, self.group_K, start_C, count_K, row_C, state.uninitialized_K)
        if self._numbers is None:
            terms_R = jax.tree.map(lambda *each: np.stack(each), *(run.round_params for _, run in self.runs))
            pull_VG = np.stack([one.round_params.pull_G for one in self.mechanisms])[: len(self.engine.run_V)]
            self._numbers = self.engine.put(RoundParamsBatch(terms_R, pull_VG), self.engine.replicated)
        rates = np.array(self.training.rates(state.round), np.float32)
        keys = np.stack([stream(self.seed, BATCHES, state.round), *self._noise_keys(state.round)])
        rates, keys = self.engine.put((rates, keys), self.engine.replicated)
        self._wait_for_round(state)
        server_state, personal, done = self.engine.round(
            state.server, personal, ExampleArrays(x_N, y_N, self.gram_K), table, self._numbers, rates, keys
        )
        if self.store is not None:
            personal = self.store.commit(state.personal, personal, seats)
        uninitialized_K = state.uninitialized_K.copy()
        uninitialized_K[clients] = False
        return State(state.round + 1, server_state, personal, uninitialized_K, done)

    def _wait_for_round(self, state: State) -> None:
        """Wait for a round before more is asked of several devices.

        What queues up for the cores of a CPU shares a few threads, and a round that waits in them for its other device's
        sums may keep that device from ever computing them.
        """
        if state.done is not None and self.engine.devices > 1:
            state.done.block_until_ready()

    def client_scores(self, state: State) -> dict[str, np.ndarray]:
        """What every kind of model scores on each client's own test examples: score_KV, a column for each mechanism.

        The kinds are global, average, personal and chosen, as far as there are such; without examples a score is NaN.
        """
        _refuse_what_is_used_up(state)
        self._wait_for_round(state)
        runs, judge = len(self.runs), self._judge
        score_KT = judge.on_clients(state.server.theta_P, state.personal, state.uninitialized_K)
        found = {"global": score_KT[:, self.run_of]}
        if self.step.average is not None:
            found["average"] = judge.on_clients(self._averages(state), None, state.uninitialized_K)[:, self.run_of]
        if self.store is not None:
            found["personal"] = score_KT[:, runs:]
            if self.population.validation is not None:
                held_out_KT = judge.on_held_out(state.server.theta_P, state.personal, state.uninitialized_K)
                found["chosen"] = chosen(self.run_of, held_out_KT[:, runs:], score_KT[:, runs:])
        return found

    def evaluate(self, state: State, by_client: dict[str, np.ndarray] | None = None) -> list[list[MetricRow]]:
        """For each mechanism: all models on the server's test set, and by group on the clients' own (`client_scores`)."""
        by_client = self.client_scores(state) if by_client is None else by_client
        names, judge = [group.name for group in self.mechanism.groups], self._judge
        on_server = {"global": judge.on_server(state.server.theta_P)}
        if self.step.average is not None:
            on_server["average"] = judge.on_server(self._averages(state))
        clip_R, refused_RG = np.asarray(state.server.clip), np.asarray(state.server.refused_G)
        found = []
        for v, r in enumerate(self.run_of):
            has_test = len(self.population.server_y_N) > 0
            rows = [
                MetricRow(state.round, SERVER, m, "accuracy", float(on_server[m][r])) for m in on_server if has_test
            ]
            for model, score_KV in by_client.items():
                rows += group_rows(state.round, model, names, self.group_K, score_KV[:, v])
            rows.append(MetricRow(state.round, SERVER, "global", "clip", float(clip_R[r])))
            rows += [
                MetricRow(state.round, name, "global", "refused", float(n)) for name, n in zip(names, refused_RG[r])
            ]
            found.append(rows)
        return found

    @cached_property
    def _judge(self) -> Evaluation:
        return Evaluation(self.engine, self.population, self.group_K, self.store)

    def global_model(self, state: State, number: int = 0) -> np.ndarray:
        """A mechanism's global model as one row."""
        _refuse_what_is_used_up(state)
        return np.asarray(state.server.theta_P[self.run_of[number]])

    def personal_models(self, state: State, clients: np.ndarray | int, number: int = 0) -> np.ndarray:
        """A mechanism's personal models of these clients, one row each; one who never took part has the global model."""
        if self.store is None:
            raise ValueError("there are no personal models: training does not personalize")
        _refuse_what_is_used_up(state)
        clients = np.atleast_1d(clients)
        known = len(clients) > 0 and 0 <= min(clients) <= max(clients) < self.population.clients
        require(known, "clients", clients.tolist(), f"from 0 to {self.population.clients - 1}")
        own_CP = self.store.rows(state.personal, clients)[:, number]
        return np.where(state.uninitialized_K[clients, None], self.global_model(state, number), own_CP)

    def model(self, state: State, client: int | None = None, number: int = 0) -> Parameters:
        """A mechanism's global model, or a client's personal one, as what the model's own functions take."""
        row_P = self.global_model(state, number) if client is None else self.personal_models(state, client, number)[0]
        return self.engine.unravel(jnp.asarray(row_P))

    def pack(self, state: State) -> Packed:
        """The state as named arrays, personal models in the order of the clients, so that any machine can go on.

        Large ones are functions that make them, to be called before the next round; `results.write_arrays` takes them so.
        """
        _refuse_what_is_used_up(state)
        arrays: Packed = {f"server_{i}": np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(state.server))}
        arrays = {**arrays, "round": np.array(state.round), "uninitialized_K": state.uninitialized_K}
        own = {} if self.store is None else self.store.pack(state.personal, np.flatnonzero(~state.uninitialized_K))
        return {**arrays, **own}

    def unpack(self, arrays: dict[str, np.ndarray]) -> State:
        """The state that was packed by a simulation like this one.

        Personal models are taken out of the arrays one by one, so that memory holds them once; give a copy to keep them.
        """
        starts = [server.start(run, self.step, jnp.zeros(self.engine.parameters)) for _, run in self.runs]
        leaves, tree = jax.tree.flatten(jax.tree.map(lambda *each: np.stack(each), *starts))
        packed = [arrays[f"server_{i}"] for i in range(sum(name.startswith("server_") for name in arrays))]
        alike = [leaf.shape for leaf in packed] == [leaf.shape for leaf in leaves]
        if not alike or len(arrays["uninitialized_K"]) != self.population.clients:
            raise ValueError("the checkpoint is of another model, mechanism, server or population")
        known = np.flatnonzero(~arrays["uninitialized_K"])
        personal = None if self.store is None else self.store.unpack(arrays, known)
        server_state = self.engine.put(jax.tree.unflatten(tree, packed), self.engine.replicated)
        return State(int(arrays["round"]), server_state, personal, arrays["uninitialized_K"])

    def _averages(self, state: State) -> Array:
        return jax.vmap(partial(server.averaged_model, self.step))(state.server)

    def parameters(self, state: State, number: int = 0) -> dict[str, np.ndarray]:
        """A mechanism's global model, and its average if there is one, as arrays named by where they stand in the model."""
        _refuse_what_is_used_up(state)
        models = {"global": state.server.theta_P}
        if self.step.average is not None:
            models["average"] = self._averages(state)
        named = {}
        for model, theta_RP in models.items():
            leaves, _ = jax.tree.flatten_with_path(self.engine.unravel(theta_RP[self.run_of[number]]))
            for path, leaf in leaves:
                named[f"{model}/{jax.tree_util.keystr(path, simple=True, separator='/')}"] = np.asarray(leaf)
        return named

    def _seats(self, shares: list[np.ndarray]) -> CohortLayout:
        """Where the devices' shares of a cohort sit; a cohort is never cut short."""
        count_K, sizes = self.population.train.count_K, self.engine.config.sizes
        while True:
            chunk = self.engine.chunk_size(self.slots // self.engine.devices)
            placed = [by_size(share, count_K, sizes, chunk) if len(sizes) > 1 else share for share in shares]
            needed = max(map(len, placed))
            if needed * self.engine.devices <= self.slots:
                return assign_slots(placed, self.slots)
            self.slots = self.engine.padded_cohort_size(needed)

    def _noise_keys(self, round: int) -> list[np.ndarray]:
        """A key for each run: from a noise seed the same for all of a repeat, so that they are paired; else its own."""
        if self.noise_seed is not None:
            return [stream(self.noise_seed, NOISE, round, repeat) for repeat, _ in self.runs]
        return list(os_entropy(2 * len(self.runs)).reshape(-1, 2))


def _refuse_what_is_used_up(state: State) -> None:
    """A state whose arrays a round has taken over can be neither played nor looked at."""
    if state.server.theta_P.is_deleted():
        raise ValueError("this state has been played already: go on with the one that play returned")


def global_training(mechanism: Mechanism) -> Mechanism:
    """The mechanism as far as the server goes, who never sees a personal model."""
    return replace(mechanism, groups=tuple(replace(group, pull=0.0) for group in mechanism.groups))


def cohorts_of(mechanism: Mechanism) -> tuple:
    """What decides who is drawn: mechanisms that have it in common can be played together."""
    return mechanism.sampling, tuple((group.clients, group.sampling_rate) for group in mechanism.groups)


class SimulationResult(NamedTuple):
    """What a simulation came to."""

    mechanism: Mechanism
    rounds: int
    parameters: dict[str, np.ndarray]  # the global model
    scores: dict[
        str, np.ndarray
    ]  # each client's own, at the end, by the kind of model (see `Simulation.client_scores`)
    history: list[MetricRow]
    repeatable: bool

    def result(self, name: str, delta: float = 1e-4) -> VariantResult:
        """A line of a table, with each group's epsilon at this delta."""
        groups = account_groups(
            self.mechanism, lambda name: [privacy_costs(self.mechanism, self.rounds)[name]], lambda name: delta
        )
        return attach_metrics(VariantResult(name, "", self.rounds, 0.0, self.repeatable, groups), self.history)


def simulate(
    population: FederatedData,
    model: Model,
    mechanism: Mechanism,
    training: LocalTraining | None = None,
    step: ServerOptimizer | None = None,
    rounds: int = 100,
    evaluate_every: int | None = None,
    seed: int = 0,
    noise_seed: int | None = None,
    on_round: Callable[[State], None] | None = None,
) -> SimulationResult:
    """Train for some rounds and evaluate at the end, and on the way if asked.

    ``seed`` is that of the initial model and of the order of batches. Noise, and who is drawn, come from the operating
    system, so that no two runs are alike; with a ``noise_seed`` they come from it, which is repeatable and not private.
    ``evaluate_every`` so many rounds, besides the last; ``on_round`` is called with the state after each round.
    """
    require(
        isinstance(mechanism, Mechanism), "mechanism", type(mechanism).__name__, "one; for several: simulate_together"
    )
    return simulate_many(
        population, model, [mechanism], training, step, rounds, evaluate_every, seed, noise_seed, on_round
    )[0]


def simulate_many(
    population: FederatedData,
    model: Model,
    mechanisms: Sequence[Mechanism],
    training: LocalTraining | None = None,
    step: ServerOptimizer | None = None,
    rounds: int = 100,
    evaluate_every: int | None = None,
    seed: int = 0,
    noise_seed: int | None = None,
    on_round: Callable[[State], None] | None = None,
    repeats: int = 1,
) -> list[SimulationResult]:
    """Train under several mechanisms with the same cohorts and batches, so that they are paired, in one program.

    With ``repeats`` all of them are trained as often, each time from another initial model with other noise: in what is
    returned, all mechanisms of the first time come first.
    """
    whole = isinstance(rounds, int | np.integer) and not isinstance(rounds, bool)
    require(whole and rounds >= 1, "rounds", rounds, "a whole number of at least 1")
    if evaluate_every is not None:
        whole = isinstance(evaluate_every, int | np.integer) and evaluate_every >= 1
        require(whole, "evaluate_every", evaluate_every, "a whole number of at least 1")
    require(len(mechanisms) >= 1, "mechanisms", len(mechanisms), "one or more")
    simulation = Simulation(population, model, mechanisms, training, step, seed, noise_seed, repeats=repeats)
    state = simulation.start()
    histories: list[list[MetricRow]] = [[] for _ in simulation.mechanisms]
    while state.round < rounds:
        state = simulation.run_round(state)
        if on_round is not None:
            on_round(state)
        if state.round == rounds or (evaluate_every and state.round % evaluate_every == 0):
            scores = simulation.client_scores(state)
            for history, rows in zip(histories, simulation.evaluate(state, scores)):
                history += rows
    return [
        SimulationResult(
            one,
            rounds,
            simulation.parameters(state, number),
            {model: score_KV[:, number] for model, score_KV in scores.items()},
            histories[number],
            repeatable=noise_seed is not None,
        )
        for number, one in enumerate(simulation.mechanisms)
    ]

"""The loop: cohort → round → evaluate now and then → history, on one machine, for one mechanism or for several at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from fedhdp.accounting import spends
from fedhdp.client import LocalTraining
from fedhdp.mechanism import Mechanism, require
from fedhdp.metrics import Row
from fedhdp.models import Model
from fedhdp.outcome import VariantResult, fill_in, group_results
from fedhdp.population import Population
from fedhdp.server import ServerStep
from fedhdp.simulation import Simulation, State


class Trained(NamedTuple):
    """What a simulation came to."""

    mechanism: Mechanism
    rounds: int
    parameters: dict[str, np.ndarray]  # the global model
    scores: dict[
        str, np.ndarray
    ]  # each client's own, at the end, by the kind of model (see `Simulation.client_scores`)
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
    """Train for some rounds and evaluate at the end, and on the way if asked.

    ``seed`` is that of the initial model and of the order of batches. Noise, and who is drawn, come from the operating
    system, so that no two runs are alike; with a ``noise_seed`` they come from it, which is repeatable and not private.
    ``evaluate_every`` so many rounds, besides the last; ``on_round`` is called with the state after each round.
    """
    require(
        isinstance(mechanism, Mechanism), "mechanism", type(mechanism).__name__, "one; for several: simulate_together"
    )
    return simulate_together(
        population, model, [mechanism], training, step, rounds, evaluate_every, seed, noise_seed, on_round
    )[0]


def simulate_together(
    population: Population,
    model: Model,
    mechanisms: Sequence[Mechanism],
    training: LocalTraining | None = None,
    step: ServerStep | None = None,
    rounds: int = 100,
    evaluate_every: int | None = None,
    seed: int = 0,
    noise_seed: int | None = None,
    on_round: Callable[[State], None] | None = None,
    repeats: int = 1,
) -> list[Trained]:
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
    histories: list[list[Row]] = [[] for _ in simulation.mechanisms]
    while state.round < rounds:
        state = simulation.play(state)
        if on_round is not None:
            on_round(state)
        if state.round == rounds or (evaluate_every and state.round % evaluate_every == 0):
            scores = simulation.client_scores(state)
            for history, rows in zip(histories, simulation.evaluate(state, scores)):
                history += rows
    return [
        Trained(
            one,
            rounds,
            simulation.parameters(state, number),
            {model: score_KV[:, number] for model, score_KV in scores.items()},
            histories[number],
            repeatable=noise_seed is not None,
        )
        for number, one in enumerate(simulation.mechanisms)
    ]

"""A whole training on one machine, under one mechanism or several."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fedhdp.client import LocalTraining
from fedhdp.data import FederatedData
from fedhdp.errors import require
from fedhdp.mechanism import Mechanism, ScheduledMechanism
from fedhdp.models import Model
from fedhdp.results.schema import SimulationResult
from fedhdp.server import Optimizer
from fedhdp.simulation.simulation import Callback, Simulation


def simulate(
    data: FederatedData,
    model: Model,
    mechanism: ScheduledMechanism,
    training: LocalTraining | None = None,
    server_optimizer: Optimizer | None = None,
    rounds: int = 100,
    evaluate_every: int | None = None,
    seed: int = 0,
    noise_seed: int | None = None,
    on_round: Callback | None = None,
    on_evaluate: Callable[[Simulation, Any], bool | None] | None = None,
) -> SimulationResult:
    """Train under one mechanism and evaluate. The arguments that are not listed here are those of `Simulation`.

    Args:
        mechanism: The mechanism, or a function that returns that of a round; every round is priced with its own.
        rounds: The number of rounds.
        evaluate_every: Evaluate every so many rounds, and after the last one. None: after the last one only.
        on_round: Called with the simulation after each round; its `round_rows` has what was measured. False ends the
            training.
        on_evaluate: Called with the simulation and the rows of each evaluation that ``evaluate_every`` asks for. False ends
            the training.

    Returns:
        The model, each client's scores and what was measured.

    Raises:
        InvalidValueError: If an argument is out of range.
        DataError: If the data does not fit the groups or the model.
    """
    rule = "a Mechanism or a function of the round (simulate_many takes several)"
    require(isinstance(mechanism, Mechanism) or callable(mechanism), "mechanism", type(mechanism).__name__, rule)
    on_evaluate_all = on_evaluate and (lambda simulation, evaluation: on_evaluate(simulation, evaluation[0]))
    optional = (training, server_optimizer, rounds, evaluate_every, seed, noise_seed, on_round, on_evaluate_all)
    return simulate_many(data, model, [mechanism], *optional)[0]


def simulate_many(
    data: FederatedData,
    model: Model,
    mechanisms: Sequence[ScheduledMechanism],
    training: LocalTraining | None = None,
    server_optimizer: Optimizer | None = None,
    rounds: int = 100,
    evaluate_every: int | None = None,
    seed: int = 0,
    noise_seed: int | None = None,
    on_round: Callback | None = None,
    on_evaluate: Callable[[Simulation, Any], bool | None] | None = None,
) -> list[SimulationResult]:
    """Train under several mechanisms in one program, paired: with the same cohorts, batches and initial model.

    Args:
        mechanisms: The mechanisms, all of which draw the same cohorts. The other arguments and the errors are those of
            `simulate`; ``on_evaluate`` gets a list of rows for each mechanism.

    Returns:
        A result for each mechanism, in their order.
    """
    for field, value in (("rounds", rounds), ("evaluate_every", rounds if evaluate_every is None else evaluate_every)):
        is_integer = isinstance(value, int | np.integer) and not isinstance(value, bool)
        require(is_integer and value >= 1, field, value, "a whole number of at least 1")
    simulation = Simulation(data, model, mechanisms, training, server_optimizer, seed, noise_seed)
    ran: list[Counter[Mechanism]] = [Counter() for _ in mechanisms]

    def count_round(simulation: Simulation) -> None:
        for rounds_of, mechanism in zip(ran, simulation.mechanisms, strict=True):
            rounds_of[mechanism] += 1

    simulation.run(rounds, count_round, on_round, evaluate_every or rounds, on_evaluate)
    results = []
    for number, (mechanism, history) in enumerate(zip(simulation.mechanisms, simulation.histories, strict=True)):
        if not history or history[-1].round != simulation.round:  # ended by a callback
            history += simulation.evaluate()[number]
        scores = {name: score_KV[:, number] for name, score_KV in simulation.client_scores().items()}
        parameters, repeatable = simulation.named_parameters(number), noise_seed is not None
        values = (
            parameters,
            scores,
            history,
            repeatable,
            simulation.metrics,
            ran[number],
            data.preparation,
            data.public_levels,
        )
        results.append(SimulationResult(mechanism, simulation.round, *values))
    return results

"""An experiment run into a folder: every variant in turn, with checkpoints, and on from there after a crash."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import fedhdp
from fedhdp import results
from fedhdp.experiments.spec import Experiment, Variant, from_toml, to_toml
from fedhdp.mechanism import Mechanism
from fedhdp.metrics import SERVER, Row
from fedhdp.models import Model
from fedhdp.population import Population
from fedhdp.results import GroupResult, RunFolder, Summary, VariantFolder, VariantResult
from fedhdp.simulate import Simulation

CHECKPOINT_SECONDS = 30.0


class Progress(NamedTuple):
    """Where a run stands."""

    variant: str
    number: int  # of the variant, the first being 1
    variants: int
    round: int
    rounds: int
    accuracy: float | None  # on the server's test set, as last evaluated
    epsilon: dict[str, float]  # of each group so far; empty where it is not known


class Interrupted(Exception):
    """The run was asked to stop, and can go on from its folder."""


Watch = Callable[[Progress], bool]  # is told after every round; False asks the run to stop


def run(experiment: Experiment, out: Path, watch: Watch) -> Summary:
    """Run an experiment into a new folder."""
    mechanism = experiment.mechanism.mechanism(experiment.rounds, experiment.delta)
    with RunFolder.create(out, to_toml(experiment).encode()) as folder:
        return _run(experiment, mechanism, folder, watch)


def resume(out: Path, watch: Watch) -> Summary:
    """Go on with the run in a folder."""
    with RunFolder.open(out) as folder:
        path = out / results.EXPERIMENT
        try:
            experiment = from_toml(path.read_text(), str(path))
        except (OSError, ValueError) as error:
            raise results.DamagedRun(f"{path} is damaged: {error}") from error
        if (out / results.SUMMARY).exists():
            return results.read_value(out / results.SUMMARY, Summary)
        return _run(experiment, experiment.mechanism.mechanism(experiment.rounds, experiment.delta), folder, watch)


def _run(experiment: Experiment, mechanism: Mechanism, folder: RunFolder, watch: Watch) -> Summary:
    begun = time.monotonic()
    done = [(variant, folder.variant(variant.name)) for variant in experiment.variants]
    finished = [part.result() for _, part in done]
    population: Population | None = None
    model: Model | None = None
    for index, (variant, part) in enumerate(done):
        if finished[index] is not None:
            continue
        if population is None or model is None:  # made when first needed, and shared, so that variants compile once
            population = experiment.data.load(mechanism, experiment.seed)
            inputs = int(population.server_x_N[0].size)
            model = experiment.model.build(inputs, population.classes)
        simulation = Simulation(
            population,
            model,
            variant.mechanism(mechanism),
            experiment.training,
            experiment.server,
            experiment.seed,
            experiment.noise_seed,
        )
        finished[index] = _run_variant(experiment, variant, index, simulation, part, watch)
    whole = [result for result in finished if result is not None]
    summary = Summary(experiment.name, time.monotonic() - begun, whole, fedhdp.__version__)
    results.write_value(folder.path / results.SUMMARY, summary)
    return summary


def _run_variant(
    experiment: Experiment, variant: Variant, index: int, simulation: Simulation, part: VariantFolder, watch: Watch
) -> VariantResult:
    begun = kept = time.monotonic()
    checkpoint = part.checkpoint()
    state = simulation.start() if checkpoint is None else simulation.unpack(checkpoint)
    history = part.history(until=state.round) if checkpoint is not None else []
    part.restart_history(history)
    epsilon = epsilon_so_far(simulation.mechanism, state.round, experiment.delta)

    while state.round < experiment.rounds:
        state = simulation.play(state)
        state.server.clip.block_until_ready()  # so that progress is what is done, not what is asked for
        if state.round % experiment.evaluate_every == 0 or state.round == experiment.rounds:
            rows = simulation.evaluate(state)
            part.append_history(rows)
            history += rows
            epsilon = epsilon_so_far(simulation.mechanism, state.round, experiment.delta)
        place = (variant.name, index + 1, len(experiment.variants), state.round, experiment.rounds)
        go_on = watch(Progress(*place, _latest(history), epsilon))
        if not go_on or time.monotonic() - kept > CHECKPOINT_SECONDS:
            part.keep_checkpoint(simulation.pack(state))
            kept = time.monotonic()
        if not go_on:
            raise Interrupted

    result = results.fill_in(_result(experiment, variant, simulation, time.monotonic() - begun), history)
    part.finish(simulation.parameters(state), result)
    return result


def _latest(history: list[Row]) -> float | None:
    for row in reversed(history):
        if (row.group, row.model, row.metric) == (SERVER, "global", "accuracy"):
            return row.value
    return None


def _result(experiment: Experiment, variant: Variant, simulation: Simulation, seconds: float) -> VariantResult:
    mechanism = simulation.mechanism
    groups = [
        GroupResult(g.name, g.clients, g.opted_out, g.noise_multiplier, g.sampling_rate, g.weight, g.pull)
        for g in mechanism.groups
    ]
    repeatable = experiment.noise_seed is not None
    return VariantResult(variant.name, variant.algorithm, experiment.rounds, seconds, repeatable, groups)


def epsilon_so_far(mechanism: Mechanism, rounds: int, delta: float) -> dict[str, float]:
    """Each group's epsilon after some rounds."""
    return {}

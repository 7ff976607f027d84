"""An experiment run into a folder: every variant in turn, with checkpoints, and on from there after a crash."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

import fedhdp
from fedhdp import results
from fedhdp.experiments.paying import BudgetSpent, Payer
from fedhdp.experiments.spec import Experiment, from_toml, to_toml
from fedhdp.ledger import Ledger
from fedhdp.mechanism import Mechanism
from fedhdp.metrics import SERVER, Row
from fedhdp.outcome import Summary, VariantResult, fill_in
from fedhdp.results import RunFolder, VariantFolder
from fedhdp.simulate import Simulation


class Progress(NamedTuple):
    """Where a run stands."""

    variant: str
    number: int  # of the variant, the first being 1
    variants: int
    round: int
    rounds: int
    accuracy: float | None  # on the server's test set, as last evaluated
    epsilon: dict[str, float]  # of each group, as last evaluated; empty where it is not known
    left: dict[str, float]  # rounds that a group's budget still allows; empty without a ledger


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
    parts = [folder.variant(variant.name) for variant in experiment.variants]
    finished = [part.result() for part in parts]
    if None in finished:
        _announce(experiment, finished.index(None), watch)
        population = experiment.data.load(mechanism, experiment.seed)
        model = experiment.model.build(
            int(population.server_x_N[0].size), population.classes
        )  # one, so that it compiles once
        with _ledger(experiment) as ledger:
            for index, variant in enumerate(experiment.variants):
                if finished[index] is None:
                    chosen = (variant.mechanism(mechanism), experiment.training, experiment.server)
                    simulation = Simulation(population, model, *chosen, experiment.seed, experiment.noise_seed)
                    finished[index] = _run_variant(
                        experiment, index, simulation, folder.id, parts[index], ledger, watch
                    )
    whole = [result for result in finished if result is not None]
    summary = Summary(experiment.name, sum(result.seconds for result in whole), whole, fedhdp.__version__)
    results.write_value(folder.path / results.SUMMARY, summary)
    return summary


@contextmanager
def _ledger(experiment: Experiment) -> Iterator[Ledger | None]:
    if experiment.ledger is None:
        yield None
        return
    from fedhdp.accounting import fits

    with Ledger(experiment.ledger, fits) as ledger:
        yield ledger


def _run_variant(
    experiment: Experiment,
    index: int,
    simulation: Simulation,
    run_id: str,
    part: VariantFolder,
    ledger: Ledger | None,
    watch: Watch,
) -> VariantResult:
    variant, begun = experiment.variants[index], time.monotonic()
    _announce(experiment, index, watch)
    checkpoint = part.checkpoint()
    state = simulation.start() if checkpoint is None else simulation.unpack(checkpoint)
    seconds_before = 0.0 if checkpoint is None else float(checkpoint["seconds"])
    history = [] if checkpoint is None else part.history(until=state.round)
    part.restart_history(history)
    payer = Payer(experiment, simulation, ledger, f"{run_id}/{variant.name}", completed=state.round)
    epsilon, left, stopped, kept = payer.epsilon(state.round), payer.rounds_left(), None, begun

    while state.round < experiment.rounds:
        try:
            payer.pay()
        except BudgetSpent as error:
            stopped = str(error)
            break
        state = simulation.play(state)
        state.server.clip.block_until_ready()  # so that progress is what is done, not what is asked for
        if state.round % experiment.evaluate_every == 0 or state.round == experiment.rounds:
            rows = simulation.evaluate(state)
            part.append_history(rows)
            history += rows
            epsilon, left = payer.epsilon(state.round), payer.rounds_left()
        place = (variant.name, index + 1, len(experiment.variants), state.round, experiment.rounds)
        go_on = watch(Progress(*place, _latest(history), epsilon, left))
        now = time.monotonic()
        if not go_on or now - kept >= experiment.checkpoint_seconds:
            part.keep_checkpoint(simulation.pack(state) | {"seconds": np.array(seconds_before + now - begun)})
            kept = now
        if not go_on:
            raise Interrupted

    if not history or history[-1].round != state.round:  # it ended before its time
        rows = simulation.evaluate(state)
        part.append_history(rows)
        history += rows
    seconds = seconds_before + time.monotonic() - begun
    groups = payer.priced(state.round)
    repeatable = experiment.noise_seed is not None
    result = VariantResult(variant.name, variant.algorithm, state.round, seconds, repeatable, groups, stopped=stopped)
    result = fill_in(result, history)
    part.finish(simulation.parameters(state), result)
    return result


def _announce(experiment: Experiment, index: int, watch: Watch) -> None:
    """Show that a variant is about to start: making data and compiling take their seconds."""
    watch(
        Progress(
            experiment.variants[index].name, index + 1, len(experiment.variants), 0, experiment.rounds, None, {}, {}
        )
    )


def _latest(history: list[Row]) -> float | None:
    for row in reversed(history):
        if (row.group, row.model, row.metric) == (SERVER, "global", "accuracy"):
            return row.value
    return None

"""An experiment run into a folder: its variants together as far as they can be, with checkpoints, and on after a crash."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

import fedhdp
from fedhdp import results
from fedhdp.experiments.paying import BudgetSpent, Payer
from fedhdp.experiments.spec import Experiment, Variant, from_toml, to_toml
from fedhdp.ledger import Ledger
from fedhdp.mechanism import SERVER, Mechanism
from fedhdp.metrics import Row
from fedhdp.models import Model
from fedhdp.outcome import Summary, VariantResult, fill_in
from fedhdp.personal import personal_bytes, personal_room
from fedhdp.results import RunFolder, VariantFolder
from fedhdp.simulate import Simulation, State, cohorts_of, global_training


class Progress(NamedTuple):
    """Where a run stands."""

    variant: str  # its name, and how many run with it
    number: int  # of the first of them, the first of all being 1
    variants: int
    round: int
    rounds: int
    accuracies: tuple[float, ...] = ()  # of each variant on the server's test set, as last evaluated
    # Of each group, priced when it is asked for: its epsilon after this round, and the rounds that its budget still allows.
    epsilon: Callable[[], dict[str, tuple[float, float]]] = dict  # least and most among variants; empty if not known
    left: Callable[[], dict[str, float]] = dict  # empty without a ledger


class Interrupted(Exception):
    """The run was asked to stop, and can go on from its folder."""


Watch = Callable[[Progress], bool]  # is told after every round; False asks the run to stop


def run(experiment: Experiment, out: Path, watch: Watch) -> Summary:
    """Run an experiment into a new folder; where it cannot even begin, there is no folder."""
    mechanism = experiment.mechanism.mechanism(experiment.rounds, experiment.delta)
    if experiment.ledger is not None:  # wherever it is gone on with from
        experiment = replace(experiment, ledger=str(Path(experiment.ledger).absolute()))
    with RunFolder.create(out, to_toml(experiment).encode()) as folder:
        try:
            return _run(experiment, mechanism, folder, watch)
        except (ValueError, OSError):
            folder.discard_if_empty()
            raise


def resume(out: Path, watch: Watch) -> Summary:
    """Go on with the run in a folder."""
    with RunFolder.open(out) as folder:
        path = out / results.EXPERIMENT
        try:
            experiment = from_toml(path.read_text(), str(path))
        except (OSError, ValueError) as error:
            hint = "one of a deployment goes on when its ServerApp is submitted again with this folder"
            raise results.DamagedRun(
                f"{path} is no experiment that can be simulated, or damaged; {hint} ({error})"
            ) from error
        if (out / results.SUMMARY).exists():
            return results.read_value(out / results.SUMMARY, Summary)
        return _run(experiment, experiment.mechanism.mechanism(experiment.rounds, experiment.delta), folder, watch)


def _run(experiment: Experiment, mechanism: Mechanism, folder: RunFolder, watch: Watch) -> Summary:
    parts = [folder.variant(variant.name) for variant in experiment.variants]
    finished = [part.result() for part in parts]
    begun = any((part.path / kept).exists() for part in parts for kept in (results.CHECKPOINT, results.RESULT))
    if begun and experiment.ledger is not None and not Path(experiment.ledger).exists():
        raise ValueError(f"{experiment.ledger} is gone: a run cannot go on without the ledger that it was charged in")
    if None in finished:
        first = finished.index(None)
        watch(Progress(experiment.variants[first].name, first + 1, len(parts), 0, experiment.rounds))
        population = experiment.data.load(mechanism, experiment.seed)
        inputs = int(np.prod(population.input_shape))
        model = experiment.model.build(inputs, population.classes)  # one, so that it compiles once
        mechanisms = [variant.mechanism(mechanism) for variant in experiment.variants]
        with _ledger(experiment) as ledger:
            for batch in _batches(experiment, mechanisms, model):
                if any(finished[index] is None for index in batch):
                    chosen = ([mechanisms[index] for index in batch], experiment.training, experiment.server)
                    where = (experiment.seed, experiment.noise_seed, parts[batch[0]].path)
                    simulation = Simulation(population, model, *chosen, *where)
                    results_of = _run_batch(experiment, batch, simulation, folder.id, parts, ledger, watch)
                    for index, result in zip(batch, results_of):
                        finished[index] = result
    whole = [result for result in finished if result is not None]
    summary = Summary(experiment.name, sum(result.seconds for result in whole), whole, fedhdp.__version__)
    results.write_value(folder.path / results.SUMMARY, summary)
    return summary


def _batches(experiment: Experiment, mechanisms: list[Mechanism], model: Model) -> list[list[int]]:
    """Which variants run together: those that share a global training always, others as far as memory allows.

    With a ledger each global training runs by itself, since a budget that is spent may change its cohorts.
    """
    trainings: dict[Mechanism, list[int]] = {}
    for index, mechanism in enumerate(mechanisms):
        trainings.setdefault(global_training(mechanism), []).append(index)
    room = personal_room() // 4  # beside data and what a round computes with
    each = personal_bytes(model, mechanisms[0].clients) if experiment.training.personalise else 0
    batches: dict[tuple, list[list[int]]] = {}
    for training, indices in trainings.items():
        made = batches.setdefault(cohorts_of(training), [])
        if made and experiment.ledger is None and (len(made[-1]) + len(indices)) * each <= room:
            made[-1] += indices
        else:
            made.append(list(indices))
    return [batch for made in batches.values() for batch in made]


@contextmanager
def _ledger(experiment: Experiment) -> Iterator[Ledger | None]:
    if experiment.ledger is None:
        yield None
        return
    from fedhdp.accounting import fits

    with Ledger(experiment.ledger, fits) as ledger:
        yield ledger


def _run_batch(
    experiment: Experiment,
    batch: list[int],
    simulation: Simulation,
    run_id: str,
    all_parts: list[VariantFolder],
    ledger: Ledger | None,
    watch: Watch,
) -> list[VariantResult]:
    """Variants that run together; what they go on from is kept with the first of them, which is finished last."""
    variants, parts = [experiment.variants[index] for index in batch], [all_parts[index] for index in batch]
    begun = time.monotonic()
    name = variants[0].name if len(batch) == 1 else f"{variants[0].name} and {len(batch) - 1} more"
    place = (name, batch[0] + 1, len(experiment.variants))
    watch(Progress(*place, 0, experiment.rounds))
    state, histories, seconds_before, again = _go_on(simulation, parts)
    payers = _payers(experiment, variants, simulation, ledger, run_id, state.round, again)
    kept, pause, stopped = begun, experiment.checkpoint_seconds, None

    def evaluate(state: State) -> None:
        for part, history, rows in zip(parts, histories, simulation.evaluate(state)):
            part.append_history(rows)
            history += rows

    while state.round < experiment.rounds:
        try:
            payers[0].pay()
        except BudgetSpent as error:
            stopped = str(error)
            break
        previous = state.done
        state = simulation.play(state)
        if previous is not None:
            previous.block_until_ready()  # one round ahead at most: progress is what is done, not what is asked for
        if state.round % experiment.evaluate_every == 0 or state.round == experiment.rounds:
            evaluate(state)
        latest = tuple(value for value in map(_latest, histories) if value is not None)
        epsilon = partial(_priced, payers, state.round)
        go_on = watch(Progress(*place, state.round, experiment.rounds, latest, epsilon, payers[0].rounds_left))
        now = time.monotonic()
        if not go_on or now - kept >= pause:
            _keep(simulation, state, parts[0], seconds_before + now - begun, again)
            kept = time.monotonic()
            pause = max(experiment.checkpoint_seconds, 20 * (kept - now))  # a twentieth of the time at most
        if not go_on:
            raise Interrupted

    if not histories[0] or histories[0][-1].round != state.round:  # it ended before its time
        evaluate(state)
    seconds = (seconds_before + time.monotonic() - begun) / len(batch)
    repeatable = experiment.noise_seed is not None
    found = [
        fill_in(
            VariantResult(
                one.name, one.algorithm, state.round, seconds, repeatable, payer.priced(state.round), stopped=stopped
            ),
            history,
        )
        for one, payer, history in zip(variants, payers, histories)
    ]
    for number in reversed(range(len(batch))):
        parts[number].finish(simulation.parameters(state, number), found[number])
    return found


def _go_on(simulation: Simulation, parts: list[VariantFolder]) -> tuple[State, list[list[Row]], float, int]:
    """Where a batch begins, or goes on: its state, its variants' histories up to there, the seconds it has taken.

    And how many rounds were shown that are played again, with other noise: after a crash, those since the checkpoint.
    """
    checkpoint = parts[0].checkpoint()
    state = simulation.start() if checkpoint is None else simulation.unpack(checkpoint)
    seconds, again = (0.0, 0) if checkpoint is None else (float(checkpoint["seconds"]), int(checkpoint.get("again", 0)))
    shown = max((row.round for part in parts for row in part.history()), default=0)
    if shown > state.round:
        again += shown - state.round
        _keep(simulation, state, parts[0], seconds, again)  # before it is forgotten that they were shown
    histories = [part.history(until=state.round) for part in parts]
    for part, history in zip(parts, histories):
        part.restart_history(history)
    return state, histories, seconds, again


def _keep(simulation: Simulation, state: State, part: VariantFolder, seconds: float, again: int) -> None:
    part.keep_checkpoint({**simulation.pack(state), "seconds": np.array(seconds), "again": np.array(again)})


def _payers(
    experiment: Experiment,
    variants: list[Variant],
    simulation: Simulation,
    ledger: Ledger | None,
    run_id: str,
    completed: int,
    again: int,
) -> list[Payer]:
    """Who pays for each variant; a run is charged under the name of the first variant that shares it."""
    names = [variants[simulation.run_of.index(run)].name for run in simulation.run_of]
    return [
        Payer(experiment, simulation, number, ledger, f"{run_id}/{name}", completed, again)
        for number, name in enumerate(names)
    ]


def _priced(payers: list[Payer], rounds: int) -> dict[str, tuple[float, float]]:
    """Each group's least and largest epsilon among the variants."""
    by_payer = [payer.epsilon(rounds) for payer in payers]
    of_group = {name: [epsilon[name] for epsilon in by_payer] for name in by_payer[0]}
    return {name: (min(epsilons), max(epsilons)) for name, epsilons in of_group.items()}


def _latest(history: list[Row]) -> float | None:
    for row in reversed(history):
        if (row.group, row.model, row.metric) == (SERVER, "global", "accuracy"):
            return row.value
    return None

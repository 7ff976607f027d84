"""An experiment run into a folder: its variants together as far as they can be, with checkpoints, and on after a crash."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

import fedhdp
from fedhdp.engine.personal_store import personal_bytes, personal_bytes_limit
from fedhdp.experiments.config import Experiment, from_toml, to_toml
from fedhdp.mechanism import SERVER, Mechanism
from fedhdp.models import Model
from fedhdp.privacy.accounting import privacy_costs
from fedhdp.privacy.budget import BudgetExhausted, RunBilling
from fedhdp.privacy.ledger import Ledger
from fedhdp.results import store as results
from fedhdp.results.metrics import MetricRow
from fedhdp.results.schema import GroupResult, Summary, VariantResult, account_groups, attach_metrics
from fedhdp.results.store import RunDirectory
from fedhdp.rng import os_entropy
from fedhdp.simulation import Simulation, cohorts_of, global_training


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


BEGUN = (results.HISTORY, results.CHECKPOINT, results.RESULT)  # any of them: rounds may have been charged
Watch = Callable[[Progress], bool]  # is told after every round; False asks the run to stop


def run(experiment: Experiment, out: Path, watch: Watch) -> Summary:
    """Run an experiment into a new folder; where it cannot even begin, there is no folder."""
    mechanism = experiment.mechanism.build(experiment.rounds, experiment.delta)
    experiment = experiment.pinned()
    with RunDirectory.create(out, to_toml(experiment).encode()) as folder:
        try:
            return _run(experiment, mechanism, folder, watch)
        except (ValueError, OSError):
            folder.discard_if_empty()
            raise


def resume(out: Path, watch: Watch) -> Summary:
    """Go on with the run in a folder."""
    with RunDirectory.open(out) as folder:
        path = out / results.EXPERIMENT
        try:
            experiment = from_toml(path.read_text(encoding="utf-8"), str(path))
        except (OSError, ValueError) as error:
            hint = "one of a deployment goes on when its ServerApp is submitted again with this folder"
            raise results.DamagedRunError(
                f"{path} is no experiment that can be simulated, or damaged; {hint} ({error})"
            ) from error
        if (out / results.SUMMARY).exists():
            return results.read_value(out / results.SUMMARY, Summary)
        return _run(experiment, experiment.mechanism.build(experiment.rounds, experiment.delta), folder, watch)


def each_seed(experiment: Experiment, seeds: Iterable[int]) -> list[Experiment]:
    """The experiment with each of these seeds, and noise of its own where that has one too."""
    if experiment.ledger is not None:
        raise ValueError(
            f"every seed is another population, and {experiment.ledger} is the ledger of one: run them apart"
        )
    noise = experiment.noise_seed
    return [replace(experiment, seed=seed, noise_seed=None if noise is None else noise + seed) for seed in seeds]


def run_or_resume(experiment: Experiment, out: Path, watch: Watch) -> Summary:
    """Run an experiment into a folder, or go on with it there; a folder of another experiment is refused."""
    path = out / results.EXPERIMENT
    if not path.exists():
        return run(experiment, out, watch)
    if from_toml(path.read_text(encoding="utf-8"), str(path)) != experiment.pinned():
        raise ValueError(f"{out} was made by another experiment; give another --out")
    return resume(out, watch)


def _run(experiment: Experiment, mechanism: Mechanism, folder: RunDirectory, watch: Watch) -> Summary:
    parts = [folder.variant(variant.name) for variant in experiment.variants]
    finished = [part.result() for part in parts]
    begun = any((part.path / kept).exists() for part in parts for kept in BEGUN)
    if begun and experiment.ledger is not None and not Path(experiment.ledger).exists():
        raise ValueError(f"{experiment.ledger} is gone: a run cannot go on without the ledger that it was charged in")
    if None in finished:
        first = finished.index(None)
        watch(Progress(experiment.variants[first].name, first + 1, len(parts), 0, experiment.rounds))
        population = experiment.data.load(mechanism, experiment.seed)
        inputs = int(np.prod(population.input_shape))
        model = experiment.model.build(inputs, population.classes)  # one, so that it compiles once
        mechanisms = [variant.mechanism(mechanism) for variant in experiment.variants]
        promises = any(not group.opted_out for one in mechanisms for group in one.groups)
        cohorts = (
            os_entropy(4) if promises and experiment.ledger is None else None
        )  # the same for all: variants are paired
        with _ledger(experiment, mechanism, mechanisms) as ledger:
            for batch in _batches(experiment, mechanisms, model):
                if any(finished[index] is None for index in batch):
                    chosen = (
                        [mechanisms[index] for index in batch],
                        *experiment.trained(experiment.variants[batch[0]]),
                    )
                    where = (experiment.seed, experiment.noise_seed, parts[batch[0]].path)
                    simulation = Simulation(population, model, *chosen, *where, cohort_entropy=cohorts)
                    played = _play(_Batch(experiment, batch, simulation, folder, ledger), watch)
                    for index, result in zip(batch, played):
                        finished[index] = result
    whole = [result for result in finished if result is not None]
    summary = Summary(experiment.name, sum(result.seconds for result in whole), whole, fedhdp.__version__)
    results.write_value(folder.path / results.SUMMARY, summary)
    return summary


def _batches(experiment: Experiment, mechanisms: list[Mechanism], model: Model) -> list[list[int]]:
    """Which variants run together: those that share a global training always, others as far as memory allows.

    With a ledger each global training runs by itself, since a budget that is spent may change its cohorts.
    """
    trainings: dict[tuple, list[int]] = {}
    for index, (variant, mechanism) in enumerate(zip(experiment.variants, mechanisms)):
        trainings.setdefault((global_training(mechanism), *experiment.trained(variant)), []).append(index)
    room = personal_bytes_limit() // 4  # beside data and what a round computes with
    batches: dict[tuple, list[list[int]]] = {}
    for (mechanism, training, step), indices in trainings.items():
        made = batches.setdefault((cohorts_of(mechanism), training, step), [])
        each = personal_bytes(model, mechanism.clients) if training.personalize else 0
        if made and experiment.ledger is None and (len(made[-1]) + len(indices)) * each <= room:
            made[-1] += indices
        else:
            made.append(list(indices))
    return [batch for made in batches.values() for batch in made]


@contextmanager
def _ledger(experiment: Experiment, chosen: Mechanism, mechanisms: list[Mechanism]) -> Iterator[Ledger | None]:
    """The experiment's ledger, if it has one, with its budgets; refused where groups would get less than they chose."""
    if experiment.ledger is None:
        yield None
        return
    for variant, mechanism in zip(experiment.variants, mechanisms):
        for group, cost in zip(chosen.groups, privacy_costs(mechanism).values(), strict=True):
            if not group.opted_out and cost.noise_multiplier == 0 and cost.sampling_rate > 0:
                raise ValueError(
                    f"{variant.name} gives {group.name!r} no noise, and {experiment.ledger} would hold that against it "
                    "for good: leave the variant out, or run it without the ledger"
                )
    samplings = {mechanism.sampling for mechanism in mechanisms}
    if len(samplings) > 1:
        raise ValueError(
            f"variants sample in several ways ({', '.join(sorted(samplings))}), and {experiment.ledger} can add up one: "
            "run them apart, each with a ledger of its own, or without"
        )
    with Ledger(experiment.ledger) as ledger:
        for name, budget in experiment.budgets.items():
            ledger.lower_budget(name, budget)
        ledger.check_groups(chosen.groups)
        yield ledger


class _Batch:
    """Variants that run together; what they go on from is kept with the first of them, which is finished last."""

    def __init__(
        self,
        experiment: Experiment,
        indices: list[int],
        simulation: Simulation,
        folder: RunDirectory,
        ledger: Ledger | None,
    ):
        self.experiment, self.simulation = experiment, simulation
        self.variants = [experiment.variants[index] for index in indices]
        self.parts = [folder.variant(variant.name) for variant in self.variants]
        more = f" and {len(indices) - 1} more" if len(indices) > 1 else ""
        self.place = (self.variants[0].name + more, indices[0] + 1, len(experiment.variants))
        self.begun = time.monotonic()
        self._go_on()
        self.billings = self._billings(folder.id, ledger)
        # Once the ledger has taken the run: how often rounds were shown is kept before it is forgotten that they were.
        if any(part.history() != history for part, history in zip(self.parts, self.histories)):
            self.keep()
        for part, history in zip(self.parts, self.histories):
            part.restart_history(history)

    def _go_on(self) -> None:
        """Where it begins, or goes on, with its variants' histories up to there, and the seconds it has taken.

        And how many rounds were shown that are played again, with other noise: after a crash, those since the checkpoint.
        """
        checkpoint = self.parts[0].checkpoint()
        kept = checkpoint or {}
        self.seconds_before, self.again = float(kept.get("seconds", 0.0)), int(kept.get("again", 0))
        if checkpoint is not None:
            self.simulation.restore(checkpoint)
        shown = max((row.round for part in self.parts for row in part.history()), default=0)
        self.again += max(0, shown - self.simulation.round)
        self.histories = [part.history(until=self.simulation.round) for part in self.parts]

    def _billings(self, run_id: str, ledger: Ledger | None) -> list[RunBilling]:
        """The billing of each variant; a run is charged under the name of the first variant that shares it."""
        names = [self.variants[self.simulation.run_of.index(run)].name for run in self.simulation.run_of]
        return [
            RunBilling(
                self.simulation.mechanisms[number],
                ledger,
                f"{run_id}/{name}",
                repeatable=self.experiment.noise_seed is not None,
                on_exhausted=self.experiment.on_budget_exhausted,
                delta_of=self.experiment.delta_of,
                completed=self.simulation.round,
                replayed_rounds=self.again,
                population=self.experiment.population,
                begin=number == 0,  # with a ledger all variants of a simulation are one run
            )
            for number, name in enumerate(names)
        ]

    @property
    def seconds(self) -> float:
        """How long it has taken, in all sittings."""
        return self.seconds_before + time.monotonic() - self.begun

    def keep(self) -> None:
        """Remember where to go on."""
        beside = {"seconds": np.array(self.seconds), "again": np.array(self.again)}
        self.parts[0].keep_checkpoint({**self.simulation.state_arrays(), **beside})

    def evaluate(self) -> None:
        """Measure all variants."""
        for part, history, rows in zip(self.parts, self.histories, self.simulation.evaluate()):
            part.append_history(rows)
            history += rows

    def progress(self, round: int) -> Progress:
        """Where it stands after a round."""
        latest = tuple(value for value in map(_latest, self.histories) if value is not None)
        prices = (partial(_epsilon_ranges, self.billings, round), self.billings[0].rounds_left)
        return Progress(*self.place, round, self.experiment.rounds, latest, *prices)

    def finish(self, stopped: str | None) -> list[VariantResult]:
        """What its variants came to, kept with each of them."""
        seconds, repeatable = self.seconds / len(self.variants), self.experiment.noise_seed is not None
        found = []
        for one, billing, history in zip(self.variants, self.billings, self.histories, strict=True):
            costs = _group_results(billing, self.simulation.round)
            made = VariantResult(
                one.name, one.algorithm, self.simulation.round, seconds, repeatable, costs, stopped=stopped
            )
            found.append(attach_metrics(made, history))
        scores = self.simulation.client_scores()
        for number in reversed(range(len(found))):
            own = {model: score_KV[:, number].astype(np.float32) for model, score_KV in scores.items()}
            self.parts[number].finish(self.simulation.named_parameters(number), found[number], own)
        return found


def _play(batch: _Batch, watch: Watch) -> list[VariantResult]:
    """A batch round by round: paid for, played, evaluated, shown, kept."""
    experiment, simulation = batch.experiment, batch.simulation
    kept, pause, stopped = time.monotonic(), experiment.checkpoint_seconds, None
    watch(Progress(*batch.place, 0, experiment.rounds))
    while simulation.round < experiment.rounds:
        try:
            mechanisms = batch.billings[0].charge_next(simulation.mechanisms)
        except BudgetExhausted as error:
            stopped = str(error)
            break
        if mechanisms != list(simulation.mechanisms):
            simulation.set_mechanisms(mechanisms)
        simulation.run_round()
        if simulation.round % experiment.evaluate_every == 0 or simulation.round == experiment.rounds:
            batch.evaluate()
        go_on = watch(batch.progress(simulation.round))
        now = time.monotonic()
        if not go_on or now - kept >= pause:
            batch.keep()
            kept = time.monotonic()
            pause = max(experiment.checkpoint_seconds, 20 * (kept - now))  # a twentieth of the time at most
        if not go_on:
            raise Interrupted
    if not batch.histories[0] or batch.histories[0][-1].round != simulation.round:  # it ended before its time
        batch.evaluate()
    return batch.finish(stopped)


def _group_results(billing: RunBilling, rounds: int) -> list[GroupResult]:
    """Every group with what a run has cost it: what the ledger charged, replayed rounds included."""
    return account_groups(billing.mechanism, lambda name: billing.costs(name, rounds), billing.delta_of)


def _epsilon_ranges(billings: list[RunBilling], rounds: int) -> dict[str, tuple[float, float]]:
    """Each group's least and largest epsilon among the variants."""
    by_variant = [billing.epsilon(rounds) for billing in billings]
    of_group = {name: [epsilon[name] for epsilon in by_variant] for name in by_variant[0]}
    return {name: (min(epsilons), max(epsilons)) for name, epsilons in of_group.items()}


def _latest(history: list[MetricRow]) -> float | None:
    for row in reversed(history):
        if (row.group, row.model, row.metric) == (SERVER, "global", "accuracy"):
            return row.value
    return None

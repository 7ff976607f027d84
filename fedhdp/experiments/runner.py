"""An experiment run into a directory: variants share rounds where they can; a run resumes from its last checkpoint."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from fedhdp.data import FederatedData
from fedhdp.engine.personal_store import personal_bytes, personal_bytes_limit
from fedhdp.errors import ConfigError, RunError
from fedhdp.experiments.config import Experiment, from_toml, to_toml
from fedhdp.mechanism import SERVER, Mechanism
from fedhdp.models import Model
from fedhdp.privacy.accounting import privacy_costs
from fedhdp.privacy.budget import BudgetExhausted, RunBilling
from fedhdp.privacy.ledger import Ledger
from fedhdp.results.provenance import provenance
from fedhdp.results.schema import MetricRow, Summary, VariantResult, account_groups, attach_metrics
from fedhdp.results.store import (
    EXPERIMENT_FILE,
    SUMMARY_FILE,
    DamagedRunError,
    RunDirectory,
    VariantDirectory,
    read_value,
    write_value,
)
from fedhdp.rng import os_entropy
from fedhdp.simulation import Simulation, cohorts_of, global_training

CHECKPOINT_SHARE = 20  # checkpoints take at most one part in this many of the time


class Progress(NamedTuple):
    """The progress of a run.

    Args:
        variant: The name of the variant, and how many run with it.
        number: The number of the variant, from 1.
        variants: The number of variants.
        round: The rounds completed.
        rounds: The rounds to complete.
        accuracies: Each variant's accuracy on the server's test set in the last evaluation.
        billings: Each variant's billing.
    """

    variant: str
    number: int
    variants: int
    round: int
    rounds: int
    accuracies: tuple[float, ...] = ()
    billings: tuple[RunBilling, ...] = ()

    def epsilon(self) -> dict[str, tuple[float, float]]:
        """Each group's smallest and largest epsilon among the variants; empty where it is not known."""
        by_variant = [billing.epsilon(self.round) for billing in self.billings] or [{}]
        by_group = {name: [epsilons[name] for epsilons in by_variant] for name in by_variant[0]}
        return {name: (min(epsilons), max(epsilons)) for name, epsilons in by_group.items()}

    def rounds_left(self) -> dict[str, float]:
        """How many more rounds the budgets allow, by group; empty without a ledger."""
        return self.billings[0].rounds_left() if self.billings else {}


class Interrupted(Exception):
    """The watcher stopped the run, which can be resumed."""


Watch = Callable[[Progress], bool]  # called after every round; False interrupts the run


def run(experiment: Experiment, out: Path, watch: Watch) -> Summary:
    """Run an experiment into a new directory.

    Args:
        experiment: The experiment.
        out: The directory; a run that cannot start leaves none.
        watch: Called with the progress after every round; False interrupts the run.

    Returns:
        The results.

    Raises:
        Interrupted: If the watcher interrupted it.
        RunError: If the directory is in use.
        FedHDPError: If the experiment cannot be run.
    """
    mechanism = experiment.mechanism.build(experiment.rounds, experiment.delta)
    experiment = experiment.pin()
    with RunDirectory.create(out, to_toml(experiment).encode()) as directory:
        try:
            return _run(experiment, mechanism, directory, watch)
        except (ValueError, OSError):
            directory.discard_if_empty()
            raise


def resume(out: Path, watch: Watch) -> Summary:
    """Resume the run in a directory, or return its results if it is finished.

    Args:
        out: The directory.
        watch: As in `run`.

    Raises:
        Interrupted: If the watcher interrupted it.
        DamagedRunError: If the directory has no run, or a damaged one.
        RunError: If another process is writing to the directory.
    """
    with RunDirectory.open(out) as directory:
        experiment = read_experiment(out)
        if (out / SUMMARY_FILE).exists():
            return read_value(out / SUMMARY_FILE, Summary)
        return _run(experiment, experiment.mechanism.build(experiment.rounds, experiment.delta), directory, watch)


def run_or_resume(experiment: Experiment, out: Path, watch: Watch) -> Summary:
    """Run an experiment into a directory, or resume it there.

    Raises:
        RunError: If the directory has the run of another experiment, and what `run` and `resume` raise.
    """
    if not (out / EXPERIMENT_FILE).exists():
        return run(experiment, out, watch)
    if read_experiment(out) != experiment.pin():
        raise RunError(f"{out} has the run of another experiment; name another --out", "out", str(out))
    return resume(out, watch)


def read_experiment(out: Path) -> Experiment:
    """Read the experiment of a run's directory.

    Raises:
        DamagedRunError: If it is missing, damaged or that of a deployment.
    """
    path = out / EXPERIMENT_FILE
    try:
        return from_toml(path.read_text(encoding="utf-8"), str(path))
    except (OSError, ValueError) as error:
        hint = "a deployment resumes when its ServerApp is submitted again with this directory"
        message = f"{path} is no experiment that can be simulated, or damaged; {hint} ({error})"
        raise DamagedRunError(message) from error


def with_seeds(experiment: Experiment, seeds: Iterable[int]) -> list[Experiment]:
    """The experiment with each of these seeds; where it has a noise seed, the seed is added to it.

    Raises:
        ConfigError: If it has a ledger, since every seed has another population.
    """
    if experiment.ledger is not None:
        message = f"seeds differ in their population, and {experiment.ledger} is of one: run each with its own ledger"
        raise ConfigError(message, "ledger", experiment.ledger)
    noise = experiment.noise_seed
    return [replace(experiment, seed=seed, noise_seed=None if noise is None else noise + seed) for seed in seeds]


def _run(experiment: Experiment, mechanism: Mechanism, directory: RunDirectory, watch: Watch) -> Summary:
    parts = [directory.variant(variant.name) for variant in experiment.variants]
    results = [part.result() for part in parts]
    if experiment.ledger is not None and not Path(experiment.ledger).exists() and any(part.started for part in parts):
        message = f"{experiment.ledger} is gone: a run cannot resume without the ledger that charged it"
        raise RunError(message, "ledger", experiment.ledger)
    if None in results:
        first = results.index(None)
        progress = Progress(experiment.variants[first].name, first + 1, len(parts), 0, experiment.rounds)
        if not watch(progress):
            raise Interrupted
        data = experiment.data.load(mechanism, experiment.seed)
        model = experiment.model.build(int(np.prod(data.input_shape)), data.classes)
        mechanisms = [variant.mechanism(mechanism) for variant in experiment.variants]
        private = any(not group.opted_out for variant in mechanisms for group in variant.groups)
        cohort_entropy = os_entropy(4) if private and experiment.ledger is None else None  # all variants are paired
        with _open_ledger(experiment, mechanism, mechanisms) as ledger:
            for numbers in _batches(experiment, mechanisms, model):
                if any(results[number] is None for number in numbers):
                    simulation = _simulation(experiment, numbers, mechanisms, data, model, parts, cohort_entropy)
                    batch = _VariantBatch(experiment, numbers, simulation, parts, watch)
                    for number, result in zip(numbers, batch.run(directory.id, ledger), strict=True):
                        results[number] = result
    variants = [result for result in results if result is not None]
    summary = Summary(experiment.name, sum(result.seconds for result in variants), variants, *provenance())
    write_value(directory.path / SUMMARY_FILE, summary)
    return summary


def _simulation(
    experiment: Experiment,
    numbers: list[int],
    mechanisms: list[Mechanism],
    data: FederatedData,
    model: Model,
    parts: list[VariantDirectory],
    cohort_entropy: np.ndarray | None,
) -> Simulation:
    training, server_optimizer = experiment.overrides(numbers[0])
    return Simulation(
        data,
        model,
        [mechanisms[number] for number in numbers],
        training,
        server_optimizer,
        experiment.seed,
        experiment.noise_seed,
        parts[numbers[0]].path,
        cohort_entropy,
    )


def _batches(experiment: Experiment, mechanisms: list[Mechanism], model: Model) -> list[list[int]]:
    """The variants that run together: always those that share a global training, others as far as memory allows.

    With a ledger, each global training runs by itself, since an exhausted budget may change its cohorts.
    """
    by_training: dict[tuple, list[int]] = {}
    for number, mechanism in enumerate(mechanisms):
        by_training.setdefault((global_training(mechanism), *experiment.overrides(number)), []).append(number)
    limit = personal_bytes_limit() // 4  # the rest is for data and the computation of a round
    by_cohort: dict[tuple, list[list[int]]] = {}
    for (mechanism, training, server_optimizer), numbers in by_training.items():
        batches = by_cohort.setdefault((cohorts_of(mechanism), training, server_optimizer), [])
        size = personal_bytes(model, mechanism.clients) if training.personalize else 0
        if batches and experiment.ledger is None and (len(batches[-1]) + len(numbers)) * size <= limit:
            batches[-1] += numbers
        else:
            batches.append(list(numbers))
    return [batch for batches in by_cohort.values() for batch in batches]


@contextmanager
def _open_ledger(
    experiment: Experiment, mechanism: Mechanism, mechanisms: Sequence[Mechanism]
) -> Iterator[Ledger | None]:
    """The experiment's ledger, if it has one, with its budgets.

    Raises:
        ConfigError: If a variant gives a group less noise than its clients chose, or variants sample in several ways.
    """
    if experiment.ledger is None:
        yield None
        return
    for variant, variant_mechanism in zip(experiment.variants, mechanisms, strict=True):
        for group, cost in zip(mechanism.groups, privacy_costs(variant_mechanism).values(), strict=True):
            if not group.opted_out and cost.noise_multiplier == 0 and cost.sampling_rate > 0:
                message = (
                    f"{variant.name} gives {group.name!r} no noise, which {experiment.ledger} would charge for good"
                )
                raise ConfigError(f"{message}: remove the variant, or the ledger", "variants", variant.name)
    samplings = sorted({variant_mechanism.sampling for variant_mechanism in mechanisms})
    if len(samplings) > 1:
        message = f"variants sample in several ways ({', '.join(samplings)}), which one ledger cannot add up"
        raise ConfigError(f"{message}: run them separately", "sampling", samplings)
    with Ledger(experiment.ledger) as ledger:
        for name, budget in experiment.budgets.items():
            ledger.lower_budget(name, budget)
        ledger.check_groups(mechanism.groups)
        yield ledger


class _VariantBatch:
    """Variants that run in one simulation. The first one's directory has the checkpoint of all, and is finished last."""

    def __init__(
        self,
        experiment: Experiment,
        numbers: list[int],
        simulation: Simulation,
        parts: list[VariantDirectory],
        watch: Watch,
    ):
        self.experiment, self.simulation, self.watch = experiment, simulation, watch
        self.variants = [experiment.variants[number] for number in numbers]
        self.parts = [parts[number] for number in numbers]
        self.title = self.variants[0].name + (f" and {len(numbers) - 1} more" if len(numbers) > 1 else "")
        self.number = numbers[0] + 1
        self.start_time = self.checkpoint_time = time.monotonic()
        self.checkpoint_pause = experiment.checkpoint_seconds
        self.mechanisms = simulation.mechanisms  # with all groups, also those that are dropped later
        self.stopped: str | None = None
        self._restore()

    def _restore(self) -> None:
        """Restore the checkpoint and the histories up to it.

        ``replayed_rounds`` counts rounds whose results were shown and which run again with other noise: after a crash, those
        since the checkpoint.
        """
        checkpoint = self.parts[0].checkpoint() or {}
        self.previous_seconds = float(checkpoint.get("seconds", 0.0))
        self.replayed_rounds = int(checkpoint.get("replayed_rounds", 0))
        if checkpoint:
            self.simulation.restore(checkpoint)
        histories = [part.history() for part in self.parts]
        last_shown = max((row.round for history in histories for row in history), default=0)
        self.replayed_rounds += max(0, last_shown - self.simulation.round)
        self.simulation.histories = [part.history(until=self.simulation.round) for part in self.parts]
        self.has_lost_rows = histories != self.simulation.histories

    @property
    def seconds(self) -> float:
        """The time that the batch has taken, earlier processes included."""
        return self.previous_seconds + time.monotonic() - self.start_time

    def run(self, run_id: str, ledger: Ledger | None) -> list[VariantResult]:
        """Run the remaining rounds and write the results."""
        self.billings = self._make_billings(run_id, ledger)
        if self.has_lost_rows:  # remember the replayed rounds before the rows that prove them are gone
            self.save_checkpoint()
        for part, history in zip(self.parts, self.simulation.histories, strict=True):
            part.rewrite_history(history)
        if not self.watch(Progress(self.title, self.number, len(self.experiment.variants), 0, self.experiment.rounds)):
            raise Interrupted
        self.simulation.run(
            self.experiment.rounds, self._charge_round, self._record_round, self.experiment.evaluate_every
        )
        if not self._is_evaluated():  # it was stopped between evaluations
            for history, part, rows in zip(
                self.simulation.histories, self.parts, self.simulation.evaluate(), strict=True
            ):
                history += rows
                part.append_history(rows)
        return self._finish()

    def _make_billings(self, run_id: str, ledger: Ledger | None) -> list[RunBilling]:
        """A billing for each global training; with a ledger there is one, in the name of its first variant."""
        billings = {}
        for variant, number, mechanism in zip(
            self.variants, self.simulation.run_of, self.simulation.mechanisms, strict=True
        ):
            if number not in billings:
                billings[number] = RunBilling(
                    mechanism,
                    ledger,
                    f"{run_id}/{variant.name}",
                    repeatable=self.experiment.repeatable,
                    on_exhausted=self.experiment.on_budget_exhausted,
                    delta_of=self.experiment.delta_of,
                    completed=self.simulation.round,
                    replayed_rounds=self.replayed_rounds,
                    population=self.experiment.population,
                )
        return [billings[number] for number in self.simulation.run_of]

    def _charge_round(self, simulation: Simulation) -> bool:
        """Charge the next round to the ledger, before anything of it can be seen; False where budgets are exhausted."""
        try:
            mechanisms = self.billings[0].charge_next(simulation.mechanisms)
        except BudgetExhausted as error:
            self.stopped = str(error)
            return False
        if tuple(mechanisms) != simulation.mechanisms:
            simulation.set_mechanisms(mechanisms)
        return True

    def _record_round(self, simulation: Simulation) -> None:
        """Record an evaluated round, show the progress and save a checkpoint where one is due."""
        if self._is_evaluated():
            for part, history in zip(self.parts, simulation.histories, strict=True):
                part.append_history(row for row in history if row.round == simulation.round)
        go_on = self.watch(self._progress())
        start = time.monotonic()
        if not go_on or start - self.checkpoint_time >= self.checkpoint_pause:
            self.save_checkpoint()
            self.checkpoint_time = time.monotonic()
            self.checkpoint_pause = max(
                self.experiment.checkpoint_seconds, CHECKPOINT_SHARE * (self.checkpoint_time - start)
            )
        if not go_on:
            raise Interrupted

    def _is_evaluated(self) -> bool:
        """Whether the histories include the last completed round."""
        history = self.simulation.histories[0]
        return bool(history) and history[-1].round == self.simulation.round

    def _progress(self) -> Progress:
        accuracies = (_last_accuracy(history) for history in self.simulation.histories)
        return Progress(
            self.title,
            self.number,
            len(self.experiment.variants),
            self.simulation.round,
            self.experiment.rounds,
            tuple(accuracy for accuracy in accuracies if accuracy is not None),
            tuple(self.billings),
        )

    def save_checkpoint(self) -> None:
        """Save the state from which the batch resumes."""
        counts = {"seconds": np.array(self.seconds), "replayed_rounds": np.array(self.replayed_rounds)}
        self.parts[0].save_checkpoint({**self.simulation.state_arrays(), **counts})

    def _finish(self) -> list[VariantResult]:
        """Write each variant's model, scores and result."""
        rounds, seconds = self.simulation.round, self.seconds / len(self.variants)
        scores = self.simulation.client_scores()
        results = []
        for variant, billing, mechanism, history in zip(
            self.variants, self.billings, self.mechanisms, self.simulation.histories, strict=True
        ):
            groups = account_groups(mechanism, partial(billing.costs, rounds=rounds), self.experiment.delta_of)
            result = VariantResult(
                variant.name,
                variant.algorithm,
                rounds,
                seconds,
                self.experiment.repeatable,
                groups,
                stopped=self.stopped,
            )
            results.append(attach_metrics(result, history))
        for number in reversed(range(len(results))):
            variant_scores = {model: score_KV[:, number].astype(np.float32) for model, score_KV in scores.items()}
            self.parts[number].finish(self.simulation.named_parameters(number), results[number], variant_scores)
        return results


def _last_accuracy(history: list[MetricRow]) -> float | None:
    """The accuracy on the server's test set in the last evaluation."""
    for row in reversed(history):
        if (row.group, row.model, row.metric) == (SERVER, "global", "accuracy"):
            return row.value
    return None

"""Variants that run in one simulation: charged, recorded, checkpointed and resumed together."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import msgspec
import numpy as np

from fedhdp.experiments.config import Experiment
from fedhdp.experiments.groups import opted_out
from fedhdp.experiments.start import StartCost
from fedhdp.experiments.toml import without_none
from fedhdp.experiments.variant import Variant
from fedhdp.mechanism import SERVER, Mechanism, ScheduledMechanism, mechanism_at
from fedhdp.models import parameter_bytes
from fedhdp.privacy.accounting import pluralize
from fedhdp.privacy.budget import BudgetExhausted, RunBilling
from fedhdp.privacy.costs import PrivacyCost, scheduled_costs
from fedhdp.privacy.ledger import Ledger
from fedhdp.results.loggers import LoggedVariant, VariantLog
from fedhdp.results.schema import ACCURACY, MetricInfo, MetricRow, VariantResult, account_groups, attach_metrics
from fedhdp.results.store import (
    HISTORY_FILE,
    DamagedRunError,
    Extension,
    VariantDirectory,
    encode_json,
    history_checksum,
)
from fedhdp.simulation import Simulation

KEPT_CHECKPOINT_BYTES = 2**28  # up to which a finished run keeps its checkpoint unless the experiment says otherwise
CHECKPOINT_SHARE = 20  # checkpoints take at most one part in this many of the time


class Progress(NamedTuple):
    """The progress of a run."""

    names: tuple[str, ...]  # of the variants that run now
    numbers: tuple[int, ...]  # of these, from 1
    variants: int
    round: int
    rounds: int
    values: tuple[float, ...] = ()  # of each variant on the server's test set, in the last evaluation
    billings: tuple[RunBilling, ...] = ()
    metric: MetricInfo = ACCURACY

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


class VariantBatch:
    """Variants that run in one simulation. The first one's directory has the checkpoint of all, and is finished last."""

    def __init__(
        self,
        experiment: Experiment,
        numbers: list[int],
        simulation: Simulation,
        parts: list[VariantDirectory],
        watch: Watch,
        extensions: Sequence[Extension] = (),
        start_cost: StartCost | None = None,
    ):
        self.experiment, self.simulation, self.watch = experiment, simulation, watch
        self.variants = [experiment.variants[number] for number in numbers]
        self.parts = [parts[number] for number in numbers]
        self.numbers = tuple(number + 1 for number in numbers)
        self.start_time = time.monotonic()
        is_only_process = simulation.processes == 1  # else the first round leaves a checkpoint: any process may die
        self.checkpoint_time = self.start_time if is_only_process else -math.inf
        self.checkpoint_pause = experiment.checkpoint_seconds
        self.stopped: str | None = None
        self.start_cost = start_cost
        self.first_targets = extensions[-1].epsilon_targets if extensions else {}
        self.notes = [extension_note(extensions, experiment.rounds)] if extensions else []
        self._restore()

    def _restore(self) -> None:
        """Restore the checkpoint and the histories up to it.

        ``replayed_rounds`` are the rounds whose results were shown and which run again with other noise: after a crash,
        those since the checkpoint.
        """
        checkpoint = self.parts[0].checkpoint() or {}
        self.previous_seconds = float(checkpoint.get("seconds", 0.0))
        replayed = np.asarray(checkpoint.get("replayed_rounds", ()), int)  # a mere count if the mechanism was constant
        self.replayed_rounds: list[int] = replayed.tolist() if replayed.ndim else [0] * int(replayed)
        if checkpoint:
            self.simulation.restore(checkpoint)
        histories = [part.history() for part in self.parts]
        last_shown = max((row.round for history in histories for row in history), default=0)
        self.replayed_rounds.extend(range(self.simulation.round, last_shown))
        self.simulation.histories = [part.history(until=self.simulation.round) for part in self.parts]
        self._check_histories(checkpoint)
        self.has_lost_rows = histories != self.simulation.histories

    def _check_histories(self, checkpoint: Mapping[str, np.ndarray]) -> None:
        """Refuse histories that are not those of the checkpoint."""
        checksums = checkpoint["histories"].tolist() if "histories" in checkpoint else []
        for part, rows, (number, checksum) in zip(self.parts, self.simulation.histories, checksums, strict=False):
            if history_checksum(rows[: int(number)]) != checksum:
                raise DamagedRunError(f"{part.path / HISTORY_FILE} is damaged, or was changed after it was written")

    @property
    def seconds(self) -> float:
        """The time that the batch has taken, earlier processes included."""
        return self.previous_seconds + time.monotonic() - self.start_time

    def run(self, run_id: str, ledger: Ledger | None) -> list[VariantResult]:
        """Run the remaining rounds and write the results."""
        self.billings = self._make_billings(run_id, ledger)
        self.logs: list[VariantLog] = []
        completed = False
        try:
            for variant, part, schedule in zip(self.variants, self.parts, self.simulation.schedules, strict=True):
                self.logs.append(self._start_log(run_id, variant, part, schedule))
            self._run_rounds()
            results, completed = self._finish(), True
        finally:
            for variant_log in self.logs:
                variant_log.finish(completed)
        return results

    def _start_log(
        self, run_id: str, variant: Variant, part: VariantDirectory, schedule: ScheduledMechanism
    ) -> VariantLog:
        """Start the experiment's loggers for a variant; an address in a logger's arguments is no setting to show."""
        values = msgspec.structs.asdict(self.experiment) | {"variants": None, "loggers": None, "variant": variant}
        config = msgspec.json.decode(encode_json(without_none(msgspec.to_builtins(values))))
        run = (self.experiment.name, run_id, variant.name, part.path, self.simulation.round, config)
        mechanism, is_exposed = mechanism_at(schedule, 0), self._is_exposed(schedule)
        server_has_client_data = self.simulation.data.server_has_client_data or is_exposed
        clip_has_client_data = mechanism.is_adaptive and (mechanism.bit_noise_stddev == 0 or is_exposed)
        logged = LoggedVariant(*run, server_has_client_data, clip_has_client_data)
        return VariantLog(self.experiment.loggers, logged)

    def _is_exposed(self, schedule: ScheduledMechanism) -> bool:
        """Whether the models follow the data of clients who chose noise, and have none here or in the run before."""
        start, chosen = self.start_cost, self.experiment.mechanism
        if start is not None and not start.covers(self.experiment, self.parts[0].path.parent):
            return True
        costs = scheduled_costs(schedule, self.experiment.rounds)
        with_noise = costs.keys() - {*opted_out(chosen)}
        return any(not cost.free and cost.noise_multiplier == 0 for name in with_noise for cost in costs[name])

    def _run_rounds(self) -> None:
        """Run the remaining rounds and record what they measure."""
        if self.has_lost_rows:  # remember the replayed rounds before the rows that prove them are gone
            self.save_checkpoint()
        for part, history in zip(self.parts, self.simulation.histories, strict=True):
            part.rewrite_history(history)
        if not self.watch(self._start_progress()):
            raise Interrupted
        rounds, evaluate_every = self.experiment.rounds, self.experiment.evaluate_every
        self.simulation.run(rounds, self._charge_round, self._record_round, evaluate_every, self._record_evaluation)
        if not self._is_evaluated():  # it was stopped between evaluations
            evaluations = self.simulation.evaluate()
            for history, rows in zip(self.simulation.histories, evaluations, strict=True):
                history += rows
            self._record_evaluation(self.simulation, evaluations)

    def _make_billings(self, run_id: str, ledger: Ledger | None) -> list[RunBilling]:
        """A billing for each global training; with a ledger there is one, in the name of its first variant."""
        billings = {}
        experiment, simulation = self.experiment, self.simulation
        for variant, number, mechanism in zip(self.variants, simulation.run_of, simulation.schedules, strict=True):
            if number not in billings:
                billings[number] = RunBilling(
                    mechanism,
                    ledger,
                    f"{run_id}/{variant.name}",
                    repeatable=experiment.repeatable,
                    on_exhausted=experiment.on_budget_exhausted,
                    delta_of=experiment.delta_of,
                    accountant=experiment.run_accountant,
                    completed=simulation.round,
                    replayed_rounds=self.replayed_rounds,
                    members=None if ledger is None else simulation.group_of_client(),
                    population=experiment.population if simulation.data.client_ids is None else None,
                )
        return [billings[number] for number in simulation.run_of]

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

    def _record_evaluation(self, simulation: Simulation, evaluations: list[list[MetricRow]]) -> None:
        """Append what was measured to the histories, and log it with the epsilons."""
        for part, rows in zip(self.parts, evaluations, strict=True):
            part.append_history(rows)
        if self.experiment.loggers:
            for variant_log, billing, rows in zip(self.logs, self.billings, evaluations, strict=True):
                spent = billing.epsilon(simulation.round).items()
                epsilons = [MetricRow(simulation.round, name, "global", "epsilon", epsilon) for name, epsilon in spent]
                variant_log.log(simulation.round, rows + epsilons)

    def _record_round(self, simulation: Simulation) -> None:
        """Show the progress and save a checkpoint where one is due."""
        go_on = self.watch(self._progress())
        start = time.monotonic()
        if not go_on or start - self.checkpoint_time >= self.checkpoint_pause:
            self.save_checkpoint()
            self.checkpoint_time = time.monotonic()
            pause = CHECKPOINT_SHARE * (self.checkpoint_time - start)
            self.checkpoint_pause = max(self.experiment.checkpoint_seconds, pause)
        if not go_on:
            raise Interrupted

    def _is_evaluated(self) -> bool:
        """Whether the histories include the last completed round."""
        history = self.simulation.histories[0]
        return bool(history) and history[-1].round == self.simulation.round

    def _start_progress(self) -> Progress:
        names = tuple(variant.name for variant in self.variants)
        return Progress(names, self.numbers, len(self.experiment.variants), 0, self.experiment.rounds)

    def _progress(self) -> Progress:
        metric = self.simulation.metrics[0]
        values = (_last_value(metric.name, history) for history in self.simulation.histories)
        return self._start_progress()._replace(
            round=self.simulation.round,
            values=tuple(value for value in values if value is not None),
            metric=metric,
            billings=tuple(self.billings),
        )

    def save_checkpoint(self) -> None:
        """Save the state from which the batch resumes."""
        counts = {"seconds": np.array(self.seconds), "replayed_rounds": np.array(self.replayed_rounds, int)}
        names = {"variants": np.array([variant.name for variant in self.variants])}
        histories = [(str(len(rows)), history_checksum(rows)) for rows in self.simulation.histories]
        names["histories"] = np.array(histories)  # their rows so far, and the checksum of these
        self.parts[0].save_checkpoint({**self.simulation.state_arrays(), **counts, **names})

    def _start_notes(self, mechanism: Mechanism, costs_of: Callable[[str], Iterable[PrivacyCost]]) -> list[str]:
        """What the model that the run began with had cost."""
        if self.start_cost is None:
            return []
        costs = {group.name: [cost for cost in costs_of(group.name) if cost.rounds] for group in mechanism.groups}
        return self.start_cost.notes(costs, self.experiment, self.parts[0].path.parent)

    def _write_personal(self, number: int) -> None:
        """Write every client's personal model; one who has not taken part has the global model."""
        count = self.simulation.data.num_clients
        parts = (np.arange(first, min(first + PERSONAL_PART, count)) for first in range(0, count, PERSONAL_PART))
        rows = (self.simulation.personal_models(clients, number) for clients in parts)
        self.parts[number].write_personal((count, self.simulation.engine.parameters), rows)

    def _keeps_checkpoint(self) -> bool:
        """Whether the checkpoint is kept at the end, so that the run can be extended."""
        if self.experiment.keep_checkpoint is not None:
            return self.experiment.keep_checkpoint
        simulation = self.simulation
        participants = 0 if simulation.store is None else int(simulation.participated_K.sum())
        size = parameter_bytes(simulation.engine.model) * participants * len(self.variants)
        return size <= KEPT_CHECKPOINT_BYTES

    def _finish(self) -> list[VariantResult]:
        """Write each variant's model, scores and result."""
        rounds, seconds = self.simulation.round, self.seconds / len(self.variants)
        scores = self.simulation.client_scores()
        results, data = [], self.simulation.data
        experiment, columns = self.experiment, (self.variants, self.billings, self.simulation.schedules)
        for variant, billing, schedule, history in zip(*columns, self.simulation.histories, strict=True):
            costs_of = partial(billing.costs, rounds=rounds)
            targets = self.first_targets.get(variant.name) or experiment.epsilon_targets(variant)
            mechanism = mechanism_at(schedule, max(rounds - 1, 0))  # with all groups, also those that were dropped
            groups = account_groups(
                mechanism, costs_of, experiment.delta_of, experiment.run_accountant, targets, data.public_levels
            )
            start = self.start_cost
            result = VariantResult(
                name=variant.name,
                algorithm=variant.algorithm,
                rounds=rounds,
                seconds=seconds,
                repeatable=experiment.repeatable,
                groups=groups,
                metrics=self.simulation.metrics,
                stopped=self.stopped,
                preparation=data.preparation,
                notes=self.notes + self._start_notes(mechanism, costs_of),
                server_has_client_data=data.server_has_client_data,
                start_covered=None if start is None else start.covers(experiment, self.parts[0].path.parent),
            )
            results.append(attach_metrics(result, history))
        keep = self._keeps_checkpoint()
        if keep:
            self.save_checkpoint()
        for number in reversed(range(len(results))):
            if experiment.keep_personal:
                self._write_personal(number)
            variant_scores = {name: score_KV[:, number].astype(np.float32) for name, score_KV in scores.items()}
            parameters = self.simulation.named_parameters(number)
            self.parts[number].finish(parameters, results[number], variant_scores, keep)
        return results


PERSONAL_PART = 256  # clients whose personal models are written at a time


def extension_note(extensions: Sequence[Extension], rounds: int) -> str:
    """What a table says about a run whose rounds were changed."""
    first = pluralize(extensions[0].rounds)
    targets = [target for of_variant in extensions[0].epsilon_targets.values() for target in of_variant.values()]
    if any(target < math.inf for target in targets):
        return f"noise was calibrated for {first}; the run was changed to {pluralize(rounds)} and kept its noise"
    return f"the run was changed from {first} to {pluralize(rounds)} and kept its noise"


def _last_value(metric: str, history: list[MetricRow]) -> float | None:
    """A metric on the server's test set in the last evaluation."""
    for row in reversed(history):
        if (row.group, row.model, row.metric) == (SERVER, "global", metric):
            return row.value
    return None

"""An experiment run into a directory, with its variants in as few simulations as possible; and resumed there."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from fedhdp.data import FederatedData
from fedhdp.devices import use_cpu_cores
from fedhdp.errors import ConfigError, RunError
from fedhdp.experiments.bases import build_model
from fedhdp.experiments.batch import Interrupted, Progress, VariantBatch, Watch
from fedhdp.experiments.config import Experiment
from fedhdp.experiments.distributed import make_simulation
from fedhdp.experiments.files import read_result
from fedhdp.experiments.start import copy_start, read_start
from fedhdp.experiments.sweep import expand
from fedhdp.experiments.toml import read_experiment, to_toml
from fedhdp.mechanism import Mechanism, PrivacyGroup, ScheduledMechanism, mechanism_at
from fedhdp.models import Model, parameter_bytes, parameter_sizes, unname_parameters
from fedhdp.privacy.costs import PrivacyCost, privacy_costs
from fedhdp.privacy.ledger import Ledger
from fedhdp.results.loggers import check_installed
from fedhdp.results.provenance import provenance
from fedhdp.results.schema import Summary
from fedhdp.results.store import EXPERIMENT_FILE, SUMMARY_FILE, RunDirectory, read_value, write_value
from fedhdp.rng import process_entropy
from fedhdp.server import make_layers
from fedhdp.simulation import personal_bytes_limit


def run(experiment: Experiment, out: Path, watch: Watch, cohort_entropy: np.ndarray | None = None) -> Summary:
    """Run an experiment into a new directory; a run that cannot start leaves none.

    Args:
        experiment: The experiment; its sweep, if it has one, makes variants alone.
        out: The directory.
        watch: Called with the progress after every round; False interrupts the run.
        cohort_entropy: Fresh words from which paired experiments draw the same cohorts. None: this experiment's own.

    Raises:
        Interrupted: If the watcher interrupted it.
        RunError: If the directory is in use.
        FedHDPError: If the experiment cannot be run.
    """
    experiments = expand(experiment)
    if len(experiments) > 1:
        message = f"sweep makes {len(experiments)} experiments: run them with a RunFolder or fedhdp run"
        raise ConfigError(message, "sweep", list(experiments))
    [experiment] = experiments.values()
    data = experiment.load_if_needed()
    mechanism = experiment.build_mechanism(data)
    experiment = experiment.pin()
    with RunDirectory.create(out, to_toml(experiment).encode()) as directory:
        try:
            copy_start(experiment, out)
            return run_variants(experiment, mechanism, directory, watch, cohort_entropy, data)
        except (ValueError, OSError):
            directory.discard_if_empty()
            raise


def resume(out: Path, watch: Watch, cohort_entropy: np.ndarray | None = None) -> Summary:
    """Resume the run in a directory, or return its results if it is finished; the other arguments are those of `run`.

    Raises:
        Interrupted: If the watcher interrupted it.
        DamagedRunError: If the directory has no run, or a damaged one.
        RunError: If another process is writing to the directory.
    """
    with RunDirectory.open(out) as directory:
        experiment = read_experiment(out)
        if (out / SUMMARY_FILE).exists():
            return read_value(out / SUMMARY_FILE, Summary)
        data = experiment.load_if_needed()
        return run_variants(experiment, experiment.build_mechanism(data), directory, watch, cohort_entropy, data)


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


def run_variants(
    experiment: Experiment,
    mechanism: Mechanism,
    directory: RunDirectory,
    watch: Watch,
    cohort_entropy: np.ndarray | None = None,
    data: FederatedData | None = None,
) -> Summary:
    """Run the variants of a directory that are not finished, and write the summary; the arguments are those of `run`."""
    parts = [directory.variant(variant.name) for variant in experiment.variants]
    if experiment.ledger is not None and not Path(experiment.ledger).exists() and any(part.started for part in parts):
        message = f"{experiment.ledger} is missing: a run cannot resume without the ledger that charged it"
        raise RunError(message, "ledger", experiment.ledger)
    unfinished = [number for number, part in enumerate(parts) if part.result() is None]
    if unfinished:
        check_installed(experiment.loggers)
        first = unfinished[0]
        names = (experiment.variants[first].name,)
        if not watch(Progress(names, (first + 1,), len(parts), 0, experiment.rounds)):
            raise Interrupted
        use_cpu_cores()  # before anything below uses JAX
        data = experiment.load_data() if data is None else data
        _run_batches(experiment, mechanism, directory, watch, cohort_entropy, data)
    results = [read_result(part.path) for part in parts]
    summary = Summary(experiment.name, sum(result.seconds for result in results), results, *provenance())
    write_value(directory.path / SUMMARY_FILE, summary)
    directory.write_checksums()
    return summary


def _run_batches(
    experiment: Experiment,
    mechanism: Mechanism,
    directory: RunDirectory,
    watch: Watch,
    cohort_entropy: np.ndarray | None,
    data: FederatedData,
) -> None:
    """Run the variants that are not finished, in as few simulations as possible."""
    parts = [directory.variant(variant.name) for variant in experiment.variants]
    model, data = build_model(experiment, data, directory.path)
    initial_model, start_cost = None, None
    if experiment.start_from is not None:
        arrays, start_cost = read_start(directory.path)
        initial_model = unname_parameters(model, arrays, "start_from")
    mechanisms = experiment.variant_mechanisms(mechanism, data)
    _check_layers(mechanisms, model)
    private = any(not group.opted_out for variant in mechanisms for group in mechanism_at(variant, 0).groups)
    if not private or experiment.ledger is not None:
        cohort_entropy = None
    elif cohort_entropy is None:  # all variants are paired
        cohort_entropy = process_entropy(4)
    with _open_ledger(experiment, mechanism, mechanisms, data.public_levels) as ledger:
        for numbers in _batches(experiment, mechanisms, model):
            if all(parts[number].result() is not None for number in numbers):
                continue
            batch_mechanisms = [mechanisms[number] for number in numbers]
            start = (batch_mechanisms, parts[numbers[0]].path, cohort_entropy, initial_model)
            simulation = make_simulation(experiment, numbers, data, model, *start)
            directory.record_clients(simulation.group_of_client())
            directory.write_checksums(running=[experiment.variants[number].name for number in numbers])
            batch = VariantBatch(experiment, numbers, simulation, parts, watch, directory.extensions, start_cost)
            batch.run(directory.id, ledger)


def _check_layers(mechanisms: Sequence[ScheduledMechanism], model: Model) -> None:
    """Refuse clips by layer that are not the model's, before any variant runs."""
    import jax

    sizes = parameter_sizes(jax.eval_shape(model.init, jax.random.key(0)))
    for mechanism in mechanisms:
        make_layers(mechanism_at(mechanism, 0), sizes)


def _batches(experiment: Experiment, mechanisms: list[ScheduledMechanism], model: Model) -> list[list[int]]:
    """The variants that run together: always those that share a global training, others as far as memory allows.

    With a ledger, each global training runs by itself, since an exhausted budget may change its cohorts.
    """
    limit = personal_bytes_limit() // 4  # the rest is for data and the computation of a round
    by_cohort: dict[tuple, list[list[int]]] = {}
    for numbers in experiment.by_training(mechanisms):
        schedule, (training, server_optimizer) = mechanisms[numbers[0]], experiment.overrides(numbers[0])
        mechanism, cohorts = mechanism_at(schedule, 0), _cohort_distributions(schedule, experiment.rounds)
        batches = by_cohort.setdefault((cohorts, mechanism.layers, training, server_optimizer), [])
        size = parameter_bytes(model) * mechanism.clients if training.personalize else 0
        if batches and experiment.ledger is None and (len(batches[-1]) + len(numbers)) * size <= limit:
            batches[-1] += numbers
        else:
            batches.append(numbers)
    return [batch for batches in by_cohort.values() for batch in batches]


def _cohort_distributions(schedule: ScheduledMechanism, rounds: int) -> tuple[object, ...]:
    """What decides who is sampled, in the order of the rounds; once where it does not change."""
    if isinstance(schedule, Mechanism):
        return (schedule.cohort_distribution,)
    changes: list[tuple[int, object]] = []
    for round in range(rounds):
        distribution = mechanism_at(schedule, round).cohort_distribution
        if not changes or distribution != changes[-1][1]:
            changes.append((round, distribution))
    return tuple(changes) if len(changes) > 1 else (changes[0][1],)


def _ledger_fault(group: PrivacyGroup, cost: PrivacyCost, has_public_statistics: bool) -> str:
    """Why a ledger cannot record a variant's cost to a group; empty if it can."""
    if not group.opted_out and cost.noise_multiplier == 0 and cost.sampling_rate > 0:
        return f"gives {group.name!r} no noise, so that the ledger would record an infinite epsilon"
    if has_public_statistics and (cost.noise_multiplier > 0 or cost.free):
        action = f"gives {group.name!r} noise" if cost.sampling_rate > 0 else f"never samples {group.name!r}"
        claim = "so that the ledger would state an epsilon that they do not have"
        return f"{action}, though statistics of its clients prepare the inputs, {claim}"
    return ""


@contextmanager
def _open_ledger(
    experiment: Experiment,
    mechanism: Mechanism,
    mechanisms: Sequence[ScheduledMechanism],
    public_levels: Collection[str] = (),
) -> Iterator[Ledger | None]:
    """The experiment's ledger, if it has one, with its budgets.

    Raises:
        ConfigError: If a variant gives a group less noise than its clients chose, or noise to a group whose statistics
            prepared the inputs, or variants sample in several ways.
    """
    if experiment.ledger is None:
        yield None
        return
    first_mechanisms = [mechanism_at(schedule, 0) for schedule in mechanisms]  # later ones have other weights alone
    for variant, changed in zip(experiment.variants, first_mechanisms, strict=True):
        for group, cost in zip(mechanism.groups, privacy_costs(changed).values(), strict=True):
            if fault := _ledger_fault(group, cost, group.name in public_levels):
                message = f"{variant.name} {fault}: remove the variant, or the ledger {experiment.ledger}"
                raise ConfigError(message, "variants", variant.name)
    samplings = sorted({changed.sampling for changed in first_mechanisms})
    if len(samplings) > 1:
        message = f"variants sample in several ways ({', '.join(samplings)}), which one ledger cannot add up"
        raise ConfigError(f"{message}: run them separately", "sampling", samplings)
    with Ledger(experiment.ledger) as ledger:
        for name, budget in experiment.budgets.items():
            ledger.lower_budget(name, budget)
        ledger.check_groups(mechanism.groups)
        yield ledger

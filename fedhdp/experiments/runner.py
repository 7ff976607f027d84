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
from fedhdp.experiments.start import copy_start, read_start
from fedhdp.experiments.sweep import expand
from fedhdp.experiments.toml import from_toml, to_toml
from fedhdp.mechanism import Mechanism, ScheduledMechanism, mechanism_at
from fedhdp.models import Model, parameter_bytes, parameter_sizes, unname_parameters
from fedhdp.privacy.costs import privacy_costs
from fedhdp.privacy.ledger import Ledger
from fedhdp.results.loggers import check_installed
from fedhdp.results.provenance import provenance
from fedhdp.results.schema import Summary
from fedhdp.results.store import EXPERIMENT_FILE, SUMMARY_FILE, DamagedRunError, RunDirectory, read_value, write_value
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


def run_or_resume(experiment: Experiment, out: Path, watch: Watch, cohort_entropy: np.ndarray | None = None) -> Summary:
    """Run an experiment into a directory, or resume it there.

    Raises:
        RunError: If the directory has the run of another experiment, and what `run` and `resume` raise.
    """
    if not (out / EXPERIMENT_FILE).exists():
        return run(experiment, out, watch, cohort_entropy)
    if read_experiment(out) != experiment.pin():
        raise RunError(f"{out} has the run of another experiment; name another --out", "out", str(out))
    return resume(out, watch, cohort_entropy)


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
    results = [part.result() for part in parts]
    if experiment.ledger is not None and not Path(experiment.ledger).exists() and any(part.started for part in parts):
        message = f"{experiment.ledger} is gone: a run cannot resume without the ledger that charged it"
        raise RunError(message, "ledger", experiment.ledger)
    if None in results:
        check_installed(experiment.loggers)
        first = results.index(None)
        progress = Progress((experiment.variants[first].name,), (first + 1,), len(parts), 0, experiment.rounds)
        if not watch(progress):
            raise Interrupted
        use_cpu_cores()  # before anything below uses JAX
        data = experiment.load_data() if data is None else data
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
                if all(results[number] is not None for number in numbers):
                    continue
                batch_mechanisms = [mechanisms[number] for number in numbers]
                start = (batch_mechanisms, parts[numbers[0]].path, cohort_entropy, initial_model)
                simulation = make_simulation(experiment, numbers, data, model, *start)
                directory.record_clients(simulation.group_of_client())
                directory.write_checksums(running=[experiment.variants[number].name for number in numbers])
                batch = VariantBatch(experiment, numbers, simulation, parts, watch, directory.extensions, start_cost)
                for number, result in zip(numbers, batch.run(directory.id, ledger), strict=True):
                    results[number] = result
    variants = [result for result in results if result is not None]
    summary = Summary(experiment.name, sum(result.seconds for result in variants), variants, *provenance())
    write_value(directory.path / SUMMARY_FILE, summary)
    directory.write_checksums()
    return summary


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
    for variant, variant_mechanism in zip(experiment.variants, mechanisms, strict=True):
        costs = privacy_costs(
            mechanism_at(variant_mechanism, 0)
        )  # schedules change weights, never whether there is noise
        for group, cost in zip(mechanism.groups, costs.values(), strict=True):
            if not group.opted_out and cost.noise_multiplier == 0 and cost.sampling_rate > 0:
                message = (
                    f"{variant.name} gives {group.name!r} no noise, which {experiment.ledger} would charge for good"
                )
                raise ConfigError(f"{message}: remove the variant, or the ledger", "variants", variant.name)
            if group.name in public_levels and (cost.noise_multiplier > 0 or cost.free):
                what = f"gives {group.name!r} noise" if cost.sampling_rate > 0 else f"never samples {group.name!r}"
                message = f"{variant.name} {what}, though statistics of its clients prepare the inputs"
                rule = f"{experiment.ledger} would state an epsilon that they do not have"
                raise ConfigError(
                    f"{message}, so that {rule}: remove the variant, or the ledger", "variants", variant.name
                )
    samplings = sorted({mechanism_at(variant_mechanism, 0).sampling for variant_mechanism in mechanisms})
    if len(samplings) > 1:
        message = f"variants sample in several ways ({', '.join(samplings)}), which one ledger cannot add up"
        raise ConfigError(f"{message}: run them separately", "sampling", samplings)
    with Ledger(experiment.ledger) as ledger:
        for name, budget in experiment.budgets.items():
            ledger.lower_budget(name, budget)
        ledger.check_groups(mechanism.groups)
        yield ledger

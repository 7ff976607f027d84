"""An experiment as a value: data, model, mechanism, training, variants to compare."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, get_args

import msgspec
from msgspec.structs import replace

from fedhdp.client import LocalTraining
from fedhdp.clips import AdaptiveClip, LayerClip
from fedhdp.data import FederatedData, hold_out
from fedhdp.devices import use_cpu_cores
from fedhdp.errors import ConfigError, DataError, errors_of, require
from fedhdp.experiments.bases import BasisConfig, MatrixBasis
from fedhdp.experiments.components import (
    IMAGE_INPUTS,
    BuiltInData,
    DataConfig,
    MlpConfig,
    ModelConfig,
    PythonFile,
    count_parameters,
    describe_data,
    known_shape,
)
from fedhdp.experiments.errors import FieldNames, config_error
from fedhdp.experiments.files import PinnedFiles, StartFrom, as_start
from fedhdp.experiments.groups import group_counts, group_sizes, with_group_levels
from fedhdp.experiments.variant import Variant
from fedhdp.mechanism import Mechanism, ScheduledMechanism, mechanism_at
from fedhdp.metrics import NAMES
from fedhdp.optimizers import require_tables
from fedhdp.privacy.accounting import Accountant, default_accountant
from fedhdp.privacy.budget import Budget, OnBudgetExhausted
from fedhdp.privacy.calibration import GroupConfig, MechanismConfig
from fedhdp.results.loggers import Logger, check_names, resolve_paths
from fedhdp.results.store import slug
from fedhdp.server import ServerOptimizer


class Experiment(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything that a comparison needs to be run, and to be run again.

    Args:
        name: The name of the experiment.
        rounds: The rounds of every variant.
        data: The clients' data.
        mechanism: The privacy groups, clip, noise and sampling.
        variants: The rows of the table.
        about: One sentence for `fedhdp list`.
        model: The network.
        training: The clients' local training.
        server: The server's optimizer.
        seed: Seed of data, initial model and batches.
        noise_seed: Seed of noise and cohorts: repeatable, not private. None draws from the operating system's entropy.
        evaluate_every: Rounds between evaluations; the last round is always evaluated.
        metrics: Names of metrics that replace the model's, built-in ones or the model's own; tables show the first.
        loggers: Loggers, by name or with arguments (see ``results.loggers``).
        checkpoint_seconds: Seconds between checkpoints, at least.
        keep_checkpoint: Whether the final state is kept, personal models included, so that the run can be extended. None:
            where these are at most 256 MiB.
        keep_personal: Whether every client's personal model is kept (`fedhdp.results.load_personal`).
        start_from: The run whose global model is the first one.
        delta: The delta of groups without a delta.
        accountant: What calibrates noise, computes epsilons and keeps budgets. None: RDP with a ledger or with fixed
            cohorts, else PLD.
        ledger: The file with what the population has spent; relative to the experiment's file.
        budgets: Budgets over all runs of the ledger, by group.
        on_budget_exhausted: Whether the run stops, or goes on without the group.
        sweep: Lists of values by key; `fedhdp.experiments.sweep.expand` makes variants and experiments of their product.
    """

    name: str
    rounds: int
    data: DataConfig
    mechanism: MechanismConfig
    variants: tuple[Variant, ...]
    about: str = ""
    model: ModelConfig = MlpConfig()
    training: LocalTraining = LocalTraining()
    server: ServerOptimizer = ServerOptimizer()
    seed: int = 0
    noise_seed: int | None = None
    evaluate_every: int = 25
    metrics: tuple[str, ...] = ()
    loggers: tuple[str | Logger, ...] = ()
    checkpoint_seconds: float = 30.0
    keep_checkpoint: bool | None = None
    keep_personal: bool = False
    start_from: str | StartFrom | None = None
    delta: float = 1e-4
    accountant: Accountant | None = None
    ledger: str | None = None
    budgets: dict[str, Budget] = {}
    on_budget_exhausted: OnBudgetExhausted = "stop"
    sweep: dict[str, Any] = {}

    def __post_init__(self) -> None:
        require(1 <= self.rounds < 2**31, "rounds", self.rounds, "at least 1 and below 2**31")
        require(0 <= self.seed < 2**31, "seed", self.seed, "at least 0 and below 2**31")
        if self.noise_seed is not None:
            require(0 <= self.noise_seed < 2**31, "noise_seed", self.noise_seed, "at least 0 and below 2**31")
        within = 1 <= self.evaluate_every < 2**31
        require(within, "evaluate_every", self.evaluate_every, "at least 1 and below 2**31")
        require(self.checkpoint_seconds >= 0, "checkpoint_seconds", self.checkpoint_seconds, "at least 0")
        require(0 < self.delta < 1, "delta", self.delta, "between 0 and 1")
        require(0 <= self.data.validation < 1, "data.validation", self.data.validation, "at least 0 and below 1")
        if isinstance(self.data, BuiltInData) and isinstance(self.model, MlpConfig) and self.model.basis is None:
            self.model.require_memory(IMAGE_INPUTS)
        self._check_metrics()
        check_names(self.loggers)
        require_tables(self.training.optimizer, "training.optimizer")
        require_tables(self.server.optimizer, "server.optimizer")
        self._check_groups()
        self._check_variants()
        if self.accountant == "pld":
            rule = "'rdp' where there is a ledger or a variant with fixed cohorts"
            require(self._default_accountant == "pld", "accountant", self.accountant, rule)

    def _check_metrics(self) -> None:
        for name in self.metrics:
            rule = f"one of {', '.join(NAMES)}, or a function of the model's Python file"
            require(name in NAMES or isinstance(self.model, PythonFile), "metrics", name, rule)
        require(len(set(self.metrics)) == len(self.metrics), "metrics", list(self.metrics), "different names")

    def _check_groups(self) -> None:
        names = [group.name for group in self.mechanism.groups]
        if isinstance(self.data, BuiltInData):
            group_sizes(self.mechanism)
        try:
            group_counts(self.mechanism, self._clients)
        except DataError as error:
            message = f"mechanism.groups and data.clients disagree: {error}"
            raise ConfigError(message, "mechanism.groups", error.value) from error
        budgets = list(self.budgets)
        require(not budgets or self.ledger is not None, "budgets", budgets, "empty without a ledger")
        for name in budgets:
            require(name in names, "budgets", name, f"values by group ({', '.join(names)})")

    def _check_variants(self) -> None:
        names = [variant.name for variant in self.variants]
        require(len(names) >= 1, "variants", names, "one variant or more")
        differ = len({slug(name) for name in names}) == len(names)
        require(differ, "variants", names, "variants whose names differ in letters a to z or digits")
        from fedhdp.theory.pricing import RoughPricing

        base, pricing = self.mechanism.uncalibrated(default_clients=1), RoughPricing(self.rounds)
        for number, variant in enumerate(self.variants):
            training, _ = self.overrides(number)
            has_personal = training.personalize or not self.keep_personal
            require(has_personal, "keep_personal", True, f"false, as {variant.name} does not personalize")
            with errors_of(f"variants[{number}]", ConfigError):
                self.mechanism.with_epsilons(variant.epsilons)
                mechanism = variant.mechanism(base, pricing)
                for round in range(1 if isinstance(mechanism, Mechanism) else self.rounds):
                    training.check(mechanism_at(mechanism, round))

    def overrides(self, number: int) -> tuple[LocalTraining, ServerOptimizer]:
        """The training and the server optimizer of the variant with this number.

        Raises:
            ConfigError: If a field of the variant's ``training`` or ``server`` is unknown or out of range.
        """
        variant, path = self.variants[number], f"variants[{number}]"
        training = _override(self.training, variant.training, f"{path}.training")
        return training, _override(self.server, variant.server, f"{path}.server")

    def by_training(self, mechanisms: Sequence[ScheduledMechanism]) -> list[list[int]]:
        """The variants by global training: those that differ in their pulls alone share one.

        Args:
            mechanisms: The mechanism of each variant.

        Returns:
            For each training the numbers of its variants.
        """
        numbers_of: dict[tuple[object, ...], list[int]] = {}
        for number, mechanism in enumerate(mechanisms):
            training = getattr(mechanism, "without_pulls", mechanism), *self.overrides(number)
            numbers_of.setdefault(training, []).append(number)
        return list(numbers_of.values())

    @property
    def _default_accountant(self) -> Accountant:
        samplings = [variant.sampling or self.mechanism.sampling for variant in self.variants]
        return default_accountant(self.mechanism.sampling, *samplings, ledger=self.ledger is not None)

    @property
    def run_accountant(self) -> Accountant:
        """The accountant of the run: it calibrates the noise, computes the epsilons and keeps the budgets."""
        return self.accountant or self._default_accountant

    @property
    def _clients(self) -> int | None:
        """The number of clients, where it is known without the data."""
        return getattr(self.data, "clients", None)

    def load_data(self) -> FederatedData:
        """Load the data, with the level of each client.

        Raises:
            FedHDPError: If the data cannot be loaded, or their levels are not those of the groups.
        """
        use_cpu_cores()  # before the data may use JAX
        data = self.data.load(self.mechanism, self.seed)
        if getattr(self.data, "transform", "none") == "scattering":
            from fedhdp.experiments.scattering import scatter

            data = scatter(data)
        return with_group_levels(hold_out(data, self.data.validation, self.seed), self.mechanism, self.seed)

    def load_if_needed(self) -> FederatedData | None:
        """Load the data where they alone know how many clients the groups have, or how many parameters the model has."""
        has_weights = all(group.weight is not None for group in self.mechanism.groups)
        has_counts = group_counts(self.mechanism, self._clients) is not None
        is_known = has_counts and (has_weights or known_shape(self.data, self.model) is not None)
        return None if is_known else self.load_data()

    def build_mechanism(self, data: FederatedData | None = None) -> Mechanism:
        """The mechanism that the groups asked for: calibrated, with the theory's weights where they state none.

        Args:
            data: What `load_data` returned; None: it is loaded if it is needed.

        Raises:
            InvalidValueError: If no noise keeps an epsilon.
            FedHDPError: If data or model are needed to count clients or parameters, and cannot be loaded.
        """
        data = self.load_if_needed() if data is None else data
        counts = group_counts(self.mechanism, self._clients, None if data is None else data.levels)
        assert counts is not None
        mechanism = self.mechanism.with_counts(counts).build(self.rounds, self.delta, self.run_accountant)
        return self._with_weights(data, mechanism)

    def variant_mechanisms(self, mechanism: Mechanism, data: FederatedData | None = None) -> list[ScheduledMechanism]:
        """The mechanism of each variant, from that of `build_mechanism`; a function where rounds differ.

        ``data`` is as there.
        """
        from fedhdp.theory.pricing import RunPricing

        count = self._parameter_count(data)
        pricing = RunPricing(self.rounds, self.delta_of, self.run_accountant, count)
        with_weights = partial(self._with_weights, data)
        return [
            variant.mechanism(self._base(variant, mechanism, data), pricing, with_weights) for variant in self.variants
        ]

    def _base(self, variant: Variant, mechanism: Mechanism, data: FederatedData | None) -> Mechanism:
        """The mechanism that a variant changes: calibrated for the variant's own epsilons and sampling if it has some."""
        sampling = variant.sampling or self.mechanism.sampling
        if not variant.epsilons and sampling == self.mechanism.sampling:
            return mechanism
        config = replace(self.mechanism.with_epsilons(variant.epsilons), sampling=sampling)
        return replace(self, mechanism=config, accountant=self.run_accountant).build_mechanism(data)

    def _with_weights(self, data: FederatedData | None, mechanism: Mechanism, given: Iterable[str] = ()) -> Mechanism:
        """The mechanism with the theory's weights for groups that state none and are not among ``given``."""
        free = {config.name for config in self.mechanism.groups if config.weight is None} - set(given)
        if not free:
            return mechanism
        from fedhdp.theory.planning import with_optimal_weights

        return with_optimal_weights(mechanism, self.rounds, self._parameter_count(data), free)

    def _parameter_count(self, data: FederatedData | None) -> Callable[[], int]:
        """What counts the model's parameters, with the data if they are needed."""
        return partial(count_parameters, self.data, self.model, lambda: data or self.load_data())

    def epsilon_targets(self, variant: Variant) -> dict[str, float]:
        """The epsilons that groups asked for, by name, unless the variant states their noise multipliers."""
        targets = self.mechanism.with_epsilons(variant.epsilons).epsilon_targets
        return {name: target for name, target in targets.items() if name not in variant.noise_multipliers}

    @property
    def population(self) -> str:
        """Who the clients are: the data and its seed, or the table that names each client and its level."""
        about = describe_data(self.data)
        return about if getattr(self.data, "level", None) else f"{about}, seed {self.seed}"

    @property
    def repeatable(self) -> bool:
        """Whether noise comes from a seed, so that nothing is private."""
        return self.noise_seed is not None

    def delta_of(self, group: str) -> float:
        """The delta at which a group's epsilon is stated."""
        return next(config.delta or self.delta for config in self.mechanism.groups if config.name == group)

    def resolve(self, directory: Path) -> Experiment:
        """The same experiment with the paths that are relative to this directory made absolute."""
        return self._with_files(lambda files: files.resolve(directory), directory)

    def pin(self) -> Experiment:
        """The same experiment with absolute paths and the checksums of its files."""
        return self._with_files(lambda files: files.pin(), Path.cwd())

    def _with_files(self, change: Callable[[Any], Any], directory: Path) -> Experiment:
        """The experiment with this change of all that names files; other paths are relative to a directory."""
        model, basis = self.model, getattr(self.model, "basis", None)
        if isinstance(basis, MatrixBasis):
            model = replace(model, basis=change(basis))
        parts = {"data": self.data, "model": model, "start_from": as_start(self.start_from)}
        changed = {
            name: change(value) if isinstance(value, PinnedFiles | StartFrom) else value
            for name, value in parts.items()
        }
        ledger, loggers = self.ledger and str(directory / self.ledger), resolve_paths(self.loggers, directory)
        return replace(self, ledger=ledger, loggers=loggers, **changed)


def _override(value: Any, changes: Mapping[str, Any], path: str) -> Any:
    if not changes:
        return value
    try:
        fields = msgspec.to_builtins(value)
        replaced = ("learning_rate", "decay", "decay_every") if "optimizer" in changes else ()  # it has its own rate
        return msgspec.convert({k: v for k, v in fields.items() if k not in replaced} | {**changes}, type(value))
    except msgspec.ValidationError as error:
        raise config_error(error, changes, type(value), FIELDS, prefix=path) from error


_PARTS = (
    StartFrom,
    GroupConfig,
    MechanismConfig,
    AdaptiveClip,
    LayerClip,
    LocalTraining,
    ServerOptimizer,
    Variant,
    Budget,
)
FIELDS = FieldNames(
    [*get_args(DataConfig), *get_args(ModelConfig), *get_args(BasisConfig), *get_args(Logger), *_PARTS, Experiment]
)

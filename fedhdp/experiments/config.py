"""An experiment as a value: data, model, mechanism, training, and the variants to compare; read from TOML and written to it.

A group says how private it is in one of two ways: by its ``noise_multiplier``, or by the ``epsilon`` it wants after all
rounds, from which the noise is computed. ``epsilon = inf`` opts out.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import msgspec
import tomli_w

from fedhdp.algorithms import ALGORITHMS
from fedhdp.client import LocalTraining
from fedhdp.errors import require
from fedhdp.experiments.components import NAMES, Data, Mlp, ModelChoice, PythonFile, clients_of
from fedhdp.mechanism import AdaptiveClip, Mechanism, Noise, Sampling
from fedhdp.privacy.budget import OnBudgetExhausted
from fedhdp.privacy.calibration import GroupConfig, MechanismConfig
from fedhdp.privacy.ledger import Budget
from fedhdp.results.store import EXPERIMENT, can_be_folder, slug
from fedhdp.server import ServerOptimizer


class Variant(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One line of an experiment's table: an algorithm, and what it changes in the mechanism."""

    name: str
    algorithm: str = "fedhdp"
    weights: dict[str, float] = {}
    pulls: dict[str, float] = {}
    noise_multipliers: dict[str, float] = {}
    noise: Noise | None = None  # None: the mechanism's
    sampling: Sampling | None = None  # None: the mechanism's
    training: dict[str, Any] = {}  # what is other than in the experiment's training
    server: dict[str, Any] = {}  # what is other than in the experiment's server

    def __post_init__(self) -> None:
        known = ", ".join(ALGORITHMS)
        require(self.algorithm in ALGORITHMS, "algorithm", self.algorithm, f"one of {known}")

    def mechanism(self, chosen: Mechanism) -> Mechanism:
        """What is run, from what the clients chose."""
        names = [group.name for group in chosen.groups]
        changes = (("weights", self.weights), ("pulls", self.pulls), ("noise_multipliers", self.noise_multipliers))
        for field, given in changes:
            for name in given:
                require(name in names, field, name, f"of groups that exist ({', '.join(names)})")
        groups = tuple(
            msgspec.structs.replace(
                group,
                weight=self.weights.get(group.name, group.weight),
                pull=self.pulls.get(group.name, group.pull),
                noise_multiplier=self.noise_multipliers.get(group.name, group.noise_multiplier),
            )
            for group in chosen.groups
        )
        noise, sampling = self.noise or chosen.noise, self.sampling or chosen.sampling
        return ALGORITHMS[self.algorithm](Mechanism(groups, chosen.clip, noise, sampling))


class Experiment(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All that is needed to run a comparison, and to run it again."""

    name: str
    rounds: int
    data: Data
    mechanism: MechanismConfig
    variants: tuple[Variant, ...]
    about: str = ""
    model: ModelChoice = Mlp()
    training: LocalTraining = LocalTraining()
    server: ServerOptimizer = ServerOptimizer()
    seed: int = 0
    noise_seed: int | None = None  # None: noise from the operating system's entropy; a number: repeatable, not private
    evaluate_every: int = 25
    checkpoint_seconds: float = 30.0
    delta: float = 1e-4
    ledger: str | None = None  # the file in which this population's spending is kept
    budgets: dict[str, Budget] = {}  # by group, over all runs of the ledger
    on_budget_exhausted: OnBudgetExhausted = "stop"  # end the run, or drop_group: sample that group no more

    @property
    def population(self) -> str:
        """Whose clients are numbered, in words: with other data, or another seed, the same number is somebody else."""
        return f"{clients_of(self.data)}, seed {self.seed}"

    def __post_init__(self) -> None:
        require(self.rounds >= 1, "rounds", self.rounds, "at least 1")
        require(0 <= self.seed < 2**31, "seed", self.seed, "at least 0 and below 2**31")
        if self.noise_seed is not None:
            require(0 <= self.noise_seed < 2**31, "noise_seed", self.noise_seed, "at least 0 and below 2**31")
        require(self.evaluate_every >= 1, "evaluate_every", self.evaluate_every, "at least 1")
        require(self.checkpoint_seconds >= 0, "checkpoint_seconds", self.checkpoint_seconds, "at least 0")
        require(0 < self.delta < 1, "delta", self.delta, "between 0 and 1")
        require(len(self.variants) >= 1, "variants", self.variants, "at least one variant")
        names = [variant.name for variant in self.variants]
        slugs = {slug(name) for name in names}
        require(len(slugs) == len(names), "variants", names, "variants whose names differ in letters a to z or digits")
        for name in names:
            require(can_be_folder(name), "variant's name", name, "short, and not that of a file of the run")
        require(0 <= self.data.validation < 1, "data.validation", self.data.validation, "at least 0 and below 1")
        total = sum(group.clients for group in self.mechanism.groups)
        rule = f"groups whose clients add up to data.clients, {self.data.clients}"
        require(total == self.data.clients, "mechanism.groups", total, rule)
        require(
            not self.budgets or self.ledger is not None, "budgets", list(self.budgets), "with a ledger that keeps them"
        )
        groups = [group.name for group in self.mechanism.groups]
        for name in self.budgets:
            require(name in groups, "budgets", name, f"of groups that exist ({', '.join(groups)})")
        for variant in self.variants:
            training, _ = self.trained(variant)
            training.check(variant.mechanism(self.mechanism.uncalibrated()))

    def trained(self, variant: Variant) -> tuple[LocalTraining, ServerOptimizer]:
        """How clients train and how the server takes updates in, for a variant."""
        return _changed(self.training, variant, "training"), _changed(self.server, variant, "server")

    def beside(self, folder: Path) -> Experiment:
        """The same with its files found from this folder, wherever it is gone on with from."""
        return self._with_files(lambda file: file.beside(folder), self.ledger and str(folder / self.ledger))

    def pinned(self) -> Experiment:
        """The same with its files where and as they are now."""
        return self._with_files(PythonFile.pinned, self.ledger and str(Path(self.ledger).absolute()))

    def _with_files(self, found: Callable[[PythonFile], PythonFile], ledger: str | None) -> Experiment:
        chosen = {"data": self.data, "model": self.model}
        own = {name: found(one) for name, one in chosen.items() if isinstance(one, PythonFile)}
        return msgspec.structs.replace(self, ledger=ledger, **own)

    def delta_of(self, group: str) -> float:
        """The delta at which a group's epsilon is told."""
        return next(config.delta or self.delta for config in self.mechanism.groups if config.name == group)


def _changed(value: Any, variant: Variant, field: str) -> Any:
    """The experiment's value with what a variant has otherwise."""
    changes = getattr(variant, field)
    try:
        return msgspec.convert(msgspec.to_builtins(value) | changes, type(value)) if changes else value
    except msgspec.ValidationError as error:
        raise ValueError(f"{field} of {variant.name!r}: {format_validation_error(str(error), changes)}") from error


def from_toml(text: str, where: str) -> Experiment:
    """Read an experiment; what is wrong is said in one line that names the field and the value."""
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{where} is no TOML: {error}") from error
    for table, known in NAMES.items():
        name = raw.get(table, {}).get("name", known[0]) if isinstance(raw.get(table, {}), dict) else known[0]
        if name not in known:
            raise ValueError(f"{where}: {table}.name must be one of {', '.join(known)}, got {name!r}")
        if isinstance(raw.get(table), dict):
            raw[table] = {"name": name} | raw[table]
    try:
        return msgspec.convert(raw, Experiment)
    except msgspec.ValidationError as error:
        raise ValueError(f"{where}: {format_validation_error(str(error), raw)}") from error


def format_validation_error(message: str, raw: Any) -> str:
    """A validation message in a user's words: the field by its path, what it must be, and what it is."""
    complaint, _, place = message.partition(" - at `")
    path = place.removeprefix("key in ").lstrip("$.").rstrip("`")
    value, prefix = raw, f"{path}." if path else ""
    for part in re.findall(r"[^.\[\]]+", path):
        value = value[int(part)] if isinstance(value, list) else value.get(part) if isinstance(value, dict) else None
    if unknown := re.search(r"unknown field `(.*)`", complaint):
        alike = get_close_matches(unknown[1], FIELDS, 1)
        hint = f"; did you mean {alike[0]}?" if alike and alike != [unknown[1]] else ""
        return f"unknown field {prefix}{unknown[1]} = {value.get(unknown[1])!r}{hint}"
    if missing := re.search(r"missing required field `(.*)`", complaint):
        return f"{prefix}{missing[1]} is missing"
    last = re.sub(r"\[\d+\]", "", path).rpartition(".")[2]
    if complaint.startswith("Invalid enum value") and last in CHOICES:
        return f"{path} must be one of {', '.join(CHOICES[last])}, got {value!r}"
    if wrong := re.fullmatch(r"Expected `(.*)`, got `.*`", complaint):
        kinds = " or ".join(KINDS.get(kind, kind) for kind in wrong[1].split(" | ") if kind != "null")
        return f"{path or 'the whole'} must be {kinds}, got {value!r}"
    return f"{path}: {complaint}" if path else complaint


def _choices(type_: Any) -> list[str]:
    """What a field may be, where that is a list of words or numbers."""
    args = [one for one in get_args(type_) if one is not type(None)]
    return [repr(one) for one in args] if get_origin(type_) is Literal else [c for one in args for c in _choices(one)]


KINDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "bool": "true or false",
    "object": "a table",
    "array": "a list",
}
PARTS = (GroupConfig, MechanismConfig, AdaptiveClip, LocalTraining, ServerOptimizer, Variant, Budget)
FIELDS = {
    field.name: field
    for struct in (*get_args(Data), *get_args(ModelChoice), *PARTS, Experiment)
    for field in msgspec.structs.fields(struct)
}
CHOICES = {name: found for name, field in FIELDS.items() if (found := _choices(field.type))}


def to_toml(experiment: Experiment) -> str:
    """Write an experiment, whole, so that reading it gives the same value."""
    return tomli_w.dumps(without_none(msgspec.to_builtins(experiment)))


def without_none(value: Any) -> Any:
    """What TOML can hold: a field that is None is left out."""
    if isinstance(value, dict):
        return {key: without_none(item) for key, item in value.items() if item is not None}
    return [without_none(item) for item in value] if isinstance(value, list | tuple) else value


def find(name: str, built_in: dict[str, Callable[[], Experiment]]) -> Experiment:
    """An experiment by the name of a built-in one or of a TOML file, whose ledger is beside it unless it says where."""
    if name in built_in:
        return built_in[name]()
    if (Path(name) / EXPERIMENT).is_file():
        again = f"fedhdp run {Path(name) / EXPERIMENT}"
        raise ValueError(
            f"{name} is the folder of a run; to go on: fedhdp run --resume {name}; to run it again: {again}"
        )
    if not name.endswith(".toml"):
        raise ValueError(f"there is no experiment {name!r}; there are {', '.join(built_in)}, or give a file.toml")
    try:
        return from_toml(Path(name).read_text(encoding="utf-8"), name).beside(Path(name).absolute().parent)
    except OSError as error:
        raise ValueError(f"{name} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is no TOML: it is not text") from error

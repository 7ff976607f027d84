"""A deployment as a value: the privacy levels on offer, how rounds are run, where things are kept.

It is an experiment's sibling: there, groups have their clients from the start; here a group's size is known once its
clients have said which level they chose. It is read from a Flower app's ``run_config``, whose keys are paths:
``levels.strict.epsilon = 1.0`` is the epsilon of the level named strict.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import tomli_w

from fedhdp.client import LocalTraining
from fedhdp.errors import require
from fedhdp.experiments.config import format_validation_error, without_none
from fedhdp.mechanism import AdaptiveClip, Mechanism, Noise, PrivacyGroup
from fedhdp.privacy.budget import OnBudgetExhausted
from fedhdp.privacy.calibration import GroupConfig, MechanismConfig, PrivacyLevel
from fedhdp.privacy.ledger import Budget
from fedhdp.server import ServerOptimizer


class Deployment(msgspec.Struct, frozen=True, forbid_unknown_fields=True, dict=True):
    """All that a server needs to know beside the model."""

    out: str  # the folder of the run; where there is one, the run goes on
    ledger: str  # the file in which this population's choices and spending are kept, over all runs
    rounds: int
    levels: dict[str, PrivacyLevel]
    clip: float | AdaptiveClip
    noise: Noise = "shared"
    name: str = "deployment"
    training: LocalTraining = LocalTraining()
    server: ServerOptimizer = ServerOptimizer()
    seed: int = 0  # of the initial model
    cohort_seed: int | None = None  # None: the operating system's entropy; a number is for tests alone
    noise_seed: int | None = (
        None  # None: the operating system's entropy; a number makes the run repeatable, not private
    )
    delta: float = 1e-4
    budgets: dict[str, Budget] = {}
    on_budget_exhausted: OnBudgetExhausted = "stop"
    evaluate_every: int = 0  # ask clients how good models are, every so many rounds and at the end; 0: never
    score_every: int = 0  # look at the server's own test set, every so many rounds and at the end; 0: as evaluate_every
    least_clients: int = 1  # how many must have registered before the first round
    gather_seconds: float = 60.0  # how long a client may take to say which level it chose
    reply_seconds: float = 600.0  # how long a client may take for a round; later is absent

    def __post_init__(self) -> None:
        require(self.out != "", "out", self.out, "a folder")
        require(self.ledger != "", "ledger", self.ledger, "a file")
        require(self.rounds >= 1, "rounds", self.rounds, "at least 1")
        require(len(self.levels) >= 1, "levels", self.levels, "at least one level")
        require(0 < self.delta < 1, "delta", self.delta, "between 0 and 1")
        require(self.least_clients >= 1, "least_clients", self.least_clients, "at least 1")
        require(self.evaluate_every >= 0, "evaluate_every", self.evaluate_every, "at least 0")
        require(self.score_every >= 0, "score_every", self.score_every, "at least 0")
        for field in ("gather_seconds", "reply_seconds"):
            require(0 < getattr(self, field) < math.inf, field, getattr(self, field), "finite and above 0")
        for name in self.budgets:
            require(name in self.levels, "budgets", name, f"of levels on offer ({', '.join(self.levels)})")
        self.training.check(self._mechanism_config(dict.fromkeys(self.levels, 1)).uncalibrated())

    def _mechanism_config(self, clients: Mapping[str, int]) -> MechanismConfig:
        groups = tuple(
            GroupConfig(name, clients[name], **msgspec.structs.asdict(level))
            for name, level in self.levels.items()
            if clients.get(name)
        )
        return MechanismConfig(groups, self.clip, self.noise, "poisson")

    def mechanism(self, clients: Mapping[str, int]) -> Mechanism:
        """The mechanism for this many clients of each level; a level that nobody chose is not in it."""
        return self._mechanism_config(clients).build(self.rounds, self.delta)

    def delta_of(self, level: str) -> float:
        """The delta at which a level's epsilon is told."""
        return self.levels[level].delta or self.delta

    @cached_property
    def strictness(self) -> tuple[str, ...]:
        """The levels from the strictest to the loosest, by the epsilon that each is promised."""
        from fedhdp.privacy.accounting import gaussian_epsilon

        groups = self.mechanism(dict.fromkeys(self.levels, 1)).groups

        def price(group: PrivacyGroup) -> tuple[float, float]:
            epsilon = gaussian_epsilon(group.noise_multiplier, group.sampling_rate, self.rounds, self.delta)
            return epsilon, -group.noise_multiplier

        return tuple(group.name for group in sorted(groups, key=price))

    def differs(self, begun: Deployment) -> list[str]:
        """What keeps a run that was begun so from going on like this; how long is waited, say, may change."""
        free = {"out", "name", "evaluate_every", "score_every", "least_clients", "gather_seconds", "reply_seconds"}
        one, other = (msgspec.structs.asdict(value) for value in (self, begun))
        one["ledger"], other["ledger"] = (Path(value.ledger).resolve() for value in (self, begun))
        return [field for field, value in one.items() if field not in free and value != other[field]]

    @property
    def repeatable(self) -> bool:
        """Whether noise or cohorts come from a seed, so that nothing is private."""
        return self.noise_seed is not None or self.cohort_seed is not None

    def told(self, group: PrivacyGroup) -> float:
        """The noise that clients of a group are told of: with noise or cohorts from a seed, none that protects them."""
        return 0.0 if self.repeatable else group.noise_multiplier

    @property
    def strictest(self) -> str:
        """The level of clients who do not say: private by default."""
        return self.strictness[0]

    def stricter(self, level: str, than: str) -> bool:
        """Whether one level is stricter than another."""
        return self.strictness.index(level) < self.strictness.index(than)


def from_run_config(run_config: Mapping[str, Any]) -> Deployment:
    """Read a deployment from flat keys; ``app.`` keys are the app's own, and what is wrong is said in one line."""
    nested: dict[str, Any] = {}
    for key, value in run_config.items():
        *tables, last = key.split(".")
        if tables[:1] == ["app"]:
            continue
        place = nested
        for table in tables:
            place = place.setdefault(table, {})
            if not isinstance(place, dict):
                raise ValueError(f"run_config: {table} is a value, so {key} cannot be beside it")
        if isinstance(place.get(last.replace("-", "_")), dict):
            raise ValueError(f"run_config: there are keys beneath {key}, so it cannot be a value")
        place[last.replace("-", "_")] = value
    try:
        return msgspec.convert(nested, Deployment)
    except msgspec.ValidationError as error:
        raise ValueError(f"run_config: {format_validation_error(str(error), nested)}") from error


def from_app(path: Path, **changed: Any) -> Deployment:
    """Read a deployment from a Flower app, its folder or its pyproject.toml, with the changes of ``--run-config``."""
    file = path / "pyproject.toml" if path.is_dir() else path
    try:
        app = tomllib.loads(file.read_text(encoding="utf-8"))["tool"]["flwr"]["app"]["config"]
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"{file} is no TOML: {error}") from error
    except (KeyError, TypeError) as error:
        raise ValueError(f"{file} is no Flower app with a configuration: it has no [tool.flwr.app.config]") from error
    return from_run_config(dict(_flat(app)) | changed)


def _flat(table: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """A table's values by their paths, which is how Flower hands them on."""
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{path}{key}.")
        else:
            yield path + key, value


def from_toml(text: str) -> Deployment:
    """Read back what was written."""
    return msgspec.convert(tomllib.loads(text), Deployment)


def to_toml(deployment: Deployment) -> bytes:
    """Write a deployment, whole."""
    return tomli_w.dumps(without_none(msgspec.to_builtins(deployment))).encode()

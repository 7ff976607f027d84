"""A deployment as a value: the privacy levels on offer, how rounds are run, and where results and costs are stored.

It corresponds to an experiment. There, groups have their clients from the start; here, a group's size is known once its
clients have enrolled. It is read from a Flower app's ``run_config``, whose keys are dotted paths:
``levels.strict.epsilon = 1.0`` is the epsilon of the level ``strict``.
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
from fedhdp.clips import Clip, parse_clip
from fedhdp.errors import ConfigError, require
from fedhdp.experiments.bases import PcaBasis
from fedhdp.experiments.config import FIELDS
from fedhdp.experiments.errors import config_error, refuse_nul
from fedhdp.experiments.groups import opted_out
from fedhdp.experiments.toml import without_none
from fedhdp.mechanism import Arithmetic, Mechanism, Noise, PrivacyGroup
from fedhdp.metrics import is_metric_name
from fedhdp.optimizers import require_tables
from fedhdp.privacy.accounting import LEDGER_ACCOUNTANT
from fedhdp.privacy.budget import OnBudgetExhausted
from fedhdp.privacy.calibration import GroupConfig, MechanismConfig, PrivacyLevel
from fedhdp.privacy.ledger import Budget
from fedhdp.server import ServerOptimizer

_TIMEOUTS = ("enroll_timeout_seconds", "reply_timeout_seconds")
_LIMITS = ("max_clients", "max_registrations_per_hour", "allowed_nodes")
_MAY_CHANGE = {
    "out",
    "name",
    "evaluate_every",
    "server_evaluate_every",
    "metrics",
    "min_available_clients",
    *_LIMITS,
    *_TIMEOUTS,
}


class Deployment(msgspec.Struct, frozen=True, forbid_unknown_fields=True, dict=True):
    """Everything that a deployment's server needs besides the model.

    Args:
        out: The run directory. An unfinished run in it is resumed.
        ledger: The file that holds the population's levels and privacy costs, over all runs.
        rounds: The number of rounds.
        levels: The privacy levels on offer, by name.
        clip: A fixed clip, one that follows a quantile of the update norms, or one for each layer.
        noise: As in ``Mechanism``.
        arithmetic: As in ``Mechanism``, but exact by default.
        name: The heading of the table of results.
        training: The local training of clients that use ``jax_trainer``.
        server: The server's optimizer.
        basis: A public basis of the inputs, made of the second moments of the clients who opted out, who are asked once.
            Other bases need no messages: they are a part of the app's model.
        seed: The seed of the initial model.
        cohort_seed: The seed of the cohorts, for tests only: with a seed nothing is private. None: the operating system's
            entropy.
        noise_seed: The same for the noise.
        delta: The delta of levels that state none.
        budgets: The lifetime budgets of levels, over all runs of the ledger.
        on_budget_exhausted: Whether the run stops, or goes on without the group.
        evaluate_every: Rounds between evaluations on the clients, which also follow the last round; 0: never.
        server_evaluate_every: Rounds between evaluations on the server's test set; 0: as ``evaluate_every``.
        metrics: Which of their apps' metrics clients and the server report; tables show the first. In a run configuration
            one text with commas.
        min_available_clients: How many clients must have enrolled before the first round.
        max_clients: How many clients a level may have, by its name, over all runs of the ledger; others are not admitted.
        max_registrations_per_hour: How many clients may register in an hour; others wait. None: any number.
        allowed_nodes: The ids of the nodes that are sent anything, as SuperLink gives them to registered keys; empty: all.
            In a run configuration one text with commas.
        enroll_timeout_seconds: How long a client may take to answer the first offer. Each repeated offer doubles it, up to
            eight times.
        reply_timeout_seconds: How long a client may take for a round; later replies do not count.
    """

    out: str
    ledger: str
    rounds: int
    levels: dict[str, PrivacyLevel]
    clip: Clip
    noise: Noise = "shared"
    arithmetic: Arithmetic = "exact"
    name: str = "deployment"
    training: LocalTraining = LocalTraining()
    server: ServerOptimizer = ServerOptimizer()
    basis: PcaBasis | None = None
    seed: int = 0
    cohort_seed: int | None = None
    noise_seed: int | None = None
    delta: float = 1e-4
    budgets: dict[str, Budget] = {}
    on_budget_exhausted: OnBudgetExhausted = "stop"
    evaluate_every: int = 0
    server_evaluate_every: int = 0
    metrics: tuple[str, ...] = ("accuracy",)
    min_available_clients: int = 1
    max_clients: dict[str, int] = {}
    max_registrations_per_hour: int | None = None
    allowed_nodes: tuple[int, ...] = ()
    enroll_timeout_seconds: float = 60.0
    reply_timeout_seconds: float = 600.0

    def __post_init__(self) -> None:
        require(self.out != "", "out", self.out, "a directory")
        require(self.ledger != "", "ledger", self.ledger, "a file")
        require(1 <= self.rounds < 2**31, "rounds", self.rounds, "at least 1 and below 2**31")
        msgspec.structs.force_setattr(self, "clip", parse_clip(self.clip))
        require(len(self.levels) >= 1, "levels", self.levels, "at least one level")
        require(0 < self.delta < 1, "delta", self.delta, "between 0 and 1")
        require(self.min_available_clients >= 1, "min_available_clients", self.min_available_clients, "at least 1")
        for level, limit in self.max_clients.items():
            require(level in self.levels, "max_clients", level, f"of levels on offer ({', '.join(self.levels)})")
            require(limit >= 0, f"max_clients.{level}", limit, "at least 0")
        hourly = self.max_registrations_per_hour
        require(hourly is None or hourly >= 1, "max_registrations_per_hour", hourly, "at least 1")
        for field in ("evaluate_every", "server_evaluate_every"):
            require(getattr(self, field) >= 0, field, getattr(self, field), "at least 0")
        for field in _TIMEOUTS:
            require(0 < getattr(self, field) < math.inf, field, getattr(self, field), "finite and above 0")
        require_tables(self.training.optimizer, "training.optimizer")
        require_tables(self.server.optimizer, "server.optimizer")
        distinct = len(set(self.metrics)) == len(self.metrics) > 0
        require(
            distinct and all(map(is_metric_name, self.metrics)), "metrics", self.metrics, "different names of metrics"
        )
        for name in self.budgets:
            require(name in self.levels, "budgets", name, f"of levels on offer ({', '.join(self.levels)})")
        config = self._mechanism_config(dict.fromkeys(self.levels, 1))
        self.training.check(config.uncalibrated())
        if self.basis is not None:
            self._check_public(opted_out(config))

    def _check_public(self, levels: list[str]) -> None:
        """Refuse a basis that would take the second moments of clients whose level has an epsilon."""
        rule = "left out where no level opts out: private clients' examples are not public"
        require(len(levels) > 0, "basis", "pca", rule)
        for name in levels:  # nothing protects them from the first round on, so the ledger must say so
            rate = self.levels[name].sampling_rate
            require(rate > 0, f"levels.{name}.sampling_rate", rate, "above 0 where their second moments make the basis")
            budget = self.budgets.get(name)
            require(budget is None, f"budgets.{name}", budget, "left out where their second moments make the basis")

    @classmethod
    def from_run_config(cls, run_config: Mapping[str, Any]) -> Deployment:
        """Read a deployment from a Flower app's ``context.run_config``.

        Args:
            run_config: Values by dotted keys; those that start with ``app.`` belong to the app and are skipped.

        Raises:
            ConfigError: If a key is unknown, or its value has the wrong type or range.
        """
        fields: dict[str, Any] = {}
        for key, value in run_config.items():
            if not key.startswith("app."):
                _insert(fields, key, value)
        refuse_nul(fields, "run_config")
        if isinstance(metrics := fields.get("metrics"), str):  # a run configuration has no lists
            fields["metrics"] = [name.strip() for name in metrics.split(",")]
        if isinstance(nodes := fields.get("allowed_nodes"), str):
            ids = [node.strip() for node in nodes.split(",") if node.strip()]
            valid = all(node.isascii() and node.isdigit() and len(node) <= 20 for node in ids)
            require(valid and len(ids) > 0, "allowed-nodes", nodes, "ids of nodes with commas")
            fields["allowed_nodes"] = [int(node) for node in ids]
        try:
            return msgspec.convert(fields, Deployment)
        except msgspec.ValidationError as error:
            raise config_error(error, fields, Deployment, FIELDS, "run_config") from error

    @classmethod
    def from_app(cls, path: Path, **changes: Any) -> Deployment:
        """Read a deployment from the configuration of a Flower app.

        Args:
            path: The app's directory, or its pyproject.toml.
            **changes: Values that replace the app's, as with ``flwr run --run-config``.

        Raises:
            ConfigError: If the file cannot be read or is not a Flower app's.
        """
        file = path / "pyproject.toml" if path.is_dir() else path
        try:
            config = tomllib.loads(file.read_text(encoding="utf-8"))["tool"]["flwr"]["app"]["config"]
        except OSError as error:
            raise ConfigError(f"{file} cannot be read: {error.strerror}") from error
        except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise ConfigError(f"{file} is not TOML: {error}") from error
        except (KeyError, TypeError) as error:
            raise ConfigError(f"{file} is not a configured Flower app: it has no [tool.flwr.app.config]") from error
        return cls.from_run_config(dict(_flat(config)) | changes)

    @classmethod
    def from_toml(cls, text: str) -> Deployment:
        """Read what ``to_toml`` wrote."""
        return msgspec.convert(tomllib.loads(text), Deployment)

    def to_toml(self) -> bytes:
        """All fields as TOML."""
        return tomli_w.dumps(without_none(msgspec.to_builtins(self))).encode()

    def mechanism(self, clients: Mapping[str, int], parameters: int | None = None) -> Mechanism:
        """The mechanism for these numbers of clients by level; a level without clients has no group.

        Args:
            clients: The number of clients of each level.
            parameters: The number of the model's parameters, from which the theory computes the weights that levels do not
                state. None: these are 1, for what does not depend on weights: noise multipliers and layers.
        """
        mechanism = self._mechanism_config(clients).build(self.rounds, self.delta, LEDGER_ACCOUNTANT)
        free = [group.name for group in mechanism.groups if group.name not in self.stated_weights]
        if parameters is None or not free:
            return mechanism
        from fedhdp.theory.planning import with_optimal_weights

        return with_optimal_weights(mechanism, self.rounds, parameters, free)

    def _mechanism_config(self, clients: Mapping[str, int]) -> MechanismConfig:
        groups = tuple(
            GroupConfig(name=name, clients=clients[name], **msgspec.structs.asdict(level))
            for name, level in self.levels.items()
            if clients.get(name)
        )
        return MechanismConfig(groups, self.clip, self.noise, "poisson", self.arithmetic)

    def delta_of(self, level: str) -> float:
        """The delta at which a level's epsilon is computed."""
        return self.levels[level].delta or self.delta

    @property
    def epsilon_targets(self) -> dict[str, float]:
        """The epsilons that levels state, by name."""
        return {name: level.epsilon for name, level in self.levels.items() if level.epsilon is not None}

    @property
    def stated_weights(self) -> dict[str, float]:
        """The weights that levels state, by name."""
        return {name: level.weight for name, level in self.levels.items() if level.weight is not None}

    @cached_property
    def levels_by_strictness(self) -> tuple[str, ...]:
        """The names of the levels from the strictest to the loosest, by the epsilon of all rounds."""
        from fedhdp.privacy.accounting import gaussian_epsilon

        def strictness(group: PrivacyGroup) -> tuple[float, float]:
            epsilon = gaussian_epsilon(
                group.noise_multiplier, group.sampling_rate, self.rounds, self.delta, LEDGER_ACCOUNTANT
            )
            return epsilon, -group.noise_multiplier

        groups = self.mechanism(dict.fromkeys(self.levels, 1)).groups
        return tuple(group.name for group in sorted(groups, key=strictness))

    @property
    def strictest_level(self) -> str:
        """The level of clients that choose none: private by default."""
        return self.levels_by_strictness[0]

    def is_stricter(self, level: str, than: str) -> bool:
        """Whether one level is stricter than another."""
        return self.levels_by_strictness.index(level) < self.levels_by_strictness.index(than)

    def changed_fields(self, previous: Deployment) -> list[str]:
        """The fields that differ from those of a run and must not: the run cannot be resumed with them.

        Args:
            previous: The deployment that the run started with. Timeouts and the frequency of evaluation may differ.
        """
        values, previous_values = (msgspec.structs.asdict(deployment) for deployment in (self, previous))
        values["ledger"], previous_values["ledger"] = Path(self.ledger).resolve(), Path(previous.ledger).resolve()
        return [field for field in values if field not in _MAY_CHANGE and values[field] != previous_values[field]]

    @property
    def repeatable(self) -> bool:
        """Whether noise or cohorts come from a seed, so that nothing is private."""
        return self.noise_seed is not None or self.cohort_seed is not None

    def advertised_noise(self, group: PrivacyGroup) -> float:
        """The noise multiplier that a group's clients are promised: 0 in a repeatable run, which has no privacy."""
        return 0.0 if self.repeatable else group.noise_multiplier


def _insert(fields: dict[str, Any], key: str, value: Any) -> None:
    """Put the value of a dotted key into nested tables; hyphens become underscores, but not in users' names."""
    *tables, last = key.split(".")
    if tables[:2] == ["clip", "layers"]:  # the rest is the beginning of an array's name, dots included
        table = fields.setdefault("clip", {}).setdefault("layers", {})
        table[".".join([*tables[2:], last])] = value
        return
    if tables and tables[0] not in (
        "levels",
        "budgets",
        "max-clients",
        "max_clients",
    ):  # whose tables are named by the user
        tables = [table.replace("-", "_") for table in tables]
    for table in tables:
        fields = fields.setdefault(table, {})
        if not isinstance(fields, dict):
            raise ConfigError(f"run_config: {table} is a value, so {key} cannot be set too", field=key, value=value)
    last = last.replace("-", "_")
    if isinstance(fields.get(last), dict):
        raise ConfigError(f"run_config: {key} has keys beneath it, so it cannot be a value", field=key, value=value)
    fields[last] = value


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """A nested table's values by dotted keys, as Flower passes them on."""
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value

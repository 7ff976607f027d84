"""A variant of an experiment: an algorithm, and what it changes in the mechanism and in the training."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from fedhdp.algorithms import ALGORITHM_NAMES, ALGORITHMS, Pricing, apply_algorithm, takes_pricing
from fedhdp.clips import Clip, parse_clip
from fedhdp.errors import require
from fedhdp.experiments.schedules import WeightSchedule, as_weight, weight_at
from fedhdp.mechanism import Mechanism, Noise, Sampling, ScheduledMechanism
from fedhdp.optimizers import ScheduleConfig
from fedhdp.results.store import is_directory_name


class Variant(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A row of an experiment's table: an algorithm, and what it changes in the experiment.

    Args:
        name: The row's name; its letters and digits name the directory of the results. By default the algorithm's.
        algorithm: One of `fedhdp.algorithms.ALGORITHMS`.
        weights: Weights of groups, by name, instead of the mechanism's: numbers, or schedules of optax over the rounds.
        pulls: Pulls of groups, by name, instead of the mechanism's.
        noise_multipliers: Noise multipliers of groups, by name, instead of the mechanism's.
        epsilons: Epsilons of groups, by name, instead of the mechanism's epsilons or noise multipliers.
        clip: How updates are clipped; None takes the mechanism's.
        noise: How noise is shared among groups; None takes the mechanism's.
        sampling: How cohorts are sampled; None takes the mechanism's.
        training: Fields that replace those of the experiment's training.
        server: Fields that replace those of the experiment's server optimizer.
        options: The algorithm's options, by name.
    """

    name: str = ""
    algorithm: str = "fedhdp"
    weights: dict[str, Any] = {}
    pulls: dict[str, float] = {}
    noise_multipliers: dict[str, float] = {}
    epsilons: dict[str, float] = {}
    clip: Clip | None = None
    noise: Noise | None = None
    sampling: Sampling | None = None
    training: dict[str, Any] = {}
    server: dict[str, Any] = {}
    options: dict[str, Any] = {}

    def __post_init__(self) -> None:
        require(self.algorithm in ALGORITHMS, "algorithm", self.algorithm, f"one of {', '.join(ALGORITHMS)}")
        if self.clip is not None:
            msgspec.structs.force_setattr(self, "clip", parse_clip(self.clip))
        weights = {name: as_weight(weight, f"weights.{name}") for name, weight in self.weights.items()}
        msgspec.structs.force_setattr(self, "weights", weights)
        if self.name == "":
            msgspec.structs.force_setattr(self, "name", ALGORITHM_NAMES[self.algorithm])
        require(is_directory_name(self.name), "name", self.name, "short, and not the name of a file of the run")
        overlap = sorted(set(self.epsilons) & set(self.noise_multipliers))
        require(not overlap, "epsilons", overlap, "of groups without one of noise_multipliers")

    def mechanism(
        self,
        base: Mechanism,
        pricing: Pricing,
        with_weights: Callable[[Mechanism, Iterable[str]], Mechanism] | None = None,
    ) -> ScheduledMechanism:
        """Apply the variant's changes and its algorithm to the experiment's mechanism.

        Args:
            base: The experiment's mechanism.
            pricing: What noise and sampling cost in the run, for algorithms that share out epsilons.
            with_weights: Sets the weights that neither the groups nor the variant state; None keeps those of ``base``.

        Returns:
            The mechanism, or a function of the round where a weight is a schedule or the algorithm changes rounds.

        Raises:
            InvalidValueError: If a name is of no group, a value is out of range, or an algorithm that changes rounds has
                scheduled weights.
        """
        names = [group.name for group in base.groups]
        for field in ("weights", "pulls", "noise_multipliers", "epsilons"):
            for name in getattr(self, field):
                require(name in names, field, name, f"values by group ({', '.join(names)})")
        groups = tuple(
            msgspec.structs.replace(
                group,
                weight=weight_at(self.weights.get(group.name, group.weight), 0, f"weights.{group.name}"),
                pull=self.pulls.get(group.name, group.pull),
                noise_multiplier=self.noise_multipliers.get(group.name, group.noise_multiplier),
            )
            for group in base.groups
        )
        clip, noise, sampling = self.clip or base.clip, self.noise or base.noise, self.sampling or base.sampling
        mechanism = Mechanism(groups, clip, noise, sampling, base.arithmetic)
        if with_weights is not None and mechanism.without_pulls != base.without_pulls:
            mechanism = with_weights(mechanism, self.weights)
        scheduled = tuple(item for item in self.weights.items() if isinstance(item[1], ScheduleConfig))
        if scheduled:
            rule = f"numbers, as {self.algorithm} sets weights or rounds itself"
            require(not takes_pricing(self.algorithm), "weights", [name for name, _ in scheduled], rule)
            return WeightSchedule(mechanism, scheduled, self.algorithm)
        return apply_algorithm(self.algorithm, mechanism, pricing, self.options)

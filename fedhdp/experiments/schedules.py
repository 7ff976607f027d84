"""Weights that change from round to round, as a variant of an experiment's file has them."""

from __future__ import annotations

import sys
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace

from fedhdp.algorithms import ALGORITHMS
from fedhdp.devices import use_cpu_cores
from fedhdp.errors import require
from fedhdp.mechanism import MAX_VALUE, MIN_WEIGHT, Mechanism
from fedhdp.optimizers import ScheduleConfig, as_schedule

BLOCK = 1024  # rounds whose weights are computed together


class WeightSchedule(msgspec.Struct, frozen=True):
    """A mechanism whose weights change from round to round: a function of the round, the first round being 0.

    Args:
        mechanism: The mechanism with the weights that do not change.
        weights: The weights that change: groups by name, each with its schedule.
        algorithm: One of `fedhdp.algorithms.ALGORITHMS` without a pricing, which is applied to the mechanism of the round.
    """

    mechanism: Mechanism
    weights: tuple[tuple[str, ScheduleConfig], ...]
    algorithm: str

    def __call__(self, round: int) -> Mechanism:
        """The mechanism of a round; an `InvalidValueError` if a weight is out of range."""
        weights = {name: weight_at(schedule, round, f"weights.{name}") for name, schedule in self.weights}
        groups = (replace(group, weight=weights.get(group.name, group.weight)) for group in self.mechanism.groups)
        mechanism: Mechanism = ALGORITHMS[self.algorithm](replace(self.mechanism, groups=tuple(groups)))
        return mechanism

    @property
    def without_pulls(self) -> WeightSchedule:
        """The schedule as the server sees it: variants with the same share one global training."""
        return replace(self, mechanism=self.mechanism.without_pulls)


def as_weight(value: Any, field: str) -> float | ScheduleConfig:
    """A weight as a file has it: a number, or a table with a schedule of optax.

    Raises:
        InvalidValueError: If it is neither.
    """
    weight = as_schedule(value, field)
    is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
    if isinstance(weight, int):
        require(abs(weight) <= sys.float_info.max, field, weight, "a number of double precision")
    require(is_number or isinstance(weight, ScheduleConfig), field, value, "a number, or a table with a schedule")
    return float(weight) if is_number else weight


def weight_at(weight: float | ScheduleConfig, round: int, field: str) -> float:
    """The weight of a round, the first round being 0; an `InvalidValueError` if it is out of range."""
    if not isinstance(weight, ScheduleConfig):
        return weight
    value = float(_block(weight, round // BLOCK)[round % BLOCK])
    valid = value == 0 or MIN_WEIGHT <= value <= MAX_VALUE
    require(valid, field, value, f"0, or between {MIN_WEIGHT:g} and {MAX_VALUE:g}, in round {round + 1}")
    return value


@lru_cache(maxsize=64)
def _block(schedule: ScheduleConfig, number: int) -> np.ndarray:
    """The weights of the rounds from number · BLOCK on."""
    import jax
    import jax.numpy as jnp

    use_cpu_cores()  # before JAX computes anything
    return np.asarray(jax.vmap(schedule.function())(number * BLOCK + jnp.arange(BLOCK)), float)

"""What an attacker can find out at most: the trade-off between false and true positives that costs allow.

The attacker knows the algorithm, every other client's data and all that the server publishes, and decides for one client
whether it took part (with fixed cohorts: which of two clients did). If rounds are (ε, δ(ε))-private for every ε, a test
with false-positive rate α has a true-positive rate of at most

    min over ε of  δ(ε) + e^ε·α  and  1 − e^(−ε)·(1 − δ(ε) − α)        (Wasserman & Zhou, 2010; Dong, Roth & Su, 2022).

δ(ε) is by the run's accountant, so the curve and the epsilon are two readings of one bound.

Axis letters: A false-positive rates, E epsilons.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from scipy.special import ndtri

from fedhdp.privacy.accounting import MIN_NOISE_MULTIPLIER, SMALL_DELTA, Accountant, compose, compose_deltas
from fedhdp.privacy.costs import PrivacyCost

RATES = tuple(np.geomspace(1e-3, 1.0, 61).tolist())
ONE_IN_HUNDRED = 0.01
EPSILONS = 1500  # at which delta is computed
MAX_EXPONENT = 700.0  # e^700 is still a number


class AttackCurve(NamedTuple):
    """The largest true-positive rate at each false-positive rate.

    Attributes:
        false_positive_rates: From 0.001 to 1.
        true_positive_rates: The bound on the share that the attacker finds at each of them.
        found_at_one_percent: The bound at a false-positive rate of 1%.
        mu: The least μ such that a Gaussian mechanism with this μ (``gaussian DP``) permits at least as much at all of
            these rates; infinity without noise.
    """

    false_positive_rates: tuple[float, ...]
    true_positive_rates: tuple[float, ...]
    found_at_one_percent: float
    mu: float


def attack_curve(costs: Iterable[PrivacyCost], accountant: Accountant) -> AttackCurve:
    """Bound every attack on a client of a group that was charged these costs.

    Args:
        costs: The costs, all by the same kind of sampling.
        accountant: The run's accountant.

    Raises:
        InvalidValueError: If a value is out of range, or the costs do not compose.
    """
    charged = [cost for cost in costs if not cost.checked().free]
    if any(cost.noise_multiplier < MIN_NOISE_MULTIPLIER for cost in charged):
        return _curve([math.inf], [1.0])
    if not charged:
        return _curve([0.0], [0.0])
    largest = compose(charged, SMALL_DELTA, "rdp")
    epsilons = np.linspace(0.0, min(largest, MAX_EXPONENT), EPSILONS).tolist()
    return _curve(epsilons, compose_deltas(charged, epsilons, accountant))


def _curve(epsilons: Sequence[float], deltas: Sequence[float]) -> AttackCurve:
    """The curve that these bounds allow together.

    What is bounded from below is the share that an attack misses: near 1, a true-positive rate has no digits left.
    """
    epsilon_E, delta_E, rate_A = np.array(epsilons), np.array(deltas), np.array([*RATES, ONE_IN_HUNDRED])
    low_AE = 1 - delta_E - np.exp(np.minimum(epsilon_E, MAX_EXPONENT)) * rate_A[:, None]
    high_AE = np.exp(-epsilon_E) * (1 - delta_E - rate_A[:, None])
    missed_A = np.clip(np.maximum(low_AE, high_AE).max(1), 0.0, 1 - rate_A)
    inside = (rate_A < 1) & (missed_A < 1 - rate_A)  # elsewhere nobody does better than guessing
    mu = float(np.max(-ndtri(missed_A[inside]) - ndtri(rate_A[inside]), initial=0.0))
    found_A = np.where(missed_A < 1 - rate_A, 1 - missed_A, rate_A)
    return AttackCurve(RATES, tuple(found_A[:-1].tolist()), float(found_A[-1]), mu)


def format_found(found: float) -> str:
    """A bound on the share that an attacker finds, as a number out of 100, never rounded down."""
    percent = 100 * found
    return f"{math.ceil(percent - 1e-9):d}" if percent >= 1 else "fewer than 1"


def curve_of_epsilon(epsilon: float, delta: float) -> AttackCurve:
    """The bound that one (epsilon, delta) gives, where the costs of rounds are not known: more than that of all together.

    Args:
        epsilon: Epsilon; infinity where there is no noise.
        delta: The delta at which it holds.
    """
    return _curve([epsilon], [delta])

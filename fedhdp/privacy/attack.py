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
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from scipy.special import ndtri

from fedhdp.privacy.accounting import MIN_NOISE_MULTIPLIER, SMALL_DELTA, Accountant, compose, compose_deltas
from fedhdp.privacy.costs import PrivacyCost

RATES = tuple(np.geomspace(1e-3, 1.0, 61).tolist())
ONE_IN_HUNDRED = 0.01
EPSILONS = 1500  # at which delta is computed


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
    rate_A = np.array([*RATES, ONE_IN_HUNDRED])
    if any(cost.noise_multiplier < MIN_NOISE_MULTIPLIER for cost in charged):
        found_A = np.ones_like(rate_A)
    elif not charged:
        found_A = rate_A
    else:
        found_A = _largest_true_positive_rate(rate_A, charged, accountant)
    mu = _gaussian_mu(rate_A, found_A)
    return AttackCurve(RATES, tuple(found_A[:-1].tolist()), float(found_A[-1]), mu)


def _largest_true_positive_rate(rate_A: np.ndarray, costs: list[PrivacyCost], accountant: Accountant) -> np.ndarray:
    largest = compose(costs, SMALL_DELTA, "rdp")
    epsilon_E = np.linspace(0.0, min(largest, 700.0), EPSILONS)  # e^700 is still a number
    delta_E = np.array(compose_deltas(costs, epsilon_E.tolist(), accountant))
    low_AE = delta_E + np.exp(epsilon_E) * rate_A[:, None]
    high_AE = 1 - np.exp(-epsilon_E) * (1 - delta_E - rate_A[:, None])
    found_A = np.minimum(low_AE, high_AE).min(1)
    return np.asarray(np.clip(found_A, rate_A, 1.0))


def _gaussian_mu(rate_A: np.ndarray, found_A: np.ndarray) -> float:
    """Of the curve and, since a trade-off is symmetric, of its mirror image."""
    inside = rate_A < 1
    with np.errstate(invalid="ignore"):
        mu_A = ndtri(found_A[inside]) - ndtri(rate_A[inside])
    return math.inf if (found_A[inside] == 1).all() else float(np.max(mu_A[found_A[inside] < 1], initial=0.0))


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
    rate_A = np.array([*RATES, ONE_IN_HUNDRED])
    if epsilon > 700:  # e^epsilon is no number, and bounds nothing
        found_A = np.ones_like(rate_A)
    else:
        low_A = delta + math.exp(epsilon) * rate_A
        found_A = np.clip(np.minimum(low_A, 1 - math.exp(-epsilon) * (1 - delta - rate_A)), rate_A, 1.0)
    return AttackCurve(RATES, tuple(found_A[:-1].tolist()), float(found_A[-1]), _gaussian_mu(rate_A, found_A))

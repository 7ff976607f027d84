"""The noise meter: what is released, less the sum that is known, tested against the noise that was promised.

Noise comes standardized: divided by its promised standard deviation, so that it is normal with variance 1 if the promise
is kept. A check has a p-value: the probability of a result as unlikely, or more, of a system that keeps it.

Axis letters: T rounds, P parameters.
"""

from __future__ import annotations

import math

import msgspec
import numpy as np
from numpy.typing import NDArray
from scipy import special, stats

Floats = NDArray[np.float64]

TAIL = 3.5  # standard deviations beyond which equal values are counted
DEVICES = (2, 3, 4, 8)  # into how many equal parts a round's noise is divided, as devices would draw it
MAX_SAMPLES = 1_000_000  # for the test of normality, which sorts


class Check(msgspec.Struct, frozen=True):
    """A quantity that was measured, beside the promise."""

    name: str
    measured: float
    promised: float
    p_value: float
    holds: bool
    about: str  # what was measured, in one sentence

    def at(self, level: float) -> Check:
        """The same check, which holds where its p-value is at least the level."""
        return msgspec.structs.replace(self, holds=bool(self.p_value >= level))


def make_check(name: str, measured: float, promised: float, p_value: float, about: str) -> Check:
    """A check, with a p-value between 0 and 1: 0 where it is no number. `Check.at` decides whether it holds."""
    p_value = float(min(max(p_value, 0.0), 1.0)) if math.isfinite(p_value) else 0.0
    return Check(name, float(measured), float(promised), p_value, True, about)


def variance_check(noise_TP: Floats, name: str = "noise variance") -> Check:
    """The standard deviation of standardized noise, by the χ² test of its variance."""
    total, number = float(np.sum(np.square(noise_TP, dtype=np.float64))), noise_TP.size
    p_value = 2 * min(stats.chi2.cdf(total, number), stats.chi2.sf(total, number))
    about = f"standard deviation of {number:,} samples"
    return make_check(name, math.sqrt(total / number), 1.0, p_value, about)


def variance_by_round_check(noise_TP: Floats) -> Check:
    """Whether the noise has the same variance in every round."""
    rounds, number = noise_TP.shape
    squares_T = np.sum(np.square(noise_TP, dtype=np.float64), axis=1)
    p_T = 2 * np.minimum(stats.chi2.cdf(squares_T, number), stats.chi2.sf(squares_T, number))
    z_T = (squares_T - number) / math.sqrt(2 * number)
    spread = float(np.sum(z_T**2))  # about χ², with a heavier tail for few parameters
    excess = (spread - rounds) / math.sqrt(rounds * (2 + 12 / number))
    p_value = 2 * min(float(special.ndtr(-excess)) if excess > 6 else 1.0, 0.5, float(rounds * p_T.min()))
    worst = squares_T[np.argmax(np.abs(z_T))] / number
    about = f"the most unusual of {rounds:,} rounds"
    return make_check("noise of each round", math.sqrt(worst), 1.0, p_value, about)


def normality_check(noise_TP: Floats) -> Check:
    """The largest distance between the distribution of the noise and the normal one, by Kolmogorov and Smirnov."""
    samples = noise_TP.ravel()[:: max(1, noise_TP.size // MAX_SAMPLES)]
    result = stats.kstest(samples, "norm")
    about = f"distance to the normal, {len(samples):,} samples"
    return make_check("normality", result.statistic, 0.0, result.pvalue, about)


def correlation_check(noise_TP: Floats, name: str = "correlation of rounds", what: str = "rounds") -> Check:
    """The largest correlation between any two rows: rounds, or runs."""
    rows, number = noise_TP.shape
    return _correlation(name, _largest_correlation(noise_TP), number, rows * (rows - 1) // 2, what)


def _largest_correlation(row_NP: Floats) -> float:
    """The largest cosine between two rows, for noise whose mean is 0."""
    unit_NP = row_NP / np.maximum(np.linalg.norm(row_NP, axis=1, keepdims=True), 1e-30)
    return float(np.max(np.abs(np.triu(unit_NP @ unit_NP.T, 1))))


def device_check(noise_TP: Floats) -> Check:
    """The largest correlation between equal parts of one round's noise, which several devices would draw."""
    largest, pairs, smallest = 0.0, 0, noise_TP.size
    for devices in DEVICES:
        width = noise_TP.shape[1] // devices
        if width < 2:
            continue
        part_DN = np.array([noise_TP[:, d * width : (d + 1) * width].ravel() for d in range(devices)])
        pairs, smallest = pairs + devices * (devices - 1) // 2, min(smallest, part_DN.shape[1])
        largest = max(largest, _largest_correlation(part_DN) * math.sqrt(part_DN.shape[1]))
    return _correlation("correlation of devices", largest / math.sqrt(smallest), smallest, pairs, "parts")


def _correlation(name: str, largest: float, number: int, pairs: int, what: str) -> Check:
    """The p-value of the largest of so many correlations of independent normal samples."""
    p_value = pairs * 2 * float(special.ndtr(-largest * math.sqrt(number)))
    return make_check(name, largest, 0.0, p_value, f"the largest of {pairs:,} pairs of {what}")


def signal_check(noise_TP: Floats, signal_TP: Floats) -> Check:
    """How much of the known sum is missing from the release, or there twice: the slope of the noise on the sum."""
    size = float(np.sum(np.square(signal_TP, dtype=np.float64)))
    slope = float(np.sum(noise_TP * signal_TP, dtype=np.float64)) / size if size else 0.0
    p_value = 2 * float(special.ndtr(-abs(slope) * math.sqrt(size)))
    return make_check("weighted sum", 1 + slope, 1.0, p_value, "released sum over the known one")


def noise_checks(noise_TP: Floats) -> list[Check]:
    """All checks of the noise of several rounds."""
    return [
        variance_check(noise_TP),
        variance_by_round_check(noise_TP),
        normality_check(noise_TP),
        correlation_check(noise_TP),
        device_check(noise_TP),
    ]


def tail_check(noise_P: Floats, step: float) -> Check:
    """How many values beyond 3.5 standard deviations are equal: many, where noise comes from few random bits.

    Args:
        noise_P: Samples of one round at which the sum is zero.
        step: The distance between the numbers that the release can represent at the tail, in standard deviations.
    """
    tail = np.abs(noise_P[np.abs(noise_P) > TAIL])
    number = len(tail)
    equal = number - len(np.unique(tail))
    expected_pairs = number**2 / 2 * (TAIL + 0.5) * step  # the density beyond the tail is at most TAIL + 0.3
    p_value = float(stats.poisson.sf(equal - 1, expected_pairs)) if equal else 1.0
    p_value = min(p_value, 2 * float(stats.binom.cdf(number, noise_P.size, 2 * special.ndtr(-TAIL))))
    about = f"equal ones of {number:,} beyond {TAIL} deviations"
    return make_check("tails", equal, expected_pairs, p_value, about)


def sampling_check(group: str, sampled: int, trials: int, probability: float, is_fixed: bool = False) -> Check:
    """How often the clients of a group were sampled.

    Args:
        group: The group.
        sampled: How often its clients were sampled.
        trials: Clients times rounds.
        probability: The promised probability.
        is_fixed: Whether the number is the same in every round.
    """
    if is_fixed or probability in (0.0, 1.0):
        p_value = 1.0 if sampled == round(trials * probability) else 0.0
    else:
        p_value = float(stats.binomtest(sampled, trials, probability).pvalue)
    about = f"share of {trials:,} coins"
    return make_check(f"sampling of {group}", sampled / trials, probability, p_value, about)


def judge(checks: list[Check], level: float) -> list[Check]:
    """The checks, each at an equal part of a level: all of them hold of a sound system, except with this probability."""
    return [check.at(level / max(len(checks), 1)) for check in checks]

"""Lower bounds on epsilon from the scores of an attack, each with the probability that it is too high.

An attack gives each canary a score, large where it guesses that the canary took part. Three bounds:

- *Clopper–Pearson*: true and false positives at one threshold, which one half of the scores chooses and the other half
  tests. It assumes that scores are independent, and nothing about their distribution.
- *Gaussian*: the distance between the two distributions of scores, for scores that are Gaussian with one variance. The
  assumption is tested first.
- *One run* (Steinke, Nasr & Jagielski, 2023): how many coins are guessed. It holds for dependent scores too.

A mechanism that is mu-GDP (Dong, Roth & Su, 2022) is as private as one Gaussian of mean 0 against another of mean mu.

Axis letters: N samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, special, stats

from fedhdp.errors import require

Floats = NDArray[np.float64]

MAX_EPSILON = 1e6  # the largest epsilon of a mu
MIN_SAMPLES = 20  # of scores of either kind; fewer bound nothing
THRESHOLDS = 512  # that are tried on one half of the scores
ASSUMPTION_LEVEL = 1e-3  # a test of normal scores or of equal variances fails below this p-value


class Scores(NamedTuple):
    """The scores of an attack: larger where the attacker believes that the canary took part."""

    out_N: Floats  # of canaries that did not take part
    in_N: Floats  # of canaries that did

    @property
    def smallest(self) -> int:
        """How many scores there are of the rarer kind."""
        return min(len(self.out_N), len(self.in_N))


class Rates(NamedTuple):
    """Bounds on the rates of a guess, arrays where there are several thresholds."""

    lower: Floats  # on the probability of the guess where it is right
    upper: Floats  # on its probability where it is wrong


def gdp_delta(mu: float, epsilon: float) -> float:
    """The delta at an epsilon of a mechanism that is mu-GDP."""
    if mu == 0:
        return 0.0  # at epsilons of 0 or more
    log_second = epsilon + special.log_ndtr(-epsilon / mu - mu / 2)
    return float(max(special.ndtr(-epsilon / mu + mu / 2) - math.exp(min(log_second, 0.0)), 0.0))


def gdp_epsilon(mu: float, delta: float) -> float:
    """The epsilon at a delta of a mechanism that is mu-GDP.

    Args:
        mu: At least 0; infinity is a mechanism without noise.
        delta: The delta.

    Raises:
        InvalidValueError: If a value is out of range.
    """
    require(mu >= 0, "mu", mu, "at least 0")
    require(0 < delta < 1, "delta", delta, "between 0 and 1")
    if gdp_delta(min(mu, 1e3), 0.0) <= delta:
        return 0.0
    high = mu * (mu / 2 - special.ndtri(delta))  # where the first term alone is delta
    if high >= MAX_EPSILON:
        return math.inf
    return float(optimize.brentq(lambda epsilon: gdp_delta(mu, epsilon) - delta, 0.0, high, xtol=1e-10))


def gdp_mu(epsilon: float, delta: float) -> float:
    """The mu at which a GDP mechanism has this epsilon at a delta; the inverse of `gdp_epsilon`."""
    if epsilon == math.inf:
        return math.inf
    return float(optimize.brentq(lambda mu: gdp_delta(mu, epsilon) - delta, 0.0, 2 + 2 * math.sqrt(2 * epsilon) + 20))


def clopper_pearson(successes: Floats, trials: int, alpha: float) -> tuple[Floats, Floats]:
    """One-sided bounds on a probability, each wrong with probability alpha at most: the lower one, and the upper one."""
    k = np.asarray(successes, np.float64)
    lower = np.where(k == 0, 0.0, special.betaincinv(np.maximum(k, 1), trials - k + 1, alpha))
    upper = np.where(k == trials, 1.0, special.betaincinv(k + 1, np.maximum(trials - k, 1), 1 - alpha))
    return lower, upper


def epsilon_at(delta: float) -> Callable[[Rates], Floats]:
    """The lower bound on epsilon at a delta that rates give: log((lower − delta) / upper)."""

    def bound(rates: Rates) -> Floats:
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.log(np.maximum(rates.lower - delta, 0.0) / rates.upper)
        return np.asarray(np.maximum(np.nan_to_num(ratio, nan=0.0), 0.0))

    return bound


def mu_of(rates: Rates) -> Floats:
    """The lower bound on mu that rates give, for a claim that the mechanism is mu-GDP."""
    return np.asarray(np.maximum(special.ndtri(rates.lower) - special.ndtri(rates.upper), 0.0))


def threshold_bound(
    scores: Scores, alpha: float, bound: Callable[[Rates], Floats], rng: np.random.Generator
) -> float | None:
    """A lower bound by Clopper–Pearson at one threshold, which the other half of the scores has chosen.

    Args:
        scores: Independent scores.
        alpha: The probability that the bound is above the truth, at most.
        bound: Turns rates into a bound: `mu_of`, or the result of `epsilon_at`.
        rng: Divides the scores into halves.

    Returns:
        The bound, at least 0; None for fewer than ``MIN_SAMPLES`` scores.
    """
    if scores.smallest < MIN_SAMPLES:
        return None
    (out_1, out_2), (in_1, in_2) = (np.array_split(rng.permutation(values), 2) for values in scores)
    choices = np.unique(np.quantile(np.concatenate([out_1, in_1]), np.linspace(0, 1, THRESHOLDS)))
    best = max((1, -1), key=lambda sign: float(np.max(bound(_rates(out_1, in_1, choices, alpha, sign)))))
    threshold = choices[int(np.argmax(bound(_rates(out_1, in_1, choices, alpha, best))))]
    return float(bound(_rates(out_2, in_2, np.array([threshold]), alpha, best))[0])


def _rates(out_N: Floats, in_N: Floats, threshold_N: Floats, alpha: float, sign: int) -> Rates:
    """The rates of the guess "took part" above each threshold, or with sign −1 of "did not" below it."""
    right, wrong = (in_N, out_N) if sign > 0 else (out_N, in_N)
    positive_1, positive_2 = (_count_beyond(values, threshold_N, sign) for values in (right, wrong))
    lower, _ = clopper_pearson(positive_1, len(right), alpha / 2)
    _, upper = clopper_pearson(positive_2, len(wrong), alpha / 2)
    return Rates(lower, upper)


def _count_beyond(values: Floats, threshold_N: Floats, sign: int) -> Floats:
    if sign > 0:
        return (len(values) - np.searchsorted(np.sort(values), threshold_N, side="right")).astype(float)
    return np.searchsorted(np.sort(values), threshold_N, side="left").astype(float)


def is_gaussian(scores: Scores) -> bool:
    """Whether scores pass the tests of the Gaussian bound: both kinds normal, with one variance."""
    out_N, in_N = scores
    if any(np.std(values) <= 1e-6 * np.max(np.abs(values)) for values in scores):  # no noise
        return False
    ratio = float(np.var(in_N, ddof=1) / np.var(out_N, ddof=1))
    f = stats.f(len(in_N) - 1, len(out_N) - 1)
    p_values = [stats.normaltest(out_N).pvalue, stats.normaltest(in_N).pvalue, 2 * min(f.cdf(ratio), f.sf(ratio))]
    return bool(min(p_values) >= ASSUMPTION_LEVEL)


def gaussian_bound(scores: Scores, alpha: float) -> float | None:
    """A lower bound on mu from the means and the variance of scores.

    Args:
        scores: Independent scores.
        alpha: The probability that the bound is above the truth, at most, where the assumption is true.

    Returns:
        The bound, at least 0; None for fewer than ``MIN_SAMPLES`` scores, or where a test refutes the assumption.
    """
    if scores.smallest < MIN_SAMPLES or not is_gaussian(scores):
        return None
    n_out, n_in = map(len, scores)
    degrees = n_out + n_in - 2
    variance = ((n_out - 1) * np.var(scores.out_N, ddof=1) + (n_in - 1) * np.var(scores.in_N, ddof=1)) / degrees
    stddev = math.sqrt(variance)
    margin = stats.t.ppf(1 - alpha / 2, degrees) * stddev * math.sqrt(1 / n_out + 1 / n_in)
    largest_stddev = stddev * math.sqrt(degrees / stats.chi2.ppf(alpha / 2, degrees))
    return max(float((np.mean(scores.in_N) - np.mean(scores.out_N) - margin) / largest_stddev), 0.0)


def one_run_bound(scores: Scores, delta: float, alpha: float, rng: np.random.Generator) -> float | None:
    """A lower bound on epsilon from how many coins a threshold guesses, valid for dependent scores.

    The coins of the canaries are independent and fair. The attacker guesses those of the highest and of the lowest scores.
    How many are guessed is fixed: it does not depend on the coins.

    Args:
        scores: The scores, one for each canary of one run.
        delta: The delta.
        alpha: The probability that the bound is above the truth, at most.
        rng: Decides between equal scores.
    """
    coins = np.repeat([False, True], [len(scores.out_N), len(scores.in_N)])
    order = np.lexsort((rng.random(len(coins)), np.concatenate(scores)))
    canaries = len(coins)
    if canaries < 2 * MIN_SAMPLES:
        return None
    shares = (0.02, 0.05, 0.1, 0.25, 0.5)  # of canaries at either end that are guessed
    bounds = []
    for share in shares:
        size = max(1, round(share * canaries))
        correct = int(np.sum(~coins[order[:size]]) + np.sum(coins[order[-size:]]))
        bounds.append(_one_run_epsilon(canaries, 2 * size, correct, delta, alpha / len(shares)))
    return max(bounds)


def _one_run_epsilon(canaries: int, guesses: int, correct: int, delta: float, alpha: float) -> float:
    """The largest epsilon that so many correct guesses refute."""

    def excess(epsilon: float) -> float:
        return one_run_p_value(canaries, guesses, correct, epsilon, delta) - alpha

    if excess(0.0) >= 0:
        return 0.0
    return float(optimize.brentq(excess, 0.0, 50.0, xtol=1e-4)) if excess(50.0) > 0 else 50.0


def one_run_p_value(canaries: int, guesses: int, correct: int, epsilon: float, delta: float) -> float:
    """The probability of so many correct guesses or more, at most, where the mechanism is (epsilon, delta)-DP."""
    right, step = special.expit(epsilon), np.arange(1, correct + 1)
    number = correct - step
    log_ways = special.gammaln(guesses + 1) - special.gammaln(number + 1) - special.gammaln(guesses - number + 1)
    mass = np.exp(log_ways + special.xlogy(number, right) + special.xlogy(guesses - number, special.expit(-epsilon)))
    share = float(np.max(np.cumsum(mass) / step, initial=0.0))  # of P(correct − i ≤ W < correct) in i
    tail = special.bdtrc(correct - 1, guesses, right) if correct > 0 else 1.0
    return float(min(tail + 2 * canaries * delta * share, 1.0))


def area_under_curve(scores: Scores) -> float:
    """The probability that a canary that took part has a higher score than one that did not; equal scores count half."""
    ranks = stats.rankdata(np.concatenate([scores.in_N, scores.out_N]))[: len(scores.in_N)]
    n_in, n_out = len(scores.in_N), len(scores.out_N)
    if min(n_in, n_out) == 0:
        return 0.5
    return float((ranks.sum() - n_in * (n_in + 1) / 2) / (n_in * n_out))


def true_positive_rate(scores: Scores, false_positive_rate: float) -> float:
    """The share of canaries that took part above the threshold that this share of the others passes, at most."""
    if scores.smallest == 0:
        return 0.0
    threshold = np.quantile(scores.out_N, 1 - false_positive_rate, method="higher")
    return float(np.mean(scores.in_N > threshold))


def roc_curve(scores: Scores, points: int = 101) -> list[tuple[float, float]]:
    """False and true positive rates at thresholds from high to low, from (0, 0) to (1, 1)."""
    if scores.smallest == 0:
        return [(0.0, 0.0), (1.0, 1.0)]
    rates = np.unique(np.concatenate([np.geomspace(1e-3, 1, points // 2), np.linspace(0, 1, points - points // 2)]))
    thresholds = np.quantile(scores.out_N, 1 - rates[:-1], method="higher")
    curve = [(float(np.mean(scores.out_N > t)), float(np.mean(scores.in_N > t))) for t in thresholds]
    return [*sorted({(0.0, 0.0), *curve}), (1.0, 1.0)]

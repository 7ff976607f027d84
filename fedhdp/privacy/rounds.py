"""The epsilon of rounds whose numbers are given, along time, or the noise multiplier for a target epsilon."""

from __future__ import annotations

import math

import msgspec

from fedhdp.errors import InvalidValueError, require
from fedhdp.mechanism import SENSITIVITY, Sampling
from fedhdp.privacy.accounting import LEDGER_ACCOUNTANT, Accountant, compose, default_accountant, epsilon_best_of
from fedhdp.privacy.calibration import min_noise_multiplier, noise_multiplier_for
from fedhdp.privacy.costs import ADJACENCY, PrivacyCost
from fedhdp.privacy.tuning import Tuning

CURVE_POINTS = 10


class CurvePoint(msgspec.Struct, frozen=True):
    """Epsilon after some rounds, and after so many whole trainings if there are several."""

    rounds: int
    epsilon: float
    trainings: int | None = None


class RoundsReport(msgspec.Struct, frozen=True):
    """The epsilon of rounds whose numbers are given, or the noise multiplier for a target epsilon."""

    epsilon: float
    target_epsilon: float | None
    unprotected: bool
    delta: float
    noise_multiplier: float
    sampling_rate: float
    rounds: int  # of one training
    trainings: int | None  # one after the other; None: one
    sampling: str
    adjacency: str
    accountant: str
    tuning: str | None
    noise_in_clips: float
    epsilon_if_noise_in_clips: float  # if the noise multiplier were a multiple of one clip
    curve: list[CurvePoint]


def account_rounds(
    sampling_rate: float,
    rounds: int,
    delta: float,
    *,
    noise_multiplier: float | None = None,
    target_epsilon: float | None = None,
    trainings: int | None = None,
    accountant: Accountant | None = None,
    sampling: Sampling = "poisson",
    tuning: Tuning | None = None,
) -> RoundsReport:
    """The epsilon of rounds, or the noise multiplier for a target epsilon.

    Args:
        sampling_rate: The probability that a client takes part in a round.
        rounds: The number of rounds of a training.
        delta: The delta.
        noise_multiplier: The noise as a multiple of the L2 sensitivity. Either this or ``target_epsilon``.
        target_epsilon: The epsilon to stay within.
        trainings: How many trainings follow one another on the same clients; None: one.
        accountant: ``rdp``, or ``pld`` for one training with Poisson sampling and without tuning. None: ``pld`` there, else
            ``rdp``, as a ledger adds up trainings.
        sampling: ``poisson`` or ``fixed``.
        tuning: The number of runs, if only the best of several is shown.

    Raises:
        InvalidValueError: If a value is out of range, or not exactly one of the two is set.
    """
    is_rdp = trainings is not None or tuning is not None
    accountant = accountant or default_accountant(sampling, ledger=is_rdp)
    if is_rdp:
        rule = "'rdp' where there is tuning, or several trainings"
        require(accountant == LEDGER_ACCOUNTANT, "accountant", accountant, rule)
    if trainings is not None:
        require(trainings >= 1, "trainings", trainings, "at least 1")
        require(tuning is None, "trainings", trainings, "None where there is tuning")
    all_rounds = rounds * (trainings or 1)

    def epsilon_of(cost: PrivacyCost) -> float:
        return compose([cost], delta, accountant) if tuning is None else epsilon_best_of(cost, *tuning, delta)

    def epsilon_at(noise: float) -> float:
        return epsilon_of(PrivacyCost(noise, sampling_rate, sampling, all_rounds))

    if target_epsilon is not None:
        require(noise_multiplier is None, "noise_multiplier", noise_multiplier, "None where there is a target_epsilon")
        noise_multiplier = noise_multiplier_for(target_epsilon, sampling_rate, all_rounds, delta, accountant, sampling)
        if tuning is not None and noise_multiplier > 0:
            noise_multiplier = min_noise_multiplier(epsilon_at, target_epsilon)
    if noise_multiplier is None or not noise_multiplier < math.inf:
        message = f"noise_multiplier must be finite where there is no target_epsilon, got {noise_multiplier}"
        raise InvalidValueError(message, "noise_multiplier", noise_multiplier)
    cost = PrivacyCost(noise_multiplier, sampling_rate, sampling, all_rounds).checked()
    epsilon, sensitivity = epsilon_of(cost), SENSITIVITY[sampling]
    unit, count = (1, rounds) if trainings is None else (rounds, trainings)
    points = sorted({min(count, max(1, round(count * point / CURVE_POINTS))) for point in range(1, CURVE_POINTS + 1)})
    return RoundsReport(
        epsilon=epsilon,
        target_epsilon=target_epsilon,
        unprotected=epsilon == math.inf,
        delta=delta,
        noise_multiplier=noise_multiplier,
        sampling_rate=sampling_rate,
        rounds=rounds,
        trainings=trainings,
        sampling=sampling,
        adjacency=ADJACENCY[sampling],
        accountant=accountant,
        tuning=None if tuning is None else str(tuning),
        noise_in_clips=noise_multiplier * sensitivity,
        epsilon_if_noise_in_clips=epsilon_of(cost._replace(noise_multiplier=noise_multiplier / sensitivity)),
        curve=[
            CurvePoint(unit * point, epsilon_of(cost._replace(rounds=unit * point)), trainings and point)
            for point in points
        ],
    )

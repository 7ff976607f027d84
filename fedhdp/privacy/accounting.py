"""The epsilon of costs (``costs.py``), and of the mechanisms that have them.

The accountants are dp-accounting's: Renyi (Mironov, Talwar & Zhang, 2019; conversion by Canonne, Kamath & Steinke, 2020)
and privacy loss distributions (Koskela et al., 2020; Doroshenko et al., 2022). No other file imports dp_accounting, and
this one only when an epsilon is computed, since the import takes most of a second. Cohorts are never truncated.

An epsilon covers the whole transcript of models and clips. It does not cover what else is shown without noise: the
number of clients in a round, the number of refused updates, accuracies measured on clients' data.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from decimal import ROUND_CEILING, Context, Decimal
from typing import TYPE_CHECKING, Literal

import msgspec
import numpy as np

from fedhdp.errors import require
from fedhdp.mechanism import Mechanism, Sampling
from fedhdp.privacy.costs import ADJACENCY, SAMPLER, PrivacyCost, privacy_costs

if TYPE_CHECKING:
    from dp_accounting import DpEvent
    from dp_accounting.pld import PLDAccountant
    from dp_accounting.rdp import RdpAccountant

    from fedhdp.privacy.ledger import Budget

Accountant = Literal["rdp", "pld"]
LEDGER_ACCOUNTANT: Accountant = "rdp"  # valid even if later runs are chosen after seeing the results of earlier ones
FIXED_POPULATION = 10**12  # events hold fixed cohorts' sampling rates as whole numbers: so many clients out of these
MIN_DIVERGENCE = 1e-15  # a Renyi divergence is never taken to be below what double precision can tell from 0
SMALL_DELTA = 1e-10  # below what an attack curve shows
MIN_NOISE_MULTIPLIER = 1e-2  # less noise is accounted as none


class EpsilonReport(msgspec.Struct, frozen=True):
    """An epsilon with everything it rests on; ``noise_multiplier`` is a multiple of the L2 sensitivity."""

    group: str
    epsilon: float
    delta: float
    noise_multiplier: float
    sampling_rate: float
    rounds: int
    adjacency: str
    sampling: str
    accountant: str
    tuning: str = ""

    @property
    def basis(self) -> str:
        """Everything the epsilon rests on, as text."""
        return (
            f"delta {self.delta:g}, q {self.sampling_rate:g}, z {self.noise_multiplier:.4g}, {pluralize(self.rounds)}, "
            f"{SAMPLER[self.sampling]}, {self.adjacency}, {self.accountant.upper()} accountant"
            + (f", {self.tuning}" if self.tuning else "")
        )

    def __str__(self) -> str:
        return f"{self.group}: epsilon {format_epsilon(self.epsilon)} ({self.basis})"


def format_epsilon(epsilon: float, places: int | None = None) -> str:
    """An epsilon as text, rounded up to decimal places or, by default, to four significant digits."""
    if epsilon == math.inf:
        return "∞"
    exact = Decimal(repr(epsilon))
    if places is None:
        return f"{float(Context(prec=4, rounding=ROUND_CEILING).plus(exact)):.4g}"
    return str(exact.quantize(Decimal(1).scaleb(-places), ROUND_CEILING))


def pluralize(number: float, noun: str = "round") -> str:
    """A number with its noun: 1 round, 2 rounds."""
    return f"{number if isinstance(number, int) else format(number, 'g')} {noun}{'' if number == 1 else 's'}"


def default_accountant(*samplings: str, ledger: bool = False) -> Accountant:
    """The accountant of a run that names none: the ledger's with a ledger or with fixed cohorts, else PLD.

    Args:
        *samplings: The kinds of sampling of the run's mechanisms.
        ledger: Whether a ledger adds up the run with others.
    """
    return LEDGER_ACCOUNTANT if ledger or "fixed" in samplings else "pld"


@functools.cache
def is_accounting_installed() -> bool:
    """Whether dp-accounting is installed; without it everything trains, and epsilons are not known."""
    return importlib.util.find_spec("dp_accounting") is not None


def event(cost: PrivacyCost) -> DpEvent:
    """The dp-accounting event of a cost."""
    import dp_accounting as dp

    noise_multiplier, rate, sampling, rounds = cost
    if cost.free:
        return dp.NoOpDpEvent()
    if noise_multiplier < MIN_NOISE_MULTIPLIER:
        return dp.NonPrivateDpEvent()
    round_event: DpEvent = dp.GaussianDpEvent(noise_multiplier)
    if sampling == "fixed":
        cohort = min(math.ceil(rate * FIXED_POPULATION), FIXED_POPULATION)
        round_event = dp.SampledWithoutReplacementDpEvent(FIXED_POPULATION, cohort, round_event)
    elif rate < 1:
        round_event = dp.PoissonSampledDpEvent(rate, round_event)
    return dp.SelfComposedDpEvent(round_event, rounds)


def compose(costs: Iterable[PrivacyCost], delta: float, accountant: Accountant = "rdp") -> float:
    """The epsilon of costs together, by one mechanism or by many.

    Args:
        costs: The costs, all by the same kind of sampling.
        delta: The delta.
        accountant: ``rdp`` or, for Poisson sampling, ``pld``.

    Returns:
        Epsilon; infinity where anything has no noise.

    Raises:
        InvalidValueError: If a value is out of range, or the costs do not compose.
    """
    require(0 < delta < 1, "delta", delta, "between 0 and 1")
    require(accountant in ("rdp", "pld"), "accountant", accountant, "'rdp' or 'pld'")
    return _compose(tuple(cost for cost in costs if not cost.checked().free), delta, accountant)


@functools.lru_cache(maxsize=4096)
def _compose(costs: tuple[PrivacyCost, ...], delta: float, accountant: str) -> float:
    if not costs:
        return 0.0
    if any(cost.noise_multiplier < MIN_NOISE_MULTIPLIER for cost in costs):
        return math.inf
    samplings = {cost.sampling for cost in costs}
    rule = "the same in all costs that are composed, since adjacency differs"
    require(len(samplings) == 1, "sampling", sorted(samplings), rule)
    if accountant == "rdp":
        return _compose_rdp(costs, delta)
    require(samplings == {"poisson"}, "accountant", accountant, "'rdp' where sampling is 'fixed'")
    return _compose_pld(costs, delta)


def _compose_rdp(costs: Sequence[PrivacyCost], delta: float) -> float:
    import dp_accounting as dp

    divergence = np.sum([cost.rounds * _rdp_of_round(*cost[:3]) for cost in costs], axis=0)
    return float(dp.rdp.compute_epsilon(_orders(), divergence.tolist(), delta)[0])


@functools.lru_cache(maxsize=4096)
def _rdp_of_round(noise_multiplier: float, rate: float, sampling: str) -> np.ndarray:
    """The Renyi divergence of one round at each order; rounds add up, so this is computed once."""
    with _quiet():
        accountant = _rdp_accountant(sampling).compose(event(PrivacyCost(noise_multiplier, rate, sampling)))
    # The divergence is convex, so not sampling at all costs no less, and needs no series.
    unsampled = np.array(_orders()) / (2 * noise_multiplier**2)
    return np.asarray(np.maximum(np.fmin(accountant.rdp, unsampled), MIN_DIVERGENCE))


def _rdp_accountant(sampling: str) -> RdpAccountant:
    import dp_accounting as dp

    relations = {"poisson": dp.NeighboringRelation.ADD_OR_REMOVE_ONE, "fixed": dp.NeighboringRelation.REPLACE_ONE}
    return dp.rdp.RdpAccountant(neighboring_relation=relations[sampling])


@functools.cache
def _orders() -> list[float]:
    return list(_rdp_accountant("poisson").orders.tolist())


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence the warning for each order that does not converge; leaving such an order out only makes epsilon larger."""
    logger = logging.getLogger("absl")
    previous, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = previous


def _compose_pld(costs: Sequence[PrivacyCost], delta: float) -> float:

    bound = _compose_rdp(costs, delta)
    if bound == 0 or bound > 100_000:  # nothing is below 0, and no grid is large enough for so much
        return bound
    with np.errstate(over="ignore"):  # a division that overflows gives an infinite epsilon, which the bound replaces
        epsilon = float(_pld_accountant(costs, bound).get_epsilon(delta))
    # With a tiny delta, rounding to the grid makes PLD's epsilon the larger one; both are upper bounds.
    return epsilon if 0 <= epsilon < bound else bound


def _pld_accountant(costs: Sequence[PrivacyCost], bound: float) -> PLDAccountant:
    """The costs composed, on a grid for an epsilon of at most this bound."""
    import dp_accounting as dp

    accountant = dp.pld.PLDAccountant(value_discretization_interval=_pld_interval(costs, bound))
    for cost in costs:
        accountant.compose(event(cost))
    return accountant


def compose_deltas(costs: Iterable[PrivacyCost], epsilons: Sequence[float], accountant: Accountant) -> list[float]:
    """The deltas of costs together at several epsilons; the arguments are those of `compose`.

    Each is an upper bound, by the same accounting as `compose`; 1 where anything has no noise.
    """
    composed = tuple(cost for cost in costs if not cost.checked().free)
    if not composed:
        return [0.0] * len(epsilons)
    bound = _compose(composed, SMALL_DELTA, "rdp")
    if bound > 100_000:
        return [1.0] * len(epsilons)
    if accountant == "pld":
        return [float(delta) for delta in _pld_accountant(composed, bound).get_delta(list(epsilons))]
    from dp_accounting.rdp.rdp_privacy_accountant import compute_delta

    divergence = np.sum([cost.rounds * _rdp_of_round(*cost[:3]) for cost in composed], axis=0).tolist()
    return [float(compute_delta(_orders(), divergence, epsilon)[0]) for epsilon in epsilons]


def _pld_interval(costs: Sequence[PrivacyCost], bound: float) -> float:
    """A grid of privacy losses that adds about 1e-4 of an epsilon; time grows with the number of its points."""
    # Rounding to the grid adds up to interval²/4 to the variance of a round's loss; all rounds' is about (bound/4)².
    interval = min(bound / 1_000, 0.007 * bound / math.sqrt(sum(cost.rounds for cost in costs)))
    losses = [(0.5 / cost.noise_multiplier**2 + 10 / cost.noise_multiplier, cost.sampling_rate) for cost in costs]
    max_loss = max(loss if loss > 50 else math.log1p(rate * math.expm1(loss)) for loss, rate in losses)
    return min(max(interval, max_loss / 200_000), 1.0)


def epsilon_best_of(cost: PrivacyCost, trials: float, shape: float, delta: float) -> float:
    """The epsilon of showing the best of a random number of runs, by Renyi accounting.

    Args:
        cost: What each run costs.
        trials: The mean number of runs.
        shape: The distribution of that number: infinity Poisson, 1 geometric, 0 logarithmic.
        delta: The delta.

    Raises:
        InvalidValueError: If a value is out of range.
    """
    import dp_accounting as dp

    require(1 <= trials < math.inf, "trials", trials, "finite and at least 1")
    require(shape >= 0, "shape", shape, "at least 0")
    require(0 < delta < 1, "delta", delta, "between 0 and 1")
    if cost.checked().free:
        return 0.0
    if cost.noise_multiplier < MIN_NOISE_MULTIPLIER:
        return math.inf
    noise_multiplier = min(cost.noise_multiplier, 1000.0)  # beyond, double precision has no result
    run = event(cost._replace(noise_multiplier=noise_multiplier))
    with _quiet():
        accountant = _rdp_accountant(cost.sampling).compose(dp.dp_event.RepeatAndSelectDpEvent(run, trials, shape))
        epsilon = float(accountant.get_epsilon(delta))
    return max(epsilon, compose([cost], delta))


def within_budget(costs: Iterable[PrivacyCost], budget: Budget) -> bool:
    """Whether costs together stay within a budget, even if later rounds were chosen after seeing earlier ones.

    It is computed by Renyi accounting, which holds for such choices (Feldman & Zrnic, 2021; Lecuyer, 2021) and is fast.
    """
    return compose(costs, budget.delta, LEDGER_ACCOUNTANT) <= budget.epsilon


def rounds_left(costs: Iterable[PrivacyCost], round_cost: PrivacyCost, budget: Budget) -> float:
    """How many rounds of a cost a budget allows after the costs that were charged.

    Returns:
        A whole number, or infinity where rounds are free or the budget is infinite.
    """
    charged = tuple(costs)
    if round_cost.free or budget.epsilon == math.inf:
        return math.inf

    def is_allowed(rounds: int) -> bool:
        return within_budget((*charged, round_cost._replace(rounds=rounds)), budget)

    if not is_allowed(1):
        return 0
    low, high = 1, 2
    while is_allowed(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if is_allowed(middle) else (low, middle)
    return low


def gaussian_epsilon(
    noise_multiplier: float,
    sampling_rate: float,
    rounds: int,
    delta: float,
    accountant: Accountant | None = None,
    sampling: Sampling = "poisson",
) -> float:
    """The epsilon of rounds with these numbers; see ``PrivacyCost``, and `epsilon_reports` for the accountant."""
    accountant = accountant or default_accountant(sampling)
    return compose([PrivacyCost(noise_multiplier, sampling_rate, sampling, rounds)], delta, accountant)


def make_report(
    group: str, epsilon: float, delta: float, cost: PrivacyCost, accountant: str, tuning: str = ""
) -> EpsilonReport:
    """The report of a group's epsilon, with the cost that it rests on."""
    noise_multiplier, rate, sampling, rounds = cost
    return EpsilonReport(
        group, epsilon, delta, noise_multiplier, rate, rounds, ADJACENCY[sampling], sampling, accountant, tuning
    )


def epsilon_reports(
    mechanism: Mechanism, rounds: int, delta: float, accountant: Accountant | None = None
) -> dict[str, EpsilonReport]:
    """Each group's epsilon with everything it rests on, by group name; infinity for groups that opted out.

    Args:
        mechanism: The mechanism.
        rounds: The number of rounds.
        delta: The delta.
        accountant: ``rdp`` or, for Poisson sampling, ``pld``. None: the one that `calibrate` takes too, which is PLD for
            Poisson sampling and RDP for fixed cohorts.

    Raises:
        InvalidValueError: If a value is out of range, or the accountant has no result for the sampling.
    """
    accountant = accountant or default_accountant(mechanism.sampling)
    reports = {}
    for name, cost in privacy_costs(mechanism, rounds).items():
        group_epsilon = math.inf if cost.noise_multiplier == 0 else compose([cost], delta, accountant)
        reports[name] = make_report(name, group_epsilon, delta, cost, accountant)
    return reports


def epsilon(mechanism: Mechanism, rounds: int, delta: float, accountant: Accountant | None = None) -> dict[str, float]:
    """Each group's epsilon against an adversary who knows all other clients' data.

    Args:
        mechanism: The mechanism.
        rounds: The number of rounds.
        delta: The delta.
        accountant: As for `epsilon_reports`.

    Returns:
        Epsilon by group name; infinity for groups that opted out.

    Raises:
        InvalidValueError: If a value is out of range, or the accountant has no result for the sampling.
    """
    return {name: report.epsilon for name, report in epsilon_reports(mechanism, rounds, delta, accountant).items()}

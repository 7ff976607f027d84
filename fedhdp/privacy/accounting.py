"""What a promise costs: a ``Mechanism`` becomes what each group privacy_costs a round, that a ``DpEvent``, that an epsilon.

Accountants are dp-accounting's: Renyi (Mironov, Talwar & Zhang, 2019; conversion by Canonne, Kamath & Steinke, 2020)
and privacy loss distributions (Koskela et al., 2020; Doroshenko et al., 2022). This is the only file that imports
dp_accounting, and only when a price is asked for, since the import takes most of a second.

``poisson`` sampling is priced by adding or removing one client. ``fixed`` cohorts, drawn without replacement from each
group, are priced by replacing one client with another (Wang, Balle & Kasiviswanathan, 2019): that moves a clipped sum,
and a sum of bits, by twice as much, so a mechanism's multiplier counts half. Cohorts are never truncated.

What was spent comes first (``PrivacyCost``, ``event``, ``compose``), what a mechanism costs its groups after it (``epsilon_reports``).
The way back, noise for an epsilon, is in ``calibration.py``; what choosing among runs adds is in ``tuning.py``.

A price covers the whole transcript of models and clips. It does not cover whatever else is shown without noise: how
many clients came to a round, how many updates were refused, accuracies measured on clients' own data.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from decimal import ROUND_CEILING, Context, Decimal
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec
import numpy as np

from fedhdp.errors import require
from fedhdp.mechanism import Mechanism, PrivacyGroup, Sampling

if TYPE_CHECKING:
    from dp_accounting import DpEvent
    from dp_accounting.rdp import RdpAccountant

Accountant = Literal["rdp", "pld"]
ADJACENCY = {"poisson": "add or remove one client", "fixed": "replace one client"}
SAMPLER = {"poisson": "Poisson sampling", "fixed": "fixed cohorts without replacement"}
GRAIN = 10**12  # fixed cohorts' sampling rates as whole numbers, which is how events hold them
ROUNDING = 1e-15  # an order's cost is never taken to be below what double precision can tell from nothing
MIN_NOISE_MULTIPLIER = 1e-2  # less is priced as none


class PrivacyCost(NamedTuple):
    """What some rounds cost a group: noise as a multiple of what one neighbour can change, rate, sampler, rounds."""

    noise_multiplier: float
    sampling_rate: float
    sampling: str
    rounds: int = 1

    @property
    def free(self) -> bool:
        """Whether nothing of the group's can be seen."""
        return self.rounds == 0 or self.sampling_rate == 0 or self.noise_multiplier == math.inf


class EpsilonReport(msgspec.Struct, frozen=True):
    """An epsilon and all that it rests on; ``noise_multiplier`` is relative to what one neighbour can change."""

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
        """What the epsilon rests on, for people."""
        return (
            f"delta {self.delta:g}, q {self.sampling_rate:g}, z {self.noise_multiplier:.4g}, {pluralize(self.rounds)}, "
            f"{SAMPLER[self.sampling]}, {self.adjacency}, {self.accountant.upper()} accountant"
            + (f", {self.tuning}" if self.tuning else "")
        )

    def __str__(self) -> str:
        return f"{self.group}: epsilon {format_epsilon(self.epsilon)} ({self.basis})"


def format_epsilon(epsilon: float, places: int | None = None) -> str:
    """An epsilon for people, never below what it is: to so many decimal places, or to four digits."""
    if epsilon == math.inf:
        return "∞"
    exact = Decimal(repr(epsilon))
    if places is None:
        return f"{float(Context(prec=4, rounding=ROUND_CEILING).plus(exact)):.4g}"
    return str(exact.quantize(Decimal(1).scaleb(-places), ROUND_CEILING))


def pluralize(number: float, what: str = "round") -> str:
    """So many of something: 1 round, 2 rounds."""
    return f"{number if isinstance(number, int) else format(number, 'g')} {what}{'' if number == 1 else 's'}"


def privacy_cost(mechanism: Mechanism, group: PrivacyGroup, rounds: int = 1) -> PrivacyCost:
    """What rounds cost a group: update and clip bit together, with the noise that the group really gets."""
    require(rounds >= 0, "rounds", rounds, "at least 0")
    multiplier = mechanism.accounted_noise_multiplier(group)
    return PrivacyCost(multiplier, mechanism.sampling_probability(group), mechanism.sampling, rounds)


def privacy_costs(mechanism: Mechanism, rounds: int = 1) -> dict[str, PrivacyCost]:
    """What rounds of a mechanism cost each group."""
    return {group.name: privacy_cost(mechanism, group, rounds) for group in mechanism.groups}


def without_noise(spent: Mapping[str, PrivacyCost]) -> dict[str, PrivacyCost]:
    """What rounds cost whose noise can be computed again from a seed: as if there were none."""
    return {name: one._replace(noise_multiplier=0.0) for name, one in spent.items()}


def event(spent: PrivacyCost) -> DpEvent:
    """The event that dp-accounting knows for what was spent."""
    import dp_accounting as dp

    multiplier, rate, sampling, rounds = spent
    if spent.free:
        return dp.NoOpDpEvent()
    if multiplier < MIN_NOISE_MULTIPLIER:
        return dp.NonPrivateDpEvent()
    once: DpEvent = dp.GaussianDpEvent(multiplier)
    if sampling == "fixed":
        once = dp.SampledWithoutReplacementDpEvent(GRAIN, min(math.ceil(rate * GRAIN), GRAIN), once)
    elif rate < 1:
        once = dp.PoissonSampledDpEvent(rate, once)
    return dp.SelfComposedDpEvent(once, rounds)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without a line for each order that is left out for want of convergence, which only makes an epsilon larger."""
    log = logging.getLogger("absl")
    log.disabled, before = True, log.disabled
    try:
        yield
    finally:
        log.disabled = before


def _renyi_accountant(sampling: str) -> RdpAccountant:
    import dp_accounting as dp

    relations = {"poisson": dp.NeighboringRelation.ADD_OR_REMOVE_ONE, "fixed": dp.NeighboringRelation.REPLACE_ONE}
    return dp.rdp.RdpAccountant(neighboring_relation=relations[sampling])


@functools.lru_cache(maxsize=4096)
def _renyi(multiplier: float, rate: float, sampling: str) -> np.ndarray:
    """The Renyi divergence of one round at each order; rounds add up, so this is computed once."""
    with _quiet():
        cost = _renyi_accountant(sampling).compose(event(PrivacyCost(multiplier, rate, sampling))).rdp
    # Not sampling at all costs no less, since the divergence is convex, and is known without a series.
    unsampled = np.array(_orders()) / (2 * multiplier**2)
    return np.maximum(np.fmin(cost, unsampled), ROUNDING)


@functools.cache
def _orders() -> list[float]:
    return _renyi_accountant("poisson").orders.tolist()


def _rdp(paid: Sequence[PrivacyCost], delta: float) -> float:
    import dp_accounting as dp

    cost = np.sum([rounds * _renyi(multiplier, rate, sampling) for multiplier, rate, sampling, rounds in paid], axis=0)
    return float(dp.rdp.compute_epsilon(_orders(), cost.tolist(), delta)[0])


def _interval(paid: Sequence[PrivacyCost], bound: float) -> float:
    """A grid for privacy losses that adds about 1e-4 of an epsilon, since time goes with the number of its points."""
    # Rounding to the grid adds up to interval²/4 to the variance of a round's loss; all rounds' is about (bound/4)².
    wanted = min(bound / 1_000, 0.007 * bound / math.sqrt(sum(spent.rounds for spent in paid)))
    losses = [(0.5 / spent.noise_multiplier**2 + 10 / spent.noise_multiplier, spent.sampling_rate) for spent in paid]
    reach = max(loss if loss > 50 else math.log1p(rate * math.expm1(loss)) for loss, rate in losses)
    return min(max(wanted, reach / 200_000), 1.0)


def _pld(paid: Sequence[PrivacyCost], delta: float) -> float:
    import dp_accounting as dp

    bound = _rdp(paid, delta)
    if bound == 0 or bound > 100_000:  # a bound too: nothing to gain below 0, and no grid reaches so far
        return bound
    accountant = dp.pld.PLDAccountant(value_discretization_interval=_interval(paid, bound))
    for spent in paid:
        accountant.compose(event(spent))
    return min(max(0.0, float(accountant.get_epsilon(delta))), bound)  # with a tiny delta rounding makes it the larger


@functools.lru_cache(maxsize=4096)
def _compose(paid: tuple[PrivacyCost, ...], delta: float, accountant: str) -> float:
    if not paid:
        return 0.0
    if any(spent.noise_multiplier < MIN_NOISE_MULTIPLIER for spent in paid):
        return math.inf
    samplings = {spent.sampling for spent in paid}
    rule = "the same in all that is composed, since adjacency differs"
    require(len(samplings) == 1, "sampling", sorted(samplings), rule)
    if accountant == "rdp":
        return _rdp(paid, delta)
    require(samplings == {"poisson"}, "accountant", accountant, "'rdp' where sampling is 'fixed'")
    return _pld(paid, delta)


def compose(spent: Iterable[tuple], delta: float, accountant: Accountant = "rdp") -> float:
    """The epsilon of all that was spent, by one mechanism or by many."""
    require(0 < delta < 1, "delta", delta, "between 0 and 1")
    require(accountant in ("rdp", "pld"), "accountant", accountant, "'rdp' or 'pld'")
    return _compose(tuple(one for one in (PrivacyCost(*fields) for fields in spent) if not one.free), delta, accountant)


def epsilon_best_of(spent: tuple, trials: float, shape: float, delta: float) -> float:
    """The epsilon of showing the best of a random number of runs that each spend this, by Renyi accounting."""
    import dp_accounting as dp

    run = PrivacyCost(*spent)
    require(1 <= trials < math.inf, "trials", trials, "finite and at least 1")
    require(shape >= 0, "shape", shape, "at least 0")
    require(0 < delta < 1, "delta", delta, "between 0 and 1")
    if run.free:
        return 0.0
    if run.noise_multiplier < MIN_NOISE_MULTIPLIER:
        return math.inf
    little = run._replace(noise_multiplier=min(run.noise_multiplier, 1000.0))  # beyond, double precision has no answer
    selected = dp.dp_event.RepeatAndSelectDpEvent(event(little), trials, shape)
    with _quiet():
        cost = float(_renyi_accountant(run.sampling).compose(selected).get_epsilon(delta))
    return max(cost, compose([run], delta))


def within_budget(spent: Iterable[tuple], epsilon: float, delta: float) -> bool:
    """Whether what was spent stays within a budget, however later rounds were chosen in the light of earlier ones.

    By Renyi accounting, which holds for such choices (Feldman & Zrnic, 2021; Lecuyer, 2021) and is fast.
    """
    return compose(spent, delta, "rdp") <= epsilon


def rounds_left(spent: Iterable[tuple], once: tuple, epsilon: float, delta: float) -> float:
    """How many more rounds a budget allows: a whole number, or infinity for rounds that cost nothing or any budget."""
    before, after = tuple(spent), PrivacyCost(*once)
    if after.free or epsilon == math.inf:
        return math.inf

    def allowed(rounds: int) -> bool:
        return within_budget((*before, after._replace(rounds=rounds)), epsilon, delta)

    if not allowed(1):
        return 0
    least, most = 1, 2
    while allowed(most):
        least, most = most, 2 * most
    while most - least > 1:
        middle = (least + most) // 2
        least, most = (middle, most) if allowed(middle) else (least, middle)
    return least


def gaussian_cost(noise_multiplier: float, sampling_rate: float, rounds: int, sampling: str) -> PrivacyCost:
    """What rounds cost by their numbers: noise of this multiple of what one neighbour can change."""
    require(noise_multiplier >= 0, "noise_multiplier", noise_multiplier, "at least 0")
    require(0 <= sampling_rate <= 1, "sampling_rate", sampling_rate, "between 0 and 1")
    require(rounds >= 0 and int(rounds) == rounds, "rounds", rounds, "a whole number, at least 0")
    require(sampling in ADJACENCY, "sampling", sampling, "'poisson' or 'fixed'")
    return PrivacyCost(noise_multiplier, sampling_rate, sampling, int(rounds))


def gaussian_epsilon(
    noise_multiplier: float,
    sampling_rate: float,
    rounds: int,
    delta: float,
    accountant: Accountant = "rdp",
    sampling: Sampling = "poisson",
) -> float:
    """The epsilon of rounds with noise of this multiple of what one neighbour can change (``fixed``: two clips)."""
    return compose([gaussian_cost(noise_multiplier, sampling_rate, rounds, sampling)], delta, accountant)


def curve(
    noise_multiplier: float,
    sampling_rate: float,
    rounds: int,
    delta: float,
    accountant: Accountant = "rdp",
    sampling: Sampling = "poisson",
    points: int = 10,
) -> list[tuple[int, float]]:
    """Epsilon after a growing number of rounds, evenly spaced and the last one included."""
    require(points >= 1, "points", points, "at least 1")
    whole = gaussian_cost(noise_multiplier, sampling_rate, rounds, sampling)
    after = sorted({round(whole.rounds * point / points) for point in range(1, points + 1)})
    return [(done, compose([whole._replace(rounds=done)], delta, accountant)) for done in after]


def epsilon_reports(
    mechanism: Mechanism, rounds: int, delta: float, accountant: Accountant = "rdp"
) -> dict[str, EpsilonReport]:
    """Each group's epsilon with all that it rests on: infinity for those who opted out."""
    return {group.name: _price(mechanism, group, rounds, delta, accountant) for group in mechanism.groups}


def _price(
    mechanism: Mechanism, group: PrivacyGroup, rounds: int, delta: float, accountant: Accountant
) -> EpsilonReport:
    spent = privacy_cost(mechanism, group, rounds)
    epsilon = math.inf if spent.noise_multiplier == 0 else compose([spent], delta, accountant)
    return make_report(group.name, epsilon, delta, spent, accountant)


def make_report(
    group: str, epsilon: float, delta: float, spent: PrivacyCost, accountant: str, tuning: str = ""
) -> EpsilonReport:
    """An epsilon beside what it rests on."""
    multiplier, rate, sampling, rounds = spent
    return EpsilonReport(
        group, epsilon, delta, multiplier, rate, rounds, ADJACENCY[sampling], sampling, accountant, tuning
    )


def epsilon(mechanism: Mechanism, rounds: int, delta: float, accountant: Accountant = "rdp") -> dict[str, float]:
    """Each group's epsilon, against someone who knows every other group's data: infinity for those who opted out."""
    return {name: price.epsilon for name, price in epsilon_reports(mechanism, rounds, delta, accountant).items()}


def reports_by_accountant(
    mechanism: Mechanism, rounds: int, delta: float
) -> list[tuple[EpsilonReport, EpsilonReport | None]]:
    """Each group's price by RDP and by PLD; None where there is no PLD, that is for fixed cohorts."""
    rdp = epsilon_reports(mechanism, rounds, delta, "rdp")
    pld = epsilon_reports(mechanism, rounds, delta, "pld") if mechanism.sampling == "poisson" else {}
    return [(price, pld.get(name)) for name, price in rdp.items()]

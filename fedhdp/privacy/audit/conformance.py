"""The conformance kit: does someone's release of updates keep the Gaussian mechanism that it claims?

It calls a function ``(cohort, updates, seed) → released update`` and measures: the noise, how far one client moves the
release, and for an adaptive clip the next clip. Rounds have fresh seeds. What the function does inside is not looked at.

Axis letters: C clients, P parameters, T rounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from fedhdp.errors import require
from fedhdp.privacy.audit import meter
from fedhdp.privacy.audit.bounds import Scores, mu_of, threshold_bound
from fedhdp.privacy.audit.meter import Check

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Release = Callable[[Integers, NDArray[np.float32], int], Any]

TINY = 1e-3  # norm of updates that leave the noise alone, in clips
LARGE = 1e3  # norm of an update that must be clipped, in clips


class ReleaseClaim(msgspec.Struct, frozen=True):
    """What a release claims.

    Args:
        clip: The norm to which updates are clipped.
        noise_multiplier: The noise on the sum of updates, over the clip.
        cohort_size: The number by which the sum is divided.
        adaptive: Whether the function returns the next clip too, as (update, clip), by which it moves towards the norms.
        fixed_cohort: Whether the function only takes cohorts of exactly that size.
    """

    clip: float
    noise_multiplier: float
    cohort_size: int
    adaptive: bool = False
    fixed_cohort: bool = False

    def __post_init__(self) -> None:
        require(0 < self.clip < math.inf, "clip", self.clip, "finite and above 0")
        require(0 < self.noise_multiplier < math.inf, "noise_multiplier", self.noise_multiplier, "finite and above 0")
        require(self.cohort_size >= 2, "cohort_size", self.cohort_size, "at least 2")


class ConformanceReport(msgspec.Struct, frozen=True):
    """What the kit measured of a release."""

    name: str
    checks: list[Check]
    holds: bool

    def failed(self) -> list[str]:
        """The names of the checks that failed."""
        return [check.name for check in self.checks if not check.holds]


def check_release(
    function: Release,
    claim: ReleaseClaim,
    *,
    name: str = "",
    parameters: int = 4096,
    rounds: int = 40,
    confidence: float = 0.999,
    seed: int = 0,
) -> ConformanceReport:
    """Check a function that releases the mean of a cohort's clipped updates with noise.

    Args:
        function: Called with the clients' numbers, their updates (one row each) and a seed that is new in every call. It
            returns the released update or, with an adaptive clip, a pair of it and the next clip; every call begins with the
            clip that is claimed. Its noise may come from the seed or from anywhere else.
        claim: What it claims.
        name: Its name in the report.
        parameters: How many parameters an update has.
        rounds: How many calls a measurement takes.
        confidence: The probability that a function that keeps its claim passes, at least.
        seed: The seed of the kit's own coins; those of the calls follow from it.

    Returns:
        The measurements. One that needs another size of cohort is left out where the claim fixes it.

    Raises:
        InvalidValueError: If a value is out of range.
    """
    smallest = max(64, 2 * claim.cohort_size)
    require(parameters >= smallest, "parameters", parameters, f"at least {smallest}")
    require(rounds >= 4, "rounds", rounds, "at least 4")
    require(0.5 <= confidence < 1, "confidence", confidence, "at least 0.5 and below 1")
    kit = _Kit(function, claim, parameters, rounds, seed)
    checks = kit.noise_checks()
    checks += [kit.clip_check(), kit.attack_check(1 - confidence), kit.counts_check()]
    if not claim.fixed_cohort:
        checks += kit.denominator_checks()
    checks += [kit.survival_check("zero update", 0.0), kit.survival_check("update that is not finite", math.nan)]
    if claim.adaptive:
        checks += [kit.bit_check(), kit.next_clip_check()]
    checks = meter.judge(checks, 1 - confidence)
    return ConformanceReport(name, checks, all(check.holds for check in checks))


class _Kit:
    """The measurements of one function."""

    def __init__(self, function: Release, claim: ReleaseClaim, parameters: int, rounds: int, seed: int):
        self.function, self.claim, self.parameters, self.rounds = function, claim, parameters, rounds
        self.rng = np.random.default_rng(seed)
        self.cohort = np.arange(claim.cohort_size)
        self.stddev = claim.noise_multiplier * claim.clip / claim.cohort_size

    def release(self, update_CP: Floats, cohort: Integers | None = None) -> tuple[Floats, float]:
        """One call of the function: the released update, and the next clip or NaN."""
        cohort = self.cohort if cohort is None else cohort
        released = self.function(cohort, update_CP.astype(np.float32), int(self.rng.integers(2**31)))
        update, clip = released if self.claim.adaptive else (released, math.nan)
        return np.asarray(update, np.float64).ravel(), float(clip)

    def spread(self, norm: float, clients: int | None = None) -> Floats:
        """Updates of this norm in clips, each in a direction of its own in the second half of the parameters."""
        clients = self.claim.cohort_size if clients is None else clients
        update_CP, half = np.zeros((clients, self.parameters)), self.parameters // 2
        update_CP[np.arange(clients), half + np.arange(clients) % half] = norm * self.claim.clip
        return update_CP

    def noise(self, norm: float, cohort: Integers | None = None) -> Floats:
        """Standardized noise of several rounds, at the parameters where all updates are zero."""
        clients = None if cohort is None else len(cohort)
        half = self.parameters // 2
        return np.array(
            [self.release(self.spread(norm, clients), cohort)[0][:half] / self.stddev for _ in range(self.rounds)]
        )

    def noise_checks(self) -> list[Check]:
        """The noise of rounds, all of whose updates are far within the clip."""
        noise_TP = self.noise(TINY)
        step = 2.0**-22  # of a number in single precision between 2 and 4
        rows = 2**20 // self.parameters + 1
        tail = [self.release(self.spread(TINY))[0][: self.parameters // 2] / self.stddev for _ in range(rows)]
        return [*meter.noise_checks(noise_TP), meter.tail_check(np.concatenate(tail).astype(np.float32), step)]

    def clip_check(self) -> Check:
        """How far clients with huge updates move the release, in clips over the size of the cohort."""
        return self._moved("clip", "a huge update moves the sum, in clips", self.cohort, LARGE, self.cohort)

    def counts_check(self) -> Check:
        """How far the last client moves the release: an adapter gives it more examples than others."""
        about = "the last client moves the sum, in clips"
        return self._moved("weight of a client", about, self.cohort[-1:], 1.0, self.cohort)

    def _moved(self, name: str, about: str, moving: Integers, norm: float, cohort: Integers) -> Check:
        """How far the updates of these clients, of this norm, move the release, each at a coordinate of its own."""
        moved, expected = [], 1 / self.claim.noise_multiplier
        for _ in range(self.rounds):
            update_CP = self.spread(TINY, len(cohort))
            update_CP[moving] = 0
            update_CP[moving, moving] = norm * self.claim.clip
            moved.append(self.release(update_CP, cohort)[0][moving] / self.stddev)
        mean, number = float(np.mean(moved)), self.rounds * len(moving)
        p_value = math.erfc(
            max((mean - expected) * math.sqrt(number), 0.0) / math.sqrt(2)
        )  # to move it less is no fault
        return meter.make_check(name, mean * self.claim.noise_multiplier, 1.0, p_value, about)

    def attack_check(self, level: float) -> Check:
        """Canaries with known coins: the lower bound on mu by Clopper–Pearson."""
        scores: dict[bool, list[Floats]] = {False: [], True: []}
        size = min(self.claim.cohort_size, self.parameters // 2)
        for _ in range(self.rounds):
            coin_C = self.rng.random(self.claim.cohort_size) < 0.5
            update_CP = self.spread(TINY)
            update_CP[coin_C] = 0
            update_CP[coin_C, np.flatnonzero(coin_C) % size] = LARGE * self.claim.clip
            released = self.release(update_CP)[0][:size] / self.stddev
            for coin in (False, True):
                scores[coin].append(released[coin_C[:size] == coin])
        both = Scores(np.concatenate(scores[False]), np.concatenate(scores[True]))
        bound = threshold_bound(both, level / 12, mu_of, self.rng) or 0.0
        claimed = 1 / self.claim.noise_multiplier
        return meter.make_check(
            "known coins", bound, claimed, float(bound <= claimed), "lower bound on mu, at most that"
        )

    def denominator_checks(self) -> list[Check]:
        """The noise, and how far a client moves the release, where half of the cohort comes.

        With a public denominator they are as before.
        """
        half = self.cohort[: self.claim.cohort_size // 2]
        noise = meter.variance_check(self.noise(TINY, half), "noise, half of the cohort")
        moved = self._moved("clip, half of the cohort", "a huge update moves the sum, in clips", half, LARGE, half)
        return [noise, moved]

    def survival_check(self, name: str, value: float) -> Check:
        """Whether one client's odd update leaves the release finite."""
        update_CP = self.spread(TINY)
        update_CP[0] = value
        try:
            with np.errstate(all="ignore"):
                finite = float(np.mean(np.isfinite(self.release(update_CP)[0])))
        except (ArithmeticError, ValueError, RuntimeError, AssertionError):
            finite = 0.0
        return meter.make_check(name, finite, 1.0, float(finite == 1), "share of the release that is finite")

    def bit_check(self) -> Check:
        """Whether the clip falls where all updates are within it, and rises where none is."""
        within, beyond = (
            float(np.mean([math.log(self.release(self.spread(norm))[1] / self.claim.clip) for _ in range(8)]))
            for norm in (TINY, LARGE)
        )
        right = within < 0 < beyond
        return meter.make_check(
            "clip bit", beyond - within, 0.2, float(right), "log of clips: beyond less within, above 0"
        )

    def next_clip_check(self) -> Check:
        """The noise of rounds whose next clip is larger, over that of rounds where it is smaller."""
        half = self.parameters // 2
        variances = [float(np.mean(self.noise(norm) ** 2)) for norm in (TINY, LARGE)]
        ratio = math.sqrt(variances[1] / variances[0])
        z = math.log(ratio) * math.sqrt(self.rounds * half)
        p_value = math.erfc(abs(z) / math.sqrt(2))
        return meter.make_check("noise by this clip", ratio, 1.0, p_value, "noise, updates beyond the clip over within")

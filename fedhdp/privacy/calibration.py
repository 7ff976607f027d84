"""From an epsilon to the noise that keeps it: the inverse of ``accounting``, by searching it.

A price falls as noise grows, so the search keeps a noise that is enough and one that is too little until the price of
the first is within half a percent of the target. What comes back is always the one that is enough.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping

import msgspec

from fedhdp.errors import require
from fedhdp.mechanism import MAX_VALUE, SENSITIVITY, Mechanism, PrivacyGroup, Sampling
from fedhdp.privacy.accounting import MIN_NOISE_MULTIPLIER, Accountant, compose, gaussian_cost

ROUNDS_BY_PLD = 100_000


def min_noise_multiplier(price: Callable[[float], float], target: float) -> float:
    """The least noise whose price is at most the target and, where price is continuous, at least 99.5% of it."""
    low = high = 0.0  # logarithms of multipliers, since the price is close to a power of the multiplier
    while (above := price(math.exp(low))) <= target and math.exp(low) > MIN_NOISE_MULTIPLIER:
        low -= 1
    while (below := price(math.exp(high))) > target:
        require(
            math.exp(high) < MAX_VALUE,
            "epsilon",
            target,
            "larger: no noise can be shown to keep this one at such a delta",
        )
        high += 1
    while below < 0.995 * target and high - low > 1e-7:
        share = 0.5
        if below > 0 and above < math.inf:
            share = math.log(above / (0.9975 * target)) / math.log(above / below)
        middle = low + min(max(share, 0.1), 0.9) * (high - low)
        if (cost := price(math.exp(middle))) <= target:
            high, below = middle, cost
        else:
            low, above = middle, cost
    return math.exp(high)


@functools.lru_cache(maxsize=4096)
def noise_multiplier_for(
    epsilon: float,
    sampling_rate: float,
    rounds: int,
    delta: float,
    accountant: Accountant = "rdp",
    sampling: Sampling = "poisson",
) -> float:
    """The noise that keeps rounds within an epsilon, never above and within 1% of it; 0 for infinity."""
    require(epsilon > 0, "epsilon", epsilon, "above 0")
    once = gaussian_cost(math.inf, sampling_rate, rounds, sampling)
    if epsilon == math.inf:
        return 0.0
    require(sampling_rate > 0, "sampling_rate", sampling_rate, "above 0 where noise is asked for")
    require(rounds > 0, "rounds", rounds, "above 0 where noise is asked for")
    if accountant == "pld":
        rule = f"at most {ROUNDS_BY_PLD:,} where noise is looked for by PLD, or it takes minutes"
        require(rounds <= ROUNDS_BY_PLD, "rounds", rounds, rule)
    return min_noise_multiplier(
        lambda noise: compose([once._replace(noise_multiplier=noise)], delta, accountant), epsilon
    )


def calibrate(
    mechanism: Mechanism,
    targets: Mapping[str, float],
    rounds: int,
    delta: float,
    accountant: Accountant | None = None,
) -> Mechanism:
    """The mechanism with each named group's noise multiplier chosen for its epsilon; infinity is opting out.

    The multiplier that a group is promised costs at most its target and at least 99% of it. What the group really gets,
    and so ``epsilon`` of the result, never costs more, and costs less where other groups' noise serves it too or where
    its weight hides it. Unless told otherwise it is priced by PLD, and by RDP where cohorts are fixed.
    """
    accountant = accountant or ("pld" if mechanism.sampling == "poisson" else "rdp")
    unknown = sorted(set(targets) - {group.name for group in mechanism.groups})
    require(not unknown, "targets", unknown, f"groups of the mechanism ({', '.join(g.name for g in mechanism.groups)})")

    def promised(group: PrivacyGroup) -> PrivacyGroup:
        if group.name not in targets:
            return group
        rate, sampling = mechanism.sampling_probability(group), mechanism.sampling
        noise = noise_multiplier_for(targets[group.name], rate, rounds, delta, accountant, sampling)
        return msgspec.structs.replace(group, noise_multiplier=noise * SENSITIVITY[sampling])

    return msgspec.structs.replace(mechanism, groups=tuple(promised(group) for group in mechanism.groups))

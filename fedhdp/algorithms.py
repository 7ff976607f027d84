"""FedHDP and its special cases: each takes the mechanism that clients chose and returns the one that is run.

There is one code path. A baseline is FedHDP with other numbers, so comparisons differ in those numbers alone.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from fedhdp.mechanism import AdaptiveClip, Mechanism, PrivacyGroup

replace = msgspec.structs.replace


def _with_groups(mechanism: Mechanism, change: Callable[[PrivacyGroup], PrivacyGroup], **others: object) -> Mechanism:
    return replace(mechanism, groups=tuple(change(group) for group in mechanism.groups), **others)


def fedhdp(mechanism: Mechanism) -> Mechanism:
    """Each group its own noise and its own weight."""
    return mechanism


def hdp_fedavg(mechanism: Mechanism) -> Mechanism:
    """Each group its own noise, every update the same weight."""
    return _with_groups(mechanism, lambda group: replace(group, weight=1.0))


def dp_fedavg(mechanism: Mechanism) -> Mechanism:
    """Every group the strictest group's noise, added once, every update the same weight."""
    change = lambda group: replace(group, weight=1.0, noise_multiplier=mechanism.max_noise_multiplier)  # noqa: E731
    return _with_groups(mechanism, change, noise="shared")


def non_private(mechanism: Mechanism) -> Mechanism:
    """No noise at all, every update the same weight."""
    clip = replace(mechanism.clip, bit_noise_stddev=0.0) if isinstance(mechanism.clip, AdaptiveClip) else mechanism.clip
    return _with_groups(mechanism, lambda group: replace(group, weight=1.0, noise_multiplier=0.0), clip=clip)


def local_only(mechanism: Mechanism) -> Mechanism:
    """Nothing reaches the server, bits for its clip neither: every client trains its personal model alone."""
    change = lambda group: replace(group, weight=0.0, pull=0.0)  # noqa: E731
    return _with_groups(non_private(mechanism), change, clip=mechanism.initial_clip)


ALGORITHMS: dict[str, Callable[[Mechanism], Mechanism]] = {
    "fedhdp": fedhdp,
    "hdp_fedavg": hdp_fedavg,
    "dp_fedavg": dp_fedavg,
    "non_private": non_private,
    "local_only": local_only,
}

"""FedHDP and its special cases. Each takes the mechanism that the clients chose and returns the mechanism that is run.

There is one code path: a baseline is FedHDP with other numbers, so that comparisons differ in those numbers alone.

| algorithm     | noise multiplier of group j | weight r_j | pull λ_j | clip               |
| ------------- | --------------------------- | ---------- | -------- | ------------------ |
| `fedhdp`      | z_j                         | r_j        | λ_j      | as chosen          |
| `hdp_fedavg`  | z_j                         | 1          | λ_j      | as chosen          |
| `dp_fedavg`   | max_i z_i, shared           | 1          | λ_j      | as chosen          |
| `non_private` | 0                           | 1          | λ_j      | without bit noise  |
| `local_only`  | 0                           | 0          | 0        | fixed              |
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from fedhdp.clips import AdaptiveClip, LayerClip
from fedhdp.mechanism import Mechanism


def fedhdp(mechanism: Mechanism) -> Mechanism:
    """FedHDP: each group has its own noise multiplier z_j and its own weight r_j.

    update = (Σ_j r_j Σ_{i∈j} clipped_i + noise) / Σ_j r_j q_j N_j
    """
    return mechanism


def hdp_fedavg(mechanism: Mechanism) -> Mechanism:
    """HDP-FedAvg: each group has its own noise multiplier z_j; every update has weight 1."""
    groups = tuple(replace(group, weight=1.0) for group in mechanism.groups)
    return replace(mechanism, groups=groups)


def dp_fedavg(mechanism: Mechanism) -> Mechanism:
    """DP-FedAvg: every group has the largest noise multiplier, max_j z_j, added once; every update has weight 1."""
    strictest = mechanism.max_noise_multiplier
    groups = tuple(replace(group, weight=1.0, noise_multiplier=strictest) for group in mechanism.groups)
    return replace(mechanism, groups=groups, noise="shared")


def non_private(mechanism: Mechanism) -> Mechanism:
    """Non-Private: no noise on updates or clip bits; every update has weight 1. It protects nobody."""
    clip = mechanism.clip
    if isinstance(clip, AdaptiveClip | LayerClip):
        clip = replace(clip, bit_noise_stddev=0.0)
    groups = tuple(replace(group, weight=1.0, noise_multiplier=0.0) for group in mechanism.groups)
    return replace(mechanism, groups=groups, clip=clip)


def local_only(mechanism: Mechanism) -> Mechanism:
    """Local training: weight 0 and a fixed clip, so that nothing reaches the server; personal models have pull 0."""
    groups = tuple(replace(group, weight=0.0, noise_multiplier=0.0, pull=0.0) for group in mechanism.groups)
    clip = mechanism.clip
    if isinstance(clip, AdaptiveClip | LayerClip):
        clip = replace(clip, learning_rate=0.0)
    return replace(mechanism, groups=groups, clip=clip)


ALGORITHMS: dict[str, Callable[[Mechanism], Mechanism]] = {
    "fedhdp": fedhdp,
    "hdp_fedavg": hdp_fedavg,
    "dp_fedavg": dp_fedavg,
    "non_private": non_private,
    "local_only": local_only,
}
ALGORITHM_NAMES = {  # in tables
    "fedhdp": "FedHDP",
    "hdp_fedavg": "HDP-FedAvg",
    "dp_fedavg": "DP-FedAvg",
    "non_private": "Non-Private",
    "local_only": "Local-Only",
}

"""The privacy promise as frozen values: which privacy each group of clients chose, and the noise that it requires.

The server obeys a ``Mechanism``, accounting prices it, the ledger records it, the report prints it. What a group's epsilon
depends on is computed here and nowhere else: who is sampled with which probability, how far one client moves each released
sum, and how much noise each sum gets. Accounting composes these numbers over rounds; the engine rounds the norms of updates
up, so that no clipped update is longer than the clip.

| paper      | name                                | meaning                                                            |
| ---------- | ----------------------------------- | ------------------------------------------------------------------ |
| C_j        | ``PrivacyGroup``                    | the clients who chose the same privacy level                       |
| N_j        | ``PrivacyGroup.clients``            | how many they are                                                  |
| z_j        | ``noise_multiplier``                | noise multiplier of a round's two queries together; 0: opted out   |
| q_j        | ``sampling_rate``                   | the probability that a client takes part in a round                |
| r_j        | ``weight``                          | the weight of one of the group's updates in the sum                |
| λ_j        | ``pull``                            | how strongly personal models are pulled towards the global one     |
| S          | ``clip``                            | the norm to which longer updates are scaled                        |
| κ          | ``AdaptiveClip.quantile``           | the quantile of the update norms that the clip follows             |
| η_b        | ``AdaptiveClip.learning_rate``      | how fast the clip follows it                                       |
| σ_b        | ``bit_noise_stddev``                | standard deviation of the noise on the sum of the clip bits        |
| z_Δj       | ``update_noise_multiplier``         | noise multiplier of the update alone                               |
| σ          | ``update_noise_stddev``             | standard deviation of the noise on the weighted sum, in clips      |
| Σ r_j q_j N_j | ``expected_weight``              | the public denominator of the update                               |
| Σ q_j N_j  | ``expected_cohort_size``            | the public denominator of the clip bits                            |
| –          | ``l2_sensitivity``                  | how far one client moves the weighted sum, in clips                |
| –          | ``effective_noise_multiplier``      | the noise multiplier that a group gets: at least z_j               |

Axis letters: G groups.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Literal, NamedTuple

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from fedhdp.errors import require

Noise = Literal["shared", "per_group"]
Sampling = Literal["poisson", "fixed"]
SERVER = "server"  # the group name of the server's own metrics
MAX_VALUE = 1e9  # of a noise multiplier, a weight, a pull or a clip, so that nothing overflows
MIN_NOISE, MIN_WEIGHT, MIN_CLIP = 1e-6, 1e-15, 1e-9  # so that noise is never too small for single precision
FLOAT32_UNIT_ROUNDOFF = 2.0**-24  # the largest relative error of rounding to single precision
ROUND_UP_FACTOR = 1 + 2.0**-22  # so that rounding to single precision never leaves less noise than required

# How many clients' contributions differ between neighbouring data sets: with Poisson sampling a client is added or removed,
# with cohorts of fixed size one is replaced.
SENSITIVITY: dict[str, int] = {"poisson": 1, "fixed": 2}


class PrivacyGroup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The clients who chose the same privacy level.

    Args:
        name: Their name in tables; not "server".
        clients: How many they are.
        noise_multiplier: Noise over sensitivity for one round, update and clip bit together. 0: they opted out.
        sampling_rate: The probability that a client takes part in a round.
        weight: The weight of their updates in the sum, relative to other groups'. The weights of least error are set by
            ``fedhdp.theory.with_optimal_weights``.
        pull: How strongly their personal models are pulled towards the global one.

    Raises:
        InvalidValueError: If a field is out of range.
    """

    name: str
    clients: int
    noise_multiplier: float
    sampling_rate: float
    weight: float = 1.0
    pull: float = 0.05

    def __post_init__(self) -> None:
        printable = self.name not in ("", SERVER) and self.name.isprintable()
        require(printable, "name", self.name, f"printable, not empty and not {SERVER!r}")
        require(self.clients >= 1, "clients", self.clients, "at least 1")
        noise_ok = self.noise_multiplier == 0 or MIN_NOISE <= self.noise_multiplier <= MAX_VALUE
        require(noise_ok, "noise_multiplier", self.noise_multiplier, f"0, or between {MIN_NOISE:g} and {MAX_VALUE:g}")
        require(0 <= self.sampling_rate <= 1, "sampling_rate", self.sampling_rate, "between 0 and 1")
        weight_ok = self.weight == 0 or MIN_WEIGHT <= self.weight <= MAX_VALUE
        require(weight_ok, "weight", self.weight, f"0, or between {MIN_WEIGHT:g} and {MAX_VALUE:g}")
        require(0 <= self.pull <= MAX_VALUE, "pull", self.pull, f"between 0 and {MAX_VALUE:g}")

    @property
    def opted_out(self) -> bool:
        """Whether these clients chose no privacy."""
        return self.noise_multiplier == 0


class AdaptiveClip(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A clip that follows a quantile of the update norms, learnt from noised bits (Andrew et al., 2021).

    Args:
        initial: The clip of the first round.
        quantile: The quantile of the update norms that it follows.
        learning_rate: How fast it follows.
        bit_noise_stddev: Noise on the sum of the clip bits. None: see ``Mechanism.bit_noise_stddev``.

    Raises:
        InvalidValueError: If a field is out of range.
    """

    initial: float
    quantile: float = 0.5
    learning_rate: float = 0.2
    bit_noise_stddev: float | None = None

    def __post_init__(self) -> None:
        in_range = MIN_CLIP <= self.initial <= MAX_VALUE
        require(in_range, "initial", self.initial, f"between {MIN_CLIP:g} and {MAX_VALUE:g}")
        require(0 <= self.quantile <= 1, "quantile", self.quantile, "between 0 and 1")
        require(0 <= self.learning_rate < math.inf, "learning_rate", self.learning_rate, "finite and at least 0")
        if self.bit_noise_stddev is not None:
            in_range = 0 <= self.bit_noise_stddev < math.inf
            require(in_range, "bit_noise_stddev", self.bit_noise_stddev, "finite and at least 0")


class RoundParams(NamedTuple):
    """The numbers of one round, for the server. They are arguments of one compiled program, whatever the mechanism."""

    weight_G: NDArray[np.float32]
    pull_G: NDArray[np.float32]
    update_noise_stddev: np.float32  # of the noise on the weighted sum, in clips
    bit_noise_stddev: np.float32  # of the noise on the sum of centred bits
    expected_weight: np.float32  # the public denominator of the update
    expected_cohort_size: np.float32  # the public denominator of the bits
    quantile: np.float32
    clip_learning_rate: np.float32


class Mechanism(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The privacy groups, and how updates are sampled, clipped, noised and weighted.

    Args:
        groups: The privacy groups. They take the clients of a data set in order: the first group the first clients.
        clip: The norm to which updates are clipped, fixed or adaptive.
        noise: "shared" adds one noise, large enough for the group that requires most. "per_group" adds one noise for each
            group, as the paper has it, so that each group's own sum could be released too.
        sampling: "poisson" samples every client independently and divides by the expected cohort. "fixed" samples a fixed
            number of each group's clients, as the paper has it.

    Raises:
        InvalidValueError: If a field is out of range, or the clip bits alone cost more than a group's noise multiplier.
    """

    groups: tuple[PrivacyGroup, ...]
    clip: float | AdaptiveClip
    noise: Noise = "shared"
    sampling: Sampling = "poisson"

    def __post_init__(self) -> None:
        require(len(self.groups) >= 1, "groups", self.groups, "one or more")
        (name, count), *_ = Counter(group.name for group in self.groups).most_common(1)
        require(count == 1, "groups", name, "of different names")
        require(self.noise in ("shared", "per_group"), "noise", self.noise, "'shared' or 'per_group'")
        require(self.sampling in ("poisson", "fixed"), "sampling", self.sampling, "'poisson' or 'fixed'")
        if not isinstance(self.clip, AdaptiveClip):
            in_range = MIN_CLIP <= self.clip <= MAX_VALUE
            require(in_range, "clip", self.clip, f"between {MIN_CLIP:g} and {MAX_VALUE:g}")
        half = self.max_noise_multiplier / 2
        if isinstance(self.clip, AdaptiveClip) and half > 0:
            rule = f"above half the largest noise multiplier ({half:g}), or the clip bits alone cost more"
            require(self.bit_noise_stddev > half, "bit_noise_stddev", self.bit_noise_stddev, rule)

    @property
    def clients(self) -> int:
        """The number of clients of all groups."""
        return sum(group.clients for group in self.groups)

    def expected_cohort_size(self, group: PrivacyGroup | None = None) -> float:
        """The number of clients of a group (None: of all) in a round: expected with Poisson sampling, exact if fixed."""
        if group is None:
            return sum(self.expected_cohort_size(group) for group in self.groups)
        expected = group.sampling_rate * group.clients
        return expected if self.sampling == "poisson" else round(expected)

    def sampling_probability(self, group: PrivacyGroup) -> float:
        """The probability that a client of the group takes part in a round."""
        return group.sampling_rate if self.sampling == "poisson" else self.expected_cohort_size(group) / group.clients

    @property
    def expected_weight(self) -> float:
        """The expected weight of a round's updates together, Σ_j r_j q_j N_j: the public denominator of their sum."""
        return sum(group.weight * self.expected_cohort_size(group) for group in self.groups)

    @property
    def sampled_groups(self) -> tuple[PrivacyGroup, ...]:
        """The groups whose clients can be sampled. The others require no noise, as nothing of theirs is used."""
        return tuple(group for group in self.groups if self.expected_cohort_size(group) > 0)

    @property
    def max_noise_multiplier(self) -> float:
        """The largest noise multiplier of a group that can be sampled."""
        return max((group.noise_multiplier for group in self.sampled_groups), default=0.0)

    @property
    def client_group_indices(self) -> NDArray[np.int32]:
        """The index of each client's group."""
        return np.repeat(np.arange(len(self.groups), dtype=np.int32), [group.clients for group in self.groups])

    @property
    def without_pulls(self) -> Mechanism:
        """The mechanism as the server sees it: personal models, and so pulls, never reach the server."""
        return replace(self, groups=tuple(replace(group, pull=0.0) for group in self.groups))

    @property
    def cohort_distribution(self) -> tuple[object, ...]:
        """What decides who is sampled: mechanisms with the same value can draw the same cohorts."""
        return self.sampling, tuple((group.clients, group.sampling_rate) for group in self.groups)

    @property
    def initial_clip(self) -> float:
        """The clip of the first round."""
        return self.clip.initial if isinstance(self.clip, AdaptiveClip) else self.clip

    @property
    def bit_noise_stddev(self) -> float:
        """Standard deviation of the noise on the sum of the clip bits, 0 with a fixed clip.

        By default a twentieth of the cohort, or twice the largest noise multiplier if that is more: the bits then cost
        little beside the update.
        """
        if not isinstance(self.clip, AdaptiveClip):
            return 0.0
        if self.clip.bit_noise_stddev is not None:
            return self.clip.bit_noise_stddev
        if self.max_noise_multiplier == 0:
            return 0.0
        return max(self.expected_cohort_size() / 20, 2 * self.max_noise_multiplier)

    def update_noise_multiplier(self, group: PrivacyGroup) -> float:
        """The noise multiplier of the update alone, z_Δ, such that update and clip bit together have the group's."""
        if group.opted_out or not isinstance(self.clip, AdaptiveClip) or group not in self.sampled_groups:
            return group.noise_multiplier
        precision: float = group.noise_multiplier**-2 - (2 * self.bit_noise_stddev) ** -2
        return float(precision**-0.5)

    def l2_sensitivity(self, group: PrivacyGroup) -> float:
        """How far one client of the group can move the weighted sum, in clips: its weight, and the sum's rounding.

        A sum in single precision is rounded at every client, up or down, by up to 2**-24 of its value. With n clients that
        adds up to about √n times as much: little, unless others weigh far more. n is a number that is hardly ever exceeded.
        """
        if group.weight == 0:
            return 0.0
        sizes = [self.expected_cohort_size(group) for group in self.groups]
        max_sizes = [size + 4 * math.sqrt(size) for size in sizes]
        max_weight = sum(group.weight * size for group, size in zip(self.groups, max_sizes, strict=True))
        return group.weight + math.sqrt(sum(max_sizes)) * max_weight * FLOAT32_UNIT_ROUNDOFF

    @property
    def update_noise_stddev(self) -> float:
        """Standard deviation of the noise on the weighted sum of clipped updates, in clips."""
        required = [self.l2_sensitivity(group) * self.update_noise_multiplier(group) for group in self.sampled_groups]
        return max(required, default=0.0) if self.noise == "shared" else math.hypot(*required)

    def effective_noise_multiplier(self, group: PrivacyGroup) -> float:
        """The noise multiplier that the group gets for a round, update and clip bit together: at least its own.

        Returns:
            0 for a group that opted out, infinity for one that no released sum depends on.
        """
        if group.weight == 0 and not isinstance(self.clip, AdaptiveClip):
            return math.inf
        if group.opted_out:
            return 0.0
        if group not in self.sampled_groups:
            return math.inf
        if group.weight == 0:
            update = math.inf
        elif self.noise == "shared":
            update = self.update_noise_stddev / self.l2_sensitivity(group)
        else:
            update = self.update_noise_multiplier(group)
        bits = 2 * self.bit_noise_stddev if isinstance(self.clip, AdaptiveClip) else math.inf
        precision: float = update**-2 + bits**-2
        return float(precision**-0.5) if precision > 0 else math.inf

    def accounted_noise_multiplier(self, group: PrivacyGroup) -> float:
        """The effective noise multiplier over the distance between neighbouring data sets, as accounting takes it."""
        return self.effective_noise_multiplier(group) / SENSITIVITY[self.sampling]

    @property
    def round_params(self) -> RoundParams:
        """The numbers of one round, in single precision."""
        clip = self.clip if isinstance(self.clip, AdaptiveClip) else AdaptiveClip(self.initial_clip, learning_rate=0.0)
        return RoundParams(
            weight_G=np.array([group.weight for group in self.groups], np.float32),
            pull_G=np.array([group.pull for group in self.groups], np.float32),
            update_noise_stddev=np.float32(self.update_noise_stddev * ROUND_UP_FACTOR),
            bit_noise_stddev=np.float32(self.bit_noise_stddev * ROUND_UP_FACTOR),
            expected_weight=np.float32(self.expected_weight),
            expected_cohort_size=np.float32(self.expected_cohort_size()),
            quantile=np.float32(clip.quantile),
            clip_learning_rate=np.float32(clip.learning_rate),
        )

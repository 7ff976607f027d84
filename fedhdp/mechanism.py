"""The privacy promise as frozen values: which privacy each group of clients chose, and the noise that it requires.

The server obeys a ``Mechanism``, accounting prices it, the ledger records it, the report prints it. What a group's epsilon
depends on is computed here and nowhere else: who is sampled with which probability, how far one client moves each released
sum, and how much noise each sum gets. Accounting composes these numbers over rounds; the engine rounds the norms of updates
up, so that no clipped update is longer than the clip. With exact arithmetic updates are integers (``exact.py``).

| paper      | name                                | meaning                                                            |
| ---------- | ----------------------------------- | ------------------------------------------------------------------ |
| C_j        | ``PrivacyGroup``                    | the clients who chose the same privacy level                       |
| N_j        | ``PrivacyGroup.clients``            | how many they are                                                  |
| z_j        | ``noise_multiplier``                | noise multiplier of a round's two queries together; 0: opted out   |
| q_j        | ``sampling_rate``                   | the probability that a client takes part in a round                |
| r_j        | ``weight``                          | the weight of one of the group's updates in the sum                |
| λ_j        | ``pull``                            | how strongly personal models are pulled towards the global one     |
| S          | ``clip``                            | the norm to which longer updates are scaled                        |
| S_1 … S_L  | ``LayerClip``                       | the norms to which the layers of longer updates are scaled         |
| κ          | ``AdaptiveClip.quantile``           | the quantile of the update norms that the clip follows             |
| η_b        | ``AdaptiveClip.learning_rate``      | how fast the clip follows it                                       |
| σ_b        | ``bit_noise_stddev``                | standard deviation of the noise on the sum of each clip bit        |
| z_Δj       | ``update_noise_multiplier``         | noise multiplier of the update alone                               |
| σ          | ``update_noise_stddev``             | standard deviation of the noise on the weighted sum, in clips      |
| Σ r_j q_j N_j | ``expected_weight``              | the public denominator of the update                               |
| Σ q_j N_j  | ``expected_cohort_size``            | the public denominator of the clip bits                            |
| –          | ``l2_sensitivity``                  | how far one client moves the weighted sum, in clips                |
| √L / 2     | ``bit_l2_sensitivity``              | how far one client moves the sums of the clip bits                 |
| –          | ``effective_noise_multiplier``      | the noise multiplier that a group gets: at least z_j               |

With a ``LayerClip`` of L layers, sums are "in clips" where each layer's part is divided by its own clip. A client moves them
by at most its weight times √L, and the noise on layer l has standard deviation S_l·σ.

Axis letters: G groups, L layers.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from typing import Literal, NamedTuple, TypeAlias

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from fedhdp.clips import AdaptiveClip, Clip, LayerClip, parse_clip
from fedhdp.errors import require

Noise = Literal["shared", "per_group"]
Sampling = Literal["poisson", "fixed"]
Arithmetic = Literal["float32", "exact"]
SERVER = "server"  # the group name of the server's own metrics
MAX_VALUE = 1e9  # of a noise multiplier, a weight or a pull, so that nothing overflows
MIN_NOISE, MIN_WEIGHT = 1e-6, 1e-15  # so that noise is never too small for single precision
FLOAT32_UNIT_ROUNDOFF = 2.0**-24  # the largest relative error of rounding to single precision
ROUND_UP_FACTOR = 1 + 2.0**-22  # so that rounding to single precision never leaves less noise than required
GRID_BITS = (
    26  # the largest weight and the noise have at most this many bits on the grid: squared norms stay below 2**53
)
MAX_CLIENTS = 10**10  # of a group: so that sums of updates, of GRID_BITS each, are 64-bit integers
MAX_BIT_NOISE = 1e13  # so that noised counts of clip bits are 64-bit integers

# How many clients' contributions differ between neighbouring data sets: with Poisson sampling a client is added or removed,
# with cohorts of fixed size one is replaced.
SENSITIVITY: dict[str, int] = {"poisson": 1, "fixed": 2}


def check_group_name(field: str, name: str) -> None:
    """Raise ``InvalidValueError`` for a name that no group can have."""
    printable = name not in ("", SERVER) and name.isprintable()
    require(printable, field, name, f"printable, not empty and not {SERVER!r}")


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
        check_group_name("name", self.name)
        require(1 <= self.clients <= MAX_CLIENTS, "clients", self.clients, f"between 1 and {MAX_CLIENTS:,}")
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


class RoundParams(NamedTuple):
    """The numbers of one round, for the server. They are arguments of one compiled program, whatever the mechanism."""

    weight_G: NDArray[np.float32]
    pull_G: NDArray[np.float32]
    update_noise_stddev: np.float32  # of the noise on the weighted sum, in clips
    bit_noise_stddev: np.float32  # of the noise on each sum of centred bits
    expected_weight: np.float32  # the public denominator of the update
    expected_cohort_size: np.float32  # the public denominator of the bits
    quantile: np.float32
    clip_learning_rate: np.float32


class GridParams(NamedTuple):
    """The numbers of one round with exact arithmetic: clipped, weighted updates are integers, in steps of a grid.

    A step is the clip times ``step``, a power of two. Weights are multiplied before updates are rounded, so that a client
    of group g moves the sum by at most ``bound_G[g]`` steps, √L times with clips for L layers.
    """

    step: float  # of the grid, in clips
    weight_G: tuple[float, ...]  # in steps
    bound_G: tuple[int, ...]  # the largest norm of a clipped, weighted update in steps: at most weight_G
    update_noise_stddev: float  # in steps
    bit_noise_stddev: float  # of the noise on each sum of bits that are 1 or −1
    expected_weight: float
    expected_cohort_size: float
    quantile: float
    clip_learning_rate: float


class Mechanism(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The privacy groups, and how updates are sampled, clipped, noised and weighted.

    Args:
        groups: The privacy groups. A client of a data set is in the group of its level's name.
        clip: The norm to which updates are clipped: fixed, adaptive, or one for each layer.
        noise: "shared" adds one noise, large enough for the group that requires most. "per_group" adds one noise for each
            group, as the paper has it, so that each group's own sum could be released too.
        sampling: "poisson" samples every client independently and divides by the expected cohort. "fixed" samples a fixed
            number of each group's clients, as the paper has it.
        arithmetic: "float32" sums clipped updates in single precision. "exact" sums them as integers, whose sensitivity
            and noise have no rounding errors.

    Raises:
        InvalidValueError: If a field is out of range, or the clip bits alone cost more than a group's noise multiplier.
    """

    groups: tuple[PrivacyGroup, ...]
    clip: Clip
    noise: Noise = "shared"
    sampling: Sampling = "poisson"
    arithmetic: Arithmetic = "float32"

    def __post_init__(self) -> None:
        require(len(self.groups) >= 1, "groups", self.groups, "one or more")
        (name, count), *_ = Counter(group.name for group in self.groups).most_common(1)
        require(count == 1, "groups", name, "of different names")
        require(self.noise in ("shared", "per_group"), "noise", self.noise, "'shared' or 'per_group'")
        require(self.sampling in ("poisson", "fixed"), "sampling", self.sampling, "'poisson' or 'fixed'")
        require(self.arithmetic in ("float32", "exact"), "arithmetic", self.arithmetic, "'float32' or 'exact'")
        msgspec.structs.force_setattr(self, "clip", parse_clip(self.clip))
        least = self.max_noise_multiplier * self.bit_l2_sensitivity
        if self.is_adaptive and least > 0:
            rule = f"above {least:g} (the largest noise multiplier × sensitivity), or the clip bits alone cost more"
            require(self.bit_noise_stddev > least, "bit_noise_stddev", self.bit_noise_stddev, rule)
        if self.arithmetic == "exact":
            rule = f"at most {MAX_BIT_NOISE:g} where arithmetic is exact"
            require(self.bit_noise_stddev <= MAX_BIT_NOISE, "bit_noise_stddev", self.bit_noise_stddev, rule)

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
    def without_pulls(self) -> Mechanism:
        """The mechanism as the server sees it: personal models, and so pulls, never reach the server."""
        return replace(self, groups=tuple(replace(group, pull=0.0) for group in self.groups))

    @property
    def cohort_distribution(self) -> tuple[object, ...]:
        """What decides who is sampled: mechanisms with the same value can draw the same cohorts."""
        return self.sampling, self.group_sizes, tuple(group.sampling_rate for group in self.groups)

    @property
    def group_sizes(self) -> tuple[tuple[str, int], ...]:
        """The name and the number of clients of each group."""
        return tuple((group.name, group.clients) for group in self.groups)

    @property
    def layers(self) -> tuple[str, ...]:
        """The layers that are clipped one by one, in the order of their clips; none with a flat clip."""
        return tuple(self.clip.layers) if isinstance(self.clip, LayerClip) else ()

    @property
    def is_adaptive(self) -> bool:
        """Whether clips move, so that clip bits are released."""
        return not isinstance(self.clip, float) and self.clip.learning_rate > 0

    @property
    def initial_clip(self) -> NDArray[np.float32]:
        """The clip of the first round: a number, or one for each of the layers."""
        if isinstance(self.clip, LayerClip):
            return np.array([self.clip.layers[name] for name in self.layers], np.float32)
        return np.array(self.clip.initial if isinstance(self.clip, AdaptiveClip) else self.clip, np.float32)

    @property
    def clip_l2_norm(self) -> float:
        """The largest norm of a clipped update, in clips: √L, and 1 with a flat clip."""
        return math.sqrt(max(len(self.layers), 1))

    @property
    def bit_l2_sensitivity(self) -> float:
        """How far one client moves the sums of the clip bits: it sends ½ or −½ for each clip."""
        return self.clip_l2_norm / 2

    @property
    def bit_noise_stddev(self) -> float:
        """Standard deviation of the noise on the sum of each clip bit, 0 with fixed clips.

        By default a twentieth of the cohort, or twice the largest noise multiplier if that is more, times √L with a clip
        for each layer: the bits then cost little beside the update, and as much for many layers as for one.
        """
        if isinstance(self.clip, float) or not self.is_adaptive:
            return 0.0
        if self.clip.bit_noise_stddev is not None or self.max_noise_multiplier == 0:
            return self.clip.bit_noise_stddev or 0.0
        return self.clip_l2_norm * max(self.expected_cohort_size() / 20, 2 * self.max_noise_multiplier)

    @property
    def bit_noise_multiplier(self) -> float:
        """The noise multiplier of the clip bits alone; infinity with fixed clips, whose bits are not released."""
        return self.bit_noise_stddev / self.bit_l2_sensitivity if self.is_adaptive else math.inf

    def update_noise_multiplier(self, group: PrivacyGroup) -> float:
        """The noise multiplier of the update alone, z_Δ, such that update and clip bits together have the group's."""
        if group.opted_out or not self.is_adaptive or group not in self.sampled_groups:
            return group.noise_multiplier
        precision: float = group.noise_multiplier**-2 - self.bit_noise_multiplier**-2
        return float(precision**-0.5)

    def l2_sensitivity(self, group: PrivacyGroup) -> float:
        """How far one client of the group can move the weighted sum, in clips: its weight, and the sum's rounding; √L times.

        A sum in single precision is rounded at every client, up or down, by up to 2**-24 of its value. With n clients that
        adds up to about √n times as much: little, unless others weigh far more. n is a number that is hardly ever exceeded.
        A sum of integers is not rounded, so with exact arithmetic there is nothing to add.
        """
        if group.weight == 0:
            return 0.0
        if self.arithmetic == "exact":
            return self.clip_l2_norm * group.weight
        sizes = [self.expected_cohort_size(group) for group in self.groups]
        max_sizes = [size + 4 * math.sqrt(size) for size in sizes]
        max_weight = sum(group.weight * size for group, size in zip(self.groups, max_sizes, strict=True))
        rounding = math.sqrt(sum(max_sizes)) * max_weight * FLOAT32_UNIT_ROUNDOFF
        return self.clip_l2_norm * (group.weight + rounding)

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
        if group.weight == 0 and not self.is_adaptive:
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
        precision: float = update**-2 + self.bit_noise_multiplier**-2
        return float(precision**-0.5) if precision > 0 else math.inf

    def accounted_noise_multiplier(self, group: PrivacyGroup) -> float:
        """The effective noise multiplier over the distance between neighbouring data sets, as accounting takes it."""
        return self.effective_noise_multiplier(group) / SENSITIVITY[self.sampling]

    @property
    def round_params(self) -> RoundParams:
        """The numbers of one round, in single precision."""
        clip = AdaptiveClip(self.clip, learning_rate=0.0) if isinstance(self.clip, float) else self.clip
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

    @property
    def grid_params(self) -> GridParams:
        """The numbers of one round with exact arithmetic, in double precision."""
        clip = AdaptiveClip(self.clip, learning_rate=0.0) if isinstance(self.clip, float) else self.clip
        largest = max(*(group.weight for group in self.groups), self.update_noise_stddev, MIN_WEIGHT)
        exponent = GRID_BITS - math.frexp(largest)[1]  # `largest` is below 2**frexp
        steps_G = [Fraction(group.weight) * Fraction(2) ** exponent for group in self.groups]
        return GridParams(
            step=math.ldexp(1.0, -exponent),
            weight_G=tuple(map(float, steps_G)),
            bound_G=tuple(map(math.floor, steps_G)),
            update_noise_stddev=math.ldexp(self.update_noise_stddev * ROUND_UP_FACTOR, exponent),
            bit_noise_stddev=2 * self.bit_noise_stddev * ROUND_UP_FACTOR,
            expected_weight=self.expected_weight,
            expected_cohort_size=self.expected_cohort_size(),
            quantile=clip.quantile,
            clip_learning_rate=clip.learning_rate,
        )


ScheduledMechanism: TypeAlias = Mechanism | Callable[[int], Mechanism]  # by round, the first being 0


def mechanism_at(mechanism: ScheduledMechanism, round: int) -> Mechanism:
    """The mechanism of a round, the first round being 0.

    Raises:
        InvalidValueError: If a function returns no ``Mechanism``.
    """
    value = mechanism if isinstance(mechanism, Mechanism) else mechanism(round)
    require(isinstance(value, Mechanism), "mechanism", type(value).__name__, f"a Mechanism in round {round + 1}")
    return value

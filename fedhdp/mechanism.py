"""The promise, as frozen values: which privacy each group of clients chose, and what the server owes them for it.

The server obeys a ``Mechanism``, accounting prices it, the ledger records it, the report prints it. Every quantity that
matters for privacy is computed here and nowhere else.

| paper      | here                          | meaning                                                             |
| ---------- | ----------------------------- | ------------------------------------------------------------------- |
| C_j, N_j   | ``PrivacyGroup``, ``clients`` | the clients who chose the same privacy level, and how many they are |
| z_j        | ``noise_multiplier``          | noise owed to the group for a round's two queries together; 0: opted out |
| q          | ``sampling_rate``             | the chance that a client takes part in a round                      |
| r_j        | ``weight``                    | what one update of the group counts for on the server               |
| lambda_j   | ``pull``                      | how strongly personal models are pulled towards the global one      |
| S          | ``clip``                      | the norm to which updates are scaled down                           |
| kappa      | ``AdaptiveClip.quantile``     | the share of updates that the clip should leave whole               |
| eta_b      | ``AdaptiveClip.learning_rate``| how fast the clip moves                                             |
| z_b        | ``AdaptiveClip.bit_noise_stddev``    | standard deviation of the noise on the sum of the clip bits         |
| z_Delta    | ``update_noise_multiplier``         | noise owed to the group for the update alone                        |

Axis letters: G groups.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Literal, NamedTuple

import msgspec
import numpy as np

from fedhdp.errors import require

Noise = Literal["shared", "per_group"]
Sampling = Literal["poisson", "fixed"]
SERVER = "server"  # the name under which the server's own measurements stand beside the groups'
MAX_VALUE = 1e9  # of a multiplier, a weight, a pull or a clip: what is far beyond use would only overflow
MIN_WEIGHT, MIN_CLIP = 1e-15, 1e-9  # so that their noise is never too small for single precision
FLOAT32_UNIT_ROUNDOFF = 2.0**-24  # a number in single precision is rounded by up to this part of it
ROUND_UP_FACTOR = 1 + 2.0**-22  # rounding to single precision never leaves less noise than is owed


class PrivacyGroup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The clients who chose one privacy level."""

    name: str
    clients: int
    noise_multiplier: float
    sampling_rate: float
    weight: float = 1.0
    pull: float = 0.05

    def __post_init__(self) -> None:
        named = self.name not in ("", SERVER) and self.name.isprintable()
        require(named, "name", self.name, f"a name that can be printed, and not {SERVER!r}")
        require(self.clients >= 1, "clients", self.clients, "at least 1")
        some = self.noise_multiplier == 0 or 1e-6 <= self.noise_multiplier <= MAX_VALUE
        require(some, "noise_multiplier", self.noise_multiplier, f"0, or finite and from 1e-6 to {MAX_VALUE:g}")
        require(0 <= self.sampling_rate <= 1, "sampling_rate", self.sampling_rate, "between 0 and 1")
        some = self.weight == 0 or MIN_WEIGHT <= self.weight <= MAX_VALUE
        require(some, "weight", self.weight, f"0, or finite and from {MIN_WEIGHT:g} to {MAX_VALUE:g}")
        require(0 <= self.pull <= MAX_VALUE, "pull", self.pull, f"finite and from 0 to {MAX_VALUE:g}")

    @property
    def opted_out(self) -> bool:
        """Whether these clients asked for no privacy."""
        return self.noise_multiplier == 0


class AdaptiveClip(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A clip that follows a quantile of the update norms, learnt from noised bits (Andrew et al., 2021)."""

    initial: float
    quantile: float = 0.5
    learning_rate: float = 0.2
    bit_noise_stddev: float | None = None  # None: see Mechanism.bit_noise

    def __post_init__(self) -> None:
        rule = f"finite and from {MIN_CLIP:g} to {MAX_VALUE:g}"
        require(MIN_CLIP <= self.initial <= MAX_VALUE, "initial", self.initial, rule)
        require(0 <= self.quantile <= 1, "quantile", self.quantile, "between 0 and 1")
        require(0 <= self.learning_rate < math.inf, "learning_rate", self.learning_rate, "finite and at least 0")
        if self.bit_noise_stddev is not None:
            require(0 <= self.bit_noise_stddev < math.inf, "bit_noise", self.bit_noise_stddev, "finite and at least 0")


class RoundParams(NamedTuple):
    """The numbers of one round, as the server reads them off a mechanism; numbers, so that one program serves all."""

    weight_G: np.ndarray
    pull_G: np.ndarray
    update_noise_stddev: np.float32  # standard deviation of the noise on the weighted sum, in clips
    bit_noise_stddev: np.float32  # standard deviation of the noise on the sum of centred bits
    expected_weight: np.float32  # the public denominator of the update
    expected_cohort: np.float32  # the public denominator of the bits
    quantile: np.float32
    clip_learning_rate: np.float32


class Mechanism(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which groups there are, what each is owed, and how updates are sampled, clipped, noised and weighed.

    ``noise``: ``shared`` adds one noise, large enough for the group that is owed most; ``per_group`` adds one for each
    group, as the paper writes it, so that each group's own sum could be shown too. ``sampling``: ``poisson`` draws every
    client by its own coin and divides by how many are expected; ``fixed`` has cohorts of fixed size, as the paper, of each
    group its share, divided by how many came. Groups take the clients of a population in order: the first group the first
    clients.
    """

    groups: tuple[PrivacyGroup, ...]
    clip: float | AdaptiveClip
    noise: Noise = "shared"
    sampling: Sampling = "poisson"

    def __post_init__(self) -> None:
        require(len(self.groups) >= 1, "groups", self.groups, "at least one group")
        (name, times), *_ = Counter(group.name for group in self.groups).most_common(1)
        require(times == 1, "groups", name, "groups of different names")
        require(self.noise in ("shared", "per_group"), "noise", self.noise, "'shared' or 'per_group'")
        require(self.sampling in ("poisson", "fixed"), "sampling", self.sampling, "'poisson' or 'fixed'")
        if not isinstance(self.clip, AdaptiveClip):
            rule = f"finite and from {MIN_CLIP:g} to {MAX_VALUE:g}"
            require(MIN_CLIP <= self.clip <= MAX_VALUE, "clip", self.clip, rule)
        half = self.max_noise_multiplier / 2
        if isinstance(self.clip, AdaptiveClip) and half > 0:
            rule = f"above half the largest noise multiplier ({half:g}), or the bits alone cost more than promised"
            require(self.bit_noise_stddev > half, "bit_noise", self.bit_noise_stddev, rule)

    @property
    def clients(self) -> int:
        """How many clients the population has."""
        return sum(group.clients for group in self.groups)

    def expected_cohort_size(self, group: PrivacyGroup) -> float:
        """How many of the group's clients come to a round: on average, or always where cohorts are fixed."""
        expected = group.sampling_rate * group.clients
        return expected if self.sampling == "poisson" else round(expected)

    def sampling_probability(self, group: PrivacyGroup) -> float:
        """The chance that a client of the group takes part in a round."""
        return group.sampling_rate if self.sampling == "poisson" else self.expected_cohort_size(group) / group.clients

    @property
    def expected_cohort(self) -> float:
        """How many clients come to a round."""
        return sum(self.expected_cohort_size(group) for group in self.groups)

    @property
    def expected_weight(self) -> float:
        """How much the updates of a round weigh together, Σ_j r_j N_j of the cohort: what their sum is divided by."""
        return sum(group.weight * self.expected_cohort_size(group) for group in self.groups)

    @property
    def sampled_groups(self) -> tuple[PrivacyGroup, ...]:
        """The groups of which anybody is ever drawn: the others are owed nothing, as nothing of theirs can be seen."""
        return tuple(group for group in self.groups if self.expected_cohort_size(group) > 0)

    @property
    def max_noise_multiplier(self) -> float:
        """The largest noise multiplier that any group of which anybody is drawn was promised."""
        return max((group.noise_multiplier for group in self.sampled_groups), default=0.0)

    @property
    def client_group_indices(self) -> np.ndarray:
        """The group of each client of the population: the first group has the first clients."""
        return np.repeat(np.arange(len(self.groups), dtype=np.int32), [group.clients for group in self.groups])

    @property
    def initial_clip(self) -> float:
        """The clip of the first round."""
        return self.clip.initial if isinstance(self.clip, AdaptiveClip) else self.clip

    @property
    def bit_noise_stddev(self) -> float:
        """Noise on the sum of the clip bits; by default a twentieth of the cohort or 2 z, and cheap beside the update."""
        if not isinstance(self.clip, AdaptiveClip):
            return 0.0
        if self.clip.bit_noise_stddev is not None:
            return self.clip.bit_noise_stddev
        return max(self.expected_cohort / 20, 2 * self.max_noise_multiplier) if self.max_noise_multiplier > 0 else 0.0

    def update_noise_multiplier(self, group: PrivacyGroup) -> float:
        """The noise owed for the update alone, so that update and clip bit together cost the group's multiplier."""
        if group.opted_out or not isinstance(self.clip, AdaptiveClip) or group not in self.sampled_groups:
            return group.noise_multiplier
        return (group.noise_multiplier**-2 - (2 * self.bit_noise_stddev) ** -2) ** -0.5

    def l2_sensitivity(self, group: PrivacyGroup) -> float:
        """How far one client of the group can move the weighted sum, in clips: its weight, and how the sum is rounded.

        A sum in single precision is rounded at every client, by a part in 2²⁴ of what is summed so far, up or down: with n
        clients by about √n times as much, which is little unless others weigh far more. As many come as hardly ever do.
        """
        if group.weight == 0:
            return 0.0
        most = {one: (n := self.expected_cohort_size(one)) + 4 * math.sqrt(n) for one in self.groups}
        weight = sum(one.weight * clients for one, clients in most.items())
        return group.weight + math.sqrt(sum(most.values())) * weight * FLOAT32_UNIT_ROUNDOFF

    @property
    def update_noise_stddev(self) -> float:
        """Standard deviation of the noise on the weighted sum of clipped updates, in clips."""
        owed = [self.l2_sensitivity(group) * self.update_noise_multiplier(group) for group in self.sampled_groups]
        return max(owed, default=0.0) if self.noise == "shared" else math.hypot(*owed)

    def effective_noise_multiplier(self, group: PrivacyGroup) -> float:
        """The noise multiplier that the group really gets for a whole round: never less than it was promised."""
        if group.weight == 0 and not isinstance(self.clip, AdaptiveClip):
            return math.inf  # nothing of it is ever seen
        if group.opted_out:
            return 0.0
        if group not in self.sampled_groups:
            return math.inf
        if group.weight == 0:
            update = math.inf
        else:
            update = (
                self.update_noise_stddev / self.l2_sensitivity(group)
                if self.noise == "shared"
                else self.update_noise_multiplier(group)
            )
        bits = 2 * self.bit_noise_stddev if isinstance(self.clip, AdaptiveClip) else math.inf
        precision = update**-2 + bits**-2
        return precision**-0.5 if precision > 0 else math.inf

    @property
    def round_params(self) -> RoundParams:
        """The numbers of one round."""
        adaptive = (
            self.clip if isinstance(self.clip, AdaptiveClip) else AdaptiveClip(initial=self.clip, learning_rate=0.0)
        )
        return RoundParams(
            weight_G=np.array([group.weight for group in self.groups], np.float32),
            pull_G=np.array([group.pull for group in self.groups], np.float32),
            update_noise_stddev=np.float32(self.update_noise_stddev * ROUND_UP_FACTOR),
            bit_noise_stddev=np.float32(self.bit_noise_stddev * ROUND_UP_FACTOR),
            expected_weight=np.float32(self.expected_weight),
            expected_cohort=np.float32(self.expected_cohort),
            quantile=np.float32(adaptive.quantile),
            clip_learning_rate=np.float32(adaptive.learning_rate),
        )

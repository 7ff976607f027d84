"""Canaries: clients whose updates an attacker knows, and how well it tells who of them took part.

Every canary has a coordinate of its own in each layer, so its part of the sum meets no other client's, and each gives a
sample of its own. A coin says whether it takes part: with Poisson sampling it is absent otherwise, with fixed cohorts it
sends the opposite update and the opposite bit. The rest of a round is the system's that is audited.

In some rounds all updates are beyond the clip, in the others all are just within it, in such shares that an adaptive clip
stays where it is.

Axis letters: K clients, C clients of the cohort, G groups, L layers, P parameters, T rounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from fedhdp.mechanism import Mechanism, PrivacyGroup, ScheduledMechanism, mechanism_at
from fedhdp.privacy.audit.bounds import Scores

Floats = NDArray[np.float64]
Floats32 = NDArray[np.float32]
Integers = NDArray[np.int64]
Progress = Callable[[int, int], None]  # rounds that are done, and all rounds

SPARE = 64  # coordinates of clients that are no canaries
BEYOND, WITHIN = 3.0, 1 - 1e-5  # norms of updates, in clips
MAX_DRIFT = 8.0  # an adaptive clip begins anew when it has moved by this factor
METERED = 4_000_000  # samples of noise that are kept
NO_NOISE = 1e-3  # the noise that scores are divided by where there is none, over the weight


class System(Protocol):
    """What is audited: it samples cohorts, and releases an update and the next clip."""

    def sample(self, mechanism: Mechanism) -> Integers:
        """The clients of a round."""

    def release(
        self, mechanism: Mechanism, clip: Floats32, group_C: Integers, update_CP: Floats32
    ) -> tuple[Floats32, Floats32]:
        """The noised update of a round, and the next clip."""


class Layout(NamedTuple):
    """Who is a canary, and at which coordinate: the same in each layer."""

    width: int  # coordinates of a layer
    layers: int
    group_K: Integers
    coordinate_K: Integers
    is_canary_K: NDArray[np.bool_]

    @property
    def parameters(self) -> int:
        """Coordinates of all layers."""
        return self.width * self.layers


class Transcript(NamedTuple):
    """What an attacker makes of the rounds of a run, and what the noise meter reads."""

    coin_K: NDArray[np.bool_]
    total_K: Floats  # each client's evidence over all rounds, without knowing who was sampled
    known_G: list[list[tuple[Floats, NDArray[np.bool_]]]]  # for each round: scores and coins of sampled canaries
    bit_G: list[list[tuple[float, bool]]]  # for each round: one canary's score by the clip bits
    noise_TP: Floats32
    signal_TP: Floats32
    bit_noise_TL: Floats
    sampled_G: Integers


def make_layout(mechanism: Mechanism, canaries: int) -> Layout:
    """Make so many clients of each group canaries, or all of a smaller group."""
    group_K, canary_K = [], []
    for number, group in enumerate(mechanism.groups):
        group_K.append(np.full(group.clients, number))
        canary_K.append(np.arange(group.clients) < canaries)
    is_canary_K = np.concatenate(canary_K)
    total = int(is_canary_K.sum())
    coordinate_K = np.where(is_canary_K, np.cumsum(is_canary_K) - 1, total + np.arange(len(is_canary_K)) % SPARE)
    layers = max(len(mechanism.layers), 1)
    return Layout(total + SPARE, layers, np.concatenate(group_K), coordinate_K, is_canary_K)


def power(mechanism: Mechanism, group: PrivacyGroup) -> float:
    """How many standard deviations of the update's noise one client of the group moves the sum."""
    stddev = mechanism.update_noise_stddev
    return math.sqrt(max(len(mechanism.layers), 1)) * (group.weight / stddev if stddev else 1 / NO_NOISE)


def audit_rounds(
    system: System,
    schedule: ScheduledMechanism,
    layout: Layout,
    rounds: int,
    rng: np.random.Generator,
    progress: Progress | None = None,
) -> Transcript:
    """Run rounds with canaries, and score each canary by what is released.

    Args:
        system: The system.
        schedule: The mechanism that it promises, or that of each round.
        layout: The canaries.
        rounds: The number of rounds.
        rng: The generator of the canaries' coins.
        progress: Called after each round.
    """
    first = mechanism_at(schedule, 0)
    groups = range(len(first.groups))
    coin_K = rng.random(len(layout.group_K)) < 0.5
    kept = min(layout.parameters, max(METERED // rounds, 256))
    transcript = Transcript(
        coin_K | ~layout.is_canary_K,
        np.zeros(len(coin_K)),
        [[] for _ in groups],
        [[] for _ in groups],
        np.zeros((rounds, kept), np.float32),
        np.zeros((rounds, kept), np.float32),
        np.zeros((rounds, layout.layers)),
        np.zeros(len(first.groups), np.int64),
    )
    clip = first.initial_clip
    for number in range(rounds):
        mechanism = mechanism_at(schedule, number)
        next_clip = _Round(system, mechanism, layout, clip, number, rng).score(transcript)
        drift = np.abs(np.log(next_clip / first.initial_clip))
        clip = next_clip if bool(np.all(drift < math.log(MAX_DRIFT))) else first.initial_clip
        if progress is not None:
            progress(number + 1, rounds)
    return transcript


class _Round:
    """One round of an audit."""

    def __init__(
        self,
        system: System,
        mechanism: Mechanism,
        layout: Layout,
        clip: Floats32,
        number: int,
        rng: np.random.Generator,
    ):
        self.system, self.mechanism, self.layout, self.number, self.rng = system, mechanism, layout, number, rng
        self.clip = clip
        self.clip_L = np.asarray(clip, np.float64).reshape(-1)
        quantile = mechanism.round_params.quantile
        self.is_within = math.floor((number + 1) * quantile) > math.floor(number * quantile)
        self.is_fixed = mechanism.sampling == "fixed"
        self.weight_G = np.array([group.weight for group in mechanism.groups])

    def score(self, transcript: Transcript) -> Floats32:
        """Release the round's update and add what it shows to the transcript; the next clip."""
        layout = self.layout
        cohort = self.system.sample(self.mechanism)
        transcript.sampled_G[:] += np.bincount(layout.group_K[cohort], minlength=len(self.weight_G))
        coin_C = transcript.coin_K[cohort]
        sign_C = np.where(coin_C, 1.0, -1.0 if self.is_fixed else 0.0)
        is_present_C = sign_C != 0
        within_C = np.where(sign_C < 0, not self.is_within, self.is_within)  # the opposite has the opposite bit
        present, sign_P = cohort[is_present_C], sign_C[is_present_C]
        update_CP = self._updates(present, sign_P, within_C[is_present_C])
        released_P, next_clip = self.system.release(
            self.mechanism, self.clip, layout.group_K[present], update_CP.astype(np.float32)
        )
        size_P = sign_P * np.where(within_C[is_present_C], WITHIN, 1.0) * self.weight_G[layout.group_K[present]]
        score_LW, signal_LW = self._standardize(released_P, present, size_P)
        self._meter(transcript, score_LW - signal_LW, signal_LW)
        bit_C = np.where(is_present_C, np.where(within_C, 0.5, -0.5), 0.0)
        bit_noise_L = self._bit_noise(next_clip, float(bit_C.sum()))
        transcript.bit_noise_TL[self.number] = bit_noise_L
        score_W = score_LW.sum(axis=0) / math.sqrt(layout.layers)
        self._attack(transcript, cohort, score_W, bit_noise_L, bit_C)
        return next_clip

    def _updates(self, client_C: Integers, sign_C: Floats, within_C: NDArray[np.bool_]) -> Floats:
        layout = self.layout
        update_CLW = np.zeros((len(client_C), layout.layers, layout.width))
        norm_CL = np.where(within_C, WITHIN, BEYOND)[:, None] * self.clip_L
        rows = np.arange(len(client_C))
        update_CLW[rows, :, layout.coordinate_K[client_C]] = sign_C[:, None] * norm_CL
        return update_CLW.reshape(len(client_C), layout.parameters)

    def _standardize(self, released_P: Floats32, client_C: Integers, size_C: Floats) -> tuple[Floats, Floats]:
        """The released sum and the known one, in standard deviations of the noise, by layer."""
        layout, mechanism = self.layout, self.mechanism
        stddev = mechanism.update_noise_stddev or NO_NOISE * max(self.weight_G.max(), 1e-30)
        scale_L = mechanism.expected_weight / (self.clip_L * stddev)
        released_LW = np.asarray(released_P, np.float64).reshape(layout.layers, layout.width) * scale_L[:, None]
        known_W = np.bincount(layout.coordinate_K[client_C], weights=size_C, minlength=layout.width) / stddev
        return released_LW, np.broadcast_to(known_W, released_LW.shape)

    def _meter(self, transcript: Transcript, noise_LW: Floats, signal_LW: Floats) -> None:
        kept = transcript.noise_TP.shape[1]
        step = noise_LW.size / kept
        columns = (np.arange(kept) * step).astype(int)  # of all layers and groups
        transcript.noise_TP[self.number] = noise_LW.ravel()[columns]
        transcript.signal_TP[self.number] = signal_LW.ravel()[columns]

    def _bit_noise(self, next_clip: Floats32, known: float) -> Floats:
        """The noise of the clip bits, in its standard deviations, as far as the next clip shows it; else zeros."""
        params = self.mechanism.round_params
        if not self.mechanism.is_adaptive:
            return np.zeros(self.layout.layers)
        moved_L = np.log(np.asarray(next_clip, np.float64).reshape(-1) / self.clip_L)
        unclipped_L = float(params.quantile) - moved_L / float(params.clip_learning_rate)
        total_L = (unclipped_L - 0.5) * self.mechanism.expected_cohort_size()
        return np.asarray((total_L - known) / (self.mechanism.bit_noise_stddev or 1e-3))

    def _attack(
        self, transcript: Transcript, cohort: Integers, score_W: Floats, bit_noise_L: Floats, bit_C: Floats
    ) -> None:
        layout, mechanism = self.layout, self.mechanism
        for number, group in enumerate(mechanism.groups):
            canaries = np.flatnonzero(layout.is_canary_K & (layout.group_K == number))
            rate, size = mechanism.sampling_probability(group), power(mechanism, group)
            if rate == 0:
                continue
            transcript.total_K[canaries] += evidence(score_W[layout.coordinate_K[canaries]], size, rate, self.is_fixed)
            is_sampled_C = layout.is_canary_K[cohort] & (layout.group_K[cohort] == number)
            sampled = cohort[is_sampled_C]
            score_C, coin_C = score_W[layout.coordinate_K[sampled]], transcript.coin_K[sampled]
            transcript.known_G[number].append((score_C, coin_C))
            if len(sampled) and mechanism.is_adaptive:
                target = int(self.rng.integers(len(sampled)))
                own_bit = float(bit_C[np.flatnonzero(is_sampled_C)[target]])
                transcript.bit_G[number].append((self._bit_score(bit_noise_L, own_bit), bool(coin_C[target])))

    def _bit_score(self, bit_noise_L: Floats, own_bit: float) -> float:
        """The score of a canary by the clip bits, by an attacker who knows everyone else's."""
        sign, stddev = 1.0 if self.is_within else -1.0, self.mechanism.bit_noise_stddev or 1e-3
        return sign * float(np.sum(bit_noise_L + own_bit / stddev)) / math.sqrt(self.layout.layers)


def evidence(score_K: Floats, size: float, rate: float, is_fixed: bool) -> Floats:
    """The logarithm of how much likelier scores are if the canary's coin is heads, where sampling is secret.

    Args:
        score_K: Scores of one round, in standard deviations of the noise.
        size: How far a sampled canary moves its score.
        rate: The probability that it is sampled.
        is_fixed: The canary sends the opposite if its coin is tails; else it is absent.
    """
    with np.errstate(divide="ignore"):
        log_rate, log_rest = np.log(rate), np.log1p(-rate)
    heads = np.logaddexp(log_rest, log_rate + size * score_K - size**2 / 2)
    if not is_fixed:
        return np.asarray(heads)
    return np.asarray(heads - np.logaddexp(log_rest, log_rate - size * score_K - size**2 / 2))


def total_scores(transcripts: list[Transcript], layout: Layout, group: int) -> Scores:
    """A group's scores over all rounds, of one run or of several."""
    of_group_K = layout.is_canary_K & (layout.group_K == group)
    outs = [transcript.total_K[of_group_K & ~transcript.coin_K] for transcript in transcripts]
    ins = [transcript.total_K[of_group_K & transcript.coin_K] for transcript in transcripts]
    return Scores(np.concatenate(outs), np.concatenate(ins))


def known_scores(transcripts: list[Transcript], group: int) -> Scores:
    """A group's scores of single rounds, of the canaries that were sampled."""
    parts = [part for transcript in transcripts for part in transcript.known_G[group]]
    scores = np.concatenate([scores for scores, _ in parts] or [np.zeros(0)])
    coins = np.concatenate([coins for _, coins in parts] or [np.zeros(0, bool)])
    return Scores(scores[~coins], scores[coins])


def bit_scores(transcripts: list[Transcript], group: int) -> Scores:
    """A group's scores by the clip bits, one for each round."""
    parts = [part for transcript in transcripts for part in transcript.bit_G[group]]
    scores, coins = np.array([score for score, _ in parts]), np.array([coin for _, coin in parts], bool)
    return Scores(scores[~coins], scores[coins])

"""A round's sums in integers, and their noise without gaps: what ``server.py`` does, without any rounding error that counts.

A client's clipped and weighted update is rounded to a grid and clipped again there, where its norm is computed without
error. So one client moves the sum by at most ``GridParams.bound_G``: a theorem, whatever the client sends. Integers below
2**63 add up to the same sum in any order and on any number of devices.

The noise of each coordinate is round(X), where X is Gaussian. The sum is an integer, so sum + round(X) = round(sum + X):
what is released is computed from the continuous Gaussian mechanism, whose privacy it therefore has. X itself is never
stored. round(X) follows from as many random bits as it takes to know it, so its distribution has no rounding error either.

Everything after ``ExactRound.finish`` adds the noise is post-processing.

Axis letters: G groups, L layers, P parameters, N samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import ndtri

from fedhdp.clips import MAX_CLIP, MIN_CLIP
from fedhdp.errors import require
from fedhdp.mechanism import GRID_BITS, GridParams

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
RandomBytes = Callable[[int], bytes]

ATTEMPTS = 24  # at rounding an update such that it stays within its bound
BLOCK = 2**18  # samples that are drawn at a time
NDTRI_ERROR = 2.0**-46  # bound on the error of ndtri in double precision, relative to 1 + |result|; 2**-50 was observed
EXTRA_BITS = 128  # where 64 are not enough to know a sample


class ExactRound:
    """The sums of one round with exact arithmetic. Its noise is drawn when it is made, before any update is seen.

    Args:
        params: The numbers of the round, `Mechanism.grid_params`.
        clip: The clip of the round, or the clip of each layer.
        parameters: How many parameters the model has.
        segments: The layer of each part of a row of parameters, as `Layers.segments`; None with a flat clip.
        random_bytes: Returns so many random bytes: ``os.urandom``, or a seed's for runs that are repeatable.

    Raises:
        InvalidValueError: If a clip is out of range.

    Attributes:
        refused_G: How many updates were not finite; they count as absent.
    """

    def __init__(
        self,
        params: GridParams,
        clip: ArrayLike,
        parameters: int,
        segments: Sequence[tuple[int, slice]] | None,
        random_bytes: RandomBytes,
    ):
        self.params, self._clip = params, np.asarray(clip, np.float64)
        in_range = bool(np.all((self._clip >= np.float32(MIN_CLIP)) & (self._clip <= np.float32(MAX_CLIP))))
        require(in_range, "clip", self._clip.tolist(), f"between {MIN_CLIP:g} and {MAX_CLIP:g}")
        self._segments = [(0, slice(parameters))] if segments is None else list(segments)
        self._noise_P = rounded_gaussian(params.update_noise_stddev, parameters, random_bytes)
        self._bit_noise_L = rounded_gaussian(params.bit_noise_stddev, self._clip.size, random_bytes)
        self._sum_P, self._bits_L = np.zeros(parameters, np.int64), np.zeros(self._clip.size, np.int64)
        self.refused_G = np.zeros(len(params.bound_G), np.int32)

    def add(self, update_P: ArrayLike, group: int) -> None:
        """Clip the update of a client of a group, round it, and add it; one that is not finite is refused."""
        update_P = np.asarray(update_P, np.float64)
        if not np.isfinite(update_P).all():
            self.refused_G[group] += 1
            return
        parts_L: list[list[slice]] = [[] for _ in range(self._clip.size)]
        for layer, columns in self._segments:
            parts_L[layer].append(columns)
        for layer, (clip, parts) in enumerate(zip(self._clip.ravel().tolist(), parts_L, strict=True)):
            values = np.concatenate([update_P[part] for part in parts]) if len(parts) != 1 else update_P[parts[0]]
            norm = _norm(values)
            self._bits_L[layer] += 1 if norm <= clip else -1
            weight, bound = self.params.weight_G[group], self.params.bound_G[group]
            rounded = round_within(values, weight / max(norm, clip), bound)
            for part in parts:
                size = part.stop - (part.start or 0)
                self._sum_P[part] += rounded[:size]
                rounded = rounded[size:]

    def finish(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Add the noise: the noised, weighted mean update, and the next round's clip. To be called once."""
        params, total_P = self.params, (self._sum_P + self._noise_P).astype(np.float64)
        for layer, columns in self._segments:
            total_P[columns] *= params.step * self._clip.flat[layer]
        weight = params.expected_weight
        update_P = (total_P / weight if weight > 0 else np.zeros_like(total_P)).astype(np.float32)

        noisy_bits_L = (self._bits_L + self._bit_noise_L) / 2
        size = params.expected_cohort_size
        unclipped_L = noisy_bits_L / size + 0.5 if size > 0 else np.full(len(noisy_bits_L), params.quantile)
        with np.errstate(over="ignore"):
            moved_L = self._clip.ravel() * np.exp(-params.clip_learning_rate * (unclipped_L - params.quantile))
        next_clip = np.clip(moved_L, MIN_CLIP, MAX_CLIP).reshape(self._clip.shape)
        return update_P, next_clip.astype(np.float32)


def _norm(values: Floats) -> float:
    """The norm of finite single-precision values, whose squares double precision can hold."""
    return math.sqrt(float(np.square(values).sum()))  # not a product, whose order depends on the number of threads


def round_within(values: Floats, scale: float, bound: int) -> Integers:
    """Integers close to scaled values whose norm is at most the bound, without error.

    Rounding can make a clipped update longer; then it is scaled down further and rounded again.

    Args:
        values: Finite numbers.
        scale: What they are multiplied by, such that their norm is then below about 2**26.
        bound: The largest norm allowed, at most 2**26.

    Returns:
        Rounded values; zeros if ``ATTEMPTS`` do not suffice, which no update of common size reaches.
    """
    assert bound <= 2**GRID_BITS
    scaled = values * scale
    for attempt in range(ATTEMPTS):
        rounded = np.rint(scaled)
        squares = float(rounded @ rounded)  # a sum of integers: exact below 2**53 in any order, and above too large
        if squares <= bound**2:
            return rounded.astype(np.int64)
        excess = (bound / math.sqrt(squares)) ** 1.5  # beyond the bound, as rounding takes a part of it back
        scaled *= min(excess, 1 - 2.0 ** (attempt - ATTEMPTS))
    return np.zeros(len(values), np.int64)


def rounded_gaussian(stddev: float, size: int, random_bytes: RandomBytes) -> Integers:
    """Independent samples of a Gaussian, each rounded to the nearest integer, without any error in their distribution.

    A sample is the inverse of the Gaussian distribution function at a uniform number, of which 64 bits are drawn. Where
    these leave open to which integer it is rounded, or double precision does, more bits and more digits decide.

    Args:
        stddev: The standard deviation, at most 2**48.
        size: How many samples.
        random_bytes: Returns so many random bytes.
    """
    assert 0 <= stddev <= 2**48
    samples_N = np.zeros(size, np.int64)
    if stddev == 0:
        return samples_N
    for start in range(0, size, BLOCK):
        part_N = samples_N[start : start + BLOCK]
        word_N = np.frombuffer(random_bytes(8 * len(part_N)), np.uint64)
        sign_N, tail_N = (word_N & np.uint64(1)).astype(bool), word_N >> np.uint64(1)  # P(Z > z), in units of 2**-64
        middle_N = tail_N + 0.5
        z_N = -ndtri(middle_N * 2.0**-64)
        magnitude_N = np.rint(stddev * z_N)
        # The uniform number is anywhere within 2**-64. The density of Z at z > 0 is at least P(Z > z) / 2, so this moves z
        # by 2 / middle at most, except where all bits are zero: there z has no end.
        error_N = stddev * (2 / middle_N + NDTRI_ERROR * (1 + z_N))
        is_open_N = (0.5 - np.abs(stddev * z_N - magnitude_N) <= error_N) | (tail_N == 0)
        for n in np.flatnonzero(is_open_N).tolist():
            magnitude_N[n] = _decide(stddev, int(tail_N[n]), random_bytes)
        part_N[:] = np.where(sign_N, -magnitude_N, magnitude_N)
    return samples_N


def _decide(stddev: float, tail: int, random_bytes: RandomBytes) -> int:
    """The integer to which a sample's magnitude is rounded, where these are the first 64 bits of P(Z > z)."""
    bits = 64
    while True:
        tail = (tail << EXTRA_BITS) | int.from_bytes(random_bytes(EXTRA_BITS // 8), "little")
        bits += EXTRA_BITS
        k = max(round(-stddev * float(ndtri((2 * tail + 1) / 2 ** (bits + 1)))), 0)
        while k > 0 and _is_beyond(k - 1, stddev, tail, bits) is False:
            k -= 1
        while _is_beyond(k, stddev, tail, bits):
            k += 1
        is_below = _is_beyond(k, stddev, tail, bits) is False
        if is_below and (k == 0 or _is_beyond(k - 1, stddev, tail, bits)):
            return k


def _is_beyond(k: int, stddev: float, tail: int, bits: int) -> bool | None:
    """Whether a magnitude is above k + ½, where P(Z > z) begins with these bits; None: they leave it open."""
    import mpmath

    with mpmath.workprec(bits + 64):
        border = mpmath.erfc((mpmath.mpf(k) + 0.5) / (mpmath.mpf(stddev) * mpmath.sqrt(2))) / 2
        slack = mpmath.ldexp(border, -bits - 32)  # by which the last digits may be wrong
        if border - slack >= mpmath.ldexp(tail + 1, -bits):
            return True
        return False if border + slack <= mpmath.ldexp(tail, -bits) else None

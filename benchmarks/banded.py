"""Correlated noise, a trial: would banded matrix factorization add less noise to the averaged model at the same epsilon?

`python benchmarks/banded.py` prints for each number of bands the noise multiplier, by dp-accounting, and the noise in the
averaged model beside that of independent noise. With b bands the noise of a round is a row of C⁻¹Z, C a banded Toeplitz
matrix whose columns have norm 1 (the root of the prefix sums, cut). With cyclic Poisson sampling (Choquette-Choo and others,
2023) all rounds cost as much as T/b rounds of the Gaussian mechanism at b times the sampling rate.

The model is linear: momentum, an average, and a loss that pulls the parameters back within some rounds. Nothing is trained.
"""

from __future__ import annotations

import math

import numpy as np

from fedhdp.privacy.calibration import noise_multiplier_for

EPSILON, DELTA, RATE, ROUNDS = 3.6, 1e-4, 0.05, 500
MOMENTUM, AVERAGE = 0.9, 0.99
PULLS_BACK = (20.0, 100.0, math.inf)  # rounds after which the loss has pulled a disturbance back


def column(bands: int) -> np.ndarray:
    """The first column of C."""
    series = np.array([math.comb(2 * k, k) / 4**k for k in range(bands)])
    return series / np.linalg.norm(series)


def shares(rounds_back: float) -> np.ndarray:
    """What the noise of each round adds to the averaged model at the end."""
    share_T = np.zeros(ROUNDS)
    for start in range(ROUNDS):
        velocity = parameter = average = 0.0
        for round in range(start, ROUNDS):
            velocity = MOMENTUM * velocity + (round == start)
            parameter = parameter * (1 - 1 / rounds_back) + velocity
            average = AVERAGE * average + (1 - AVERAGE) * parameter
        share_T[start] = average / (1 - AVERAGE**ROUNDS)
    return share_T


def through(share_T: np.ndarray, column_B: np.ndarray) -> np.ndarray:
    """The shares of independent noise Z where the noise is C⁻¹Z."""
    solved_T = np.zeros(ROUNDS)
    for round in reversed(range(ROUNDS)):
        later = sum(column_B[lag] * solved_T[round + lag] for lag in range(1, min(len(column_B), ROUNDS - round)))
        solved_T[round] = (share_T[round] - later) / column_B[0]
    return solved_T


def main() -> None:
    """Print the table."""
    print("| bands | noise multiplier | " + " | ".join(f"pulled back in {back:g} rounds" for back in PULLS_BACK) + " |")
    print("| ---: |" + " ---: |" * (1 + len(PULLS_BACK)))
    independent: list[float] = []
    for bands in (1, 2, 4, 8):
        z = noise_multiplier_for(EPSILON, RATE * bands, ROUNDS // bands, DELTA, "pld")
        noise = [z * float(np.linalg.norm(through(shares(back), column(bands)))) for back in PULLS_BACK]
        independent = independent or noise
        ratios = (f"{value / of_one:.3f}" for value, of_one in zip(noise, independent, strict=True))
        print(f"| {bands} | {z:.3f} | " + " | ".join(ratios) + " |", flush=True)


if __name__ == "__main__":
    main()

"""What every adapter of the conformance kit uses: the claims, and how a report reaches the table."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import msgspec
import numpy as np

from fedhdp.privacy.audit import ReleaseClaim, check_release

CLIP, NOISE_MULTIPLIER, COHORT, PARAMETERS, ROUNDS = 0.5, 1.0, 20, 1024, 40
BIT_NOISE, QUANTILE, CLIP_RATE = 2.0, 0.5, 0.2


def example_counts(cohort: np.ndarray) -> list[int]:
    """How many examples the clients have: the last of a whole cohort has ten times as many as the others."""
    return [100 if client == COHORT - 1 else 10 for client in cohort]


def check(name: str, function: Callable[..., Any], claim: ReleaseClaim) -> None:
    """Check a release and print the report as one line of JSON."""
    report = check_release(function, claim, name=name, parameters=PARAMETERS, rounds=ROUNDS)
    print(msgspec.json.encode(report).decode(), flush=True)

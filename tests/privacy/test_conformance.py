"""The conformance kit: it passes a sound release and finds each fault, in Flower's strategies too."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers import raises_field

from fedhdp.privacy.audit import ReleaseClaim, check_release

ADAPTERS = Path(__file__).parents[2] / "benchmarks" / "conformance"
CLAIM = ReleaseClaim(clip=0.5, noise_multiplier=1.0, cohort_size=16)
ADAPTIVE = ReleaseClaim(clip=0.5, noise_multiplier=1.0, cohort_size=16, adaptive=True)
SURE = 1 - 1e-6


class Sound:
    """A release that keeps its claim; each fault overrides a part of it."""

    def __call__(self, cohort, update_CP, seed):
        rng = np.random.default_rng(seed)
        norm_C = np.linalg.norm(update_CP, axis=1)
        present_C = np.isfinite(norm_C)
        scale_C = self.weights(cohort) * np.minimum(1, 0.5 / np.maximum(norm_C, 1e-12))
        total_P = scale_C[present_C] @ update_CP[present_C]
        clip = 0.5 * np.exp(-0.2 * (self.bits(norm_C).mean() - 0.5))
        noise_P = rng.normal(0, 0.5 * self.noise(clip), update_CP.shape[1])
        return self.output((total_P + noise_P) / self.size(cohort), clip)

    def weights(self, cohort):
        return np.ones(len(cohort))

    def bits(self, norm_C):
        return norm_C <= 0.5

    def noise(self, clip):
        return 1.0

    def size(self, cohort):
        return 16

    def output(self, update_P, clip):
        return update_P


def fault(**methods):
    return type("Fault", (Sound,), {name: staticmethod(method) for name, method in methods.items()})()


def checked(function, claim):
    return check_release(function, claim, parameters=512, rounds=60, confidence=SURE)


def test_sound_release_passes():
    assert checked(Sound(), CLAIM).failed() == []
    assert checked(fault(output=lambda update_P, clip: (update_P, clip)), ADAPTIVE).failed() == []


FAULTS = {
    "noise variance": {"noise": lambda clip: 0.8},
    "known coins": {"noise": lambda clip: 0.2},
    "weight of a client": {"weights": lambda cohort: np.where(cohort == 15, 3.0, 1.0)},
    "clip": {"weights": lambda cohort: np.full(len(cohort), 1.5)},
    "clip, half of the cohort": {"size": len, "noise": lambda clip: 1.0},
    "update that is not finite": {"weights": lambda cohort: np.full(len(cohort), np.nan)},
}


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_found(name):
    assert name in checked(fault(**FAULTS[name]), CLAIM).failed()


@pytest.mark.parametrize(
    ("name", "methods"),
    [("clip bit", {"bits": lambda norm_C: norm_C > 0.5}), ("noise by this clip", {"noise": lambda clip: clip / 0.5})],
)
def test_fault_of_an_adaptive_clip_is_found(name, methods):
    faulty = fault(output=lambda update_P, clip: (update_P, clip), **methods)
    assert name in checked(faulty, ADAPTIVE).failed()


def test_an_update_that_ends_the_round_is_found():
    def fragile(cohort, update_CP, seed):
        if not np.all(np.linalg.norm(update_CP, axis=1) > 0):
            raise ZeroDivisionError
        return Sound()(cohort, update_CP, seed)

    assert checked(fragile, CLAIM).failed() == ["zero update", "update that is not finite"]


@pytest.fixture(scope="module")
def flower():
    pytest.importorskip("flwr")
    sys.path.insert(0, str(ADAPTERS))
    try:
        yield runpy.run_path(str(ADAPTERS / "flower_adapter.py"))
    finally:
        sys.path.remove(str(ADAPTERS))


def flower_failures(flower, kind: str) -> list[str]:
    return check_release(
        flower[kind.lower()], flower[f"{kind}_CLAIM"], parameters=1024, rounds=30, confidence=SURE
    ).failed()


def test_flowers_bit_is_inverted_and_its_noise_is_by_the_next_clip(flower):
    failed = flower_failures(flower, "ADAPTIVE")
    assert {"clip bit", "noise by this clip"} <= set(failed)


def test_flower_weighs_by_examples_and_divides_by_who_came(flower):
    failed = flower_failures(flower, "FIXED")
    assert {"weight of a client", "clip, half of the cohort", "zero update", "update that is not finite"} <= set(failed)
    assert not {"noise variance", "normality", "correlation of rounds", "tails"} & set(failed)


def test_server_passes(monkeypatch):
    monkeypatch.syspath_prepend(str(ADAPTERS))
    adapter = runpy.run_path(str(ADAPTERS / "fedhdp_adapter.py"))
    function, noise_multiplier = adapter["release"](0.5)
    claim = ReleaseClaim(0.5, noise_multiplier, adapter["w"].COHORT)
    report = check_release(function, claim, parameters=adapter["w"].PARAMETERS, rounds=20, confidence=SURE)
    assert report.failed() == []
    assert report.holds


def test_values_out_of_range():
    with raises_field("clip"):
        ReleaseClaim(0.0, 1.0, 10)
    with raises_field("noise_multiplier"):
        ReleaseClaim(1.0, 0.0, 10)
    with raises_field("cohort_size"):
        ReleaseClaim(1.0, 1.0, 1)
    with raises_field("parameters"):
        check_release(Sound(), CLAIM, parameters=1)

"""The noise meter: it accepts sound noise as often as it says, and finds each fault."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from fedhdp.privacy.audit import meter

ROUNDS, PARAMETERS, LEVEL = 40, 600, 0.05


def sound(rng: np.random.Generator) -> np.ndarray:
    return rng.normal(size=(ROUNDS, PARAMETERS))


CHECKS = {
    "variance": meter.variance_check,
    "each round": meter.variance_by_round_check,
    "normality": meter.normality_check,
    "rounds": meter.correlation_check,
    "devices": meter.device_check,
    "signal": lambda noise_TP: meter.signal_check(noise_TP, np.tile([0.0, 0.5, 3.0], (ROUNDS, PARAMETERS // 3))),
    "tails": lambda noise_TP: meter.tail_check(noise_TP.ravel().astype(np.float32), 2.0**-22),
}


@pytest.mark.parametrize("name", CHECKS)
def test_sound_noise_passes_as_often_as_stated(name):
    rng, trials = np.random.default_rng(2), 120
    failed = sum(not CHECKS[name](sound(rng)).at(LEVEL).holds for _ in range(trials))
    assert failed <= stats.binom(trials, LEVEL).ppf(1 - 1e-3)


def repeat_round(noise_TP: np.ndarray) -> np.ndarray:
    noise_TP[17] = noise_TP[3]
    return noise_TP


def repeat_device(noise_TP: np.ndarray) -> np.ndarray:
    noise_TP[:, PARAMETERS // 2 :] = noise_TP[:, : PARAMETERS // 2]
    return noise_TP


def other_clip(noise_TP: np.ndarray) -> np.ndarray:
    noise_TP[::2] *= 1.1
    noise_TP[1::2] *= np.sqrt(2 - 1.1**2)  # the variance of all rounds together is 1
    return noise_TP


FAULTS = {
    "variance": lambda noise_TP: 0.97 * noise_TP,
    "each round": other_clip,
    "normality": lambda noise_TP: np.sqrt(3) * (2 * stats.norm.cdf(noise_TP) - 1),
    "rounds": repeat_round,
    "devices": repeat_device,
    "signal": lambda noise_TP: noise_TP + 0.05 * np.tile([0.0, 0.5, 3.0], (ROUNDS, PARAMETERS // 3)),
}


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_found(name):
    rng = np.random.default_rng(6)
    assert CHECKS[name](sound(rng)).p_value > 1e-4
    assert CHECKS[name](FAULTS[name](sound(rng))).p_value < 1e-6


def test_tails_of_23_bits_are_found():
    import jax

    from fedhdp.server import gaussian

    key, shape = jax.random.key(1), (2**20,)
    step = 2.0**-22
    assert meter.tail_check(np.asarray(gaussian(key, shape)), step).p_value > 1e-4
    assert meter.tail_check(np.asarray(jax.random.normal(key, shape)), step).p_value < 1e-6


def test_thin_tails_are_found():
    noise_P = np.clip(np.random.default_rng(0).normal(size=2**20), -3.4, 3.4)
    assert meter.tail_check(noise_P, 2.0**-22).p_value < 1e-6


def test_sampling():
    assert meter.sampling_check("a", 5_050, 100_000, 0.05).p_value > 0.01
    assert meter.sampling_check("a", 10_000, 100_000, 0.05).p_value < 1e-6
    assert meter.sampling_check("a", 4_999, 100_000, 0.05, is_fixed=True).p_value == 0
    assert meter.sampling_check("a", 5_000, 100_000, 0.05, is_fixed=True).p_value == 1
    assert meter.sampling_check("a", 1, 100_000, 0.0).p_value == 0


def test_noise_that_is_not_finite_fails():
    assert meter.variance_check(np.full((2, 3), np.nan)).p_value == 0


def test_level_is_divided_among_checks():
    checks = [meter.Check(str(n), 0.0, 0.0, 0.02, True, "") for n in range(3)]
    assert [check.holds for check in meter.judge(checks, 0.05)] == [True, True, True]
    assert [check.holds for check in meter.judge(checks, 0.07)] == [False, False, False]

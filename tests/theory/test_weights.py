"""Weights of least error where some are given."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import raises_field
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from fedhdp.mechanism import Mechanism, PrivacyGroup
from fedhdp.theory import estimate_error, with_optimal_weights

PARAMETERS, ROUNDS = 5_000, 200


def population(*noise: float, weights: tuple[float, ...] = (), kind: str = "shared") -> Mechanism:
    weights = weights or (1.0,) * len(noise)
    rows = zip(noise, weights, strict=True)
    groups = (PrivacyGroup(f"g{i}", 300 * (i + 1), z, 0.05, r) for i, (z, r) in enumerate(rows))
    return Mechanism(tuple(groups), 1.0, kind)


def weights_of(mechanism: Mechanism) -> list[float]:
    return [group.weight for group in mechanism.groups]


def error(mechanism: Mechanism, weights: list[float]) -> float:
    groups = tuple(replace(group, weight=r) for group, r in zip(mechanism.groups, weights, strict=True))
    return estimate_error(replace(mechanism, groups=groups), ROUNDS, PARAMETERS).error


@pytest.mark.parametrize("kind", ["shared", "per_group"])
@pytest.mark.parametrize("noise", [(0.0, 0.9, 2.1), (0.3, 0.9, 2.1)])
def test_the_reference_has_weight_one_and_changes_nothing(kind, noise):
    mechanism = population(*noise, kind=kind)
    every = with_optimal_weights(mechanism, ROUNDS, PARAMETERS)
    assert weights_of(every)[0] == 1
    others = with_optimal_weights(mechanism, ROUNDS, PARAMETERS, ["g1", "g2"])  # g0 is given, and has weight 1
    assert weights_of(others) == pytest.approx(weights_of(every), rel=1e-5)


@settings(max_examples=60, deadline=None)
@given(
    noise=st.lists(st.sampled_from([0.0, 0.3, 1.0, 4.0, 20.0]), min_size=3, max_size=3),
    given_weights=st.lists(st.sampled_from([0.0, 0.01, 0.5, 2.0]), min_size=3, max_size=3),
    names=st.sets(st.sampled_from(["g0", "g1", "g2"]), min_size=1, max_size=2),
    kind=st.sampled_from(["shared", "per_group"]),
    seed=st.integers(0, 1000),
)
def test_no_other_weights_have_less_error(noise, given_weights, names, kind, seed):
    mechanism = population(*noise, weights=tuple(given_weights), kind=kind)
    best = with_optimal_weights(mechanism, ROUNDS, PARAMETERS, names)
    weights, fixed = weights_of(best), [group.name not in names for group in mechanism.groups]
    assert [r for r, is_fixed in zip(weights, fixed, strict=True) if is_fixed] == [
        r for r, is_fixed in zip(given_weights, fixed, strict=True) if is_fixed
    ]
    counting = [i for i in range(3) if not fixed[i] or given_weights[i] > 0]
    least = [i for i in counting if noise[i] == min(noise[i] for i in counting)]
    if not any(fixed[i] for i in least):  # then the first of them is the reference
        assert weights[least[0]] == 1
        fixed[least[0]] = True
    rng = np.random.default_rng(seed)
    for scale in (0.01, 0.3, 2.0):
        factors = np.where(fixed, 1.0, np.exp(scale * rng.normal(size=3)))
        changed = np.clip(np.array(weights) * factors, 1e-15, 1e9) * (np.array(weights) > 0)
        assert error(mechanism, changed.tolist()) >= error(mechanism, weights) * (1 - 1e-2 * (kind == "shared") - 1e-4)


def test_parameters_are_counted_where_a_weight_depends_on_them():
    def count() -> int:
        pytest.fail("counted")

    mechanism = population(0.0, 1.0, weights=(0.5, 0.1))
    assert with_optimal_weights(mechanism, ROUNDS, count, []) == mechanism
    assert weights_of(with_optimal_weights(mechanism, ROUNDS, count, ["g0"])) == [1, 0.1]
    counted = with_optimal_weights(mechanism, ROUNDS, lambda: PARAMETERS, ["g1"])
    assert counted == with_optimal_weights(mechanism, ROUNDS, PARAMETERS, ["g1"])


def test_without_noise_weights_are_equal():
    mechanism = population(0.0, 0.0, 0.0, weights=(1.0, 0.5, 1.0))
    assert weights_of(with_optimal_weights(mechanism, ROUNDS, PARAMETERS)) == [1, 1, 1]
    assert weights_of(with_optimal_weights(mechanism, ROUNDS, PARAMETERS, ["g0"]))[1:] == [0.5, 1.0]


def test_nobody_is_sampled():
    groups = tuple(replace(group, sampling_rate=0.0) for group in population(0.0, 1.0).groups)
    mechanism = replace(population(0.0, 1.0), groups=groups)
    assert weights_of(with_optimal_weights(mechanism, ROUNDS, PARAMETERS)) == [1, 1]


def test_unknown_names_are_refused():
    with raises_field("names"):
        with_optimal_weights(population(0.0, 1.0), ROUNDS, PARAMETERS, ["other"])

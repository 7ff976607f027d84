"""The weights of least error under one shared noise."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from theory_problems import EXACT, FIVE, problem_of, problems, steady

from fedhdp.theory import linear_regression as lr
from fedhdp.theory import shared_noise


def test_one_private_group_is_the_papers_rule():
    problem = problem_of((30, 0.0), (70, 0.4))
    np.testing.assert_allclose(shared_noise.optimal_weights(problem), lr.optimal_weights(problem), rtol=EXACT)
    assert shared_noise.gain(problem) == pytest.approx(1, rel=EXACT)


@pytest.mark.parametrize("groups", [2, 3, 5])
def test_gain_is_the_number_of_equal_groups_where_noise_dominates(groups):
    problem = problem_of(*[(100, 1.0)] * groups, alpha2=0.0, tau2=0.0)
    assert shared_noise.gain(problem) == pytest.approx(groups, rel=EXACT)


@steady
@given(problems, st.integers(0, 2**32 - 1))
def test_weights_minimize_the_server_variance(problem, seed):
    rng = np.random.default_rng(seed)
    best_G = shared_noise.optimal_weights(problem)
    best = shared_noise.server_variance(problem, best_G)
    near = best_G * np.exp(0.02 * rng.normal(size=(50, len(best_G))))
    far = rng.uniform(1e-3, 1, size=(50, len(best_G)))
    for weights in [*near, *far, lr.optimal_weights(problem)]:
        assert shared_noise.server_variance(problem, weights) >= best * (1 - 1e-12)


def test_every_group_gets_its_noise():
    weights = shared_noise.optimal_weights(FIVE)
    released = shared_noise.shared_noise(FIVE, weights) ** 0.5
    owed_G = lr.client_weights(FIVE, weights) * shared_noise.multipliers(FIVE)
    assert np.all(released >= owed_G)

"""Problems of the theory that its tests share."""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

from fedhdp.reproduction.theory import monte_carlo
from fedhdp.theory.linear_regression import Problem, TheoryGroup

EXACT = 1e-12
steady = settings(derandomize=True, deadline=None)


def problem_of(*groups: tuple[int, float], alpha2: float = 1.0, tau2: float = 0.25) -> Problem:
    """A problem from (clients, gamma2) pairs."""
    return Problem(tuple(TheoryGroup(f"level {i}", *group) for i, group in enumerate(groups)), alpha2, tau2)


FIVE = problem_of((30, 0.0), (50, 0.01), (20, 0.2), (70, 0.3), (40, 2.0))


problems = st.builds(
    lambda groups, alpha2, tau2: problem_of(*groups, alpha2=alpha2, tau2=tau2),
    st.lists(st.tuples(st.integers(1, 200), st.floats(0, 10)), min_size=1, max_size=5),
    st.floats(0.01, 10),
    st.floats(0, 10),
)


def assert_agrees(error_T: np.ndarray, closed_form: float) -> None:
    """Within three standard errors of the closed form."""
    mean, standard_error = monte_carlo.estimate(error_T)
    assert abs(mean - closed_form) < 3 * standard_error, (mean, closed_form, standard_error)
    assert standard_error < 0.02 * closed_form  # or agreeing would mean nothing

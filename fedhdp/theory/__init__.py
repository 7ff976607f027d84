"""Closed forms for federated linear regression and point estimation, and the plan of a population's privacy levels."""

from fedhdp.theory.linear_regression import Problem, TheoryGroup
from fedhdp.theory.optimum import Optimum, find_optimum
from fedhdp.theory.planning import ErrorEstimate, LevelShare, Plan, estimate_error, plan, with_optimal_weights
from fedhdp.theory.pricing import RunPricing

__all__ = [
    "ErrorEstimate",
    "LevelShare",
    "Optimum",
    "Plan",
    "Problem",
    "RunPricing",
    "TheoryGroup",
    "estimate_error",
    "find_optimum",
    "plan",
    "with_optimal_weights",
]

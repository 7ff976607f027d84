"""The optimum and its baselines as records."""

from __future__ import annotations

import json
import math

import msgspec
import numpy as np
import pytest
from theory_problems import FIVE, problem_of

from fedhdp.theory.optimum import baselines, find_optimum


@pytest.mark.parametrize(
    "groups", [((1, 0.0),), ((1, math.inf),), ((5, 0.0), (5, math.inf)), ((5, math.inf), (1, 0.0))]
)
@pytest.mark.parametrize("alpha2", [0.0, 1.0])
@pytest.mark.parametrize("tau2", [0.0, 1.0])
def test_corners_have_no_nan_and_no_negative_number(groups, alpha2, tau2):
    result = msgspec.to_builtins(find_optimum(problem_of(*groups, alpha2=alpha2, tau2=tau2)))
    numbers = json.loads(json.dumps(result), parse_constant=lambda text: {"Infinity": math.inf}[text])

    def check(value):
        if isinstance(value, dict):
            value = list(value.values())
        if isinstance(value, list):
            for each in value:
                check(each)
        elif isinstance(value, float):
            assert value >= 0

    check(numbers)


def test_optimum_as_json():
    result = json.loads(json.dumps(msgspec.to_builtins(find_optimum(FIVE))))
    assert set(result) == {"server_variance", "groups", "baselines"}
    assert [group["name"] for group in result["groups"]] == [group.name for group in FIVE.groups]
    np.testing.assert_allclose([group["weight"] for group in result["groups"]], FIVE.sigma2_G[0] / FIVE.sigma2_G)
    assert {"pull", "pull_own_noise", "client_mse", "bayes_mse"} <= set(result["groups"][0])


def test_fedhdp_is_better_than_every_private_baseline():
    best, others = find_optimum(FIVE), baselines(FIVE)
    for name in ("dp_fedavg", "hdp_fedavg", "local_only"):
        variance = others[name].server_variance
        assert variance is None or best.server_variance < variance
        for ours, theirs in zip(best.groups, others[name].groups, strict=True):
            assert ours.client_mse_own_noise < theirs.client_mse
    assert others["non_private"].server_variance < best.server_variance

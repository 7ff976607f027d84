"""The data of section 3 has the variances and the orthogonal features that the theory assumes."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import raises_field

from fedhdp.datasets import make_linear_regression, make_point_estimation

ARGUMENTS = {"clients": 400, "dimensions": 4, "samples": 6, "alpha2": 0.5, "tau2": 2.0}


def test_features_are_orthogonal():
    data = make_linear_regression(**ARGUMENTS)
    feature_KMD = data.train.x_N.reshape(400, 6, 4)
    gram_KDD = feature_KMD.swapaxes(1, 2) @ feature_KMD
    assert np.allclose(gram_KDD, 6 * np.eye(4), atol=1e-4)


def test_linear_regression_has_the_stated_variances():
    data = make_linear_regression(**ARGUMENTS)
    feature_KMD, response_KM = data.train.x_N.reshape(400, 6, 4), data.train.y_N.reshape(400, 6)
    estimate_KD = np.einsum("kmd,km->kd", feature_KMD, response_KM) / 6
    _check_variances(estimate_KD, data.test.y_N.reshape(400, 4), data.server_y_N[:, 0])


def test_point_estimation_has_the_stated_variances():
    data = make_point_estimation(**ARGUMENTS)
    estimate_KD = data.train.y_N.reshape(400, 6, 4).mean(axis=1)
    _check_variances(estimate_KD, data.test.y_N, data.server_y_N[0])


def _check_variances(estimate_KD: np.ndarray, true_KD: np.ndarray, true_D: np.ndarray) -> None:
    assert abs(np.mean((estimate_KD - true_KD) ** 2) / ARGUMENTS["alpha2"] - 1) < 0.15
    assert abs(np.mean((true_KD - true_D) ** 2) / ARGUMENTS["tau2"] - 1) < 0.15


@pytest.mark.parametrize("make", [make_linear_regression, make_point_estimation])
def test_seed_determines_the_data(make):
    first, repeated, second = (make(**ARGUMENTS, seed=seed) for seed in (0, 0, 1))
    assert np.array_equal(first.train.y_N, repeated.train.y_N)
    assert not np.array_equal(first.train.y_N, second.train.y_N)


@pytest.mark.parametrize(
    ("field", "value"),
    [("clients", 0), ("dimensions", 0), ("samples", 3), ("alpha2", -1.0), ("alpha2", float("inf")), ("tau2", np.nan)],
)
def test_invalid_argument_is_refused(field, value):
    with raises_field(field):
        make_linear_regression(**(ARGUMENTS | {field: value}))

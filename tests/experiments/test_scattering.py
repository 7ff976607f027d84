"""Fixed features of images as inputs: what they are, whose data they take, and an experiment with them."""

from __future__ import annotations

import numpy as np
import pytest
from experiment_helpers import keep_going, tiny
from msgspec.structs import replace

from fedhdp.experiments.components import HandwritingConfig, MlpConfig, count_parameters, describe_data
from fedhdp.experiments.runner import run
from fedhdp.experiments.scattering import DIRECTIONS, features, scatter, wavelets


def test_wavelets_have_mean_0_and_answer_to_their_own_direction():
    filters = wavelets()
    assert filters.shape == (16, 7, 7)
    np.testing.assert_allclose(filters.sum(axis=(1, 2)), 0, atol=1e-12)
    stripes_N = np.tile(np.sign(np.sin(np.arange(28) * 3 * np.pi / 4 + 0.1)), (1, 28, 1)).astype(np.float32)
    response_C = features(stripes_N, None).reshape(17, 7, 7)[1:, 2:5, 2:5].mean(axis=(1, 2))
    assert response_C.argmax() == 0  # the fine wavelet along the rows
    assert response_C[0] > 3 * response_C[4]  # the one across


def test_features_of_a_plain_image_are_its_brightness():
    maps = features(np.full((2, 28, 28), 51, np.uint8), 1 / 255).reshape(2, 17, 7, 7)
    np.testing.assert_allclose(maps[:, 0], 0.2, atol=1e-6)
    np.testing.assert_allclose(maps[:, 1:, 1:-1, 1:-1], 0, atol=1e-6)  # but for the edges


def test_a_clients_features_depend_on_its_own_images_alone():
    data = HandwritingConfig(6, samples=4, test_samples=2, server_test=10).load(tiny().mechanism, 0)
    changed_x = data.train.x_N.copy()
    changed_x[-4:] = 255 - changed_x[-4:]
    first, second = scatter(data), scatter(data._replace(train=data.train._replace(x_N=changed_x)))
    assert first.input_shape == (DIRECTIONS,)
    np.testing.assert_allclose(first.train.x_N[:-4], second.train.x_N[:-4], atol=1e-4)
    np.testing.assert_allclose(first.test.x_N, second.test.x_N, atol=1e-4)
    assert (abs(first.train.x_N[-4:] - second.train.x_N[-4:]) > 0.1).any()
    length = np.sqrt((first.train.x_N**2).sum(axis=1).mean())
    of_images = np.sqrt(((data.train.x_N / 255.0) ** 2).sum(axis=(1, 2)).mean())
    assert length == pytest.approx(of_images, rel=1)  # so that learning rates suit both


def test_an_experiment_with_features_says_so(tmp_path):
    experiment = tiny(model=MlpConfig(8), rounds=2, evaluate_every=2)
    experiment = replace(experiment, data=replace(experiment.data, transform="scattering"))
    summary = run(experiment, tmp_path / "run", keep_going)
    assert all("64 scattering features" in variant.preparation for variant in summary.variants)
    parameters = count_parameters(experiment.data, experiment.model, experiment.load_data)
    assert parameters == 64 * 8 + 8 + 8 * 10 + 10
    assert describe_data(experiment.data) == describe_data(replace(experiment.data, transform="none"))  # its clients

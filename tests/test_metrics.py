"""Metrics agree with scikit-learn, whatever the padding; undefined values and wrong functions."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import raises_field

from fedhdp.errors import DataError, ModelError
from fedhdp.metrics import BUILT_IN, NAMES, Metric, measure, replace_metrics, resolve
from fedhdp.models import cross_entropy, squared_error

SEEDS = range(5)


def of(name: str, outputs: object, labels: object) -> float:
    """A built-in metric of plain values."""
    return measure(resolve((name,), cross_entropy), np.array(outputs, np.float32), np.array(labels))[name]


def classifier(seed: int, classes: int, count: int = 60) -> tuple[np.ndarray, np.ndarray]:
    """Outputs with ties, and labels in which the last of many classes is missing."""
    rng = np.random.default_rng(seed)
    outputs = rng.normal(size=(count, classes)).round(1).astype(np.float32)
    return outputs, rng.integers(0, max(2, classes - (classes > 3)), count)


def padded(metric: Metric, outputs: np.ndarray, labels: np.ndarray, padding: int) -> float:
    """The metric with so many rows of zeros behind."""

    def pad(a: np.ndarray) -> np.ndarray:
        return np.concatenate([a, np.zeros((padding, *a.shape[1:]), a.dtype)])

    mask = np.arange(len(labels) + padding) < len(labels)
    return float(jax.jit(metric.function)(pad(outputs), pad(labels), mask))


def expected(name: str, outputs: np.ndarray, labels: np.ndarray) -> float:
    """The metric by scikit-learn."""
    sklearn = pytest.importorskip("sklearn.metrics")
    classes = outputs.shape[1]
    predicted = outputs.argmax(axis=1) if classes > 1 else (outputs[:, 0] > 0).astype(int)
    if name == "accuracy":
        return sklearn.accuracy_score(labels, predicted)
    if name == "balanced_accuracy":
        return np.mean([(predicted[labels == c] == c).mean() for c in set(labels)])
    if name == "f1":
        return sklearn.f1_score(labels, predicted, average="binary" if classes <= 2 else "macro")
    log_odds = outputs - np.log(np.exp(outputs).sum(axis=1, keepdims=True)) if classes > 2 else outputs
    if classes <= 2:
        return sklearn.roc_auc_score(labels, log_odds[:, -1] - (log_odds[:, 0] if classes == 2 else 0))
    return np.mean([sklearn.roc_auc_score(labels == c, log_odds[:, c]) for c in set(labels)])


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("classes", [1, 2, 5])
@pytest.mark.parametrize("name", ["accuracy", "balanced_accuracy", "f1", "auc"])
def test_classification_is_scikit_learns(name, classes, seed):
    outputs, labels = classifier(seed, classes)
    value = expected(name, outputs, labels)
    for padding in (0, 3, 40):
        assert padded(BUILT_IN[name], outputs, labels, padding) == pytest.approx(value, abs=1e-5)


@pytest.mark.parametrize("padding", [0, 7])
def test_errors(padding):
    rng = np.random.default_rng(0)
    outputs, labels = rng.normal(size=(2, 9, 3)).astype(np.float32)
    error = padded(BUILT_IN["mean_squared_error"], outputs, labels, padding)
    assert error == pytest.approx(((outputs - labels) ** 2).mean(), rel=1e-5)
    (loss,) = resolve(("loss",), squared_error)
    assert padded(loss, outputs, labels, padding) == pytest.approx(1.5 * error, rel=1e-5)


def test_labels_of_a_sequence():
    outputs, labels = classifier(0, 4, count=24)
    by_sequence = (outputs.reshape(6, 4, 4), labels.reshape(6, 4))
    for name in ("accuracy", "balanced_accuracy", "f1", "auc"):
        assert padded(BUILT_IN[name], *by_sequence, 2) == pytest.approx(of(name, outputs, labels), abs=1e-6)


def test_undefined_values_are_nan():
    assert np.isnan(of("auc", [[0.0, 1.0], [1.0, 0.0]], [1, 1]))
    assert np.isnan(of("auc", [[0.0, 1.0, 0.0]] * 2, [1, 1]))
    assert np.isnan(of("f1", [[1.0, 0.0]] * 2, [0, 0]))  # no positive label, and none predicted
    assert of("f1", [[0.0, 1.0]] * 2, [0, 0]) == 0
    assert of("balanced_accuracy", [[1.0, 0.0]] * 2, [0, 0]) == 1


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_outputs_that_are_not_finite_are_wrong(bad):
    outputs, labels = [[bad, 0.0], [0.0, 1.0], [1.0, 0.0]], [0, 1, 0]
    assert of("accuracy", outputs, labels) == pytest.approx(2 / 3)
    assert of("balanced_accuracy", outputs, labels) == pytest.approx(0.75)
    assert of("f1", outputs, labels) == 1  # class 1 alone
    assert of("auc", outputs, labels) == pytest.approx(0.5)
    assert of("loss", outputs, labels) == np.inf
    value = measure(resolve(("mean_squared_error",), squared_error), np.array([[bad]]), np.array([[0.0]]))
    assert value == {"mean_squared_error": np.inf}


def test_functions_by_their_parameters():
    def on_host(outputs, labels, threshold=0.5):
        return float((outputs[:, 0] > threshold).mean())

    def on_devices(outputs, labels, mask):
        return jnp.mean(outputs, where=mask[:, None])

    metrics = resolve((on_host, Metric("error", on_devices, higher_is_better=False), "auc"), cross_entropy)
    assert [metric.name for metric in metrics] == ["on_host", "error", "auc"]
    assert [metric.on_devices for metric in metrics] == [False, True, True]
    assert measure(metrics[:2], [[1.0], [0.0]], [1, 0]) == {"on_host": 0.5, "error": 0.5}


@pytest.mark.parametrize(
    ("metrics", "value"),
    [
        (("auk",), "auk"),
        ("auc", "auc"),
        (("auc", "auc"), ["auc", "auc"]),
        ((lambda outputs, labels: 0.0,), "<lambda>"),
        ((partial(max, 1),), ""),
        ((Metric("clip", lambda outputs, labels: 0.0),), "clip"),
        ((Metric("auc", lambda outputs, labels: 0.0),), "auc"),
        ((Metric("auc_variance", lambda outputs, labels: 0.0),), "auc_variance"),
        ((Metric("one", lambda outputs: 0.0),), "one"),
        ((Metric("text", "auc"),), "text"),  # type: ignore[arg-type]
    ],
)
def test_metrics_that_cannot_be_used_are_refused(metrics, value):
    with raises_field("metrics", ModelError) as caught:
        resolve(metrics, cross_entropy)
    assert caught.value.value == value


@pytest.mark.parametrize("result", [np.zeros(2), "0.5", None])
def test_a_metric_returns_one_number(result):
    with raises_field("metrics", ModelError):
        measure([Metric("mine", lambda outputs, labels: result)], np.zeros((2, 3)), np.zeros(2, int))


def test_a_metric_that_fails_is_named():
    def fails(outputs, labels):
        raise RuntimeError("two\nlines")

    with raises_field("metrics", ModelError) as caught:
        measure([Metric("mine", fails)], np.zeros((2, 3)), np.zeros(2, int))
    assert caught.value.value == "mine"


@pytest.mark.parametrize(
    ("name", "labels"),
    [("accuracy", np.zeros(2)), ("auc", np.zeros((2, 3, 1), int)), ("mean_squared_error", np.zeros(2, int))],
)
def test_labels_that_do_not_fit_a_metric_are_refused(name, labels):
    with raises_field("metrics", DataError):
        measure([BUILT_IN[name]], np.zeros((2, 3), np.float32), labels)


def test_names_replace_a_models_metrics():
    metric = Metric("mine", lambda outputs, labels: 0.0)
    assert replace_metrics((metric, "f1"), ()) == (metric, "f1")
    assert replace_metrics((metric, "f1"), ("auc", "mine")) == ("auc", metric)
    assert set(NAMES) == {*BUILT_IN, "loss"}

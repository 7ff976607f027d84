"""Metrics: functions of outputs and labels, for each client on its own test examples and for the server on its test set.

Built in, by name:

    accuracy              share of examples whose label has the largest output
    balanced_accuracy     mean over the classes among the labels of the share of their examples that is right
    f1                    of class 1 where there are two classes, else the mean over classes among labels and predictions
    auc                   area under the ROC curve; with more than two classes, the mean of each class against the rest
    loss                  mean of the model's loss
    mean_squared_error    mean over examples and outputs

A model with one output predicts class 1 where the output is above 0. An output that is not finite is wrong: it has no
accuracy, the worst rank and an infinite loss. A metric that is undefined, such as the AUC of a single class, is NaN.

A metric of your own is a function of two arguments or of three, or a `Metric` with such a function:

    def recall(outputs, labels): ...        # NumPy arrays of one client's examples; runs on the host, client by client
    def recall(outputs, labels, mask): ...  # JAX arrays, padded where the mask is False; runs on the devices

Axis letters: N examples (padded), L classes.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedhdp.errors import DataError, FedHDPError, ModelError, require

Array = jax.Array

NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")
RESERVED = re.compile(r"clip|refused|epsilon|sampled|sent|replies|.*_(variance|worst_decile|clients)")  # other rows


class Metric(NamedTuple):
    """A metric with what cannot be seen from its function.

    Args:
        name: Its name in files and tables: letters, digits, ``_``, ``-`` and ``.``.
        function: ``function(outputs, labels)`` gets one client's NumPy arrays, ``function(outputs, labels, mask)`` JAX
            arrays that are padded where the mask is False. It returns one number; NaN where it is undefined.
        higher_is_better: Whether a higher value is the better one.
        percent: Whether tables show it in percent: a rate from 0 to 1.
    """

    name: str
    function: Callable[..., Any]
    higher_is_better: bool = True
    percent: bool = False

    @property
    def on_devices(self) -> bool:
        """Whether the function takes a mask, and so runs on the devices."""
        return _arity(self.function) == 3


@cache
def _arity(function: Callable[..., Any]) -> int:
    """The number of parameters without a default; 2 where it cannot be seen."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return 2
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(parameter.kind in positional and parameter.default is parameter.empty for parameter in parameters)


def accuracy(outputs: Array, labels: Array, mask: Array) -> Array:
    """The share of examples whose label has the largest output."""
    outputs_NL, label_N, mask_N = _flatten("accuracy", outputs, labels, mask)
    return _mean(_predict(outputs_NL) == label_N, mask_N)


def balanced_accuracy(outputs: Array, labels: Array, mask: Array) -> Array:
    """The mean recall of the classes among the labels."""
    outputs_NL, label_N, mask_N = _flatten("balanced_accuracy", outputs, labels, mask)
    label_NL = _one_hot(label_N, outputs_NL) * mask_N[:, None]
    right_NL = label_NL * (_predict(outputs_NL) == label_N)[:, None]
    recall_L = right_NL.sum(axis=0) / label_NL.sum(axis=0)  # NaN for a class that no example has
    return jnp.nanmean(recall_L)


def f1(outputs: Array, labels: Array, mask: Array) -> Array:
    """F1 of class 1 where there are two classes, else the mean of F1 over the classes among labels and predictions."""
    outputs_NL, label_N, mask_N = _flatten("f1", outputs, labels, mask)
    label_NL = _one_hot(label_N, outputs_NL) * mask_N[:, None]
    predicted_NL = _one_hot(_predict(outputs_NL), outputs_NL) * mask_N[:, None]
    f1_L = 2 * (label_NL * predicted_NL).sum(axis=0) / (label_NL.sum(axis=0) + predicted_NL.sum(axis=0))
    return f1_L[1] if len(f1_L) == 2 else jnp.nanmean(f1_L)


def auc(outputs: Array, labels: Array, mask: Array) -> Array:
    """The area under the ROC curve; of more than two classes the mean over those that some examples have and some not."""
    outputs_NL, label_N, mask_N = _flatten("auc", outputs, labels, mask)
    classes = outputs_NL.shape[1]
    if classes == 1:
        return _binary_auc(outputs_NL[:, 0], label_N == 1, mask_N)
    if classes == 2:
        return _binary_auc(outputs_NL[:, 1] - outputs_NL[:, 0], label_N == 1, mask_N)
    score_LN, class_L = jax.nn.log_softmax(outputs_NL).T, jnp.arange(classes)
    return jnp.nanmean(jax.lax.map(lambda pair: _binary_auc(pair[0], label_N == pair[1], mask_N), (score_LN, class_L)))


def _binary_auc(score_N: Array, is_positive_N: Array, mask_N: Array) -> Array:
    """The share of pairs of a positive and a negative example in which the positive one scores higher; ties are half."""
    positive_N, negative_N = ((part_N & mask_N).astype(jnp.float32) for part_N in (is_positive_N, ~is_positive_N))
    score_N = jnp.where(jnp.isfinite(score_N), score_N, jnp.where(is_positive_N, -jnp.inf, jnp.inf))
    sorted_N, sorted_negative_N = jax.lax.sort((score_N, negative_N), num_keys=1)
    negatives_below = jnp.concatenate([jnp.zeros(1), jnp.cumsum(sorted_negative_N)])
    below_N, up_to_N = (negatives_below[jnp.searchsorted(sorted_N, score_N, side=side)] for side in ("left", "right"))
    return jnp.sum(positive_N * (below_N + up_to_N) / (2 * negative_N.sum())) / positive_N.sum()


def mean_squared_error(outputs: Array, labels: Array, mask: Array) -> Array:
    """The mean over examples and outputs of the squared difference."""
    if outputs.shape != labels.shape:
        rule = f"mean_squared_error needs labels of the shape of the outputs, {outputs.shape}, got {labels.shape}"
        raise DataError(f"metrics: {rule}", "metrics", "mean_squared_error")
    return _mean_loss(jnp.mean((outputs - labels) ** 2, axis=tuple(range(1, outputs.ndim))), mask)


@cache
def _loss_metric(loss: Callable[[Array, Array], Array]) -> Callable[[Array, Array, Array], Array]:
    return lambda outputs, labels, mask: _mean_loss(loss(outputs, labels), mask)


def _mean(value_N: Array, mask_N: Array) -> Array:
    return jnp.sum(jnp.where(mask_N, value_N, 0.0)) / jnp.sum(mask_N)


def _mean_loss(loss_N: Array, mask_N: Array) -> Array:
    """The mean; infinite where an example's loss is not a number, so that a model that diverged counts."""
    return _mean(jnp.where(jnp.isnan(loss_N), jnp.inf, loss_N), mask_N)


def _flatten(name: str, outputs: Array, labels: Array, mask: Array) -> tuple[Array, Array, Array]:
    """Outputs with a last axis of classes, integer labels, and the mask; labels may have more axes than the examples'."""
    if labels.shape != outputs.shape[: labels.ndim] or outputs.ndim > labels.ndim + 1:
        rule = f"one label for each row of the outputs, {outputs.shape}, got {labels.shape}"
        raise DataError(f"metrics: {name} needs {rule}", "metrics", name)
    outputs_NL = outputs.reshape(labels.size, -1)
    if outputs_NL.shape[1] == 1:
        labels = (labels > 0.5).astype(jnp.int32)
    elif labels.dtype.kind not in "iub":
        raise DataError(f"metrics: {name} needs integers as labels, got {labels.dtype}", "metrics", name)
    mask_N = jnp.broadcast_to(mask.reshape(-1, *[1] * (labels.ndim - 1)), labels.shape)
    return outputs_NL, labels.reshape(-1), mask_N.reshape(-1)


def _predict(outputs_NL: Array) -> Array:
    """The predicted class of each example; -1, which is no class, where the largest output is not finite."""
    classes = outputs_NL.shape[1]
    predicted_N = outputs_NL[:, 0] > 0 if classes == 1 else jnp.argmax(outputs_NL, axis=1)
    return jnp.where(jnp.isfinite(jnp.max(outputs_NL, axis=1)), predicted_N, -1)


def _one_hot(label_N: Array, outputs_NL: Array) -> Array:
    return jax.nn.one_hot(label_N, max(outputs_NL.shape[1], 2))


BUILT_IN = {
    metric.name: metric
    for metric in (
        Metric("accuracy", accuracy, percent=True),
        Metric("balanced_accuracy", balanced_accuracy, percent=True),
        Metric("f1", f1, percent=True),
        Metric("auc", auc, percent=True),
        Metric("mean_squared_error", mean_squared_error, higher_is_better=False),
    )
}
NAMES = (*BUILT_IN, "loss")


def is_metric_name(name: str) -> bool:
    """Whether a metric may have this name."""
    return NAME.fullmatch(name) is not None and RESERVED.fullmatch(name) is None


def resolve(
    metrics: Sequence[str | Callable[..., Any] | Metric], loss: Callable[[Array, Array], Array]
) -> tuple[Metric, ...]:
    """The metrics of a model.

    Args:
        metrics: Names of built-in metrics, functions, or `Metric` values.
        loss: The model's loss.

    Raises:
        ModelError: If a metric is unknown, has no usable name or does not take two or three arguments.
    """
    is_tuple = isinstance(metrics, Sequence) and not isinstance(metrics, str)
    require(is_tuple, "metrics", metrics, "a tuple of names or functions", ModelError)
    resolved = tuple(_resolve(metric, loss) for metric in metrics)
    names = [metric.name for metric in resolved]
    differ = len(set(names)) == len(names) > 0
    require(differ, "metrics", names, "one or more with different names", ModelError)
    return resolved


def _resolve(metric: str | Callable[..., Any] | Metric, loss: Callable[[Array, Array], Array]) -> Metric:
    if metric == "loss":
        return Metric("loss", _loss_metric(loss), higher_is_better=False)
    if isinstance(metric, str):
        require(metric in BUILT_IN, "metrics", metric, f"one of {', '.join(NAMES)}, or functions", ModelError)
        return BUILT_IN[metric]
    if not isinstance(metric, Metric):
        metric = Metric(getattr(metric, "__name__", ""), metric)
    name = metric.name
    if not isinstance(name, str) or not is_metric_name(name) or name in NAMES:
        hint = "another name; name a function with Metric(name, function)"
        raise ModelError(f"metrics: a function of the name {name!r} needs {hint}", "metrics", name)
    if not callable(metric.function) or _arity(metric.function) not in (2, 3):
        rule = "must be a function of (outputs, labels) or of (outputs, labels, mask)"
        raise ModelError(f"metrics: {name} {rule}, got {metric.function!r}", "metrics", name)
    return metric


def measure(metrics: Sequence[Metric], outputs: Any, labels: Any) -> dict[str, float]:
    """The metrics of some examples, without padding; NaN where undefined.

    Raises:
        ModelError: If a metric fails or does not return one number.
    """
    return {metric.name: measure_one(metric, outputs, labels) for metric in metrics}


def measure_one(metric: Metric, outputs: Any, labels: Any) -> float:
    """One metric of some examples; `measure` says more."""
    try:
        if metric.on_devices:
            value = metric.function(jnp.asarray(outputs), jnp.asarray(labels), jnp.ones(len(labels), bool))
        else:
            value = metric.function(np.asarray(outputs), np.asarray(labels))
        if np.ndim(value) == 0 and not isinstance(value, str | bytes):
            return float(value)
    except FedHDPError:
        raise
    except Exception as error:  # a user's function may raise anything
        text = str(error).partition("\n")[0]
        raise ModelError(
            f"metrics: {metric.name} failed: {type(error).__name__}: {text}", "metrics", metric.name
        ) from error
    kind = f"an array of the shape {np.shape(value)}" if np.ndim(value) else repr(value)
    raise ModelError(f"metrics: {metric.name} must return one number, got {kind}", "metrics", metric.name)


def replace_metrics(metrics: tuple[Any, ...], names: Sequence[str]) -> tuple[Any, ...]:
    """Metrics by these names: a model's own functions where it has such, else the built-in ones.

    Args:
        metrics: The model's metrics.
        names: The names to take; none: the model's metrics as they are.
    """
    if not names:
        return metrics
    by_name = {getattr(metric, "name", getattr(metric, "__name__", metric)): metric for metric in metrics}
    return tuple(by_name.get(name, name) for name in names)

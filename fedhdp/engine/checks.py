"""Whether a data set, its clients and a model fit each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.flatten_util import ravel_pytree

from fedhdp.client import LocalTraining, scale_inputs
from fedhdp.data import Examples, FederatedData, check_values
from fedhdp.errors import DataError, FedHDPError, InvalidValueError, ModelError
from fedhdp.metrics import Metric, measure
from fedhdp.models import Array, Model, Parameters, check_parameter_types, cross_entropy
from fedhdp.optimizers import check_transformation
from fedhdp.server import ServerOptimizer


def check_data(data: FederatedData, model: Model) -> None:
    """Refuse data and models that would train to wrong numbers without an error.

    Raises:
        DataError: If examples, clients or labels do not fit each other or the model.
        ModelError: If the model cannot be initialized, applied or scored on such examples.
    """
    for field, part in (("test", data.test), ("validation", data.validation)):
        if part is not None and len(part.count_K) != data.num_clients:
            _refuse_data(field, len(part.count_K), f"the examples of {data.num_clients} clients, as train")
    if len(data.ids) != data.num_clients:
        _refuse_data("client_ids", len(data.ids), f"of {data.num_clients} clients, as train")
    if data.client_ids is not None and len(set(data.ids.tolist())) < data.num_clients:
        ids = data.ids.tolist()
        twice = next(client for client, count in Counter(ids).items() if count > 1)
        _refuse_data("client_ids", twice, "different for each client")
    if data.input_scale is not None and not 0 < abs(data.input_scale) < np.inf:
        _refuse_data("input_scale", data.input_scale, "finite and not 0, or None")
    if len(data.server_x_N) != len(data.server_y_N):
        _refuse_data("server_x_N", len(data.server_x_N), f"as many as server_y_N, {len(data.server_y_N)}")
    parts = [(part.x_N, part.y_N) for part in (data.train, data.test) if isinstance(part, Examples)]
    parts = [(x_N, y_N) for x_N, y_N in (*parts, (data.server_x_N, data.server_y_N)) if len(y_N)]
    for x_N, y_N in parts:
        if x_N.dtype.kind not in "fiub":
            _refuse_data("inputs", str(x_N.dtype), "numbers")
        if x_N.shape[1:] != data.input_shape:
            _refuse_data("inputs", x_N.shape[1:], f"of the shape {data.input_shape} in every part of the data")
        if data.input_scale is None and (x_N.dtype.kind == "f") != (data.template.x_N.dtype.kind == "f"):
            rule = f"floats or integers in every part of the data, as {data.template.x_N.dtype} is"
            _refuse_data("inputs", str(x_N.dtype), rule)
        if y_N.shape[1:] != data.template.y_N.shape[1:]:
            _refuse_data(
                "targets", y_N.shape[1:], f"of the shape {data.template.y_N.shape[1:]} in every part of the data"
            )
    check_values(data)
    labels = [y_N for _, y_N in parts] if model.loss is cross_entropy else []
    for y_N in labels:
        if y_N.dtype.kind not in "iub":
            rule = "integers where the loss is cross_entropy (fedhdp.models.squared_error takes numbers)"
            _refuse_data("labels", str(y_N.dtype), rule)
    classes = _check_model(data, model).shape[-1]
    for y_N in labels:
        if not 0 <= int(np.min(y_N)) <= int(np.max(y_N)) < classes:
            limits = (int(np.min(y_N)), int(np.max(y_N)))
            _refuse_data("labels", limits, f"between 0 and {classes - 1}, as the model has {classes} outputs")


def _check_model(data: FederatedData, model: Model) -> Any:
    """The shape of the outputs for two examples."""
    x_N, y_N = (jax.ShapeDtypeStruct((2, *a_N.shape[1:]), a_N.dtype) for a_N in (data.template.x_N, data.template.y_N))
    x_N = jax.eval_shape(partial(scale_inputs, input_scale=data.input_scale), x_N)
    key = jax.random.key(0)
    check_parameter_types("the model's parameters", _shape("init", model.init, key))
    _shape("apply", lambda x_N: model.apply(model.init(key), x_N, None), x_N)
    outputs = _shape("apply", lambda x_N: model.apply(model.init(key), x_N, key), x_N)
    shape = _shape("loss", model.loss, outputs, y_N).shape
    if shape != (2,):
        raise ModelError(f"loss must have the shape (2,) for two examples, got {shape}", "loss", shape)
    return outputs


def check_metrics(data: FederatedData, model: Model, metrics: Sequence[Metric]) -> None:
    """Refuse metrics that fail or do not return one number; the data and the model fit each other.

    Raises:
        DataError: If labels are not such as a built-in metric needs.
        ModelError: If a metric fails or returns something else than a number.
    """
    y_N = data.server_y_N
    if not len(y_N) and data.test.count_K.any():
        y_N = data.test.labels(int(np.flatnonzero(data.test.count_K)[0]))
    if not len(y_N):
        return
    x_N = jax.ShapeDtypeStruct((len(y_N[:8]), *data.template.x_N.shape[1:]), data.template.x_N.dtype)

    def apply(x_N: Array) -> Array:
        return model.apply(model.init(jax.random.key(0)), scale_inputs(x_N, data.input_scale), None)

    measure(metrics, np.zeros(jax.eval_shape(apply, x_N).shape, np.float32), y_N[:8])


def check_optimizers(like: Parameters, training: LocalTraining, server: ServerOptimizer) -> None:
    """Refuse optimizers that cannot train such parameters, before anything is compiled.

    Raises:
        InvalidValueError: If the initialization or a step of an optimizer fails.
    """
    row = jax.eval_shape(lambda theta: ravel_pytree(theta)[0], like)
    transformations = {"training": (training.transformation(0.1), like), "server": (server.transformation(), row)}
    for name, (transformation, theta) in transformations.items():
        try:
            check_transformation(transformation, theta)
        except Exception as error:
            cause = f"{type(error).__name__}: {str(error).strip()}".split("\n")[0]
            message = f"{name}.optimizer fails on the model's parameters: {cause}"
            raise InvalidValueError(message, f"{name}.optimizer", transformation) from error


def _shape(field: str, function: Callable[..., Array], *arguments: Any) -> Any:
    """The shape of what a function of a model returns."""
    try:
        return jax.eval_shape(function, *arguments)
    except FedHDPError:
        raise
    except Exception as error:  # a user's function, and the library that it uses
        shapes = " and ".join(f"{argument.dtype}{list(argument.shape)}" for argument in arguments)
        cause = str(error).strip().split("\n")[0]
        message = f"the model's {field} failed with {shapes}: {type(error).__name__}: {cause}"
        raise ModelError(message, field, shapes) from error


def _refuse_data(field: str, value: object, rule: str) -> None:
    raise DataError(f"{field} must be {rule}, got {value!r}", field, value)

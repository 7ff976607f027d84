"""Models: the paper's two networks, a linear model, and how to bring your own.

A ``Model`` is a frozen pair of pure functions, ``init(key) -> parameters`` and ``apply(parameters, x_N, key) ->
outputs``, with a loss for each example and metrics. ``key`` is None in evaluation; in local training it is there for
dropout. Any pytree of float32 arrays serves as parameters, so a model from plain JAX is ready as it is;
``adapters.py`` makes models of modules of Flax, Equinox and Haiku.

Networks are written here as anyone would write them. The engine reads a model's program and finds what it can compute
faster (see ``engine/network.py``).

``mlp``, ``cnn`` and ``linear`` return the same object when they are called again with the same arguments, so that all
simulations with such a model share one compilation.

Axis letters: N examples, L classes, H units, D outputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedhdp.errors import DataError, ModelError

Parameters = Any  # any pytree of float32 arrays; of float64 where JAX's 64-bit mode is on
Array = jax.Array


def take(parameters_C: Parameters, which: Any) -> Parameters:
    """Some of many parameters that are stacked, by their numbers or as a slice."""
    return jax.tree.map(lambda leaf_C: leaf_C[which], parameters_C)


def parameter_sizes(parameters: Parameters) -> dict[str, int]:
    """How many parameters each array has, by its path in the model, in the order of a row of all parameters."""
    leaves, _ = jax.tree.flatten_with_path(parameters)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): math.prod(leaf.shape) for path, leaf in leaves}


def check_parameter_types(what: str, parameters: Parameters) -> None:
    """Refuse parameters other than float32 and float64.

    In 16 bits a norm can come out too small, as the square of a small number is 0, and then the clip bounds too little.

    Raises:
        ModelError: If there are none, or some are neither float32 nor float64.
    """
    types = {str(leaf.dtype) for leaf in jax.tree.leaves(parameters)}
    if not types or types - {"float32", "float64"}:
        names = ", ".join(sorted(types)) or "none"
        rule = "arrays of float32 (apply may cast them)"
        raise ModelError(f"{what} must be {rule}, got {names}", "parameters", names)


def parameter_bytes(model: Model) -> int:
    """The bytes of a model's parameters."""
    leaves = jax.tree.leaves(jax.eval_shape(model.init, jax.random.key(0)))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


@jax.custom_jvp
def cross_entropy(logits_NL: Array, label_N: Array) -> Array:
    """The cross entropy of each example.

    Raises:
        DataError: If there is not one label for each example.
    """
    _check_shape("labels", label_N, logits_NL[..., 0])
    return jax.nn.logsumexp(logits_NL, axis=-1) - jnp.sum(logits_NL * _one_hot(label_N, logits_NL), axis=-1)


@cross_entropy.defjvp
def _cross_entropy_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Any]) -> tuple[Array, Array]:
    """The derivative, probabilities minus one-hot labels, in fewer passes than automatic differentiation takes."""
    logits_NL, label_N = primals
    e_NL = jnp.exp(logits_NL - jnp.max(logits_NL, axis=-1, keepdims=True))
    gradient_NL = e_NL / jnp.sum(e_NL, axis=-1, keepdims=True) - _one_hot(label_N, logits_NL)
    return cross_entropy(logits_NL, label_N), jnp.sum(gradient_NL * tangents[0], axis=-1)


def _one_hot(label_N: Array, logits_NL: Array) -> Array:
    return jax.nn.one_hot(label_N, logits_NL.shape[-1], dtype=logits_NL.dtype)


def squared_error(output_ND: Array, target_ND: Array) -> Array:
    """Half the squared distance of each output to its target.

    Raises:
        DataError: If targets and outputs differ in shape.
    """
    _check_shape("targets", target_ND, output_ND)
    return 0.5 * jnp.sum((output_ND - target_ND) ** 2, axis=-1)


def _check_shape(field: str, value: Array, like: Array) -> None:
    """Refuse arrays of another shape, which would be broadcast."""
    shape, expected = jnp.shape(value), jnp.shape(like)
    if shape != expected:
        raise DataError(f"{field} must have the shape of the outputs, {expected}, got {shape}", field, shape)


class Model(NamedTuple):
    """How to initialize parameters, predict with them, and evaluate predictions.

    Args:
        init: From a random key to parameters.
        apply: From parameters, inputs [N, ...] and a random key (None in evaluation) to outputs [N, ...].
        loss: From outputs and targets to the loss of each example.
        metrics: What is measured on test examples, the first of which tables show: names of built-in metrics, functions of
            outputs and labels, or `Metric` values (see ``fedhdp.metrics``). Empty: accuracy, or mean_squared_error where
            the loss is ``squared_error``.
    """

    init: Callable[[Array], Parameters]
    apply: Callable[[Parameters, Array, Array | None], Array]
    loss: Callable[[Array, Array], Array] = cross_entropy
    metrics: tuple[Any, ...] = ()


def dense(key: Array, inputs: int, units: int) -> Parameters:
    """The parameters of a dense layer: weights uniform as Glorot and Bengio have it, no bias."""
    limit = math.sqrt(6 / (inputs + units))
    return {"w": jax.random.uniform(key, (inputs, units), minval=-limit, maxval=limit), "b": jnp.zeros(units)}


@lru_cache(maxsize=128)
def linear(
    inputs: int,
    outputs: int,
    bias: bool = True,
    loss: Callable[[Array, Array], Array] = cross_entropy,
    metrics: tuple[Any, ...] = (),
) -> Model:
    """A linear model; with the default loss, multinomial logistic regression.

    Args:
        inputs: The size of one example.
        outputs: The size of one output.
        bias: Whether a bias is added.
        loss: From outputs and targets to the loss of each example.
        metrics: As in ``Model``.
    """

    def init(key: Array) -> Parameters:
        if not bias:
            return {"w": dense(key, inputs, outputs)["w"]}
        first, _ = jax.random.split(key)
        return {"first": dense(first, inputs, outputs)}

    def apply(parameters: Parameters, x_N: Array, key: Array | None) -> Array:
        flat_NF = x_N.reshape(x_N.shape[0], -1)
        return _affine(parameters["first"], flat_NF) if bias else flat_NF @ parameters["w"]

    return Model(init, apply, loss, metrics)


@lru_cache(maxsize=128)
def mlp(inputs: int = 784, hidden: int = 50, classes: int = 10) -> Model:
    """The paper's network for MNIST: one hidden layer of rectified linear units.

    Args:
        inputs: Numbers of one input, of any shape.
        hidden: Units of the hidden layer.
        classes: Outputs.
    """

    def init(key: Array) -> Parameters:
        first, rest = jax.random.split(key)
        return {"first": dense(first, inputs, hidden), "rest": dense(rest, hidden, classes)}

    def apply(parameters: Parameters, x_N: Array, key: Array | None) -> Array:
        h_NH = jax.nn.relu(_affine(parameters["first"], x_N.reshape(x_N.shape[0], -1)))
        return _affine(parameters["rest"], h_NH)

    return Model(init, apply)


def _affine(layer: dict[str, Array], x_N: Array) -> Array:
    return x_N @ layer["w"] + layer["b"]


@lru_cache(maxsize=128)
def cnn(
    side: int = 28, classes: int = 62, kernel: int = 3, channels: tuple[int, int] = (16, 32), hidden: int = 128
) -> Model:
    """The paper's network for FEMNIST; the paper leaves the size of the convolutions open.

    Args:
        side: Pixels on a side of an image, a multiple of 4.
        classes: Outputs.
        kernel: Pixels on a side of a convolution's kernel.
        channels: Output channels of the two convolutions.
        hidden: Units of the dense layer.
    """
    flat = (side // 4) ** 2 * channels[1]

    def init(key: Array) -> Parameters:
        keys = jax.random.split(key, 4)
        inputs = (kernel * kernel, kernel * kernel * channels[0], flat, hidden)
        outputs = (*channels, hidden, classes)
        conv1, conv2, *dense_layers = [dense(k, i, o) for k, i, o in zip(keys, inputs, outputs, strict=True)]
        shapes = ((kernel, kernel, 1, channels[0]), (kernel, kernel, *channels))
        convolutions = [layer | {"w": layer["w"].reshape(s)} for layer, s in zip((conv1, conv2), shapes, strict=True)]
        return dict(zip(("conv1", "conv2", "dense1", "dense2"), (*convolutions, *dense_layers), strict=True))

    def apply(parameters: Parameters, x_N: Array, key: Array | None) -> Array:
        keys = (None, None) if key is None else jax.random.split(key)
        image = x_N.reshape(-1, side, side, 1)
        for layer in (parameters["conv1"], parameters["conv2"]):
            image = _max_pool(jax.nn.relu(_convolve(layer, image)))
        h = _dropout(image.reshape(image.shape[0], -1), 0.25, keys[0])
        h = _dropout(jax.nn.relu(_affine(parameters["dense1"], h)), 0.5, keys[1])
        return _affine(parameters["dense2"], h)

    return Model(init, apply)


def _dropout(h: Array, rate: float, key: Array | None) -> Array:
    """Units dropped at random in training and never in evaluation."""
    if key is None:
        return h
    return jnp.where(jax.random.bernoulli(key, 1 - rate, h.shape), h / (1 - rate), 0.0)


def _convolve(layer: dict[str, Array], image: Array) -> Array:
    """A convolution of images [N, height, width, inputs] whose outputs are as large."""
    numbers = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(image, layer["w"], (1, 1), "SAME", dimension_numbers=numbers) + layer["b"]


def _max_pool(image: Array) -> Array:
    return jax.lax.reduce_window(image, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


def name_parameters(parameters: Parameters) -> dict[str, Array]:
    """The arrays of a pytree, by their path in it: ``first/w``."""
    leaves, _ = jax.tree.flatten_with_path(parameters)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def unname_parameters(model: Model, arrays: Mapping[str, Any], field: str = "parameters") -> Parameters:
    """A model's parameters from arrays that are named by their path in them.

    Args:
        model: The model.
        arrays: The arrays, as `name_parameters` returns them.
        field: What an error calls them.

    Raises:
        ModelError: If the names or shapes are not the model's.
    """
    like = jax.eval_shape(model.init, jax.random.key(0))
    expected = {name: tuple(leaf.shape) for name, leaf in name_parameters(like).items()}
    actual = {name: tuple(array.shape) for name, array in arrays.items()}
    for name in [*expected, *actual]:
        if expected.get(name) != actual.get(name):
            has, needs = actual.get(name, "no such array"), expected.get(name, "no such array")
            raise ModelError(f"{field}: {name} has {has}, the model has {needs}", field, name)
    leaves = [jnp.asarray(arrays[name], leaf.dtype) for name, leaf in name_parameters(like).items()]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)

"""Models: the paper's two networks, a linear model, and how to bring your own.

A ``Model`` is a frozen pair of pure functions, ``init(key) -> parameters`` and ``apply(parameters, x_N, key) ->
outputs``, with a loss for each example and metrics. ``key`` is None in evaluation; in local training it is there for
dropout. Any pytree of float arrays serves as parameters, so a model from plain JAX is ready as it is; ``adapters.py`` makes
models of modules of Flax, Equinox and Haiku.

A model whose first layer is dense is best made with ``dense_first``: the engine can then train it by low-rank updates
(see ``engine/low_rank.py``), which is the same mathematics for a fraction of the arithmetic.

``mlp``, ``cnn`` and ``linear`` return the same object when they are called again with the same arguments, so that all
simulations with such a model share one compilation.

Axis letters: N examples, L classes, H units, D outputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedhdp.errors import DataError, ModelError

Parameters = Any  # any pytree of float arrays
Array = jax.Array


def take(parameters_C: Parameters, which: Any) -> Parameters:
    """Some of many parameters that are stacked, by their numbers or as a slice."""
    return jax.tree.map(lambda leaf_C: leaf_C[which], parameters_C)


def parameter_sizes(parameters: Parameters) -> dict[str, int]:
    """How many parameters each array has, by its path in the model, in the order of a row of all parameters."""
    leaves, _ = jax.tree.flatten_with_path(parameters)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): math.prod(leaf.shape) for path, leaf in leaves}


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
        head: What follows a dense first layer; set by ``dense_first``.
    """

    init: Callable[[Array], Parameters]
    apply: Callable[[Parameters, Array, Array | None], Array]
    loss: Callable[[Array, Array], Array] = cross_entropy
    metrics: tuple[Any, ...] = ()
    head: Callable[[Parameters, Array, Array | None], Array] | None = None


def dense_first(
    init_rest: Callable[[Array], Parameters],
    head: Callable[[Parameters, Array, Array | None], Array],
    inputs: int,
    units: int,
    **loss_and_metrics: Any,
) -> Model:
    """A model that is ``head(rest, x·w + b, key)``: a dense layer on the flat input, then anything.

    Args:
        init_rest: From a random key to the parameters of the head.
        head: From its parameters, the dense layer's outputs and a random key to the model's outputs.
        inputs: The size of one example.
        units: Outputs of the dense layer.
        **loss_and_metrics: ``loss`` and ``metrics`` of the model.

    Returns:
        The model; its parameters are ``{"first": {"w", "b"}, "rest": ...}``.
    """

    def init(key: Array) -> Parameters:
        first, rest = jax.random.split(key)
        return {"first": dense(first, inputs, units), "rest": init_rest(rest)}

    def apply(parameters: Parameters, x_N: Array, key: Array | None) -> Array:
        flat_NF = x_N.reshape(x_N.shape[0], -1)
        return head(parameters["rest"], flat_NF @ parameters["first"]["w"] + parameters["first"]["b"], key)

    return Model(init, apply, head=head, **loss_and_metrics)


def dense(key: Array, inputs: int, units: int) -> Parameters:
    """The parameters of a dense layer: weights uniform as Glorot and Bengio have it, no bias."""
    limit = math.sqrt(6 / (inputs + units))
    return {"w": jax.random.uniform(key, (inputs, units), minval=-limit, maxval=limit), "b": jnp.zeros(units)}


def materialized_transpose(a: Array) -> Array:
    """A matrix transposed in memory: batches of small matrix products are fast on CPUs only so."""
    return jax.lax.optimization_barrier(a.T)


@jax.custom_vjp
def output_layer(h_NH: Array, w_LH: Array) -> Array:
    """A dense layer to few outputs with a row of weights for each, fast for many small networks, as are its gradients."""
    return jnp.einsum("lh,nh->ln", w_LH, h_NH).T


def _output_layer_backward(saved: tuple[Array, Array], g_NL: Array) -> tuple[Array, Array]:
    h_NH, w_LH = saved
    return g_NL @ w_LH, materialized_transpose(g_NL) @ h_NH


output_layer.defvjp(lambda h_NH, w_LH: (output_layer(h_NH, w_LH), (h_NH, w_LH)), _output_layer_backward)


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
    if bias:
        return dense_first(lambda key: {}, lambda rest, h_NH, key: h_NH, inputs, outputs, loss=loss, metrics=metrics)

    def apply(parameters: Parameters, x_N: Array, key: Array | None) -> Array:
        return x_N.reshape(x_N.shape[0], -1) @ parameters["w"]

    return Model(lambda key: {"w": dense(key, inputs, outputs)["w"]}, apply, loss, metrics)


@lru_cache(maxsize=128)
def mlp(inputs: int = 784, hidden: int = 50, classes: int = 10) -> Model:
    """The paper's network for MNIST: one hidden layer of rectified linear units."""

    def head(rest: Parameters, h_NH: Array, key: Array | None) -> Array:
        return output_layer(jax.nn.relu(h_NH), rest["w"]) + rest["b"]

    def init_rest(key: Array) -> Parameters:
        layer = dense(key, hidden, classes)
        return {"w": layer["w"].T, "b": layer["b"]}

    return dense_first(init_rest, head, inputs, hidden)


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
        layers = [dense(k, i, o) for k, i, o in zip(keys, inputs, outputs, strict=True)]
        return dict(zip(("conv1", "conv2", "dense1", "dense2"), layers, strict=True))

    def apply(parameters: Parameters, x_N: Array, key: Array | None) -> Array:
        keys = (None, None) if key is None else jax.random.split(key)
        convolve, image = _conv_relu_pool.get(), x_N.reshape(-1, side, side, 1)
        image = convolve(parameters["conv1"], image, kernel)
        image = convolve(parameters["conv2"], image, kernel)
        h = _dropout(image.reshape(image.shape[0], -1), 0.25, keys[0])
        h = jax.nn.relu(h @ parameters["dense1"]["w"] + parameters["dense1"]["b"])
        h = _dropout(h, 0.5, keys[1])
        return h @ parameters["dense2"]["w"] + parameters["dense2"]["b"]

    return Model(init, apply)


def _dropout(h: Array, rate: float, key: Array | None) -> Array:
    """Units dropped at random in training and never in evaluation."""
    if key is None:
        return h
    return jnp.where(jax.random.bernoulli(key, 1 - rate, h.shape), h / (1 - rate), 0.0)


def conv_relu_pool(layer: dict[str, Array], image: Array, kernel: int) -> Array:
    """A convolution of the same size, rectified linear units and 2 x 2 max pooling, as one matrix product.

    Networks that each have weights of their own make a poor grouped convolution. The four outputs that are pooled see one
    window of pixels, so a row of the product is that window and gives all four: less than half of what a row for each
    output would write and read. A window consists of blocks of 2 x 2 pixels.

    Args:
        layer: Weights ``w`` [kernel · kernel · inputs, outputs] and bias ``b`` [outputs].
        image: Images [N, height, width, inputs], of even height and width.
        kernel: Pixels on a side of the kernel.

    Returns:
        Images [N, height / 2, width / 2, outputs].
    """
    n, height, width, inputs = image.shape
    blocks = (kernel + 2) // 2  # on a side of a window
    before, side = (kernel - 1) // 2, 2 * blocks
    padded = jnp.pad(image, ((0, 0), (before, side - 2 - before), (before, side - 2 - before), (0, 0)))
    block = padded.reshape(n, height // 2 + blocks - 1, 2, width // 2 + blocks - 1, 2, inputs).swapaxes(2, 3)
    block = block.reshape(*block.shape[:3], -1)
    offsets = [(i, j) for i in range(blocks) for j in range(blocks)]
    windows = jnp.concatenate([block[:, i : i + height // 2, j : j + width // 2] for i, j in offsets], axis=-1)

    weight, rest = layer["w"].reshape(kernel, kernel, inputs, -1), side - kernel
    corners = [jnp.pad(weight, ((p, rest - p), (q, rest - q), (0, 0), (0, 0))) for p in (0, 1) for q in (0, 1)]
    matrix = jnp.stack(corners, axis=3).reshape(blocks, 2, blocks, 2, inputs, -1).swapaxes(1, 2)
    outputs = (windows @ matrix.reshape(windows.shape[-1], -1)).reshape(*windows.shape[:3], 4, -1)
    return jax.nn.relu(_max_of_four(outputs) + layer["b"])


_conv_relu_pool: ContextVar[Callable[..., Array]] = ContextVar("conv_relu_pool", default=conv_relu_pool)


@contextmanager
def use_conv_relu_pool(function: Callable[..., Array]) -> Iterator[None]:
    """Let ``cnn`` compute with this function instead of ``conv_relu_pool`` while the context is entered.

    The engine enters it while it traces its programs, with kernels for NVIDIA GPUs.
    """
    token = _conv_relu_pool.set(function)
    try:
        yield
    finally:
        _conv_relu_pool.reset(token)


@jax.custom_vjp
def _max_of_four(x: Array) -> Array:
    """The maximum over the second last axis, whose gradient needs the argmax alone."""
    return _max_of_four_forward(x)[0]


def _max_of_four_forward(x: Array) -> tuple[Array, Array]:
    top, argmax = max_and_argmax(*(x[..., i, :] for i in range(4)))
    return top, argmax.astype(jnp.int8)


def _max_of_four_backward(argmax: Array, g: Array) -> tuple[Array]:
    return (jnp.where(argmax[..., None, :] == jnp.arange(4, dtype=jnp.int8)[:, None], g[..., None, :], 0.0),)


_max_of_four.defvjp(_max_of_four_forward, _max_of_four_backward)


def max_and_argmax(a: Array, b: Array, c: Array, d: Array) -> tuple[Array, Array]:
    """The elementwise maximum of four arrays, and the number of the first one that has it."""
    upper, lower = jnp.maximum(a, b), jnp.maximum(c, d)
    argmax = jnp.where(lower > upper, jnp.where(d > c, 3, 2), jnp.where(b > a, 1, 0))
    return jnp.maximum(upper, lower), argmax


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

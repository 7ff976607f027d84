"""Models: the paper's two networks, a linear model, and how to bring your own.

A ``Model`` is a frozen pair of pure functions, ``init(key) -> parameters`` and ``apply(parameters, x_N, key) ->
outputs``, with a loss and a score for each example. ``key`` is None in evaluation; in local training it is there for
dropout. Any pytree of float arrays serves as parameters, so a model from plain JAX is ready as it is, and one from Flax
needs two lines:

    net = MyModule()                                        # a flax.linen.Module
    model = Model(init=lambda key: net.init(key, jnp.zeros((1, 28, 28))),
                  apply=lambda parameters, x_N, key: net.apply(parameters, x_N))

A model whose first layer is dense is best made with ``dense_first``: the engine can then train it in the span of a
client's examples (see ``span.py``), which is the same mathematics for a fraction of the arithmetic.

Axis letters: N examples, H units.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedhdp.data import Examples, FederatedData
from fedhdp.engine.descent import times
from fedhdp.engine.kernels.convolution import convolve_and_halve
from fedhdp.errors import require

Parameters = Any  # any pytree of float arrays
Array = jax.Array


def take(parameters_C: Parameters, which: Any) -> Parameters:
    """Some of many parameters that are stacked, by their numbers or as a slice."""
    return jax.tree.map(lambda leaf_C: leaf_C[which], parameters_C)


@jax.custom_jvp
def cross_entropy(logits_NC: Array, label_N: Array) -> Array:
    """The loss of each example against its label."""
    _same_shape(label_N, logits_NC[..., 0], "labels")
    return jax.nn.logsumexp(logits_NC, axis=-1) - jnp.sum(logits_NC * _one_hot(label_N, logits_NC), axis=-1)


@cross_entropy.defjvp
def _cross_entropy_slope(primals: tuple[Array, Array], tangents: tuple[Array, Any]) -> tuple[Array, Array]:
    """Its slope is the probabilities less the label's 1; said here, since it is found in fewer passes so."""
    logits_NC, label_N = primals
    e_NC = jnp.exp(logits_NC - jnp.max(logits_NC, axis=-1, keepdims=True))
    slope_NC = e_NC / jnp.sum(e_NC, axis=-1, keepdims=True) - _one_hot(label_N, logits_NC)
    return cross_entropy(logits_NC, label_N), jnp.sum(slope_NC * tangents[0], axis=-1)


def _one_hot(label_N: Array, logits_NC: Array) -> Array:
    return jax.nn.one_hot(label_N, logits_NC.shape[-1], dtype=logits_NC.dtype)


def correct(logits_NC: Array, label_N: Array) -> Array:
    """1 for each example whose label is the likeliest, else 0, as where the model is no number any more."""
    likeliest_N, real_N = jnp.argmax(logits_NC, axis=-1), jnp.isfinite(jnp.max(logits_NC, axis=-1))
    return ((likeliest_N == label_N) & real_N).astype(jnp.float32)


def squared_error(output_ND: Array, target_ND: Array) -> Array:
    """Half the squared distance of each output to its target."""
    _same_shape(target_ND, output_ND, "targets")
    return 0.5 * jnp.sum((output_ND - target_ND) ** 2, axis=-1)


def _same_shape(given: Array, wanted: Array, what: str) -> None:
    if jnp.shape(given) != jnp.shape(wanted):
        raise ValueError(
            f"{what} must be of the shape {jnp.shape(wanted)}, which the outputs have, not {jnp.shape(given)}"
        )


class Model(NamedTuple):
    """How to make parameters, how to predict with them, and how to judge the prediction: a score is better if higher."""

    init: Callable[[Array], Parameters]
    apply: Callable[[Parameters, Array, Array | None], Array]
    loss: Callable[[Array, Array], Array] = cross_entropy
    score: Callable[[Array, Array], Array] = correct
    head: Callable[[Parameters, Array, Array | None], Array] | None = None  # set by dense_first
    wide: str | None = None  # a layer that holds most of the weights, of which ``apply`` takes products with ``times``


def dense_first(
    init_rest: Callable[[Array], Parameters],
    head: Callable[[Parameters, Array, Array | None], Array],
    inputs: int,
    units: int,
    **judge: Any,
) -> Model:
    """A model that is ``head(rest, x·w + b, key)``: a dense layer on the flat input, then anything."""

    def init(key: Array) -> Parameters:
        first, rest = jax.random.split(key)
        return {"first": dense(first, inputs, units), "rest": init_rest(rest)}

    def apply(parameters: Parameters, x_N: Array, key: Array | None) -> Array:
        flat_NF = x_N.reshape(x_N.shape[0], -1)
        return head(parameters["rest"], flat_NF @ parameters["first"]["w"] + parameters["first"]["b"], key)

    return Model(init, apply, head=head, **judge)


def dense(key: Array, inputs: int, units: int) -> Parameters:
    """The parameters of a dense layer: weights uniform as Glorot and Bengio have it, no bias."""
    limit = math.sqrt(6 / (inputs + units))
    return {"w": jax.random.uniform(key, (inputs, units), minval=-limit, maxval=limit), "b": jnp.zeros(units)}


def turned(a: Array) -> Array:
    """A matrix transposed and written down as such: products of many small matrices on CPUs are fast only so."""
    return jax.lax.optimization_barrier(a.T)


@jax.custom_vjp
def to_classes(h_NH: Array, w_CH: Array) -> Array:
    """A dense layer to few outputs, a row of weights for each: fast, and its gradients too, for many small networks."""
    return jnp.einsum("ch,nh->cn", w_CH, h_NH).T


def _to_classes_backward(saved: tuple[Array, Array], g_NC: Array) -> tuple[Array, Array]:
    h_NH, w_CH = saved
    return g_NC @ w_CH, turned(g_NC) @ h_NH


to_classes.defvjp(lambda h_NH, w_CH: (jnp.einsum("ch,nh->cn", w_CH, h_NH).T, (h_NH, w_CH)), _to_classes_backward)


def linear(inputs: int, outputs: int, bias: bool = True, **judge: Any) -> Model:
    """A linear model; with the default loss, multinomial logistic regression."""
    if bias:
        return dense_first(lambda key: {}, lambda rest, h_NH, key: h_NH, inputs, outputs, **judge)

    def apply(parameters: Parameters, x_N: Array, key: Array | None) -> Array:
        return x_N.reshape(x_N.shape[0], -1) @ parameters["w"]

    return Model(lambda key: {"w": dense(key, inputs, outputs)["w"]}, apply, **judge)


def mlp(inputs: int = 784, hidden: int = 50, classes: int = 10) -> Model:
    """The paper's network for MNIST: one hidden layer of rectified units."""

    def head(rest: Parameters, h_NH: Array, key: Array | None) -> Array:
        return to_classes(jax.nn.relu(h_NH), rest["w"]) + rest["b"]

    def init_rest(key: Array) -> Parameters:
        layer = dense(key, hidden, classes)
        return {"w": layer["w"].T, "b": layer["b"]}

    return dense_first(init_rest, head, inputs, hidden)


def cnn(
    side: int = 28, classes: int = 62, kernel: int = 3, channels: tuple[int, int] = (16, 32), hidden: int = 128
) -> Model:
    """The paper's network for FEMNIST; it leaves the kernel's size open."""
    flat = (side // 4) ** 2 * channels[1]

    def init(key: Array) -> Parameters:
        keys = jax.random.split(key, 4)
        inputs = (kernel * kernel, kernel * kernel * channels[0], flat, hidden)
        outputs = (*channels, hidden, classes)
        layers = [dense(k, i, o) for k, i, o in zip(keys, inputs, outputs)]
        return dict(zip(("conv1", "conv2", "dense1", "dense2"), layers))

    def apply(parameters: Parameters, x_N: Array, key: Array | None) -> Array:
        keys = (None, None) if key is None else jax.random.split(key)
        image = x_N.reshape(-1, side, side, 1)
        image = convolve_and_halve(parameters["conv1"], image, kernel)
        image = convolve_and_halve(parameters["conv2"], image, kernel)
        h = _dropout(image.reshape(image.shape[0], -1), 0.25, keys[0])
        h = jax.nn.relu(times(h, parameters["dense1"]["w"]) + parameters["dense1"]["b"])
        h = _dropout(h, 0.5, keys[1])
        return h @ parameters["dense2"]["w"] + parameters["dense2"]["b"]

    return Model(init, apply, wide="dense1")


def _dropout(h: Array, rate: float, key: Array | None) -> Array:
    """Units dropped at random in training and never in evaluation."""
    if key is None:
        return h
    return jnp.where(jax.random.bernoulli(key, 1 - rate, h.shape), h / (1 - rate), 0.0)


def check_data(population: FederatedData, model: Model) -> None:
    """Refuse data that does not fit the model, or itself, which else would be found out by wrong numbers alone."""
    clients = f"of {population.num_clients} clients, as there are to train"
    for name, part in (("test examples", population.test), ("validation examples", population.validation)):
        if part is not None:
            require(len(part.count_K) == population.num_clients, name, len(part.count_K), clients)
    parts = [part for part in (population.train, population.test) if isinstance(part, Examples)]
    labels = (population.server_y_N, *(part.y_N for part in parts))
    for part in parts:
        shape, bytes_too = part.x_N.shape[1:], (part.x_N.dtype == np.uint8) == (population.server_x_N.dtype == np.uint8)
        require(shape == population.input_shape, "clients' inputs", shape, f"{population.input_shape}, as the server's")
        require(bytes_too, "clients' inputs", part.x_N.dtype, "bytes where the server's are: those count as 0 to 1")
    if model.loss is cross_entropy and any(y_N.dtype.kind not in "iub" for y_N in labels):
        raise ValueError("labels must be whole numbers where the loss is cross_entropy")
    x_N = jax.ShapeDtypeStruct((2, *population.input_shape), jnp.float32)
    y_N = jax.ShapeDtypeStruct((2, *population.server_y_N.shape[1:]), population.server_y_N.dtype)
    key = jax.random.key(0)
    kinds = {str(leaf.dtype) for leaf in jax.tree.leaves(jax.eval_shape(model.init, key))}
    floats = bool(kinds) and all(kind.startswith("float") for kind in kinds)
    require(floats, "the model's parameters", ", ".join(sorted(kinds)), "arrays of floats")
    outputs = _shape_of("predict", lambda x_N: model.apply(model.init(key), x_N, key), x_N)
    for name, judge in (("loss", model.loss), ("score", model.score)):
        found = _shape_of(f"take the {name}", judge, outputs, y_N).shape
        require(found == (2,), f"the shape of the model's {name} for two examples", found, "one number for each")
    if model.loss is cross_entropy:
        found = [int(extreme(y_N)) for y_N in labels if len(y_N) for extreme in (np.min, np.max)]
        classes = outputs.shape[-1]
        rule = f"from 0 to {classes - 1}, as the model has {classes} outputs"
        require(0 <= min(found) <= max(found) < classes, "labels", (min(found), max(found)), rule)


def _shape_of(what: str, function: Callable[..., Array], *arguments: Any) -> Any:
    """The shape of what a function of a model returns; where it fails, with what it was given."""
    try:
        return jax.eval_shape(function, *arguments)
    except (TypeError, ValueError, IndexError, KeyError) as error:
        given = " and ".join(f"{one.dtype}{list(one.shape)}" for one in arguments)
        raise ValueError(f"the model cannot {what} with {given}: {type(error).__name__}: {error}") from error

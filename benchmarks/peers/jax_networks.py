"""The works' networks in plain JAX, as its users write them. A model is a dict of arrays with the names of `Work.shapes`."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import work as w

Array = jax.Array


def network(work: w.Work) -> Callable[[dict[str, Array], Array, Array | None], Array]:
    """The work's network: from a model, inputs and a key (None: without dropout) to outputs."""
    if isinstance(work, w.Sequence):
        return partial(transformer, work)
    return convolutional if isinstance(work, w.Femnist) else dense_network


def inputs(work: w.Work, x):
    """Stored examples as the network takes them: numbers from 0 to 1, or tokens."""
    return x if isinstance(work, w.Sequence) else x.astype("float32") / 255


def loss(logits: Array, y: Array) -> Array:
    """The cross entropy of each example, the mean of its tokens'."""
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), y[..., None], axis=-1)[..., 0]
    return -jnp.mean(chosen, axis=tuple(range(1, y.ndim)))


def dense(model: dict[str, Array], name: str, x: Array) -> Array:
    return x @ model[f"{name}/kernel"] + model[f"{name}/bias"]


def normalize(model: dict[str, Array], name: str, x: Array) -> Array:
    centred = x - x.mean(axis=-1, keepdims=True)
    normalized = centred * jax.lax.rsqrt(jnp.mean(centred**2, axis=-1, keepdims=True) + 1e-5)
    return normalized * model[f"{name}/scale"] + model[f"{name}/bias"]


def dropout(x: Array, rate: float, key: Array | None) -> Array:
    return x if key is None else jnp.where(jax.random.bernoulli(key, 1 - rate, x.shape), x / (1 - rate), 0.0)


def dense_network(model: dict[str, Array], x: Array, key: Array | None) -> Array:
    h = jax.nn.relu(dense(model, "Dense_0", x.reshape(len(x), -1)))
    return dense(model, "Dense_1", h)


def convolutional(model: dict[str, Array], x: Array, key: Array | None) -> Array:
    keys = (None, None) if key is None else jax.random.split(key)
    image = x[..., None]
    for name in ("Conv_0", "Conv_1"):
        layout = ("NHWC", "HWIO", "NHWC")
        image = jax.lax.conv_general_dilated(image, model[f"{name}/kernel"], (1, 1), "SAME", dimension_numbers=layout)
        image = jax.nn.relu(image + model[f"{name}/bias"])
        image = jax.lax.reduce_window(image, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    h = dropout(image.reshape(len(x), -1), 0.25, keys[0])
    h = dropout(jax.nn.relu(dense(model, "Dense_0", h)), 0.5, keys[1])
    return dense(model, "Dense_1", h)


def transformer(work: w.Sequence, model: dict[str, Array], tokens: Array, key: Array | None) -> Array:
    h = model["Embed_0/embedding"][tokens] + model["Embed_1/embedding"]
    causal_TT = jnp.tril(jnp.ones((work.length, work.length), bool))
    for number in range(work.blocks):
        prefix = f"Block_{number}/"
        block = {name[len(prefix) :]: part for name, part in model.items() if name.startswith(prefix)}
        qkv = dense(block, "Dense_0", normalize(block, "LayerNorm_0", h))
        q, k, v = (part.reshape(*h.shape[:2], work.heads, -1) for part in jnp.split(qkv, 3, axis=-1))
        scores = jnp.einsum("nqhd,nkhd->nhqk", q, k) / q.shape[-1] ** 0.5
        weights = jax.nn.softmax(jnp.where(causal_TT, scores, -jnp.inf))
        attended = jnp.einsum("nhqk,nkhd->nqhd", weights, v).reshape(h.shape)
        h = h + dense(block, "Dense_1", attended)
        up = dense(block, "Dense_2", normalize(block, "LayerNorm_1", h))
        h = h + dense(block, "Dense_3", jax.nn.gelu(up))
    return dense(model, "Dense_0", normalize(model, "LayerNorm_0", h))

"""Convolutions as products of patches, pooling as reshapes, and dense layers: fast for many small networks.

Networks that each have weights of their own make a grouped convolution, which XLA computes slowly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial, reduce
from itertools import product
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedhdp.models import Array

Padding = tuple[tuple[int, int], ...]


def on_cpu() -> bool:
    """Whether computations go to processors."""
    return jax.default_backend() == "cpu"


class Convolution(NamedTuple):
    """How a convolution without groups goes over images, axis by axis of their pixels."""

    strides: tuple[int, ...]
    padding: Padding
    image_dilation: tuple[int, ...]  # above 1 in a transposed convolution
    dilation: tuple[int, ...]  # of the kernel
    precision: Any = None


def convolve(image: Array, weight: Array, convolution: Convolution) -> Array:
    """A convolution as one product of patches.

    Args:
        image: Images [N, *pixels, inputs].
        weight: Weights [*kernel, inputs, outputs].
        convolution: Strides, padding and dilations.

    Returns:
        Images [N, *pixels, outputs].
    """
    kernel = weight.shape[:-2]
    padded = _pad(image, convolution.padding, convolution.image_dilation)
    extents = [(k - 1) * d + 1 for k, d in zip(kernel, convolution.dilation, strict=True)]
    sizes = padded.shape[1:-1]
    counts = [(n - e) // s + 1 for n, e, s in zip(sizes, extents, convolution.strides, strict=True)]

    def tap(offsets: tuple[int, ...]) -> Array:
        begins = [o * d for o, d in zip(offsets, convolution.dilation, strict=True)]
        ends = [b + (c - 1) * s + 1 for b, c, s in zip(begins, counts, convolution.strides, strict=True)]
        limits = (padded.shape[0], *ends, padded.shape[-1])
        return jax.lax.slice(padded, (0, *begins, 0), limits, (1, *convolution.strides, 1))

    patches = [tap(offsets) for offsets in product(*map(range, kernel))]
    rows = patches[0] if len(patches) == 1 else jnp.concatenate(patches, axis=-1)
    return jnp.matmul(rows, weight.reshape(-1, weight.shape[-1]), precision=convolution.precision)


def convolve_and_pool(
    image: Array,
    weight: Array,
    padding: Padding,
    precision: Any = None,
    bias: Array | None = None,
    has_units: bool = False,
) -> Array:
    """A convolution of stride 1 and 2 x 2 max pooling as one product.

    The four outputs that are pooled see one window of pixels, so one product of all windows gives all four: less than half
    of what a window for each output would write and read. A window consists of blocks of 2 x 2 pixels. Bias and rectified
    linear units come after the maximum, which is the same, as they are monotone.

    Args:
        image: Images [N, height, width, inputs].
        weight: Weights [height, width, inputs, outputs] of a kernel.
        padding: Of height and width.
        precision: Of the product.
        bias: The bias [outputs], if there is one.
        has_units: Whether rectified linear units follow.

    Returns:
        Images of half the height and width that the convolution has, rounded down.
    """
    windows_are_columns = on_cpu()  # whose images have the examples last: longer vectors
    order = (3, 1, 2, 0) if windows_are_columns else (0, 1, 2, 3)
    outputs = weight.shape[3]
    sizes = [n + sum(p) - k + 1 for n, p, k in zip(image.shape[1:3], padding, weight.shape[:2], strict=True)]
    cells = [size // 2 for size in sizes]
    blocks = [(k + 2) // 2 for k in weight.shape[:2]]  # on a side of a window
    lengths = [2 * (c + b - 1) for c, b in zip(cells, blocks, strict=True)]
    before = [p[0] for p in padding]
    after = [length - n - p for length, n, p in zip(lengths, image.shape[1:3], before, strict=True)]
    padded = _pad(image.transpose(order), tuple(zip(before, after, strict=True)))
    first, last = padded.shape[0], padded.shape[3]
    pairs = padded.reshape(first, lengths[0] // 2, 2, lengths[1] // 2, 2, last)
    matrix = _window_matrix(weight, blocks)
    offsets = list(product(*map(range, blocks)))
    if windows_are_columns:
        block = pairs.transpose(2, 4, 0, 1, 3, 5)
        parts = [block[..., i : i + cells[0], j : j + cells[1], :] for i, j in offsets]
        windows = jnp.stack(parts).reshape(matrix.shape[0], -1)
        four = matrix_product(matrix.T, windows, precision).reshape(4, outputs, *cells, last)
        out = max_of_axis(four, 0)
        bias = None if bias is None else bias[:, None, None, None]
    else:
        block = pairs.swapaxes(2, 3).reshape(first, lengths[0] // 2, lengths[1] // 2, -1)
        windows = jnp.concatenate([block[:, i : i + cells[0], j : j + cells[1]] for i, j in offsets], axis=-1)
        four = jnp.matmul(windows, matrix, precision=precision)
        out = max_of_axis(four.reshape(first, *cells, 4, outputs), 3)
    out = out if bias is None else out + bias
    return (jax.nn.relu(out) if has_units else out).transpose(order)


def _window_matrix(weight: Array, blocks: Sequence[int]) -> Array:
    """The matrix from the pixels of a window to its four outputs."""
    rest = [2 * b - k for b, k in zip(blocks, weight.shape[:2], strict=True)]
    corners = [
        jnp.pad(weight, ((p, rest[0] - p), (q, rest[1] - q), (0, 0), (0, 0))) for p, q in product((0, 1), repeat=2)
    ]
    matrix = jnp.stack(corners, axis=3).reshape(blocks[0], 2, blocks[1], 2, weight.shape[2], -1).swapaxes(1, 2)
    return matrix.reshape(-1, 4 * weight.shape[3])


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def matrix_product(a: Array, b: Array, precision: Any = None) -> Array:
    """The product of two matrices, whose gradients are products too that transpose neither matrix in memory."""
    return jnp.matmul(a, b, precision=precision)


def _matrix_product_backward(precision: Any, saved: tuple[Array, Array], g: Array) -> tuple[Array, Array]:
    a, b = saved
    g = jax.lax.optimization_barrier(g)  # computed once for both products
    return jnp.einsum("ik,jk->ij", g, b, precision=precision), jnp.matmul(a.T, g, precision=precision)


matrix_product.defvjp(lambda a, b, precision: (matrix_product(a, b, precision), (a, b)), _matrix_product_backward)


def _pad(image: Array, padding: Padding, dilation: Sequence[int] = (1, 1)) -> Array:
    """Images with zeros around them, and with a dilation between their pixels; a negative padding crops."""
    if not any(map(any, padding)) and set(dilation) == {1}:
        return image
    axes = [(before, after, d - 1) for (before, after), d in zip(padding, dilation, strict=True)]
    return jax.lax.pad(image, jnp.zeros((), image.dtype), ((0, 0, 0), *axes, (0, 0, 0)))


def _windows(x: Array, window: Sequence[int]) -> tuple[Array, tuple[int, ...], tuple[int, ...]]:
    """The array with two axes for each, where and in which window; what does not fill a window is left out."""
    counts = [n // w for n, w in zip(x.shape, window, strict=True)]
    cropped = jax.lax.slice(x, [0] * x.ndim, [c * w for c, w in zip(counts, window, strict=True)])
    inside = tuple(2 * axis + 1 for axis, w in enumerate(window) if w > 1)
    pairs = [size for pair in zip(counts, window, strict=True) for size in pair]
    return cropped.reshape(pairs), tuple(counts), inside


def max_pool(x: Array, window: Sequence[int]) -> Array:
    """The maximum of windows that do not overlap; ``window``: their size along each axis."""
    pairs, counts, inside = _windows(x, window)
    outside = [axis for axis in range(pairs.ndim) if axis not in inside]
    moved = pairs.transpose(*outside[:-1], *inside, outside[-1])  # the last axis stays last
    last = moved.shape[-1]
    rows = moved.reshape(*moved.shape[: len(outside) - 1], math.prod(window), last)
    return max_of_axis(rows, rows.ndim - 2).reshape(counts)


def sum_pool(x: Array, window: Sequence[int]) -> Array:
    """The sum of windows that do not overlap; ``window``: their size along each axis."""
    pairs, counts, inside = _windows(x, window)
    return pairs.sum(axis=inside).reshape(counts)


def max_of_axis(x: Array, axis: int) -> Array:
    """The maximum over an axis, whose gradient needs the argmax alone."""
    return _max_of_axis(x, axis, x.shape[axis])


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _max_of_axis(x: Array, axis: int, size: int) -> Array:
    return _max_of_axis_forward(x, axis, size)[0]


def _max_of_axis_forward(x: Array, axis: int, size: int) -> tuple[Array, Array]:
    top, argmax = max_and_argmax([jax.lax.index_in_dim(x, i, axis, keepdims=False) for i in range(size)])
    return top, argmax.astype(jnp.int8 if size <= 128 else jnp.int32)


def _max_of_axis_backward(axis: int, size: int, argmax: Array, g: Array) -> tuple[Array]:
    return (jnp.stack([jnp.where(argmax == i, g, 0) for i in range(size)], axis),)


_max_of_axis.defvjp(_max_of_axis_forward, _max_of_axis_backward)


def max_and_argmax(arrays: Sequence[Array]) -> tuple[Array, Array]:
    """The elementwise maximum of some arrays, and the number of the first one that has it."""

    def larger(first: tuple[Array, Any], second: tuple[Array, Any]) -> tuple[Array, Any]:
        return jnp.maximum(first[0], second[0]), jnp.where(second[0] > first[0], second[1], first[1])

    pairs: list[tuple[Array, Any]] = [(array, number) for number, array in enumerate(arrays)]
    while len(pairs) > 1:
        pairs = [reduce(larger, pairs[i : i + 2]) for i in range(0, len(pairs), 2)]
    return pairs[0][0], jnp.asarray(pairs[0][1], jnp.int32)


def materialized_transpose(a: Array) -> Array:
    """A matrix transposed in memory: batches of small matrix products are fast on CPUs only so."""
    return jax.lax.optimization_barrier(a.T)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def dense(x_NF: Array, w_FH: Array, precision: Any = None) -> Array:
    """A dense layer with a column of weights for each output; for their gradient its inputs are transposed."""
    return jnp.matmul(x_NF, w_FH, precision=precision)


def _dense_forward(x_NF: Array, w_FH: Array, precision: Any) -> tuple[Array, tuple[Array, Array]]:
    x_NF = jax.lax.optimization_barrier(x_NF)  # computed once, not again where it is transposed
    return dense(x_NF, w_FH, precision), (x_NF, w_FH)


def _dense_backward(precision: Any, saved: tuple[Array, Array], g_NH: Array) -> tuple[Array, Array]:
    (x_NF, w_FH), g_NH = saved, jax.lax.optimization_barrier(g_NH)
    g_NF = jnp.einsum("nh,fh->nf", g_NH, w_FH, precision=precision)
    return g_NF, jnp.matmul(materialized_transpose(x_NF), g_NH, precision=precision)


dense.defvjp(_dense_forward, _dense_backward)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def dense_rows(x_NF: Array, w_HF: Array, precision: Any = None) -> Array:
    """A dense layer with a row of weights for each output; for their gradient that of the outputs is transposed."""
    return jnp.einsum("nf,hf->nh", x_NF, w_HF, precision=precision)


def _dense_rows_forward(x_NF: Array, w_HF: Array, precision: Any) -> tuple[Array, tuple[Array, Array]]:
    return dense_rows(x_NF, w_HF, precision), (x_NF, w_HF)


def _dense_rows_backward(precision: Any, saved: tuple[Array, Array], g_NH: Array) -> tuple[Array, Array]:
    (x_NF, w_HF), g_NH = saved, jax.lax.optimization_barrier(g_NH)
    g_HF = jnp.matmul(materialized_transpose(g_NH), x_NF, precision=precision)
    return jnp.matmul(g_NH, w_HF, precision=precision), g_HF


dense_rows.defvjp(_dense_rows_forward, _dense_rows_backward)


@jax.custom_vjp
def few_outputs(h_NH: Array, w_LH: Array) -> Array:
    """A dense layer to few outputs with a row of weights for each, fast for many small networks, as are its gradients."""
    return jnp.einsum("lh,nh->ln", w_LH, h_NH).T


def _few_outputs_backward(saved: tuple[Array, Array], g_NL: Array) -> tuple[Array, Array]:
    h_NH, w_LH = saved
    return g_NL @ w_LH, materialized_transpose(g_NL) @ h_NH


few_outputs.defvjp(lambda h_NH, w_LH: (few_outputs(h_NH, w_LH), (h_NH, w_LH)), _few_outputs_backward)

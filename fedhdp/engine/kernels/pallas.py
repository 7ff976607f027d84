"""Kernels for a convolution, its rectified linear units and its 2 x 2 max pooling, for many small networks.

``patches.convolve_and_pool`` spends its time on writing windows of pixels to memory and reading them again. These kernels
read the pixels where they are multiplied, and write neither windows nor outputs that are not the maximum. Both compute the
same, and so do their gradients.

A *cell* is 2 x 2 pixels, of which the maximal output is kept; its *corners* are 0 to 3, row by row. ``argmax`` is for each
cell and output the corner of the maximum, or NO_ARGMAX where it is not above 0. What a cell's four outputs see together is
its *window*, and kernels read windows *piece* by piece.

Axis letters: N images, I inputs and O outputs of a pixel, R cells of a tile, K numbers that a product sums over.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from fedhdp.engine.patches import convolve_and_pool, max_and_argmax
from fedhdp.models import Array

CORNERS = ((0, 0), (0, 1), (1, 0), (1, 1))
NO_ARGMAX = 4


class Launch(NamedTuple):
    """How a kernel is cut: rows of a tile, warps for each, and parts that run in parallel."""

    rows: int
    warps: int
    parts: int = 1


# The fastest of those tried on an H200, with 204 networks and batches of 20 images of 28 x 28, then 14 x 14 pixels.
FORWARD, BACK_TO_WEIGHTS, BACK_TO_IMAGE = Launch(64, 4), Launch(32, 4, 4), Launch(64, 4)
BACK_TO_WEIGHTS_OF_WINDOWS = Launch(32, 1, 16)  # with one input
MAX_SUMS = 96 * 32 * BACK_TO_WEIGHTS.warps  # sums that registers hold; with twice as many it took ten times as long


class Piece(NamedTuple):
    """Pixels that are read at once; a window is tiled by pieces of one size."""

    height: int
    width: int


PIXEL = Piece(1, 1)


class ConvShape(NamedTuple):
    """The sizes of a layer, all known at compile time."""

    images: int
    height: int  # pixels
    width: int
    inputs: int
    outputs: int
    kernel: int

    @property
    def before(self) -> int:
        """The pixels above and left of its own that an output sees."""
        return (self.kernel - 1) // 2

    @property
    def padding(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Zeros around an image, so that outputs are as many as pixels."""
        return ((self.before, self.kernel - 1 - self.before),) * 2

    @property
    def side(self) -> int:
        """Pixels on a side of the window that a cell sees."""
        return self.kernel + 1

    @property
    def cells(self) -> int:
        """The cells of all images."""
        return self.images * (self.height // 2) * (self.width // 2)

    @property
    def suits_kernels(self) -> bool:
        """Whether images are of whole cells, and the products of the kernels of powers of two of at least 16."""
        even = self.height % 2 == 0 and self.width % 2 == 0
        return even and all(is_power_of_two(n, at_least=16) for n in (self.numbers(self.forwards), self.outputs))

    @property
    def forwards(self) -> Piece:
        """The piece that the forward kernel reads: with one input all of a window."""
        return Piece(self.side, self.side) if self.inputs == 1 else PIXEL

    @property
    def to_weights(self) -> Piece:
        """The piece that the weights' kernel reads: with several inputs a row of a window, if registers hold its sums."""
        row = Piece(1, self.side)
        sums = len(_places(self, row)) * self.numbers(row) * self.outputs
        return row if self.inputs > 1 and is_power_of_two(self.side) and sums <= MAX_SUMS else self.forwards

    def numbers(self, piece: Piece) -> int:
        """The numbers of a piece."""
        return piece.height * piece.width * self.inputs


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def conv_relu_pool(image: Array, w: Array, b: Array, shape: ConvShape, interpret: bool = False) -> Array:
    """A convolution, its units and 2 x 2 max pooling by kernels, for sizes that suit them.

    Args:
        image: Images [N, height, width, I].
        w: Weights [kernel · kernel · I, O].
        b: Bias [O].
        shape: The sizes.
        interpret: Whether to run without a GPU, slowly.

    Returns:
        Images [N, height / 2, width / 2, O].
    """
    return _forward(image, w, b, shape, interpret)[0]


def _forward(image: Array, w: Array, b: Array, shape: ConvShape, interpret: bool) -> tuple[Array, tuple[Array, ...]]:
    size = (shape.cells * shape.outputs,)
    out_shape = (jax.ShapeDtypeStruct(size, jnp.float32), jax.ShapeDtypeStruct(size, jnp.int8))
    run = _kernel("forward", _forward_kernel, shape, FORWARD, interpret, out_shape, _tiles(shape, FORWARD))
    out, argmax = run(image.reshape(-1), _matrices(shape, shape.forwards, w), b)
    return out.reshape(shape.images, shape.height // 2, shape.width // 2, shape.outputs), (image, w, b, argmax)


def _backward(shape: ConvShape, interpret: bool, saved: tuple[Array, ...], g: Array) -> tuple[Array, Array, Array]:
    image, w, b, argmax = saved
    launch = BACK_TO_WEIGHTS_OF_WINDOWS if shape.inputs == 1 else BACK_TO_WEIGHTS
    matrices = partial(_matrices, shape, shape.to_weights)
    like, parts = jax.eval_shape(matrices, w).shape, launch.parts
    out_shape = tuple(jax.ShapeDtypeStruct((parts, *sizes), jnp.float32) for sizes in (like, (shape.outputs,)))
    weights, bias = (None, *like), (None, shape.outputs)
    of_part = (pl.BlockSpec(weights, lambda part: (part, 0, 0, 0)), pl.BlockSpec(bias, lambda part: (part, 0)))
    run = _kernel("weights", _weights_kernel, shape, launch, interpret, out_shape, parts, out_specs=of_part)
    dw_parts, db_parts = run(image.reshape(-1), argmax, g.reshape(-1))
    (dw,) = jax.linear_transpose(matrices, w)(jnp.sum(dw_parts, axis=0))
    db = jnp.sum(db_parts, axis=0)
    if shape.inputs == 1:  # the image is data, whose gradient is rarely used; then it is not computed
        weight = w.reshape(shape.kernel, shape.kernel, 1, shape.outputs)
        (dx,) = jax.vjp(lambda image: jax.nn.relu(convolve_and_pool(image, weight, shape.padding) + b), image)[1](g)
        return dx, dw, db
    dx_shape, tiles = jax.ShapeDtypeStruct((image.size,), jnp.float32), _tiles(shape, BACK_TO_IMAGE)
    run = _kernel("image", _image_kernel, shape, BACK_TO_IMAGE, interpret, dx_shape, tiles)
    w_transposed = _matrices(shape, PIXEL, w).swapaxes(1, 2)
    return run(w_transposed, argmax, g.reshape(-1)).reshape(image.shape), dw, db


conv_relu_pool.defvjp(_forward, _backward)


def _kernel(
    name: str, body: Any, shape: ConvShape, launch: Launch, interpret: bool, out_shape: Any, grid: int, **others: Any
) -> Any:
    options = triton.CompilerParams(num_warps=launch.warps, num_stages=1)
    settings = {"out_shape": out_shape, "grid": (grid,), "interpret": interpret, "compiler_params": options}
    return pl.pallas_call(partial(body, shape, launch), name=f"convolution_{name}", **settings, **others)


def _tiles(shape: ConvShape, launch: Launch) -> int:
    return -(-shape.cells // launch.rows)


def _places(shape: ConvShape, piece: Piece) -> list[tuple[int, int]]:
    """Where in the convolution a piece may begin, for an output that sees it; −1 is just outside, where weights are 0."""

    def begin(size: int) -> list[int]:
        return sorted({e - p for e in range(0, shape.side, size) for p in (0, 1) if -size < e - p < shape.kernel})

    return [(i, j) for i in begin(piece.height) for j in begin(piece.width)]


def _pieces(shape: ConvShape, piece: Piece) -> Iterator[tuple[int, int, list[tuple[int, int]]]]:
    """The pieces of a window by their first pixel, and the corners and matrices that each of them counts for."""
    places = _places(shape, piece)
    for e in range(0, shape.side, piece.height):
        for f in range(0, shape.side, piece.width):
            seen = ((corner, (e - p, f - q)) for corner, (p, q) in enumerate(CORNERS))
            yield e, f, [(corner, places.index(place)) for corner, place in seen if place in places]


def _matrices(shape: ConvShape, piece: Piece, w: Array) -> Array:
    """The weights that a piece meets at each of its places, as matrices [K, O]."""
    if piece == PIXEL:
        return w.reshape(-1, shape.inputs, shape.outputs)
    square = w.reshape(shape.kernel, shape.kernel, shape.inputs, shape.outputs)
    around = jnp.pad(square, ((1, 1), (1, 1), (0, 0), (0, 0)))
    blocks = [around[i + 1 : i + 1 + piece.height, j + 1 : j + 1 + piece.width] for i, j in _places(shape, piece)]
    return jnp.stack(blocks).reshape(-1, shape.numbers(piece), shape.outputs)


def _forward_kernel(shape: ConvShape, launch: Launch, x: Any, w: Any, b: Any, out: Any, argmax: Any) -> None:
    cells = Cells(shape, pl.program_id(0) * launch.rows, launch.rows)
    four = [jnp.zeros((launch.rows, shape.outputs))] * 4
    for e, f, uses in _pieces(shape, shape.forwards):
        x_RK = cells.piece(x, shape.forwards, e, f)
        for corner, matrix in uses:
            four[corner] += dot(x_RK, w[matrix])
    top_RO, argmax_RO = max_and_argmax(four)
    top_RO += b[...][None]
    index, real = cells.outputs(0, 0)
    triton.store(out.at[index], jnp.maximum(top_RO, 0.0), mask=real)
    triton.store(argmax.at[index], jnp.where(top_RO > 0, argmax_RO, NO_ARGMAX).astype(jnp.int8), mask=real)


def _weights_kernel(shape: ConvShape, launch: Launch, x: Any, argmax: Any, g: Any, dw: Any, db: Any) -> None:
    tiles = -(-_tiles(shape, launch) // launch.parts)
    first = pl.program_id(0) * tiles

    def add(tile: Array, sums: tuple) -> tuple:
        matrices, bias_O = list(sums[0]), sums[1]
        cells = Cells(shape, (first + tile) * launch.rows, launch.rows)
        argmax_RO, g_RO = cells.gradient(argmax, g, 0, 0)
        g_of = [jnp.where(argmax_RO == corner, g_RO, 0.0) for corner in range(4)]
        for e, f, uses in _pieces(shape, shape.to_weights):
            x_KR = cells.piece(x, shape.to_weights, e, f).T
            for corner, matrix in uses:
                matrices[matrix] += dot(x_KR, g_of[corner])
        return tuple(matrices), bias_O + jnp.sum(jnp.where(argmax_RO != NO_ARGMAX, g_RO, 0.0), axis=0)

    count, *like = dw.shape
    zeros = ((jnp.zeros(like),) * count, jnp.zeros(shape.outputs))
    matrices, db[...] = jax.lax.fori_loop(0, tiles, add, zeros)
    for matrix, total in enumerate(matrices):
        dw[matrix] = total


def _image_kernel(shape: ConvShape, launch: Launch, w_transposed: Any, argmax: Any, g: Any, dx: Any) -> None:
    """A cell's own four pixels, from the outputs that see them: pixel a is seen by output e at place a + before − e."""
    cells = Cells(shape, pl.program_id(0) * launch.rows, launch.rows)
    four = [jnp.zeros((launch.rows, shape.inputs))] * 4
    near, taps = range((shape.before - shape.kernel + 1) // 2, (shape.before + 1) // 2 + 1), range(shape.kernel)
    for down in near:
        for right in near:
            argmax_RO, g_RO = cells.gradient(argmax, g, down, right)
            for largest, (p, q) in enumerate(CORNERS):
                masked_RO = jnp.where(argmax_RO == largest, g_RO, 0.0)
                e, f = 2 * down + p, 2 * right + q
                for corner, (a, b) in enumerate(CORNERS):
                    i, j = a + shape.before - e, b + shape.before - f
                    if i in taps and j in taps:
                        four[corner] += dot(masked_RO, w_transposed[i * shape.kernel + j])
    for (a, b), dx_RI in zip(CORNERS, four, strict=True):
        triton.store(dx.at[cells.pixel(a, b)], dx_RI, mask=cells.real_R[:, None])


class Cells:
    """The cells of a tile: where their pixels and outputs are in memory."""

    def __init__(self, shape: ConvShape, first: Array, rows: int):
        self.shape, self.height, self.width = shape, shape.height // 2, shape.width // 2
        self.cell_R = first + iota(rows)
        self.real_R = self.cell_R < shape.cells
        line_R = floor_div(self.cell_R, self.width)
        image_R = floor_div(line_R, self.height)
        self.row_R, self.column_R = line_R - image_R * self.height, self.cell_R - line_R * self.width
        self.pixel_R = (image_R * shape.height + 2 * self.row_R) * shape.width + 2 * self.column_R

    def pixel(self, a: int, b: int) -> Array:
        """Where the inputs of each cell's pixel (a, b) are."""
        inputs = self.shape.inputs
        return (self.pixel_R * inputs)[:, None] + iota(inputs)[None] + (a * self.shape.width + b) * inputs

    def piece(self, x: Any, piece: Piece, e: int, f: int) -> Array:
        """The pixels of each cell's window from pixel (e, f) on; 0 outside of the image."""
        shape, e, f = self.shape, e - self.shape.before, f - self.shape.before
        number_K = iota(shape.numbers(piece))
        pixel_K = floor_div(number_K, shape.inputs)
        down_K = floor_div(pixel_K, piece.width)
        right_K = pixel_K - down_K * piece.width
        inside = self.real_R[:, None] & _inside_piece(2 * self.row_R, e, down_K, piece.height, shape.height)
        inside &= _inside_piece(2 * self.column_R, f, right_K, piece.width, shape.width)
        if piece.height > 1:
            number_K += down_K * (shape.width - piece.width) * shape.inputs
        at = (self.pixel_R * shape.inputs)[:, None] + (number_K + (e * shape.width + f) * shape.inputs)[None]
        return triton.load(x.at[at], mask=inside, other=0.0)

    def outputs(self, down: int, right: int) -> tuple[Array, Array]:
        """Where the outputs of the cells at this distance are, and whether they are inside."""
        outputs = self.shape.outputs
        at = (self.cell_R * outputs)[:, None] + iota(outputs)[None] + (down * self.width + right) * outputs
        inside = self.real_R & _within(self.row_R, down, self.height, 1) & _within(self.column_R, right, self.width, 1)
        return at, inside[:, None]

    def gradient(self, argmax: Any, g: Any, down: int, right: int) -> tuple[Array, Array]:
        """The argmax of the cells at this distance, and the gradient of their maxima."""
        at, inside = self.outputs(down, right)
        argmax_RO = triton.load(argmax.at[at], mask=inside, other=NO_ARGMAX).astype(jnp.int32)
        return argmax_RO, triton.load(g.at[at], mask=inside, other=0.0)


def _within(position_R: Array, distance: int, size: int, margin: int) -> Array | bool:
    """Whether a position at this distance is inside; distances from 0 to below the margin always are."""
    if distance < 0:
        return position_R >= -distance
    return position_R < size - distance if distance >= margin else True


def _inside_piece(position_R: Array, first: int, offset_K: Array, count: int, size: int) -> Array | bool:
    """Whether a piece's pixels are inside, along an axis on which it has ``count`` and begins at this distance."""
    if count == 1:
        return _within(position_R[:, None], first, size, 2)
    position_RK = position_R[:, None] + (offset_K + first)[None]
    return (position_RK >= 0) & (position_RK < size)


def is_power_of_two(size: int, at_least: int = 1) -> bool:
    """Whether a kernel can have this size."""
    return size >= at_least and size & (size - 1) == 0


def iota(size: int) -> Array:
    """0, 1, … below the size."""
    return jnp.arange(size, dtype=jnp.int32)


def floor_div(a: Array, b: int) -> Array:
    """The quotient of non-negative integers."""
    return jax.lax.div(a, jnp.int32(b))


def dot(a: Array, b: Array) -> Array:
    """A matrix product in TF32, as outside of kernels, unless JAX's default precision is higher."""
    exact = jax.config.jax_default_matmul_precision in ("float32", "highest")  # type: ignore[attr-defined]
    return triton.dot(a, b, allow_tf32=not exact)

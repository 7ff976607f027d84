"""A convolution that keeps the size, rectified units, and the largest of each two by two, for many small networks.

Networks that each have weights of their own make a poor grouped convolution. ``as_product`` is one matrix product for
each network, and serves everywhere. ``in_kernels`` is for NVIDIA GPUs, where the product's time goes into writing windows
of pixels to memory and reading them again: its kernels read the pixels where they are multiplied, and write neither
windows nor what is not the largest. Both compute the same, and so do their gradients.

A *cell* is two by two pixels, of which the largest output is kept; its *corners* are 0 to 3, row by row. ``which`` says
for each cell and output which corner was the largest, or NOBODY if it was not above 0. What a cell's four outputs see
together is its *window*, and kernels read windows *piece* by piece.

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

from fedhdp.engine.kernels.launch import Launch, is_power_of_two, on_nvidia, over, product, upto

Array = jax.Array
CORNERS = ((0, 0), (0, 1), (1, 0), (1, 1))
NOBODY = 4


def convolve_and_halve(layer: dict[str, Array], image: Array, kernel: int) -> Array:
    """The layer's outputs [N, high/2, wide/2, O] for images [N, high, wide, I]; weights are [kernel · kernel · I, O]."""
    n, high, wide, inputs = image.shape
    shape = Shape(n, high, wide, inputs, layer["w"].shape[-1], kernel)
    if on_nvidia() and shape.suits_kernels:
        return in_kernels(image, layer["w"], layer["b"], shape)
    return as_product(layer, image, kernel)


def as_product(layer: dict[str, Array], image: Array, kernel: int) -> Array:
    """As one matrix product.

    Four neighbouring outputs see one window of inputs, so a row of the product is such a window and gives all four: less
    than half of what a row for each output would have to write and read. A window is put together from blocks of two by
    two pixels.
    """
    n, high, wide, inputs = image.shape
    blocks = (kernel + 2) // 2  # on a side of a window
    before, side = (kernel - 1) // 2, 2 * blocks
    padded = jnp.pad(image, ((0, 0), (before, side - 2 - before), (before, side - 2 - before), (0, 0)))
    block = padded.reshape(n, high // 2 + blocks - 1, 2, wide // 2 + blocks - 1, 2, inputs).swapaxes(2, 3)
    block = block.reshape(*block.shape[:3], -1)
    places = [(i, j) for i in range(blocks) for j in range(blocks)]
    seen = jnp.concatenate([block[:, i : i + high // 2, j : j + wide // 2] for i, j in places], axis=-1)

    weight = layer["w"].reshape(kernel, kernel, inputs, -1)
    rest = side - kernel
    corners = [jnp.pad(weight, ((p, rest - p), (q, rest - q), (0, 0), (0, 0))) for p, q in CORNERS]
    window = jnp.stack(corners, axis=3).reshape(blocks, 2, blocks, 2, inputs, -1).swapaxes(1, 2)
    four = (seen @ window.reshape(seen.shape[-1], -1)).reshape(*seen.shape[:3], 4, -1)
    return jax.nn.relu(_largest(four) + layer["b"])


@jax.custom_vjp
def _largest(four: Array) -> Array:
    """The largest of four, remembering which it was instead of all four."""
    return _largest_forward(four)[0]


def _largest_forward(four: Array) -> tuple[Array, Array]:
    top, which = _top_and_which(*(four[..., i, :] for i in range(4)))
    return top, which.astype(jnp.int8)


def _largest_backward(which: Array, g: Array) -> tuple[Array]:
    return (jnp.where(which[..., None, :] == jnp.arange(4, dtype=jnp.int8)[:, None], g[..., None, :], 0.0),)


_largest.defvjp(_largest_forward, _largest_backward)


def _top_and_which(a: Array, b: Array, c: Array, d: Array) -> tuple[Array, Array]:
    """The largest of the four corners, and which it is, the first of equals."""
    upper, lower = jnp.maximum(a, b), jnp.maximum(c, d)
    which = jnp.where(lower > upper, jnp.where(d > c, 3, 2), jnp.where(b > a, 1, 0))
    return jnp.maximum(upper, lower), which


class Piece(NamedTuple):
    """Pixels that are read at once: a part of a window, that tiles it."""

    high: int
    wide: int


PIXEL = Piece(1, 1)


class Shape(NamedTuple):
    """The sizes of a layer; those of a kernel are known when it is compiled."""

    images: int
    high: int  # pixels
    wide: int
    inputs: int
    outputs: int
    kernel: int

    @property
    def before(self) -> int:
        """How many pixels above and left of its own an output sees."""
        return (self.kernel - 1) // 2

    @property
    def side(self) -> int:
        """Pixels on a side of the window that a cell sees."""
        return self.kernel + 1

    @property
    def cells(self) -> int:
        """How many cells all images have."""
        return self.images * (self.high // 2) * (self.wide // 2)

    @property
    def suits_kernels(self) -> bool:
        """Products in a kernel are of powers of two, of at least 16."""
        return all(is_power_of_two(size, at_least=16) for size in (self.numbers(self.forwards), self.outputs))

    @property
    def forwards(self) -> Piece:
        """What the forward kernel reads at once: with one input all of a window."""
        return Piece(self.side, self.side) if self.inputs == 1 else PIXEL

    @property
    def to_weights(self) -> Piece:
        """What the weights' kernel reads at once: with several inputs a row of a window, if it and its sums can be held."""
        row = Piece(1, self.side)
        sums = len(_places(self, row)) * self.numbers(row) * self.outputs
        return row if self.inputs > 1 and is_power_of_two(self.side) and sums <= HELD else self.forwards

    def numbers(self, piece: Piece) -> int:
        """How many numbers are read at once."""
        return piece.high * piece.wide * self.inputs


# Found by trying on an H200, with 204 networks and batches of 20 images of 28 by 28, then 14 by 14 pixels.
FORWARD, BACK_TO_WEIGHTS, BACK_TO_IMAGE = Launch(64, 4), Launch(32, 4, 4), Launch(64, 4)
BACK_TO_WEIGHTS_OF_WINDOWS = Launch(32, 1, 16)  # with one input
HELD = 96 * 32 * BACK_TO_WEIGHTS.warps  # sums that registers hold; with twice as many it took ten times as long


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def in_kernels(image: Array, w: Array, b: Array, shape: Shape, interpret: bool = False) -> Array:
    """As kernels, for sizes that suit them."""
    return _forward(image, w, b, shape, interpret)[0]


def _forward(image: Array, w: Array, b: Array, shape: Shape, interpret: bool) -> tuple[Array, tuple[Array, ...]]:
    many = (shape.cells * shape.outputs,)
    made = (jax.ShapeDtypeStruct(many, jnp.float32), jax.ShapeDtypeStruct(many, jnp.int8))
    run = _kernel("forward", _forward_kernel, shape, FORWARD, interpret, made, _tiles(shape, FORWARD))
    out, which = run(image.reshape(-1), _matrices(shape, shape.forwards, w), b)
    return out.reshape(shape.images, shape.high // 2, shape.wide // 2, shape.outputs), (image, w, b, which)


def _backward(shape: Shape, interpret: bool, saved: tuple[Array, ...], g: Array) -> tuple[Array, Array, Array]:
    image, w, b, which = saved
    launch = BACK_TO_WEIGHTS_OF_WINDOWS if shape.inputs == 1 else BACK_TO_WEIGHTS
    matrices = partial(_matrices, shape, shape.to_weights)
    like, parts = jax.eval_shape(matrices, w).shape, launch.parts
    numbers = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.float32)  # noqa: E731
    made = (numbers(parts, *like), numbers(parts, shape.outputs))
    weights, bias = (None, *like), (None, shape.outputs)
    of_part = (pl.BlockSpec(weights, lambda part: (part, 0, 0, 0)), pl.BlockSpec(bias, lambda part: (part, 0)))
    run = _kernel("weights", _weights_kernel, shape, launch, interpret, made, parts, out_specs=of_part)
    dw_parts, db_parts = run(image.reshape(-1), which, g.reshape(-1))
    (dw,) = jax.linear_transpose(matrices, w)(jnp.sum(dw_parts, axis=0))
    db = jnp.sum(db_parts, axis=0)
    if shape.inputs == 1:  # seldom asked for, and then not computed: the image is data
        (dx,) = jax.vjp(lambda image: as_product({"w": w, "b": b}, image, shape.kernel), image)[1](g)
        return dx, dw, db
    run = _kernel(
        "image", _image_kernel, shape, BACK_TO_IMAGE, interpret, numbers(image.size), _tiles(shape, BACK_TO_IMAGE)
    )
    w_turned = _matrices(shape, PIXEL, w).swapaxes(1, 2)
    return run(w_turned, which, g.reshape(-1)).reshape(image.shape), dw, db


in_kernels.defvjp(_forward, _backward)


def _kernel(
    name: str, body: Any, shape: Shape, launch: Launch, interpret: bool, made: Any, grid: int, **others: Any
) -> Any:
    options = triton.CompilerParams(num_warps=launch.warps, num_stages=1)
    chosen = {"out_shape": made, "grid": (grid,), "interpret": interpret, "compiler_params": options}
    return pl.pallas_call(partial(body, shape, launch), name=f"convolution_{name}", **chosen, **others)


def _tiles(shape: Shape, launch: Launch) -> int:
    return -(-shape.cells // launch.rows)


def _places(shape: Shape, piece: Piece) -> list[tuple[int, int]]:
    """Where in the convolution a piece may begin, for an output that sees it; −1 is just outside, where weights are 0."""

    def begin(size: int) -> list[int]:
        return sorted({e - p for e in range(0, shape.side, size) for p in (0, 1) if -size < e - p < shape.kernel})

    return [(i, j) for i in begin(piece.high) for j in begin(piece.wide)]


def _pieces(shape: Shape, piece: Piece) -> Iterator[tuple[int, int, list[tuple[int, int]]]]:
    """The pieces of a window by their first pixel, and for which corners with which of the matrices they count."""
    places = _places(shape, piece)
    for e in range(0, shape.side, piece.high):
        for f in range(0, shape.side, piece.wide):
            seen = ((corner, (e - p, f - q)) for corner, (p, q) in enumerate(CORNERS))
            yield e, f, [(corner, places.index(place)) for corner, place in seen if place in places]


def _matrices(shape: Shape, piece: Piece, w: Array) -> Array:
    """The weights that a piece meets at each of its places, as matrices [K, O]."""
    if piece == PIXEL:
        return w.reshape(-1, shape.inputs, shape.outputs)
    square = w.reshape(shape.kernel, shape.kernel, shape.inputs, shape.outputs)
    around = jnp.pad(square, ((1, 1), (1, 1), (0, 0), (0, 0)))
    met = [around[i + 1 : i + 1 + piece.high, j + 1 : j + 1 + piece.wide] for i, j in _places(shape, piece)]
    return jnp.stack(met).reshape(-1, shape.numbers(piece), shape.outputs)


def _forward_kernel(shape: Shape, launch: Launch, x: Any, w: Any, b: Any, out: Any, which: Any) -> None:
    cells = Cells(shape, pl.program_id(0) * launch.rows, launch.rows)
    four = [jnp.zeros((launch.rows, shape.outputs))] * 4
    for e, f, uses in _pieces(shape, shape.forwards):
        x_RK = cells.piece(x, shape.forwards, e, f)
        for corner, matrix in uses:
            four[corner] += product(x_RK, w[matrix])
    top_RO, which_RO = _top_and_which(*four)
    top_RO += b[...][None]
    here, real = cells.outputs(0, 0)
    triton.store(out.at[here], jnp.maximum(top_RO, 0.0), mask=real)
    triton.store(which.at[here], jnp.where(top_RO > 0, which_RO, NOBODY).astype(jnp.int8), mask=real)


def _weights_kernel(shape: Shape, launch: Launch, x: Any, which: Any, g: Any, dw: Any, db: Any) -> None:
    tiles = -(-_tiles(shape, launch) // launch.parts)
    first = pl.program_id(0) * tiles

    def add(tile: Array, sums: tuple) -> tuple:
        matrices, bias_O = list(sums[0]), sums[1]
        cells = Cells(shape, (first + tile) * launch.rows, launch.rows)
        which_RO, g_RO = cells.gradient(which, g, 0, 0)
        g_of = [jnp.where(which_RO == corner, g_RO, 0.0) for corner in range(4)]
        for e, f, uses in _pieces(shape, shape.to_weights):
            x_KR = cells.piece(x, shape.to_weights, e, f).T
            for corner, matrix in uses:
                matrices[matrix] += product(x_KR, g_of[corner])
        return tuple(matrices), bias_O + jnp.sum(jnp.where(which_RO != NOBODY, g_RO, 0.0), axis=0)

    count, *like = dw.shape
    nothing = ((jnp.zeros(like),) * count, jnp.zeros(shape.outputs))
    matrices, db[...] = jax.lax.fori_loop(0, tiles, add, nothing)
    for matrix, total in enumerate(matrices):
        dw[matrix] = total


def _image_kernel(shape: Shape, launch: Launch, w_turned: Any, which: Any, g: Any, dx: Any) -> None:
    """A cell's own four pixels, from the outputs that see them: pixel a is seen by output e at place a + before − e."""
    cells = Cells(shape, pl.program_id(0) * launch.rows, launch.rows)
    four = [jnp.zeros((launch.rows, shape.inputs))] * 4
    near, inside = range((shape.before - shape.kernel + 1) // 2, (shape.before + 1) // 2 + 1), range(shape.kernel)
    for down in near:
        for right in near:
            which_RO, g_RO = cells.gradient(which, g, down, right)
            for largest, (p, q) in enumerate(CORNERS):
                of_it_RO = jnp.where(which_RO == largest, g_RO, 0.0)
                e, f = 2 * down + p, 2 * right + q
                for corner, (a, b) in enumerate(CORNERS):
                    i, j = a + shape.before - e, b + shape.before - f
                    if i in inside and j in inside:
                        four[corner] += product(of_it_RO, w_turned[i * shape.kernel + j])
    for (a, b), dx_RI in zip(CORNERS, four):
        triton.store(dx.at[cells.own(a, b)], dx_RI, mask=cells.real_R[:, None])


class Cells:
    """The cells of a tile: where their pixels and outputs are in memory."""

    def __init__(self, shape: Shape, first: Array, rows: int):
        self.shape, self.high, self.wide = shape, shape.high // 2, shape.wide // 2
        self.cell_R = first + upto(rows)
        self.real_R = self.cell_R < shape.cells
        line_R = over(self.cell_R, self.wide)
        image_R = over(line_R, self.high)
        self.row_R, self.column_R = line_R - image_R * self.high, self.cell_R - line_R * self.wide
        self.pixel_R = (image_R * shape.high + 2 * self.row_R) * shape.wide + 2 * self.column_R

    def own(self, a: int, b: int) -> Array:
        """Where the inputs of the pixel a down and b to the right of a cell's first one are."""
        inputs = self.shape.inputs
        return (self.pixel_R * inputs)[:, None] + upto(inputs)[None] + (a * self.shape.wide + b) * inputs

    def piece(self, x: Any, piece: Piece, e: int, f: int) -> Array:
        """What is in the piece of each cell's window that begins with its pixel e down and f to the right; 0 is outside."""
        shape, e, f = self.shape, e - self.shape.before, f - self.shape.before
        number_K = upto(shape.numbers(piece))
        pixel_K = over(number_K, shape.inputs)
        down_K = over(pixel_K, piece.wide)
        right_K = pixel_K - down_K * piece.wide
        there = self.real_R[:, None] & _reach(2 * self.row_R, e, down_K, piece.high, shape.high)
        there &= _reach(2 * self.column_R, f, right_K, piece.wide, shape.wide)
        if piece.high > 1:
            number_K += down_K * (shape.wide - piece.wide) * shape.inputs
        at = (self.pixel_R * shape.inputs)[:, None] + (number_K + (e * shape.wide + f) * shape.inputs)[None]
        return triton.load(x.at[at], mask=there, other=0.0)

    def outputs(self, down: int, right: int) -> tuple[Array, Array]:
        """Where the outputs of the cells so far away are, and whether there are such."""
        outputs = self.shape.outputs
        at = (self.cell_R * outputs)[:, None] + upto(outputs)[None] + (down * self.wide + right) * outputs
        there = self.real_R & _within(self.row_R, down, self.high, 1) & _within(self.column_R, right, self.wide, 1)
        return at, there[:, None]

    def gradient(self, which: Any, g: Any, down: int, right: int) -> tuple[Array, Array]:
        """Which corner was the largest in the cells so far away, and the gradient it gets."""
        at, there = self.outputs(down, right)
        which_RO = triton.load(which.at[at], mask=there, other=NOBODY).astype(jnp.int32)
        return which_RO, triton.load(g.at[at], mask=there, other=0.0)


def _within(at_R: Array, further: int, size: int, own: int) -> Array | bool:
    """Whether a place is inside that is this much further on than one that is, together with its ``own`` first ones."""
    return at_R >= -further if further < 0 else at_R < size - further if further >= own else True


def _reach(at_R: Array, first: int, further_K: Array, count: int, size: int) -> Array | bool:
    """Whether a piece's pixels are inside; it has so many in a line, the first one this far from the cell's own."""
    if count == 1:
        return _within(at_R[:, None], first, size, 2)
    at_RK = at_R[:, None] + (further_K + first)[None]
    return (at_RK >= 0) & (at_RK < size)

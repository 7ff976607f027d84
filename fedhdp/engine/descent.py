"""A step of gradient descent that is pulled towards an anchor: theta ← theta − η(∇f + λ(theta − anchor)).

A network with a *wide* layer, which holds most of its weights, spends its steps on moving those to and from memory where
each of many small networks has its own: they are read to predict, and for the gradient of what is before the layer; their
own gradient is written; then it and they are read, and they are written. On NVIDIA GPUs they move ``in_passing`` instead:
when the gradient passes the layer, one kernel reads them, passes it on and writes what they become, and their own
gradient never leaves the chip. Both are the same step.

Axis letters: N examples, I inputs and O outputs of the layer, R inputs of a tile.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from fedhdp.engine.kernels.launch import Launch, is_power_of_two, on_nvidia, product, upto

Array = jax.Array
LAUNCH = Launch(rows=32, warps=4, parts=13)  # found by trying on an H200, with 408 networks and batches of 20


class Moving(NamedTuple):
    """Weights that are to take a step; as a gradient, what they have become."""

    w: Array
    rate: Array
    pull: Array | None = None  # None: there is nothing to be pulled to
    anchor: Array | None = None


def descend(
    f: Callable[[Any], Array], theta: Any, rate: Array, pull: Array | None, anchor: Any, wide: str | None = None
) -> Any:
    """One step down f; ``wide`` is a layer, if there is one, of which f takes products with ``times`` alone."""
    start = theta
    if wide is not None and on_nvidia() and is_power_of_two(theta[wide]["w"].shape[-1], at_least=16):
        towards = () if pull is None else (pull, anchor[wide]["w"])
        start = theta | {wide: theta[wide] | {"w": Moving(theta[wide]["w"], rate, *towards)}}

    def step(h: Array, g: Array | Moving, a: Array | None = None) -> Array:
        return g.w if isinstance(g, Moving) else moved(h, g, rate, pull, a)

    return jax.tree.map(step, theta, jax.grad(f)(start), *(() if pull is None else (anchor,)))


def moved(h: Array, g: Array, rate: Array, pull: Array | None, a: Any) -> Array:
    """Where weights h with the gradient g move."""
    return h - rate * g if pull is None else h - rate * (g + pull * (h - a))


def times(h_NI: Array, w_IO: Array | Moving) -> Array:
    """A product with weights, or with weights that move when its gradient is taken."""
    return in_passing(h_NI, w_IO) if isinstance(w_IO, Moving) else h_NI @ w_IO


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def in_passing(h_NI: Array, moving: Moving, interpret: bool = False) -> Array:
    """A product with weights that move when its gradient is taken."""
    return h_NI @ moving.w


def _forward(h_NI: Array, moving: Moving, interpret: bool) -> tuple[Array, Any]:
    return h_NI @ moving.w, (h_NI, moving)


def _backward(interpret: bool, saved: Any, g_NO: Array) -> tuple[Array, Moving]:
    h_NI, (w_IO, rate, pull, anchor_IO) = saved
    given = (h_NI, g_NO, w_IO, rate[None]) + (() if pull is None else (pull[None], anchor_IO))
    run = pl.pallas_call(
        partial(_kernel, pull is not None),
        name="dense_in_passing",
        out_shape=tuple(jax.ShapeDtypeStruct(made.shape, jnp.float32) for made in (h_NI, w_IO)),
        grid=(LAUNCH.parts,),
        input_output_aliases={2: 1},
        interpret=interpret,
        compiler_params=triton.CompilerParams(num_warps=LAUNCH.warps, num_stages=1),
    )
    dh_NI, becomes_IO = run(*given)
    return dh_NI, Moving(becomes_IO, None, None, None)  # type: ignore[arg-type]  # None: no gradient is asked for


in_passing.defvjp(_forward, _backward)


def _kernel(pulled: bool, h: Any, g: Any, w: Any, rate: Any, *others: Any) -> None:
    """A part of the inputs, tile by tile: the gradient is passed on by the weights as they were, and they move."""
    *towards, dh, becomes = others
    (examples, inputs), outputs = h.shape, w.shape[1]
    number_N = upto(max(16, 1 << (examples - 1).bit_length()))[:, None]
    output_O = upto(outputs)[None]
    real_N = number_N < examples
    g_NO = triton.load(g.at[number_N, output_O], mask=real_N, other=0.0)
    tiles = -(-inputs // (LAUNCH.rows * LAUNCH.parts))
    first = pl.program_id(0) * tiles

    def tile(number: Array, _: None) -> None:
        input_R = (first + number) * LAUNCH.rows + upto(LAUNCH.rows)
        there_R = input_R < inputs
        row, there = input_R[:, None], there_R[:, None]
        w_RO = triton.load(w.at[row, output_O], mask=there, other=0.0)
        column, real = input_R[None], real_N & there_R[None]
        h_NR = triton.load(h.at[number_N, column], mask=real, other=0.0)
        triton.store(dh.at[number_N, column], product(g_NO, w_RO.T), mask=real)
        pull = towards[0][0] if pulled else None
        a_RO = triton.load(towards[1].at[row, output_O], mask=there, other=0.0) if pulled else None
        w_RO = moved(w_RO, product(h_NR.T, g_NO), rate[0], pull, a_RO)
        triton.store(becomes.at[row, output_O], w_RO, mask=there)

    jax.lax.fori_loop(0, tiles, tile, None)

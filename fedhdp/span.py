"""Coordinates in which a client trains: the parameters themselves, or its first layer in the span of its examples.

Gradient descent on n examples X moves a dense first layer only by combinations of those examples: it is always
``W = W0 + a·(Wstart − W0) + Xᵀ·A`` for some n×H matrix A and scalar a. With ``X·W0``, ``X·(Wstart − W0)`` and ``X·Xᵀ``
computed once, a step costs n columns instead of the width of the input: the same mathematics, far less arithmetic.

A step on W by ``X_Bᵀ·g`` is a step on the rows B of A by g. The gradient with respect to A that automatic
differentiation would give is another one, so ``_reach`` states its own; then descent in these coordinates, with the pull
towards (W0: a = 0, A = 0), is descent on W, line by line, and the training loop need not know.

Axis letters: M examples of the client, F inputs, H units, B examples of a batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedhdp.models import Array, Model, Parameters


class Coordinates(NamedTuple):
    """How a client's models are held while they train; ``start`` None means that a model starts from the anchor."""

    anchor: Callable[[Parameters, int], Parameters]  # (anchor, M) -> the anchor as it is held
    know: Callable[[Parameters, Array], Any]  # (anchor, x_M) -> what all of the client's models share
    enter: Callable[[Parameters, Parameters | None, Array], tuple[Parameters, Any]]  # -> held, what it alone knows
    predict: Callable[[Parameters, Any, Any, Array, int, Array | None], Array]  # (held, alone, shared, first, B, key)
    leave: Callable[[Parameters, Parameters, Parameters | None, Array], Parameters]  # (held, anchor, start, x_M)


def direct(model: Model) -> Coordinates:
    """The parameters themselves."""

    def enter(anchor: Parameters, start: Parameters | None, x_M: Array) -> tuple[Parameters, Any]:
        return anchor if start is None else start, x_M  # its own, so that products are batched over clients and models

    def predict(held: Parameters, x_M: Any, shared: Any, first: Array, size: int, key: Array | None) -> Array:
        return model.apply(held, jax.lax.dynamic_slice_in_dim(x_M, first, size), key)

    def leave(held: Parameters, anchor: Parameters, start: Parameters | None, x_M: Array) -> Parameters:
        return held

    return Coordinates(lambda anchor, examples: anchor, lambda anchor, x_M: None, enter, predict, leave)


def in_span(model: Model) -> Coordinates:
    """The first layer by what it adds to its anchor in the span of the client's examples, the rest as it is."""
    head = model.head
    assert head is not None, "a model without a dense first layer has no span"

    def hold(a: float, parameters: Parameters, examples: int) -> Parameters:
        first = parameters["first"]
        zero_MH = jnp.zeros((examples, first["w"].shape[1]))
        return {"a": jnp.float32(a), "A": zero_MH, "b": first["b"], "rest": parameters["rest"]}

    def know(anchor: Parameters, x_M: Array) -> Any:
        return x_M.reshape(x_M.shape[0], -1) @ anchor["first"]["w"]

    def enter(anchor: Parameters, start: Parameters | None, x_M: Array) -> tuple[Parameters, Any]:
        x_MF = x_M.reshape(x_M.shape[0], -1)
        gram_MM = x_MF @ x_MF.T
        if start is None:
            held = hold(0.0, anchor, x_M.shape[0])
            return held, (jnp.zeros_like(held["A"]), gram_MM)
        return hold(1.0, start, x_M.shape[0]), (x_MF @ (start["first"]["w"] - anchor["first"]["w"]), gram_MM)

    def predict(held: Parameters, alone: Any, from_anchor_MH: Any, first: Array, size: int, key: Array | None) -> Array:
        from_start_MH, gram_MM = alone
        base_BH, start_BH, gram_BM = (
            jax.lax.dynamic_slice_in_dim(known, first, size) for known in (from_anchor_MH, from_start_MH, gram_MM)
        )
        a = jax.lax.stop_gradient(held["a"])  # a moves by the pull alone
        return head(held["rest"], base_BH + a * start_BH + _reach(held["A"], gram_BM, first) + held["b"], key)

    def leave(held: Parameters, anchor: Parameters, start: Parameters | None, x_M: Array) -> Parameters:
        w_FH = anchor["first"]["w"] + x_M.reshape(x_M.shape[0], -1).T @ held["A"]
        if start is not None:
            w_FH = w_FH + held["a"] * (start["first"]["w"] - anchor["first"]["w"])
        return {"first": {"w": w_FH, "b": held["b"]}, "rest": held["rest"]}

    return Coordinates(lambda anchor, examples: hold(0.0, anchor, examples), know, enter, predict, leave)


@jax.custom_vjp
def _reach(A_MH: Array, gram_BM: Array, first: Array) -> Array:
    """What A adds to the batch's first layer; its gradient lands on the batch's own rows of A."""
    return gram_BM @ A_MH


def _reach_forward(A_MH: Array, gram_BM: Array, first: Array) -> tuple[Array, Any]:
    return gram_BM @ A_MH, (gram_BM.shape[1], first)


def _reach_backward(saved: Any, g_BH: Array) -> tuple[Array, None, None]:
    rows, first = saved
    zero_MH = jnp.zeros((rows, g_BH.shape[1]))
    return jax.lax.dynamic_update_slice_in_dim(zero_MH, g_BH, first, 0), None, None


_reach.defvjp(_reach_forward, _reach_backward)

"""Coordinates in which a client trains: the parameters themselves, or its first layer in the span of its examples.

Gradient descent on n examples X moves a dense first layer only by combinations of those examples: it is always
``W = W0 + a·(Wstart − W0) + Xᵀ·A`` for some n×H matrix A and scalar a. With ``X·W0``, ``X·(Wstart − W0)`` and ``X·Xᵀ``
computed once, a step costs n columns instead of the width of the input: the same mathematics, far less arithmetic. The
layer's bias is the weight of one more input, which is 1 in every example, and needs nothing of its own.

A step on W by ``X_Bᵀ·g`` is a step on the rows B of A by g. The gradient with respect to A that automatic
differentiation would give is another one, so ``_reach`` states its own; then descent in these coordinates, with the pull
towards (W0: a = 0, A = 0), is descent on W, line by line, and the training loop need not know.

Nor need an update ``Xᵀ·A`` be written out to be clipped and summed: its squared norm is ``Σ A∘(X·Xᵀ·A)``, and the sum over
clients is one product of all their examples with all their A.

Axis letters: C clients, R global models, V personal models, T all models of a client, M examples of the client, F inputs,
H units, B examples of a batch. A personal model v is pulled towards the global model ``run_V[v]``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedhdp.models import Array, Model, Parameters, take, turned

EXACT = jax.lax.Precision.HIGHEST  # what a norm rests on, and what was measured by it, is not rounded to fewer digits


class Parametrization(NamedTuple):
    """How one client's models are held while they train, and how what they learnt is measured and added up."""

    know: Callable[[Parameters, Array, Array | None], Any]  # (theta_R, x_M, gram_MM) -> what the client's models share
    enter: Callable[[Parameters, Parameters, np.ndarray, Array, Any], tuple[Parameters, Any]]  # -> held_T, known_T
    anchor: Callable[[Parameters, np.ndarray, int], Parameters]  # (theta_R, run_T, M) -> the anchors as they are held
    batch: Callable[[Any, int, Any, int], Any]  # (known_T, T, first, B) -> what is known of a batch, known_TB
    predict: Callable[[Parameters, Any, Any, Array | None], Array]  # (held, known_B, first, key)
    sent: Callable[[Parameters, Parameters], Parameters]  # (held, theta) -> the update, in these coordinates
    norm: Callable[[Parameters, Any, Array], Array]  # (sent, shared, x_M) -> the update's norm, never too small
    add: Callable[[Array, Parameters, Array], Parameters]  # (scale_C, sent_C, x_CM) -> Σ_C scale·update, in full
    leave: Callable[[Parameters, Parameters, Parameters, np.ndarray, Array], Parameters]  # -> the personal models
    apart: bool  # whether clients may as well be at different batches at a time
    wide: str | None = None  # the wide layer of what is held (see `descent`)


def _join(*parts: Parameters | None) -> Parameters:
    given = [part for part in parts if part is not None]
    return jax.tree.map(lambda *each: jnp.concatenate(each), *given)


def _squares(parameters: Parameters) -> Array:
    return sum((jnp.sum(leaf**2) for leaf in jax.tree.leaves(parameters)), jnp.float32(0))


def _weigh(scale_C: Array, leaf_C: Array) -> Array:
    """Scaled; what has scale 0 is absent, for 0 · NaN would still be NaN."""
    scale_C = scale_C.reshape(-1, *[1] * (leaf_C.ndim - 1))
    return jnp.where(scale_C == 0, 0.0, scale_C * leaf_C)


def _sum(scale_C: Array, parameters_C: Parameters) -> Parameters:
    return jax.tree.map(lambda leaf_C: jnp.sum(_weigh(scale_C, leaf_C), axis=0), parameters_C)


def _subtract(a: Parameters, b: Parameters) -> Parameters:
    return jax.tree.map(jnp.subtract, a, b)


def gram(x_M: Array) -> Array:
    """The products of examples with each other, X·Xᵀ, the 1 of the bias included."""
    x_MF = x_M.reshape(x_M.shape[0], -1)
    return jnp.matmul(x_MF, turned(x_MF), precision=EXACT) + 1.0


def direct(model: Model) -> Parametrization:
    """The parameters themselves."""

    def enter(theta_R: Parameters, start_V: Parameters, run_V: np.ndarray, x_M: Array, shared: Any) -> Any:
        return _join(theta_R, start_V), x_M

    def batch(x_M: Array, models: int, first: Any, size: int) -> Array:
        x_B = jax.lax.dynamic_slice_in_dim(x_M, first, size)
        return jnp.broadcast_to(x_B, (models, *x_B.shape))  # each has its own, so that products are batched over models

    return Parametrization(
        know=lambda theta_R, x_M, gram_MM: None,
        enter=enter,
        anchor=lambda theta_R, run_T, examples: take(theta_R, run_T),
        batch=batch,
        predict=lambda held, x_B, first, key: model.apply(held, x_B, key),
        sent=_subtract,
        norm=lambda sent, shared, x_M: jnp.sqrt(_squares(sent)),
        add=lambda scale_C, sent_C, x_CM: _sum(scale_C, sent_C),
        leave=lambda held_V, theta_R, start_V, run_V, x_M: held_V,
        apart=True,
        wide=model.wide,
    )


def in_span(model: Model) -> Parametrization:
    """The first layer by what it adds to its anchor in the span of the client's examples, the rest as it is."""
    head = model.head
    assert head is not None, "a model without a dense first layer has no span"

    def know(theta_R: Parameters, x_M: Array, gram_MM: Array | None) -> Any:
        x_MF = x_M.reshape(x_M.shape[0], -1)
        from_anchor_RMH = jnp.einsum("mf,rfh->rmh", x_MF, theta_R["first"]["w"]) + theta_R["first"]["b"][:, None]
        return from_anchor_RMH, gram(x_M) if gram_MM is None else gram_MM

    def enter(theta_R: Parameters, start_V: Parameters, run_V: np.ndarray, x_M: Array, shared: Any) -> Any:
        from_anchor_RMH, gram_MM = shared
        runs, examples, units = from_anchor_RMH.shape
        run_T = np.concatenate([np.arange(runs), run_V])
        gram_TMM = jnp.broadcast_to(gram_MM, (len(run_T), examples, examples))
        rest_T = _join(theta_R["rest"], None if start_V is None else start_V["rest"])
        held_T = {"A": jnp.zeros((len(run_T), examples, units)), "rest": rest_T}
        if start_V is None:
            return held_T, (from_anchor_RMH, None, gram_TMM)
        start_VMH = x_M.reshape(examples, -1) @ start_V["first"]["w"] + start_V["first"]["b"][:, None]
        from_start_VMH = start_VMH - from_anchor_RMH[run_V]
        from_start_TMH = jnp.concatenate([jnp.zeros_like(from_anchor_RMH), from_start_VMH])
        held_T["a"] = jnp.asarray(np.arange(len(run_T)) >= runs, jnp.float32)
        return held_T, (from_anchor_RMH[run_T], from_start_TMH, gram_TMM)

    def anchor(theta_R: Parameters, run_T: np.ndarray, examples: int) -> Parameters:
        runs, units = theta_R["first"]["b"].shape
        held_T = {"A": jnp.zeros((len(run_T), examples, units)), "rest": take(theta_R["rest"], run_T)}
        return held_T if len(run_T) == runs else held_T | {"a": jnp.zeros(len(run_T))}

    def batch(known_T: Any, models: int, first: Any, size: int) -> Any:
        cut = lambda known_TM: jax.lax.dynamic_slice_in_dim(known_TM[:models], first, size, axis=1)  # noqa: E731
        return jax.tree.map(cut, known_T)

    def predict(held: Parameters, known_B: Any, first: Any, key: Array | None) -> Array:
        from_anchor_BH, from_start_BH, gram_BM = known_B
        h_BH = from_anchor_BH + _reach(held["A"], gram_BM, first)
        if from_start_BH is not None:
            h_BH = h_BH + jax.lax.stop_gradient(held["a"]) * from_start_BH  # a moves by the pull alone
        return head(held["rest"], h_BH, key)

    def sent(held: Parameters, theta: Parameters) -> Parameters:
        return {"A": held["A"], "rest": _subtract(held["rest"], theta["rest"])}

    def norm(sent: Parameters, shared: Any, x_M: Array) -> Array:
        _, gram_MM = shared
        examples, inputs = x_M.shape[0], math.prod(x_M.shape[1:]) + 1
        first = jnp.sum(sent["A"] * jnp.matmul(gram_MM, sent["A"], precision=EXACT))
        # Where examples cancel, rounding could make the norm too small, and a clip too weak: as much is added.
        rounding = (2 * examples + 1 + math.sqrt(inputs)) * 2.0**-24 * jnp.trace(gram_MM) * jnp.sum(sent["A"] ** 2)
        return jnp.sqrt(jnp.maximum(first, 0.0) + rounding + _squares(sent["rest"]))

    def add(scale_C: Array, sent_C: Parameters, x_CM: Array) -> Parameters:
        A_CMH = _weigh(scale_C, sent_C["A"])
        x_CMF = x_CM.reshape(*x_CM.shape[:2], -1)
        w_HF = jnp.einsum("cmh,cmf->hf", A_CMH, x_CMF, precision=EXACT)  # A is turned, and not the examples
        return {"first": {"w": w_HF.T, "b": jnp.sum(A_CMH, axis=(0, 1))}, "rest": _sum(scale_C, sent_C["rest"])}

    def leave(
        held_V: Parameters, theta_R: Parameters, start_V: Parameters, run_V: np.ndarray, x_M: Array
    ) -> Parameters:
        x_MF, A_VMH, anchor_V = x_M.reshape(x_M.shape[0], -1), held_V["A"], take(theta_R["first"], run_V)
        learnt_V = {"w": jnp.einsum("mf,vmh->vfh", x_MF, A_VMH), "b": jnp.sum(A_VMH, axis=1)}

        def of_leaf(anchor_V: Array, start_V: Array, learnt_V: Array) -> Array:
            a_V = held_V["a"].reshape(-1, *[1] * (anchor_V.ndim - 1))
            return anchor_V + a_V * (start_V - anchor_V) + learnt_V

        return {"first": jax.tree.map(of_leaf, anchor_V, start_V["first"], learnt_V), "rest": held_V["rest"]}

    return Parametrization(know, enter, anchor, batch, predict, sent, norm, add, leave, apart=False)


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

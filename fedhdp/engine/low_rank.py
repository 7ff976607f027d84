"""How a chunk of clients represents its models while they train: by all parameters, or by low-rank updates.

Gradient descent on n examples X moves a dense first layer only by combinations of those examples:
``W = W0 + a·(Wstart − W0) + Xᵀ·A`` for some n×H matrix A and a number a, where W0 is the anchor. With ``X·W0``,
``X·(Wstart − W0)`` and ``X·Xᵀ`` precomputed, a step costs n columns instead of the width of the input: the same
mathematics for a fraction of the arithmetic. The layer's bias is the weight of one more input that is always 1.

A gradient step on W by ``X_Bᵀ·g`` is a step on the rows B of A by g. Automatic differentiation with respect to A would
give another gradient, so ``gram_matmul`` defines its own. With it, descent on A with a pull towards the anchor (A = 0,
a = 0) is descent on W, and ``client.local_train`` serves both.

An update ``Xᵀ·A`` is clipped and summed without being written out: its squared norm is ``Σ A∘(X·Xᵀ·A)``, and the sum over
clients is one product of all their examples with all their A.

Axis letters: C clients of a chunk, R global models, V personal models, T all models of a client (R, then V), M examples
of a client, F inputs, H units, B examples of a batch. L layers that are clipped one by one. Personal
model v belongs to the global model ``run_V[v]``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from fedhdp.client import Batch
from fedhdp.engine.network import Network
from fedhdp.engine.patches import materialized_transpose, on_cpu
from fedhdp.engine.span import FirstLayer
from fedhdp.mechanism import FLOAT32_UNIT_ROUNDOFF
from fedhdp.models import Array, Parameters, take
from fedhdp.server import Layers, round_up_norm, sum_roundings

EXACT = jax.lax.Precision.HIGHEST  # norms decide on clipping, so neither they nor the clipped sums are rounded further
UNDERFLOW = (
    2.0**-100
)  # more than underflow in a Gram matrix moves a square by, over n·u: (2F + 2)·2**-126 / (n·u) for n > F
MAX_INPUTS = 2**20  # of low-rank training: beyond, the bound on the rounding of norms would be of the size of the norms


class ClientUpdates(NamedTuple):
    """The updates of some clients for each global model, in the parametrization in which they were trained."""

    update_CR: Parameters
    norm_CR: Array  # of each layer, norm_CRL, where layers are clipped one by one


class Parametrization(Protocol):
    """How a chunk of clients represents its models while they train.

    The constructor precomputes what depends on the examples and the global models alone, once for all models.
    """

    anchor_T: Parameters  # the anchors that the models are pulled towards, in this parametrization
    ragged: bool  # whether clients may be at different batches at a time

    def from_params(self, personal_CV: Parameters | None) -> tuple[Parameters, Any]:
        """The models before training [C, T, ...], and the inputs that each of them predicts from [C, T, M, ...]."""

    def predict(self, theta: Parameters, batch: Batch) -> Array:
        """The outputs of one model of one client."""

    def delta(self, theta_CR: Parameters) -> ClientUpdates:
        """The updates of the trained global models, and their norms, which are never too small."""

    def weighted_sum(self, scale_C: Array, update_C: Parameters) -> Parameters:
        """Σ_C scale·update for one global model, as its parameters; an update at scale 0 is absent, even if it is NaN.

        Where layers are clipped one by one, scale_CL has a scale for each.
        """

    def to_params(self, theta_CV: Parameters, personal_CV: Parameters | None) -> Parameters:
        """Trained personal models as parameters, from those before training; without these, updates written out."""


def uses_low_rank(network: Network, capacity: int, layers: Layers | None = None) -> bool:
    """Whether clients train by low-rank updates: they have fewer examples than the first layer has inputs.

    The norm of the first layer is that of its weights and bias together, so one clip must have both.
    """
    first = network.split(capacity).first_layer
    if first is None or not capacity < first.inputs <= MAX_INPUTS:
        return False
    return layers is None or _one_clip(first, layers)


def _one_clip(first: FirstLayer, layers: Layers) -> bool:
    return first.bias is None or layers.layer_of[first.weight] == layers.layer_of[first.bias]


class FullRank:
    """All parameters of the models."""

    ragged = True

    def __init__(
        self, network: Network, theta_R: Parameters, run_V: np.ndarray, x_CM: Array, layers: Layers | None = None
    ):
        self.split, self.layers = network.split(x_CM.shape[1]), layers
        self.theta_R = self.split.transpose(theta_R)
        self.rows_CM = jax.vmap(self.split.rows)(x_CM)
        self.clients, self.models = len(x_CM), len(jax.tree.leaves(theta_R)[0]) + len(run_V)
        self.anchor_T = take(self.theta_R, _run_T(theta_R, run_V))

    def from_params(self, personal_CV: Parameters | None) -> tuple[Parameters, Any]:
        """The parameters, and for each model its copy of the inputs, so that products are batched over models."""
        personal_CV = None if personal_CV is None else self.split.transpose(personal_CV)
        return _join(_repeat(self.theta_R, self.clients), personal_CV), _for_models(self.rows_CM, self.models)

    def predict(self, theta: Parameters, batch: Batch) -> Array:
        """The model's outputs."""
        return self.split.apply(theta, batch.x_B, len(batch.y_B), batch.key)

    def delta(self, theta_CR: Parameters) -> ClientUpdates:
        """The differences to the global models."""
        update_CR = jax.tree.map(jnp.subtract, theta_CR, self.theta_R)
        size = _size(self.theta_R)
        if self.layers is None:
            return ClientUpdates(update_CR, round_up_norm(jnp.sqrt(_squares(update_CR)), size))
        squares = _squares_by_layer(update_CR, self.layers.layer_of, self.layers.number)
        return ClientUpdates(update_CR, round_up_norm(jnp.sqrt(jnp.stack(squares, axis=-1)), size))

    def weighted_sum(self, scale_C: Array, update_C: Parameters) -> Parameters:
        """The sum over the clients."""
        total = _weighted_sum(scale_C, update_C, None if self.layers is None else self.layers.layer_of)
        return self.split.transpose(total)

    def to_params(self, theta_CV: Parameters, personal_CV: Parameters | None) -> Parameters:
        """The models, or updates, as they are."""
        return self.split.transpose(theta_CV)


class LowRank:
    """The first layer by A and a, as above, and the other layers by their parameters.

    Args:
        network: A network with a first layer.
        theta_R: The global models of the round.
        run_V: The global model of each personal one.
        x_CM: The clients' inputs.
        gram_CMM: The Gram matrices of the clients' examples. None: they are computed.
        finite: Whether all inputs are finite; False where it is not certain.
        layers: The layers that are clipped one by one; None with a flat clip.
    """

    ragged = False  # batches that begin at one row for all clients are slices; else they would be gathered

    def __init__(
        self,
        network: Network,
        theta_R: Parameters,
        run_V: np.ndarray,
        x_CM: Array,
        gram_CMM: Array | None = None,
        finite: bool = False,
        layers: Layers | None = None,
    ):
        self.split, self.run_V, self.layers = network.split(x_CM.shape[1]), run_V, layers
        assert self.split.first_layer is not None, "a network without a first layer has no low-rank updates"
        self.first, self.finite = self.split.first_layer, finite and self.split.keeps_finite
        self.leaf_R, self.tree = jax.tree.flatten(self.split.transpose(theta_R))
        rows_CMF, self.others_CM = jax.vmap(self.split.first_rows)(x_CM)
        self.x_CMF = jax.lax.optimization_barrier(rows_CMF)  # computed once: norms and sums are of the same numbers
        self.gram_CMM = jax.vmap(partial(gram, bias=self.split.has_bias))(self.x_CMF) if gram_CMM is None else gram_CMM
        run_T = _run_T(theta_R, run_V)
        w_RFH, b_RH = self._first_layer(self.leaf_R, vmaps=1)
        self.output_CRMH = jnp.einsum("cmf,rfh->crmh", self.x_CMF, w_RFH) + b_RH[..., None, :]
        self.rest_R = self._rest(self.leaf_R)
        zeros_TMH = jnp.zeros((len(run_T), x_CM.shape[1], self.first.units))
        self.anchor_T: Parameters = {"A": zeros_TMH, "rest": take(self.rest_R, run_T)}
        if len(run_V):
            self.anchor_T["a"] = jnp.zeros(len(run_T))

    def _first_layer(self, leaves: list[Array], vmaps: int) -> tuple[Array, Array]:
        """The weights [..., F, H] and the bias [..., H] of the first layer, under so many leading axes."""
        to_matrix = self.first.to_matrix
        for _ in range(vmaps):
            to_matrix = jax.vmap(to_matrix)
        w = to_matrix(leaves[self.first.weight])
        if self.first.bias is None:
            return w, jnp.zeros((1,) * vmaps + (self.first.units,))
        b = leaves[self.first.bias]
        return w, b.reshape(*b.shape[:vmaps], self.first.units)

    def _rest(self, leaves: Sequence[Any]) -> list[Any]:
        """What belongs to the leaves that are not of the first layer."""
        return [leaf for number, leaf in enumerate(leaves) if number not in (self.first.weight, self.first.bias)]

    def _params(self, w_FH: Array, b_H: Array, rest: Sequence[Array], vmaps: int) -> Parameters:
        """Parameters of a first layer and the rest, under so many leading axes."""
        leaves, remaining = [], iter(rest)
        for number, leaf_R in enumerate(self.leaf_R):
            like = jax.ShapeDtypeStruct(leaf_R.shape[1:], leaf_R.dtype)
            if number == self.first.weight:
                from_matrix = partial(self.first.from_matrix, like=like)
                for _ in range(vmaps):
                    from_matrix = jax.vmap(from_matrix)
                leaves.append(from_matrix(w_FH))
            elif number == self.first.bias:
                leaves.append(b_H.reshape(*b_H.shape[:vmaps], *like.shape))
            else:
                leaves.append(next(remaining))
        return jax.tree.unflatten(self.tree, leaves)

    def from_params(self, personal_CV: Parameters | None) -> tuple[Parameters, Any]:
        """A = 0, a = 1 for personal models; the inputs are the anchors' outputs, what the start adds, and the Gram rows."""
        clients, runs, _, _ = self.output_CRMH.shape
        models = runs + len(self.run_V)
        gram_CTMM, others_CTM = _for_models((self.gram_CMM, self.others_CM), models)
        rest_CR = _repeat(self.rest_R, clients)
        theta_CT = {"A": _repeat(self.anchor_T["A"], clients)}
        if personal_CV is None:
            return theta_CT | {"rest": rest_CR}, (self.output_CRMH, None, gram_CTMM, others_CTM)
        leaf_CV = jax.tree.leaves(self.split.transpose(personal_CV))
        theta_CT["rest"] = _join(rest_CR, self._rest(leaf_CV))
        theta_CT["a"] = jnp.broadcast_to((np.arange(models) >= runs).astype(np.float32), (clients, models))
        w_CVFH, b_CVH = self._first_layer(leaf_CV, vmaps=2)
        start_CVMH = self.x_CMF[:, None] @ w_CVFH + b_CVH[:, :, None]
        offset_CVMH = start_CVMH - self.output_CRMH[:, self.run_V]
        offset_CTMH = jnp.concatenate([jnp.zeros_like(self.output_CRMH), offset_CVMH], axis=1)
        anchor_CTMH = self.output_CRMH[:, np.concatenate([np.arange(runs), self.run_V]).astype(int)]
        return theta_CT, (anchor_CTMH, offset_CTMH, gram_CTMM, others_CTM)

    def predict(self, theta: Parameters, batch: Batch) -> Array:
        """The outputs of what follows the first layer; the gradient does not change a, which the pull alone moves."""
        anchor_BH, offset_BH, gram_BM, others_B = batch.x_B
        h_BH = anchor_BH + gram_matmul(theta["A"], gram_BM, batch.first)
        if offset_BH is not None:
            h_BH = h_BH + jax.lax.stop_gradient(theta["a"]) * offset_BH
        return self.split.apply_rest(theta["rest"], h_BH, others_B, batch.key)

    def delta(self, theta_CR: Parameters) -> ClientUpdates:
        """A and the difference of the other layers; the norms include a bound on the rounding of norms and sums."""
        update_CR = {"A": theta_CR["A"], "rest": jax.tree.map(jnp.subtract, theta_CR["rest"], self.rest_R)}
        squares_CR, excess_CR = jax.vmap(jax.vmap(self._squares_of_first, (0, None)))(update_CR["A"], self.gram_CMM)
        size = _size(self.rest_R)
        if self.layers is None:
            norm_CR = jnp.sqrt(squares_CR + _squares(update_CR["rest"])) + excess_CR
            return ClientUpdates(update_CR, round_up_norm(norm_CR, size))
        layer_of = self.layers.layer_of
        first, rest = layer_of[self.first.weight], tuple(self._rest(layer_of))
        squares = _squares_by_layer(update_CR["rest"], rest, self.layers.number)
        squares[first] += squares_CR
        norm_CRL = jnp.sqrt(jnp.stack(squares, axis=-1)).at[..., first].add(excess_CR)
        return ClientUpdates(update_CR, round_up_norm(norm_CRL, size))

    def _squares_of_first(self, A_MH: Array, gram_MM: Array) -> tuple[Array, Array]:
        """A bound on a first layer's squared norm, and how much longer its rounded sum can be.

        Where examples cancel, rounding is not small beside the norm. ``docs/explanation/numerics.md`` derives the bound.
        """
        examples, inputs = self.x_CMF.shape[1:]
        roundings = inputs + examples + sum_roundings(A_MH.size) + 16
        factor = FLOAT32_UNIT_ROUNDOFF / (1 - 2 * roundings * FLOAT32_UNIT_ROUNDOFF)
        squares = jnp.sum(A_MH * jnp.matmul(gram_MM, A_MH, precision=EXACT))
        trace = jnp.trace(gram_MM) + examples * UNDERFLOW  # the products of small inputs may be lost altogether
        absolute = jnp.sum((jnp.sqrt(trace) * A_MH) ** 2)  # without cancellation; A alone might underflow
        bound = jnp.maximum(squares, 0.0) + roundings * factor * absolute
        return bound, (examples + 2) * factor * jnp.sqrt(absolute)

    def weighted_sum(self, scale_C: Array, update_C: Parameters) -> Parameters:
        """One product of all examples with all A for the first layer, sums for the others."""
        x_CMF = self.x_CMF if self.finite else jnp.where(jnp.isfinite(self.x_CMF), self.x_CMF, 0.0)  # 0 · NaN is NaN
        first_C, rest = scale_C, None
        if self.layers is not None:
            first_C = scale_C[:, self.layers.layer_of[self.first.weight]]
            rest = tuple(self._rest(self.layers.layer_of))
        A_CMH = _scaled(first_C, update_C["A"])
        w_HF = jnp.einsum("cmh,cmf->hf", A_CMH, x_CMF, precision=EXACT)  # transposes A and not the examples
        rest_sum = _weighted_sum(scale_C, update_C["rest"], rest)
        return self.split.transpose(self._params(w_HF.T, jnp.sum(A_CMH, axis=(0, 1)), rest_sum, vmaps=0))

    def to_params(self, theta_CV: Parameters, personal_CV: Parameters | None) -> Parameters:
        """W = W0 + a·(Wstart − W0) + Xᵀ·A for models, and Xᵀ·A for updates, which are clipped afterwards."""
        A_CVMH, precision = theta_CV["A"], EXACT if personal_CV is None else None
        w_CVFH = jnp.einsum("cmf,cvmh->cvfh", self.x_CMF, A_CVMH, precision=precision)
        written_CV = self._params(w_CVFH, jnp.sum(A_CVMH, axis=2), theta_CV["rest"], vmaps=2)
        if personal_CV is None:
            return self.split.transpose(written_CV)
        change_CV, leaves = jax.tree.leaves(written_CV), []
        starts_CV = jax.tree.leaves(self.split.transpose(personal_CV))
        for number, (leaf_R, start_CV) in enumerate(zip(self.leaf_R, starts_CV, strict=True)):
            leaf_CV = change_CV[number]
            if number in (self.first.weight, self.first.bias):
                anchor_V, a_CV = leaf_R[self.run_V], theta_CV["a"]
                a_CV = a_CV.reshape(*a_CV.shape, *[1] * (anchor_V.ndim - 1))
                leaf_CV = anchor_V + a_CV * (start_CV - anchor_V) + leaf_CV
            leaves.append(leaf_CV)
        return self.split.transpose(jax.tree.unflatten(self.tree, leaves))


def parametrize(
    network: Network,
    theta_R: Parameters,
    run_V: np.ndarray,
    x_CM: Array,
    gram_CMM: Array | None = None,
    finite: bool = False,
    layers: Layers | None = None,
) -> Parametrization:
    """The parametrization in which a chunk of clients trains faster; the arguments are those of ``LowRank``."""
    if uses_low_rank(network, x_CM.shape[1], layers):
        return LowRank(network, theta_R, run_V, x_CM, gram_CMM, finite, layers)
    return FullRank(network, theta_R, run_V, x_CM, layers)


def gram(x_MF: Array, bias: bool) -> Array:
    """The Gram matrix of a client's rows, X·Xᵀ, with a bias as an input that is always 1."""
    gram_MM = jnp.matmul(x_MF, materialized_transpose(x_MF), precision=EXACT)
    return gram_MM + 1.0 if bias else gram_MM


@jax.custom_vjp
def gram_matmul(A_MH: Array, gram_BM: Array, first: Array | int) -> Array:
    """What A adds to the outputs of a batch's first layer; its gradient is that of W and goes to the batch's rows of A."""
    return gram_BM @ A_MH


def _gram_matmul_forward(A_MH: Array, gram_BM: Array, first: Array | int) -> tuple[Array, Any]:
    return gram_BM @ A_MH, (gram_BM.shape[1], first)


def _gram_matmul_backward(saved: Any, g_BH: Array) -> tuple[Array, None, None]:
    rows, first = saved
    zeros_MH = jnp.zeros((rows, g_BH.shape[1]))
    return jax.lax.dynamic_update_slice_in_dim(zeros_MH, g_BH, first, 0), None, None


gram_matmul.defvjp(_gram_matmul_forward, _gram_matmul_backward)


def _run_T(theta_R: Parameters, run_V: np.ndarray) -> np.ndarray:
    """The global model of each model of a client."""
    return np.concatenate([np.arange(len(jax.tree.leaves(theta_R)[0])), run_V]).astype(int)


def _repeat(parameters: Parameters, clients: int) -> Parameters:
    """The same parameters for every client."""
    return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (clients, *leaf.shape)), parameters)


def _for_models(inputs_C: Any, models: int) -> Any:
    """Each client's arrays, for each of its models."""

    def of_leaf(leaf_C: Array) -> Array:
        return jnp.broadcast_to(leaf_C[:, None], (len(leaf_C), models, *leaf_C.shape[1:]))

    return jax.tree.map(of_leaf, inputs_C)


def _join(theta_CR: Parameters, personal_CV: Parameters | None) -> Parameters:
    """The models of a client behind each other."""
    if personal_CV is None:
        return theta_CR
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves, axis=1), theta_CR, personal_CV)


def _size(theta_R: Parameters) -> int:
    """The number of parameters of a model."""
    return sum(math.prod(leaf.shape[1:]) for leaf in jax.tree.leaves(theta_R))


def _squares(parameters_CR: Parameters) -> Array:
    """The squared norm of each of the models."""
    leaves = jax.tree.leaves(parameters_CR)
    return sum((jnp.sum(leaf**2, axis=tuple(range(2, leaf.ndim))) for leaf in leaves), jnp.float32(0))


def _squares_by_layer(parameters_CR: Parameters, layer_of: tuple[int, ...], count: int) -> list[Array]:
    """The squared norms of the parameters of each layer; ``layer_of``: the layer of each array."""
    pairs = list(zip(jax.tree.leaves(parameters_CR), layer_of, strict=True))
    return [_squares([leaf for leaf, number in pairs if number == layer]) for layer in range(count)]


def _scaled(scale_C: Array, leaf_C: Array) -> Array:
    """The leaf scaled; where the scale is 0 the result is 0, even for NaN."""
    scale_C = scale_C.reshape(-1, *[1] * (leaf_C.ndim - 1))
    return jnp.where(scale_C == 0, 0.0, scale_C * leaf_C)


def _weighted_sum(scale_C: Array, parameters_C: Parameters, layer_of: tuple[int, ...] | None) -> Parameters:
    """The sum over clients; with the layer of each array, at the scale of that layer."""
    leaves, tree = jax.tree.flatten(parameters_C)
    scales = [scale_C] * len(leaves) if layer_of is None else [scale_C[:, layer] for layer in layer_of]
    sums = [_sum_at(scale, leaf_C) for scale, leaf_C in zip(scales, leaves, strict=True)]
    return jax.tree.unflatten(tree, sums)


def _sum_at(scale_C: Array, leaf_C: Array) -> Array:
    """The scaled sum over clients; on CPUs a matrix product, which is far faster than a sum over the leading axis."""
    if not on_cpu():
        return jnp.sum(_scaled(scale_C, leaf_C), axis=0)
    present_C = jnp.where(scale_C.reshape(-1, *[1] * (leaf_C.ndim - 1)) == 0, 0.0, leaf_C)  # 0 · NaN would be NaN
    return jnp.tensordot(scale_C, present_C, axes=1, precision=EXACT)

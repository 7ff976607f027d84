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
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from fedhdp.client import Batch, LocalTraining
from fedhdp.mechanism import FLOAT32_UNIT_ROUNDOFF
from fedhdp.models import Array, Model, Parameters, materialized_transpose, take
from fedhdp.server import Layers, round_up_norm, sum_roundings

EXACT = jax.lax.Precision.HIGHEST  # norms decide on clipping, so neither they nor the clipped sums are rounded further
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

    def write_out(self, update_C: Parameters) -> Parameters:
        """The update of each client for one global model, as its parameters."""

    def to_params(self, theta_CV: Parameters, personal_CV: Parameters) -> Parameters:
        """The trained personal models as parameters; ``personal_CV`` are those before training."""


def trained_form(model: Model, training: LocalTraining) -> Model:
    """The model without its head unless training is plain SGD, which alone keeps a layer in the span of the examples."""
    return model if training.is_plain_sgd else model._replace(head=None)


def uses_low_rank(model: Model, examples: int, inputs: int, layers: Layers | None = None) -> bool:
    """Whether clients train by low-rank updates: they have fewer examples than inputs, and the model allows it.

    The norm of the first layer is that of its weights and bias together, so one clip must have both.
    """
    one_clip = layers is None or len(set(layers.layer_of[:2])) == 1
    return model.head is not None and examples < inputs <= MAX_INPUTS and one_clip


class FullRank:
    """All parameters of the models."""

    ragged = True

    def __init__(self, model: Model, theta_R: Parameters, run_V: np.ndarray, x_CM: Array, layers: Layers | None = None):
        self.model, self.theta_R, self.x_CM, self.layers = model, theta_R, x_CM, layers
        self.models = len(jax.tree.leaves(theta_R)[0]) + len(run_V)
        self.anchor_T = take(theta_R, _run_T(theta_R, run_V))

    def from_params(self, personal_CV: Parameters | None) -> tuple[Parameters, Any]:
        """The parameters, and for each model its copy of the inputs, so that products are batched over models."""
        x_CTM = jnp.broadcast_to(self.x_CM[:, None], (len(self.x_CM), self.models, *self.x_CM.shape[1:]))
        return _join(_repeat(self.theta_R, len(self.x_CM)), personal_CV), x_CTM

    def predict(self, theta: Parameters, batch: Batch) -> Array:
        """The model's outputs."""
        return self.model.apply(theta, batch.x_B, batch.key)

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
        return _weighted_sum(scale_C, update_C, None if self.layers is None else self.layers.layer_of)

    def write_out(self, update_C: Parameters) -> Parameters:
        """The updates as they are."""
        return update_C

    def to_params(self, theta_CV: Parameters, personal_CV: Parameters) -> Parameters:
        """The models as they are."""
        return theta_CV


class LowRank:
    """The first layer by A and a, as above, and the other layers by their parameters.

    Args:
        model: A model with a dense first layer (``models.dense_first``).
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
        model: Model,
        theta_R: Parameters,
        run_V: np.ndarray,
        x_CM: Array,
        gram_CMM: Array | None = None,
        finite: bool = False,
        layers: Layers | None = None,
    ):
        assert model.head is not None, "a model without a dense first layer has no low-rank updates"
        self.head, self.theta_R, self.run_V, self.finite = model.head, theta_R, run_V, finite
        self.layers = layers
        self.x_CMF = x_CM.reshape(*x_CM.shape[:2], math.prod(x_CM.shape[2:])).astype(jnp.float32)
        self.gram_CMM = jax.vmap(gram)(x_CM) if gram_CMM is None else gram_CMM
        first_R, run_T = theta_R["first"], _run_T(theta_R, run_V)
        self.output_CRMH = jnp.einsum("cmf,rfh->crmh", self.x_CMF, first_R["w"]) + first_R["b"][:, None]
        zeros_TMH = jnp.zeros((len(run_T), x_CM.shape[1], first_R["b"].shape[1]))
        self.anchor_T = {"A": zeros_TMH, "rest": take(theta_R["rest"], run_T)}
        if len(run_V):
            self.anchor_T["a"] = jnp.zeros(len(run_T))

    def from_params(self, personal_CV: Parameters | None) -> tuple[Parameters, Any]:
        """A = 0, a = 1 for personal models; the inputs are the anchors' outputs, what the start adds, and the Gram rows."""
        clients, runs, examples, _ = self.output_CRMH.shape
        models = runs + len(self.run_V)
        gram_CTMM = jnp.broadcast_to(self.gram_CMM[:, None], (clients, models, examples, examples))
        rest_CR = _repeat(self.theta_R["rest"], clients)
        theta_CT = {"A": _repeat(self.anchor_T["A"], clients)}
        if personal_CV is None:
            return theta_CT | {"rest": rest_CR}, (self.output_CRMH, None, gram_CTMM)
        theta_CT["rest"] = _join(rest_CR, personal_CV["rest"])
        theta_CT["a"] = jnp.broadcast_to((np.arange(models) >= runs).astype(np.float32), (clients, models))
        first_CV = personal_CV["first"]
        start_CVMH = self.x_CMF[:, None] @ first_CV["w"] + first_CV["b"][:, :, None]
        offset_CVMH = start_CVMH - self.output_CRMH[:, self.run_V]
        offset_CTMH = jnp.concatenate([jnp.zeros_like(self.output_CRMH), offset_CVMH], axis=1)
        return theta_CT, (self.output_CRMH[:, _run_T(self.theta_R, self.run_V)], offset_CTMH, gram_CTMM)

    def predict(self, theta: Parameters, batch: Batch) -> Array:
        """The head's outputs; the gradient does not change a, which the pull alone moves."""
        anchor_BH, offset_BH, gram_BM = batch.x_B
        h_BH = anchor_BH + gram_matmul(theta["A"], gram_BM, batch.first)
        if offset_BH is not None:
            h_BH = h_BH + jax.lax.stop_gradient(theta["a"]) * offset_BH
        return self.head(theta["rest"], h_BH, batch.key)

    def delta(self, theta_CR: Parameters) -> ClientUpdates:
        """A and the difference of the other layers; the norms include a bound on the rounding of norms and sums."""
        update_CR = {"A": theta_CR["A"], "rest": jax.tree.map(jnp.subtract, theta_CR["rest"], self.theta_R["rest"])}
        squares_CR, excess_CR = jax.vmap(jax.vmap(self._squares_of_first, (0, None)))(update_CR["A"], self.gram_CMM)
        size = _size(self.theta_R["rest"])
        if self.layers is None:
            norm_CR = jnp.sqrt(squares_CR + _squares(update_CR["rest"])) + excess_CR
            return ClientUpdates(update_CR, round_up_norm(norm_CR, size))
        first, rest = self.layers.layer_of[0], self.layers.layer_of[2:]
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
        absolute = jnp.sum((jnp.sqrt(jnp.trace(gram_MM)) * A_MH) ** 2)  # without cancellation; A alone might underflow
        bound = jnp.maximum(squares, 0.0) + roundings * factor * absolute
        return bound, (examples + 2) * factor * jnp.sqrt(absolute)

    def weighted_sum(self, scale_C: Array, update_C: Parameters) -> Parameters:
        """One product of all examples with all A for the first layer, sums for the others."""
        x_CMF = self.x_CMF if self.finite else jnp.where(jnp.isfinite(self.x_CMF), self.x_CMF, 0.0)  # 0 · NaN is NaN
        first_C, rest = scale_C, None
        if self.layers is not None:
            first_C, rest = scale_C[:, self.layers.layer_of[0]], self.layers.layer_of[2:]
        A_CMH = _scaled(first_C, update_C["A"])
        w_HF = jnp.einsum("cmh,cmf->hf", A_CMH, x_CMF, precision=EXACT)  # transposes A and not the examples
        return {
            "first": {"w": w_HF.T, "b": jnp.sum(A_CMH, axis=(0, 1))},
            "rest": _weighted_sum(scale_C, update_C["rest"], rest),
        }

    def write_out(self, update_C: Parameters) -> Parameters:
        """Xᵀ·A for each client, and the updates of the others."""
        w_CHF = jnp.einsum("cmh,cmf->chf", update_C["A"], self.x_CMF, precision=EXACT)
        first_C = {"w": jnp.swapaxes(w_CHF, 1, 2), "b": jnp.sum(update_C["A"], axis=1)}
        return {"first": first_C, "rest": update_C["rest"]}

    def to_params(self, theta_CV: Parameters, personal_CV: Parameters) -> Parameters:
        """W = W0 + a·(Wstart − W0) + Xᵀ·A."""
        anchor_V, A_CVMH = take(self.theta_R["first"], self.run_V), theta_CV["A"]
        change_CV = {"w": jnp.einsum("cmf,cvmh->cvfh", self.x_CMF, A_CVMH), "b": jnp.sum(A_CVMH, axis=2)}

        def of_leaf(anchor_V: Array, start_CV: Array, change_CV: Array) -> Array:
            a_CV = theta_CV["a"].reshape(*theta_CV["a"].shape, *[1] * (anchor_V.ndim - 1))
            return anchor_V + a_CV * (start_CV - anchor_V) + change_CV

        first_CV = jax.tree.map(of_leaf, anchor_V, personal_CV["first"], change_CV)
        return {"first": first_CV, "rest": theta_CV["rest"]}


def parametrize(
    model: Model,
    theta_R: Parameters,
    run_V: np.ndarray,
    x_CM: Array,
    gram_CMM: Array | None = None,
    finite: bool = False,
    layers: Layers | None = None,
) -> Parametrization:
    """The parametrization in which a chunk of clients trains faster; the arguments are those of ``LowRank``."""
    if uses_low_rank(model, x_CM.shape[1], math.prod(x_CM.shape[2:]), layers):
        return LowRank(model, theta_R, run_V, x_CM, gram_CMM, finite, layers)
    return FullRank(model, theta_R, run_V, x_CM, layers)


def gram(x_M: Array) -> Array:
    """The Gram matrix of a client's examples, X·Xᵀ, with the bias as an input that is always 1."""
    x_MF = x_M.reshape(x_M.shape[0], -1).astype(jnp.float32)
    return jnp.matmul(x_MF, materialized_transpose(x_MF), precision=EXACT) + 1.0


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
    sums = [jnp.sum(_scaled(scale, leaf_C), axis=0) for scale, leaf_C in zip(scales, leaves, strict=True)]
    return jax.tree.unflatten(tree, sums)

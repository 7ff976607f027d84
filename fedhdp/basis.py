"""A public basis: the first layer's weights are U·V, where U is fixed and public and V is trained, clipped and noised.

The norm of the noise grows with the number of parameters, so that fewer and better-scaled ones lose less to it.
``with_basis`` puts ``x·U`` in front of a model: global and personal models then have the parameters of a model with as many
inputs as U has columns. U is made from public knowledge (``cosine_basis``, ``random_basis``), or from the examples of
clients who opted out (``pca_basis`` of ``public_moments``). docs/explanation/basis.md says what that means for privacy.

The columns of a basis are orthogonal, and their lengths are scaled to a root mean square of 1.

Axis letters: N examples, F inputs, K columns of the basis.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fedhdp.errors import DataError, InvalidValueError, require

if TYPE_CHECKING:  # a deployment's client, which may be of another framework, loads no JAX for second moments
    from fedhdp.data import FederatedData
    from fedhdp.models import Array, Model, Parameters


class Moments(NamedTuple):
    """The second moments of inputs, as sums, so that those of several clients can be added."""

    sum_FF: np.ndarray  # Σ x·xᵀ
    num_examples: int


def cosine_basis(shape: Sequence[int], size: int = 64, exponent: float = 0.25) -> np.ndarray:
    """The lowest frequencies of the cosine transform over the axes of an input: no data is needed.

    Args:
        shape: The shape of one input, such as ``(28, 28)``; axes of length 1 do not matter.
        size: The number of columns: the frequencies f of least f², where f² is the sum of squares over the axes.
        exponent: Columns are scaled by (1 + f²)^exponent, since higher frequencies have less energy in images.

    Returns:
        The basis, float32 of shape [F, K].

    Raises:
        InvalidValueError: If the size is not from 1 to the number of inputs, or the exponent is not finite.
    """
    inputs = math.prod(shape)
    _check(size, inputs, exponent)
    squared_F = np.zeros(1)
    columns_FF = np.ones((1, 1))
    for length in shape:
        transform = _cosine_transform(length)
        columns_FF = np.kron(columns_FF, transform)
        squared_F = (squared_F[:, None] + np.arange(length) ** 2).ravel()
    lowest_K = np.argsort(squared_F, kind="stable")[:size]
    return _scaled(columns_FF[lowest_K].T, (1 + squared_F[lowest_K]) ** exponent)


def random_basis(inputs: int, size: int = 64, seed: int = 0) -> np.ndarray:
    """Random orthonormal columns, for inputs without an order.

    Args:
        inputs: The number of inputs F.
        size: The number of columns.
        seed: The seed, which is public.

    Returns:
        The basis, float32 of shape [F, K].

    Raises:
        InvalidValueError: If the size is not from 1 to the number of inputs.
    """
    _check(size, inputs, 0.0)
    orthonormal_FK, triangle_KK = np.linalg.qr(np.random.default_rng(seed).normal(size=(inputs, size)))
    return _scaled(orthonormal_FK * np.sign(np.diagonal(triangle_KK)), np.ones(size))


def pca_basis(moments: Moments, size: int = 30, exponent: float = 0.25) -> np.ndarray:
    """The principal directions of inputs, from their second moments. These must be public: see ``public_moments``.

    Args:
        moments: The second moments.
        size: The number of columns: the directions of the largest eigenvalues λ.
        exponent: Columns are scaled by λ^−exponent.

    Returns:
        The basis, float32 of shape [F, K].

    Raises:
        InvalidValueError: If the size is not from 1 to the number of inputs, or the exponent is not finite.
        DataError: If there are no examples, a moment is not finite, or the inputs have fewer directions than the size.
    """
    _check(size, len(moments.sum_FF), exponent)
    if moments.num_examples < 1 or not np.isfinite(moments.sum_FF).all():
        rule = "finite, of one example or more"
        raise DataError(f"moments must be {rule}, got {moments.num_examples} examples", "moments", moments.num_examples)
    value_F, direction_FF = np.linalg.eigh(np.asarray(moments.sum_FF, np.float64) / moments.num_examples)
    value_K, direction_FK = value_F[::-1][:size], direction_FF[:, ::-1][:, :size]
    has_energy_K = value_K > 1e-9 * value_K[0]
    if not has_energy_K.all():
        directions = int(has_energy_K.sum())
        message = f"size must be at most {directions}, the directions of the opted-out clients' inputs, got {size}"
        raise DataError(message, "size", size)
    largest_K = np.abs(direction_FK).argmax(axis=0)
    direction_FK = direction_FK * np.sign(direction_FK[largest_K, np.arange(size)])
    return _scaled(direction_FK, value_K**-exponent)


def second_moments(x_N: np.ndarray, input_scale: float | None = None) -> Moments:
    """The second moments of examples.

    Args:
        x_N: The inputs.
        input_scale: Inputs are multiplied by it, as in ``FederatedData``.
    """
    x_NF = np.asarray(x_N, np.float64).reshape(len(x_N), -1) * (1.0 if input_scale is None else input_scale)
    return Moments(x_NF.T @ x_NF, len(x_NF))


def add_moments(moments: Iterable[Moments]) -> Moments:
    """The second moments of all examples together, summed in the given order.

    Raises:
        DataError: If there are none, or they are of different inputs.
    """
    total: Moments | None = None
    for part in moments:
        if total is not None and part.sum_FF.shape != total.sum_FF.shape:
            shapes = [total.sum_FF.shape, part.sum_FF.shape]
            raise DataError(f"moments must be of the same inputs, got the shapes {shapes}", "moments", shapes)
        total = part if total is None else Moments(total.sum_FF + part.sum_FF, total.num_examples + part.num_examples)
    if total is None:
        raise DataError("moments must be of one client or more, got none", "moments", 0)
    return total


def public_moments(data: FederatedData, opted_out: Collection[str]) -> Moments:
    """The second moments of the training inputs of the clients who opted out; no other client's examples are read.

    Args:
        data: The clients, with their levels.
        opted_out: The names of the levels of clients who opted out.

    Raises:
        DataError: If nobody opted out, or levels are not known.
    """
    if data.levels is None:
        raise DataError("levels must be known for a basis of the clients who opted out, got None", "levels", None)
    clients = np.flatnonzero(np.isin(data.levels, sorted(opted_out)))
    if not len(clients):
        message = "basis must not be pca where nobody opted out: private clients' examples are not public, got pca"
        raise DataError(message, "basis", "pca")

    def of_client(client: Any) -> Moments:
        x_CM, _ = data.train.take(np.array([client]), int(data.train.count_K[client]))
        return second_moments(x_CM[0], data.input_scale)

    return add_moments(of_client(client) for client in clients if data.train.count_K[client])


def with_basis(model: Model, basis: np.ndarray) -> Model:
    """A model of inputs x from a model of inputs x·U: the first layer's weights are U·V.

    The same arguments return the same object, so that simulations with it share one compilation.

    Args:
        model: The model, made for as many inputs as the basis has columns.
        basis: U, of shape [F, K].

    Raises:
        InvalidValueError: If the basis is no finite matrix.
    """
    basis_FK = np.ascontiguousarray(basis, np.float32)
    if basis_FK.ndim != 2 or not basis_FK.size or not np.isfinite(basis_FK).all():
        raise InvalidValueError(f"basis must be a finite matrix, got shape {basis_FK.shape}", "basis", basis_FK.shape)
    return _with_basis(model, basis_FK.tobytes(), basis_FK.shape)


@lru_cache(maxsize=32)
def _with_basis(model: Model, content: bytes, shape: tuple[int, int]) -> Model:
    import jax.numpy as jnp

    from fedhdp.models import Model

    basis_FK = np.frombuffer(content, np.float32).reshape(shape)

    def apply(parameters: Parameters, x_N: Array, key: Array | None) -> Array:
        return model.apply(parameters, x_N.reshape(x_N.shape[0], -1) @ jnp.asarray(basis_FK), key)

    return Model(model.init, apply, model.loss, model.metrics)


def fingerprint(basis: np.ndarray) -> str:
    """The sha256 of a basis: its shape and its float32 numbers."""
    basis_FK = np.ascontiguousarray(basis, np.float32)
    return hashlib.sha256(f"{basis_FK.shape}".encode() + basis_FK.tobytes()).hexdigest()


def _cosine_transform(length: int) -> np.ndarray:
    """The orthonormal cosine transform (type II) of a signal: a row for each frequency."""
    frequency, position = np.arange(length)[:, None], np.arange(length)[None]
    rows = math.sqrt(2 / length) * np.cos(math.pi * (position + 0.5) * frequency / length)
    rows[0] /= math.sqrt(2)
    return rows


def _scaled(orthonormal_FK: np.ndarray, length_K: np.ndarray) -> np.ndarray:
    """Columns of these lengths, relative to a root mean square of 1."""
    return (orthonormal_FK * (length_K / math.sqrt(np.mean(length_K**2)))).astype(np.float32)


def _check(size: int, inputs: int, exponent: float) -> None:
    require(1 <= size <= inputs, "size", size, f"from 1 to {inputs}, the number of inputs")
    require(math.isfinite(exponent), "exponent", exponent, "finite")

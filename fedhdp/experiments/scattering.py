"""Fixed features of images of 28 × 28 pixels: another model, of which nothing is learned and which reads no client's data.

A feature is the mean modulus of a wavelet in a square of 4 × 4 pixels, or the mean of the pixels there: first-order
scattering (Bruna and Mallat, 2013). Of these 833 numbers an image keeps 64: its coordinates along the principal directions
of the features of the embedded handwriting, scaled by λ^−¼. The package draws that
handwriting; it is no client's data.

Axis letters: N images, U different ones, F features, K directions, C wavelets.
"""

from __future__ import annotations

import math
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np

from fedhdp.basis import pca_basis, second_moments
from fedhdp.data import Examples, FederatedData
from fedhdp.datasets import make_handwriting

DIRECTIONS = 64  # how many features an image keeps
SIDE, POOLED = 28, 4
CHUNK = 2000  # images at a time


def scatter(data: FederatedData) -> FederatedData:
    """Data of images with their scattering features as inputs: `DIRECTIONS` numbers of each.

    Args:
        data: Data of images, flat or not, of 28 × 28 pixels.
    """
    basis_FK = _basis()
    scale = data.input_scale

    def convert(x_N: np.ndarray) -> np.ndarray:
        numbers: dict[bytes, int] = {}  # of different images: clients share test images
        number_N = np.array([numbers.setdefault(image.tobytes(), len(numbers)) for image in x_N], int)
        first_U = np.unique(number_N, return_index=True)[1]
        parts = np.array_split(x_N[first_U], max(1, len(first_U) // CHUNK))
        return np.concatenate([features(part, scale) @ basis_FK for part in parts])[number_N]

    assert isinstance(data.train, Examples)  # as built-in data has
    train, test = (part._replace(x_N=convert(part.x_N)) for part in (data.train, data.test))
    about = f"{DIRECTIONS} scattering features of each image, in directions of the embedded handwriting"
    return data._replace(
        train=train,
        test=test,
        server_x_N=convert(data.server_x_N),
        input_scale=None,
        preparation="; ".join(filter(None, [data.preparation, about])),
    )


def features(x_N: np.ndarray, input_scale: float | None) -> np.ndarray:
    """The features of images, before they are projected."""
    images_N = jnp.asarray(x_N, jnp.float32).reshape(-1, SIDE, SIDE) * (1.0 if input_scale is None else input_scale)
    return np.asarray(_features(images_N))


@lru_cache(maxsize=1)
def _basis() -> np.ndarray:
    """The directions of the embedded handwriting, such that features on them are about as long as images."""
    data = make_handwriting(500, split="by_writer", server_test=10)
    assert isinstance(data.train, Examples)
    x_NF = features(data.train.x_N, data.input_scale)
    images_NF = np.asarray(data.train.x_N, np.float32).reshape(len(x_NF), -1) * np.float32(data.input_scale or 1.0)
    length_ratio = math.sqrt(float((images_NF**2).sum()) / float((x_NF**2).sum()))
    return pca_basis(second_moments(x_NF), DIRECTIONS) * np.float32(length_ratio)


def wavelets() -> np.ndarray:
    """Morlet wavelets of two scales and eight angles: complex, of mean 0, of shape [C, 7, 7]."""
    y, x = np.mgrid[:7, :7] - 3
    filters = []
    for sigma, frequency in ((0.8, 3 * math.pi / 4), (1.6, 3 * math.pi / 8)):
        envelope = np.exp(-(x**2 + y**2) / (2 * sigma**2))
        for angle in np.arange(8) * math.pi / 8:
            wave = np.exp(1j * frequency * (x * math.cos(angle) + y * math.sin(angle)))
            wave = envelope * (wave - (envelope * wave).sum() / envelope.sum())
            filters.append(wave / np.abs(wave).sum())
    return np.stack(filters)


@jax.jit
def _features(images_N: jax.Array) -> jax.Array:
    filters = wavelets()
    kernel = jnp.asarray(np.concatenate([filters.real, filters.imag]), jnp.float32).transpose(1, 2, 0)[:, :, None]
    axes = ("NHWC", "HWIO", "NHWC")
    real, imaginary = jnp.split(
        jax.lax.conv_general_dilated(images_N[..., None], kernel, (1, 1), "SAME", dimension_numbers=axes), 2, axis=-1
    )
    maps = jnp.concatenate([images_N[..., None], jnp.hypot(real, imaginary)], axis=-1)
    squares = SIDE // POOLED
    means = maps.reshape(-1, squares, POOLED, squares, POOLED, maps.shape[-1]).mean(axis=(2, 4))
    return jnp.moveaxis(means, -1, 1).reshape(len(images_N), -1)

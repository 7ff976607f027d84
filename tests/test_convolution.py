"""A convolution with its units and its pooling: as a matrix product and as GPU kernels, against the library's own."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedhdp.engine.kernels import convolution
from fedhdp.engine.kernels.convolution import PIXEL, Piece, Shape, as_product, convolve_and_halve, in_kernels
from fedhdp.models import dense


def plain(layer: dict, image: jax.Array, kernel: int) -> jax.Array:
    """The same as JAX has it."""
    n, high, wide, inputs = image.shape
    weights = layer["w"].reshape(kernel, kernel, inputs, -1)
    made = jax.lax.conv_general_dilated(image, weights, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return jax.nn.relu(made + layer["b"]).reshape(n, high // 2, 2, wide // 2, 2, -1).max(axis=(2, 4))


def kernels(layer: dict, image: jax.Array, kernel: int, interpret: bool = True) -> jax.Array:
    shape = Shape(*image.shape, layer["w"].shape[-1], kernel)
    return in_kernels(image, layer["w"], layer["b"], shape, interpret)


def networks(count: int, kernel: int, inputs: int, outputs: int) -> dict:
    made = jax.vmap(lambda key: dense(key, kernel * kernel * inputs, outputs))(
        jax.random.split(jax.random.key(0), count)
    )
    return {"w": made["w"], "b": jax.random.normal(jax.random.key(1), (count, outputs)) / 10}


def outputs_and_gradients(convolve, layers: dict, image: jax.Array, kernel: int) -> list[jax.Array]:
    """Of several networks, on images of their own or all on the same ones."""
    of_all = jax.vmap(partial(convolve, kernel=kernel), in_axes=(0, 0 if image.ndim == 5 else None))
    out = of_all(layers, image)
    score = jax.random.normal(jax.random.key(2), out.shape)
    return jax.tree.leaves((out, jax.grad(lambda *a: jnp.sum(score * of_all(*a)), (0, 1))(layers, image)))


@pytest.mark.parametrize("kernel", [2, 3, 5])
def test_windows_times_a_matrix_are_a_convolution_its_units_and_its_pooling(kernel):
    image = jax.random.normal(jax.random.key(3), (2, 2, 6, 8, 3))
    work = (networks(2, kernel, 3, 4), image, kernel)
    for one, other in zip(outputs_and_gradients(as_product, *work), outputs_and_gradients(plain, *work), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)


@pytest.mark.parametrize(
    ("kernel", "inputs", "outputs", "high", "wide"),
    [
        (3, 16, 32, 14, 14),
        (3, 1, 16, 28, 28),
        (2, 16, 16, 4, 10),
        (3, 32, 64, 4, 6),
    ],
)
def test_the_kernels_compute_the_same(kernel, inputs, outputs, high, wide):
    assert Shape(3, high, wide, inputs, outputs, kernel).suits_kernels
    image = jax.random.normal(jax.random.key(3), (3, high, wide, inputs) if inputs == 1 else (2, 3, high, wide, inputs))
    work = (networks(2, kernel, inputs, outputs), image, kernel)
    for one, other in zip(outputs_and_gradients(kernels, *work), outputs_and_gradients(plain, *work), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)


def test_weights_whose_sums_registers_cannot_hold_are_summed_pixel_by_pixel():
    pieces = [Shape(20, 14, 14, inputs, 2 * inputs, 3).to_weights for inputs in (1, 16, 32)]
    assert pieces == [Piece(4, 4), Piece(1, 4), PIXEL]


@pytest.mark.parametrize(("inputs", "outputs", "side"), [(1, 16, 28), (16, 32, 14)])
def test_the_kernels_are_made_for_a_gpu_also_where_there_is_none(inputs, outputs, side):
    layers, image = networks(2, 3, inputs, outputs), jnp.zeros((2, 3, side, side, inputs))

    def gradient(layers: dict, image: jax.Array) -> jax.Array:
        of_all = jax.vmap(partial(kernels, kernel=3, interpret=False))
        return jax.grad(lambda *a: jnp.sum(of_all(*a)), argnums=(0, 1))(layers, image)

    made = jax.jit(gradient).trace(layers, image).lower(lowering_platforms=("cuda",)).as_text()
    wanted = {"convolution_forward", "convolution_weights"} | ({"convolution_image"} if inputs > 1 else set())
    assert all(f'"{name}"' in made for name in wanted)


@pytest.mark.parametrize(("inputs", "outputs"), [(3, 16), (16, 10), (1, 8), (24, 16)])
def test_sizes_that_kernels_cannot_have_go_as_a_product(monkeypatch, inputs, outputs):
    monkeypatch.setattr(convolution, "on_nvidia", lambda: True)
    layer = jax.tree.map(lambda leaf: leaf[0], networks(1, 3, inputs, outputs))
    image = jax.random.normal(jax.random.key(0), (2, 4, 4, inputs))
    np.testing.assert_allclose(convolve_and_halve(layer, image, 3), plain(layer, image, 3), atol=1e-5)


def test_a_gpu_is_given_the_kernels(monkeypatch):
    given = []
    monkeypatch.setattr(convolution, "on_nvidia", lambda: True)
    monkeypatch.setattr(convolution, "in_kernels", lambda image, w, b, shape: given.append(shape))
    layer = jax.tree.map(lambda leaf: leaf[0], networks(1, 3, 16, 32))
    convolve_and_halve(layer, jnp.zeros((20, 14, 14, 16)), 3)
    assert given == [Shape(20, 14, 14, 16, 32, 3)]

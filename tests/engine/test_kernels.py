"""A convolution with its units and its pooling: as a matrix product and as GPU kernels, against the library's own."""

from __future__ import annotations

import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedhdp.engine import kernels, patches
from fedhdp.engine.kernels import pallas
from fedhdp.engine.kernels.pallas import PIXEL, ConvShape, Piece
from fedhdp.engine.patches import convolve_and_pool
from fedhdp.models import dense


def library(layer: dict, image: jax.Array, kernel: int) -> jax.Array:
    """JAX's own convolution, then the units and the pooling."""
    n, height, width, inputs = image.shape
    weights = layer["w"].reshape(kernel, kernel, inputs, -1)
    out = jax.lax.conv_general_dilated(image, weights, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return jax.nn.relu(out + layer["b"]).reshape(n, height // 2, 2, width // 2, 2, -1).max(axis=(2, 4))


def in_kernels(layer: dict, image: jax.Array, kernel: int, interpret: bool = True) -> jax.Array:
    shape = ConvShape(*image.shape, layer["w"].shape[-1], kernel)
    return pallas.conv_relu_pool(image, layer["w"], layer["b"], shape, interpret)


def in_product(layer: dict, image: jax.Array, kernel: int) -> jax.Array:
    weight = layer["w"].reshape(kernel, kernel, image.shape[-1], -1)
    return jax.nn.relu(convolve_and_pool(image, weight, same_size(kernel)) + layer["b"])


def engines(layer: dict, image: jax.Array, kernel: int) -> jax.Array:
    """What the engine takes."""
    weight = layer["w"].reshape(kernel, kernel, image.shape[-1], -1)
    return kernels.conv_relu_pool(image, weight, layer["b"], same_size(kernel))


def same_size(kernel: int) -> tuple:
    """The padding with which a convolution has as many outputs as pixels."""
    return (((kernel - 1) // 2, kernel // 2),) * 2


def layers(count: int, kernel: int, inputs: int, outputs: int) -> dict:
    """The convolutions of several networks."""
    keys = jax.random.split(jax.random.key(0), count)
    w = jax.vmap(lambda key: dense(key, kernel * kernel * inputs, outputs)["w"])(keys)
    return {"w": w, "b": jax.random.normal(jax.random.key(1), (count, outputs)) / 10}


def outputs_and_gradients(convolve, layers: dict, image: jax.Array, kernel: int) -> list[jax.Array]:
    """Of several networks, each on images of its own [count, N, ...] or all on the same ones [N, ...]."""
    mapped = jax.vmap(partial(convolve, kernel=kernel), in_axes=(0, 0 if image.ndim == 5 else None))
    out = mapped(layers, image)
    weight = jax.random.normal(jax.random.key(2), out.shape)
    return jax.tree.leaves((out, jax.grad(lambda *a: jnp.sum(weight * mapped(*a)), (0, 1))(layers, image)))


def assert_same(convolve, layers: dict, image: jax.Array, kernel: int) -> None:
    pairs = zip(
        outputs_and_gradients(convolve, layers, image, kernel),
        outputs_and_gradients(library, layers, image, kernel),
        strict=True,
    )
    for a, b in pairs:
        np.testing.assert_allclose(a, b, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", [2, 3, 5])
@pytest.mark.parametrize("on_cpu", [True, False])  # windows are columns, or rows
def test_matrix_product_is_the_librarys_convolution(monkeypatch, kernel, on_cpu):
    monkeypatch.setattr(patches, "on_cpu", lambda: on_cpu)
    image = jax.random.normal(jax.random.key(3), (2, 2, 6, 8, 3))
    assert_same(in_product, layers(2, kernel, 3, 4), image, kernel)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "inputs", "outputs", "height", "width"),
    [(3, 16, 32, 14, 14), (3, 1, 16, 28, 28), (2, 16, 16, 4, 10), (3, 32, 64, 4, 6)],
)
def test_kernels_are_the_librarys_convolution(kernel, inputs, outputs, height, width):
    assert ConvShape(3, height, width, inputs, outputs, kernel).suits_kernels
    size = (3, height, width, inputs) if inputs == 1 else (2, 3, height, width, inputs)
    assert_same(in_kernels, layers(2, kernel, inputs, outputs), jax.random.normal(jax.random.key(3), size), kernel)


def test_weights_are_summed_by_pixel_where_registers_are_too_few():
    pieces = [ConvShape(20, 14, 14, inputs, 2 * inputs, 3).to_weights for inputs in (1, 16, 32)]
    assert pieces == [Piece(4, 4), Piece(1, 4), PIXEL]


@pytest.mark.parametrize(("inputs", "outputs", "side"), [(1, 16, 28), (16, 32, 14)])
def test_kernels_compile_for_cuda_without_a_gpu(inputs, outputs, side):
    image = jnp.zeros((2, 3, side, side, inputs))

    def gradient(layers: dict, image: jax.Array) -> jax.Array:
        mapped = jax.vmap(partial(in_kernels, kernel=3, interpret=False))
        return jax.grad(lambda *a: jnp.sum(mapped(*a)), argnums=(0, 1))(layers, image)

    traced = jax.jit(gradient).trace(layers(2, 3, inputs, outputs), image)
    program = traced.lower(lowering_platforms=("cuda",)).as_text()
    names = {"convolution_forward", "convolution_weights"} | ({"convolution_image"} if inputs > 1 else set())
    assert all(f'"{name}"' in program for name in names)


@pytest.mark.parametrize(("inputs", "outputs"), [(3, 16), (16, 10), (1, 8), (24, 16)])
def test_sizes_that_do_not_suit_kernels_are_a_matrix_product(monkeypatch, inputs, outputs):
    monkeypatch.setattr(kernels, "on_nvidia", lambda: True)
    layer = jax.tree.map(lambda leaf: leaf[0], layers(1, 3, inputs, outputs))
    image = jax.random.normal(jax.random.key(0), (2, 4, 4, inputs))
    np.testing.assert_allclose(engines(layer, image, 3), library(layer, image, 3), atol=1e-5)


def test_nvidia_gpu_uses_the_kernels(monkeypatch):
    shapes = []
    monkeypatch.setattr(kernels, "on_nvidia", lambda: True)
    monkeypatch.setattr(pallas, "conv_relu_pool", lambda image, w, b, shape: shapes.append(shape))
    layer = jax.tree.map(lambda leaf: leaf[0], layers(1, 3, 16, 32))
    engines(layer, jnp.zeros((20, 14, 14, 16)), 3)
    assert shapes == [ConvShape(20, 14, 14, 16, 32, 3)]


def test_other_padding_is_a_matrix_product(monkeypatch):
    monkeypatch.setattr(kernels, "on_nvidia", lambda: True)
    monkeypatch.setattr(pallas, "conv_relu_pool", None)
    weight = jnp.zeros((3, 3, 16, 32))
    assert kernels.conv_relu_pool(jnp.zeros((2, 6, 6, 16)), weight, jnp.zeros(32), ((0, 0), (0, 0))).shape == (
        2,
        2,
        2,
        32,
    )


@pytest.mark.process
def test_pallas_is_not_imported_without_an_nvidia_gpu():
    code = (
        "import sys, fedhdp.engine.kernels as k, fedhdp.simulation, jax.numpy as jnp; "
        "k.conv_relu_pool(jnp.zeros((1, 4, 4, 1)), jnp.zeros((3, 3, 1, 16)), jnp.zeros(16), ((1, 1), (1, 1))); "
        "assert k.on_nvidia() or 'fedhdp.engine.kernels.pallas' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

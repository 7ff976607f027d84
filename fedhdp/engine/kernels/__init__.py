"""Optional kernels for NVIDIA GPUs; Pallas is imported only where there is one."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from fedhdp.engine.patches import Padding, convolve_and_pool
from fedhdp.models import Array


def on_nvidia() -> bool:
    """Whether computations go to an NVIDIA GPU."""
    return jax.default_backend() == "gpu" and "NVIDIA" in jax.devices()[0].device_kind


def conv_relu_pool(image: Array, weight: Array, bias: Array, padding: Padding, precision: Any = None) -> Array:
    """A convolution of stride 1, its rectified linear units and 2 x 2 max pooling.

    By kernels, where there is an NVIDIA GPU and the sizes suit them; else by ``patches.convolve_and_pool``, whose arguments
    these are, with the bias [outputs].
    """
    if on_nvidia() and precision is None and image.dtype == jnp.float32:
        from fedhdp.engine.kernels import pallas

        kernel, width, _, outputs = weight.shape
        images, height, columns, inputs = image.shape
        shape = pallas.ConvShape(images, height, columns, inputs, outputs, kernel)
        if kernel == width and shape.suits_kernels and tuple(map(tuple, padding)) == shape.padding:
            return pallas.conv_relu_pool(image, weight.reshape(-1, outputs), bias, shape)
    return convolve_and_pool(image, weight, padding, precision, bias, has_units=True)

"""Optional kernels for NVIDIA GPUs; Pallas is imported only where there is one."""

from __future__ import annotations

import jax

from fedhdp import models
from fedhdp.models import Array


def on_nvidia() -> bool:
    """Whether computations go to an NVIDIA GPU."""
    return jax.default_backend() == "gpu" and "NVIDIA" in jax.devices()[0].device_kind


def conv_relu_pool(layer: dict[str, Array], image: Array, kernel: int) -> Array:
    """``models.conv_relu_pool`` by kernels, where there is an NVIDIA GPU and the sizes suit them."""
    if on_nvidia():
        from fedhdp.engine.kernels import pallas

        images, height, width, inputs = image.shape
        shape = pallas.ConvShape(images, height, width, inputs, layer["w"].shape[-1], kernel)
        if shape.suits_kernels:
            return pallas.conv_relu_pool(image, layer["w"], layer["b"], shape)
    return models.conv_relu_pool(layer, image, kernel)

"""What the kernels for NVIDIA GPUs are written with: how they are cut, and the little that they all compute."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton

Array = jax.Array


def on_nvidia() -> bool:
    """Whether computations go to an NVIDIA GPU."""
    return jax.default_backend() == "gpu" and "NVIDIA" in jax.devices()[0].device_kind


class Launch(NamedTuple):
    """How a kernel is cut: rows of a tile, warps for each, and parts that are worked on apart."""

    rows: int
    warps: int
    parts: int = 1


def is_power_of_two(size: int, at_least: int = 1) -> bool:
    """Sizes of a kernel are powers of two, those of a product at least 16."""
    return size >= at_least and size & (size - 1) == 0


def upto(size: int) -> Array:
    """0, 1, … below the size."""
    return jnp.arange(size, dtype=jnp.int32)


def over(a: Array, b: int) -> Array:
    """Numbers of at least 0 divided, without the rest."""
    return jax.lax.div(a, jnp.int32(b))


def product(a: Array, b: Array) -> Array:
    """A product in the tensor cores' form of single precision, as products outside of kernels are, unless told otherwise."""
    exact = jax.config.jax_default_matmul_precision in ("float32", "highest")  # type: ignore[attr-defined]
    return triton.dot(a, b, allow_tf32=not exact)

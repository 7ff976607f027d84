"""CPU cores as JAX devices: clients are spread over them."""

from __future__ import annotations

import os

import jax


def available_cores() -> int:
    """The cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def use_cpu_cores(cores: int | None = None) -> int:
    """Make each CPU core a JAX device.

    It has an effect only before JAX has initialized its backends; a number set by ``JAX_NUM_CPU_DEVICES`` stays.

    Args:
        cores: How many; by default all that are available.

    Returns:
        How many CPU devices JAX has.
    """
    if "JAX_NUM_CPU_DEVICES" not in os.environ:
        try:
            jax.config.update("jax_num_cpu_devices", cores or available_cores())
        except RuntimeError:  # the backends are initialized: they stay as they are
            pass
    return len(jax.devices("cpu"))

"""CPU cores as JAX devices: the clients of a round are spread over them."""

from __future__ import annotations

import logging
import os
from functools import lru_cache

import jax

LOGGER = logging.getLogger(__name__)


def available_cores() -> int:
    """The number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def use_cpu_cores(cores: int | None = None) -> int:
    """Make each CPU core a JAX device.

    It must be called before JAX initializes its backends, which happens at the first array or ``jax.devices()``. A
    simulation calls it. A number set in ``JAX_NUM_CPU_DEVICES`` or ``jax.config.jax_num_cpu_devices`` stays. If JAX is
    initialized with one CPU device and there are more cores, a warning is logged once.

    Args:
        cores: How many. None: all that are available.

    Returns:
        The number of CPU devices that JAX has.
    """
    cores = cores or available_cores()
    is_set = "JAX_NUM_CPU_DEVICES" in os.environ or getattr(jax.config, "jax_num_cpu_devices", -1) != -1
    if not is_set:
        try:
            jax.config.update("jax_num_cpu_devices", cores)
        except RuntimeError:  # the backends are initialized
            if jax.default_backend() == "cpu" and jax.device_count() == 1 < cores:
                _warn(cores)
    return len(jax.devices("cpu"))


@lru_cache(maxsize=1)
def _warn(cores: int) -> None:
    message = "JAX has 1 CPU device and %d cores: call fedhdp.use_cpu_cores() before any other use of JAX"
    LOGGER.warning(message, cores)

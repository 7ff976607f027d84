"""Federated learning in which every client chooses its own differential privacy."""

import contextlib
import os
import sys

__version__ = "0.1.0"

# Cores are devices: clients are spread over them. JAX reads this when it starts; whoever has set it keeps what they set.
if "JAX_NUM_CPU_DEVICES" not in os.environ:
    os.environ["JAX_NUM_CPU_DEVICES"] = str(len(os.sched_getaffinity(0)))
    if "jax" in sys.modules:
        with contextlib.suppress(RuntimeError):  # it has started already, and stays as it is
            sys.modules["jax"].config.update("jax_num_cpu_devices", len(os.sched_getaffinity(0)))

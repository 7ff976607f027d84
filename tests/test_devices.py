"""CPU cores as devices."""

from __future__ import annotations

import os

import pytest
from simulations import run_python

PROGRAM = """
import logging, os, sys
os.environ.pop("JAX_NUM_CPU_DEVICES", None)
before = dict(os.environ)
import fedhdp
assert "jax" not in sys.modules
if len(sys.argv) > 1:
    import jax
    jax.devices()
logging.basicConfig(level=logging.WARNING)
print(fedhdp.use_cpu_cores(3), fedhdp.use_cpu_cores(3))
assert before == dict(os.environ)
"""


@pytest.mark.process
def test_cores_become_devices_by_a_call():
    assert run_python(PROGRAM).stdout.split() == ["3", "3"]


@pytest.mark.process
def test_one_warning_where_jax_is_initialized_with_one_device():
    process = run_python(PROGRAM, "initialize first")
    assert process.stdout.split() == ["1", "1"]
    assert process.stderr.count("use_cpu_cores") == 1


@pytest.mark.process
def test_importing_needs_no_linux_call():
    program = "import os; vars(os).pop('sched_getaffinity', None); import fedhdp; print(fedhdp.use_cpu_cores())"
    environment = os.environ.get("JAX_NUM_CPU_DEVICES")
    assert int(run_python(program).stdout) == (int(environment) if environment else os.cpu_count())


@pytest.mark.process
def test_simulation_has_all_cores_after_handwriting_was_generated():
    program = """
import os
os.environ.pop("JAX_NUM_CPU_DEVICES", None)
from fedhdp.datasets.handwriting import make_handwriting
from fedhdp.devices import available_cores
make_handwriting(4, 2, 1, 2)
import jax
print(jax.device_count() == available_cores())
"""
    assert run_python(program).stdout.split() == ["True"]

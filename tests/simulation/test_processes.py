"""Several devices and several processes."""

from __future__ import annotations

import re
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from simulations import CHOSEN, run_python, trained

SCRIPT = """
import sys, numpy as np
from helpers import mechanism_of, tiny_data
from simulations import CHOSEN, trained
data = tiny_data([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 4, 4, 4, 9, 1, 6])
simulation = trained(data, CHOSEN)
assert simulation.engine.devices == int(sys.argv[1])
personal = simulation.personal_models(np.flatnonzero(simulation.participated_K))
np.savez(sys.argv[2], theta=simulation.global_model(), clip=simulation.server_state.clip, personal=personal)
"""


@pytest.mark.process
def test_fewer_server_test_examples_than_devices():
    code = """
import jax; jax.config.update('jax_num_cpu_devices', 4); jax.devices()
from helpers import tiny_data
from simulations import CHOSEN, trained
data = tiny_data([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 4, 4, 4, 9, 1, 6])
for examples in (1, 3):
    few = data._replace(server_x_N=data.server_x_N[:examples], server_y_N=data.server_y_N[:examples])
    simulation = trained(few, CHOSEN, 1)
    print(simulation.engine.devices, [row.value for row in simulation.evaluate()[0]][0] * examples)
"""
    for line in run_python(code).stdout.splitlines():
        devices, right = line.split()
        assert devices == "4"
        assert float(right) == pytest.approx(round(float(right)), abs=1e-5)  # each is counted once


@pytest.mark.process
def test_noise_is_drawn_once_for_all_devices(tmp_path):
    runs = []
    for devices in (1, 2, 4):
        code = f"import jax; jax.config.update('jax_num_cpu_devices', {devices}); jax.devices()\n" + SCRIPT
        run_python(code, str(devices), str(tmp_path / f"{devices}.npz"))
        runs.append(np.load(tmp_path / f"{devices}.npz"))
    for other in runs[1:]:
        for name in ("theta", "clip", "personal"):
            np.testing.assert_allclose(other[name], runs[0][name], atol=1e-5)


TWO = """
import sys, jax, numpy as np
jax.config.update("jax_num_cpu_devices", 2)
jax.distributed.initialize(f"127.0.0.1:{sys.argv[1]}", num_processes=2, process_id=int(sys.argv[2]))
from helpers import tiny_data
from simulations import CHOSEN, trained
data = tiny_data([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 4, 4, 4, 9, 1, 6])
simulation = trained(data, CHOSEN)
assert simulation.engine.devices == 4
personal = simulation.personal_models(np.flatnonzero(simulation.participated_K))
values = [row.value for row in simulation.evaluate()[0]]
simulation.save(sys.argv[3] + ".state")
restored = trained(data, CHOSEN, rounds=0)
restored.load(sys.argv[3] + ".state")
fresh = trained(data, CHOSEN, noise_seed=None)  # from the entropy of one of the two, and not of the other
np.savez(sys.argv[3], theta=simulation.global_model(), personal=personal, values=values,
         restored=restored.global_model(), fresh=fresh.global_model())
"""


@pytest.mark.process
def test_two_processes_run_one_simulation(data, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    outs = [tmp_path / f"{number}.npz" for number in range(2)]
    with ThreadPoolExecutor(2) as pool:
        processes = [pool.submit(run_python, TWO, str(port), str(number), str(out)) for number, out in enumerate(outs)]
        assert [process.result(timeout=240).returncode for process in processes] == [0, 0]
    first, second = (dict(np.load(out)) for out in outs)
    for name in first:
        np.testing.assert_array_equal(first[name], second[name])
    simulation = trained(data, CHOSEN)
    np.testing.assert_allclose(first["theta"], simulation.global_model(), atol=1e-5)
    np.testing.assert_array_equal(first["theta"], first["restored"])
    personal_models = simulation.personal_models(np.flatnonzero(simulation.participated_K))
    np.testing.assert_allclose(first["personal"], personal_models, atol=1e-5)
    np.testing.assert_allclose(first["values"], [row.value for row in simulation.evaluate()[0]], atol=1e-4)
    assert np.abs(first["fresh"] - first["theta"]).max() > 1e-4


@pytest.mark.process
def test_example_with_user_data_and_model():
    """Personal models score higher than the global one, as clinics differ."""
    example = Path(__file__).parents[2] / "examples" / "own.py"
    output = run_python(example.read_text()).stdout
    *priced, _ = output.split("equal weights\n")[0].split("\n")
    assert [line.split(":")[0] for line in priced] == ["none", "some", "strong"]
    tables, *of_clinics = output.split("equal weights\n")[1].partition("equal weights:")
    for of_rule in tables.split("by noise weights\n"):
        scores = {tuple(line.split()[:2]): float(line.split()[2]) for line in of_rule.splitlines()}
        assert len(scores) == 7
        assert all(scores[name, "personal"] > scores[name, "global"] + 0.1 for name in ("none", "some", "strong"))
    better = re.findall(r"the personal model is better for (\d+) of 600 clinics", "".join(of_clinics))
    assert len(better) == 2
    assert min(map(int, better)) > 300

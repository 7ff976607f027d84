"""The benchmark's sizes, steps, arithmetic and output, but no times."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def modules(monkeypatch):
    """The benchmark's own modules; they are scripts and belong to no package."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import bench
    import show
    import work

    return bench, show, work


def test_default_work_is_the_papers_round(modules):
    *_, w = modules
    work = w.Work()
    assert (work.clients, work.cohort, work.samples, work.batch, work.epochs) == (2000, 100, 30, 20, 25)
    assert work.steps == 100 * 25 * 2  # 20 and 10 images, the partial batch kept
    assert work.parameters == 784 * 50 + 50 + 50 * 10 + 10 == sum(part.size for part in w.initial_model(work))


def test_data_is_repeatable_with_two_digits_a_client(modules):
    *_, w = modules
    work = w.Work(clients=7, samples=4)
    data = w.data(work)
    assert data.x_KM.shape == (7, 4, 28, 28)
    assert data.x_KM.dtype == np.uint8
    assert data.y_KM.shape == (7, 4)
    assert all(len(set(y_M)) <= 2 for y_M in data.y_KM)
    np.testing.assert_array_equal(data.x_KM, w.data(work).x_KM)


def test_flops_of_a_round(modules):
    *_, w = modules
    work = w.Work(clients=3, cohort=2, samples=3, batch=2, epochs=2, hidden=4)
    forward = 2 * (784 * 4 + 4 * 10)
    weight_gradients = 2 * (784 * 4 + 4 * 10)
    hidden_gradient = 2 * 4 * 10
    images = 2 * 2 * 3  # clients, epochs, samples: batches of 2 and 1
    assert w.flops(work, models=1) == images * (forward + weight_gradients + hidden_gradient)
    assert w.flops(work, models=2) == 2 * w.flops(work, models=1)
    assert w.flops(w.Work(), models=2) == 23_970_000_000


def test_loss_of_a_zero_model(modules):
    *_, w = modules
    work = w.Work(clients=2, samples=2)
    zeros = [np.zeros_like(part) for part in w.initial_model(work)]
    assert w.loss(zeros, w.data(work)) == pytest.approx(np.log(10))


def test_peer_that_cannot_run_has_a_reason(modules, monkeypatch):
    bench, _, w = modules
    missing = bench.Contender("no_such_script.py", None, {"as it is": {}}, {})
    monkeypatch.setitem(bench.CONTENDERS, "torch", missing)
    with pytest.raises(bench.BenchmarkError, match=r"no_such_script\.py"):
        bench.time_contender("torch", w.Work(), 1, 0, float("inf"), 60.0)


@pytest.mark.slow
def test_output_is_one_json_document(modules, tmp_path):
    bench, show, _ = modules
    small = {"clients": 40, "cohort": 4, "samples": 5, "batch": 2, "epochs": 2, "hidden": 8}
    figure = tmp_path / "figure.png"
    command = [sys.executable, str(BENCHMARKS / "bench.py"), "--quick", "--json", "--only", "fedhdp", "--rounds", "2"]
    command += ["--work", json.dumps(small), "--figure", str(figure)]
    process = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stderr
    result = json.loads(process.stdout)
    assert set(result) >= {"seconds_per_round", "naive_at_peak", "gemm_gflops", "peers", "machine", "work", "sweeps"}
    names = {"fedhdp", "fedhdp+personal", "torch", "flower", "pfl", "fedjax"}
    assert set(result["seconds_per_round"]) == names == set(bench.CONTENDERS)
    assert result["peers"]["fedhdp"]["check"]["steps"] == 4 * 2 * 3
    assert result["peers"]["fedhdp"]["spread"]["rounds"] == 2
    assert result["seconds_per_round"]["torch"] is None
    assert result["peers"]["torch"]["reason"] == "not selected"
    assert figure.stat().st_size > 0
    assert "| fedhdp |" in show.table(result)


def test_unknown_name_is_refused():
    command = [sys.executable, str(BENCHMARKS / "bench.py"), "--only", "fedhdp,tensorflow"]
    process = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert process.returncode == 2
    assert "not tensorflow" in process.stderr

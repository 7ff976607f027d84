"""The benchmark's sizes, steps, arithmetic and output, but no times."""

import json
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from figure_checks import overhang

from fedhdp.models import cnn

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
    assert work.parameters == 784 * 50 + 50 + 50 * 10 + 10 == sum(part.size for part in w.initial_model(work).values())


def test_other_works(modules):
    """FEMNIST's network has the built-in one's parameters; the transformer has about a million."""
    *_, w = modules
    femnist, sequence = w.Femnist(), w.Sequence()
    assert femnist.steps == 20 * 2 * 5
    parameters = jax.eval_shape(cnn().init, jax.random.key(0))
    assert femnist.parameters == sum(leaf.size for leaf in jax.tree.leaves(parameters))
    assert sequence.steps == 10 * 4
    assert 0.8e6 < sequence.parameters < 1.2e6
    data = sequence.data()
    assert data.x_KM.shape == data.y_KM.shape == (40, 40, 32)
    np.testing.assert_array_equal(data.x_KM[..., 1:], data.y_KM[..., :-1])  # targets are the tokens that follow


@pytest.mark.parametrize("name", ["mnist", "femnist", "sequence"])
def test_networks_agree(modules, monkeypatch, name):
    """The loss in numpy, by which every peer's work is checked, is that of JAX, Flax and the built-in network."""
    *_, w = modules
    monkeypatch.setattr(sys, "argv", ["fedhdp_rounds.py"])
    from peers import fedhdp_rounds, jax_networks

    work = w.from_dict({"name": name, "clients": 3})
    rng = np.random.default_rng(1)
    model = {key: part + rng.normal(0, 0.1, part.shape).astype("f") for key, part in w.initial_model(work).items()}
    data = work.data()._replace(server_x_N=work.data().server_x_N[:20], server_y_N=work.data().server_y_N[:20])
    expected = w.loss(work, model, data)
    for network in ("jax", "flax", "built-in") if name != "sequence" else ("jax", "flax"):
        built = fedhdp_rounds.make_model(work, network)
        layout = fedhdp_rounds.Layout(work, network, jax.eval_shape(built.init, jax.random.key(0)))
        logits = built.apply(layout.to_model(model), jax_networks.inputs(work, data.server_x_N), None)
        assert float(built.loss(logits, data.server_y_N).mean()) == pytest.approx(expected, rel=1e-4)
        back = layout.from_model(layout.to_model(model))
        assert all(np.array_equal(back[key], part) for key, part in model.items())


def test_data_is_repeatable_with_two_digits_a_client(modules):
    *_, w = modules
    work = w.Work(clients=7, samples=4)
    data = work.data()
    assert data.x_KM.shape == (7, 4, 28, 28)
    assert data.x_KM.dtype == np.uint8
    assert data.y_KM.shape == (7, 4)
    assert all(len(set(y_M)) <= 2 for y_M in data.y_KM)
    np.testing.assert_array_equal(data.x_KM, work.data().x_KM)


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


def test_flops_of_convolutions_and_of_attention(modules):
    *_, w = modules
    work = w.Femnist(samples=1, epochs=1, cohort=1)
    first, second = 784 * 9 * 16, 196 * 9 * 16 * 32
    dense = 1568 * 128 + 128 * 62
    assert w.flops(work, models=1) == 2 * (2 * first + 3 * (second + dense))  # the image needs no gradient
    work = w.Sequence(samples=1, epochs=1, cohort=1)
    matrices = 4 * (128 * 384 + 128 * 128 + 2 * 128 * 512) + 128 * 512
    attention = 4 * 2 * 32 * 128  # scores and values, for each token
    assert w.flops(work, models=1) == 6 * 32 * (matrices + attention)


def test_loss_of_a_zero_model(modules):
    *_, w = modules
    work = w.Work(clients=2, samples=2)
    zeros = {name: np.zeros_like(part) for name, part in w.initial_model(work).items()}
    assert w.loss(work, zeros, work.data()) == pytest.approx(np.log(10))


def test_peer_that_cannot_run_has_a_reason(modules, monkeypatch):
    bench, _, w = modules
    missing = bench.Contender("no_such_script.py", None, {"as it is": {}}, {})
    monkeypatch.setitem(bench.CONTENDERS, "torch", missing)
    with pytest.raises(bench.BenchmarkError, match=r"no_such_script\.py"):
        bench.time_contender("torch", w.Work(), 1, 0, float("inf"), 60.0)


def test_setting_that_fails_is_told_and_the_next_best_counts(modules, monkeypatch):
    bench, show, w = modules
    settings = {"one": {"seconds": 2.0}, "two": {"seconds": 1.0}, "three": {"seconds": None}}
    monkeypatch.setitem(bench.CONTENDERS, "pfl", bench.Contender("pfl_rounds.py", None, settings, {}))

    def run(python, script, work, options, *arguments):
        if options["seconds"] is None:
            raise bench.BenchmarkError("exit -11: no output")
        spent = {"seconds": [options["seconds"]] * 3, "start_seconds": 4.0, "first_round_seconds": 6.0}
        return spent | {
            "steps": 1,
            "loss_before": 2,
            "loss_after": 1,
            "rounds_played": 3,
            "versions": {},
            "memory_mb": 1,
        }

    monkeypatch.setattr(bench, "run_script", run)
    peer = bench.time_contender("pfl", w.Work(), 3, 0, float("inf"), 60.0)
    assert (peer["setting"], peer["seconds"], peer["start_seconds"], peer["compile_seconds"]) == ("two", 1.0, 4.0, 5.0)
    assert peer["failed_settings"] == ["three: exit -11: no output"]
    machine = {"cpu": "a", "cores": 2, "memory_gb": 1, "load_before": 0}
    result = {"work": w.as_dict(w.Work()), "seconds_per_round": {"fedhdp": 0.5, "fedhdp+personal": None}}
    result |= {"peers": {"pfl": peer}, "naive_at_peak": 1.0, "gemm_gflops": 1.0, "machine": machine, "sweeps": []}
    table = show.table(result)
    floor = w.flops(w.Work(), models=1) / 1e9  # at 1 GFLOP/s
    assert f"| pfl | two | 1.0000 | 1.0000 – 1.0000 | 2.0 × | {1 / floor:.2f} | 4.0 | 5.0 |" in table
    assert "pfl, other settings: one 2.0000 s; three: exit -11: no output (failed, so another setting counts)." in table


def test_title_says_what_is_seen(modules):
    _, show, _ = modules
    seconds = {"fedhdp": 0.5, "fedhdp-user": 0.1, "torch": 1.0, "pfl": 8.0, "flower": None}
    title = "fedhdp takes 0.5 s a round, its peers 2.0 to 16 times as long"
    assert show.title({"seconds_per_round": seconds}) == title
    assert "less is better" in show.title({"seconds_per_round": {"fedhdp": 0.5, "torch": None}})


def test_figure_explains_bars_that_are_shorter_than_their_floor(modules, tmp_path, drawn):
    _, show, w = modules
    work = w.Work()
    flops = w.flops(work, models=1)
    times = {"fedhdp": 0.008, "fedhdp-user": 0.009, "fedhdp+personal": 0.02, "torch": 0.8, "flower": 2.1}
    peers = {
        name: {
            "seconds": seconds,
            "setting": "2 threads, channels last",
            "flops": flops,
            "spread": {"median": seconds, "min": 0.9 * seconds, "max": 1.8 * seconds},
        }
        for name, seconds in times.items()
    }
    result = {"work": w.as_dict(work), "seconds_per_round": times, "peers": peers, "sweeps": []}
    show.figure(result | {"gemm_gflops": 421.0, "machine": {"cores": 2}}, tmp_path / "figure.png")
    [figure] = drawn
    below = figure.axes[0].get_xlabel()
    assert "less time than ◆ (fedhdp, fedhdp-user, fedhdp+personal): the same result from fewer operations" in below
    assert overhang(figure) == 0.0


def test_scaling_is_the_measured_rounds_and_the_page_has_its_table(modules):
    """A hundred clients on one GPU take what was measured."""
    import scaling

    for work, seconds, clients in zip(scaling.WORKS, (2.49e-3, 213.38e-3), (10_000, 10_200), strict=True):
        of_round = scaling.predict(work, clients, 1)
        assert sum(of_round.seconds.values()) - of_round.seconds["host"] == pytest.approx(seconds)
    page = BENCHMARKS.parent / "docs" / "explanation" / "performance.md"
    assert scaling.table() in page.read_text()


@pytest.mark.slow
def test_output_is_one_json_document(modules, tmp_path):
    """With several works it has an object for each."""
    bench, show, _ = modules
    small = {"clients": 40, "cohort": 4, "samples": 5, "batch": 2, "epochs": 2, "hidden": 8}
    command = [sys.executable, str(BENCHMARKS / "bench.py"), "--quick", "--json", "--only", "fedhdp,fedhdp-user"]
    command += ["--rounds", "2", "--work", "mnist,femnist", "--sizes", json.dumps(small)]
    command += ["--output", str(tmp_path / "results.json")]
    process = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stderr
    document = json.loads(process.stdout)
    redraw = [*command[:2], "--from", str(tmp_path / "results.json"), "--figure", str(tmp_path / "figure.png")]
    tables = subprocess.run(redraw, capture_output=True, text=True, timeout=60, check=True).stdout
    assert tables == "\n\n".join(map(show.table, document.values())) + "\n"
    assert list(document) == ["mnist", "femnist"]
    for name, result in document.items():
        assert result["work"]["name"] == name
        assert set(result) >= {
            "seconds_per_round",
            "naive_at_peak",
            "gemm_gflops",
            "peers",
            "machine",
            "work",
            "sweeps",
        }
        names = {"fedhdp", "fedhdp-user", "fedhdp+personal", "torch", "flower", "pfl", "fedjax"}
        assert set(result["seconds_per_round"]) == names == set(bench.CONTENDERS)
        for ours in ("fedhdp", "fedhdp-user"):
            peer = result["peers"][ours]
            assert peer["check"]["steps"] == 4 * 2 * 3
            assert peer["spread"]["rounds"] == 2
            assert peer["start_seconds"] > 0
            assert peer["compile_seconds"] > 0
        assert result["seconds_per_round"]["torch"] is None
        assert result["peers"]["torch"]["reason"] == "not selected"
        assert (tmp_path / f"figure-{name}.png").stat().st_size > 0
        assert "| fedhdp-user |" in show.table(result)


@pytest.mark.parametrize("option", ["--only", "--work"])
def test_unknown_name_is_refused(option):
    command = [sys.executable, str(BENCHMARKS / "bench.py"), option, "fedhdp,tensorflow"]
    process = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert process.returncode == 2
    assert "tensorflow" in process.stderr

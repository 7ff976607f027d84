"""`fedhdp theory`: results, limits, invalid options, and the page with its numbers."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import math
import re
from pathlib import Path

import pytest

from fedhdp import datasets
from fedhdp.theory import linear_regression as lr
from fedhdp.theory.linear_regression import Problem, TheoryGroup
from fedhdp.theory.optimum import find_optimum

PAGE = (Path(__file__).parents[2] / "docs" / "theory.md").read_text()
TWO = ["--group", "open:200:0", "--group", "private:800:0.01", "--alpha2", "1", "--tau2", "0.25"]


@pytest.fixture
def ask(run_cli):
    """Run `fedhdp theory` with these arguments: the exit code, standard output, standard error."""
    return functools.partial(run_cli, "theory")


def test_json(run_json):
    answer = run_json("theory", "optimum", *TWO)
    problem = Problem((TheoryGroup("open", 200, 0.0), TheoryGroup("private", 800, 0.01)), 1.0, 0.25)
    assert list(answer) == ["server_variance", "groups", "baselines"]
    assert answer["server_variance"] == lr.optimal_server_variance(problem)
    assert [group["name"] for group in answer["groups"]] == ["open", "private"]
    assert {"weight", "pull", "pull_own_noise", "client_mse"} <= set(answer["groups"][0])
    assert [group["weight"] for group in answer["groups"]] == [1.0, lr.optimal_weights(problem)[1]]
    assert [group["pull_own_noise"] for group in answer["groups"]] == lr.own_noise_pulls(problem).tolist()
    expected = find_optimum(problem).baselines["hdp_fedavg"].server_variance
    assert answer["baselines"]["hdp_fedavg"]["server_variance"] == expected


def test_table(ask):
    code, out, err = ask("optimum", *TWO)
    assert (code, err) == (0, "")
    for text in ("open", "private", "0.1351", "3.945", "HDP-FedAvg", "DP-FedAvg", "0.00925"):
        assert text in out


def test_group_name_with_colons(run_json):
    answer = run_json("theory", "optimum", "--group", "a:b:3:0.5", "--alpha2", "1", "--tau2", "1")
    assert answer["groups"][0]["name"] == "a:b"


LIMITS = {
    "no noise and clients alike: the global model itself": (["a:5:0", "b:5:0"], "0", [math.inf, math.inf], 0.1),
    "one client alone, private: its own estimate": (["a:1:0.5"], "0.25", [0.0], 1.75),
    "infinite noise: weight 0, the others' estimate": (["a:5:0", "b:5:inf"], "0.25", [4.0, 2.0], 0.25),
    "infinite noise everywhere: everyone alone": (["a:5:inf", "b:5:inf"], "0.25", [0.0, 0.0], math.inf),
    "noise that overflows is infinite": (["a:5:0", "b:1000:1e308"], "0.25", [4.0, 2.0], 0.25),
}


@pytest.mark.parametrize(("groups", "tau2", "pulls", "variance"), LIMITS.values(), ids=LIMITS.keys())
def test_limits_are_valid_json(ask, run_json, groups, tau2, pulls, variance):
    options = [text for group in groups for text in ("--group", group)]
    answer = run_json("theory", "optimum", *options, "--alpha2", "1", "--tau2", tau2)
    assert [float(group["pull_own_noise"]) for group in answer["groups"]] == pytest.approx(pulls)
    assert float(answer["server_variance"]) == pytest.approx(variance)
    assert ask("optimum", *options, "--alpha2", "1", "--tau2", tau2)[0] == 0


REFUSED = {
    "a group with no clients": (["a:0:1"], "1", "1", "--group 'a:0:1': clients"),
    "a negative variance": (["a:2:-1"], "1", "1", "--group 'a:2:-1': gamma2"),
    "noise that is not a number": (["a:2:nan"], "1", "1", "--group 'a:2:nan': gamma2"),
    "half a client": (["a:2.5:1"], "1", "1", "--group must be NAME:CLIENTS:GAMMA2"),
    "a group without numbers": (["a"], "1", "1", "--group must be NAME:CLIENTS:GAMMA2"),
    "a group without a name": ([":2:1"], "1", "1", "--group ':2:1': name"),
    "two groups of one name": (["a:2:1", "a:3:2"], "1", "1", "groups must be"),
    "a negative alpha2": (["a:2:1"], "-1", "1", "alpha2 must be"),
    "an infinite alpha2": (["a:2:1"], "inf", "1", "alpha2 must be"),
    "a tau2 that is not a number": (["a:2:1"], "1", "nan", "tau2 must be"),
}


@pytest.mark.parametrize(("groups", "alpha2", "tau2", "field"), REFUSED.values(), ids=REFUSED.keys())
def test_invalid_values(ask, groups, alpha2, tau2, field):
    options = [text for group in groups for text in ("--group", group)]
    code, out, err = ask("optimum", *options, "--alpha2", alpha2, "--tau2", tau2, "--json")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"fedhdp: {field}")


@pytest.mark.parametrize(
    "options", [["--alpha2", "1", "--tau2", "1"], ["--group", "a:1:1", "--alpha2", "x", "--tau2", "1"]]
)
def test_missing_or_unreadable_option(ask, options):
    code, out, err = ask("optimum", *options)
    assert (code, out) == (2, "")
    assert "--group" in err or "--alpha2" in err


@pytest.mark.slow
def test_figures(ask, tmp_path):
    code, out, _ = ask("figures", "--out", str(tmp_path / "new" / "figures"), "--trials", "20")
    written = [Path(line) for line in out.split()]
    assert (code, len(written)) == (0, 12)
    assert all(path.parent == tmp_path / "new" / "figures" and path.stat().st_size > 1000 for path in written)


def test_invalid_figures(ask, tmp_path):
    (tmp_path / "file").write_text("")
    for out_dir, trials, field in (("new", "1", "trials"), ("file", "20", str(tmp_path / "file"))):
        code, out, err = ask("figures", "--out", str(tmp_path / out_dir), "--trials", trials)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert field in err


def test_figures_need_matplotlib(ask, tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    code, out, err = ask("figures", "--out", str(tmp_path / "figures"))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "pip install 'fedhdp[figures]'" in err
    assert not list(tmp_path.iterdir())


# the page


def test_tables_of_the_page(ask):
    _, out, _ = ask("tables")
    printed = [block for block in out.strip().split("\n\n") if block.startswith("|")]
    assert len(printed) == 4
    for table in printed:
        assert table in PAGE


def test_names_on_the_page_exist():
    parts = [
        "fedhdp.models",
        *(f"fedhdp.datasets.{path.stem}" for path in Path(datasets.__path__[0]).glob("[a-z]*.py")),
    ]
    parts += [f"fedhdp.theory.{path.stem}" for path in Path(lr.__file__).parent.glob("[a-z]*.py")]
    parts += [f"fedhdp.reproduction.theory.{name}" for name in ("figures", "general", "monte_carlo", "tables")]
    modules = [importlib.import_module(name) for name in parts]
    by_name = {module.__name__.rpartition(".")[2]: module for module in modules}
    quoted = set(re.findall(r"(?<!`)`([A-Za-z_0-9.]+)(?:\(.*?\))?`(?!`)", PAGE)) - WORDS
    assert len(quoted) >= 33
    for name in quoted:
        path = name.removesuffix(".py").removeprefix("datasets.").split(".")
        targets = [by_name[path[0]]] if path[0] in by_name else modules
        attributes = path[1:] if path[0] in by_name else path
        assert any(_has(target, attributes) for target in targets), f"{name} is on the page and not in the code"


def _has(target: object, attributes: list[str]) -> bool:
    for attribute in attributes:
        if not hasattr(target, attribute):
            return False
        target = getattr(target, attribute)
    return True


WORDS = {  # in backticks and not a function: algorithms, kinds of noise, figures
    *("non_private", "dp_fedavg", "hdp_fedavg", "local_only", "per_group", "shared"),
    *("server_variance_by_ratio", "server_variance_by_opted_out_share"),
    *("opting_out_linear_regression", "opting_out_point_estimation"),
}

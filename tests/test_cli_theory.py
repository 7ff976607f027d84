"""`fedhdp theory` as a user meets it: answers, limits, refusals, and the page that its numbers stand on."""

from __future__ import annotations

import importlib
import json
import math
import re
import sys
import warnings
from pathlib import Path

import pytest

from fedhdp.theory import linear_regression as lr
from fedhdp.theory.linear_regression import Level, Problem
from fedhdp.theory.optimum import optimum

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # typer's, of click
    from fedhdp.cli import main

PAGE = (Path(__file__).parent.parent / "docs" / "theory.md").read_text()
TWO = ["--group", "open:200:0", "--group", "private:800:0.01", "--alpha2", "1", "--tau2", "0.25"]


@pytest.fixture
def ask(monkeypatch, capsys):
    """Run `fedhdp theory` with these arguments: the exit code, standard output, standard error."""

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["fedhdp", "theory", *arguments])
        with pytest.raises(SystemExit) as exit:
            main()
        return int(exit.value.code or 0), *capsys.readouterr()

    return run


def only_json(text: str) -> dict:
    """Text that is one JSON document as the standard has it, without Infinity or NaN."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_the_json_is_the_optimum_with_the_baselines_and_nothing_else(ask):
    code, out, err = ask("optimum", *TWO, "--json")
    answer = only_json(out)
    problem = Problem((Level("open", 200, 0.0), Level("private", 800, 0.01)), 1.0, 0.25)
    assert (code, err) == (0, "")
    assert list(answer) == ["server_variance", "groups", "baselines"]
    assert answer["server_variance"] == lr.optimal_server_variance(problem)
    assert [group["name"] for group in answer["groups"]] == ["open", "private"]
    assert {"weight", "pull", "pull_own_noise", "client_mse"} <= set(answer["groups"][0])
    assert [group["weight"] for group in answer["groups"]] == [1.0, lr.optimal_weights(problem)[1]]
    assert [float(group["pull_own_noise"]) for group in answer["groups"]] == lr.own_noise_pulls(problem).tolist()
    expected = optimum(problem).baselines["hdp_fedavg"].server_variance
    assert answer["baselines"]["hdp_fedavg"]["server_variance"] == expected


def test_the_table_shows_every_group_every_baseline_and_what_to_do(ask):
    code, out, err = ask("optimum", *TWO)
    assert (code, err) == (0, "")
    for text in ("open", "private", "0.1351", "3.945", "HDP-FedAvg", "DP-FedAvg", "0.00925", "What to do"):
        assert text in out


def test_a_group_may_have_colons_in_its_name(ask):
    code, out, _ = ask("optimum", "--group", "a:b:3:0.5", "--alpha2", "1", "--tau2", "1", "--json")
    assert (code, only_json(out)["groups"][0]["name"]) == (0, "a:b")


LIMITS = {
    "no noise and clients alike: the global model itself": (["a:5:0", "b:5:0"], "0", [math.inf, math.inf], 0.1),
    "one client alone, private: its own estimate": (["a:1:0.5"], "0.25", [0.0], 1.75),
    "infinite noise: weight 0, the others' estimate": (["a:5:0", "b:5:inf"], "0.25", [4.0, 2.0], 0.25),
    "infinite noise everywhere: everyone alone": (["a:5:inf", "b:5:inf"], "0.25", [0.0, 0.0], math.inf),
    "noise that overflows is infinite": (["a:5:0", "b:1000:1e308"], "0.25", [4.0, 2.0], 0.25),
}


@pytest.mark.parametrize(("groups", "tau2", "pulls", "variance"), LIMITS.values(), ids=LIMITS.keys())
def test_limits_are_answers_in_valid_json(ask, groups, tau2, pulls, variance):
    options = [text for group in groups for text in ("--group", group)]
    code, out, err = ask("optimum", *options, "--alpha2", "1", "--tau2", tau2, "--json")
    answer = only_json(out)
    assert (code, err) == (0, "")
    assert [float(group["pull_own_noise"]) for group in answer["groups"]] == pytest.approx(pulls)
    assert float(answer["server_variance"]) == pytest.approx(variance)
    assert ask("optimum", *options, "--alpha2", "1", "--tau2", tau2)[0] == 0


REFUSED = {
    "a level with no clients": (["a:0:1"], "1", "1", "--group 'a:0:1': clients must be a whole number of at least 1"),
    "a negative variance of the noise": (["a:2:-1"], "1", "1", "--group 'a:2:-1': gamma2 must be at least 0, got -1"),
    "noise that is not a number": (["a:2:nan"], "1", "1", "--group 'a:2:nan': gamma2 must be at least 0, got nan"),
    "half a client": (["a:2.5:1"], "1", "1", "--group must be NAME:CLIENTS:GAMMA2"),
    "a group without numbers": (
        ["a"],
        "1",
        "1",
        "--group must be NAME:CLIENTS:GAMMA2, such as private:800:0.01, got 'a'",
    ),
    "a group without a name": ([":2:1"], "1", "1", "--group ':2:1': name must be a name, got ''"),
    "two groups of one name": (["a:2:1", "a:3:2"], "1", "1", "levels must be levels of different names, got 'a'"),
    "a negative alpha2": (["a:2:1"], "-1", "1", "alpha2 must be finite and at least 0, got -1.0"),
    "an infinite alpha2": (["a:2:1"], "inf", "1", "alpha2 must be finite and at least 0, got inf"),
    "a tau2 that is not a number": (["a:2:1"], "1", "nan", "tau2 must be finite and at least 0, got nan"),
}


@pytest.mark.parametrize(("groups", "alpha2", "tau2", "said"), REFUSED.values(), ids=REFUSED.keys())
def test_bad_input_is_refused_in_one_line_that_names_it(ask, groups, alpha2, tau2, said):
    options = [text for group in groups for text in ("--group", group)]
    code, out, err = ask("optimum", *options, "--alpha2", alpha2, "--tau2", tau2, "--json")
    assert (code, out) == (2, "")
    assert err.startswith(f"fedhdp: {said}")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "given", [["--alpha2", "1", "--tau2", "1"], ["--group", "a:1:1", "--alpha2", "x", "--tau2", "1"]]
)
def test_a_missing_or_unreadable_option_exits_with_2(ask, given):
    code, out, err = ask("optimum", *given)
    assert (code, out) == (2, "")
    assert "--group" in err or "--alpha2" in err


def test_figures_are_written_where_asked_and_named(ask, tmp_path):
    code, out, _ = ask("figures", "--out", str(tmp_path / "new" / "figures"), "--trials", "20")
    written = [Path(line) for line in out.split()]
    assert (code, len(written)) == (0, 12)
    assert all(path.parent == tmp_path / "new" / "figures" and path.stat().st_size > 1000 for path in written)


def test_figures_of_too_few_trials_or_into_a_file_are_refused_in_one_line(ask, tmp_path):
    (tmp_path / "file").write_text("")
    for out_dir, trials, said in (
        ("new", "1", "trials must be at least 2, got 1"),
        ("file", "20", str(tmp_path / "file")),
    ):
        code, out, err = ask("figures", "--out", str(tmp_path / out_dir), "--trials", trials)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert said in err


# the page


def test_the_tables_of_the_page_are_those_the_command_prints(ask):
    _, out, _ = ask("tables")
    printed = [block for block in out.strip().split("\n\n") if block.startswith("|")]
    assert len(printed) == 4
    for table in printed:
        assert table in PAGE


def test_every_function_that_the_page_names_exists():
    folder = {path.stem: f"fedhdp.theory.{path.stem}" for path in Path(lr.__file__).parent.glob("[a-z]*.py")}
    places = [importlib.import_module(name) for name in (*folder.values(), "fedhdp.reproduction.theory.figures")]
    named = {name.replace("\\_", "_") for name in re.findall(r"\\texttt\{([^}=]+)\}", PAGE)}
    quoted = set(re.findall(r"(?<!`)`([A-Za-z_0-9.]+)(?:\(.*?\))?`(?!`)", PAGE)) - WORDS
    assert len(named) >= 8
    assert len(quoted) >= 25
    for name in named | quoted:
        first, *rest = name.removesuffix(".py").split(".")
        if first in folder or first in ("models", "datasets"):
            target = importlib.import_module(folder.get(first) or f"fedhdp.{first}")
        else:
            target, rest = next((place for place in places if hasattr(place, first)), None), [first, *rest]
        for number, part in enumerate(rest):
            if first == "datasets" and number == 0:
                target = importlib.import_module(f"fedhdp.datasets.{part}")
            else:
                assert hasattr(target, part), f"{name} is on the page and not in the code"
                target = getattr(target, part)


WORDS = {  # in backticks and not a function: algorithms, kinds of noise, figures
    *("non_private", "dp_fedavg", "hdp_fedavg", "local_only", "per_group", "shared"),
    *("server_variance_by_ratio", "server_variance_by_opted_out_share"),
    *("opting_out_linear_regression", "opting_out_point_estimation"),
}

"""Sweeps: which variants and experiments they make, and what they refuse."""

from __future__ import annotations

from typing import Any

import pytest
from experiment_helpers import TINY, command, tiny
from helpers import raises_field
from msgspec.structs import replace

from fedhdp.errors import ConfigError
from fedhdp.experiments import Experiment, find, from_toml, to_toml
from fedhdp.experiments.runner import _batches
from fedhdp.experiments.sweep import MAX_VARIANTS, changes, expand
from fedhdp.optimizers import OptimizerConfig
from fedhdp.server import ServerOptimizer

WEIGHT = "mechanism.groups.private.weight"


def swept(**sweep: Any) -> dict[str, Experiment]:
    """The experiments of the tiny one with a sweep; two underscores stand for a dot."""
    return expand(tiny(sweep={key.replace("__", "."): values for key, values in sweep.items()}))


def names(experiments: dict[str, Experiment]) -> dict[str, list[str]]:
    return {name: [variant.name for variant in experiment.variants] for name, experiment in experiments.items()}


def test_weight_makes_variants_of_those_that_have_weights():
    [experiment] = expand(tiny(sweep={WEIGHT: [0.01, 0.1]})).values()
    assert [variant.name for variant in experiment.variants] == ["DP-FedAvg", "FedHDP weight=0.01", "FedHDP weight=0.1"]
    assert [variant.weights for variant in experiment.variants[1:]] == [{"private": 0.01}, {"private": 0.1}]
    assert experiment.sweep == {}


def test_training_and_server_make_variants():
    [experiment] = swept(training__learning_rate=[0.1, 0.5], server__average=[0.9, 0.99]).values()
    assert len(experiment.variants) == 8
    assert experiment.variants[3].name == "DP-FedAvg learning_rate=0.5 average=0.99"
    assert experiment.overrides(3)[0].learning_rate == 0.5
    assert experiment.overrides(3)[1].average == 0.99


def test_argument_of_an_optimizer_makes_variants():
    server = ServerOptimizer(OptimizerConfig("sgd", learning_rate=0.4, momentum=0.9))
    sweep = {"server.optimizer.learning_rate": [0.1, 0.2], "server.optimizer.momentum": [0.0, 0.5]}
    [experiment] = expand(tiny(server=server, sweep=sweep)).values()
    optimizers = [experiment.overrides(number)[1].optimizer for number in range(4)]
    assert [(o["learning_rate"], o["momentum"]) for o in optimizers] == [(0.1, 0.0), (0.1, 0.5), (0.2, 0.0), (0.2, 0.5)]


def test_model_and_rounds_make_experiments():
    experiments = swept(model__hidden=[4, 8], rounds=[2, 3])
    assert list(experiments) == ["hidden-4-rounds-2", "hidden-4-rounds-3", "hidden-8-rounds-2", "hidden-8-rounds-3"]
    assert [(e.model.hidden, e.rounds) for e in experiments.values()] == [(4, 2), (4, 3), (8, 2), (8, 3)]
    assert changes(tiny(sweep={"rounds": [2, 3]})) == {"rounds-2": {"rounds": 2}, "rounds-3": {"rounds": 3}}


def test_tables_can_be_values():
    experiments = swept(model=[{"name": "mlp", "hidden": 4}, {"name": "linear"}])
    assert list(experiments) == ["model-mlp", "model-linear"]


def test_star_is_every_group():
    [experiment] = expand(tiny(sweep={"mechanism.groups.*.pull": [0.1, 0.2]})).values()
    assert experiment.variants[0].pulls == {"opted out": 0.1, "private": 0.1}


def test_variant_keeps_its_own_value():
    sweep = {WEIGHT: [0.2, 0.3], "variants.FedHDP.weights.private": [0.5, 0.6]}
    [experiment] = expand(tiny(sweep=sweep)).values()
    assert [variant.weights.get("private") for variant in experiment.variants[1:]] == [0.5, 0.6]


def test_epsilon_makes_variants_of_one_experiment():
    [experiment] = expand(tiny(sweep={"mechanism.groups.private.epsilon": [2.0, 8.0]})).values()
    assert len(experiment.variants) == 4  # DP-FedAvg has the noise of the strictest
    mechanism = experiment.build_mechanism()
    strict, loose = (m.groups[1].noise_multiplier for m in experiment.variant_mechanisms(mechanism)[2:])
    assert strict > loose == mechanism.groups[1].noise_multiplier
    assert experiment.epsilon_targets(experiment.variants[2])["private"] == 2.0


@pytest.mark.parametrize(
    ("changes", "kept"), [({}, 1), ({"epsilon": 2.0}, 1), ({"epsilon": 3.0, "sampling_rate": 0.1}, 3)]
)
def test_dp_fedavg_has_a_row_for_each_noise(changes, kept):
    """Its noise is that of the strictest group, whichever that is: a group sampled less needs less for a smaller epsilon."""
    first, private = tiny().mechanism.groups
    first = replace(first, noise_multiplier=None if changes else 5.0, **changes)
    mechanism = replace(tiny().mechanism, groups=(first, private))
    [experiment] = expand(
        tiny(mechanism=mechanism, sweep={"mechanism.groups.private.epsilon": [4.0, 5.0, 8.0]})
    ).values()
    assert sum(variant.algorithm == "dp_fedavg" for variant in experiment.variants) == kept


def test_noise_multiplier_replaces_an_epsilon_and_the_reverse():
    """The group of the file states an epsilon; an outer key makes the experiment itself change."""
    key = "mechanism.groups.private.noise_multiplier"
    [experiment] = expand(tiny(sweep={key: [1.0, 2.0]})).values()
    mechanisms = experiment.variant_mechanisms(experiment.build_mechanism())
    assert [mechanism.groups[1].noise_multiplier for mechanism in mechanisms] == [1.0, 2.0, 1.0, 2.0]
    assert [experiment.epsilon_targets(variant).get("private") for variant in experiment.variants] == [None] * 4
    groups = tuple(replace(g, epsilon=None, noise_multiplier=1.0) for g in tiny().mechanism.groups)
    sweep = {"mechanism.groups.private.epsilon": [2.0, 8.0]}
    [experiment] = expand(tiny(mechanism=replace(tiny().mechanism, groups=groups), sweep=sweep)).values()
    assert [experiment.epsilon_targets(variant)["private"] for variant in experiment.variants[-2:]] == [2.0, 8.0]


def test_file_may_nest_or_quote_keys(tmp_path):
    nested = TINY.read_text() + "[sweep]\ntraining.learning_rate = [0.1, 0.5]\n"
    quoted = TINY.read_text() + '[sweep]\n"training.learning_rate" = [0.1, 0.5]\n'
    first, second = (from_toml(text, "x") for text in (nested, quoted))
    assert names(expand(first)) == names(expand(second))
    assert from_toml(to_toml(first), "x") == first


def test_paths_are_relative_to_the_file(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(TINY.read_text() + '[sweep]\nledger = ["a.ledger", "b.ledger"]\n')
    ledgers = [experiment.ledger for experiment in expand(find(str(path), {})).values()]
    assert ledgers == [str(tmp_path / "a.ledger"), str(tmp_path / "b.ledger")]


@pytest.mark.parametrize(
    ("key", "values", "field"),
    [
        ("seed", [1, 2], "sweep.seed"),
        ("variants", [1], "sweep.variants"),
        ("variants.FedHDP.name", ["a"], "sweep.variants.FedHDP.name"),
        ("rounds", 3, "sweep.rounds"),
        ("rounds", [], "sweep.rounds"),
        ("rounds", [2, 2], "sweep.rounds"),
        ("rounds", [2, 0], "rounds"),
        ("rounds", ["many"], "rounds"),
        ("training.learning_rte", [0.1], "training.learning_rte"),
        ("training.learning_rate", [-1.0], "training.learning_rate"),
        ("mechanism.groups.strict.weight", [0.1], "sweep.mechanism.groups.strict.weight"),
        ("variants.FedHDP.epsilons.private", [-1.0], "variants[1].epsilon"),
        ("variants.FedHDP.epsilons.strict", [1.0], "variants[1].epsilons"),
        (WEIGHT, [-1.0], "mechanism.groups[1].weight"),
        ("mechanism.groups.private.weigth", [0.1], "mechanism.groups[1].weigth"),
        ("rounds.many", [1], "sweep.rounds.many"),
        ("rounds", list(range(1, MAX_VARIANTS)), "sweep"),
    ],
)
def test_bad_sweeps_are_refused(key, values, field):
    with raises_field(field, ConfigError):
        expand(tiny(sweep={key: values}))


def test_variants_of_a_sweep_share_a_simulation():
    sweep = {WEIGHT: [0.01, 0.1], "mechanism.groups.private.epsilon": [2.0, 8.0], "mechanism.groups.*.pull": [0.1, 1.0]}
    [experiment] = expand(tiny(sweep=sweep)).values()
    mechanisms = experiment.variant_mechanisms(experiment.build_mechanism())
    batches = _batches(experiment, mechanisms, experiment.model.build(784, 10))
    assert len(mechanisms) == 12
    assert [sorted(batch) for batch in batches] == [list(range(12))]


@pytest.mark.parametrize("command_line", ["run", "account"])
def test_swept_option_is_refused(command_line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "mine.toml"
    path.write_text(TINY.read_text() + "[sweep]\nrounds = [1, 2]\n")
    done = command(command_line, path, "--rounds", 5)
    assert (done.code, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "rounds = 5" in done.stderr
    assert [file.name for file in tmp_path.iterdir()] == ["mine.toml"]


def test_bad_sweep_writes_nothing(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(TINY.read_text() + "[sweep]\nrounds = [1, 0]\n")
    done = command("run", path, "--out", tmp_path / "run")
    assert (done.code, done.stderr.count("\n")) == (2, 1)
    assert "mine.toml: sweep (rounds): rounds must be at least 1" in done.stderr
    assert [file.name for file in tmp_path.iterdir()] == ["mine.toml"]

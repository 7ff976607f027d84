"""Who is in which group of an experiment: the data's levels, a count or a share drawn at random, or a list of ids."""

from __future__ import annotations

import json

import pytest
from experiment_helpers import command, keep_going, tiny
from helpers import raises_field
from msgspec.structs import replace

from fedhdp.errors import ConfigError, DataError, FedHDPError, RunError
from fedhdp.experiments import Experiment, from_toml, run, to_toml
from fedhdp.experiments.components import HandwritingConfig, PythonData, PythonModel
from fedhdp.privacy.calibration import GroupConfig, MechanismConfig
from fedhdp.results.store import RunDirectory
from fedhdp.simulation import Simulation

CODE = """
import jax.numpy as jnp, numpy as np
from fedhdp.models import Model
from fedhdp.data import FederatedData, examples

def data(seed):
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(120, 3)).astype(np.float32), rng.integers(0, 2, 120)
    clients = examples(x, y, np.full(20, 6))
    ids = np.array([f"h{k}" for k in range(20)])
    levels = np.where(np.arange(20) % 4 == 3, "open", "strict")  # 5 and 15
    return FederatedData("coins", clients, clients, x[:0], y[:0], classes=2, client_ids=ids, levels=levels)

def model():
    return Model(lambda key: jnp.zeros((3, 2)), lambda w, x, key: x @ w)
"""
OPEN_IDS = ("h3", "h7", "h11", "h15", "h19")


def experiment_of(tmp_path, open_clients: dict, strict_clients: dict, has_levels: bool = True) -> Experiment:
    """The tiny experiment on twenty hospitals, whose levels the data may know."""
    code = CODE if has_levels else CODE.replace(", levels=levels)", ")")
    (tmp_path / "hospitals.py").write_text(code)
    groups = (
        GroupConfig("open", **open_clients, sampling_rate=0.3, noise_multiplier=0.0, weight=1.0),
        GroupConfig("strict", **strict_clients, sampling_rate=0.3, noise_multiplier=1.0, weight=0.1),
    )
    files = {"data": PythonData(file="hospitals.py"), "model": PythonModel(file="hospitals.py")}
    return tiny(rounds=2, mechanism=MechanismConfig(groups, clip=0.5), **files).resolve(tmp_path)


def members(experiment: Experiment) -> set[str]:
    """The ids of the open group's clients in a simulation of the experiment."""
    data = experiment.load_data()
    model = experiment.model.build(3, data.classes)
    simulation = Simulation(data, model, experiment.build_mechanism(), experiment.training, seed=experiment.seed)
    return set(data.ids[simulation.group_K == 0].tolist())


@pytest.mark.parametrize(
    ("open_clients", "strict_clients"),
    [
        ({}, {}),
        ({"clients": 5}, {"clients": 15}),
        ({"share": 0.25}, {"share": 0.75}),
        ({"clients": OPEN_IDS}, {}),
        ({"share": 0.23}, {"clients": 15}),
    ],
)
def test_levels_of_the_data_decide(tmp_path, open_clients, strict_clients):
    experiment = experiment_of(tmp_path, open_clients, strict_clients)
    assert from_toml(to_toml(experiment), "x") == experiment
    assert [group.clients for group in experiment.build_mechanism().groups] == [5, 15]
    assert members(experiment) == set(OPEN_IDS)


@pytest.mark.parametrize(
    ("open_clients", "strict_clients", "field"),
    [
        ({"clients": 4}, {"clients": 16}, "mechanism.groups[0].clients"),
        ({"clients": 6}, {}, "mechanism.groups[0].clients"),
        ({}, {"share": 0.5}, "mechanism.groups[1].share"),
        ({"clients": (*OPEN_IDS[1:], "h0")}, {}, "mechanism.groups[0].clients"),
        ({"clients": (*OPEN_IDS, "nobody")}, {}, "mechanism.groups[0].clients"),
    ],
)
def test_sizes_that_disagree_with_the_data(tmp_path, open_clients, strict_clients, field):
    """A level given to a client by its position in an array: the data's levels and not the counts say who is who."""
    experiment = experiment_of(tmp_path, open_clients, strict_clients)
    with raises_field(field, DataError) as error:
        run(experiment, tmp_path / "run", keep_going)
    assert not (tmp_path / "run").exists()
    if "clients" in open_clients and isinstance(open_clients["clients"], int):
        assert str(open_clients["clients"]) in str(error.value)
        assert "5" in str(error.value)


def test_levels_that_are_no_group_and_groups_that_are_no_level(tmp_path):
    experiment = experiment_of(tmp_path, {}, {})
    renamed = (experiment.mechanism.groups[0], replace(experiment.mechanism.groups[1], name="sealed"))
    with raises_field("levels", DataError):
        replace(experiment, mechanism=replace(experiment.mechanism, groups=renamed)).load_data()
    more = (*experiment.mechanism.groups, replace(experiment.mechanism.groups[1], name="mild"))
    with raises_field("groups", DataError):
        replace(experiment, mechanism=replace(experiment.mechanism, groups=more)).load_data()


@pytest.mark.parametrize(
    ("open_clients", "strict_clients"),
    [({"clients": 5}, {"clients": 15}), ({"share": 0.25}, {"share": 0.75}), ({"share": 0.25}, {"clients": 15})],
)
def test_counts_and_shares_are_drawn_by_the_seed(tmp_path, open_clients, strict_clients):
    experiment = experiment_of(tmp_path, open_clients, strict_clients, has_levels=False)
    drawn = [members(replace(experiment, seed=seed)) for seed in (1, 1, 2)]
    assert [len(ids) for ids in drawn] == [5, 5, 5]
    assert drawn[0] == drawn[1] != drawn[2]


def test_lists_of_ids_beside_a_count(tmp_path):
    experiment = experiment_of(tmp_path, {"clients": ("h2", "h5")}, {"clients": 18}, has_levels=False)
    assert members(experiment) == {"h2", "h5"}
    assert [group.clients for group in experiment.build_mechanism().groups] == [2, 18]
    unknown = experiment_of(tmp_path, {"clients": ("h2", "h99")}, {"clients": 18}, has_levels=False)
    with raises_field("levels", DataError) as error:
        unknown.load_data()
    assert "h99" in str(error.value)


def test_data_without_levels_needs_sizes(tmp_path):
    experiment = experiment_of(tmp_path, {"clients": 5}, {}, has_levels=False)
    with raises_field("mechanism.groups[1].clients", ConfigError):
        experiment.load_data()
    with raises_field("mechanism.groups[1].clients", ConfigError):  # known before the data are loaded
        replace(experiment, data=HandwritingConfig(20))


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"clients": 5, "share": 0.2}, "share"),
        ({"share": 0.0}, "share"),
        ({"share": 1.5}, "share"),
        ({"share": float("nan")}, "share"),
        ({"clients": ()}, "clients"),
        ({"clients": ("a", "a")}, "clients"),
        ({"clients": (1, "1")}, "clients"),
        ({"clients": 0}, "clients"),
    ],
)
def test_sizes_out_of_range(fields, field):
    with raises_field(field, FedHDPError):
        GroupConfig("open", sampling_rate=0.1, noise_multiplier=0.0, **fields)


def test_a_share_of_1_is_everybody():
    assert GroupConfig("all", sampling_rate=0.1, noise_multiplier=1.0, share=1).size == 1.0
    assert isinstance(GroupConfig("all", sampling_rate=0.1, noise_multiplier=1.0, share=1).size, float)


def test_account_loads_the_data_only_where_it_must(tmp_path):
    experiment = experiment_of(tmp_path, {}, {})
    (tmp_path / "own.toml").write_text(to_toml(experiment))
    done = command("account", tmp_path / "own.toml", "--json")
    assert done.code == 0, done.stderr
    groups = json.loads(done.stdout)["mechanisms"][0]["groups"]
    assert [(group["group"], group["clients"]) for group in groups] == [("open", 5), ("strict", 15)]
    (tmp_path / "hospitals.py").write_text("def data(seed):\n    raise OSError('not read')\n")
    assert command("account", tmp_path / "own.toml").code == 2
    counted = experiment.mechanism.with_counts({"open": 5, "strict": 15})
    (tmp_path / "own.toml").write_text(to_toml(replace(experiment, mechanism=counted)))
    assert command("account", tmp_path / "own.toml").code == 0


@pytest.mark.slow
def test_run_without_counts_and_without_a_server_test_set(tmp_path):
    experiment = experiment_of(tmp_path, {}, {})
    (tmp_path / "own.toml").write_text(to_toml(experiment))
    done = command("run", tmp_path / "own.toml", "--out", tmp_path / "run")
    assert done.code == 0, done.stderr
    rows = (tmp_path / "run/clients.csv").read_text().splitlines()
    assert rows[:5] == ["client,group", "h0,strict", "h1,strict", "h2,strict", "h3,open"]


def test_run_does_not_resume_with_other_levels(tmp_path):
    with RunDirectory.create(tmp_path / "run", b"") as directory:
        directory.record_clients({"a": "open", "b, c": "strict"})
        directory.record_clients({"a": "open", "b, c": "strict"})
        with raises_field("clients", RunError):
            directory.record_clients({"a": "strict", "b, c": "open"})

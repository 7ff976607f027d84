"""The paper's tables as experiments."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from helpers import raises_field
from reproduction_runs import HANDWRITING

from fedhdp.experiments.components import FemnistConfig, MnistConfig
from fedhdp.experiments.toml import from_toml, to_toml
from fedhdp.privacy.accounting import gaussian_epsilon
from fedhdp.reproduction import tables
from fedhdp.reproduction.extensions import make_parts, parse_rows
from fedhdp.reproduction.tables import TABLES, TableRow


def name_of(row: TableRow) -> str:
    """The name of a row on the command line."""
    names = {algorithm: name for name, algorithm in tables.BASELINES.items()}
    return names.get(row.algorithm) or f"fedhdp:{row.weight:g}"


def test_every_published_row_has_a_name_and_a_variant():
    count = 0
    for name, table in TABLES.items():
        for published in tables.published_rows(table.dataset):
            rows, extensions = parse_rows(name, name_of(published.row))
            assert (rows, extensions) == ([published.row], [])
            label = f"{published.row.label}, λ={published.pull:g}"
            variants = tables.paper_part(name, rows, HANDWRITING[name], "fixed").variants
            (variant,) = [variant for variant in variants if variant.name == label]
            assert set(variant.pulls.values()) == {published.pull}
            count += 1
    assert count == len(tables.published_rows()) == 105


@pytest.mark.parametrize("name", [*TABLES, "levels"])
def test_parts_can_be_written_and_read(name):
    parts = make_parts(name, seeds=range(2))
    assert len({part.folder for part in parts}) == len(parts)
    for part in parts:
        assert part.experiment.seed == part.seed
        assert part.experiment.rounds == 500
        assert from_toml(to_toml(part.experiment), "x") == part.experiment


@pytest.mark.parametrize(
    ("name", "noise", "epochs", "rate", "clip"),
    [
        ("noniid-mnist", 1.5, 25, 0.5, 0.5),
        ("skewed-mnist", 1.5, 25, 0.5, 0.5),
        ("fmnist", 4.0, 50, 0.01, 0.5),
        ("femnist", 1.0, 25, 0.02, 2.0),
    ],
)
def test_hyper_parameters_are_the_papers(name, noise, epochs, rate, clip):
    (part, *_) = make_parts(name, "paper")
    experiment, (opted_out, private) = part.experiment, part.experiment.mechanism.groups
    training = experiment.training
    assert (training.epochs, training.learning_rate, training.batch_size) == (epochs, rate, 20)
    assert (experiment.mechanism.clip.initial, private.noise_multiplier) == (clip, noise)
    assert opted_out.clients == round(0.05 * TABLES[name].clients)
    assert experiment.mechanism.sampling == "fixed"
    epsilon = gaussian_epsilon(noise, private.sampling_rate, experiment.rounds, experiment.delta, "rdp")
    assert round(epsilon, 1) == TABLES[name].epsilon


@pytest.fixture
def data_directory(monkeypatch):
    """A data directory with some data; tests may add names and change numbers of clients."""
    names, clients = {"mnist", "mnist-writers", "femnist-330"}, {"330": 330, "leaf": 3500}
    monkeypatch.setattr(tables, "is_available", lambda name: name in names)
    monkeypatch.setattr(tables, "load_arrays", lambda name: {})
    monkeypatch.setattr(tables, "load_femnist", lambda origin, classes: SimpleNamespace(num_clients=clients[origin]))
    return SimpleNamespace(names=names, clients=clients)


def test_data_is_the_papers_or_the_nearest(data_directory):
    data = {name: tables.choose_data(table.sources, "auto") for name, table in TABLES.items()}
    assert data["noniid-mnist"] == MnistConfig(2000)
    assert data["skewed-mnist"] == MnistConfig(2000, split="skewed")
    assert data["fmnist"] == MnistConfig(836, split="by_writer")
    assert data["femnist"] == FemnistConfig(330, "330")
    assert "substitute" not in tables.describe_data(TABLES["noniid-mnist"], data["noniid-mnist"])
    for name in ("fmnist", "femnist"):
        assert "a substitute for TFF's federated EMNIST" in tables.describe_data(TABLES[name], data[name])
        groups = tables.groups_of(TABLES[name], data[name])
        assert sum(group.clients * group.sampling_rate for group in groups) == pytest.approx(100, abs=0.1)


def test_data_has_the_clients_that_are_stored(data_directory):
    data_directory.clients["330"] = 150
    assert tables.choose_data(TABLES["femnist"].sources, "writers") == FemnistConfig(150, "330")
    data_directory.names.add("femnist-leaf")
    assert tables.choose_data(TABLES["femnist"].sources, "auto") == FemnistConfig(3400, "leaf")
    data_directory.names.add("emnist-tff")
    assert tables.choose_data(TABLES["fmnist"].sources, "auto") == FemnistConfig(3383, "tff", 10)
    assert "substitute" not in tables.describe_data(TABLES["fmnist"], FemnistConfig(3383, "tff", 10))


def test_unknown_data_is_refused():
    with raises_field("--data"):
        tables.choose_data(TABLES["noniid-mnist"].sources, "tff")

"""The datasets that an experiment can use."""

from __future__ import annotations

import pytest
from dataset_files import no_progress, write_small_mnist
from helpers import mechanism_of, raises_field
from msgspec.structs import replace

from fedhdp.datasets.importers.files import import_files
from fedhdp.errors import DataError
from fedhdp.experiments import EXPERIMENTS
from fedhdp.experiments.components import FemnistConfig, HandwritingConfig, MnistConfig
from fedhdp.experiments.config import from_toml, to_toml


@pytest.mark.parametrize(
    "dataset",
    [
        MnistConfig(2000, split="skewed"),
        FemnistConfig(2000, "leaf", 10),
        HandwritingConfig(2000, split="by_writer", classes=62, sizes="tff"),
    ],
)
def test_toml_round_trip(dataset):
    experiment = replace(EXPERIMENTS["quickstart"](), data=dataset)
    assert from_toml(to_toml(experiment), "x.toml") == experiment


def test_datasets_are_read_from_the_data_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDHDP_DATA", str(tmp_path / "data"))
    write_small_mnist(tmp_path / "raw", monkeypatch)
    import_files([tmp_path / "raw"], no_progress)
    mechanism = mechanism_of((5, 0.0, 1.0), (55, 1.0, 0.1))
    data = MnistConfig(60, 10, 5, "skewed").load(mechanism, seed=1)
    assert (data.train.y_N[:50] == 7).all()  # all of the first group
    with raises_field("dataset", DataError):
        FemnistConfig(3400).load(mechanism, seed=1)

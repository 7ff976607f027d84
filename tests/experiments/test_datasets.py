"""The datasets that an experiment can use."""

from __future__ import annotations

from collections import Counter

import pytest
from dataset_files import no_progress, write_small_mnist
from helpers import raises_field
from msgspec.structs import replace

from fedhdp.datasets.importers.files import import_files
from fedhdp.errors import DataError
from fedhdp.experiments import EXPERIMENTS
from fedhdp.experiments.components import FemnistConfig, HandwritingConfig, MnistConfig
from fedhdp.experiments.groups import with_group_levels
from fedhdp.experiments.toml import from_toml, to_toml
from fedhdp.privacy.calibration import GroupConfig, MechanismConfig


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
    open_group = GroupConfig("open", 5, sampling_rate=0.1, noise_multiplier=0.0)
    groups = [GroupConfig(f"private {i}", share=i / 12, sampling_rate=0.1, noise_multiplier=1.0) for i in (4, 7)]
    mechanism = MechanismConfig((open_group, *groups), clip=1.0)
    data = MnistConfig(60, 10, 5, "skewed").load(mechanism, seed=1)
    label_KM = data.train.y_N.reshape(60, 10)
    assert Counter(data.levels.tolist()) == {"open": 5, "private 4": 20, "private 7": 35}
    assert (label_KM[data.levels == "open"] == 7).all()
    assert with_group_levels(data, mechanism, seed=1) is data
    with raises_field("dataset", DataError):
        FemnistConfig(3400).load(mechanism, seed=1)

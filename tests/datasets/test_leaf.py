"""LEAF's shards are read completely or refused."""

from __future__ import annotations

import numpy as np
import pytest
from dataset_files import no_progress, write_leaf_shard
from helpers import raises_field

from fedhdp.datasets import load_femnist
from fedhdp.datasets.importers.files import import_files
from fedhdp.errors import DataError


def test_train_and_test_shards(tmp_path):
    write_leaf_shard(tmp_path / "train" / "0.json", {"u3": 4, "u12": 2})
    write_leaf_shard(tmp_path / "train" / "1.json", {"u5": 3})
    write_leaf_shard(tmp_path / "test" / "0.json", {"u5": 2, "u3": 1}, first=500)
    assert import_files([tmp_path], no_progress).datasets == ["femnist-leaf"]
    femnist = load_femnist("leaf")
    label_K = femnist.train.y_N[femnist.train.start_K]
    counts = {3: (4, 1), 12: (2, 0), 5: (3, 2)}
    assert [counts[label] for label in label_K] == list(zip(femnist.train.count_K, femnist.test.count_K, strict=True))
    assert sorted(femnist.test.x_N.reshape(3, 784).argmax(1)) == [500, 500, 501]
    assert femnist.train.x_N.max(axis=(1, 2)).tolist() == [255] * 9
    digits = load_femnist("leaf", classes=10)
    assert digits.num_clients == 2
    assert sorted(digits.train.count_K) == [3, 4]
    assert set(digits.train.y_N.tolist()) == {3, 5}


def test_unsplit_shards_are_split_nine_to_one(tmp_path):
    write_leaf_shard(tmp_path / "all_data" / "all_data_0.json", {"u1": 20, "u2": 7})
    import_files([tmp_path], no_progress)
    femnist = load_femnist("leaf")
    label_K = femnist.train.y_N[femnist.train.start_K].tolist()
    assert dict(zip(label_K, femnist.train.count_K.tolist(), strict=True)) == {1: 18, 2: 6}
    assert dict(zip(label_K, femnist.test.count_K.tolist(), strict=True)) == {1: 2, 2: 1}
    pixel_N = np.concatenate([part.x_N.reshape(-1, 784).argmax(1) for part in (femnist.train, femnist.test)])
    assert sorted(pixel_N) == sorted([*range(20), *range(7)])


@pytest.mark.parametrize(
    ("field", "old", "new"),
    [
        ("num_samples", "[3]", "[4]"),
        ("num_samples", "[3]", "[0]"),
        ("num_samples", "[3]", "[1000000000000]"),
        ("num_samples", "[3]", "[-3]"),
        ("labels", '"y": [2,', '"y": [62,'),
        ("pixels", "0.0", "2.0"),
        ("users", "[3]", "[]"),
        ("users", "u2", "u1"),
    ],
)
def test_wrong_content_is_refused(tmp_path, data, field, old, new):
    write_leaf_shard(tmp_path / "all_data" / "0.json", {"u1": 2})
    bad = tmp_path / "all_data" / "1.json"
    write_leaf_shard(bad, {"u2": 3})
    text = bad.read_text()
    assert old in text
    bad.write_text(text.replace(old, new))
    with raises_field(field, DataError) as error:
        import_files([tmp_path], no_progress)
    assert str(bad) in str(error.value)
    assert not (data / "femnist-leaf").exists()


@pytest.mark.parametrize(
    "damage", [lambda text: text[:-2000], lambda text: "", lambda text: "{}", lambda text: "\ufeff" + text]
)
def test_damaged_shard_is_refused(tmp_path, data, damage):
    write_leaf_shard(tmp_path / "all_data" / "0.json", {"u1": 2})
    bad = tmp_path / "all_data" / "1.json"
    write_leaf_shard(bad, {"u2": 3})
    bad.write_text(damage(bad.read_text()))
    with raises_field("file", DataError) as error:
        import_files([tmp_path], no_progress)
    assert error.value.value == bad
    assert not (data / "femnist-leaf").exists()


def test_split_and_unsplit_shards_do_not_mix(tmp_path, data):
    write_leaf_shard(tmp_path / "all_data" / "0.json", {"u1": 2})
    write_leaf_shard(tmp_path / "train" / "0.json", {"u1": 2})
    with raises_field("shards", DataError):
        import_files([tmp_path / "all_data" / "0.json", tmp_path / "train"], no_progress)
    assert not (data / "femnist-leaf").exists()


def test_missing_shard_is_named(tmp_path, data):
    for number in range(3):
        write_leaf_shard(tmp_path / "all_data" / f"all_data_{number}.json", {f"u{number}": 2})
        for part in ("train", "test"):
            name = f"all_data_{number}_niid_0_keep_0_{part}_9.json"
            write_leaf_shard(tmp_path / "split" / part / name, {f"u{number}": 2})
    (tmp_path / "all_data" / "all_data_1.json").unlink()
    (tmp_path / "split" / "test" / "all_data_2_niid_0_keep_0_test_9.json").unlink()
    for folder, missing in (("all_data", "all_data_1"), ("split", "all_data_2")):
        with raises_field("shards", DataError) as error:
            import_files([tmp_path / folder], no_progress)
        assert error.value.value == missing
    assert not (data / "femnist-leaf").exists()

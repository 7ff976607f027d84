"""Real data: every format read whole or refused in one line, kept, found again, downloaded, and made into clients."""

from __future__ import annotations

import functools
import gzip
import hashlib
import http.server
import json
import lzma
import os
import re
import sqlite3
import struct
import sys
import threading
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest

import fedhdp.cli
from fedhdp.datasets import directory, mnist, stored
from fedhdp.datasets.directory import File, data_directory
from fedhdp.datasets.femnist import femnist
from fedhdp.datasets.handwriting import handwriting
from fedhdp.datasets.importers import download, tff
from fedhdp.datasets.importers.importing import import_files
from fedhdp.datasets.importers.tff import parse_example
from fedhdp.datasets.splits import nine_tenths
from fedhdp.datasets.tff_sizes import tff_sizes
from fedhdp.experiments import EXPERIMENTS
from fedhdp.experiments.components import Femnist, Handwriting, Mnist
from fedhdp.experiments.config import from_toml, to_toml
from fedhdp.privacy.ledger import Ledger

RNG = np.random.default_rng(0)
BESIDE = Path(__file__).parent.parent.parent / "shared" / "data"


def quiet(what: str, done: int, total: int) -> None:
    """Progress that nobody watches."""
    assert 0 <= done <= (total or done), what


@pytest.fixture(autouse=True)
def data(tmp_path, monkeypatch) -> Path:
    """An empty data directory; and TFF's dataset is as small as `tff_file` makes it."""
    monkeypatch.setattr(tff, "CLIENTS", {"digits": 4, "all": 6})
    monkeypatch.setenv("FEDHDP_DATA", str(tmp_path / "data"))
    return tmp_path / "data"


@pytest.fixture(scope="session")
def real() -> Path:
    """The real files, where there are any."""
    for place in (os.environ.get("FEDHDP_TEST_DATA"), os.environ.get("FEDHDP_DATA"), BESIDE):
        if place and (Path(place) / "mnist" / "writers.npz").exists():
            return Path(place)
    pytest.skip("no real data: set FEDHDP_TEST_DATA to a folder with mnist/ and femnist/")


@pytest.fixture(scope="session")
def imported(real, tmp_path_factory) -> Path:
    """A data directory with the real data in it."""
    place = tmp_path_factory.mktemp("imported")
    assert sorted(import_files([real], quiet, place)) == ["femnist-330", "mnist", "mnist-writers"]
    return place


def run(monkeypatch, *arguments: str) -> int:
    """The command line's exit status."""
    monkeypatch.setattr(sys, "argv", ["fedhdp", *arguments])
    try:
        fedhdp.cli.main()
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


# --- idx ---


def idx(array: np.ndarray) -> bytes:
    return b"\0\0\x08" + bytes([array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def small_mnist(folder: Path, monkeypatch, train: int = 600, test: int = 300) -> dict[str, bytes]:
    """The four files of a small MNIST, which is taken for the real one."""
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {}
    for part, count in (("train", train), ("t10k", test)):
        y = (np.arange(count) % 10).astype(np.uint8)
        x = np.zeros((count, 28, 28), np.uint8)
        x[:, 0, 0], x[:, 0, 1:3] = y, np.arange(count, dtype=">u2").view(np.uint8).reshape(-1, 2)  # all different
        arrays |= {f"{part}-images-idx3-ubyte.gz": idx(x), f"{part}-labels-idx1-ubyte.gz": idx(y)}
    files = {name: gzip.compress(raw, mtime=0) for name, raw in arrays.items()}
    for name, raw in files.items():
        (folder / name).write_bytes(raw)
    known = tuple(
        file._replace(
            sha256=hashlib.sha256(files[file.name]).hexdigest(),
            content_sha256=hashlib.sha256(arrays[file.name]).hexdigest(),
        )
        for file in directory.SOURCES["mnist"].files
    )
    monkeypatch.setitem(directory.SOURCES, "mnist", directory.SOURCES["mnist"]._replace(files=known))
    return files


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_an_idx_file_is_read_as_it_was_written(tmp_path, pack):
    array = RNG.integers(0, 256, (5, 28, 28)).astype(np.uint8)
    (tmp_path / "x").write_bytes(pack(idx(array)))
    assert np.array_equal(mnist.read_idx(tmp_path / "x"), array)


IDX = idx(np.arange(100, dtype=np.uint8).reshape(4, 5, 5))


@pytest.mark.parametrize(
    "raw",
    [
        IDX[:-1],
        IDX + b"\0",
        IDX[:10],
        b"",
        b"\0\0\x0d\x01" + IDX[4:],
        b"\x89PNG",
        gzip.compress(IDX)[:-9],
        gzip.compress(IDX)[:20] + b"\0" + gzip.compress(IDX)[21:],
    ],
    ids=["short", "long", "no shape", "empty", "floats", "another format", "short gzip", "damaged gzip"],
)
def test_an_idx_file_that_is_short_or_wrong_is_refused_in_one_line_that_names_it(tmp_path, raw):
    (tmp_path / "some-idx").write_bytes(raw)
    with pytest.raises(ValueError, match=r"^.*some-idx .*$"):
        mnist.read_idx(tmp_path / "some-idx")


def test_a_ledger_is_not_taken_for_data(tmp_path):
    with Ledger(tmp_path / "population.ledger"):
        pass
    with pytest.raises(ValueError, match="is no file of a known source"):
        import_files([tmp_path / "population.ledger"], quiet, tmp_path / "data")


def test_mnist_is_recognised_by_what_is_in_its_files_not_by_their_names(tmp_path, monkeypatch):
    files = small_mnist(tmp_path / "raw", monkeypatch)
    for number, name in enumerate(sorted(files)):
        (tmp_path / "raw" / name).rename(tmp_path / "raw" / f"file{number}")
    assert import_files([tmp_path / "raw"], quiet) == ["mnist"]
    arrays = stored.read("mnist")
    assert arrays["train_x"].shape == (600, 28, 28)
    assert np.array_equal(arrays["test_x"][:, 0, 0], arrays["test_y"])


def test_an_idx_file_that_is_not_mnists_is_not_taken_for_it(tmp_path, monkeypatch, data):
    files = small_mnist(tmp_path / "raw", monkeypatch)
    wrong = tmp_path / "raw" / "train-images-idx3-ubyte.gz"
    wrong.write_bytes(gzip.compress(idx(np.ones((600, 28, 28), np.uint8))))
    with pytest.raises(ValueError, match=r"mnist needs train-images-idx3-ubyte.gz.*none of MNIST's"):
        import_files([tmp_path / "raw"], quiet)
    with pytest.raises(ValueError, match="600x28x28 bytes, but none of MNIST's"):
        import_files([wrong], quiet)
    wrong.write_bytes(files[wrong.name][:-100])
    with pytest.raises(ValueError, match=f"{wrong.name} is damaged or ends too early"):
        import_files([tmp_path / "raw"], quiet)
    assert not (data / "mnist").exists()


# --- splits of MNIST ---


@pytest.fixture
def small(tmp_path, monkeypatch) -> None:
    """A small MNIST in the data directory."""
    small_mnist(tmp_path / "raw", monkeypatch)
    import_files([tmp_path / "raw"], quiet)


@pytest.mark.usefixtures("small")
def test_one_digit_gives_every_image_to_one_client_and_every_client_one_digit():
    population = mnist.mnist(clients=60, samples=10, test_samples=7)
    digit_KM = population.train.x_N[:, 0, 0].reshape(60, 10)
    assert (digit_KM == digit_KM[:, :1]).all()
    assert np.array_equal(population.train.y_N, digit_KM.ravel())
    assert len(np.unique(population.train.x_N[:, 0, :3], axis=0)) == 600
    assert np.array_equal(population.test.y_N.reshape(60, 7), np.repeat(digit_KM[:, :1], 7, axis=1))
    assert all(len(np.unique(of, axis=0)) == 7 for of in population.test.x_N[:, 0, :3].reshape(60, 7, 3))
    assert len(population.server_y_N) == 300


@pytest.mark.usefixtures("small")
def test_the_order_of_clients_is_shuffled_and_another_seed_shuffles_it_otherwise():
    one, two, again = (mnist.mnist(clients=60, samples=10, test_samples=1, seed=seed) for seed in (0, 1, 0))
    assert len(set(one.test.y_N[:15].tolist())) > 4
    assert not np.array_equal(one.test.y_N, two.test.y_N)
    assert np.array_equal(one.train.x_N, again.train.x_N)


@pytest.mark.usefixtures("small")
def test_skewed_puts_clients_with_a_seven_first_and_keeps_everybody():
    plain = mnist.mnist(clients=60, samples=10, test_samples=1)
    skewed = mnist.mnist("skewed", clients=60, skewed_clients=4, samples=10, test_samples=1)
    assert (skewed.train.y_N[:40] == 7).all()
    assert len(set(skewed.test.y_N[4:15].tolist())) > 4
    held = [{of.tobytes() for of in p.train.x_N.reshape(60, 10, -1)} for p in (plain, skewed)]
    assert held[0] == held[1]
    with pytest.raises(ValueError, match="at most the 6 clients who hold a 7, not 7"):
        mnist.mnist("skewed", clients=60, skewed_clients=7, samples=10, test_samples=1)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"samples": 61}, "samples must be from 1 to 60"),
        ({"test_samples": 31}, "test_samples must be from 1 to 30"),
        ({"clients": 0}, "clients must be at least 1"),
        ({"split": "sorted"}, "split must be one of"),
        ({"skewed_clients": 3}, "skewed_clients is for the split 'skewed' only"),
        ({"split": "by_writer"}, "mnist-writers is not in the data directory .*fedhdp data import"),
    ],
)
def test_what_cannot_be_meant_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        mnist.mnist(**({"clients": 60, "samples": 10, "test_samples": 5} | changes))


def test_shares_add_up_and_are_within_one_of_the_proportion():
    for clients in (7, 60, 1999):
        counts = np.array([5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949])
        given = mnist.shares(clients, counts)
        assert given.sum() == clients
        assert (np.abs(given - clients * counts / counts.sum()) < 1).all()


def test_a_tenth_of_each_clients_images_rounded_up_is_to_test_but_never_all():
    client_N = RNG.permutation(np.repeat(np.arange(5), [1, 2, 10, 11, 100]))
    is_test_N = nine_tenths(client_N, RNG)
    assert np.bincount(client_N[is_test_N], minlength=5).tolist() == [0, 1, 1, 2, 10]


# --- TFF's SQLite ---


def varint(number: int) -> bytes:
    return bytes([number]) if number < 128 else bytes([number & 127 | 128]) + varint(number >> 7)


def message(number: int, content: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(content)) + content


def tf_example(pixels: np.ndarray, label: int, packed: bool = True, reverse: bool = False) -> bytes:
    """A tf.train.Example, as TensorFlow writes it or in the other ways that the format allows."""
    floats = pixels.astype("<f4").tobytes()
    if packed:
        floats, labels = message(1, floats), message(1, varint(label))
    else:
        floats = b"".join(b"\x0d" + floats[at : at + 4] for at in range(0, len(floats), 4))
        labels = b"\x08" + varint(label)
    entries = [
        message(1, message(1, b"pixels") + message(2, message(2, floats))),
        message(1, message(1, b"label") + message(2, message(3, labels))),
    ]
    return message(1, b"".join(entries[::-1] if reverse else entries))


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("reverse", [True, False])
def test_a_tensorflow_example_is_read_however_the_format_allows_it_to_be_written(packed, reverse):
    pixels = RNG.random(784).astype(np.float32)
    found, label = parse_example(tf_example(pixels, 61, packed, reverse))
    assert np.array_equal(np.frombuffer(found, "<f4"), pixels)
    assert label == 61


def test_a_tensorflow_example_that_is_cut_anywhere_is_refused():
    whole = tf_example(np.zeros(784), 5)
    for end in [*range(60), *range(60, len(whole), 97), len(whole) - 1]:
        with pytest.raises(ValueError, match=r"ends too early|no feature|pixels and label|wire kind"):
            parse_example(whole[:end])


def test_a_tensorflow_example_of_another_size_or_label_is_refused():
    for pixels, label in ((783, 5), (784, 62)):
        with pytest.raises(ValueError, match=f"{pixels} pixels and label {label}"):
            parse_example(tf_example(np.zeros(pixels), label))


def tff_file(path: Path, wrong_count: int = 0, bad_pixel: float = 0.0) -> None:
    """A small federated EMNIST: client i has i+2 examples to train and one to test, of label i, one pixel inked."""
    rows, counts = [], []
    for split, clients in (("all", 6), ("digits_only", 4)):
        for i in range(clients):
            for part, count in (("train", i + 2), ("test", 1)):
                for j in range(count):
                    pixels = np.ones(784)
                    pixels[j], pixels[100] = 1 - (i + 1) / 255, 1.0 + bad_pixel
                    rows.append((f"{split}_{part}", f"c{i}", tf_example(pixels, i)))
                counts.append((f"c{i}", f"{split}_{part}", count))
    RNG.shuffle(rows)
    if wrong_count:
        counts[0] = (*counts[0][:2], counts[0][2] + wrong_count)
    with sqlite3.connect(path) as file:
        file.execute("CREATE TABLE examples(split_name TEXT, client_id TEXT, serialized_example_proto BLOB)")
        file.execute("CREATE TABLE client_metadata(client_id TEXT, split_name TEXT, num_examples INTEGER)")
        file.executemany("INSERT INTO examples VALUES (?, ?, ?)", rows)
        file.executemany("INSERT INTO client_metadata VALUES (?, ?, ?)", counts)
    file.close()


@pytest.mark.parametrize("pack", [bytes, lzma.compress, functools.partial(lzma.compress, format=lzma.FORMAT_ALONE)])
def test_tffs_sqlite_gives_every_client_its_own_images_with_ink_high(tmp_path, pack):
    tff_file(tmp_path / "plain")
    (tmp_path / "file").write_bytes(pack((tmp_path / "plain").read_bytes()))
    assert import_files([tmp_path / "file"], quiet) == ["emnist-tff"]
    for classes, clients in ((62, 6), (10, 4)):
        population = femnist("tff", classes, seed=3)
        assert population.num_clients == clients
        label_K = population.train.y_N[population.train.start_K]
        assert sorted(label_K) == list(range(clients))
        assert label_K.tolist() == population.test.y_N.tolist()
        assert np.array_equal(population.train.count_K, label_K + 2)
        x_KM, y_KM = population.train.take(np.arange(clients), 7)
        for label, x_M, y_M, count in zip(label_K, x_KM, y_KM, population.train.count_K):
            assert (y_M[:count] == label).all()
            ink_M = x_M[:count].reshape(count, 784)
            assert np.array_equal(np.sort(ink_M.argmax(1)), np.arange(count))
            assert (ink_M.sum(1) == label + 1).all()


def test_tffs_sqlite_that_is_not_whole_is_refused_and_what_was_there_stays(tmp_path, data):
    good, bad = tmp_path / "good.sqlite", tmp_path / "bad.sqlite"
    tff_file(good)
    import_files([good], quiet)
    raw = good.read_bytes()
    for content, complaint in (
        (raw[:-4096], "ends too early"),
        (lzma.compress(raw)[:-50], "damaged or ends too early"),
        (raw[:4096] + bytes(len(raw) - 4096), "damaged"),
    ):
        bad.write_bytes(content)
        with pytest.raises(ValueError, match=f"bad.sqlite.*{complaint}"):
            import_files([bad], quiet)
    for wrong, complaint in (
        ({"wrong_count": 1}, "c0 has 1 examples less"),
        ({"wrong_count": -1}, "more examples than"),
        ({"bad_pixel": 0.5}, "between 0 and 1"),
        ({"bad_pixel": float("nan")}, "between 0 and 1"),
    ):
        bad.unlink()
        tff_file(bad, **wrong)
        with pytest.raises(ValueError, match=f"bad.sqlite.*{complaint}"):
            import_files([bad], quiet)
    assert sorted(path.name for path in data.iterdir()) == [".lock", "emnist-tff"]
    assert femnist("tff").clients == 6


def test_tffs_sqlite_with_values_that_cannot_be_is_refused_in_a_line(tmp_path, data):
    path = tmp_path / "bad.sqlite"
    for change, complaint in (
        ("UPDATE examples SET serialized_example_proto = NULL", "its message is None, not bytes"),
        ("UPDATE examples SET serialized_example_proto = 'hello'", "its message is 'hello', not bytes"),
        ("UPDATE client_metadata SET num_examples = NULL", "client_metadata says None examples for client 'c0'"),
        ("UPDATE client_metadata SET num_examples = 'abc'", "client_metadata says 'abc' examples"),
        ("UPDATE client_metadata SET num_examples = 3000000000", "client_metadata says 3000000000 examples"),
        ("UPDATE client_metadata SET num_examples = 2000000000", "says more examples than its [0-9,]+ bytes hold"),
        (
            "DELETE FROM client_metadata WHERE client_id = 'c3'",
            "not whole: 3 clients in digits_only_train, where TFF has 4",
        ),
    ):
        path.unlink(missing_ok=True)
        tff_file(path)
        with sqlite3.connect(path) as file:
            file.execute(change)
        file.close()
        with pytest.raises(ValueError, match=f"bad.sqlite.*{complaint}"):
            import_files([path], quiet)
    assert not (data / "emnist-tff").exists()


# --- LEAF's JSON ---


def shard(path: Path, counts: dict[str, int], first: int = 0) -> None:
    """A shard whose clients' images are inked at one pixel that is their own."""
    path.parent.mkdir(parents=True, exist_ok=True)
    held = {}
    for user, count in counts.items():
        x = np.ones((count, 784))
        x[np.arange(count), first + np.arange(count)] = 0.0
        held[user] = {"x": x.tolist(), "y": [int(user[1:])] * count}
    path.write_text(json.dumps({"users": list(counts), "num_samples": list(counts.values()), "user_data": held}))


def test_leafs_train_and_test_shards_give_every_client_its_own_images(tmp_path):
    shard(tmp_path / "train" / "0.json", {"u3": 4, "u12": 2})
    shard(tmp_path / "train" / "1.json", {"u5": 3})
    shard(tmp_path / "test" / "0.json", {"u5": 2, "u3": 1}, first=500)
    assert import_files([tmp_path], quiet) == ["femnist-leaf"]
    population = femnist("leaf")
    label_K = population.train.y_N[population.train.start_K]
    counts = {3: (4, 1), 12: (2, 0), 5: (3, 2)}
    assert [counts[label] for label in label_K] == list(zip(population.train.count_K, population.test.count_K))
    assert sorted(population.test.x_N.reshape(3, 784).argmax(1)) == [500, 500, 501]
    assert population.train.x_N.max(axis=(1, 2)).tolist() == [255] * 9
    digits = femnist("leaf", classes=10)
    assert digits.clients == 2
    assert sorted(digits.train.count_K) == [3, 4]
    assert set(digits.train.y_N.tolist()) == {3, 5}


def test_leafs_shards_that_are_not_split_are_split_nine_to_one(tmp_path):
    shard(tmp_path / "all_data" / "all_data_0.json", {"u1": 20, "u2": 7})
    import_files([tmp_path], quiet)
    population = femnist("leaf")
    label_K = population.train.y_N[population.train.start_K].tolist()
    assert [dict(zip(label_K, of.tolist())) for of in (population.train.count_K, population.test.count_K)] == [
        {1: 18, 2: 6},
        {1: 2, 2: 1},
    ]
    pixel_N = np.concatenate([part.x_N.reshape(-1, 784).argmax(1) for part in (population.train, population.test)])
    assert sorted(pixel_N) == sorted([*range(20), *range(7)])


def test_an_npz_that_lacks_an_array_is_told_which_it_should_have(tmp_path, data):
    path = tmp_path / "some.npz"
    np.savez(path, images=np.zeros((5, 28, 28), np.uint8), labels=np.zeros(5, np.uint8))
    with pytest.raises(
        ValueError, match=r"its arrays are \['images', 'labels'\]; those of femnist-330 are \['client', "
    ):
        import_files([path], quiet)


def test_leafs_shards_that_are_damaged_are_refused(tmp_path, data):
    good, bad = tmp_path / "all_data" / "0.json", tmp_path / "all_data" / "1.json"
    shard(good, {"u1": 2})
    shard(bad, {"u2": 3})
    text = bad.read_text()
    for damaged, complaint in (
        (text[:-2000], "1.json is damaged"),
        (text.replace("[3]", "[4]"), "1.json, client u2: images .3, 784. and 3 labels, not 4"),
        (text.replace('"y": [2,', '"y": [62,'), "1.json, client u2: labels must be from 0 to 61"),
        (text.replace("0.0", "2.0"), "1.json, client u2: pixels must be between 0 and 1"),
        (text.replace("[3]", "[]"), "1.json is damaged: its users"),
        (text.replace("u2", "u1"), "1.json: client u1 is in another shard, too"),
        (text.replace("[3]", "[1000000000000]"), "1.json is damaged: num_samples says 1000000000000 of client u2"),
        (text.replace("[3]", "[-3]"), "1.json is damaged: num_samples says -3 of client u2"),
        (text.replace("[3]", "[0]"), "1.json, client u2: images .3, 784. and 3 labels, not 0"),
        ("", "1.json is damaged, or is no shard of LEAF"),
        ("{}", "1.json is damaged, or is no shard of LEAF"),
        ("\ufeff" + text, "1.json is damaged, or is no shard of LEAF"),
    ):
        assert damaged != text
        bad.write_text(damaged)
        with pytest.raises(ValueError, match=complaint):
            import_files([tmp_path], quiet)
    shard(tmp_path / "train" / "0.json", {"u1": 2})
    with pytest.raises(ValueError, match="must be train and test, or all not split yet, but these are 1 all, 1 train"):
        import_files([good, tmp_path / "train"], quiet)
    assert not (data / "femnist-leaf").exists()


def test_a_shard_of_leaf_that_is_missing_is_missed(tmp_path, data):
    for number in range(3):
        shard(tmp_path / "all_data" / f"all_data_{number}.json", {f"u{number}": 2})
        for part in ("train", "test"):
            shard(tmp_path / "split" / part / f"all_data_{number}_niid_0_keep_0_{part}_9.json", {f"u{number}": 2})
    (tmp_path / "all_data" / "all_data_1.json").unlink()
    with pytest.raises(ValueError, match="all_data_1 is missing among LEAF's all shards"):
        import_files([tmp_path / "all_data"], quiet)
    (tmp_path / "split" / "test" / "all_data_2_niid_0_keep_0_test_9.json").unlink()
    with pytest.raises(ValueError, match="all_data_2 is missing among LEAF's test shards"):
        import_files([tmp_path / "split"], quiet)
    with pytest.raises(ValueError, match="import the folder of the ones or of the others"):
        import_files([tmp_path], quiet)
    assert not (data / "femnist-leaf").exists()


# --- npz ---


def npz(path: Path, **changes: np.ndarray) -> None:
    label = np.array([5, 40, 5, 7, 7], np.uint8)
    arrays = {
        "images": np.broadcast_to(255 - label[:, None, None], (5, 28, 28)),
        "labels": label,
        "client": np.array([0, 0, 0, 1, 1], np.int16),
        "is_test": np.array([False, False, True, False, True]),
        "client_ids": np.array(["a", "b"]),
    }
    np.savez_compressed(path, **(arrays | changes))


def test_the_npz_of_writers_gives_every_client_its_own_images_with_ink_high(tmp_path):
    npz(tmp_path / "some.npz")
    assert import_files([tmp_path / "some.npz"], quiet) == ["femnist-330"]
    population = femnist("330", seed=1)
    assert sorted(zip(population.train.count_K, population.test.count_K)) == [(1, 1), (2, 1)]
    assert np.array_equal(population.train.x_N[:, 0, 0], population.train.y_N)
    assert np.array_equal(population.test.x_N[:, 3, 3], population.test.y_N)
    assert sorted(population.server_y_N) == [5, 7]
    assert femnist("330", classes=10).train.count_K.tolist() == [1, 1]


def test_an_npz_that_is_short_or_wrong_is_refused(tmp_path, data):
    path = tmp_path / "some.npz"
    for changes, complaint in (
        ({"labels": np.zeros(4, np.uint8)}, "5 images, but 4 entries of labels"),
        ({"labels": np.full(5, 62, np.uint8)}, "labels are not all whole numbers from 0 to 61"),
        ({"labels": np.full(5, -1, np.int64)}, "labels are not all whole numbers from 0 to 61"),
        ({"labels": np.full(5, np.nan)}, "labels are not all whole numbers from 0 to 61"),
        ({"is_test": np.zeros(5, bool)}, "all images are to train"),
        ({"client_ids": np.array(["a", "b", "c"])}, "3 client_ids, but images of 2 clients"),
        ({"images": np.zeros((5, 28, 27), np.uint8)}, "not 28x28 bytes"),
        ({"client": np.array([0.0, 0.0, 0.5, 1.0, 1.0])}, "client is float64, not whole numbers"),
        ({"labels": np.uint8(5)}, r"labels has the shape \(\)"),
        ({"client_ids": np.array("a")}, r"client_ids has the shape \(\)"),
    ):
        npz(path, **changes)
        with pytest.raises(ValueError, match=f"some.npz.*{complaint}"):
            import_files([path], quiet)
    npz(path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"some.npz is damaged or ends too early"):
        import_files([tmp_path], quiet)
    np.savez(path, train=np.zeros(60_000, int), test=np.zeros(9_999, int))
    with pytest.raises(ValueError, match=r"some.npz: test is int64 .9999,., not one whole number for each of MNIST's"):
        import_files([path], quiet)
    assert not data.exists()


def test_an_npz_with_any_byte_changed_is_refused_or_read_never_a_traceback(tmp_path, data):
    path = tmp_path / "some.npz"
    npz(path)
    whole, rng, said = path.read_bytes(), np.random.default_rng(1), []
    for at in rng.integers(0, len(whole), 150):
        path.write_bytes(whole[:at] + bytes(rng.integers(0, 256, 2, np.uint8)) + whole[at + 2 :])
        try:
            import_files([path], quiet)
        except ValueError as error:
            said.append(str(error))
    assert len(said) > 100
    assert all("some.npz" in one and "\n" not in one for one in said)


def test_what_else_is_in_a_folder_is_left_alone_and_said(tmp_path, data, monkeypatch, capsys):
    folder = tmp_path / "downloads"
    folder.mkdir()
    npz(folder / "some.npz")
    with sqlite3.connect(folder / "aa.db") as file:
        file.execute("CREATE TABLE bookmarks(url TEXT)")
    file.close()
    (folder / "users.json").write_text('{"users": ["me"], "theme": "dark"}')
    (folder / "broken.gz").write_bytes(b"\x1f\x8b\x08nothing")
    (folder / "broken.npz").write_bytes((folder / "some.npz").read_bytes()[:500])
    assert run(monkeypatch, "data", "import", str(folder)) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith(f"femnist-330: now in {data}\nfemnist-330: 2 clients, 3 images to train, 2 to test\n")
    left = [line.partition(": ")[2] for line in printed.err.splitlines() if line.startswith("left alone")]
    assert [Path(line.split()[0]).name for line in left] == ["broken.gz", "broken.npz", "users.json"]
    with pytest.raises(ValueError, match=r"aa\.db is no file of a known source"):
        import_files([folder / "aa.db"], quiet)


def test_what_was_kept_before_a_source_failed_is_said(tmp_path, data):
    npz(tmp_path / "some.npz")
    tff_file(tmp_path / "tff.sqlite", wrong_count=1)
    with pytest.raises(ValueError, match=r"tff.sqlite is not whole .*\(kept before that: femnist-330\)"):
        import_files([tmp_path], quiet)
    assert femnist("330").clients == 2


# --- what is kept ---


def test_kept_arrays_that_were_cut_or_changed_are_refused(tmp_path, data, monkeypatch, capsys):
    npz(tmp_path / "some.npz")
    import_files([tmp_path / "some.npz"], quiet)
    path = data / "femnist-330" / "train_x.npy"
    whole = path.read_bytes()
    for damaged in (whole[:-1], b""):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"train_x.npy is damaged: .*import it again"):
            femnist("330")
    np.save(path, np.zeros((3, 28, 29), np.uint8))
    with pytest.raises(ValueError, match=r"train_x.npy is damaged: it holds \|u1 \(3, 28, 29\)"):
        femnist("330")
    path.unlink()
    assert run(monkeypatch, "data") == 0
    assert "femnist-330: damaged" in capsys.readouterr().out
    path.write_bytes(whole)
    assert femnist("330").clients == 2
    contents = data / "femnist-330" / "contents.json"
    contents.write_text(contents.read_text().replace('"version": 1', '"version": 0'))
    with pytest.raises(ValueError, match="of version 0, but femnist-330 of version 1 is wanted"):
        femnist("330")


def test_an_import_that_fails_or_is_killed_leaves_nothing_behind(data):
    with pytest.raises(ValueError, match="empty would be empty"), stored.writing("mnist", {}) as writer:
        writer.add(x=np.ones(3), empty=np.ones(0))
    assert sorted(path.name for path in data.iterdir()) == [".lock"]
    (data / ".mnist.part").mkdir()
    (data / ".mnist.part" / "half.npy").write_bytes(b"half")
    with stored.writing("mnist", {}) as writer:
        writer.add(x=np.ones(3))
    assert sorted(path.name for path in (data / "mnist").iterdir()) == ["contents.json", "x.npy"]
    assert sorted(path.name for path in data.iterdir()) == [".lock", "mnist"]


def test_a_folder_of_somebody_elses_is_not_replaced(data):
    (data / "mnist").mkdir(parents=True)
    (data / "mnist" / "mine").write_text("mine")
    with pytest.raises(ValueError, match="was not made by fedhdp and is in the way"), stored.writing("mnist", {}):
        pass
    assert (data / "mnist" / "mine").read_text() == "mine"


def test_two_imports_at_once_are_refused():
    with (
        stored.writing("mnist", {}) as writer,
        pytest.raises(ValueError, match="is being written by another process"),
        stored.writing("femnist-330", {}),
    ):
        pass
    assert writer.arrays == {}


def test_the_data_directory_is_the_variables_or_in_the_users_cache(monkeypatch, tmp_path):
    assert data_directory() == tmp_path / "data"
    monkeypatch.delenv("FEDHDP_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert data_directory() == tmp_path / "cache" / "fedhdp"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert data_directory() == tmp_path / "home" / ".cache" / "fedhdp"


# --- downloads ---


class Server(http.server.BaseHTTPRequestHandler):
    """Serves files from memory with ranges; breaks off after so many bytes where it is told to."""

    files: dict[str, bytes]
    asked: list[tuple[str, str | None]]
    breaks: list[int]  # how many bytes to send before breaking off, of each of the next answers
    ranges = True

    def do_GET(self) -> None:
        name, asked = self.path[1:], self.headers.get("Range")
        self.asked.append((name, asked))
        if name not in self.files:
            self.send_error(404)
            return
        content = self.files[name]
        start = int(re.fullmatch(r"bytes=(\d+)-", asked)[1]) if asked and self.ranges else 0
        if asked and self.ranges and start >= len(content):
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{len(content)}")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_response(206 if asked and self.ranges else 200)
        if asked and self.ranges:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        self.wfile.write(content[start:][: self.breaks.pop(0) if self.breaks else None])

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch):
    """A server on this machine, and its address."""
    monkeypatch.setattr(download, "PAUSE", 0.0)
    handler = type("Handler", (Server,), {"files": {}, "asked": [], "breaks": [], "ranges": True})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as serving:
        threading.Thread(target=serving.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        handler.url = f"http://127.0.0.1:{serving.server_port}/"
        yield handler
        serving.shutdown()


CONTENT = RNG.bytes(300_000)


def file_at(server, name: str = "file", content: bytes = CONTENT) -> File:
    return File("file", (server.url + name,), hashlib.sha256(content).hexdigest())


def test_a_download_is_there_whole_and_its_progress_is_told(server, tmp_path):
    server.files["file"] = CONTENT
    told = []
    download.fetch(file_at(server), tmp_path / "file", lambda *step: told.append(step))
    assert (tmp_path / "file").read_bytes() == CONTENT
    assert told[-1] == ("downloading file", 300_000, 300_000)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_download_that_breaks_off_goes_on_where_it_stopped(server, tmp_path):
    server.files["file"], server.breaks = CONTENT, [100_000, 50_000]
    download.fetch(file_at(server), tmp_path / "file", quiet)
    assert (tmp_path / "file").read_bytes() == CONTENT
    assert [asked for _, asked in server.asked] == [None, "bytes=100000-", "bytes=150000-"]


def test_a_download_that_was_given_up_goes_on_the_next_time(server, tmp_path):
    server.files["file"], server.breaks = CONTENT, [100_000, 0, 0, 0, 0]
    with pytest.raises(ValueError, match="broke off after 100000 bytes; the same command goes on from there"):
        download.fetch(file_at(server), tmp_path / "file", quiet)
    assert not (tmp_path / "file").exists()
    server.asked.clear()
    download.fetch(file_at(server), tmp_path / "file", quiet)
    assert (tmp_path / "file").read_bytes() == CONTENT
    assert server.asked == [("file", "bytes=100000-")]


def test_a_download_of_which_everything_was_there_already_is_only_checked(server, tmp_path):
    server.files["file"] = CONTENT
    (tmp_path / "file.part").write_bytes(CONTENT)
    download.fetch(file_at(server), tmp_path / "file", quiet)
    assert (tmp_path / "file").read_bytes() == CONTENT


def test_a_part_that_is_longer_than_the_file_is_thrown_away(server, tmp_path):
    server.files["file"] = CONTENT
    (tmp_path / "file.part").write_bytes(CONTENT + b"more")
    download.fetch(file_at(server), tmp_path / "file", quiet)
    assert (tmp_path / "file").read_bytes() == CONTENT


def test_a_server_without_ranges_is_asked_for_everything_again(server, tmp_path):
    server.files["file"], server.breaks, server.ranges = CONTENT, [100_000], False
    download.fetch(file_at(server), tmp_path / "file", quiet)
    assert (tmp_path / "file").read_bytes() == CONTENT


def test_a_download_of_the_wrong_checksum_is_refused_and_not_kept(server, tmp_path):
    server.files["file"] = CONTENT[:-1] + b"?"
    with pytest.raises(ValueError, match="is not what it should be: its sha256 is"):
        download.fetch(file_at(server), tmp_path / "file", quiet)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_not_at_one_address_is_fetched_from_the_next(server, tmp_path):
    server.files["file"] = CONTENT
    both = file_at(server)._replace(urls=(server.url + "gone", server.url + "file"))
    download.fetch(both, tmp_path / "file", quiet)
    assert (tmp_path / "file").read_bytes() == CONTENT
    with pytest.raises(ValueError, match=r"^http\S*/gone: 404 Not Found$"):
        download.fetch(file_at(server, "gone"), tmp_path / "other", quiet)
    assert [name for name, _ in server.asked] == ["gone", "file", "gone"]


def test_a_server_that_is_not_there_is_said_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(download, "PAUSE", 0.0)
    with pytest.raises(ValueError, match="refused after 0 bytes"):
        download.fetch(File("file", ("http://127.0.0.1:9/file",)), tmp_path / "file", quiet)


def test_the_command_line_downloads_checks_and_keeps_mnist(server, tmp_path, monkeypatch, capsys, data):
    server.files |= small_mnist(tmp_path / "raw", monkeypatch)
    server.breaks = [1000]
    known = directory.SOURCES["mnist"]
    files = tuple(file._replace(urls=(server.url + file.name,)) for file in known.files)
    monkeypatch.setitem(directory.SOURCES, "mnist", known._replace(files=files))
    assert run(monkeypatch, "data", "download", "mnist") == 0
    assert capsys.readouterr().out == f"mnist: now in {data}\nmnist: 600 images to train, 300 to test\n"
    assert mnist.mnist(clients=60, samples=10, test_samples=5).num_clients == 60
    assert not list(data.rglob("*.gz*"))


def test_the_command_line_takes_the_checksum_that_it_is_given(server, tmp_path, monkeypatch, capsys):
    tff_file(tmp_path / "plain")
    packed = lzma.compress((tmp_path / "plain").read_bytes())
    server.files["emnist"] = packed
    file = directory.SOURCES["emnist-tff"].files[0]._replace(urls=(server.url + "emnist",))
    monkeypatch.setitem(directory.SOURCES, "emnist-tff", directory.SOURCES["emnist-tff"]._replace(files=(file,)))
    assert run(monkeypatch, "data", "download", "emnist-tff") == 2
    found = hashlib.sha256(packed).hexdigest()
    assert capsys.readouterr().err.count("\n") == 1
    assert run(monkeypatch, "data", "download", "emnist-tff", "--sha256", found.upper()) == 0
    assert femnist("tff").clients == 6
    assert list(stored.contents("emnist-tff").files.values()) == [found]


# --- the command line ---


def test_the_command_line_lists_what_is_there_and_what_is_missing(tmp_path, monkeypatch, capsys, data):
    npz(tmp_path / "some.npz")
    assert run(monkeypatch, "data", "import", str(tmp_path)) == 0
    held = "2 clients, 3 images to train, 2 to test"
    assert capsys.readouterr().out == f"femnist-330: now in {data}\nfemnist-330: {held}\n"
    assert run(monkeypatch, "data") == 0
    text = capsys.readouterr().out
    assert f"data directory: {data}" in text
    assert "femnist-330: present" in text
    assert f"  here: {held}\n" in text
    assert "mnist: missing" in text
    assert "fedhdp data download mnist" in text
    assert run(monkeypatch, "data", "list", "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    there = {one["name"]: one["present"] for one in answer["sources"]}
    assert there == {name: name == "femnist-330" for name in directory.SOURCES}
    assert all(url.startswith("https://") for one in answer["sources"] for file in one["files"] for url in file["urls"])


def test_the_data_directory_can_be_named_on_the_command_line(tmp_path, monkeypatch, capsys, data):
    npz(tmp_path / "some.npz")
    monkeypatch.setenv("FEDHDP_DATA", str(data))  # given back afterwards
    assert run(monkeypatch, "--data-directory", str(tmp_path / "there"), "data", "import", str(tmp_path)) == 0
    assert f"now in {tmp_path / 'there'}" in capsys.readouterr().out
    assert (tmp_path / "there" / "femnist-330").is_dir()
    assert not data.exists()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("import", "no-such-file"), "no-such-file does not exist"),
        (("import", __file__), "test_data.py is no file of a known source"),
        (("import", str(Path(__file__).parent)), "nothing in .* is known here"),
        (("download", "cifar"), "there is no source 'cifar'; there are mnist"),
        (("download", "femnist-330"), "femnist-330 is not offered for download"),
        (("download", "emnist-tff", "--sha256", "zzz"), "--sha256 must be 64 hexadecimal digits, got 'zzz'"),
        (("download", "mnist", "--sha256", "00"), "--sha256 is for a source of one file"),
    ],
)
def test_what_a_user_did_wrong_is_said_in_one_line(arguments, complaint, monkeypatch, capsys):
    assert run(monkeypatch, "data", *arguments) == 2
    said = capsys.readouterr().err
    assert re.match(f"fedhdp: .*{complaint}", said)
    assert said.count("\n") == 1


# --- experiments ---


@pytest.mark.parametrize(
    "chosen",
    [
        Mnist(2000, split="skewed"),
        Femnist(2000, "leaf", 10),
        Handwriting(2000, split="by_writer", classes=62, sizes="tff"),
    ],
)
def test_an_experiment_names_its_data_in_toml_and_reads_the_same_back(chosen):
    experiment = msgspec.structs.replace(EXPERIMENTS["quickstart"](), data=chosen)
    assert from_toml(to_toml(experiment), "x.toml") == experiment


@pytest.mark.usefixtures("small")
def test_an_experiment_loads_its_data_from_the_directory():
    quickstart = EXPERIMENTS["quickstart"]()
    groups = tuple(
        msgspec.structs.replace(group, clients=count) for group, count in zip(quickstart.mechanism.groups, (5, 55))
    )
    mechanism = msgspec.structs.replace(quickstart.mechanism, groups=groups).uncalibrated()
    population = Mnist(60, 10, 5, "skewed").load(mechanism, seed=1)
    assert (population.train.y_N[:50] == 7).all()
    with pytest.raises(ValueError, match="emnist-tff is not in the data directory"):
        Femnist(3400).load(mechanism, seed=1)


def test_a_missing_source_is_said_with_the_command_that_gets_it():
    with pytest.raises(ValueError, match=r"mnist is not in the data directory .* fedhdp data download mnist"):
        mnist.mnist()


# --- sizes of TFF's clients ---


def test_the_sizes_of_tffs_clients_add_up_to_what_tff_says():
    train_K, test_K = tff_sizes(62)
    assert (len(train_K), train_K.sum(), test_K.sum()) == (3400, 671_585, 77_483)
    train_K, test_K = tff_sizes(10)
    assert len(train_K) == 3383
    assert abs(train_K.sum() / 341_873 - 1) < 0.001
    assert abs(test_K.sum() / 40_832 - 1) < 0.025
    assert min(train_K.min(), test_K.min()) >= 1
    assert not np.array_equal(train_K, tff_sizes(10, seed=1)[0])


def test_the_sizes_of_tffs_clients_are_those_of_its_list(real):
    rows = np.loadtxt(real / "femnist" / "tff_clients_with_digit_counts.csv", str, delimiter=",", skiprows=1)
    train, test, _, digits = rows[:, 1:].astype(int).T
    assert sorted(zip(train, test)) == sorted(zip(*tff_sizes(62)))
    digits = np.minimum(digits, train + test)[digits > 0]
    assert sorted(digits) == sorted(np.add(*tff_sizes(10)))


def test_handwriting_takes_test_sizes_of_its_own():
    given = {"clients": 3, "split": "by_writer", "server_test": 10, "sizes": [2, 3, 4]}
    population = handwriting(**given, test_sizes=[1, 0, 2])
    assert population.test.count_K.tolist() == [1, 0, 2]
    same = handwriting(**given, test_samples=2)
    assert np.array_equal(population.test.x_N[0], same.test.x_N[0])
    for wrong, complaint in (
        ([1, 2], "one entry for each of the 3 clients, not 2"),
        ([1, -1, 2], "at least 0, not -1"),
    ):
        with pytest.raises(ValueError, match=f"test_sizes must.* {complaint}"):
            handwriting(**given, test_sizes=wrong)


# --- the real data, where it is there ---


def test_the_real_mnist_is_what_everybody_knows(imported):
    population = mnist.mnist(directory=imported)
    assert (population.num_clients, len(population.train.y_N), len(population.server_y_N)) == (2000, 60_000, 10_000)
    digit_KM = population.train.y_N.reshape(2000, 30)
    assert (digit_KM == digit_KM[:, :1]).all()
    clients_10 = np.bincount(digit_KM[:, 0])
    assert clients_10.tolist() == [197, 225, 199, 204, 195, 181, 197, 209, 195, 198]
    assert len({image.tobytes() for image in population.train.x_N}) == 60_000 - 42
    assert np.bincount(population.server_y_N)[[1, 5]].tolist() == [1135, 892]
    assert population.train.x_N[:, 0].mean() < 1 < population.train.x_N[:, 14].mean()  # ink in the middle is high


def test_the_real_mnist_by_writer_has_836_clients_who_share_nothing(imported):
    population = mnist.mnist("by_writer", directory=imported)
    assert population.num_clients == 836
    total_K = population.train.count_K + population.test.count_K
    assert (total_K.sum(), total_K.min(), total_K.max()) == (70_000, 8, 131)
    assert np.array_equal(population.test.count_K, -(-total_K // 10))
    assert len(population.server_y_N) == population.test.count_K.sum()
    arrays = stored.read("mnist", imported)
    images = np.concatenate([arrays["train_x"], arrays["test_x"]])
    kept = np.concatenate([population.train.x_N, population.test.x_N])
    assert np.array_equal(np.sort(kept.sum(axis=(1, 2), dtype=int)), np.sort(images.sum(axis=(1, 2), dtype=int)))


def test_the_real_330_writers_are_whole(imported, real):
    population = femnist("330", directory=imported)
    with np.load(real / "femnist" / "femnist_330.npz") as file:
        label, client, is_test = file["labels"], file["client"], file["is_test"]
    assert population.num_clients == 330
    assert sorted(population.train.count_K) == sorted(np.bincount(client[~is_test]))
    assert sorted(population.server_y_N) == sorted(label[is_test])
    assert population.train.x_N[:, 0].mean() < 1 < population.train.x_N[:, 14].mean()
    few = femnist("330", clients=20, seed=1, directory=imported)
    assert few.clients == 20
    assert len(few.server_y_N) == few.test.count_K.sum()
    with pytest.raises(ValueError, match="has 330 clients, so clients must be from 1 to 330, not 331"):
        femnist("330", clients=331, directory=imported)


def test_what_was_imported_is_there_in_under_a_second(imported):
    for load in (mnist.mnist, functools.partial(mnist.mnist, "by_writer"), functools.partial(femnist, "330")):
        took = []
        for _ in range(3):
            begun = time.perf_counter()
            load(directory=imported)
            took.append(time.perf_counter() - begun)
        assert min(took) < 1


def test_every_source_names_its_files_and_those_for_download_have_a_checksum():
    for source in directory.SOURCES.values():
        assert source.files
        assert all(file.sha256 is not None and len(file.sha256) == 64 for file in source.files if file.urls)

"""Small raw files in the formats of the importers, and the real datasets where they are stored."""

from __future__ import annotations

import gzip
import hashlib
import json
import sqlite3
import struct
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from fedhdp.datasets.cache import data_directory, read_contents
from fedhdp.datasets.catalog import DATASETS, how_to_get
from fedhdp.datasets.importers import tff

USERS_DIRECTORY = data_directory()  # before a test sets another


def real_data(*datasets: str) -> Path:
    """The user's data directory, if it holds these datasets; otherwise the test is skipped."""
    for name in datasets:
        if read_contents(name, USERS_DIRECTORY) is None:
            pytest.skip(f"{name} is not in the data directory {USERS_DIRECTORY}; run {how_to_get(name)}")
    return USERS_DIRECTORY


def no_progress(step: str, done: int, total: int) -> None:
    """A progress callback that checks its arguments."""
    assert 0 <= done <= (total or done), step


def idx_bytes(array: np.ndarray) -> bytes:
    """An idx file of unsigned bytes."""
    return b"\0\0\x08" + bytes([array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def write_small_mnist(folder: Path, monkeypatch, train: int = 600, test: int = 300) -> dict[str, bytes]:
    """The four files of a small MNIST, whose checksums replace those of the real one in the catalog.

    Every image is different; its first pixel is the label.
    """
    folder.mkdir(parents=True, exist_ok=True)
    contents = {}
    for part, count in (("train", train), ("t10k", test)):
        y = (np.arange(count) % 10).astype(np.uint8)
        x = np.zeros((count, 28, 28), np.uint8)
        x[:, 0, 0], x[:, 0, 1:3] = y, np.arange(count, dtype=">u2").view(np.uint8).reshape(-1, 2)
        contents |= {f"{part}-images-idx3-ubyte.gz": idx_bytes(x), f"{part}-labels-idx1-ubyte.gz": idx_bytes(y)}
    files = {name: gzip.compress(content, mtime=0) for name, content in contents.items()}
    for name, content in files.items():
        (folder / name).write_bytes(content)
    catalog_files = tuple(
        replace(
            file,
            sha256=hashlib.sha256(files[file.name]).hexdigest(),
            content_sha256=hashlib.sha256(contents[file.name]).hexdigest(),
        )
        for file in DATASETS["mnist"].files
    )
    monkeypatch.setitem(DATASETS, "mnist", replace(DATASETS["mnist"], files=catalog_files))
    return files


def write_femnist_npz(path: Path, **changes: np.ndarray) -> None:
    """Two writers with five images; every pixel of an image is its label."""
    label = np.array([5, 40, 5, 7, 7], np.uint8)
    arrays = {
        "images": np.broadcast_to(255 - label[:, None, None], (5, 28, 28)),
        "labels": label,
        "client": np.array([0, 0, 0, 1, 1], np.int16),
        "is_test": np.array([False, False, True, False, True]),
        "client_ids": np.array(["a", "b"]),
    }
    np.savez_compressed(path, **(arrays | changes))


def _varint(number: int) -> bytes:
    return bytes([number]) if number < 128 else bytes([number & 127 | 128]) + _varint(number >> 7)


def _field(number: int, content: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def tf_example(pixels: np.ndarray, label: int, packed: bool = True, reverse: bool = False) -> bytes:
    """A ``tf.train.Example``, as TensorFlow writes it or in the other ways that the format allows."""
    floats = pixels.astype("<f4").tobytes()
    if packed:
        floats, labels = _field(1, floats), _field(1, _varint(label))
    else:
        floats = b"".join(b"\x0d" + floats[start : start + 4] for start in range(0, len(floats), 4))
        labels = b"\x08" + _varint(label)
    entries = [
        _field(1, _field(1, b"pixels") + _field(2, _field(2, floats))),
        _field(1, _field(1, b"label") + _field(2, _field(3, labels))),
    ]
    return _field(1, b"".join(entries[::-1] if reverse else entries))


def write_small_tff(path: Path, monkeypatch, wrong_count: int = 0, bad_pixel: float = 0.0) -> None:
    """A federated EMNIST of six clients: client i has i + 2 train examples and one test example, of label i.

    One pixel of each image has the ink i + 1.
    """
    monkeypatch.setattr(tff, "NUM_CLIENTS", {"digits": 4, "all": 6})
    examples, counts = [], []
    for split, clients in (("all", 6), ("digits_only", 4)):
        for i in range(clients):
            for part, count in (("train", i + 2), ("test", 1)):
                for pixel in range(count):
                    pixels = np.ones(784)
                    pixels[pixel], pixels[100] = 1 - (i + 1) / 255, 1.0 + bad_pixel
                    examples.append((f"{split}_{part}", f"c{i}", tf_example(pixels, i)))
                counts.append((f"c{i}", f"{split}_{part}", count))
    np.random.default_rng(0).shuffle(examples)
    if wrong_count:
        counts[0] = (*counts[0][:2], counts[0][2] + wrong_count)
    path.unlink(missing_ok=True)
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE examples(split_name TEXT, client_id TEXT, serialized_example_proto BLOB)")
        connection.execute("CREATE TABLE client_metadata(client_id TEXT, split_name TEXT, num_examples INTEGER)")
        connection.executemany("INSERT INTO examples VALUES (?, ?, ?)", examples)
        connection.executemany("INSERT INTO client_metadata VALUES (?, ?, ?)", counts)
    connection.close()


def write_leaf_shard(path: Path, counts: dict[str, int], first: int = 0) -> None:
    """A shard in which each image of a client has ink at a pixel of its own; client u7 has the label 7."""
    path.parent.mkdir(parents=True, exist_ok=True)
    user_data = {}
    for user, count in counts.items():
        x = np.ones((count, 784))
        x[np.arange(count), first + np.arange(count)] = 0.0
        user_data[user] = {"x": x.tolist(), "y": [int(user[1:])] * count}
    shard = {"users": list(counts), "num_samples": list(counts.values()), "user_data": user_data}
    path.write_text(json.dumps(shard))

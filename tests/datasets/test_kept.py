"""Images that the command line keeps: the same as those that are generated, and generated again where they are not whole."""

from __future__ import annotations

import numpy as np
import pytest

from fedhdp.datasets import handwriting, kept, make_handwriting

ARGUMENTS = {"clients": 4, "samples": 3, "test_samples": 2, "server_test": 10}


@pytest.fixture
def folder(tmp_path):
    kept.keep_in(tmp_path)
    yield tmp_path
    kept.keep_in(None)


@pytest.fixture
def generated(monkeypatch):
    """How often images are generated."""
    calls: list[int] = []
    arrays = handwriting._arrays
    monkeypatch.setattr(handwriting, "_arrays", lambda *a: (calls.append(1), arrays(*a))[1])
    return calls


def assert_same(first, second):
    assert first[:1] == second[:1]
    for a, b in ((first.train, second.train), (first.test, second.test)):
        for x, y in zip(a, b, strict=True):
            np.testing.assert_array_equal(x, y)
    np.testing.assert_array_equal(first.server_x_N, second.server_x_N)
    np.testing.assert_array_equal(first.server_y_N, second.server_y_N)


def test_kept_images_are_those_that_were_generated(folder, generated):
    first, second = make_handwriting(**ARGUMENTS), make_handwriting(**ARGUMENTS)
    assert len(generated) == 1
    assert len(list(folder.iterdir())) == 1
    kept.keep_in(None)
    assert_same(first, second)
    assert_same(first, make_handwriting(**ARGUMENTS))


@pytest.mark.parametrize(
    "changes",
    [
        {"seed": 1},
        {"clients": 5},
        {"samples": 4},
        {"test_samples": 3},
        {"server_test": 11},
        {"classes": 62},
        {"split": "by_writer"},
        {"split": "skewed", "skewed_clients": 1},
        {"split": "by_writer", "sizes": [3, 3, 3, 4]},
        {"split": "by_writer", "test_sizes": np.array([2, 2, 2, 1])},
    ],
    ids=str,
)
def test_other_arguments_are_other_images(folder, generated, changes):
    make_handwriting(**ARGUMENTS)
    changed = make_handwriting(**(ARGUMENTS | changes))
    assert len(generated) == 2
    kept.keep_in(None)
    assert_same(changed, make_handwriting(**(ARGUMENTS | changes)))


def test_other_code_makes_other_images(folder, generated, monkeypatch, tmp_path):
    make_handwriting(**ARGUMENTS)
    source = tmp_path / "handwriting.py"
    source.write_bytes(handwriting.SOURCES[0].read_bytes() + b"\n")
    monkeypatch.setattr(handwriting, "SOURCES", [source, *handwriting.SOURCES[1:]])
    make_handwriting(**ARGUMENTS)
    assert len(generated) == 2


@pytest.mark.parametrize("damage", ["truncated", "changed", "empty"])
def test_damaged_images_are_generated_again(folder, generated, damage):
    first = make_handwriting(**ARGUMENTS)
    (path,) = folder.iterdir()
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes({"truncated": content[: len(content) // 2], "changed": content, "empty": b""}[damage])
    for _ in range(2):
        assert_same(first, make_handwriting(**ARGUMENTS))
    assert len(generated) == 2  # and kept again


def test_large_images_and_folders_that_are_gone(folder, generated, monkeypatch):
    monkeypatch.setattr(kept, "MAX_BYTES", 1000)
    make_handwriting(**ARGUMENTS)
    assert list(folder.iterdir()) == []
    monkeypatch.undo()
    kept.keep_in(folder / "gone")
    make_handwriting(**ARGUMENTS)
    assert list(folder.iterdir()) == []


def test_library_keeps_none(generated, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    make_handwriting(**ARGUMENTS)
    make_handwriting(**ARGUMENTS)
    assert list(tmp_path.iterdir()) == []

"""npz archives: refused before they are unpacked, where they are no arrays or more than they declare."""

from __future__ import annotations

import io
import tracemalloc
import zipfile

import numpy as np
import pytest

from fedhdp import memory
from fedhdp.archives import array_names, read_npy, read_npz


def npy(array, **changes):
    """An array as npy, with a header in which texts are replaced."""
    file = io.BytesIO()
    np.save(file, array)
    content = file.getvalue()
    for old, new in changes.values():
        content = content.replace(old, new)
    return content


def write(path, **members):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name.replace("__", "."), content)
    return path


@pytest.fixture
def path(tmp_path):
    return tmp_path / "file.npz"


def test_arrays_are_those_that_were_written(path):
    arrays = {
        "x": np.arange(12.0).reshape(3, 4),
        "y": np.array(["a", "bc"]),
        "empty": np.zeros((0, 5)),
        "one": np.int8(3),
    }
    np.savez_compressed(path, **arrays)
    assert array_names(path) == list(arrays)
    for name, array in read_npz(path).items():
        np.testing.assert_array_equal(array, arrays[name])
        assert array.dtype == np.asarray(arrays[name]).dtype
    assert list(read_npz(path, ["y"])) == ["y"]
    with pytest.raises(KeyError):
        read_npz(path, ["z"])


def test_a_member_that_is_no_array_is_not_unpacked(path):
    bomb = bytes(200 * 2**20)
    for name in ("x__npy", "notes__txt"):
        write(path, **{"y__npy": npy(np.zeros(3)), name: bomb})
        tracemalloc.start()
        with pytest.raises(ValueError, match=name[:1]):
            read_npz(path)
        assert tracemalloc.get_traced_memory()[1] < 10 * 2**20
        tracemalloc.stop()


def test_a_header_is_not_unpacked_before_its_length_is_known(path):
    """A header of 200 MB is a file of 200 kB."""
    content = b"\x93NUMPY\x02\x00" + (200 * 2**20).to_bytes(4, "little") + b" " * (200 * 2**20)
    npz, array = write(path, x__npy=content), path.with_suffix(".npy")
    array.write_bytes(content)
    del content
    tracemalloc.start()
    for read, file in ((read_npz, npz), (read_npy, array)):
        with pytest.raises(ValueError, match="header of 209,715,200 bytes"):
            read(file)
    assert tracemalloc.get_traced_memory()[1] < 10 * 2**20
    tracemalloc.stop()


@pytest.mark.parametrize("shape", [b"(900000000, 1000), ", b"(9,)", b"(-3,)", b"(3, 0)"])
def test_an_array_of_another_size_than_it_has_is_refused(path, shape):
    content = npy(np.zeros(3), shape=(b"(3,), }" + b" " * 40, b"%s}" % shape + b" " * (47 - len(shape) - 1)))
    assert shape in content
    write(path, x__npy=content)
    tracemalloc.start()
    with pytest.raises(ValueError, match=r"declares|file"):
        read_npz(path)
    assert tracemalloc.get_traced_memory()[1] < 10 * 2**20
    tracemalloc.stop()


def test_arrays_of_objects_are_refused(path):
    np.savez(path, x=np.array([{}, "a"], object))
    with pytest.raises(ValueError, match="objects"):
        read_npz(path)


def test_more_than_the_machine_holds_is_refused(path, monkeypatch):
    np.savez_compressed(path, x=np.zeros(10**6))
    monkeypatch.setattr(memory, "machine_memory", lambda: 10**6)
    with pytest.raises(ValueError, match=r"8 MB.*1 MB"):
        read_npz(path)


def test_reading_needs_little_more_than_the_arrays(path):
    declared = 8 * 4_000_000
    np.savez_compressed(path, x=np.zeros(2_000_000), y=np.zeros(2_000_000))
    tracemalloc.start()
    read_npz(path)
    assert declared <= tracemalloc.get_traced_memory()[1] < 1.5 * declared
    tracemalloc.stop()


def test_an_npy_file_is_an_array_of_its_own_size(path, monkeypatch):
    array = np.arange(12.0).reshape(3, 4)
    content = npy(array)
    path.write_bytes(content)
    np.testing.assert_array_equal(read_npy(path), array)
    large = content.replace(b"(3, 4), }      ", b"(3, 4000000), }")
    for damaged in (content[:-1], content + b"\0", content[:20], b"", b"PK\x03\x04", large, npy(np.array([{}]))):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r".") as error:
            read_npy(path)
        assert "\n" not in str(error.value)
    path.write_bytes(content)
    monkeypatch.setattr(memory, "machine_memory", lambda: 10)
    with pytest.raises(ValueError, match="96 bytes"):
        read_npy(path)


@pytest.mark.parametrize("seed", range(5))
def test_no_damage_is_anything_but_refused(path, seed):
    rng = np.random.default_rng(seed)
    np.savez_compressed(path, x=rng.normal(size=(20, 30)), y=np.arange(20))
    expected, content, refused = read_npz(path), path.read_bytes(), 0
    for _ in range(100):
        damaged = bytearray(content)
        for place in rng.integers(0, len(content), rng.integers(1, 4)):
            damaged[place] = rng.integers(256)
        path.write_bytes(damaged[: None if rng.random() < 0.7 else rng.integers(len(content))])
        try:
            arrays = read_npz(path)
        except ValueError:
            refused += 1
        else:
            for name in arrays.keys() & expected.keys():
                np.testing.assert_array_equal(arrays[name], expected[name])
    assert refused > 50

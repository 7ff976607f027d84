"""A user's examples from CSV, Parquet and npz files, and files that are refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from helpers import raises_field

from fedhdp.datasets import load_npz, load_table
from fedhdp.errors import FedHDPError

CSV = """clinic,privacy,age,sex,sick
007,open,50,f,0
007,open,61.5,m,1
A,strict,40,f,1
A,strict,30,m,0
"""
COLUMNS = {"client": "clinic", "label": "sick", "level": "privacy"}
SEX = {"categories": {"sex": ["f", "m"]}}
ARRAYS = {"x": np.arange(8).reshape(4, 2), "y": np.array([0, 1, 1, 0]), "client": np.array(["b", "a", "a", "b"])}


@pytest.fixture
def csv(tmp_path) -> Path:
    pytest.importorskip("pyarrow")
    path = tmp_path / "patients.csv"
    path.write_text(CSV)
    return path


def write_npz(path: Path, **changes: object) -> Path:
    np.savez(path, **{name: array for name, array in (ARRAYS | changes).items() if array is not None})
    return path


def test_csv_and_parquet(csv):
    import pyarrow.csv
    import pyarrow.parquet

    data = load_table(csv, **COLUMNS, **SEX, test=None)
    assert (data.name, data.ids.tolist(), data.levels.tolist()) == ("patients", ["007", "A"], ["open", "strict"])
    assert data.train.x_N.tolist() == [[50, 1, 0], [61.5, 0, 1], [40, 1, 0], [30, 0, 1]]
    assert (data.train.y_N.tolist(), data.classes) == ([0, 1, 1, 0], 2)
    text = {"clinic": pyarrow.string()}
    table = pyarrow.csv.read_csv(csv, convert_options=pyarrow.csv.ConvertOptions(column_types=text))
    pyarrow.parquet.write_table(table, csv.with_suffix(".parquet"))
    same = load_table(csv.with_suffix(".parquet"), **COLUMNS, **SEX, test=csv, server=csv, standardize="server")
    assert (same.ids.tolist(), same.test.count_K.tolist(), len(same.server_x_N)) == (["007", "A"], [2, 2], 4)


@pytest.mark.parametrize(
    ("old", "new", "field", "words"),
    [
        (CSV, "", "path", "is empty"),
        ("007,open,50,f,0", "007,open,50,f", "path", "as csv"),
        (CSV[CSV.index("\n") :], "\n", "frame", "one row or more"),
        ("clinic,privacy", "clinic,clinic", "frame", "'clinic' twice"),
        ("clinic", "hospital", "client", "columns are hospital"),
        ("61.5", "", "age", "row 2"),
        ("61.5", "NA", "age", "row 2"),
        ("61.5", "old", "age", "'old' in row 2"),
        ("61.5", "inf", "age", "row 2"),
        ("61.5,m", "61.5,x", "sex", "'x' in row 2"),
        ("61.5,m,1", "61.5,m,", "sick", "row 2"),
        ("A,strict,30", ",strict,30", "clinic", "row 4"),
        ("A,strict,30", "A,,30", "level", "'A'"),
        ("A,strict,30", "A,open,30", "level", "'strict' and 'open'"),
    ],
)
def test_wrong_csv_is_refused(csv, old, new, field, words):
    assert old in CSV
    csv.write_text(CSV.replace(old, new))
    with raises_field(field, FedHDPError) as error:
        load_table(csv, **COLUMNS, **SEX)
    assert str(error.value).startswith(str(csv))
    assert words in str(error.value)


def test_wrong_test_file_is_named(csv):
    other = csv.with_name("other.csv")
    other.write_text(CSV.replace("61.5", "old"))
    with raises_field("age", FedHDPError) as error:
        load_table(csv, **COLUMNS, **SEX, test=other)
    assert "test" in str(error.value)
    with raises_field("path", FedHDPError) as error:
        load_table(csv, **COLUMNS, **SEX, server=other.with_name("none.csv"))
    assert "none.csv" in str(error.value)


@pytest.mark.parametrize("name", ["none.csv", "", "patients.xls", "patients.parquet"])
def test_wrong_files_are_refused(csv, name):
    """A missing file, a directory, another kind of file, and a CSV file that says it is Parquet."""
    path = csv.parent / name
    if path.suffix in (".xls", ".parquet"):
        path.write_text(CSV)
    with raises_field("path", FedHDPError) as error:
        load_table(path, **COLUMNS)
    assert str(path) in str(error.value)


def test_npz(tmp_path):
    path = write_npz(tmp_path / "a.npz", level=np.array(["open", "mild", "mild", "open"]))
    data = load_npz(path, test=None)
    assert (data.name, data.ids.tolist(), data.levels.tolist()) == ("a", ["a", "b"], ["mild", "open"])
    assert data.train.x_N.tolist() == [[2, 3], [4, 5], [0, 1], [6, 7]]
    assert data.train.x_N.dtype == ARRAYS["x"].dtype
    tests = {f"test_{name}": array[:2] for name, array in ARRAYS.items()}
    servers = {f"server_{name}": ARRAYS[name][:3] for name in ("x", "y")}
    data = load_npz(write_npz(path, **tests, **servers), input_scale=0.5)
    assert (data.test.count_K.tolist(), len(data.server_y_N), data.input_scale) == ([1, 1], 3, 0.5)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"y": ARRAYS["y"][:3]}, "y"),
        ({"x": ARRAYS["x"][:3]}, "x"),
        ({"x": np.array([{}] * 4)}, "path"),  # pickled
        ({"x": None}, "path"),
        ({"weights": ARRAYS["y"]}, "path"),
        ({"test_x": ARRAYS["x"]}, "path"),
        ({"server_x": ARRAYS["x"]}, "path"),
        ({"level": np.array(["open"] * 3)}, "level"),
        ({"level": np.array(["open", "open", "mild", "open"])}, "level"),
        ({"client": np.arange(4) / 2}, "client"),
    ],
)
def test_wrong_npz_is_refused(tmp_path, changes, field):
    path = write_npz(tmp_path / "a.npz", **changes)
    with raises_field(field, FedHDPError) as error:
        load_npz(path)
    assert str(error.value).startswith(str(path))


@pytest.mark.parametrize("content", [None, b"", b"x,y,client\n", b"PK\x03\x04 cut"])
def test_npz_that_is_no_zip_is_refused(tmp_path, content):
    if content is not None:
        (tmp_path / "a.npz").write_bytes(content)
    for path in (tmp_path / "a.npz", tmp_path):
        with raises_field("path", FedHDPError):
            load_npz(path)

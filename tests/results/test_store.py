"""The files of a run: written atomically, locked, refused when damaged."""

from __future__ import annotations

import importlib.util
import math
import os
import subprocess
import sys

import numpy as np
import pytest

import fedhdp
from fedhdp.errors import RunError
from fedhdp.results import files, store
from fedhdp.results import provenance as provenance_module
from fedhdp.results.provenance import provenance
from fedhdp.results.schema import GroupResult, MetricRow, VariantResult
from fedhdp.results.store import DamagedRunError, RunDirectory, RunInfo, VariantDirectory, read_value, write_value


def group(**fields: object) -> GroupResult:
    """A group with these fields."""
    return GroupResult("inf", 5, True, 0.0, 0.1, 1.0, 0.05, **fields)  # type: ignore[arg-type]


def test_interrupted_write_keeps_old_file(tmp_path, monkeypatch):
    path = tmp_path / "value.json"
    store.atomic_write(path, b'"old"')

    def crash(*_: object) -> None:
        raise OSError("crash")

    monkeypatch.setattr(os, "replace", crash)
    with pytest.raises(OSError, match="crash"):
        store.atomic_write(path, b'"new"')
    assert path.read_bytes() == b'"old"'


def test_arrays_round_trip(tmp_path):
    arrays = {"eager": np.arange(6).reshape(2, 3), "lazy": lambda: np.array(2.5)}
    store.write_arrays(tmp_path / "a.npz", arrays)
    stored = store.read_arrays(tmp_path / "a.npz")
    np.testing.assert_array_equal(stored["eager"], arrays["eager"])
    assert stored["lazy"] == 2.5


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 half a file", b"text"])
def test_damaged_arrays_are_refused(content, tmp_path):
    (tmp_path / "a.npz").write_bytes(content)
    with pytest.raises(DamagedRunError):
        store.read_arrays(tmp_path / "a.npz")


def test_infinite_epsilon_is_text_in_json(tmp_path):
    path = tmp_path / "group.json"
    write_value(path, group(epsilon=math.inf))
    assert b'"epsilon": "inf"' in path.read_bytes()
    assert read_value(path, GroupResult) == group(epsilon=math.inf)


def test_unknown_epsilon_is_null_in_json(tmp_path):
    path = tmp_path / "group.json"
    write_value(path, group())
    assert b'"epsilon": null' in path.read_bytes()
    assert read_value(path, GroupResult).epsilon is None


@pytest.mark.parametrize("content", [b"", b'{"name": "x"', b"{}", b'{"nome": 1}', b'{"n\xad": 1}'])
def test_damaged_json_is_refused(content, tmp_path):
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(DamagedRunError) as error:
        read_value(tmp_path / "a.json", GroupResult)
    assert "a.json" in str(error.value)


def test_history_drops_torn_line_and_later_rounds(tmp_path):
    variant = VariantDirectory(tmp_path)
    rows = [MetricRow(n, 'a, "b"', "global", "accuracy", n / 3) for n in (1, 2, 3)]
    variant.rewrite_history(rows[:1])
    variant.append_history(rows[1:])
    with open(tmp_path / "history.csv", "a") as history:
        history.write("12,server,glo")
    assert variant.history() == rows
    assert variant.history(until=2) == rows[:2]


def test_finished_variant_has_no_checkpoint(tmp_path):
    variant = VariantDirectory(tmp_path)
    assert not variant.started
    variant.save_checkpoint({"round": np.array(3)})
    assert variant.started
    result = VariantResult("x", "fedhdp", 3, 1.0, False, [group()])
    variant.finish({"w": np.zeros(2)}, result, {"global": np.ones(3)})
    assert variant.checkpoint() is None
    assert variant.result() == result
    assert {path.name for path in tmp_path.iterdir()} == {"model.npz", "scores.npz", "result.json"}


def test_directory_of_a_run_is_left_alone(tmp_path):
    with RunDirectory.create(tmp_path / "run", b"name = 1"):
        pass
    with pytest.raises(RunError) as error:
        RunDirectory.create(tmp_path / "run", b"name = 2")
    assert (error.value.field, error.value.value) == ("out", str(tmp_path / "run"))
    assert f"fedhdp run --resume {tmp_path / 'run'}" in str(error.value)
    assert (tmp_path / "run" / "experiment.toml").read_bytes() == b"name = 1"


def test_locked_directory_is_refused(tmp_path):
    with RunDirectory.create(tmp_path / "run", b""), pytest.raises(RunError):
        RunDirectory.open(tmp_path / "run")
    with RunDirectory.open(tmp_path / "run"):  # the lock ends with the block
        pass


def test_directory_without_run_is_refused(tmp_path):
    with pytest.raises(DamagedRunError):
        RunDirectory.open(tmp_path)


def test_run_records_version_and_commit(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "provenance", lambda: ("1.2.3", "abc", True))
    with RunDirectory.create(tmp_path / "run", b""):
        info = read_value(tmp_path / "run" / "run.json", RunInfo)
    assert (info.version, info.commit, info.modified) == ("1.2.3", "abc", True)


def test_provenance_of_a_checkout(tmp_path, monkeypatch):
    package = tmp_path / "fedhdp"
    package.mkdir()
    (package / "__init__.py").write_text("")
    monkeypatch.setattr(fedhdp, "__file__", str(package / "__init__.py"))
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    uncached = provenance.__wrapped__
    assert uncached() == (fedhdp.__version__, None, None)  # no checkout
    author = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    for arguments in (["init", "-q"], ["add", "."], [*author, "commit", "-q", "-m", "first"]):
        subprocess.run(["git", "-C", str(tmp_path), *arguments], check=True)
    version, commit, modified = uncached()
    assert len(commit) == 40
    assert (version, modified) == (fedhdp.__version__, False)
    (package / "__init__.py").write_text("changed")
    assert uncached() == (version, commit, True)

    def missing(*_: object, **__: object) -> None:
        raise FileNotFoundError("git")

    monkeypatch.setattr(provenance_module.subprocess, "run", missing)
    assert uncached() == (version, None, None)


def test_files_are_written_without_fcntl(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "fcntl", None)
    spec = importlib.util.spec_from_file_location("portable_files", files.__file__)
    portable = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(portable)
    assert portable.fcntl is None
    with open(tmp_path / ".lock", "w") as file:
        portable.lock_file(file)
    portable.write_value(tmp_path / "value.json", [1])
    assert portable.read_value(tmp_path / "value.json", list) == [1]

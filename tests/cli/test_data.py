"""``fedhdp data``: list, import and download."""

from __future__ import annotations

import hashlib
import json
import lzma
import sys
from pathlib import Path

import pytest
from dataset_files import write_femnist_npz, write_small_mnist, write_small_tff
from msgspec.structs import replace

import fedhdp.cli
from fedhdp.datasets import load_femnist, load_mnist
from fedhdp.datasets.cache import read_contents
from fedhdp.datasets.catalog import DATASETS

FEMNIST_SUMMARY = "2 clients, 3 train images, 2 test images"


@pytest.fixture(autouse=True)
def data(tmp_path, monkeypatch) -> Path:
    """An empty data directory, which does not exist yet."""
    monkeypatch.setenv("FEDHDP_DATA", str(tmp_path / "data"))
    return tmp_path / "data"


@pytest.fixture
def fedhdp_command(monkeypatch):
    """Runs the command line in this process and returns its exit code."""

    def run(*arguments: object) -> int:
        monkeypatch.setattr(sys, "argv", ["fedhdp", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            fedhdp.cli.main()
        return int(stop.value.code or 0)

    return run


@pytest.fixture
def offer(tmp_path, monkeypatch):
    """Sets the catalog's URLs of a dataset to files on this machine."""

    def set_urls(dataset: str, files: dict[str, bytes]) -> None:
        folder = tmp_path / "mirror"
        folder.mkdir()
        for name, content in files.items():
            (folder / name).write_bytes(content)
        info = DATASETS[dataset]
        local = tuple(replace(file, urls=((folder / file.name).as_uri(),)) for file in info.files)
        monkeypatch.setitem(DATASETS, dataset, replace(info, files=local))

    return set_urls


def test_import(fedhdp_command, tmp_path, capsys, data):
    write_femnist_npz(tmp_path / "some.npz")
    assert fedhdp_command("data", "import", tmp_path) == 0
    assert capsys.readouterr().out == f"imported femnist-330 into {data}\nfemnist-330: {FEMNIST_SUMMARY}\n"


def test_import_reports_skipped_files(fedhdp_command, tmp_path, capsys):
    write_femnist_npz(tmp_path / "some.npz")
    (tmp_path / "broken.gz").write_bytes(b"\x1f\x8b\x08nothing")
    assert fedhdp_command("data", "import", tmp_path) == 0
    assert [line for line in capsys.readouterr().err.splitlines() if "skipped" in line and "broken.gz" in line]


def test_list(fedhdp_command, tmp_path, capsys, data):
    write_femnist_npz(tmp_path / "some.npz")
    fedhdp_command("data", "import", tmp_path)
    capsys.readouterr()
    assert fedhdp_command("data") == 0
    text = capsys.readouterr().out
    assert str(data) in text
    assert "femnist-330: present" in text
    assert FEMNIST_SUMMARY in text
    assert "mnist: missing" in text
    assert "fedhdp data download mnist" in text


def test_list_shows_damage(fedhdp_command, tmp_path, capsys, data):
    write_femnist_npz(tmp_path / "some.npz")
    fedhdp_command("data", "import", tmp_path)
    (data / "femnist-330" / "train_x.npy").unlink()
    assert fedhdp_command("data", "list") == 0
    assert "femnist-330: damaged" in capsys.readouterr().out


def test_list_json(fedhdp_command, tmp_path, capsys, data):
    write_femnist_npz(tmp_path / "some.npz")
    fedhdp_command("data", "import", tmp_path)
    capsys.readouterr()
    assert fedhdp_command("data", "list", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["directory"] == str(data)
    present = {dataset["name"]: dataset["present"] for dataset in document["datasets"]}
    assert present == {name: name == "femnist-330" for name in DATASETS}
    urls = [url for dataset in document["datasets"] for file in dataset["files"] for url in file["urls"]]
    assert urls
    assert all(url.startswith("https://") for url in urls)


def test_data_directory_option(fedhdp_command, tmp_path, monkeypatch, data):
    monkeypatch.setenv("FEDHDP_DATA", str(data))  # the option sets it; monkeypatch restores it
    write_femnist_npz(tmp_path / "some.npz")
    assert fedhdp_command("--data-directory", tmp_path / "other", "data", "import", tmp_path) == 0
    assert (tmp_path / "other" / "femnist-330").is_dir()
    assert not data.exists()


def test_download(fedhdp_command, offer, tmp_path, monkeypatch, capsys, data):
    offer("mnist", write_small_mnist(tmp_path / "raw", monkeypatch))
    assert fedhdp_command("data", "download", "mnist") == 0
    assert capsys.readouterr().out == f"imported mnist into {data}\nmnist: 600 train images, 300 test images\n"
    assert load_mnist(clients=60, samples=10, test_samples=5).num_clients == 60


def test_download_with_another_checksum(fedhdp_command, offer, tmp_path, monkeypatch, capsys):
    write_small_tff(tmp_path / "plain", monkeypatch)
    content = lzma.compress((tmp_path / "plain").read_bytes())
    sha256 = hashlib.sha256(content).hexdigest()
    offer("emnist-tff", {"emnist_all.sqlite.lzma": content})
    assert fedhdp_command("data", "download", "emnist-tff") == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert fedhdp_command("data", "download", "emnist-tff", "--sha256", sha256.upper()) == 0
    assert load_femnist("tff").num_clients == 6
    assert list(read_contents("emnist-tff").files.values()) == [sha256]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("import", "no-such-file"), ["no-such-file"]),
        (("import", __file__), ["test_data.py"]),
        (("import", str(Path(__file__).parent)), [str(Path(__file__).parent)]),
        (("download", "cifar"), ["dataset", "'cifar'", "mnist"]),
        (("download", "femnist-330"), ["femnist-330"]),
        (("download", "emnist-tff", "--sha256", "zzz"), ["sha256", "'zzz'"]),
        (("download", "mnist", "--sha256", "00"), ["sha256", "'00'"]),
    ],
)
def test_mistakes_are_one_line(fedhdp_command, arguments, words, capsys):
    assert fedhdp_command("data", *arguments) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert [word for word in words if word not in error] == []

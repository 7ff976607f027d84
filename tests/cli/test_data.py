"""``fedhdp data``: list, import and download."""

from __future__ import annotations

import hashlib
import lzma
from pathlib import Path

import pytest
from dataset_files import write_femnist_npz, write_small_mnist, write_small_tff
from msgspec.structs import replace

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


def test_import(run_cli, tmp_path, data):
    write_femnist_npz(tmp_path / "some.npz")
    code, out, _ = run_cli("data", "import", tmp_path)
    assert (code, out) == (0, f"imported femnist-330 into {data}\nfemnist-330: {FEMNIST_SUMMARY}\n")


def test_import_reports_skipped_files(run_cli, tmp_path):
    write_femnist_npz(tmp_path / "some.npz")
    (tmp_path / "broken.gz").write_bytes(b"\x1f\x8b\x08nothing")
    code, _, err = run_cli("data", "import", tmp_path)
    assert code == 0
    assert [line for line in err.splitlines() if "skipped" in line and "broken.gz" in line]


def test_list(run_cli, tmp_path, data):
    write_femnist_npz(tmp_path / "some.npz")
    run_cli("data", "import", tmp_path)
    code, text, _ = run_cli("data")
    assert code == 0
    assert str(data) in text
    assert "femnist-330: present" in text
    assert FEMNIST_SUMMARY in text
    assert "mnist: missing" in text
    assert "fedhdp data download mnist" in text


def test_list_shows_damage(run_cli, tmp_path, data):
    write_femnist_npz(tmp_path / "some.npz")
    run_cli("data", "import", tmp_path)
    (data / "femnist-330" / "train_x.npy").unlink()
    assert "femnist-330: damaged" in run_cli("data", "list").stdout


def test_list_json(run_cli, run_json, tmp_path, data):
    write_femnist_npz(tmp_path / "some.npz")
    run_cli("data", "import", tmp_path)
    document = run_json("data", "list")
    assert document["directory"] == str(data)
    present = {dataset["name"]: dataset["present"] for dataset in document["datasets"]}
    assert present == {name: name == "femnist-330" for name in DATASETS}
    urls = [url for dataset in document["datasets"] for file in dataset["files"] for url in file["urls"]]
    assert urls
    assert all(url.startswith("https://") for url in urls)


def test_data_directory_option(run_cli, tmp_path, monkeypatch, data):
    monkeypatch.setenv("FEDHDP_DATA", str(data))  # the option sets it; monkeypatch restores it
    write_femnist_npz(tmp_path / "some.npz")
    assert run_cli("--data-directory", tmp_path / "other", "data", "import", tmp_path).code == 0
    assert (tmp_path / "other" / "femnist-330").is_dir()
    assert not data.exists()


def test_download(run_cli, offer, tmp_path, monkeypatch, data):
    offer("mnist", write_small_mnist(tmp_path / "raw", monkeypatch))
    code, out, _ = run_cli("data", "download", "mnist")
    assert (code, out) == (0, f"imported mnist into {data}\nmnist: 600 train images, 300 test images\n")
    assert load_mnist(clients=60, samples=10, test_samples=5).num_clients == 60


def test_download_with_another_checksum(run_cli, run_refused, offer, tmp_path, monkeypatch):
    write_small_tff(tmp_path / "plain", monkeypatch)
    content = lzma.compress((tmp_path / "plain").read_bytes())
    sha256 = hashlib.sha256(content).hexdigest()
    offer("emnist-tff", {"emnist_all.sqlite.lzma": content})
    run_refused("data", "download", "emnist-tff")
    assert run_cli("data", "download", "emnist-tff", "--sha256", sha256.upper()).code == 0
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
def test_mistakes_are_one_line(run_refused, arguments, words):
    error = run_refused("data", *arguments)
    assert [word for word in words if word not in error] == []

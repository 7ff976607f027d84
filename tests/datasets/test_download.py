"""Downloads resume, are verified, and are complete or absent."""

from __future__ import annotations

import hashlib
import http.server
import re
import threading

import numpy as np
import pytest
from dataset_files import no_progress, write_small_mnist
from helpers import raises_field
from msgspec.structs import replace

from fedhdp.datasets import load_mnist
from fedhdp.datasets.catalog import DATASETS, RawFile
from fedhdp.datasets.importers import download
from fedhdp.errors import DataError

CONTENT = np.random.default_rng(0).bytes(300_000)


class RangeHandler(http.server.BaseHTTPRequestHandler):
    """Serves files from memory with ranges; breaks off after the given numbers of bytes."""

    files: dict[str, bytes]
    requests: list[tuple[str, str | None]]  # name and range
    breaks: list[int]  # bytes to send before breaking off, for each of the next responses
    supports_ranges = True

    def do_GET(self) -> None:
        name, requested = self.path[1:], self.headers.get("Range")
        self.requests.append((name, requested))
        if name not in self.files:
            self.send_error(404)
            return
        content, resume = self.files[name], requested is not None and self.supports_ranges
        start = int(re.fullmatch(r"bytes=(\d+)-", requested)[1]) if resume else 0
        if resume and start >= len(content):
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{len(content)}")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_response(206 if resume else 200)
        if resume:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        self.wfile.write(content[start:][: self.breaks.pop(0) if self.breaks else None])

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch):
    """A server on this machine, and its address."""
    monkeypatch.setattr(download, "PAUSE_SECONDS", 0.0)
    handler = type("Handler", (RangeHandler,), {"files": {}, "requests": [], "breaks": [], "supports_ranges": True})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as http_server:
        threading.Thread(target=http_server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        handler.url = f"http://127.0.0.1:{http_server.server_port}/"
        yield handler
        http_server.shutdown()


def file_at(server, name: str = "file") -> RawFile:
    return RawFile("file", (server.url + name,), hashlib.sha256(CONTENT).hexdigest())


def test_progress_reaches_the_total(server, tmp_path):
    server.files["file"] = CONTENT
    steps = []
    download.fetch(file_at(server), tmp_path / "file", lambda *step: steps.append(step))
    assert (tmp_path / "file").read_bytes() == CONTENT
    assert steps[-1] == ("downloading file", 300_000, 300_000)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_broken_connection_is_resumed(server, tmp_path):
    server.files["file"], server.breaks = CONTENT, [100_000, 50_000]
    download.fetch(file_at(server), tmp_path / "file", no_progress)
    assert (tmp_path / "file").read_bytes() == CONTENT
    assert [requested for _, requested in server.requests] == [None, "bytes=100000-", "bytes=150000-"]


def test_abandoned_download_is_resumed_by_the_next_call(server, tmp_path):
    server.files["file"], server.breaks = CONTENT, [100_000, 0, 0, 0, 0]
    with raises_field("url", DataError) as error:
        download.fetch(file_at(server), tmp_path / "file", no_progress)
    assert "100000" in str(error.value)
    assert not (tmp_path / "file").exists()
    server.requests.clear()
    download.fetch(file_at(server), tmp_path / "file", no_progress)
    assert (tmp_path / "file").read_bytes() == CONTENT
    assert server.requests == [("file", "bytes=100000-")]


@pytest.mark.parametrize("partial", [CONTENT, CONTENT + b"more"], ids=["complete", "too long"])
def test_partial_file_of_full_length(server, tmp_path, partial):
    server.files["file"] = CONTENT
    (tmp_path / "file.part").write_bytes(partial)
    download.fetch(file_at(server), tmp_path / "file", no_progress)
    assert (tmp_path / "file").read_bytes() == CONTENT


def test_server_without_ranges(server, tmp_path):
    server.files["file"], server.breaks, server.supports_ranges = CONTENT, [100_000], False
    download.fetch(file_at(server), tmp_path / "file", no_progress)
    assert (tmp_path / "file").read_bytes() == CONTENT


def test_wrong_checksum_is_refused(server, tmp_path):
    server.files["file"] = CONTENT[:-1] + b"?"
    with raises_field("sha256", DataError):
        download.fetch(file_at(server), tmp_path / "file", no_progress)
    assert list(tmp_path.iterdir()) == []


def test_next_mirror_is_tried(server, tmp_path):
    server.files["file"] = CONTENT
    file = replace(file_at(server), urls=(server.url + "gone", server.url + "file"))
    download.fetch(file, tmp_path / "file", no_progress)
    assert (tmp_path / "file").read_bytes() == CONTENT
    assert [name for name, _ in server.requests] == ["gone", "file"]


def test_missing_file_is_refused(server, tmp_path):
    with raises_field("url", DataError) as error:
        download.fetch(file_at(server, "gone"), tmp_path / "file", no_progress)
    assert error.value.value == server.url + "gone"
    assert "404" in str(error.value)


def test_unreachable_server_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(download, "PAUSE_SECONDS", 0.0)
    with raises_field("url", DataError):
        download.fetch(RawFile("file", ("http://127.0.0.1:9/file",)), tmp_path / "file", no_progress)


def test_download_imports_and_deletes_the_files(server, tmp_path, monkeypatch, data):
    server.files |= write_small_mnist(tmp_path / "raw", monkeypatch)
    server.breaks = [1000]
    files = tuple(replace(file, urls=(server.url + file.name,)) for file in DATASETS["mnist"].files)
    download.download(replace(DATASETS["mnist"], files=files), no_progress)
    assert load_mnist(clients=60, samples=10, test_samples=5).num_clients == 60
    assert not list(data.rglob("*.gz*"))


@pytest.mark.parametrize(
    ("dataset", "sha256", "field"), [("emnist-tff", "zzz", "sha256"), ("mnist", "0" * 64, "sha256")]
)
def test_invalid_checksum_is_refused(dataset, sha256, field):
    with raises_field(field):
        download.download(DATASETS[dataset], no_progress, sha256)


def test_dataset_without_download_is_refused():
    with raises_field("dataset", DataError):
        download.download(DATASETS["femnist-330"], no_progress)

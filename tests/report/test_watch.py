"""The live page: what the server answers, what it refuses, and that the page follows the run."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from experiment_helpers import command
from report_runs import VARIANTS, write_page_run

from fedhdp.report.watch import WatchServer, make_server
from fedhdp.results import VariantDirectory


@contextmanager
def serving(directory: Path) -> Iterator[WatchServer]:
    """A server of a run's page in another thread."""
    with make_server(directory) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def get(server: WatchServer, path: str, **headers: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection(*server.server_address[:2], timeout=10)
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


def grow(run: Path, score: float) -> None:
    """A further evaluation of every variant."""
    for path in run.glob("*/history.csv"):
        part = VariantDirectory(path.parent)
        rows = [row for row in part.history() if row.round == 12]
        part.append_history(
            row._replace(round=13, value=score if row.metric == "accuracy" else row.value) for row in rows
        )


def test_page_and_version_are_served_and_nothing_else(tmp_path):
    run = write_page_run(tmp_path / "run", finished=False)
    with serving(run) as server:
        status, page = get(server, "/")
        assert (status, page.startswith("<!doctype html>")) == (200, True)
        assert get(server, "/version") == (200, server.version())
        for path in (
            "/experiment.toml",
            "/../run/experiment.toml",
            "/fedhdp/history.csv",
            "//etc/passwd",
            "/?x",
            "/run",
        ):
            assert get(server, path)[0] == 404, path


def test_server_listens_on_this_machine_alone(tmp_path):
    with serving(write_page_run(tmp_path / "run")) as server:
        assert server.server_address[0] == "127.0.0.1"


@pytest.mark.parametrize(
    ("host", "status"), [("evil.example", 403), ("evil.example:80", 403), ("localhost:1", 200), ("[::1]:1", 200)]
)
def test_requests_that_name_another_host_are_refused(tmp_path, host, status):
    with serving(write_page_run(tmp_path / "run")) as server:
        assert get(server, "/version", Host=host)[0] == status


def test_version_changes_with_the_history(tmp_path):
    run = write_page_run(tmp_path / "run", finished=False)
    with serving(run) as server:
        (before, first), version = get(server, "/"), server.version()
        assert get(server, "/") == (before, first)
        grow(run, 0.875)
        assert server.version() != version
        assert "87.5%" in get(server, "/")[1]
        assert "87.5%" not in first


def test_run_without_measurements_waits(tmp_path):
    run = write_page_run(tmp_path / "run", finished=False)
    for path in run.glob("*/history.csv"):
        path.unlink()
    with serving(run) as server:
        assert "nothing is measured yet" in get(server, "/")[1]


def test_directory_without_a_run_and_busy_port_are_refused(tmp_path):
    refused = command("watch", tmp_path)
    assert (refused.code, refused.stderr.count("\n")) == (2, 1)
    with serving(write_page_run(tmp_path / "run", variants=VARIANTS[2:])) as server:
        busy = command("watch", tmp_path / "run", "--port", server.server_address[1])
        assert (busy.code, "--port" in busy.stderr) == (2, True)


@pytest.mark.browser
def test_open_page_follows_the_run_and_keeps_what_was_chosen(open_page, tmp_path):
    run = write_page_run(tmp_path / "run", finished=False)
    with serving(run) as server, open_page(server.url) as tab:
        tab.page.locator("#show-1").uncheck()
        grow(run, 0.875)
        tab.page.get_by_text("87.5%").first.wait_for(timeout=8000)
        assert not tab.page.locator("#show-1").is_checked()
        assert "13 rounds" in tab.page.locator("h1").inner_text()
        assert {request.removeprefix(server.url) for request in tab.requests} <= {"", "version"}
        assert tab.errors == []

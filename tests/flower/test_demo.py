"""The example's demonstration and its processes: what is printed and how they end when something fails."""

from __future__ import annotations

import importlib.util
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedhdp[flower]'")

from flower_apps import write_app

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "flower_app"))
import demo
from fleet import Fleet, FleetError

FAILING_SERVER = """
from fedhdp.flower import server_app

def initial_arrays(deployment):
    raise OSError("there is no data")

app = server_app(initial_arrays)
"""
FAILING_CLIENT = """
import time
from fedhdp.flower import client_app

def level(context):
    if context.node_config["partition-id"] == 0:
        raise OSError("there is no data")
    time.sleep(600)

app = client_app(None, level)
"""


def run_demo(monkeypatch, *arguments: object) -> str | int | None:
    """The exit status of the demonstration, or the line that it ends with."""
    monkeypatch.setattr(sys, "argv", ["demo.py", *map(str, arguments)])
    with pytest.raises(SystemExit) as error:
        demo.main()
    return error.value.code


@pytest.mark.parametrize(("module", "arguments"), [("ray", ["--simulate", 2]), ("flwr", [])])
def test_missing_package_is_named(monkeypatch, capsys, module, arguments):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == module else find_spec(name))
    assert run_demo(monkeypatch, *arguments) == 2
    assert "pip install" in capsys.readouterr().err


@pytest.mark.parametrize(("option", "value"), [("rounds", 0), ("simulate", 0), ("simulate", -3), ("patience", "nan")])
def test_wrong_numbers_are_refused(monkeypatch, capsys, option, value):
    assert run_demo(monkeypatch, f"--{option}", value) == 2
    assert f"--{option} must be above 0, got {value}" in capsys.readouterr().err


def test_directory_with_a_finished_run_is_refused(monkeypatch, capsys, tmp_path):
    """Its results are not those of this run."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "summary.json").write_text("{}")
    assert run_demo(monkeypatch, "--keep", tmp_path) == 2
    assert f"--keep {tmp_path} has a finished run" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.process
@pytest.mark.slow
def test_failing_server_ends_the_demo(monkeypatch, tmp_path):
    monkeypatch.setattr(demo, "APP", write_app(tmp_path / "app", server_app=FAILING_SERVER))
    monkeypatch.setattr(demo, "LEVEL_OF_OWNER", {})
    monkeypatch.setattr(demo.tempfile, "mkdtemp", lambda prefix: str(tmp_path / "demo"))
    line = run_demo(monkeypatch)
    assert "finished:failed" in line
    assert "there is no data" in line
    assert "\n" not in line
    assert (tmp_path / "demo" / "superlink.log").exists()
    assert [log for log in (tmp_path / "demo").glob("run *.log") if str(log) in line]


@pytest.mark.process
@pytest.mark.slow
def test_stalled_nodes_end_the_demo(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(demo, "APP", write_app(tmp_path / "app", client_app=FAILING_CLIENT))
    monkeypatch.setattr(demo, "LEVEL_OF_OWNER", {"anna": "open", "ben": "open"})
    patience = 10
    line = run_demo(monkeypatch, "--keep", tmp_path / "demo", "--patience", patience)
    assert f"no progress for {patience} s" in line
    assert "\n" not in line
    assert "there is no data" in (tmp_path / "demo" / "anna.log").read_text()
    assert "without an answer" in line
    assert "error" in capsys.readouterr().out


@pytest.mark.process
def test_superlink_that_ends_is_reported(tmp_path):
    with Fleet(tmp_path) as fleet:
        fleet.start("superlink", sys.executable, "-c", "raise OSError('the port is taken')")
        with pytest.raises(FleetError, match="the port is taken"):
            fleet.wait_for("1", lambda: False, 60)


def test_limit_follows_progress(tmp_path):
    fleet, seconds = Fleet(tmp_path), 0.5
    deadline = time.monotonic() + 3 * seconds

    def works() -> bool:
        (tmp_path / "file").write_text(str(time.monotonic()))
        return time.monotonic() > deadline

    def logs() -> bool:
        fleet.log("run").write_text(str(time.monotonic()))
        return time.monotonic() > deadline + 10

    fleet.wait_until(works, seconds, "progress")
    with pytest.raises(FleetError):
        fleet.wait_until(logs, seconds, "a log")


def test_warnings_are_printed():
    lines = {
        "run 1": "WARNING :   node 3 answered the offer with error 2",
        "anna": "WARNING :   Option `--insecure` was set.",
        "ben": "ERROR :   the data cannot be read",
        "cleo": "INFO :   Receiving: train message",
    }
    texts = [demo.line_to_print(name, line) for name, line in lines.items()]
    assert [text for text in texts if text] == [
        "warning: node 3 answered the offer with error 2",
        "error of ben: the data cannot be read",
    ]


def test_ended_node_is_named_and_its_retries_are_printed_once(tmp_path, monkeypatch, capsys):
    retries = (
        "import sys; [print(f'WARNING :   Connection failed, retrying in {i} seconds') for i in range(5)]; sys.exit(3)"
    )
    calls = []

    class EndedFleet(Fleet):
        def follow(self, run):
            self.start("anna", sys.executable, "-c", retries)
            self.processes["anna"].wait()

        def wait_for(self, run, condition, seconds):
            calls.extend([condition(), condition()])

    with EndedFleet(tmp_path) as fleet:
        demo.wait_for_results(fleet, "1", tmp_path / "summary.json", 1)
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "warning of anna: Connection failed, retrying in 0 seconds",
        f"warning: anna ended with status 3 (log: {tmp_path / 'anna.log'})",
    ]
    assert calls == [False, False]

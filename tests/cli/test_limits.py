"""Numbers that no machine can serve, and texts that no file can have as its name: one line, before anything is built."""

from __future__ import annotations

import time

import pytest

EXPERIMENT = """
rounds = 2
data = { name = "handwriting", clients = 20 }
model = { hidden = 50 }
training = { epochs = 2 }
ledger = "my.ledger"
variants = [{ algorithm = "fedhdp" }]
[mechanism]
clip = 1.0
groups = [{ name = "open", clients = 20, sampling_rate = 0.1, noise_multiplier = 0.0 }]
"""
LARGE = ["9223372036854775808", f"1{'0' * 30}", f"1{'0' * 5000}"]


@pytest.fixture
def run_with(run_cli, tmp_path):
    """Run the experiment with one text in place of another: the line of its error."""

    def run(old: str, new: str, *arguments: str) -> str:
        assert old in EXPERIMENT
        (tmp_path / "my.toml").write_text(EXPERIMENT.replace(old, new, 1))
        started = time.monotonic()
        done = run_cli("run", tmp_path / "my.toml", "--out", tmp_path / "run", *arguments)
        assert (done.code, done.stdout, done.stderr.count("\n")) == (2, "", 1)
        assert len(done.stderr) < 2_100
        assert time.monotonic() - started < 30
        assert sorted(path.name for path in tmp_path.iterdir()) == ["my.toml"]
        return done.stderr

    return run


@pytest.mark.parametrize("number", LARGE)
@pytest.mark.parametrize("old", ["rounds = 2", "epochs = 2", "hidden = 50", "clients = 20", "sampling_rate = 0.1"])
def test_numbers_that_no_machine_can_serve(run_with, old, number):
    field = old.split(" = ")[0]
    assert field in run_with(old, f"{field} = {number}") or len(number) > 4000


@pytest.mark.parametrize("number", ["10000000001", f"1{'0' * 400}"])
def test_groups_of_more_clients_than_a_sum_can_hold(run_with, number):
    assert "clients" in run_with("clients = 20, sampling_rate", f"clients = {number}, sampling_rate")


@pytest.mark.parametrize("hidden", [10**7, 10**12])
def test_a_network_that_no_memory_holds_is_refused_with_what_it_needs(run_with, hidden):
    line = run_with("hidden = 50", f"hidden = {hidden}")
    assert "hidden" in line
    assert "B of memory" in line


def test_clients_that_no_memory_holds_are_refused_with_what_they_need(run_with):
    line = run_with("clients = 20", "clients = 1000000000000")
    assert "data.clients" in line
    assert "31.4 PB of memory" in line


@pytest.mark.parametrize("field", ["samples", "test_samples", "server_test"])
def test_images_that_no_memory_holds_are_refused_by_their_field(run_with, field):
    line = run_with("clients = 20", f"clients = 20, {field} = 1000000000000")
    assert f"data.{field} must be smaller" in line
    assert "B of memory" in line


@pytest.mark.parametrize("seeds", ["1-999999999", "10001", f"1{'0' * 5000}", f"0-1{'0' * 5000}"])
def test_too_many_seeds(run_with, seeds):
    assert "--seeds" in run_with("rounds = 2", "rounds = 2", "--seeds", seeds)


@pytest.mark.parametrize(
    ("old", "new"),
    [('"my.ledger"', '"my\\u0000ledger"'), ('"open"', '"op\\u0000en"'), ("hidden = 50", '"hid\\u0000den" = 50')],
)
def test_a_nul_in_a_text(run_with, old, new):
    assert "NUL" in run_with(old, new)


def test_a_name_that_is_no_utf8(run_with, run_cli, tmp_path):
    assert "UTF-8" in run_with("rounds = 2", "rounds = 3", "--ledger", "\udcff.ledger")
    assert (
        run_cli("ledger", "show", "\udcff.ledger").stderr
        == "fedhdp: names and paths must be UTF-8, got '\\udcff.ledger'\n"
    )


def test_nested_without_end(run_with):
    run_with("rounds = 2", f"rounds = {'[' * 5000}{']' * 5000}")

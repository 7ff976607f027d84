"""Crashes, resuming, and what is refused when a run is resumed."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedhdp[flower]'")

from flower_helpers import (
    LEVEL_OF,
    LEVELS,
    PRIVATE,
    TWO_LEVELS,
    Crash,
    before_round,
    charged_rounds,
    crash,
    is_equal,
    make_deployment,
    make_grid,
    open_ledger,
    registered_levels,
    run_plain,
    saved_model,
    saved_values,
)
from flwr.app import Message
from helpers import raises_field
from msgspec.structs import replace

from fedhdp.errors import LedgerError, ModelError, RunError
from fedhdp.experiments.runner import resume
from fedhdp.flower import run_deployment
from fedhdp.mechanism import SERVER
from fedhdp.optimizers import OptimizerConfig
from fedhdp.results.store import DamagedRunError, VariantDirectory
from fedhdp.server import ServerOptimizer

ALWAYS_SAMPLED = {name: replace(level, sampling_rate=1.0) for name, level in LEVELS.items()}


def run_until_crash(tmp_path, deployment, round: int) -> None:
    grid = make_grid(tmp_path)
    grid.on_push = before_round(round, crash)
    with pytest.raises(Crash):
        run_plain(grid, deployment)


@pytest.mark.parametrize("moment", ["while sending", "after the replies"])
def test_resumed_run_is_bit_identical(tmp_path, moment, monkeypatch):
    server = ServerOptimizer(OptimizerConfig("adam", learning_rate=0.1), average=0.9)
    complete = make_deployment(tmp_path / "complete", rounds=5, server=server)
    crashed = make_deployment(tmp_path / "crashed", rounds=5, server=server)
    append = VariantDirectory.append_history

    def append_and_crash(self, rows):
        append(self, rows)
        if any(row.round == 3 for row in rows):
            raise Crash

    run_plain(make_grid(tmp_path / "complete"), complete)
    if moment == "while sending":
        run_until_crash(tmp_path / "crashed", crashed, 2)
    else:
        with monkeypatch.context() as patch:
            patch.setattr(VariantDirectory, "append_history", append_and_crash)
            with pytest.raises(Crash):
                run_plain(make_grid(tmp_path / "crashed"), crashed)
    assert charged_rounds(crashed) == 3
    grid = make_grid(tmp_path / "crashed")
    for node in list(grid.nodes.values()):  # the same clients at other nodes
        del grid.nodes[node.id]
        node.id += 1000
        grid.nodes[node.id] = node
    (variant,) = run_plain(grid, crashed).variants

    assert variant.rounds == 5
    assert charged_rounds(crashed) == 6  # the round of the crash is charged twice
    assert is_equal(saved_model(complete), saved_model(crashed))
    assert saved_values(complete, SERVER, "clip") == saved_values(crashed, SERVER, "clip")
    assert registered_levels(crashed) == LEVEL_OF


def test_round_of_a_crash_is_charged_under_its_own_mechanism(tmp_path):
    deployment = make_deployment(tmp_path, levels=ALWAYS_SAMPLED, rounds=4, **PRIVATE)
    grid = make_grid(tmp_path)
    late = {id: grid.nodes.pop(id) for id in (106, 107)}
    join = before_round(1, lambda: grid.nodes.update({107: late[107]}))
    end = before_round(2, crash)

    def on_push(messages: list[Message]) -> None:
        join(messages)
        end(messages)

    grid.on_push = on_push
    with pytest.raises(Crash):
        run_plain(grid, deployment)
    (variant,) = run_plain(make_grid(tmp_path), deployment).variants

    assert [group.clients for group in variant.groups] == [2, 3, 3]
    with open_ledger(deployment.ledger) as ledger:
        assert [(run.charged, run.mechanism.clients) for run in ledger.runs()] == [(2, 6), (1, 7), (2, 8)]
    assert variant.groups[2].rounds == 5
    assert "3 mechanisms composed" in variant.groups[2].epsilon_basis


def test_charged_rounds_in_the_last_evaluation_after_a_crash(tmp_path):
    deployment = make_deployment(tmp_path, levels=TWO_LEVELS, evaluate_every=3, **PRIVATE)
    grid = make_grid(tmp_path)

    def crash_before_evaluation(messages: list[Message]) -> None:
        if any(message.metadata.message_type == "evaluate" for message in messages):
            raise Crash

    grid.on_push = crash_before_evaluation
    with pytest.raises(Crash):
        run_plain(grid, deployment)
    grid.on_push = lambda messages: None
    grid.pushed.clear()
    run_plain(grid, deployment)
    requests = grid.pushed_of("evaluate")
    assert requests
    assert {message.content["request"]["charged_rounds"] for message in requests} == {charged_rounds(deployment)} == {3}


def test_simulator_does_not_resume_a_deployment(tmp_path):
    deployment = make_deployment(tmp_path)
    run_plain(make_grid(), deployment)
    with pytest.raises(DamagedRunError):
        resume(Path(deployment.out), lambda progress: True)


def test_directory_of_another_deployment_is_refused(tmp_path):
    deployment = make_deployment(tmp_path, rounds=1)
    run_plain(make_grid(), deployment)
    with raises_field("out", RunError):
        run_plain(make_grid(), replace(deployment, rounds=2))


def test_finished_run_is_left_alone(tmp_path):
    deployment, grid = make_deployment(tmp_path, rounds=1), make_grid()
    summary = run_plain(make_grid(), deployment)
    ledger = str(tmp_path / "." / "ledger")
    changed = replace(deployment, reply_timeout_seconds=9.0, min_available_clients=2, ledger=ledger)
    assert run_plain(grid, deployment) == run_plain(grid, changed) == summary
    assert not grid.pushed


def test_run_without_a_summary_is_not_repeated(tmp_path):
    deployment = make_deployment(tmp_path, rounds=2)
    summary = run_plain(make_grid(tmp_path), deployment)
    (Path(deployment.out) / "summary.json").unlink()
    assert run_plain(make_grid(tmp_path), deployment).variants == summary.variants
    assert charged_rounds(deployment) == 2


def test_directory_with_only_a_run_id_is_reused(tmp_path):
    deployment = make_deployment(tmp_path, rounds=1)
    run_plain(make_grid(), deployment)
    (tmp_path / "other").mkdir()
    shutil.copy(Path(deployment.out) / "run.json", tmp_path / "other" / "run.json")  # as a crash may leave it
    (variant,) = run_plain(make_grid(), replace(deployment, out=str(tmp_path / "other"))).variants
    assert variant.rounds == 1


def test_checkpoint_of_another_model_is_refused(tmp_path):
    deployment = make_deployment(tmp_path)
    run_until_crash(tmp_path, deployment, 2)
    same_size = {"w": np.zeros(3, np.float32), "b": np.ones((2, 3), np.float32)}
    with raises_field("initial_arrays", RunError):
        run_deployment(make_grid(tmp_path), deployment, same_size)


@pytest.mark.parametrize("model", [{}, {"w": np.array([0.0, np.nan], np.float32)}, [np.zeros(3, np.float32)]])
def test_invalid_initial_model_is_refused(tmp_path, model):
    with raises_field("initial_arrays", ModelError):
        run_deployment(make_grid(), make_deployment(tmp_path), model)
    assert not (tmp_path / "run").exists()


def test_missing_ledger_is_refused(tmp_path):
    deployment = make_deployment(tmp_path)
    run_until_crash(tmp_path, deployment, 2)
    Path(deployment.ledger).unlink()
    with pytest.raises(LedgerError):
        run_plain(make_grid(tmp_path), deployment)


def test_older_ledger_is_refused_when_a_client_joins(tmp_path):
    deployment, backup = make_deployment(tmp_path, levels=ALWAYS_SAMPLED, rounds=4, **PRIVATE), tmp_path / "backup"
    grid = make_grid(tmp_path)
    del grid.nodes[107]
    copy_ledger = before_round(1, lambda: shutil.copy(deployment.ledger, backup))
    end = before_round(3, crash)

    def on_push(messages: list[Message]) -> None:
        copy_ledger(messages)
        end(messages)

    grid.on_push = on_push
    with pytest.raises(Crash):
        run_plain(grid, deployment)
    shutil.copy(backup, deployment.ledger)
    with pytest.raises(LedgerError):
        run_plain(make_grid(tmp_path), deployment)

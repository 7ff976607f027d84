"""Runs with other rounds than they were started with: the same to the bit, and no epsilon grows unnoticed."""

from __future__ import annotations

from pathlib import Path

import pytest
from experiment_helpers import assert_same_run, command, files_of, keep_going, tiny
from helpers import raises_field
from msgspec.structs import replace

from fedhdp.errors import RunError
from fedhdp.experiments import Experiment, Interrupted, Progress, Variant, extend, read_experiment, resume, run
from fedhdp.experiments.extension import _state_mechanism
from fedhdp.privacy.budget import Budget
from fedhdp.results import RunDirectory, Summary, VariantDirectory, read_value
from fedhdp.results import store as result_store


def stated(experiment: Experiment, rounds: int) -> Experiment:
    """The experiment with as many rounds, and the noise that was calibrated for its own."""
    mechanism = experiment.build_mechanism()
    groups = tuple(
        replace(config, epsilon=None, noise_multiplier=group.noise_multiplier, weight=group.weight)
        for config, group in zip(experiment.mechanism.groups, mechanism.groups, strict=True)
    )
    return replace(experiment, rounds=rounds, mechanism=replace(experiment.mechanism, groups=groups))


def summary_of(directory: Path) -> Summary:
    return read_value(directory / "summary.json", Summary)


@pytest.fixture(scope="module")
def long_run(tmp_path_factory) -> Path:
    """A run of eight rounds with the noise of four."""
    directory = tmp_path_factory.mktemp("long") / "run"
    run(stated(tiny(rounds=4, evaluate_every=2), 8), directory, keep_going)
    return directory


def test_extended_run_is_the_longer_run_to_the_bit(long_run, tmp_path):
    run(tiny(rounds=4, evaluate_every=2), tmp_path / "run", keep_going)
    summary = extend(tmp_path / "run", 8, keep_going, allow_more_epsilon=True)
    assert_same_run(long_run, tmp_path / "run")
    private, long = summary.variants[1].groups[1], summary_of(long_run).variants[1].groups[1]
    assert (private.epsilon, private.rounds) == (long.epsilon, 8)
    assert private.epsilon_target == 8.0 < private.epsilon
    assert "calibrated for 4 rounds" in summary.variants[1].notes[0]
    assert read_experiment(tmp_path / "run").rounds == 8


@pytest.mark.slow
def test_unfinished_run_is_extended_and_interrupted(long_run, tmp_path):
    def stop(progress: Progress) -> bool:
        return progress.round not in (3, 6)

    with pytest.raises(Interrupted):
        run(tiny(rounds=4, evaluate_every=2), tmp_path / "run", stop)
    with pytest.raises(Interrupted):
        extend(tmp_path / "run", 8, stop, allow_more_epsilon=True)
    resume(tmp_path / "run", keep_going)
    assert_same_run(long_run, tmp_path / "run")


def test_more_epsilon_is_refused_and_nothing_changes(tmp_path):
    run(tiny(rounds=4), tmp_path / "run", keep_going)
    before = files_of(tmp_path / "run")
    with raises_field("rounds", RunError) as caught:
        extend(tmp_path / "run", 8, keep_going)
    assert "private asked for epsilon 8" in str(caught.value)
    done = command("run", "--resume", tmp_path / "run", "--rounds", 8)
    assert (done.code, done.stdout) == (2, "")
    assert files_of(tmp_path / "run") == before
    extend(tmp_path / "run", 5, keep_going, allow_more_epsilon=True)
    with raises_field("rounds", RunError):  # each extension asks again, though the experiment states no epsilon
        extend(tmp_path / "run", 6, keep_going)


def test_epsilons_that_cannot_be_computed_are_no_permission(tmp_path, monkeypatch):
    run(tiny(rounds=2), tmp_path / "run", keep_going)
    extend(tmp_path / "run", 3, keep_going, allow_more_epsilon=True)
    monkeypatch.setattr("fedhdp.experiments.extension.is_accounting_installed", lambda: False)
    before = files_of(tmp_path / "run")
    with raises_field("rounds", RunError):
        extend(tmp_path / "run", 4, keep_going)
    assert files_of(tmp_path / "run") == before


def test_variants_keep_their_noise_and_weights():
    variants = (
        Variant("other epsilon", epsilons={"private": 2.0}),
        Variant("other noise", noise_multipliers={"private": 3.0}),
        Variant("strictest", "dp_fedavg", epsilons={"private": 2.0}),
    )
    groups = tuple(replace(group, weight=None) for group in tiny().mechanism.groups)
    experiment = tiny(variants=variants, mechanism=replace(tiny().mechanism, groups=groups))
    mechanism = experiment.build_mechanism()
    extended = _state_mechanism(experiment, mechanism, 100)
    assert extended.build_mechanism() == mechanism
    assert extended.variant_mechanisms(mechanism) == experiment.variant_mechanisms(mechanism)
    assert all(group.epsilon is None for group in extended.mechanism.groups)


def test_stated_noise_needs_no_permission(tmp_path):
    run(stated(tiny(rounds=4), 4), tmp_path / "run", keep_going)
    assert extend(tmp_path / "run", 5, keep_going).variants[0].rounds == 5


def test_budget_decides_where_there_is_a_ledger(tmp_path):
    budgets = {"private": Budget(12.0, 1e-4)}
    variants = tiny().variants[1:]
    experiment = tiny(rounds=4, noise_seed=None, ledger=str(tmp_path / "l.ledger"), budgets=budgets, variants=variants)
    run(experiment, tmp_path / "run", keep_going)
    [result] = extend(tmp_path / "run", 100, keep_going).variants
    assert 4 < result.rounds < 100
    assert result.stopped is not None
    assert 8 < result.groups[1].epsilon <= 12


def test_run_without_checkpoint_is_refused(tmp_path):
    run(tiny(rounds=2, keep_checkpoint=False), tmp_path / "run", keep_going)
    assert not list(tmp_path.rglob("checkpoint.npz"))
    with raises_field("keep_checkpoint", RunError):
        extend(tmp_path / "run", 8, keep_going, allow_more_epsilon=True)


def test_large_checkpoints_are_kept_on_request_alone(tmp_path, monkeypatch):
    monkeypatch.setattr("fedhdp.experiments.batch.KEPT_CHECKPOINT_BYTES", 100)
    run(tiny(rounds=2), tmp_path / "small", keep_going)
    run(tiny(rounds=2, keep_checkpoint=True), tmp_path / "large", keep_going)
    assert result_store.checkpoint_bytes(tmp_path / "small") == 0 < result_store.checkpoint_bytes(tmp_path / "large")


def test_fewer_rounds_than_completed_are_refused(tmp_path):
    run(tiny(rounds=4), tmp_path / "run", keep_going)
    with raises_field("rounds", RunError):
        extend(tmp_path / "run", 3, keep_going)


@pytest.mark.parametrize("failing", ["write_value", "atomic_write"])
def test_crash_while_extending_loses_nothing(failing, tmp_path, monkeypatch):
    run(tiny(rounds=2), tmp_path / "run", keep_going)
    model = (tmp_path / "run" / "fedhdp" / "model.npz").read_bytes()

    def crash(*_: object) -> None:
        raise OSError("no power")

    with RunDirectory.open(tmp_path / "run"):
        pass
    with monkeypatch.context() as patch:
        patch.setattr(result_store, failing, crash)
        with pytest.raises(OSError, match="no power"):
            extend(tmp_path / "run", 4, keep_going, allow_more_epsilon=True)
    assert resume(tmp_path / "run", keep_going).variants[1].rounds == 2
    assert (tmp_path / "run" / "fedhdp" / "model.npz").read_bytes() == model
    assert extend(tmp_path / "run", 4, keep_going, allow_more_epsilon=True).variants[1].rounds == 4
    assert max(row.round for row in VariantDirectory(tmp_path / "run" / "fedhdp").history()) == 4

"""Experiments as values and as runs on disk: written and read, killed and resumed, paid for, refused where they must be."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace
from rich.console import Console

from fedhdp.cli.run import _print_table
from fedhdp.errors import LedgerError
from fedhdp.experiments import EXPERIMENTS
from fedhdp.experiments.config import Experiment, from_toml, to_toml
from fedhdp.experiments.runner import Interrupted, Progress, resume, run
from fedhdp.mechanism import Mechanism, PrivacyGroup
from fedhdp.privacy import accounting
from fedhdp.privacy.accounting import compose, gaussian_epsilon, privacy_costs, rounds_left
from fedhdp.privacy.ledger import Budget, Ledger
from fedhdp.results import schema as outcome
from fedhdp.results import store as results
from fedhdp.results import tables
from fedhdp.results.schema import GroupResult, Summary, VariantResult
from fedhdp.results.store import DamagedRunError, RunDirectory
from fedhdp.server import ServerOptimizer
from fedhdp.simulation import Simulation

TINY = Path(__file__).parent / "tiny.toml"
FEDHDP = [sys.executable, "-c", "from fedhdp.cli import main; main()"]


def tiny(**changes: object) -> Experiment:
    """The tiny experiment, changed."""
    return replace(from_toml(TINY.read_text(), "tiny.toml"), **changes)


def onwards(progress: Progress) -> bool:
    """Watch nothing."""
    return True


def command(*arguments: object, **others: object) -> subprocess.CompletedProcess[str]:
    """Run the command line as a user does."""
    return subprocess.run([*FEDHDP, *map(str, arguments)], capture_output=True, text=True, **others)  # type: ignore[call-overload]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """The folder of an uninterrupted run."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    run(tiny(), folder, onwards)
    return folder


def same_run(one: Path, other: Path) -> None:
    """Histories and models are the same to the bit."""
    for variant in ("dp-fedavg", "fedhdp"):
        assert (one / variant / "history.csv").read_bytes() == (other / variant / "history.csv").read_bytes()
        a, b = (results.read_arrays(folder / variant / "model.npz") for folder in (one, other))
        assert a.keys() == b.keys()
        for name in a:
            np.testing.assert_array_equal(a[name], b[name])


def small(experiment: Experiment) -> Experiment:
    """A built-in experiment at toy size."""
    groups = tuple(replace(group, clients=6, sampling_rate=0.5) for group in experiment.mechanism.groups)
    data = replace(experiment.data, clients=6 * len(groups), samples=5, test_samples=2, server_test=124)
    training = replace(experiment.training, epochs=1)
    changes = {"rounds": 2, "evaluate_every": 1, "training": training, "data": data}
    return replace(experiment, mechanism=replace(experiment.mechanism, groups=groups), **changes)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_built_in_experiment_runs_and_tells_each_groups_epsilon(name, tmp_path):
    experiment = small(EXPERIMENTS[name]())
    summary = run(experiment, tmp_path / "run", onwards)
    for variant in summary.variants:
        assert 0 <= variant.server_accuracy <= 1
        for group in variant.groups:
            assert 0 <= group.global_accuracy <= 1
            assert 0 <= group.personal_accuracy <= 1
            if group.opted_out:
                assert group.epsilon is None
            elif variant.algorithm == "local_only":  # nothing is sent
                assert (group.epsilon, group.epsilon_pld) == (0.0, 0.0)
            else:
                assert 0 < group.epsilon_pld <= group.epsilon * 1.001
                assert "add or remove one client" in group.epsilon_basis
    header, rows = tables.table(summary.variants)
    assert {len(row) for row in rows} == {len(header)}
    lines = tables.format_table(summary.variants).split("\n")
    assert lines[len(rows) + 2 :] == tables.footnotes(summary.variants)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_written_and_read_is_the_same_value(name):
    experiment = EXPERIMENTS[name]()
    assert from_toml(to_toml(experiment), "x") == experiment


def test_what_is_kept_can_be_run_again_from_there_to_the_bit(whole, tmp_path):
    again = from_toml((whole / "experiment.toml").read_text(), "experiment.toml")
    run(again, tmp_path / "again", onwards)
    same_run(whole, tmp_path / "again")


def test_the_history_is_tidy_and_ends_in_the_summary(whole):
    summary = results.read_value(whole / "summary.json", outcome.Summary)
    rows = results.VariantDirectory(whole / "fedhdp").history()
    assert sorted({row.round for row in rows}) == [4, 8, 12]
    last = {(row.group, row.model, row.metric): row.value for row in rows if row.round == 12}
    fedhdp = summary.variants[1]
    assert last["server", "global", "accuracy"] == fedhdp.server_accuracy
    assert last["private", "personal", "worst_decile"] == fedhdp.groups[1].personal_worst_decile
    assert not (whole / "fedhdp" / "checkpoint.npz").exists()
    assert set(results.read_arrays(whole / "fedhdp" / "model.npz")) == {
        "global/first/b", "global/first/w", "global/rest/b", "global/rest/w"}  # fmt: skip


def test_every_clients_score_is_kept_and_their_means_are_the_tables(whole):
    scores = results.read_arrays(whole / "fedhdp" / "scores.npz")
    assert {name: array.shape for name, array in scores.items()} == {"global": (20,), "personal": (20,)}
    (variant,) = (one for one in results.read_value(whole / "summary.json", Summary).variants if one.name == "FedHDP")
    for group, clients in zip(variant.groups, (slice(0, 5), slice(5, 20))):
        assert scores["global"][clients].mean() == pytest.approx(group.global_accuracy, abs=1e-6)
        assert scores["personal"][clients].mean() == pytest.approx(group.personal_accuracy, abs=1e-6)


def test_a_wanted_epsilon_is_kept(whole):
    summary = results.read_value(whole / "summary.json", outcome.Summary)
    private = summary.variants[1].groups[1]
    assert 7.9 < private.epsilon_pld <= 8.0
    assert private.noise_multiplier > 0


def test_a_wanted_epsilon_is_kept_at_each_groups_own_delta():
    _, private = tiny().mechanism.groups
    groups = tuple(
        replace(private, name=name, epsilon=3.0, delta=delta, weight=1.0) for name, delta in (("a", None), ("b", 1e-6))
    )
    chosen = replace(tiny().mechanism, groups=groups).mechanism(12, 1e-4)
    for group, delta in zip(chosen.groups, (1e-4, 1e-6)):
        assert group.noise_multiplier > 0
        assert 2.97 <= gaussian_epsilon(group.noise_multiplier, group.sampling_rate, 12, delta, "pld") <= 3.0


def test_an_epsilon_is_told_at_its_groups_own_delta(tmp_path):
    open_, private = tiny().mechanism.groups
    mechanism = replace(tiny().mechanism, groups=(open_, replace(private, delta=1e-6)))
    experiment = tiny(mechanism=mechanism, rounds=2, variants=tiny().variants[1:])
    group = run(experiment, tmp_path / "run", onwards).variants[0].groups[1]
    spent = privacy_costs(mechanism.build(2, experiment.delta), 2)["private"]
    assert group.delta == 1e-6
    assert group.epsilon == pytest.approx(compose([spent], 1e-6))
    assert group.epsilon_pld == pytest.approx(compose([spent], 1e-6, "pld"))
    assert "delta 1e-06" in group.epsilon_basis


def test_what_a_watcher_is_told_is_what_the_rounds_so_far_have_cost(tmp_path):
    experiment = tiny(variants=tiny().variants[1:], evaluate_every=5)
    told = {}
    run(experiment, tmp_path / "run", lambda progress: told.update({progress.round: progress.epsilon()}) or True)
    mechanism = experiment.mechanism.build(experiment.rounds, experiment.delta)
    mechanism = experiment.variants[0].mechanism(mechanism)
    assert told.pop(0) == {}
    assert list(told) == list(range(1, 13))
    for rounds, epsilon in told.items():
        price = compose([privacy_costs(mechanism, rounds)["private"]], experiment.delta)
        assert epsilon == {"opted out": (math.inf, math.inf), "private": (price, price)}
    assert told[1]["private"] < told[4]["private"] < told[12]["private"]


def test_a_run_killed_at_any_moment_goes_on_to_the_same_end_to_the_bit(whole, tmp_path):
    folder = tmp_path / "killed"
    process = subprocess.Popen([*FEDHDP, "run", str(TINY), "--out", str(folder)], stderr=subprocess.DEVNULL)
    kept, history = folder / "dp-fedavg" / "checkpoint.npz", folder / "fedhdp" / "history.csv"
    _kill_when(process, kept.exists)
    for path in (history, kept):
        before = path.stat().st_mtime_ns
        process = subprocess.Popen([*FEDHDP, "run", "--resume", str(folder)], stderr=subprocess.DEVNULL)
        _kill_when(process, lambda path=path, before=before: path.exists() and path.stat().st_mtime_ns != before)
    assert not (folder / "summary.json").exists()
    with open(history, "a") as torn:
        torn.write("12,server,glo")  # as if it had been killed in the middle of a line
    done = command("run", "--resume", folder, "--json", check=True)
    assert json.loads(done.stdout)["experiment"] == "tiny"
    same_run(whole, folder)


def _kill_when(process: subprocess.Popen, ready) -> None:  # type: ignore[no-untyped-def]
    deadline = time.monotonic() + 120
    while not ready() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()


def _under_way(folder: Path) -> subprocess.Popen[str]:
    """A long run in a process of its own, once it has trained for some rounds."""
    longer = folder.with_suffix(".toml")
    longer.write_text(to_toml(tiny(rounds=100_000, checkpoint_seconds=1e9)))
    process = subprocess.Popen([*FEDHDP, "run", str(longer), "--out", str(folder)], stderr=subprocess.PIPE, text=True)
    history, deadline = folder / "dp-fedavg" / "history.csv", time.monotonic() + 120
    while not (history.exists() and history.stat().st_size > 100) and time.monotonic() < deadline:
        time.sleep(0.05)
    return process


def test_ctrl_c_stops_after_the_round_with_a_checkpoint_and_says_how_to_go_on(whole, tmp_path):
    folder = tmp_path / "stopped"
    process = _under_way(folder)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert f"fedhdp run --resume {folder}" in said
    assert "Traceback" not in said
    assert int(results.read_arrays(folder / "dp-fedavg" / "checkpoint.npz")["round"]) > 0


def test_ctrl_c_twice_stops_at_once_without_a_crash(tmp_path):
    process = _under_way(tmp_path / "run")
    os.kill(process.pid, signal.SIGSTOP)  # so that both arrive in one round
    for _ in range(2):
        process.send_signal(signal.SIGINT)
    os.kill(process.pid, signal.SIGCONT)
    time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert f"to go on: fedhdp run --resume {tmp_path / 'run'}" in said
    assert "Traceback" not in said


def test_a_watcher_that_says_no_interrupts_and_the_run_goes_on_from_there(whole, tmp_path):
    folder = tmp_path / "run"
    with pytest.raises(Interrupted):
        run(tiny(checkpoint_seconds=1e9), folder, lambda progress: progress.round < 7)
    seen = []
    resume(folder, lambda progress: seen.append(progress) or True)
    assert [(p.variant, p.round) for p in seen[:3]] == [
        ("DP-FedAvg", 0),
        ("DP-FedAvg and 1 more", 0),
        ("DP-FedAvg and 1 more", 8),
    ]
    same_run(whole, folder)


def test_a_runs_folder_is_priced_by_its_name_and_not_run_without_saying_how(whole):
    priced, again = command("account", whole, "--json"), command("account", whole / "experiment.toml", "--json")
    assert (priced.returncode, priced.stdout) == (0, again.stdout)
    refused = command("run", whole)
    assert refused.returncode == 2
    assert f"fedhdp run --resume {whole}; to run it again: fedhdp run {whole}/experiment.toml" in refused.stderr


def test_a_finished_run_is_not_run_again(whole):
    before = (whole / "summary.json").read_bytes()
    summary = resume(whole, lambda progress: pytest.fail("it ran"))
    assert summary.variants[0].name == "DP-FedAvg"
    assert (whole / "summary.json").read_bytes() == before


def test_every_round_is_charged_before_it_is_played_and_resuming_charges_what_is_run_again(tmp_path):
    path = tmp_path / "population.ledger"
    folder = tmp_path / "run"
    experiment = tiny(ledger=str(path), noise_seed=None, checkpoint_seconds=1e9, variants=tiny().variants[1:])
    charged = []

    def watch(progress: Progress) -> bool:
        if progress.round > 0:
            with Ledger(path, read_only=True) as ledger:
                charged.append((progress.round, ledger.runs()[0].charged))
        return progress.round != 5

    with pytest.raises(Interrupted):
        run(experiment, folder, watch)
    assert charged == [(n, n) for n in range(1, 6)]
    resume(folder, onwards)
    with Ledger(path, read_only=True) as ledger:
        assert ledger.runs()[0].charged == 12
        spent = compose(ledger.costs("private"), 1e-4, "pld")
    summary = results.read_value(folder / "summary.json", outcome.Summary)
    assert spent == pytest.approx(summary.variants[0].groups[1].epsilon_pld)


def test_a_budget_stops_a_run_before_the_round_that_would_pass_it_and_its_results_are_kept(tmp_path):
    path = tmp_path / "population.ledger"
    budget = Budget(5.0, 1e-4)
    experiment = tiny(ledger=str(path), noise_seed=None, budgets={"private": budget}, variants=tiny().variants[1:])
    left = []
    summary = run(experiment, tmp_path / "run", lambda progress: left.append(progress.left().get("private")) or True)
    variant = summary.variants[0]
    assert 0 < variant.rounds < 12
    assert "would exceed the budget of 'private', epsilon 5" in variant.stopped
    assert variant.server_accuracy is not None
    assert left[-1] < 12
    with Ledger(path, read_only=True) as ledger:
        assert compose(ledger.costs("private"), 1e-4) <= 5.0
        assert ledger.runs()[0].charged == variant.rounds
    again = run(experiment, tmp_path / "again", onwards)  # another run finds nothing left
    assert again.variants[0].rounds == 0
    assert (tmp_path / "again" / "fedhdp" / "model.npz").exists()


def test_a_watcher_is_told_how_many_rounds_the_ledger_has_left(tmp_path):
    path, budget = tmp_path / "population.ledger", Budget(20.0, 1e-4)
    experiment = tiny(
        ledger=str(path), noise_seed=None, budgets={"private": budget}, variants=tiny().variants[1:], rounds=4
    )
    once = privacy_costs(experiment.mechanism.build(4, experiment.delta))["private"]
    told, wanted = [], []

    def watch(progress: Progress) -> bool:
        if progress.round > 0:
            with Ledger(path, read_only=True) as ledger:
                wanted.append({"private": rounds_left(ledger.costs("private"), once, budget)})
            told.append(progress.left())
        return True

    run(experiment, tmp_path / "run", watch)
    assert told == wanted
    assert told[0]["private"] == told[-1]["private"] + 3 > 3


def test_a_later_run_tightens_a_promised_budget_and_never_loosens_it(tmp_path):
    path = tmp_path / "population.ledger"
    wanted = [(5.0, 1e-4), (9.0, 1e-4), (5.0, 1e-3), (9.0, 1e-6), (3.0, 1e-3), (4.0, 1e-5)]
    kept = []
    for number, budget in enumerate(wanted):
        budgets = {"private": Budget(*budget)}
        experiment = tiny(ledger=str(path), noise_seed=None, budgets=budgets, variants=tiny().variants[1:], rounds=1)
        run(experiment, tmp_path / f"run {number}", onwards)
        with Ledger(path, read_only=True) as ledger:
            kept.append(msgspec.structs.astuple(ledger.budget("private")))
    assert kept == [(5.0, 1e-4)] * 3 + [(5.0, 1e-6), (3.0, 1e-6), (3.0, 1e-6)]


def test_noise_that_can_be_computed_again_is_charged_as_none(tmp_path):
    path, budget = tmp_path / "population.ledger", {"private": Budget(1e6, 1e-4)}
    experiment = tiny(ledger=str(path), noise_seed=1, variants=tiny().variants[1:], rounds=2)
    (variant,) = run(experiment, tmp_path / "run", onwards).variants
    assert variant.repeatable
    with Ledger(path, read_only=True) as ledger:
        assert compose(ledger.costs("private"), 1e-4) == math.inf
    (variant,) = run(replace(experiment, budgets=budget, noise_seed=None), tmp_path / "later", onwards).variants
    assert variant.rounds == 0
    assert "would exceed the budget of 'private'" in variant.stopped


def test_a_run_that_its_ledger_refuses_leaves_nothing_behind(tmp_path):
    paying = tiny(ledger=str(tmp_path / "ledger"), noise_seed=None, rounds=1)
    run(paying, tmp_path / "one", onwards)
    with pytest.raises(LedgerError, match="use another file"):
        run(replace(paying, seed=9), tmp_path / "two", onwards)
    assert not (tmp_path / "two").exists()


def test_a_resume_that_is_refused_can_be_made_good(tmp_path):
    ledger, old = tmp_path / "ledger", tmp_path / "old"
    paying = tiny(ledger=str(ledger), noise_seed=None, rounds=8, evaluate_every=1, checkpoint_seconds=1e6)

    def until_the_fifth(progress: Progress) -> bool:
        if progress.round == 3:
            shutil.copy(ledger, old)
        if progress.round == 5:
            raise KeyboardInterrupt  # a crash: shown, and no checkpoint
        return True

    with pytest.raises(KeyboardInterrupt):
        run(replace(paying, variants=paying.variants[1:]), tmp_path / "run", until_the_fifth)
    kept = shutil.copy(ledger, tmp_path / "kept")
    shutil.copy(old, ledger)
    for _ in range(2):
        with pytest.raises(LedgerError, match="has completed 5 rounds, but only 3 are charged"):
            resume(tmp_path / "run", onwards)
    shutil.copy(kept, ledger)
    (variant,) = resume(tmp_path / "run", onwards).variants
    assert (variant.rounds, variant.groups[1].rounds) == (8, 13)


def test_variants_that_memory_parts_are_still_drawn_the_same_cohorts_and_with_a_ledger_each_its_own(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("fedhdp.experiments.runner.personal_bytes_limit", lambda: 0)
    drawn, draw = [], Simulation.draw_cohort

    def watched(simulation: Simulation, round: int) -> np.ndarray:
        drawn.append((round, *draw(simulation, round)))
        return np.array(drawn[-1][1:])

    monkeypatch.setattr(Simulation, "draw_cohort", watched)
    first, last = tiny().variants
    alone = tiny(noise_seed=None, rounds=4, variants=(replace(first, algorithm="non_private"), last))
    run(alone, tmp_path / "paired", onwards)
    assert drawn[:4] == drawn[4:]
    assert len(drawn) == 8
    alone = replace(alone, variants=tiny().variants)
    drawn.clear()
    run(replace(alone, ledger=str(tmp_path / "ledger")), tmp_path / "paid", onwards)
    assert len(drawn) == 8
    assert drawn[:4] != drawn[4:]


def test_another_population_has_a_ledger_of_its_own(tmp_path):
    path = tmp_path / "population.ledger"
    experiment = tiny(ledger=str(path), noise_seed=None, variants=tiny().variants[1:], rounds=1)
    run(experiment, tmp_path / "run", onwards)
    run(replace(experiment, data=replace(experiment.data, validation=0.2)), tmp_path / "same clients", onwards)
    others = {
        "seed": replace(experiment, seed=5),
        "data": replace(experiment, data=replace(experiment.data, samples=9)),
    }
    for name, other in others.items():
        with pytest.raises(ValueError, match=r"its clients are those of handwriting \(.*\), seed \d+, not of"):
            run(other, tmp_path / name, onwards)


def test_a_promise_is_not_passed_by_under_another_name_after_a_variant_in_which_nobody_chose(tmp_path):
    path = tmp_path / "population.ledger"
    with Ledger(path) as ledger:
        ledger.promise("privat", 2.0, 1e-4)  # the group is called private
    local = replace(tiny().variants[0], name="alone", algorithm="local_only")
    fixed = replace(tiny().mechanism, clip=1.0)
    experiment = tiny(
        ledger=str(path), noise_seed=None, mechanism=fixed, variants=(local, tiny().variants[1]), rounds=1
    )
    with pytest.raises(
        ValueError, match="'privat' was promised a budget and has not been in a run, while 'private' is new"
    ):
        run(experiment, tmp_path / "run", onwards)
    with Ledger(path, read_only=True) as ledger:
        assert ledger.groups() == ("privat",)


def test_training_alone_costs_nothing_and_training_without_noise_is_not_charged_to_who_chose_some(tmp_path):
    path = tmp_path / "population.ledger"
    local = replace(tiny().variants[0], name="alone", algorithm="local_only")
    fixed = replace(tiny().mechanism, clip=1.0)
    experiment = tiny(ledger=str(path), noise_seed=None, mechanism=fixed, variants=(local,), rounds=1)
    (variant,) = run(experiment, tmp_path / "run", onwards).variants
    assert [group.epsilon for group in variant.groups if group.name == "private"] == [0.0]
    plain = replace(local, name="plain", algorithm="non_private")
    with pytest.raises(ValueError, match="plain gives 'private' no noise"):
        run(replace(experiment, variants=(plain,)), tmp_path / "plain", onwards)
    with Ledger(path, read_only=True) as ledger:
        assert compose(ledger.costs("private"), 1e-4) == 0


def test_a_run_that_crashed_before_its_first_checkpoint_goes_on_with_the_ledger_that_knows_its_rounds(tmp_path):
    path, old = tmp_path / "population.ledger", tmp_path / "old"
    one = tiny(
        ledger=str(path), noise_seed=None, variants=tiny().variants[1:], evaluate_every=1, checkpoint_seconds=1e6
    )

    def crash(progress: Progress) -> bool:
        if progress.round == 2:
            shutil.copy(path, old)
        if progress.round == 4:
            raise KeyError
        return True

    with pytest.raises(KeyError):
        run(one, tmp_path / "run", crash)
    path.unlink()
    with pytest.raises(ValueError, match="is gone"):
        resume(tmp_path / "run", onwards)
    shutil.copy(old, path)
    with pytest.raises(ValueError, match="has completed 4 rounds, but only"):
        resume(tmp_path / "run", onwards)


def test_a_ledger_is_beside_its_file_whoever_runs_it_from_where_and_is_not_made_anew_in_between(tmp_path):
    file = tmp_path / "sub" / "mine.toml"
    file.parent.mkdir()
    file.write_text(TINY.read_text().replace("noise_seed = 2", 'ledger = "population.ledger"'))
    said = command("run", file, "--rounds", 1, "--out", tmp_path / "run", cwd=tmp_path)
    assert said.returncode == 0
    assert "sub/population.ledger: a new ledger" in said.stderr
    assert not (tmp_path / "population.ledger").exists()
    (tmp_path / "run" / "summary.json").unlink()
    shutil.rmtree(tmp_path / "run" / "dp-fedavg")
    (file.parent / "population.ledger").rename(tmp_path / "moved")
    with pytest.raises(ValueError, match=r"population\.ledger is gone"):
        resume(tmp_path / "run", onwards)
    assert not (file.parent / "population.ledger").exists()


def test_a_run_that_cannot_begin_leaves_nothing_behind(tmp_path):
    (tmp_path / "no.ledger").write_text("this is no ledger " * 100)
    with pytest.raises(ValueError, match="not a ledger"):
        run(tiny(ledger=str(tmp_path / "no.ledger")), tmp_path / "run", onwards)
    assert not (tmp_path / "run").exists()


def test_names_are_shown_as_they_are_also_in_a_narrow_terminal(whole, capsys, monkeypatch):
    summary = results.read_value(whole / "summary.json", outcome.Summary)
    names = ["[/x] odd", "r=0.5, [bold]other"]
    summary = replace(summary, variants=[replace(v, name=n) for v, n in zip(summary.variants, names)])
    for width in (200, 60):
        monkeypatch.setattr("fedhdp.cli.run.Console", lambda width=width, **others: Console(width=width, **others))
        monkeypatch.setattr("fedhdp.cli.run.sys.stdout.isatty", lambda: True, raising=False)
        _print_table(summary)
        said = capsys.readouterr().out
        assert all(name in said for name in names)
        accuracy = f"{100 * summary.variants[0].server_accuracy:.2f}"
        assert accuracy in said


def test_a_run_may_go_on_without_the_group_whose_budget_is_spent(tmp_path):
    path = tmp_path / "population.ledger"
    experiment = tiny(
        ledger=str(path),
        noise_seed=None,
        budgets={"private": Budget(5.0, 1e-4)},
        on_budget_exhausted="drop_group",
        variants=tiny().variants[1:],
    )
    variant = run(experiment, tmp_path / "run", onwards).variants[0]
    opted_out, private = variant.groups
    assert (variant.rounds, variant.stopped) == (12, None)
    assert opted_out.rounds == 12
    assert 0 < private.rounds < 12
    assert private.epsilon <= 5.0
    with Ledger(path, read_only=True) as ledger:
        assert compose(ledger.costs("private"), 1e-4) <= 5.0


def of_three(ledger: Path, noise: dict[str, float], budgets: dict[str, float]) -> Experiment:
    """The tiny experiment with its private clients in two groups, left out when what they may spend is spent."""
    chosen = tiny().mechanism
    open_, private = chosen.groups
    groups = [
        replace(private, name=name, clients=clients, epsilon=None, noise_multiplier=noise[name], weight=1.0)
        for name, clients in zip(noise, (10, 5))
    ]
    return tiny(
        mechanism=replace(chosen, groups=(open_, *groups)),
        ledger=str(ledger),
        noise_seed=None,
        budgets={name: Budget(epsilon, 1e-4) for name, epsilon in budgets.items()},
        on_budget_exhausted="drop_group",
        variants=tiny().variants[1:],
    )


def test_groups_are_left_out_one_after_the_other(tmp_path):
    experiment = of_three(tmp_path / "population.ledger", {"one": 2.0, "two": 2.0}, {"one": 0.9, "two": 1.2})
    rounds = [group.rounds for group in run(experiment, tmp_path / "run", onwards).variants[0].groups]
    assert 0 < rounds[1] < rounds[2] < rounds[0] == 12


def test_variants_that_sample_in_two_ways_are_not_charged_in_one_ledger(tmp_path):
    dp_fedavg, fedhdp = tiny().variants
    both = (dp_fedavg, replace(fedhdp, sampling="fixed"))
    experiment = tiny(ledger=str(tmp_path / "population.ledger"), noise_seed=None, variants=both)
    with pytest.raises(ValueError, match=r"variants sample in several ways \(fixed, poisson\)"):
        run(experiment, tmp_path / "run", onwards)
    assert not (tmp_path / "population.ledger").exists()
    run(replace(experiment, variants=both[:1]), tmp_path / "one", onwards)
    with pytest.raises(LedgerError, match="charged with poisson sampling"):
        run(replace(experiment, variants=both[1:]), tmp_path / "other", onwards)
    with Ledger(experiment.ledger, read_only=True) as ledger:
        assert [one.charged for one in ledger.runs()] == [12, 0]


def test_the_epsilons_of_a_run_that_left_a_group_out_are_those_of_what_was_really_run(tmp_path):
    experiment = of_three(tmp_path / "population.ledger", {"relaxed": 0.7, "strict": 3.0}, {"strict": 0.8})
    variant = run(experiment, tmp_path / "run", onwards).variants[0]
    assert 0 < variant.groups[2].rounds < variant.groups[1].rounds == 12
    with Ledger(experiment.ledger, read_only=True) as ledger:
        for group in variant.groups[1:]:
            assert group.epsilon == pytest.approx(compose(ledger.costs(group.name), 1e-4), rel=1e-9)


def test_a_ledger_that_cannot_be_used_means_no_round(tmp_path):
    (tmp_path / "no.ledger").write_text("this is no ledger " * 100)
    said = command("run", TINY, "--out", tmp_path / "run", "--ledger", tmp_path / "no.ledger")
    assert said.returncode == 2
    assert re.fullmatch(r"fedhdp: .*no\.ledger: not a ledger.*\n", said.stderr)
    assert not list((tmp_path / "run").glob("*/history.csv"))


def test_an_output_folder_that_holds_another_run_is_left_alone(whole):
    before = {path: path.read_bytes() for path in whole.rglob("*") if path.is_file()}
    said = command("run", TINY, "--out", whole)
    assert said.returncode == 2
    assert re.fullmatch(
        r"fedhdp: --out .* is not an empty folder; to go on with it: fedhdp run --resume .*\n", said.stderr
    )
    assert {path: path.read_bytes() for path in whole.rglob("*") if path.is_file()} == before


def test_a_folder_that_another_process_writes_to_is_left_alone(tmp_path):
    with pytest.raises(Interrupted):
        run(tiny(), tmp_path / "run", lambda progress: False)
    with results.RunDirectory.open(tmp_path / "run"), pytest.raises(ValueError, match="written by another process"):
        resume(tmp_path / "run", onwards)


DAMAGE = {
    "experiment.toml": b"rounds = ",
    "dp-fedavg/checkpoint.npz": b"PK\x03\x04 half a file",
    "fedhdp/history.csv": b"round,group,model,metric,value\n4,server,global\n8,server,global,accuracy,0.1\n",
    "dp-fedavg/result.json": b'{"name": "DP-FedAvg"',
    "run.json": b"{}",
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_run_folder_is_refused_in_one_line_and_nothing_is_lost(name, tmp_path):
    folder = tmp_path / "run"
    with pytest.raises(Interrupted):
        run(tiny(), folder, lambda progress: progress.round != 6)
    (folder / name).write_bytes(DAMAGE[name])
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(DamagedRunError, match=re.escape(name)) as error:
        resume(folder, onwards)
    assert "\n" not in str(error.value)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(DamagedRunError, match="holds no run"):
        resume(tmp_path, onwards)


def test_a_half_written_file_is_never_read_as_a_whole_one(tmp_path, monkeypatch):
    path = tmp_path / "value.json"
    results.atomic_write(path, b'"old"')
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("killed here")))
    with pytest.raises(OSError, match="killed here"):
        results.atomic_write(path, b'"new"')
    assert path.read_bytes() == b'"old"'


BAD = {
    "an unknown key": ("seed = 1", "sede = 1", r"unknown field sede = 1; did you mean seed\?"),
    "an unknown key in a group": (
        "weight = 0.1",
        "wieght = 0.1",
        r"unknown field mechanism\.groups\[1\]\.wieght = 0\.1",
    ),
    "a wrong type": ("epochs = 1", 'epochs = "many"', r"training\.epochs must be a whole number, got 'many'"),
    "a table that is none": ("rounds = 12", "rounds = 12\nserver = 1", r"server must be a table, got 1"),
    "a key left out": ("rounds = 12", "", r"rounds is missing$"),
    "a key of a group left out": ("clients = 15\n", "", r"mechanism\.groups\[1\]\.clients is missing"),
    "a number or a table": ("hidden = 8", "hidden = [8]", r"model\.hidden must be a whole number, got \[8\]"),
    "a negative number": ("noise_multiplier = 0.0", "noise_multiplier = -1.0", r"noise_multiplier must be .*got -1\.0"),
    "not a number": ("learning_rate = 0.1", "learning_rate = nan", r"learning_rate must be .*got nan"),
    "a sampling rate above 1": ("sampling_rate = 0.3", "sampling_rate = 1.5", r"sampling_rate must be .*got 1\.5"),
    "groups that do not add up": ("clients = 15", "clients = 14", r"add up to data\.clients, 20, got 19"),
    "a dataset that does not exist": (
        'name = "handwriting"',
        'name = "cats"',
        r"data\.name must be one of handwriting.*'cats'",
    ),
    "a model that does not exist": (
        'name = "mlp"',
        'name = "llm"',
        r"model\.name must be one of mlp, cnn, linear, python, got 'llm'",
    ),
    "an algorithm that does not exist": (
        '"dp_fedavg"',
        '"dpfedavg"',
        r"algorithm must be one of fedhdp.*got 'dpfedavg'",
    ),
    "noise and epsilon both": (
        "epsilon = 8.0",
        "epsilon = 8.0\nnoise_multiplier = 1.0",
        "either a noise_multiplier or an epsilon",
    ),
    "neither noise nor epsilon": ("epsilon = 8.0", "", "either a noise_multiplier or an epsilon"),
    "a group that does not exist": (
        'algorithm = "fedhdp"',
        'algorithm = "fedhdp"\nweights = {nobody = 1.0}',
        "weights must be .*'nobody'",
    ),
    "a budget without a ledger": (
        "[data]",
        "[budgets.private]\nepsilon = 1.0\ndelta = 1e-4\n[data]",
        "budgets must be with a ledger",
    ),
    "a word that is not one of some": (
        "[data]",
        '[data]\nsplit = "one-digit"',
        r"data\.split must be one of .*'one_digit'",
    ),
    "two variants with one folder": ('"DP-FedAvg"', '"fedHDP"', r"variants whose names differ"),
    "no TOML": ("rounds = 12", "rounds = = 12", "is no TOML"),
    "a layer without units": ("hidden = 8", "hidden = 0", "hidden must be at least 1, got 0"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_input_is_one_line_that_names_the_field_and_the_value(what):
    old, new, expected = BAD[what]
    text = TINY.read_text()
    assert old in text
    with pytest.raises(ValueError, match=expected) as error:
        from_toml(text.replace(old, new, 1), "bad.toml")
    assert str(error.value).startswith("bad.toml")
    assert "\n" not in str(error.value)


def test_bad_input_at_the_command_line_exits_2_and_writes_nothing(tmp_path):
    bad = tmp_path / "bad.toml"
    bad.write_text(TINY.read_text().replace("sampling_rate = 0.3", "sampling_rate = 1.5", 1))
    cases = {
        ("run", bad, "--out", tmp_path / "run"): "sampling_rate must be between 0 and 1, got 1.5",
        ("run", "nosuch", "--out", tmp_path / "run"): "there is no experiment 'nosuch'; there are quickstart, ",
        ("run", tmp_path / "missing.toml", "--out", tmp_path / "run"): "missing.toml cannot be read: No such file",
        ("run", TINY, "--rounds", -3, "--out", tmp_path / "run"): "rounds must be at least 1, got -3",
        ("run", TINY, "--seed", -1, "--out", tmp_path / "run"): "seed must be at least 0",
        ("run", "--resume", tmp_path): "holds no run",
        ("rnu",): "No such command 'rnu'. Did you mean 'run'?\n",
        ("run", "--resume", tmp_path, "--rounds", 5): "--resume goes on with what was begun",
    }
    for arguments, expected in cases.items():
        said = command(*arguments)
        assert said.returncode == 2, said
        assert said.stdout == ""
        assert said.stderr.startswith("fedhdp: ")
        assert said.stderr.count("\n") == 1
        assert expected in said.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.toml"]


def test_json_prints_one_document_and_nothing_else_on_standard_output(tmp_path):
    said = command("run", TINY, "--out", tmp_path / "run", "--rounds", 3, "--json", check=True)
    document = json.loads(said.stdout)
    assert set(document) >= {"experiment", "seconds", "variants"}
    variant = document["variants"][1]
    assert set(variant) >= {"name", "server_accuracy", "groups"}
    needed = {"name", "clients", "global_accuracy", "personal_accuracy", "epsilon"}
    assert all(set(group) >= needed for group in variant["groups"])
    assert variant["groups"][0]["epsilon"] is None
    assert variant["groups"][1]["epsilon"] > 0
    assert "[1/2] DP-FedAvg and 1 more: round 3/3" in said.stderr  # plain lines where there is no terminal
    assert "\x1b" not in said.stderr


def test_the_table_goes_to_standard_output_and_tells_what_its_epsilons_rest_on(tmp_path):
    said = command("run", TINY, "--out", tmp_path / "run", "--rounds", 3, check=True)
    assert "FedHDP" in said.stdout
    assert "ε private" in said.stdout
    assert re.search(
        r"delta 0\.0001, q 0\.3, z [\d.]+, 3 rounds, Poisson sampling, add or remove one client, RDP", said.stdout
    )
    assert "repeatable, and therefore not private" in said.stdout


def test_several_seeds_are_run_one_after_the_other_shown_as_means_and_gone_on_with(tmp_path):
    several = ("run", TINY, "--rounds", 2, "--out", tmp_path / "runs")
    two = command(*several, "--seeds", "2", "--json")
    found = json.loads(two.stdout)
    assert list(found) == ["0", "1"]
    for seed in "01":
        kept = from_toml((tmp_path / f"runs/seed-{seed}/experiment.toml").read_text(), "kept")
        assert (kept.seed, kept.noise_seed) == (int(seed), 2 + int(seed))
    first = (tmp_path / "runs/seed-0/summary.json").stat().st_mtime_ns
    three = command(*several, "--seeds", "3")
    assert (tmp_path / "runs/seed-0/summary.json").stat().st_mtime_ns == first
    assert "mean of 3 seeds ± half of its 95% interval" in three.stdout
    seeds = [results.read_value(tmp_path / f"runs/seed-{seed}/summary.json", Summary) for seed in range(3)]
    accuracies = [100 * seed.variants[1].server_accuracy for seed in seeds]
    half = 4.3027 * statistics.stdev(accuracies) / 3**0.5  # Student's, of two degrees of freedom
    assert f" {statistics.fmean(accuracies):.2f} ±{half:.2f} " in three.stdout
    assert three.stdout.count("ε private = ") == 1
    refused = {
        ("--seeds", "2", "--seed", "1"): "it takes no --seed",
        ("--seeds", "0"): "at least one seed",
        ("--seeds", "2", "--ledger", tmp_path / "ledger"): "every seed is another population",
        ("--seeds", "2", "--rounds", "3"): "seed-0 was made by another experiment",
    }
    for options, said in refused.items():
        done = command(*several, *options)
        assert (done.returncode, said in done.stderr) == (2, True)
    assert not (tmp_path / "ledger").exists()


def test_what_was_asked_for_is_in_the_table():
    groups = [GroupResult(name, 5, True, 0.0, 0.1, 1.0, 0.1, 0.5, 0.01) for name in ("a", "b")]
    plain = VariantResult("plain", "fedhdp", 3, 1.0, False, groups, server_accuracy=0.5)
    header, _ = tables.table([plain])
    assert header == ["algorithm", "Acc_g", "g: b", "g: a", "Δ_g", "ε b", "ε a"]
    chosen = [replace(group, chosen_accuracy=0.75, chosen_variance=0.02) for group in groups]
    header, (row,) = tables.table([replace(plain, server_average_accuracy=0.625, groups=chosen)])
    assert header == ["algorithm", "Acc_g", "Acc_avg", "g: b", "g: a", "Δ_g", "c: b", "c: a", "Δ_c", "ε b", "ε a"]
    assert (row[2], row[6], row[8]) == ("62.50", "75.00 (2.00)", "0.00")
    with pytest.raises(ValueError, match="variants must be one or more"):
        tables.format_table([])


def test_list_and_version_answer():
    listed = command("list", check=True).stdout
    assert [line.split()[0] for line in listed.splitlines()] == list(EXPERIMENTS)
    assert re.fullmatch(r"fedhdp \d+\.\d+\.\d+\n", command("--version", check=True).stdout)


def test_variants_that_differ_in_pulls_alone_share_one_global_training(tmp_path):
    (variant,) = (one for one in tiny().variants if one.name == "FedHDP")
    pulls = {f"pull {pull:g}": {"private": pull, "opted out": pull} for pull in (0.0, 0.5, 5.0)}
    variants = tuple(replace(variant, name=name, pulls=pull) for name, pull in pulls.items())
    data = replace(tiny().data, validation=0.4, test_samples=50)
    experiment = tiny(variants=variants, noise_seed=None, data=data)
    summary = run(experiment, tmp_path / "run", onwards)  # with noise nobody can draw again
    models = [results.read_arrays(tmp_path / "run" / results.slug(name) / "model.npz") for name in pulls]
    for other in models[1:]:
        for name in models[0]:
            np.testing.assert_array_equal(models[0][name], other[name])
    personal = [[group.personal_accuracy for group in one.groups] for one in summary.variants]
    assert len({tuple(accuracies) for accuracies in personal}) > 1
    for number, group in enumerate(summary.variants[0].groups):
        assert group.chosen_accuracy is not None
        assert {one.groups[number].chosen_accuracy for one in summary.variants} == {group.chosen_accuracy}


def test_a_variant_may_have_its_own_server_and_training_on_the_same_cohorts(tmp_path):
    base = tiny(rounds=3)
    plain, other = base.variants[1], replace(base.variants[1], name="other")
    changes = {"server": {"momentum": 0.9, "learning_rate": 0.3}, "training": {"epochs": 2}}
    several = replace(base, variants=(plain, replace(other, **changes)))
    assert from_toml(to_toml(several), "x") == several
    run(several, tmp_path / "together", onwards)
    alone = replace(base, variants=(plain,))
    run(alone, tmp_path / "plain", onwards)
    run(replace(alone, server=ServerOptimizer("sgd", 0.3, 0.9), training=replace(base.training, epochs=2)),
        tmp_path / "other", onwards)  # fmt: skip
    for name, part in (("fedhdp", "plain"), ("other", "other")):
        models = [
            results.read_arrays(tmp_path / folder / "model.npz") for folder in (f"together/{name}", f"{part}/fedhdp")
        ]
        for array in models[0]:
            np.testing.assert_array_equal(models[0][array], models[1][array])
    for wrong, said in (
        (
            {"server": {"nam": "adam"}},
            "server of 'other': unknown field nam = 'adam'; did you mean name?",
        ),
        ({"training": {"epochs": 0}}, "epochs must be at least 1, got 0"),
        ({"training": {"proximal": 1e9}}, "proximal must be at least 0 and below"),
    ):
        with pytest.raises(ValueError, match=re.escape(said)):
            replace(base, variants=(plain, replace(other, **wrong)))


def test_a_variant_that_draws_other_cohorts_runs_by_itself(tmp_path):
    first, second = tiny().variants
    seen = []
    variants = (first, replace(second, sampling="fixed"), replace(second, name="third"))
    run(tiny(variants=variants), tmp_path / "run", lambda progress: seen.append(progress.variant) or True)
    assert list(dict.fromkeys(seen)) == ["DP-FedAvg", "DP-FedAvg and 1 more", "FedHDP"]


def test_personal_models_on_disk_are_gone_when_a_run_is_done(whole, tmp_path, monkeypatch):
    monkeypatch.setattr("fedhdp.engine.personal_store.personal_bytes_limit", lambda: 0)
    folder, seen = tmp_path / "run", []

    def watch(progress: Progress) -> bool:
        seen.append(list(folder.rglob("personal.bin")))
        return progress.round != 6

    with pytest.raises(Interrupted):
        run(tiny(), folder, watch)
    resume(folder, onwards)
    assert seen[-1]
    assert not list(folder.rglob("personal.bin"))
    one, other = (results.read_value(path / "summary.json", outcome.Summary) for path in (whole, folder))
    for a, b in zip(one.variants, other.variants, strict=True):
        assert [g.personal_accuracy for g in a.groups] == pytest.approx(
            [g.personal_accuracy for g in b.groups], abs=1e-4
        )


def test_with_a_ledger_pulls_are_charged_once_and_trainings_one_by_one(tmp_path):
    first, second = tiny().variants
    both = (
        replace(second, name="weak", pulls={"private": 0.1}),
        replace(second, name="strong", pulls={"private": 2.0}),
    )
    ledger = tmp_path / "ledger.db"
    run(tiny(variants=(first, *both), ledger=str(ledger), rounds=2), tmp_path / "run", onwards)
    with Ledger(ledger) as opened:
        assert [(one.name.split("/")[1], one.charged) for one in opened.runs()] == [("DP-FedAvg", 2), ("weak", 2)]


def test_an_experiment_that_was_changed_cannot_go_on_as_if_it_had_been_run_so(tmp_path):
    def stop_at_2(progress: Progress) -> bool:
        return progress.round < 2

    with pytest.raises(Interrupted):
        run(tiny(), tmp_path / "run", stop_at_2)
    path = tmp_path / "run" / "experiment.toml"
    text = path.read_text()
    path.write_text(text.replace("rounds = 12", "rounds = 14"))
    assert path.read_text() != text
    with pytest.raises(ValueError, match=r"is not what the run was begun with.*fedhdp run .*experiment.toml"):
        resume(tmp_path / "run", onwards)
    path.write_text(text)
    assert resume(tmp_path / "run", onwards).variants[0].rounds == tiny().rounds


def test_rounds_that_were_shown_and_are_played_again_are_paid_for_twice(tmp_path):
    class Crash(Exception):
        """As if the power had gone."""

    def crash_after(round: int):
        def watch(progress: Progress) -> bool:
            if progress.round == round:
                raise Crash
            return True

        return watch

    variants = tiny().variants[1:]
    experiment = tiny(rounds=8, evaluate_every=2, checkpoint_seconds=1e9, variants=variants, noise_seed=None)
    with pytest.raises(Crash):
        run(experiment, tmp_path / "run", crash_after(7))  # six were shown, and no checkpoint was kept
    with pytest.raises(Crash):
        resume(tmp_path / "run", crash_after(5))  # four more
    (variant,) = resume(tmp_path / "run", onwards).variants
    private = next(group for group in variant.groups if not group.opted_out)
    assert (variant.rounds, private.rounds) == (8, 8 + 6 + 4)
    mechanism = experiment.variants[0].mechanism(experiment.mechanism.build(8, experiment.delta))
    assert private.epsilon == accounting.epsilon(mechanism, 18, experiment.delta)[private.name]
    with RunDirectory.open(tmp_path / "run") as folder:
        assert max(row.round for row in folder.variant(variant.name).history()) == 8


@pytest.mark.parametrize("name", ["summary.json", "Run.JSON", "experiment.toml", "long " * 50])
def test_a_variant_cannot_have_the_name_of_a_file_of_the_run(name):
    with pytest.raises(ValueError, match="variant's name must be short, and not that of a file of the run"):
        tiny(variants=(replace(tiny().variants[0], name=name),))


def test_noise_too_small_to_promise_anything_is_told_as_none():
    weak = Mechanism(
        (PrivacyGroup("weak", 10, 0.005, 0.5), PrivacyGroup("strong", 10, 2.0, 0.5, weight=1e-6)), clip=1.0
    )
    weak_group, strong_group = outcome.account_groups(
        weak, lambda name: [privacy_costs(weak, 5)[name]], lambda name: 1e-4
    )
    assert (weak_group.opted_out, strong_group.opted_out) == (True, False)
    read = msgspec.json.decode(msgspec.json.encode(weak_group), type=type(weak_group))
    assert tables._epsilon(read) == "∞"

"""Runs with a ledger: charged before each round, stopped by budgets, refused where the ledger would be wronged."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest
from experiment_helpers import TINY, command, keep_going, tiny
from helpers import raises_field
from msgspec.structs import replace

from fedhdp.errors import ConfigError, FedHDPError, LedgerError, RunError
from fedhdp.experiments import Experiment, Interrupted, Progress, resume, run
from fedhdp.privacy.accounting import compose, rounds_left
from fedhdp.privacy.budget import Budget
from fedhdp.privacy.costs import privacy_costs
from fedhdp.privacy.ledger import Ledger
from fedhdp.results import Summary, read_value


class Crash(Exception):
    """Stands for a loss of power."""


@pytest.fixture
def ledger(tmp_path) -> Path:
    """The path of a ledger that does not exist yet."""
    return tmp_path / "population.ledger"


def charged(ledger: Path, **changes: object) -> Experiment:
    """The tiny experiment with FedHDP alone, secret noise and a ledger."""
    return tiny(**({"ledger": str(ledger), "noise_seed": None, "variants": tiny().variants[1:]} | changes))


def spent(ledger: Path, group: str = "private", delta: float = 1e-4) -> float:
    """A group's epsilon over all runs of a ledger."""
    with Ledger(ledger, read_only=True) as opened:
        return compose(opened.costs(group), delta)


def charged_rounds(ledger: Path) -> list[int]:
    """How many rounds each run of a ledger was charged."""
    with Ledger(ledger, read_only=True) as opened:
        return [entry.charged for entry in opened.runs()]


@pytest.mark.slow
def test_rounds_are_charged_before_they_are_shown(ledger, tmp_path):
    charges = []

    def watch(progress: Progress) -> bool:
        if progress.round > 0:
            charges.append((progress.round, *charged_rounds(ledger)))
        return progress.round != 5

    with pytest.raises(Interrupted):
        run(charged(ledger, checkpoint_seconds=1e9), tmp_path / "run", watch)
    assert charges == [(n, n) for n in range(1, 6)]
    resume(tmp_path / "run", keep_going)
    assert charged_rounds(ledger) == [12]
    summary = read_value(tmp_path / "run" / "summary.json", Summary)
    assert spent(ledger) == pytest.approx(summary.variants[0].groups[1].epsilon)


def test_budget_stops_the_run(ledger, tmp_path):
    experiment = charged(ledger, budgets={"private": Budget(5.0, 1e-4)})
    left = []

    def watch(progress: Progress) -> bool:
        left.append(progress.rounds_left().get("private"))
        return True

    variant = run(experiment, tmp_path / "run", watch).variants[0]
    assert 0 < variant.rounds < 12
    assert "'private'" in variant.stopped
    assert variant.server_accuracy is not None
    assert left[-1] < 12
    assert spent(ledger) <= 5.0
    assert charged_rounds(ledger) == [variant.rounds]
    again = run(experiment, tmp_path / "again", keep_going)  # nothing is left
    assert again.variants[0].rounds == 0
    assert (tmp_path / "again" / "fedhdp" / "model.npz").exists()


def test_a_group_that_asks_for_its_budget_reaches_its_last_round(ledger, tmp_path):
    experiment = charged(ledger, budgets={"private": Budget(8.0, 1e-4)})
    variant = run(experiment, tmp_path / "run", keep_going).variants[0]
    private = variant.groups[1]
    assert (variant.rounds, variant.stopped, private.rounds) == (12, None, 12)
    assert (private.accountant, private.epsilon_target) == ("rdp", 8.0)
    assert 0.99 * 8 <= private.epsilon <= 8
    assert private.epsilon == pytest.approx(spent(ledger))


def test_progress_states_the_rounds_left(ledger, tmp_path):
    budget = Budget(20.0, 1e-4)
    experiment = charged(ledger, budgets={"private": budget}, rounds=4)
    cost = privacy_costs(experiment.build_mechanism())["private"]
    stated, expected = [], []

    def watch(progress: Progress) -> bool:
        if progress.round > 0:
            with Ledger(ledger, read_only=True) as opened:
                expected.append({"private": rounds_left(opened.costs("private"), cost, budget)})
            stated.append(progress.rounds_left())
        return True

    run(experiment, tmp_path / "run", watch)
    assert stated == expected
    assert stated[0]["private"] == stated[-1]["private"] + 3 > 3


def test_later_run_lowers_a_budget_and_never_raises_it(ledger, tmp_path):
    budgets = [(5.0, 1e-4), (9.0, 1e-4), (5.0, 1e-3), (9.0, 1e-6), (3.0, 1e-3), (4.0, 1e-5)]
    recorded = []
    for number, budget in enumerate(budgets):
        run(charged(ledger, budgets={"private": Budget(*budget)}, rounds=1), tmp_path / f"run {number}", keep_going)
        with Ledger(ledger, read_only=True) as opened:
            lowest = opened.budget("private")
            recorded.append((lowest.epsilon, lowest.delta))
    assert recorded == [(5.0, 1e-4)] * 3 + [(5.0, 1e-6), (3.0, 1e-6), (3.0, 1e-6)]


def test_repeatable_noise_is_charged_as_none(ledger, tmp_path):
    experiment = charged(ledger, noise_seed=1, rounds=2)
    assert run(experiment, tmp_path / "run", keep_going).variants[0].repeatable
    assert spent(ledger) == math.inf
    later = replace(experiment, budgets={"private": Budget(1e6, 1e-4)}, noise_seed=None)
    (variant,) = run(later, tmp_path / "later", keep_going).variants
    assert variant.rounds == 0
    assert "'private'" in variant.stopped


def test_refused_run_leaves_no_directory(ledger, tmp_path):
    experiment = charged(ledger, rounds=1)
    run(experiment, tmp_path / "first", keep_going)
    with pytest.raises(LedgerError):
        run(replace(experiment, seed=9), tmp_path / "second", keep_going)
    assert not (tmp_path / "second").exists()


def test_damaged_ledger_is_refused(ledger, tmp_path):
    ledger.write_text("this is no ledger " * 100)
    with pytest.raises(LedgerError):
        run(charged(ledger), tmp_path / "run", keep_going)
    assert not (tmp_path / "run").exists()


def test_resume_with_an_older_ledger_is_refused_until_it_is_restored(ledger, tmp_path):
    old = tmp_path / "old"

    def watch(progress: Progress) -> bool:
        if progress.round == 3:
            shutil.copy(ledger, old)
        if progress.round == 5:
            raise Crash
        return True

    with pytest.raises(Crash):
        run(charged(ledger, rounds=8, evaluate_every=1, checkpoint_seconds=1e6), tmp_path / "run", watch)
    current = shutil.copy(ledger, tmp_path / "current")
    shutil.copy(old, ledger)
    for _ in range(2):
        with pytest.raises(LedgerError) as error:
            resume(tmp_path / "run", keep_going)
        assert "5 rounds" in str(error.value)
    shutil.copy(current, ledger)
    (variant,) = resume(tmp_path / "run", keep_going).variants
    assert (variant.rounds, variant.groups[1].rounds) == (8, 13)


def test_resume_without_the_ledger_is_refused(ledger, tmp_path):
    def crash(progress: Progress) -> bool:
        if progress.round == 4:
            raise Crash
        return True

    with pytest.raises(Crash):
        run(charged(ledger, evaluate_every=1, checkpoint_seconds=1e6), tmp_path / "run", crash)
    ledger.unlink()
    with raises_field("ledger", RunError):
        resume(tmp_path / "run", keep_going)
    assert not ledger.exists()


@pytest.mark.slow
def test_other_population_is_refused(ledger, tmp_path):
    experiment = charged(ledger, rounds=1)
    run(experiment, tmp_path / "run", keep_going)
    run(replace(experiment, data=replace(experiment.data, validation=0.2)), tmp_path / "same clients", keep_going)
    for number, other in enumerate(
        (replace(experiment, seed=5), replace(experiment, data=replace(experiment.data, samples=9)))
    ):
        with pytest.raises(LedgerError):
            run(other, tmp_path / f"other {number}", keep_going)


def test_promise_to_a_misspelled_group_is_not_bypassed(ledger, tmp_path):
    with Ledger(ledger) as opened:
        opened.promise("privat", 2.0, 1e-4)  # the group is called private
    local = replace(tiny().variants[0], name="alone", algorithm="local_only")
    fixed = replace(tiny().mechanism, clip=1.0)
    with pytest.raises(LedgerError):
        run(
            charged(ledger, mechanism=fixed, variants=(local, tiny().variants[1]), rounds=1),
            tmp_path / "run",
            keep_going,
        )
    with Ledger(ledger, read_only=True) as opened:
        assert opened.groups() == ("privat",)


def test_local_training_costs_nothing(ledger, tmp_path):
    local = replace(tiny().variants[0], name="alone", algorithm="local_only")
    experiment = charged(ledger, mechanism=replace(tiny().mechanism, clip=1.0), variants=(local,), rounds=1)
    (variant,) = run(experiment, tmp_path / "run", keep_going).variants
    assert variant.groups[1].epsilon == 0
    plain = replace(local, name="plain", algorithm="non_private")
    with raises_field("variants", ConfigError):  # training without noise is not charged to groups that chose some
        run(replace(experiment, variants=(plain,)), tmp_path / "plain", keep_going)
    assert spent(ledger) == 0


def test_pulls_are_charged_once_and_trainings_separately(ledger, tmp_path):
    first, second = tiny().variants
    weak = replace(second, name="weak", pulls={"private": 0.1})
    strong = replace(second, name="strong", pulls={"private": 2.0})
    run(charged(ledger, variants=(first, weak, strong), rounds=2), tmp_path / "run", keep_going)
    with Ledger(ledger, read_only=True) as opened:
        runs = [(entry.name.split("/")[1], entry.charged) for entry in opened.runs()]
    assert runs == [("DP-FedAvg", 2), ("weak", 2)]


def test_variants_that_sample_differently_are_refused(ledger, tmp_path):
    dp_fedavg, fedhdp = tiny().variants
    both = (dp_fedavg, replace(fedhdp, sampling="fixed"))
    experiment = charged(ledger, variants=both, rounds=2)
    with raises_field("sampling", ConfigError):
        run(experiment, tmp_path / "run", keep_going)
    assert not ledger.exists()
    run(replace(experiment, variants=both[:1]), tmp_path / "first", keep_going)
    with pytest.raises(LedgerError):
        run(replace(experiment, variants=both[1:]), tmp_path / "second", keep_going)
    assert charged_rounds(ledger) == [2, 0]


def test_group_with_exhausted_budget_is_dropped(ledger, tmp_path):
    experiment = charged(ledger, budgets={"private": Budget(5.0, 1e-4)}, on_budget_exhausted="drop_group")
    variant = run(experiment, tmp_path / "run", keep_going).variants[0]
    opted_out, private = variant.groups
    assert (variant.rounds, variant.stopped, opted_out.rounds) == (12, None, 12)
    assert 0 < private.rounds < 12
    assert private.epsilon <= 5.0
    assert spent(ledger) <= 5.0


def with_three_groups(ledger: Path, noise: dict[str, float], budgets: dict[str, float]) -> Experiment:
    """The tiny experiment with its private clients in two groups, which are dropped when their budgets are exhausted."""
    open_group, private = tiny().mechanism.groups
    groups = [
        replace(private, name=name, clients=clients, epsilon=None, noise_multiplier=noise[name], weight=1.0)
        for name, clients in zip(noise, (10, 5), strict=True)
    ]
    return charged(
        ledger,
        mechanism=replace(tiny().mechanism, groups=(open_group, *groups)),
        budgets={name: Budget(epsilon, 1e-4) for name, epsilon in budgets.items()},
        on_budget_exhausted="drop_group",
    )


@pytest.mark.slow
def test_groups_are_dropped_one_after_the_other(ledger, tmp_path):
    experiment = with_three_groups(ledger, {"one": 2.0, "two": 2.0}, {"one": 0.9, "two": 1.2})
    rounds = [group.rounds for group in run(experiment, tmp_path / "run", keep_going).variants[0].groups]
    assert 0 < rounds[1] < rounds[2] < rounds[0] == 12


def test_epsilons_after_a_drop_are_those_of_the_ledger(ledger, tmp_path):
    experiment = with_three_groups(ledger, {"relaxed": 0.7, "strict": 3.0}, {"strict": 0.8})
    variant = run(experiment, tmp_path / "run", keep_going).variants[0]
    assert 0 < variant.groups[2].rounds < variant.groups[1].rounds == 12
    for group in variant.groups[1:]:
        assert group.epsilon == pytest.approx(spent(ledger, group.name), rel=1e-9)


def test_ledger_is_relative_to_the_experiments_file(tmp_path, monkeypatch):
    file = tmp_path / "sub" / "mine.toml"
    file.parent.mkdir()
    file.write_text(TINY.read_text().replace("noise_seed = 2", 'ledger = "population.ledger"'))
    monkeypatch.chdir(tmp_path)
    done = command("run", file, "--rounds", 1, "--out", tmp_path / "run")
    assert done.code == 0
    assert "sub/population.ledger: a new ledger" in done.stderr
    assert "over all its runs" in done.stdout
    assert not (tmp_path / "population.ledger").exists()
    (tmp_path / "run" / "summary.json").unlink()
    shutil.rmtree(tmp_path / "run" / "dp-fedavg")
    (file.parent / "population.ledger").rename(tmp_path / "moved")
    with raises_field("ledger", FedHDPError):
        resume(tmp_path / "run", keep_going)
    assert not (file.parent / "population.ledger").exists()

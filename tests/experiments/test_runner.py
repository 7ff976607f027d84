"""A run: its files, what its watcher learns, and which variants share a training."""

from __future__ import annotations

import math

import numpy as np
import pytest
from experiment_helpers import assert_same_run, keep_going, tiny
from msgspec.structs import replace

from fedhdp.experiments import Progress, from_toml, run, to_toml, with_seeds
from fedhdp.experiments.variant import Variant
from fedhdp.privacy.accounting import compose
from fedhdp.privacy.costs import privacy_costs
from fedhdp.results import Summary, VariantDirectory, read_arrays, read_value, slug
from fedhdp.server import ServerOptimizer
from fedhdp.simulation import Simulation
from fedhdp.theory.pricing import RoughPricing


def summary_of(directory) -> Summary:  # type: ignore[no-untyped-def]
    """The summary of a finished run."""
    return read_value(directory / "summary.json", Summary)


@pytest.mark.slow
def test_recorded_experiment_repeats_the_run(finished_run, tmp_path):
    again = from_toml((finished_run / "experiment.toml").read_text(), "experiment.toml")
    run(again, tmp_path / "again", keep_going)
    assert_same_run(finished_run, tmp_path / "again")


def test_history_ends_in_the_summary(finished_run):
    rows = VariantDirectory(finished_run / "fedhdp").history()
    assert sorted({row.round for row in rows}) == [4, 8, 12]
    last = {(row.group, row.model, row.metric): row.value for row in rows if row.round == 12}
    variant = summary_of(finished_run).variants[1]
    assert last["server", "global", "accuracy"] == variant.server_accuracy
    assert (
        last["private", "personal", "accuracy_worst_decile"]
        == variant.groups[1].values["personal/accuracy_worst_decile"]
    )
    assert not (finished_run / "fedhdp" / "checkpoint.npz").exists()  # it is beside the first variant of the simulation
    names = {f"global/{layer}/{array}" for layer in ("first", "rest") for array in "bw"}
    assert set(read_arrays(finished_run / "fedhdp" / "model.npz")) == names


def test_scores_of_clients_average_to_the_table(finished_run):
    scores = read_arrays(finished_run / "fedhdp" / "scores.npz")
    assert {name: array.shape for name, array in scores.items()} == {
        "global/accuracy": (20,),
        "personal/accuracy": (20,),
    }
    variant = summary_of(finished_run).variants[1]
    rows = [line.split(",") for line in (finished_run / "clients.csv").read_text().splitlines()]
    assert [row[0] for row in rows] == ["client", *map(str, range(20))]
    for group in variant.groups:
        clients = [number for number, (_, name) in enumerate(rows[1:]) if name == group.name]
        assert len(clients) == group.clients
        assert scores["global/accuracy"][clients].mean() == pytest.approx(group.value("accuracy"), abs=1e-6)
        assert scores["personal/accuracy"][clients].mean() == pytest.approx(
            group.value("accuracy", "personal"), abs=1e-6
        )


def test_epsilon_of_a_group_is_kept(finished_run):
    private = summary_of(finished_run).variants[1].groups[1]
    assert 7.9 < private.epsilon <= private.epsilon_target == 8.0
    assert private.accountant == "pld"
    assert private.noise_multiplier > 0


def test_epsilon_is_stated_at_the_groups_delta(tmp_path):
    open_group, private = tiny().mechanism.groups
    mechanism = replace(tiny().mechanism, groups=(open_group, replace(private, delta=1e-6)))
    experiment = tiny(mechanism=mechanism, rounds=2, variants=tiny().variants[1:])
    group = run(experiment, tmp_path / "run", keep_going).variants[0].groups[1]
    cost = privacy_costs(experiment.build_mechanism(), 2)["private"]
    assert group.delta == 1e-6
    assert group.epsilon == pytest.approx(compose([cost], 1e-6, "pld"))


def test_progress_states_the_cost_of_the_rounds_so_far(tmp_path):
    experiment = tiny(variants=tiny().variants[1:], evaluate_every=5)
    epsilons = {}

    def watch(progress: Progress) -> bool:
        epsilons[progress.round] = progress.epsilon()
        return True

    run(experiment, tmp_path / "run", watch)
    mechanism = experiment.variants[0].mechanism(experiment.build_mechanism(), RoughPricing(experiment.rounds))
    assert epsilons.pop(0) == {}
    assert list(epsilons) == list(range(1, 13))
    for rounds, epsilon in epsilons.items():
        cost = compose([privacy_costs(mechanism, rounds)["private"]], experiment.delta, "pld")
        assert epsilon == {"opted out": (math.inf, math.inf), "private": (cost, cost)}
    assert epsilons[1]["private"] < epsilons[4]["private"] < epsilons[12]["private"]


def test_variants_that_differ_in_pull_share_a_training(tmp_path):
    variant = tiny().variants[1]
    pulls = {f"pull {pull:g}": {"private": pull, "opted out": pull} for pull in (0.0, 0.5, 5.0)}
    variants = tuple(replace(variant, name=name, pulls=pull) for name, pull in pulls.items())
    data = replace(tiny().data, validation=0.4, test_samples=50)
    experiment = tiny(variants=variants, noise_seed=None, data=data)  # noise that another training would not have
    summary = run(experiment, tmp_path / "run", keep_going)
    first, *others = [read_arrays(tmp_path / "run" / slug(name) / "model.npz") for name in pulls]
    for model in others:
        for name in first:
            np.testing.assert_array_equal(first[name], model[name])
    personal = {tuple(group.value("accuracy", "personal") for group in result.groups) for result in summary.variants}
    assert len(personal) > 1
    for number, group in enumerate(summary.variants[0].groups):
        assert group.value("accuracy", "chosen") is not None
        assert {result.groups[number].value("accuracy", "chosen") for result in summary.variants} == {
            group.value("accuracy", "chosen")
        }


def test_variant_has_its_own_server_and_training(tmp_path):
    base = tiny(rounds=3)
    plain = base.variants[1]
    optimizer = {"name": "sgd", "learning_rate": 0.3, "momentum": 0.9}
    changes = {"server": {"optimizer": optimizer}, "training": {"epochs": 2}}
    both = replace(base, variants=(plain, replace(plain, name="other", **changes)))
    assert from_toml(to_toml(both), "x") == both
    run(both, tmp_path / "both", keep_going)
    alone = replace(base, variants=(plain,))
    run(alone, tmp_path / "plain", keep_going)
    server, training = ServerOptimizer(optimizer), replace(base.training, epochs=2)
    run(replace(alone, server=server, training=training), tmp_path / "other", keep_going)
    for together, apart in (("both/fedhdp", "plain/fedhdp"), ("both/other", "other/fedhdp")):
        models = [read_arrays(tmp_path / directory / "model.npz") for directory in (together, apart)]
        for name in models[0]:
            np.testing.assert_array_equal(models[0][name], models[1][name])


def test_variant_with_other_cohorts_runs_by_itself(tmp_path):
    first, second = tiny().variants
    variants = (first, replace(second, sampling="fixed"), replace(second, name="third"))
    names = []

    def watch(progress: Progress) -> bool:
        names.append(progress.names)
        return True

    run(tiny(variants=variants), tmp_path / "run", watch)
    assert list(dict.fromkeys(names)) == [("DP-FedAvg",), ("DP-FedAvg", "third"), ("FedHDP",)]


def test_batches_of_variants_sample_the_same_cohorts(tmp_path, monkeypatch):
    monkeypatch.setattr("fedhdp.experiments.runner.personal_bytes_limit", lambda: 0)
    cohorts, sample_cohort = [], Simulation.draw_cohort

    def recorded(simulation: Simulation, *arguments: int) -> np.ndarray:
        cohort = sample_cohort(simulation, *arguments)
        cohorts.append(tuple(cohort))
        return cohort

    monkeypatch.setattr(Simulation, "draw_cohort", recorded)
    first, last = tiny().variants
    experiment = tiny(noise_seed=None, rounds=4, variants=(replace(first, algorithm="non_private"), last))
    run(experiment, tmp_path / "paired", keep_going)
    assert len(cohorts) == 8
    assert cohorts[:4] == cohorts[4:]
    cohorts.clear()
    run(replace(experiment, variants=(first, last), ledger=str(tmp_path / "ledger")), tmp_path / "paid", keep_going)
    assert len(cohorts) == 8
    assert cohorts[:4] != cohorts[4:]  # charged separately, so each samples its own


def test_each_seed_has_its_own_noise_seed():
    experiments = with_seeds(tiny(noise_seed=2), range(2))
    assert [(experiment.seed, experiment.noise_seed) for experiment in experiments] == [(0, 2), (1, 3)]


def test_variants_whose_cohorts_differ_in_a_later_round_run_apart(tmp_path):
    stages = (
        Variant(f"from {share:g}", "time_adaptive", options={"saving_rounds": share, "saving_rate": 0.5})
        for share in (0.25, 0.75)
    )
    experiment = tiny(variants=(Variant("FedHDP"), *stages), rounds=4, evaluate_every=4, delta=1e-2)
    run(experiment, tmp_path / "run", keep_going)
    constant, early, late = summary_of(tmp_path / "run").variants
    for variant in (early, late):
        for group, promised in zip(variant.groups, constant.groups, strict=True):
            assert group.unprotected or 0 < group.epsilon <= promised.epsilon * (1 + 1e-6)

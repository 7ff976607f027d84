"""Runs that begin with another run's global model: which model, and what it had cost."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from experiment_helpers import TINY, assert_same_run, command, keep_going, tiny
from helpers import raises_field
from msgspec.structs import replace

from fedhdp.errors import ConfigError, ModelError
from fedhdp.experiments import Interrupted, Progress, Variant, find, from_toml, read_experiment, resume, run, to_toml
from fedhdp.experiments.bases import PcaBasis
from fedhdp.experiments.start import StartFrom, _with_extra
from fedhdp.optimizers import OptimizerConfig
from fedhdp.privacy.accounting import compose
from fedhdp.privacy.costs import PrivacyCost, privacy_costs
from fedhdp.report.rows import read_study
from fedhdp.results import VariantResult, load_model, slug
from fedhdp.server import ServerOptimizer


@pytest.fixture(scope="module")
def first(tmp_path_factory) -> Path:
    """The directory of a run of two rounds."""
    directory = tmp_path_factory.mktemp("first") / "run"
    run(tiny(rounds=2), directory, keep_going)
    return directory


def small(first: Path, **changes: object):
    """A run of FedHDP that begins with the first one's."""
    start = StartFrom(str(first), "FedHDP")
    return tiny(**({"rounds": 2, "variants": tiny().variants[1:], "start_from": start} | changes))


def private_note(result: VariantResult, word: str) -> str:
    [note] = [note for note in result.notes if word in note]
    return note


def test_first_global_model_is_the_other_runs(first, tmp_path):
    experiment = small(
        first, rounds=1, server=ServerOptimizer(OptimizerConfig("sgd", learning_rate=1e-30))
    )  # the update changes nothing
    run(experiment, tmp_path / "run", keep_going)
    expected, arrays = load_model(first, "FedHDP"), load_model(tmp_path / "run")
    assert expected.keys() == arrays.keys()
    for name in expected:
        np.testing.assert_array_equal(expected[name], arrays[name])


def test_costs_of_both_are_composed(first, tmp_path):
    experiment = small(first)
    [result] = run(experiment, tmp_path / "second", keep_going).variants
    mechanism = experiment.build_mechanism()
    cost = privacy_costs(mechanism, 2)["private"]
    both = compose([cost, cost], experiment.delta, "rdp")  # valid for a run that was chosen after another
    assert result.groups[1].epsilon < both
    assert f"ε private = {math.ceil(both * 1000) / 1000:.3f}" in private_note(result, "both together")
    assert "ε opted out = ∞" in private_note(result, "had cost")
    assert private_note(result, "repeatable")
    third = small(tmp_path / "second", start_from=str(tmp_path / "second"))
    [result] = run(third, tmp_path / "third", keep_going).variants
    all_three = compose([cost] * 3, experiment.delta, "rdp")
    assert f"ε private = {math.ceil(all_three * 1000) / 1000:.3f}" in private_note(result, "all together")
    assert f"after those of {first}" in private_note(result, "had cost")


def test_a_run_whose_noise_came_from_a_seed_is_not_composed_with_a_private_one(first, tmp_path):
    [result] = run(small(first, rounds=1, noise_seed=None), tmp_path / "run", keep_going).variants
    assert "not private" in private_note(result, "not composed")


def test_other_members_are_not_composed(first, tmp_path):
    open_group, private = tiny().mechanism.groups
    groups = (replace(open_group, clients=4), replace(private, clients=16))
    experiment = small(first, mechanism=replace(tiny().mechanism, groups=groups))
    [result] = run(experiment, tmp_path / "run", keep_going).variants
    assert "the clients or their groups differ" in private_note(result, "not composed")


@pytest.mark.parametrize("changes", [{"seed": 5}, {"sampling": "fixed"}, {"groups": ("opted out", "strict")}])
def test_other_populations_groups_and_samplings_are_not_composed(changes, first, tmp_path):
    mechanism = tiny().mechanism
    if "sampling" in changes:
        mechanism = replace(mechanism, sampling="fixed")
    if "groups" in changes:
        names = changes["groups"]
        groups = tuple(replace(group, name=name) for group, name in zip(mechanism.groups, names, strict=True))
        mechanism = replace(mechanism, groups=groups)
    experiment = small(first, seed=changes.get("seed", 1), mechanism=mechanism)
    [result] = run(experiment, tmp_path / "run", keep_going).variants
    assert "ε private = 8" in private_note(result, "had cost") or "ε private = 7.9" in private_note(result, "had cost")
    assert private_note(result, "not composed")


def test_run_records_the_checksum_and_resumes_without_the_other(first, tmp_path):
    def stop(progress: Progress) -> bool:
        return progress.round < 1

    experiment = small(first, variants=tiny().variants)
    run(experiment, tmp_path / "whole", keep_going)
    with pytest.raises(Interrupted):
        run(experiment, tmp_path / "run", stop)
    assert len(read_experiment(tmp_path / "run").start_from.sha256) == 64
    moved = first.rename(first.parent / "moved")
    try:
        resume(tmp_path / "run", keep_going)
    finally:
        moved.rename(first)
    assert_same_run(tmp_path / "whole", tmp_path / "run")


def test_file_names_a_directory_or_a_variant(first, tmp_path):
    for name, start in (("a", f'"{first}"'), ("b", f'{{ run = "{first.name}", variant = "FedHDP" }}')):
        path = first.parent / f"{name}.toml"
        path.write_text(f"start_from = {start}\n{TINY.read_text()}")
        experiment = find(str(path), {})
        assert experiment.start_from.run == str(first)
        assert from_toml(to_toml(experiment), "x") == experiment


@pytest.mark.parametrize(
    ("start", "field"),
    [
        (StartFrom("nosuch"), "start_from"),
        (StartFrom("FIRST"), "start_from"),  # it has two variants
        (StartFrom("FIRST", "nosuch"), "start_from"),
        (StartFrom("FIRST", "FedHDP", "0" * 64), "start_from.sha256"),
    ],
)
def test_bad_starts_are_refused(start, field, first, tmp_path):
    start = replace(start, run=start.run.replace("FIRST", str(first)))
    with raises_field(field, ConfigError):
        run(small(first, start_from=start), tmp_path / "run", keep_going)
    assert not list(tmp_path.iterdir())


def test_model_of_another_shape_is_refused(first, tmp_path):
    model = replace(tiny().model, hidden=9)
    with raises_field("start_from", ModelError) as caught:
        run(small(first, model=model), tmp_path / "run", keep_going)
    assert "first/b has (8,), the model has (9,)" in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_bad_start_is_one_line(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(f'start_from = "nosuch"\n{TINY.read_text()}')
    done = command("run", path, "--out", tmp_path / "run")
    assert (done.code, done.stderr.count("\n")) == (2, 1)
    assert "start_from" in done.stderr
    assert [file.name for file in tmp_path.iterdir()] == ["mine.toml"]


def test_a_model_that_nothing_covers_is_not_covered_by_later_noise(tmp_path):
    """Published measurements of the later run depend on the earlier run's model, whatever noise the later run has."""
    variants = (Variant("Non-Private", "non_private"), *tiny().variants[1:])
    earlier = tiny(rounds=1, noise_seed=None, variants=variants)
    run(earlier, tmp_path / "earlier", keep_going)
    covered = {}
    for name in ("Non-Private", "FedHDP"):
        start = StartFrom(str(tmp_path / "earlier"), name)
        directory = tmp_path / slug(name)
        run(small(tmp_path / "earlier", rounds=1, noise_seed=None, start_from=start), directory, keep_going)
        [row] = read_study([directory]).rows
        assert row.result.start_covered is row.covered
        covered[name] = row.covered
        third = tmp_path / f"third-{slug(name)}"
        run(small(directory, rounds=1, noise_seed=None, start_from=str(directory)), third, keep_going)
        assert read_study([third]).rows[0].covered is row.covered
        (third / "summary.json").unlink()
        (third / "fedhdp" / "result.json").unlink()  # as while it was under way
        assert read_study([third]).rows[0].covered is row.covered
    assert covered == {"Non-Private": False, "FedHDP": True}


def test_clients_who_opted_out_before_are_not_covered_after(tmp_path):
    """Who had opted out when the model was made, and now chose noise, is in it without noise."""
    run(tiny(rounds=1, noise_seed=None), tmp_path / "earlier", keep_going)
    groups = tuple(replace(g, epsilon=8.0, noise_multiplier=None) for g in tiny().mechanism.groups)
    for name, changes in (("alike", {}), ("others", {"seed": 5})):
        experiment = small(
            tmp_path / "earlier",
            rounds=1,
            noise_seed=None,
            mechanism=replace(tiny().mechanism, groups=groups),
            **changes,
        )
        [result] = run(experiment, tmp_path / name, keep_going).variants
        assert result.start_covered is (name == "others")  # of another population


def test_rounds_that_ran_again_cost_as_much_as_the_costliest():
    costs = [PrivacyCost(2.0, 0.1, "poisson", 3), PrivacyCost(3.0, 0.4, "poisson", 3)]
    assert PrivacyCost(2.0, 0.4, "poisson", 2) in _with_extra(costs, 2)


def test_clients_whose_statistics_prepared_the_inputs_are_not_composed_as_if_protected(tmp_path):
    model = replace(tiny().model, basis=PcaBasis(size=4))
    experiment = tiny(rounds=1, variants=tiny().variants[:1], model=model)  # DP-FedAvg gives noise to everybody
    run(experiment, tmp_path / "earlier", keep_going)
    later = replace(experiment, start_from=str(tmp_path / "earlier"))
    [result] = run(later, tmp_path / "later", keep_going).variants
    assert "ε opted out = ∞" in private_note(result, "both together")

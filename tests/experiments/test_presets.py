"""The built-in experiments: written, read and run at toy size."""

from __future__ import annotations

import math

import pytest
from experiment_helpers import keep_going
from msgspec.structs import replace

from fedhdp.experiments import EXPERIMENTS, Experiment, from_toml, run, to_toml
from fedhdp.results import footnotes, format_table, table_cells


def small(experiment: Experiment) -> Experiment:
    """A built-in experiment at toy size."""
    groups = tuple(replace(group, clients=6, sampling_rate=0.5) for group in experiment.mechanism.groups)
    data = replace(experiment.data, clients=6 * len(groups), samples=5, test_samples=2, server_test=124)
    training = replace(experiment.training, epochs=1)
    changes = {"rounds": 2, "evaluate_every": 1, "training": training, "data": data}
    return replace(experiment, mechanism=replace(experiment.mechanism, groups=groups), **changes)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_toml_round_trip(name):
    experiment = EXPERIMENTS[name]()
    assert experiment.name == name
    assert from_toml(to_toml(experiment), "x") == experiment


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_runs_and_states_epsilons(name, tmp_path):
    summary = run(small(EXPERIMENTS[name]()), tmp_path / "run", keep_going)
    for variant in summary.variants:
        assert 0 <= variant.server_accuracy <= 1
        for group in variant.groups:
            assert 0 <= group.values["global/accuracy"] <= 1
            assert 0 <= group.values["personal/accuracy"] <= 1
            if group.unprotected:
                assert group.epsilon == math.inf
            elif variant.algorithm == "local_only":  # nothing is sent
                assert group.epsilon == 0.0
            else:
                assert 0 < group.epsilon < math.inf
                assert "add or remove one client" in group.epsilon_basis
    header, rows = table_cells(summary.variants)
    assert {len(row) for row in rows} == {len(header)}
    lines = format_table(summary.variants).split("\n")
    assert lines[len(rows) + 4 :] == footnotes(summary.variants)

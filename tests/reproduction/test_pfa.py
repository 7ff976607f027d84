"""PFA: what private clients release is WeiAvg's sum, and the server's projection knows nothing else of them."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import mechanism_of, raises_field
from msgspec.structs import replace
from reproduction_runs import small

from fedhdp import FederatedData, LocalTraining, Mechanism, ServerOptimizer, Simulation, linear
from fedhdp.experiments.runner import Interrupted
from fedhdp.models import squared_error
from fedhdp.privacy.accounting import compose
from fedhdp.privacy.costs import scheduled_costs
from fedhdp.reproduction import pfa, runner
from fedhdp.reproduction.comparison import compare
from fedhdp.reproduction.extensions import make_parts
from fedhdp.reproduction.levels import LEVEL_TABLES, PFA, STAND_INS
from fedhdp.reproduction.pfa import PfaSimulation, PublicUpdates, project_private, summarize_public
from fedhdp.reproduction.tables import Options
from fedhdp.results import store

PUBLIC, PRIVATE = 12, 20
INPUTS, OUTPUTS = 3, 2
SIZES = (OUTPUTS, INPUTS * OUTPUTS)  # the bias, then the weights
MODEL = linear(INPUTS, OUTPUTS, loss=squared_error)
TRAINING = LocalTraining(epochs=2, batch_size=3, learning_rate=0.1, personalize=False)
WEIGHTED = mechanism_of((PUBLIC, 0.0, 1.0), (PRIVATE, 1.5, 0.2), rate=0.8)
SERVER = ServerOptimizer()


def regression_data(private_seed: int = 1, public_seed: int = 0) -> FederatedData:
    """Clients of two levels, each level with examples of its own seed."""
    parts = []
    for group, seed, clients in zip(WEIGHTED.groups, (public_seed, private_seed), (PUBLIC, PRIVATE), strict=True):
        rng, rows = np.random.default_rng(seed), clients * 5
        ids = [f"{group.name} {client:02}" for client in range(clients) for _ in range(5)]
        x, y = (rng.normal(size=(rows, size)).astype(np.float32) for size in (INPUTS, OUTPUTS))
        parts.append((x, y, ids, [group.name] * rows))
    x, y, ids, levels = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    return FederatedData.from_arrays(x, y, ids, levels)


def pfa_of(data: FederatedData, directions: int, mechanism: Mechanism = WEIGHTED) -> PfaSimulation:
    return PfaSimulation(data, MODEL, mechanism, TRAINING, SERVER, directions, noise_seed=3)


def weiavg_of(data: FederatedData, mechanism: Mechanism = WEIGHTED) -> Simulation:
    return Simulation(data, MODEL, mechanism, TRAINING, SERVER, noise_seed=3)


@pytest.mark.parametrize("noise", ["shared", "per_group"])
def test_with_all_directions_it_is_the_weighted_average(noise):
    data, mechanism = regression_data(), replace(WEIGHTED, noise=noise)
    average, projected, narrow = weiavg_of(data, mechanism), pfa_of(data, 6, mechanism), pfa_of(data, 1, mechanism)
    for simulation in (average, projected, narrow):
        simulation.run(3)
    np.testing.assert_allclose(projected.global_model(), average.global_model(), atol=1e-5)
    assert np.abs(narrow.global_model() - average.global_model()).max() > 1e-3
    np.testing.assert_array_equal(projected.server_state.clip, average.server_state.clip)


def test_the_update_is_made_of_weiavgs_release_and_the_public_updates():
    data = regression_data()
    average, projected = weiavg_of(data), pfa_of(data, 1)
    start, public = average.global_model(), projected.public_updates()
    average.run(1)
    projected.run(1)
    weights = [group.weight * WEIGHTED.expected_cohort_size(group) for group in WEIGHTED.groups]
    released = (average.global_model() - start) * sum(weights)
    private = (released - public.sum_P) / weights[1]
    expected = public.mean_P.copy()
    for columns in (slice(0, SIZES[0]), slice(SIZES[0], None)):
        u = public.direction_DP[0, columns]
        expected[columns] += u * (u @ (private - public.mean_P)[columns])
    update = (public.sum_P + weights[1] * expected) / sum(weights)
    np.testing.assert_allclose(projected.global_model() - start, update, atol=1e-6)


def test_private_clients_data_are_not_in_the_directions():
    first, other = (pfa_of(regression_data(private_seed=seed), 2).public_updates() for seed in (1, 2))
    for one, two in zip(first, other, strict=True):
        np.testing.assert_array_equal(one, two)
    changed = pfa_of(regression_data(public_seed=5), 2).public_updates()
    assert np.abs(changed.direction_DP - first.direction_DP).max() > 0.01


def test_public_updates_are_those_of_the_round():
    """The engine's round of the public clients alone, without noise, sums what they send."""
    data = regression_data()
    simulation = pfa_of(data, 1)
    public = simulation.public_updates()
    first, second = WEIGHTED.groups
    alone = replace(WEIGHTED, groups=(first, replace(second, weight=0.0)))
    start = simulation.global_model()
    round_of_public = weiavg_of(data, alone)
    round_of_public.run(1)
    update = round_of_public.global_model() - start
    np.testing.assert_allclose(public.sum_P, update * alone.expected_weight, atol=1e-5)


def test_directions_are_those_in_which_public_updates_differ():
    rng = np.random.default_rng(0)
    clipped = np.concatenate([rng.normal(size=(4, 2)), np.outer([1.0, 2.0, 4.0, 5.0], [0, 3, 4]) + 7.0], axis=1)
    sums, means, directions = summarize_public(clipped, np.full(4, 0.5), (2, 3), 3)
    np.testing.assert_allclose(sums, 2 * means)
    np.testing.assert_allclose(np.abs(directions[0, 2:]), [0, 0.6, 0.8], atol=1e-12)
    np.testing.assert_array_equal(directions[1:, 2:], 0)  # they differ in one direction only
    np.testing.assert_allclose(directions[:2, :2] @ directions[:2, :2].T, np.eye(2), atol=1e-12)
    sums, means, directions = summarize_public(clipped[:1], np.ones(1), (2, 3), 3)
    np.testing.assert_array_equal(means, 0)
    along = clipped[0, 2:] / np.linalg.norm(clipped[0, 2:])
    np.testing.assert_allclose(np.abs(directions[0, 2:]), along)


def test_round_without_public_clients_moves_nothing():
    empty = summarize_public(np.zeros((0, 5)), np.zeros(0), (2, 3), 1)
    _, update = project_private((2, 3), 1, 1.0, 2.0)
    step, _ = update(np.ones(5), PublicUpdates(*empty), None)
    np.testing.assert_array_equal(step, 0)


def test_wrong_mechanisms_are_refused():
    data = regression_data()
    with raises_field("directions"):
        pfa_of(data, 0)
    with raises_field("weight"):
        first, second = WEIGHTED.groups
        pfa_of(data, 1, replace(WEIGHTED, groups=(first, replace(second, weight=0.0))))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["two", "three-basis"])
def test_rows_of_the_table_cost_what_the_clients_chose(tmp_path, name):
    parts = [small(part) for part in make_parts("levels", name, options=Options("handwriting", rounds=3))]
    part = next(part for part in parts if part.name == f"{name}.pfa")
    with pytest.raises(Interrupted):
        runner.run_part(part, tmp_path, lambda progress: progress.round < 2, "")
    runner.run_part(part, tmp_path, lambda progress: True, "the command")
    summary = store.read_value(tmp_path / part.folder / store.SUMMARY_FILE, pfa.Summary)
    assert [variant.name for variant in summary.variants] == [f"{PFA}, ε∞={epsilon:g}" for epsilon in STAND_INS]
    experiment = part.experiment
    chosen = experiment.build_mechanism()
    for variant, mechanism in zip(summary.variants, experiment.variant_mechanisms(chosen), strict=True):
        assert variant.notes == [pfa.NOTE]
        costs = scheduled_costs(mechanism, 3)
        assert variant.groups[0].unprotected
        for group in variant.groups[1:]:
            assert group.epsilon == compose(costs[group.name], experiment.delta, experiment.run_accountant)
    table = compare(tmp_path, "levels")
    assert [line.key.row for line in table.global_lines] == [f"{name}: {variant.name}" for variant in summary.variants]
    model = "average" if LEVEL_TABLES[name].on_basis else "global"
    for line, variant in zip(table.global_lines, summary.variants, strict=True):
        assert line.cells["acc_g"].mean == 100 * (variant.value("accuracy", model) or 0.0)

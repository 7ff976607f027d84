"""The engine against the plain loops, the reductions between algorithms to the bit, and what a run must survive."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from helpers import mechanism_of, raises_field, tiny_data
from msgspec.structs import replace

from fedhdp.algorithms import dp_fedavg, fedhdp, hdp_fedavg, local_only, non_private
from fedhdp.client import LocalTraining
from fedhdp.data import FederatedData, examples, from_lists
from fedhdp.errors import DataError, ModelError, RunError
from fedhdp.mechanism import Mechanism, PrivacyGroup
from fedhdp.models import Model, correct, mlp
from fedhdp.results.metrics import group_rows
from fedhdp.rng import BATCHES, COHORT, NOISE, os_entropy, stream
from fedhdp.rng import MODEL as START
from fedhdp.server import ServerOptimizer
from fedhdp.simulation import Simulation, simulate

TRAINING = LocalTraining(epochs=2, batch_size=4, learning_rate=0.3, decay=0.5, decay_every=2)
MODEL = mlp(12, 5, 3)


def trained(population, mechanism, rounds=3, **options) -> Simulation:
    """A simulation after some rounds, with a seed for every random stream."""
    options = {"training": TRAINING, "seed": 3, "noise_seed": 7} | options
    simulation = Simulation(population, MODEL, mechanism, **options)
    simulation.run(rounds)
    return simulation


def read(arrays) -> dict[str, np.ndarray]:
    """The arrays of a state as they are read from a file."""
    return {name: array() if callable(array) else array for name, array in arrays.items()}


MECHANISMS = {
    "one level": mechanism_of((19, 1.0, 1.0)),
    "one level opted out": mechanism_of((19, 0.0, 1.0)),
    "two levels, the paper's": mechanism_of((4, 0.0, 1.0), (15, 1.5, 0.1)),
    "two levels, weight 0": mechanism_of((4, 0.0, 1.0), (15, 1.5, 0.0)),
    "two levels, weight 1": mechanism_of((4, 0.0, 1.0), (15, 1.5, 1.0)),
    "three levels, shared noise": mechanism_of((4, 0.0, 1.0), (5, 0.5, 0.7), (10, 1.5, 0.2)),
    "three levels, noise per group": mechanism_of((4, 0.0, 1.0), (5, 0.5, 0.7), (10, 1.5, 0.2), noise="per_group"),
    "the paper read literally": mechanism_of((4, 0.0, 1.0), (15, 1.5, 0.1), sampling="fixed"),
    "a fixed clip": mechanism_of((4, 0.0, 1.0), (15, 1.5, 0.1), clip=0.2),
}


@pytest.mark.parametrize("mechanism", MECHANISMS.values(), ids=MECHANISMS.keys())
def test_the_engine_agrees_with_algorithm_1_in_plain_loops(population, mechanism: Mechanism):
    agree(population, mechanism)


def test_the_engine_agrees_with_plain_loops_where_clients_are_alike():
    agree(tiny_data([7] * 19), MECHANISMS["three levels, shared noise"])


@pytest.mark.parametrize("sizes", [[7] * 19, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 4, 4, 4, 9, 1, 6]])
@pytest.mark.parametrize(
    "otherwise",
    [{"whole_batches": True}, {"personal_epochs": 1}, {"proximal": 0.8}],
    ids=lambda given: next(iter(given)),
)
def test_the_engine_agrees_with_plain_loops_where_clients_train_otherwise(sizes, otherwise):
    agree(tiny_data(sizes), MECHANISMS["two levels, the paper's"], replace(TRAINING, **otherwise))


def test_a_proximal_term_shortens_updates_also_without_personal_models_and_outside_the_span(population):
    for model in (MODEL, Model(MODEL.init, MODEL.apply)):  # the second trains on its parameters themselves
        moved = []
        for proximal in (0.0, 0.8, 4.0):
            training = replace(TRAINING, proximal=proximal, personalize=False)
            simulation = Simulation(population, model, replace(non_private(CHOSEN), clip=100.0), training, noise_seed=7)
            initial = simulation.global_model()
            simulation.run(1)
            moved.append(np.linalg.norm(simulation.global_model() - initial))
        assert moved[0] > 1.1 * moved[1] > 1.2 * moved[2] > 0
    with pytest.raises(ValueError, match="proximal must be at least 0 and below"):
        replace(TRAINING, proximal=2 / TRAINING.learning_rate)


def agree(population: FederatedData, mechanism: Mechanism, training: LocalTraining = TRAINING) -> None:
    """The engine and the reference come to the same models and clip."""
    simulation = trained(population, mechanism, rounds=0, training=training)
    first = simulation.model()
    simulation.run(5)
    network = {
        "w1": first["first"]["w"],
        "b1": first["first"]["b"],
        "w2": first["rest"]["w"].T,
        "b2": first["rest"]["b"],
    }
    network = {name: np.asarray(value, np.float64) for name, value in network.items()}
    theta, clip, personal = reference.train(population, mechanism, training, network, 5, seed=3, noise_seed=7)

    np.testing.assert_allclose(simulation.global_model(), theta, atol=2e-5)
    assert float(simulation.server_state.clip[0]) == pytest.approx(clip, rel=1e-5)
    assert set(personal) == set(np.flatnonzero(simulation.participated_K))
    for client, own in personal.items():
        np.testing.assert_allclose(simulation.personal_models(client)[0], own, atol=2e-5)


def same_server(one: Simulation, other: Simulation) -> None:
    """The servers' states are the same to the bit."""
    for a, b in zip(jax.tree.leaves(one.server_state), jax.tree.leaves(other.server_state), strict=True):
        np.testing.assert_array_equal(a, b)


def same(one: Simulation, other: Simulation) -> None:
    """The states are the same to the bit."""
    a, b = read(one.state_arrays()), read(other.state_arrays())
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name], b[name])


CHOSEN = mechanism_of((4, 0.0, 1.0), (5, 0.5, 0.7), (10, 1.5, 0.2))


def test_fedhdp_with_weight_1_is_hdp_fedavg_to_the_bit(population):
    ones = replace(CHOSEN, groups=tuple(replace(g, weight=1.0) for g in CHOSEN.groups))
    same(trained(population, fedhdp(ones)), trained(population, hdp_fedavg(CHOSEN)))


def test_hdp_fedavg_where_all_chose_the_same_is_dp_fedavg_to_the_bit(population):
    alike = replace(CHOSEN, groups=tuple(replace(g, noise_multiplier=1.5) for g in CHOSEN.groups))
    same(trained(population, hdp_fedavg(alike)), trained(population, dp_fedavg(alike)))


def test_dp_fedavg_where_all_opted_out_is_non_private_to_the_bit(population):
    open_ = replace(CHOSEN, groups=tuple(replace(g, noise_multiplier=0.0) for g in CHOSEN.groups))
    same(trained(population, dp_fedavg(open_)), trained(population, non_private(CHOSEN)))


def test_shared_and_per_group_noise_are_the_same_to_the_bit_with_one_private_group(population):
    chosen = MECHANISMS["two levels, the paper's"]
    same(trained(population, chosen), trained(population, replace(chosen, noise="per_group")))


def test_personal_models_of_unknown_clients_are_refused(population):
    simulation = trained(population, CHOSEN)
    for unknown in ([-1], [population.num_clients], []):
        with raises_field("clients"):
            simulation.personal_models(np.array(unknown, int))
    np.testing.assert_array_equal(simulation.personal_models(3), simulation.personal_models(np.array([3])))
    with raises_field("personalize", ModelError):
        trained(population, CHOSEN, 0, training=replace(TRAINING, personalize=False)).personal_models(0)


def test_personal_models_do_not_touch_the_global_model_by_a_bit(population):
    stronger = replace(CHOSEN, groups=tuple(replace(group, pull=3.0) for group in CHOSEN.groups))
    weak, strong = trained(population, CHOSEN), trained(population, stronger)
    same_server(weak, strong)
    participated = np.flatnonzero(weak.participated_K)
    assert np.abs(weak.personal_models(participated) - strong.personal_models(participated)).max() > 0.01


def test_without_personal_models_the_global_model_is_the_same(population):
    one = trained(population, CHOSEN)
    other = trained(population, CHOSEN, training=replace(TRAINING, personalize=False))
    assert other.store is None
    np.testing.assert_allclose(
        one.global_model(), other.global_model(), atol=1e-6
    )  # clients are added in another order


def test_local_only_leaves_the_global_model_where_it_was_and_trains_personal_ones(population):
    simulation = trained(population, local_only(CHOSEN), rounds=0)
    initial = simulation.global_model()
    simulation.run(3)
    np.testing.assert_array_equal(simulation.global_model(), initial)
    personal = simulation.personal_models(np.flatnonzero(simulation.participated_K))
    assert (np.abs(personal - initial).max(axis=1) > 0.01).all()


def test_clients_of_weight_0_cannot_move_the_global_model_by_a_bit(population):
    chosen = mechanism_of((4, 0.0, 1.0), (15, 1.5, 0.0), clip=0.2)
    private = slice(population.train.start_K[4], None)
    x_N = population.train.x_N.copy()
    x_N[private] = 255 - x_N[private]
    other = population._replace(train=population.train._replace(x_N=x_N))
    same_server(trained(population, chosen), trained(other, chosen))


def test_one_more_padding_changes_no_result(population):
    one = trained(population, CHOSEN)
    train = population.train
    much = train._replace(count_K=np.append(train.count_K, 40), start_K=np.append(train.start_K, 0))
    test = population.test
    test = test._replace(count_K=np.append(test.count_K, 1), start_K=np.append(test.start_K, 0))
    never = replace(CHOSEN.groups[-1], name="never sampled", clients=1, sampling_rate=0.0, weight=0.0)
    wider = replace(CHOSEN, groups=(*CHOSEN.groups, never))
    other = trained(population._replace(train=much, test=test), wider)
    np.testing.assert_allclose(one.global_model(), other.global_model(), atol=1e-6)
    assert not other.participated_K[-1]


def test_an_update_counts_once_however_many_examples_are_behind_it():
    doubled = tiny_data([4] * 6)
    train = doubled.train
    twice = np.concatenate([np.tile(np.arange(s, s + 4), 2) for s in train.start_K])
    big = train._replace(
        x_N=train.x_N[twice], y_N=train.y_N[twice], count_K=train.count_K * 2, start_K=train.start_K * 2
    )
    alone = mechanism_of((6, 0.0, 1.0), rate=1.0, clip=1e-6)  # so tight that only directions are left
    training = LocalTraining(
        epochs=1, batch_size=8, learning_rate=0.1
    )  # one full-batch step, so doubling changes nothing
    one = trained(doubled, alone, rounds=1, training=training)
    other = trained(doubled._replace(train=big), alone, rounds=1, training=training)
    np.testing.assert_allclose(one.global_model(), other.global_model(), atol=1e-9)


def test_a_client_whose_update_is_nan_contributes_nothing_and_is_counted(population):
    x_N = population.train.x_N.astype(np.float32) / 255
    x_N[population.train.start_K[5] :][: population.train.count_K[5]] = np.nan
    test = population.test._replace(x_N=population.test.x_N / np.float32(255))
    server = population.server_x_N / np.float32(255)
    ill = population._replace(train=population.train._replace(x_N=x_N), test=test, server_x_N=server)
    everyone = mechanism_of((4, 0.0, 1.0), (15, 1.0, 0.5), rate=1.0)
    simulation = trained(ill, everyone, rounds=2)
    assert np.isfinite(simulation.global_model()).all()
    assert np.isfinite(float(simulation.server_state.clip[0]))
    (rows,) = simulation.evaluate()
    assert {row.group: row.value for row in rows if row.metric == "refused"} == {"group 0": 0, "group 1": 2}


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_inputs_that_are_not_finite_reach_nobody_else_in_the_span(bad):
    population = tiny_data([5] * 19, inputs=40)
    x_N = population.train.x_N / np.float32(255)
    rest = {"test": population.test._replace(x_N=population.test.x_N / np.float32(255))}
    everyone, model = mechanism_of((4, 0.0, 1.0), (15, 1.0, 0.5), rate=1.0), mlp(40, 5, 3)
    simulations = []
    for ill in (False, True):
        x = x_N.copy()
        if ill:
            x[5 * 7] = bad  # an image of client 7, of the second group
        sick = population._replace(
            train=population.train._replace(x_N=x), server_x_N=population.server_x_N / np.float32(255), **rest
        )
        simulation = Simulation(sick, model, everyone, TRAINING, seed=3, noise_seed=7)
        simulation.run(1)
        simulations.append(simulation)
    well, sick = simulations
    assert np.asarray(sick.server_state.refused_G).tolist() == [[0, 1]]
    assert np.isfinite(sick.global_model()).all()
    others = np.delete(np.arange(19), 7)
    np.testing.assert_array_equal(well.personal_models(others), sick.personal_models(others))


def test_an_empty_round_is_just_a_round(population):
    nobody = mechanism_of((4, 0.0, 1.0), (15, 1.0, 0.5), rate=0.0)
    simulation = trained(population, nobody)
    assert np.isfinite(simulation.global_model()).all()
    assert not simulation.participated_K.any()
    rare = mechanism_of((4, 0.0, 1.0), (15, 1.0, 0.5), rate=0.01)
    assert np.isfinite(trained(population, rare).global_model()).all()


def test_a_cohort_larger_than_expected_is_never_cut_short(population):
    simulation = Simulation(population, MODEL, CHOSEN, TRAINING, seed=3, noise_seed=7)
    expected = trained(population, CHOSEN, rounds=2)
    simulation.slots = simulation.engine.padded_cohort_size(1)
    simulation.run(2)
    np.testing.assert_allclose(simulation.global_model(), expected.global_model(), atol=1e-6)
    np.testing.assert_array_equal(simulation.participated_K, expected.participated_K)


def test_nobody_who_knows_the_seed_knows_who_came_and_no_coin_is_tossed_for_two_trainings(population):
    def draws(mechanism: Mechanism | list[Mechanism], noise_seed: int | None = None) -> bool:
        """Whether two simulations with one seed, or one asked twice, have the same cohort in a round."""
        one, other = (Simulation(population, MODEL, mechanism, TRAINING, noise_seed=noise_seed) for _ in range(2))
        cohorts = [one.draw_cohort(5), one.draw_cohort(5), other.draw_cohort(5)]
        return all(np.array_equal(cohort, cohorts[0]) for cohort in cohorts[1:])

    assert not draws(CHOSEN)
    assert not draws([non_private(CHOSEN), CHOSEN])
    assert draws(CHOSEN, noise_seed=0)  # repeatable, and says that it is not private
    assert draws(non_private(CHOSEN))  # nothing is promised


def test_a_client_of_another_size_changes_a_sum_by_its_own_update_alone():
    """Training that magnifies every rounding: others must not be computed otherwise because somebody large came."""
    rng = np.random.default_rng(2)
    sizes = rng.integers(8, 20, 64)
    sizes[0] = 100
    x_N, y_N = rng.normal(size=(sizes.sum(), 30)).astype(np.float32), rng.integers(0, 10, sizes.sum()).astype(np.int32)
    data = examples(x_N, y_N, sizes)
    population = FederatedData("labels at random", data, data, x_N[:50], y_N[:50], 10)
    one_group = Mechanism((PrivacyGroup("all", 64, 0.0, 1.0),), clip=1.0)
    training = LocalTraining(epochs=100, batch_size=4, learning_rate=1.0, personalize=False)
    model = mlp(30, 20, 10)

    def moved(cohort: np.ndarray) -> np.ndarray:
        simulation = Simulation(population, model, one_group, training)
        assert len(simulation.engine.config.sizes) > 1
        simulation.draw_cohort = lambda round: cohort  # type: ignore[method-assign]
        initial = simulation.global_model().astype(np.float64)
        simulation.run(1)
        return 64 * (simulation.global_model().astype(np.float64) - initial)

    change = moved(np.arange(64)) - moved(np.arange(1, 64))
    assert np.linalg.norm(change) <= 1 + 1e-4
    np.testing.assert_allclose(change, moved(np.arange(1)), atol=1e-4)


def test_counts_and_pulls_out_of_range_are_refused(population):
    with raises_field("counts", DataError):
        examples(np.zeros((3, 2)), np.zeros(3), [4, -1])
    strong = replace(CHOSEN, groups=tuple(replace(group, pull=7.0) for group in CHOSEN.groups))
    with raises_field("pull of 'group 0'"):
        Simulation(population, MODEL, strong, TRAINING)


def test_a_model_that_is_no_number_any_more_is_never_right():
    assert correct(jnp.array([[jnp.nan, 0.0], [jnp.inf, 0.0], [1.0, 0.0]]), jnp.array([0, 0, 0])).tolist() == [0, 0, 1]


@pytest.mark.parametrize("personalize", [True, False])
def test_cohorts_of_changing_size_compile_once(population, personalize):
    training = replace(TRAINING, personalize=personalize)
    simulation = Simulation(population, MODEL, CHOSEN, training, seed=11, noise_seed=11)
    assert CHOSEN.sampling == "poisson"
    assert len({len(simulation.draw_cohort(number)) for number in range(8)}) > 3
    simulation.run(1)
    compiled = simulation.engine.round._cache_size()
    simulation.run(8)
    assert simulation.engine.round._cache_size() == compiled


def test_seeds_change_what_they_name_and_nothing_else(population):
    one = trained(population, CHOSEN)
    same(one, trained(population, CHOSEN))
    other_noise = trained(population, CHOSEN, noise_seed=8)
    assert not np.array_equal(one.global_model(), other_noise.global_model())
    assert not np.array_equal(one.participated_K, other_noise.participated_K)
    other_seed = trained(population, CHOSEN, seed=4)
    assert not np.array_equal(one.global_model(), other_seed.global_model())
    np.testing.assert_array_equal(one.participated_K, other_seed.participated_K)


def test_simulations_that_are_given_the_same_words_draw_the_same_cohorts_and_others_in_every_round(population):
    one, other = (
        Simulation(population, MODEL, CHOSEN, TRAINING, cohort_entropy=words) for words in [os_entropy(4)] * 2
    )
    cohorts = [one.draw_cohort(number).tolist() for number in range(6)]
    assert cohorts == [other.draw_cohort(number).tolist() for number in range(6)]
    assert len(set(map(tuple, cohorts))) == 6
    assert cohorts != [one.draw_cohort(number + 6).tolist() for number in range(6)]


def test_a_state_goes_through_its_arrays_and_back_and_not_into_another_simulation(population):
    simulation = trained(population, CHOSEN)
    arrays = simulation.state_arrays()
    for _ in range(2):
        restored = trained(population, CHOSEN, rounds=1)
        restored.restore(dict(arrays))
        same(simulation, restored)
    momentum = Simulation(population, MODEL, CHOSEN, TRAINING, ServerOptimizer(momentum=0.9))
    fewer = Simulation(tiny_data([4, 4]), MODEL, Mechanism((PrivacyGroup("all", 2, 1.0, 0.5),), 1.0), TRAINING)
    for other in (momentum, fewer):
        with raises_field("checkpoint", RunError):
            other.restore(dict(arrays))


def test_no_two_purposes_share_a_stream():
    data = 0
    streams = {tuple(stream(3, purpose, 1)) for purpose in (data, START, COHORT, BATCHES, NOISE)}
    assert len(streams) == 5


def test_noise_without_a_seed_is_never_the_same_twice(population):
    one, other = (trained(population, CHOSEN, noise_seed=None) for _ in range(2))
    assert not np.array_equal(one.global_model(), other.global_model())


def test_without_a_seed_every_run_of_every_round_has_noise_of_its_own(population):
    simulation = Simulation(population, MODEL, [CHOSEN, dp_fedavg(CHOSEN)], TRAINING)
    keys = [tuple(key.tolist()) for round in (0, 0, 1) for key in simulation._noise_keys(round)]
    assert len(set(keys)) == 6
    seeded = Simulation(population, MODEL, [CHOSEN, dp_fedavg(CHOSEN)], TRAINING, noise_seed=7)
    once, again, later = ([tuple(key.tolist()) for key in seeded._noise_keys(round)] for round in (0, 0, 1))
    assert once == again
    assert not set(once) & set(later)


def test_a_saved_state_resumes_to_the_bit(population, tmp_path):
    adam = ServerOptimizer("adam", learning_rate=0.1, average=0.9)
    whole = trained(population, CHOSEN, rounds=4, server_optimizer=adam)
    trained(population, CHOSEN, rounds=2, server_optimizer=adam).save(tmp_path / "state.npz")
    resumed = trained(population, CHOSEN, rounds=0, server_optimizer=adam)
    resumed.load(tmp_path / "state.npz")
    resumed.run(4)
    same(whole, resumed)


def test_server_momentum_and_the_average_are_post_processing_of_the_same_updates(population):
    momentum = ServerOptimizer(momentum=0.9, average=0.5)
    plain = trained(population, CHOSEN, rounds=1)
    moved = trained(population, CHOSEN, rounds=1, server_optimizer=momentum)
    np.testing.assert_array_equal(plain.global_model(), moved.global_model())  # the first step has no momentum yet
    result = simulate(population, MODEL, CHOSEN, TRAINING, ServerOptimizer(average=0.5), rounds=2, noise_seed=1)
    assert {row.model for row in result.history} == {"global", "personal", "average"}


def test_metrics_are_those_of_a_plain_loop(population):
    simulation = trained(population, CHOSEN)
    rows = {(r.group, r.model, r.metric): r.value for r in simulation.evaluate()[0]}
    test = population.test
    scores = {"global": [], "personal": []}
    for k in range(population.num_clients):
        here = slice(test.start_K[k], test.start_K[k] + test.count_K[k])
        x, y = test.x_N[here] / np.float32(255), test.y_N[here]
        for model in scores:
            theta = simulation.model(client=k if model == "personal" else None)
            scores[model].append(float((np.argmax(MODEL.apply(theta, x, None), axis=1) == y).mean()))
    first = 0
    for group in CHOSEN.groups:
        for model, all_scores in scores.items():
            mine = all_scores[first : first + group.clients]
            assert rows[group.name, model, "accuracy"] == pytest.approx(np.mean(mine), abs=1e-6)
            assert rows[group.name, model, "variance"] == pytest.approx(np.var(mine), abs=1e-6)
            assert rows[group.name, model, "worst_decile"] == pytest.approx(min(mine), abs=1e-6)
        first += group.clients


def test_scores_of_single_clients_are_those_of_which_groups_have_the_means(population):
    result = simulate(population, MODEL, CHOSEN, TRAINING, ServerOptimizer(average=0.5), rounds=2, seed=3, noise_seed=1)
    assert set(result.scores) == {"global", "personal", "average"}
    rows = {(r.group, r.model, r.metric): r.value for r in result.history}
    group_K = CHOSEN.client_group_indices
    for model, score_K in result.scores.items():
        assert score_K.shape == (population.num_clients,)
        for number, group in enumerate(CHOSEN.groups):
            mine = score_K[group_K == number]
            assert rows[group.name, model, "accuracy"] == pytest.approx(mine.mean())
            assert rows[group.name, model, "variance"] == pytest.approx(mine.var())
    assert (result.scores["global"] != result.scores["personal"]).any()


def test_the_worst_decile_of_thirty_clients_is_the_mean_of_three():
    score_K = np.random.default_rng(0).permutation(30) / 30
    rows = {row.metric: row.value for row in group_rows(1, "global", ["all"], np.zeros(30, int), score_K)}
    assert rows["worst_decile"] == pytest.approx(1 / 30)
    assert rows["accuracy"] == pytest.approx(14.5 / 30)


class Unfinished:
    """A round that somebody may wait for."""

    waited = False

    def block_until_ready(self) -> None:
        self.waited = True


@pytest.mark.skipif(len(jax.devices()) == 1, reason="one device has nobody to wait for")
def test_rounds_do_not_queue_up_for_several_devices(population, monkeypatch):
    simulation = trained(population, CHOSEN, 1)
    run_round, previous, waited = simulation.engine.round, Unfinished(), []
    monkeypatch.setattr(simulation.engine, "round", lambda *a: waited.append(previous.waited) or run_round(*a))
    simulation._done = previous
    simulation.run_round()
    assert waited == [True]
    simulation._done = previous = Unfinished()
    simulation.evaluate()
    assert previous.waited


def test_groups_that_do_not_add_up_to_the_population_are_refused(population):
    with raises_field("groups", DataError):
        Simulation(population, MODEL, mechanism_of((18, 1.0, 1.0)))


SCRIPT = """
import sys, numpy as np
from helpers import mechanism_of, tiny_data
from test_simulate import CHOSEN, trained
population = tiny_data([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 4, 4, 4, 9, 1, 6])
simulation = trained(population, CHOSEN)
assert simulation.engine.devices == int(sys.argv[1])
personal = simulation.personal_models(np.flatnonzero(simulation.participated_K))
np.savez(sys.argv[2], theta=simulation.global_model(), clip=simulation.server_state.clip, personal=personal)
"""


def test_a_server_may_have_fewer_test_examples_than_there_are_devices():
    code = """
import jax; jax.config.update('jax_num_cpu_devices', 4); jax.devices()
from helpers import tiny_data
from test_simulate import CHOSEN, trained
population = tiny_data([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 4, 4, 4, 9, 1, 6])
for examples in (1, 3):
    few = population._replace(server_x_N=population.server_x_N[:examples], server_y_N=population.server_y_N[:examples])
    simulation = trained(few, CHOSEN, 1)
    print(simulation.engine.devices, [row.value for row in simulation.evaluate()[0]][0] * examples)
"""
    environment = os.environ | {"PYTHONPATH": os.path.dirname(__file__)}
    said = subprocess.run([sys.executable, "-c", code], check=True, env=environment, capture_output=True, text=True)
    for line in said.stdout.splitlines():
        devices, right = line.split()
        assert devices == "4"
        assert float(right) == pytest.approx(round(float(right)), abs=1e-5)  # each is counted once


def test_noise_is_drawn_once_however_many_devices_there_are(tmp_path):
    runs = []
    for devices in (1, 2, 4):
        code = f"import jax; jax.config.update('jax_num_cpu_devices', {devices}); jax.devices()\n" + SCRIPT
        environment = os.environ | {"PYTHONPATH": os.path.dirname(__file__)}
        arguments = [sys.executable, "-c", code, str(devices), str(tmp_path / f"{devices}.npz")]
        subprocess.run(arguments, check=True, env=environment)
        runs.append(np.load(tmp_path / f"{devices}.npz"))
    for other in runs[1:]:
        for name in ("theta", "clip", "personal"):
            np.testing.assert_allclose(other[name], runs[0][name], atol=1e-5)


def test_the_example_that_brings_its_own_data_and_model_runs():
    """Personal models, which have seen their clinic's own rule, are right more often than the global one."""
    example = Path(__file__).parents[1] / "examples" / "own.py"
    said = subprocess.run([sys.executable, example], capture_output=True, text=True, check=True).stdout
    *priced, _ = said.split("all alike\n")[0].split("\n")
    assert [line.split(":")[0] for line in priced] == ["none", "some", "strong"]
    tables, *of_clinics = said.split("all alike\n")[1].partition("with weights")
    for of_rule in tables.split("by their noise\n"):
        scores = {tuple(line.split()[:2]): float(line.split()[2]) for line in of_rule.splitlines()}
        assert len(scores) == 7
        assert all(scores[name, "personal"] > scores[name, "global"] + 0.1 for name in ("none", "some", "strong"))
    better = re.findall(r"their own models are better for (\d+) of 600 clinics", "".join(of_clinics))
    assert len(better) == 2
    assert min(map(int, better)) > 300


def test_a_server_without_a_test_set_says_nothing_of_it(population):
    blind = population._replace(server_x_N=population.server_x_N[:0], server_y_N=population.server_y_N[:0])
    found = simulate(blind, MODEL, CHOSEN, TRAINING, rounds=1).result("x")
    assert found.server_accuracy is None
    assert found.groups[0].global_accuracy is not None


def test_rounds_and_mechanisms_that_cannot_be_meant_are_refused_in_words(population):
    for rounds in (0, True, 1.5, None):
        with raises_field("rounds"):
            simulate(population, MODEL, CHOSEN, TRAINING, rounds=rounds)
    for every in (0, -1, 0.5):
        with raises_field("evaluate_every"):
            simulate(population, MODEL, CHOSEN, TRAINING, rounds=1, evaluate_every=every)
    with raises_field("mechanism"):
        simulate(population, MODEL, [CHOSEN], TRAINING, rounds=1)
    with raises_field("seed"):
        simulate(population, MODEL, CHOSEN, TRAINING, rounds=1, seed=-1)
    assert simulate(population, MODEL, CHOSEN, TRAINING, rounds=np.int64(1)).rounds == 1


def test_examples_from_lists_are_those_of_each_client():
    x = [np.arange(2 * n, dtype=np.float32).reshape(n, 2) + 100 * n for n in (3, 1, 2)]
    made = from_lists(x, [np.arange(len(one)) for one in x])
    assert made.count_K.tolist() == [3, 1, 2]
    np.testing.assert_array_equal(made.x_N[made.start_K[2] :], x[2])
    with raises_field("y_K", DataError):
        from_lists(x, [np.arange(3), np.arange(3), np.arange(2)])
    with raises_field("counts", DataError):
        examples(np.zeros((2, 1)), np.zeros(2), [1.5, 0.5])

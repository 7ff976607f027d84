"""Simulated rounds against Algorithm 1 in plain loops, and what moves the global model."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import optax
import pytest
import reference
from helpers import group_by_group, mechanism_of, raises_field, tiny_data
from msgspec.structs import replace
from simulations import CHOSEN, MODEL, TRAINING, same_server, trained

from fedhdp.algorithms import local_only, non_private
from fedhdp.client import LocalTraining
from fedhdp.clips import LayerClip
from fedhdp.data import Examples, FederatedData, examples
from fedhdp.mechanism import Mechanism, PrivacyGroup
from fedhdp.models import Model, mlp
from fedhdp.optimizers import OptimizerConfig
from fedhdp.simulation import Simulation

THREE_LAYERS = LayerClip({"first/w": 0.3, "first/b": 0.02, "rest": 0.1}, learning_rate=0.0)
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
    "two layers": mechanism_of((4, 0.0, 1.0), (15, 1.5, 0.1), clip=LayerClip({"first": 0.3, "rest": 0.1})),
    "three fixed layers": mechanism_of((4, 0.0, 1.0), (15, 1.5, 0.1), clip=THREE_LAYERS, noise="per_group"),
}

COSINE = {"schedule": "cosine_decay_schedule", "init_value": 0.02, "decay_steps": 6}
ADAM = {
    "optimizer": OptimizerConfig("adam", learning_rate=COSINE, eps=1e-3),
    "personal_learning_rate": 0.01,
    "proximal": 0.8,
}
CLIPPED = {"optimizer": optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1, momentum=0.9))}


@pytest.mark.parametrize("mechanism", MECHANISMS.values(), ids=MECHANISMS.keys())
def test_rounds_agree_with_algorithm_1_in_plain_loops(data, mechanism: Mechanism):
    agree(data, mechanism)


def test_rounds_agree_with_plain_loops_for_clients_of_one_size():
    agree(tiny_data([7] * 19), MECHANISMS["three levels, shared noise"])


@pytest.mark.parametrize("sizes", [[7] * 19, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 4, 4, 4, 9, 1, 6]])
@pytest.mark.parametrize(
    "otherwise",
    [{"drop_remainder": True}, {"personal_epochs": 1}, {"personal_epochs": 5}, {"proximal": 0.8}, ADAM, CLIPPED],
    ids=["drop_remainder", "personal_epochs", "more personal_epochs", "proximal", "adam", "optax"],
)
def test_rounds_agree_with_plain_loops_for_other_training(sizes, otherwise):
    rates = {"learning_rate": None, "decay": 1.0} if "optimizer" in otherwise else {}
    agree(tiny_data(sizes), MECHANISMS["two levels, the paper's"], replace(TRAINING, **rates, **otherwise))


def agree(data: FederatedData, mechanism: Mechanism, training: LocalTraining = TRAINING) -> None:
    """The engine and the reference come to the same models and clip."""
    simulation = trained(data, mechanism, rounds=0, training=training)
    first = simulation.model()
    simulation.run(5)
    network = {
        "w1": first["first"]["w"],
        "b1": first["first"]["b"],
        "w2": first["rest"]["w"],
        "b2": first["rest"]["b"],
    }
    network = {name: np.asarray(value, np.float64) for name, value in network.items()}
    theta, clip, personal = reference.train(data, mechanism, training, network, 5, seed=3, noise_seed=7)

    np.testing.assert_allclose(simulation.global_model(), theta, atol=2e-5)
    np.testing.assert_allclose(np.ravel(simulation.server_state.clip[0]), clip, rtol=1e-5)
    assert set(personal) == set(np.flatnonzero(simulation.participated_K))
    for client, own in personal.items():
        np.testing.assert_allclose(simulation.personal_models(client)[0], own, atol=2e-5)


@pytest.mark.slow
def test_proximal_term_shortens_updates(data):
    for model in (MODEL, Model(MODEL.init, MODEL.apply)):  # the second trains on its parameters themselves
        moved = []
        for proximal in (0.0, 0.8, 4.0):
            training = replace(TRAINING, proximal=proximal, personalize=False)
            simulation = Simulation(data, model, replace(non_private(CHOSEN), clip=100.0), training, noise_seed=7)
            initial = simulation.global_model()
            simulation.run(1)
            moved.append(np.linalg.norm(simulation.global_model() - initial))
        assert moved[0] > 1.1 * moved[1] > 1.2 * moved[2] > 0
    with raises_field("proximal"):
        replace(TRAINING, proximal=2 / TRAINING.learning_rate)


def test_personal_models_leave_the_global_model(data):
    stronger = replace(CHOSEN, groups=tuple(replace(group, pull=3.0) for group in CHOSEN.groups))
    weak, strong = trained(data, CHOSEN), trained(data, stronger)
    same_server(weak, strong)
    participated = np.flatnonzero(weak.participated_K)
    assert np.abs(weak.personal_models(participated) - strong.personal_models(participated)).max() > 0.01


def test_global_model_is_the_same_without_personal_models(data):
    one = trained(data, CHOSEN)
    other = trained(data, CHOSEN, training=replace(TRAINING, personalize=False))
    assert other.store is None
    np.testing.assert_allclose(
        one.global_model(), other.global_model(), atol=1e-6
    )  # clients are added in another order


def test_local_only_trains_personal_models_alone(data):
    simulation = trained(data, local_only(CHOSEN), rounds=0)
    initial = simulation.global_model()
    simulation.run(3)
    np.testing.assert_array_equal(simulation.global_model(), initial)
    personal = simulation.personal_models(np.flatnonzero(simulation.participated_K))
    assert (np.abs(personal - initial).max(axis=1) > 0.01).all()


def test_weight_0_leaves_the_global_model(data):
    chosen = mechanism_of((4, 0.0, 1.0), (15, 1.5, 0.0), clip=0.2)
    data = data.with_levels(group_by_group(chosen))
    private = slice(data.train.start_K[4], None)
    x_N = data.train.x_N.copy()
    x_N[private] = 255 - x_N[private]
    other = data._replace(train=data.train._replace(x_N=x_N))
    same_server(trained(data, chosen), trained(other, chosen))


@pytest.mark.slow
def test_more_padding_changes_no_result(data):
    one = trained(data.with_levels(group_by_group(CHOSEN)), CHOSEN)
    train = data.train
    much = train._replace(count_K=np.append(train.count_K, 40), start_K=np.append(train.start_K, 0))
    test = data.test
    test = test._replace(count_K=np.append(test.count_K, 1), start_K=np.append(test.start_K, 0))
    never = replace(CHOSEN.groups[-1], name="never sampled", clients=1, sampling_rate=0.0, weight=0.0)
    wider = replace(CHOSEN, groups=(*CHOSEN.groups, never))
    other = trained(data._replace(train=much, test=test, levels=group_by_group(wider)), wider)
    np.testing.assert_allclose(one.global_model(), other.global_model(), atol=1e-6)
    assert not other.participated_K[-1]


def test_updates_are_not_weighted_by_example_counts():
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


class Streamed(NamedTuple):
    """Examples that are read for each cohort, and so not checked when a simulation is made."""

    examples: Examples

    @property
    def count_K(self) -> np.ndarray:
        """How many examples each client has."""
        return self.examples.count_K

    @property
    def uniform_size(self) -> bool:
        """Whether all clients have the same number of examples."""
        return self.examples.uniform_size

    def take(self, clients_C: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
        """The inputs and targets of these clients."""
        return self.examples.take(clients_C, capacity)


def test_nan_update_is_refused_and_counted(data):
    x_N = data.train.x_N.astype(np.float32) / 255
    x_N[data.train.start_K[5] :][: data.train.count_K[5]] = np.nan
    test = data.test._replace(x_N=data.test.x_N / np.float32(255))
    server = data.server_x_N / np.float32(255)
    ill = data._replace(train=Streamed(data.train._replace(x_N=x_N)), test=test, server_x_N=server, input_scale=None)
    everyone = mechanism_of((4, 0.0, 1.0), (15, 1.0, 0.5), rate=1.0)
    simulation = trained(ill.with_levels(group_by_group(everyone)), everyone, rounds=2)
    assert np.isfinite(simulation.global_model()).all()
    assert np.isfinite(float(simulation.server_state.clip[0]))
    (rows,) = simulation.evaluate()
    assert {row.group: row.value for row in rows if row.metric == "refused"} == {"group 0": 0, "group 1": 2}


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_inputs_that_are_not_finite_change_no_other_client(bad):
    data = tiny_data([5] * 19, inputs=40)
    x_N = data.train.x_N / np.float32(255)
    rest = {"test": data.test._replace(x_N=data.test.x_N / np.float32(255))}
    everyone, model = mechanism_of((4, 0.0, 1.0), (15, 1.0, 0.5), rate=1.0), mlp(40, 5, 3)
    simulations = []
    for ill in (False, True):
        x = x_N.copy()
        if ill:
            x[5 * 7] = bad  # an image of client 7, of the second group
        train = Streamed(data.train._replace(x_N=x))
        sick = data._replace(train=train, server_x_N=data.server_x_N / np.float32(255), input_scale=None, **rest)
        sick = sick.with_levels(group_by_group(everyone))
        simulation = Simulation(sick, model, everyone, TRAINING, seed=3, noise_seed=7)
        simulation.run(1)
        simulations.append(simulation)
    well, sick = simulations
    assert np.asarray(sick.server_state.refused_G).tolist() == [[0, 1]]
    assert np.isfinite(sick.global_model()).all()
    others = np.delete(np.arange(19), 7)
    np.testing.assert_array_equal(well.personal_models(others), sick.personal_models(others))


def test_rounds_with_an_empty_cohort(data):
    empty_cohorts = mechanism_of((4, 0.0, 1.0), (15, 1.0, 0.5), rate=0.0)
    simulation = trained(data, empty_cohorts)
    assert np.isfinite(simulation.global_model()).all()
    assert not simulation.participated_K.any()
    rare = mechanism_of((4, 0.0, 1.0), (15, 1.0, 0.5), rate=0.01)
    assert np.isfinite(trained(data, rare).global_model()).all()


@pytest.mark.slow
def test_size_of_one_client_does_not_change_others():
    """Training that magnifies every rounding: others must not be computed differently because of a large client."""
    rng = np.random.default_rng(2)
    sizes = rng.integers(8, 20, 64)
    sizes[0] = 100
    x_N, y_N = rng.normal(size=(sizes.sum(), 30)).astype(np.float32), rng.integers(0, 10, sizes.sum()).astype(np.int32)
    clients = examples(x_N, y_N, sizes)
    data = FederatedData("labels at random", clients, clients, x_N[:50], y_N[:50], 10)
    one_group = Mechanism((PrivacyGroup("all", 64, 0.0, 1.0),), clip=1.0)
    training = LocalTraining(epochs=100, batch_size=4, learning_rate=1.0, personalize=False)
    model = mlp(30, 20, 10)

    def moved(cohort: np.ndarray) -> np.ndarray:
        simulation = Simulation(data, model, one_group, training)
        assert len(simulation.engine.config.sizes) > 1
        simulation.draw_cohort = lambda round: cohort  # type: ignore[method-assign]
        initial = simulation.global_model().astype(np.float64)
        simulation.run(1)
        return 64 * (simulation.global_model().astype(np.float64) - initial)

    change = moved(np.arange(64)) - moved(np.arange(1, 64))
    assert np.linalg.norm(change) <= 1 + 1e-4
    np.testing.assert_allclose(change, moved(np.arange(1)), atol=1e-4)

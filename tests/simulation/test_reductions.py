"""Algorithms that are the same for some mechanisms are the same to the bit."""

from __future__ import annotations

import jax
import numpy as np
import optax
import pytest
from helpers import mechanism_of
from msgspec.structs import replace
from simulations import CHOSEN, MODEL, TRAINING, same, trained

from fedhdp.algorithms import dp_fedavg, fedhdp, hdp_fedavg, non_private
from fedhdp.client import LocalTraining
from fedhdp.clips import AdaptiveClip, LayerClip
from fedhdp.models import Model, linear
from fedhdp.simulation import Simulation


def test_fedhdp_with_weight_1_is_hdp_fedavg_to_the_bit(data):
    ones = replace(CHOSEN, groups=tuple(replace(g, weight=1.0) for g in CHOSEN.groups))
    same(trained(data, fedhdp(ones)), trained(data, hdp_fedavg(CHOSEN)))


def test_hdp_fedavg_of_one_level_equals_dp_fedavg(data):
    alike = replace(CHOSEN, groups=tuple(replace(g, noise_multiplier=1.5) for g in CHOSEN.groups))
    same(trained(data, hdp_fedavg(alike)), trained(data, dp_fedavg(alike)))


def test_dp_fedavg_of_opted_out_equals_non_private(data):
    open_ = replace(CHOSEN, groups=tuple(replace(g, noise_multiplier=0.0) for g in CHOSEN.groups))
    same(trained(data, dp_fedavg(open_)), trained(data, non_private(CHOSEN)))


def test_shared_equals_per_group_noise_with_one_private_group(data):
    chosen = mechanism_of((4, 0.0, 1.0), (15, 1.5, 0.1))
    same(trained(data, chosen), trained(data, replace(chosen, noise="per_group")))


def test_sgd_by_name_is_plain_sgd_to_the_bit(data):
    plain, named = LocalTraining(2, 4, 0.3), LocalTraining(2, 4, optimizer={"name": "sgd", "learning_rate": 0.3})
    simulation = trained(data, CHOSEN, training=named, server_optimizer=optax.sgd(1.0))
    same(trained(data, CHOSEN, training=plain), simulation)
    network, capacity = simulation.engine.network, simulation.engine.config.sizes[-1]
    assert network.split(capacity).first_layer is not None  # plain SGD may train it in the span of the examples


def in_one_layer(key):
    return {"net": MODEL.init(key)}


FULL_RANK = Model(in_one_layer, lambda theta, x_N, key: MODEL.apply(theta["net"], x_N, key))


@pytest.mark.parametrize(
    ("model", "layer"), [(linear(12, 3), "first"), (FULL_RANK, "net")], ids=["low rank", "full rank"]
)
def test_one_layer_is_the_flat_clip_to_the_bit(data, model, layer):
    """In both parametrizations, with a clip that moves and for two runs in one program."""
    states = []
    for clip in (AdaptiveClip(0.1), LayerClip({layer: 0.1})):
        mechanisms = [replace(CHOSEN, clip=clip), replace(hdp_fedavg(CHOSEN), clip=clip)]
        simulation = Simulation(data, model, mechanisms, TRAINING, seed=3, noise_seed=7)
        simulation.run(3)
        states.append([np.ravel(leaf) for leaf in jax.tree.leaves(simulation.server_state)])
    for flat, layered in zip(*states, strict=True):
        np.testing.assert_array_equal(flat, layered)

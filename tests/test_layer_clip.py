"""A clip for each layer: its sensitivity, its price, and that one layer is the flat clip."""

from __future__ import annotations

import math

import dp_accounting as dp
import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from helpers import mechanism_of, raises_field
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from fedhdp.algorithms import local_only, non_private
from fedhdp.clips import AdaptiveClip, LayerClip
from fedhdp.mechanism import Mechanism, PrivacyGroup
from fedhdp.privacy.accounting import epsilon
from fedhdp.privacy.calibration import calibrate, weight_of_own_noise
from fedhdp.privacy.costs import privacy_costs
from fedhdp.server import Layers, Sums, clip_and_sum, dense_updates, make_layers, private_mean

SIZES = {"a/b": 5, "a/w": 60, "c": 1, "d.weight": 30, "d.bias": 4}  # paths, as those of a model
CLIP = LayerClip({"a": 0.3, "c": 1e-3, "d": 20.0})
MECHANISM = mechanism_of((50, 0.0, 1.0), (50, 1.5, 0.1), rate=0.2, clip=CLIP)
LAYERS = make_layers(MECHANISM, SIZES)
assert LAYERS is not None
LAYER_P = np.repeat(LAYERS.layer_of, LAYERS.sizes)


def summed(mechanism: Mechanism, layers: Layers | None, clip, update_CP, group_C, participating_C) -> Sums:
    """The sums of these updates, some of whose clients take part."""
    updates = dense_updates(jnp.asarray(update_CP, jnp.float32), layers)
    return clip_and_sum(mechanism.round_params, jnp.asarray(clip, jnp.float32), updates, group_C, participating_C)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    scale_L=st.lists(
        st.sampled_from([0.0, 1e-30, 1e-3, 1.0, 1e6, 1e25, 3e38, math.inf, math.nan]), min_size=3, max_size=3
    ),
    clip_L=st.lists(st.sampled_from([1e-9, 1e-3, 0.7, 1e3, 1e9]), min_size=3, max_size=3),
    group=st.integers(0, 1),
    others=st.sampled_from([1.0, 1e8]),
)
def test_one_client_moves_the_sums_by_at_most_their_sensitivity(seed, scale_L, clip_L, group, others):
    """The client may send anything; the sums are compared in float64, divided layer by layer by the clips."""
    rng = np.random.default_rng(seed)
    update_CP = rng.normal(size=(8, 100)).astype(np.float32) * others
    with np.errstate(over="ignore", invalid="ignore"):
        update_CP[3] *= np.float32(scale_L)[LAYER_P] / others
    group_C, everyone_C = rng.integers(0, 2, 8), np.ones(8, bool)
    group_C[3] = group
    sums, without = (
        summed(MECHANISM, LAYERS, clip_L, update_CP, group_C, participating_C)
        for participating_C in (everyone_C, np.arange(8) != 3)
    )
    assert np.isfinite(sums.update_P).all()
    whitened_P = (np.float64(sums.update_P) - np.float64(without.update_P)) / np.float32(clip_L)[LAYER_P]
    assert np.linalg.norm(whitened_P) <= MECHANISM.l2_sensitivity(MECHANISM.groups[group]) * (1 + 1e-6)
    bits = np.linalg.norm(np.asarray(sums.bits) - np.asarray(without.bits))
    assert bits <= MECHANISM.bit_l2_sensitivity * (1 + 1e-12)


def test_the_sensitivities_are_reached():
    """A client who exceeds every clip moves the sums by their sensitivities, so that these are not too large either."""
    ones_CP, one_C = np.full((1, 100), 1e6), np.ones(1, bool)
    sums = summed(MECHANISM, LAYERS, MECHANISM.initial_clip, ones_CP, np.array([1]), one_C)
    whitened_P = np.float64(sums.update_P) / MECHANISM.initial_clip[LAYER_P]
    assert np.linalg.norm(whitened_P) == pytest.approx(0.1 * math.sqrt(3), rel=1e-5)
    assert MECHANISM.l2_sensitivity(MECHANISM.groups[1]) == pytest.approx(0.1 * math.sqrt(3), rel=1e-3)
    assert np.linalg.norm(sums.bits) == pytest.approx(math.sqrt(3) / 2) == MECHANISM.bit_l2_sensitivity


@pytest.mark.parametrize("noise", ["shared", "per_group"])
@pytest.mark.parametrize("learning_rate", [0.0, 0.2])
def test_epsilon_is_that_of_the_gaussian_queries(noise, learning_rate):
    """An adversary who knows all others sees the update and the bits of one client, each over its noise."""
    groups = (PrivacyGroup("mild", 300, 0.6, 0.1), PrivacyGroup("strict", 200, 1.2, 0.1, weight=0.3))
    clip = replace(CLIP, learning_rate=learning_rate)
    mechanism = Mechanism(groups, clip, noise)
    params = mechanism.round_params
    for group in groups:
        signals = [group.weight * math.sqrt(3) / float(params.update_noise_stddev)]
        if learning_rate:
            signals += [0.5 / float(params.bit_noise_stddev)] * 3
        if noise == "per_group":  # the noise that the group is promised, as its own sum may be released
            signals[0] = math.sqrt(3) / (mechanism.update_noise_multiplier(group) * math.sqrt(3))
        rounds = dp.PoissonSampledDpEvent(0.1, dp.GaussianDpEvent(1 / math.hypot(*signals)))
        expected = dp.rdp.RdpAccountant().compose(rounds, 50).get_epsilon(1e-5)
        assert epsilon(mechanism, 50, 1e-5, "rdp")[group.name] == pytest.approx(expected, rel=2e-3)


@pytest.mark.parametrize("bit_noise_stddev", [None, 9.0])
def test_one_layer_is_the_flat_clip_to_the_bit(bit_noise_stddev):
    flat = replace(MECHANISM, clip=AdaptiveClip(0.3, bit_noise_stddev=bit_noise_stddev))
    layered = replace(flat, clip=LayerClip({"net": 0.3}, bit_noise_stddev=bit_noise_stddev))
    for a, b in zip(flat.round_params, layered.round_params, strict=True):
        np.testing.assert_array_equal(a, b)
    assert privacy_costs(flat) == privacy_costs(layered)
    layers = make_layers(layered, {"net/b": 40, "net/w": 60})
    update_CP = np.random.default_rng(0).normal(size=(8, 100)) * np.logspace(-3, 3, 8)[:, None]
    update_CP[2, 7] = np.nan
    group_C, everyone_C = np.arange(8) % 2, np.ones(8, bool)
    sums_1 = summed(flat, None, 0.3, update_CP, group_C, everyone_C)
    sums_L = summed(layered, layers, [0.3], update_CP, group_C, everyone_C)
    released_1 = private_mean(flat.round_params, jnp.float32(0.3), sums_1, jax.random.key(5))
    released_L = private_mean(layered.round_params, jnp.float32([0.3]), sums_L, jax.random.key(5), layers)
    for a, b in zip((*sums_1, *released_1), (*sums_L, *released_L), strict=True):
        np.testing.assert_array_equal(a, np.reshape(b, np.shape(a)))


def test_fixed_layers_are_a_fixed_clip():
    fixed, layered = replace(MECHANISM, clip=0.3), replace(MECHANISM, clip=LayerClip({"net": 0.3}, learning_rate=0.0))
    assert privacy_costs(fixed) == privacy_costs(layered)
    assert privacy_costs(fixed) == privacy_costs(replace(MECHANISM, clip=AdaptiveClip(0.3, learning_rate=0.0)))
    sums = Sums(jnp.zeros(100), jnp.float32([7.0]), jnp.zeros(2, jnp.int32))  # bits must not reach what is released
    _, clip = private_mean(layered.round_params, jnp.float32([0.3]), sums, jax.random.key(0), Layers((0,), (100,)))
    np.testing.assert_array_equal(clip, np.float32([0.3]))


def test_noise_of_each_layer_is_its_clip_times_the_noise():
    mechanism = replace(MECHANISM, clip=LayerClip({"a": 0.3, "b": 5.0}))
    layers = Layers((0, 1, 0), (20_000, 30_000, 10_000))
    zeros = Sums(jnp.zeros(60_000), jnp.zeros(2), jnp.zeros(2, jnp.int32))
    update_P, _ = private_mean(mechanism.round_params, jnp.float32([0.3, 5.0]), zeros, jax.random.key(1), layers)
    noise_P = np.asarray(update_P) * float(mechanism.round_params.expected_weight)
    for part, clip in ((slice(20_000), 0.3), (slice(20_000, 50_000), 5.0), (slice(50_000, None), 0.3)):
        assert noise_P[part].std() == pytest.approx(clip * mechanism.update_noise_stddev, rel=0.03)


def test_each_clip_follows_the_norms_of_its_own_layer():
    mechanism = replace(MECHANISM, clip=LayerClip({"a": 1.0, "b": 1.0}, quantile=0.8))
    layers, params = Layers((0, 1), (1, 1)), mechanism.round_params._replace(bit_noise_stddev=np.float32(0))
    norm_CL = np.random.default_rng(0).uniform((1, 10), (2, 20), (20, 2))
    clip = jnp.ones(2)
    for round in range(200):
        sums = summed(mechanism, layers, clip, norm_CL, np.ones(20, int), np.ones(20, bool))
        _, clip = private_mean(params, clip, sums, jax.random.key(round), layers)
    np.testing.assert_allclose(clip, np.quantile(norm_CL, 0.8, axis=0), rtol=0.05)


def test_bits_of_many_layers_cost_as_much_as_one():
    group = MECHANISM.groups[1]
    many = LayerClip({f"layer {number}": 1.0 for number in range(40)})
    of_one, of_many = (replace(MECHANISM, clip=clip) for clip in (AdaptiveClip(1.0), many))
    assert of_many.update_noise_multiplier(group) == pytest.approx(of_one.update_noise_multiplier(group))
    least = 1.5 * math.sqrt(40) / 2
    assert replace(of_many, clip=replace(many, bit_noise_stddev=least * 1.01)).effective_noise_multiplier(group) >= 1.5
    with raises_field("bit_noise_stddev"):
        replace(of_many, clip=replace(many, bit_noise_stddev=least * 0.99))


def test_weight_of_a_group_s_own_noise_is_that_of_the_flat_clip():
    groups = PrivacyGroup("mild", 300, 0.6, 0.1, weight=0.2), PrivacyGroup("strict", 200, 2.0, 0.1, weight=0.2)
    for clip in (1.0, LayerClip({"a": 0.3, "b": 2.0}, learning_rate=0.0)):
        mechanism = Mechanism(groups, clip)
        weight = weight_of_own_noise(mechanism, groups[0])
        assert weight == pytest.approx(0.2 * 2.0 / 0.6, rel=1e-4)
        own = replace(mechanism, groups=(replace(groups[0], weight=weight * 1.001), groups[1]))
        assert own.effective_noise_multiplier(own.groups[0]) == pytest.approx(0.6, rel=2e-3)


def test_calibration_keeps_the_epsilon_with_layers():
    mechanism = calibrate(MECHANISM, {"group 1": 2.0}, 100, 1e-5, "rdp")
    assert 1.98 <= epsilon(mechanism, 100, 1e-5, "rdp")["group 1"] <= 2.0


def test_baselines_keep_the_layers():
    for algorithm in (local_only, non_private):
        assert algorithm(MECHANISM).layers == MECHANISM.layers
    assert all(cost.free for cost in privacy_costs(local_only(MECHANISM)).values())
    assert non_private(MECHANISM).bit_noise_stddev == 0


def test_an_update_that_is_not_finite_in_one_layer_is_absent_in_all():
    update_CP = np.ones((2, 100))
    update_CP[1, 99] = np.inf
    sums = summed(MECHANISM, LAYERS, MECHANISM.initial_clip, update_CP, np.array([0, 1]), np.ones(2, bool))
    alone = summed(MECHANISM, LAYERS, MECHANISM.initial_clip, update_CP, np.array([0, 1]), np.array([True, False]))
    np.testing.assert_array_equal(sums.update_P, alone.update_P)
    np.testing.assert_array_equal(sums.bits, alone.bits)
    np.testing.assert_array_equal(sums.refused_G, [0, 1])


def test_layers_are_the_beginnings_of_paths():
    assert Layers((0, 0, 1, 2, 2), (5, 60, 1, 30, 4)) == LAYERS
    assert LAYERS.segments == [(0, slice(0, 65)), (1, slice(65, 66)), (2, slice(66, 100))]
    assert make_layers(replace(MECHANISM, clip=1.0), SIZES) is None


@pytest.mark.parametrize(
    ("layers", "named"),
    [
        (["a", "c"], "d.weight"),  # a parameter in no layer
        (["a", "c", "d", "a/w"], "a/w"),  # one in two
        (["a", "c", "d", "e"], "e"),  # a layer of no parameter
        (["a", "c", "d.w", "d.bias"], "d.weight"),  # half a name
    ],
)
def test_every_parameter_belongs_to_exactly_one_layer(layers, named):
    mechanism = replace(MECHANISM, clip=LayerClip(dict.fromkeys(layers, 1.0)))
    with raises_field("clip.layers") as caught:
        make_layers(mechanism, SIZES)
    assert named in str(caught.value)


@pytest.mark.parametrize(
    ("clip", "field"),
    [
        ({"layers": {}}, "clip.layers"),
        ({"layers": {"a": 0.0}}, "clip.layers.a"),
        ({"layers": {"a": math.nan}}, "clip.layers.a"),
        ({"layers": {"": 1.0}}, "clip.layers"),
        ({"layers": {"a": "wide"}}, "clip.layers[...]"),
        ({"layers": [1.0]}, "clip.layers"),
        ({"layers": {"a": 1.0}, "initial": 0.5}, "clip.initial"),
        ({"layers": {"a": 1.0}, "quantile": 2.0}, "clip.quantile"),
        ({"layers": {"a": 1.0}, "learning_rate": math.inf}, "clip.learning_rate"),
        ({"layers": {"a": 1.0}, "bit_noise_stddev": -1.0}, "clip.bit_noise_stddev"),
        ({"initial": 0.0}, "clip.initial"),
        ({"initial": "wide"}, "clip.initial"),
        ({"initial": 1.0, "quantil": 0.5}, "clip.quantil"),
        ({}, "clip"),
        (True, "clip"),
        ("wide", "clip"),
        (None, "clip"),
    ],
)
def test_invalid_clips_are_refused(clip, field):
    with raises_field(field):
        replace(MECHANISM, clip=clip)


def test_clips_are_values():
    reordered = LayerClip(dict(reversed(CLIP.layers.items())))
    assert (reordered, hash(reordered)) == (CLIP, hash(CLIP))
    assert replace(MECHANISM, clip=reordered).layers == MECHANISM.layers
    assert replace(MECHANISM, clip={"layers": {"a": 0.3, "c": 1e-3, "d": 20}}) == MECHANISM


def test_equal_layers_are_one_text():
    """A ledger compares mechanisms as text, so the order in which layers were written must not matter."""
    clips = LayerClip({"b": 1, "a": 0.5}), LayerClip({"a": 0.5, "b": 1.0})
    assert msgspec.json.encode(clips[0]) == msgspec.json.encode(clips[1])
    assert hash(clips[0]) == hash(clips[1])
    assert replace(MECHANISM, clip=clips[0]).layers == ("a", "b")

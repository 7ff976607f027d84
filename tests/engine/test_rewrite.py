"""Rewritten networks: the same outputs and gradients as the model's own ``apply``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedhdp.client import LocalTraining
from fedhdp.engine import patches, rewrite
from fedhdp.engine.explain import explain
from fedhdp.engine.network import Network
from fedhdp.models import Model, cnn

NUMBERS = {"NHWC": ("NHWC", "HWIO", "NHWC"), "NCHW": ("NCHW", "OIHW", "NCHW"), "mixed": ("NCHW", "HWIO", "NHWC")}


def network_of(model: Model, shape: tuple[int, ...], batch_size: int = 4) -> Network:
    return Network(model, jax.ShapeDtypeStruct(shape, jnp.float32), LocalTraining(1, batch_size))


def assert_same(model: Model, shape: tuple[int, ...], networks: int = 2) -> Network:
    """Outputs and gradients, of several networks side by side as the engine computes them."""
    network, key = network_of(model, shape), jax.random.key(1)
    theta_V = jax.vmap(model.init)(jax.random.split(jax.random.key(0), networks))
    x_VN = jax.random.normal(jax.random.key(2), (networks, 3, *shape))

    def values(apply: Callable, key: Any) -> Any:
        def of_one(theta: Any, x_N: jax.Array) -> Any:
            out_N = apply(theta, x_N, key)
            weight = jax.random.normal(jax.random.key(4), out_N.shape)
            return jnp.sum(weight * out_N), out_N

        return jax.vmap(jax.value_and_grad(of_one, argnums=(0, 1), has_aux=True))(theta_V, x_VN)

    def both(apply: Callable) -> Any:
        results = values(apply, None), values(apply, key)
        return jax.tree.map(
            jnp.ravel, results
        )  # XLA aborts where a product is a program's result in a layout of its own

    both = jax.jit(both, static_argnums=0)
    pairs = zip(*(jax.tree.leaves(both(apply)) for apply in (network.apply, model.apply)), strict=True)
    for a, b in pairs:
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
    return network


class Stack:
    """A network of convolutions, units and pooling in any layout, and a dense layer."""

    def __init__(self, layout: str, channels: int, size: tuple[int, int], stages: list[dict]):
        self.layout, self.channels, self.stages = layout, channels, stages
        self.shape = (*size, channels) if layout == "NHWC" else (channels, *size)

    def groups(self, stage: dict, inputs: int) -> tuple[int, int]:
        """How many groups a convolution has, one for each input or a single one, and its outputs."""
        return (inputs, inputs * (1 + stage["outputs"] % 2)) if stage["grouped"] else (1, stage["outputs"])

    def model(self) -> Model:
        def init(key: jax.Array) -> Any:
            keys = jax.random.split(key, 2 * len(self.stages) + 1)
            layers, inputs = [], self.channels
            for stage, w_key, b_key in zip(self.stages, keys[1::2], keys[2::2], strict=True):
                groups, outputs = self.groups(stage, inputs)
                sizes = {"H": stage["kernel"][0], "W": stage["kernel"][1], "I": inputs // groups, "O": outputs}
                w = jax.random.normal(w_key, [sizes[axis] for axis in NUMBERS[self.layout][1]]) / 3
                layers.append({"w": w, "b": jax.random.normal(b_key, (outputs,))})
                inputs = outputs
            flat = jax.eval_shape(self.convolutions, layers, jax.ShapeDtypeStruct((1, *self.shape), jnp.float32)).size
            return {"layers": layers, "w": jax.random.normal(keys[0], (flat, 3)) / max(flat, 1) ** 0.5}

        def apply(parameters: Any, x_N: jax.Array, key: jax.Array | None) -> jax.Array:
            image = self.convolutions(parameters["layers"], x_N, key)
            return image.reshape(len(image), -1) @ parameters["w"]

        return Model(init, apply)

    def convolutions(self, layers: Any, image: jax.Array, key: jax.Array | None = None) -> jax.Array:
        images, weights, out = NUMBERS[self.layout]
        for layer, stage in zip(layers, self.stages, strict=True):
            settings = {"lhs_dilation": stage["image_dilation"], "rhs_dilation": stage["dilation"]}
            settings |= {"feature_group_count": self.groups(stage, image.shape[images.index("C")])[0]}
            settings |= {"dimension_numbers": (images, weights, out)}
            image = jax.lax.conv_general_dilated(image, layer["w"], stage["strides"], stage["padding"], **settings)
            bias = layer["b"].reshape([-1 if axis == "C" else 1 for axis in out])
            for number, step in enumerate(stage["after"]):
                image = self.step(step, image, bias, out, None if key is None else jax.random.fold_in(key, number))
            image = jnp.transpose(image, [out.index(axis) for axis in images])
        return image

    def step(self, name: str, image: jax.Array, bias: jax.Array, layout: str, key: jax.Array | None) -> jax.Array:
        if name == "dropout":
            return image if key is None else jnp.where(jax.random.bernoulli(key, 0.7, image.shape), image / 0.7, 0.0)
        if name in ("bias", "relu", "tanh"):
            return {"bias": lambda: image + bias, "relu": lambda: jax.nn.relu(image), "tanh": lambda: jnp.tanh(image)}[
                name
            ]()
        window = [2 if axis in "HW" else 1 for axis in layout]
        if any(n < w for n, w in zip(image.shape, window, strict=True)):
            return image
        if name == "mean":
            return jax.lax.reduce_window(image, 0.0, jax.lax.add, window, window, "VALID") / 4
        strides = window if name == "max" else [1] * 4  # overlapping windows stay as they are
        return jax.lax.reduce_window(image, -jnp.inf, jax.lax.max, window, strides, "VALID")


@st.composite
def stages(draw: st.DrawFn) -> dict:
    pair = st.tuples(st.integers(1, 2), st.integers(1, 2))
    kernel = draw(st.tuples(st.integers(1, 3), st.integers(1, 3)))
    padding = draw(st.sampled_from([((2, 2), (2, 2)), ((2, 1), (1, 3)), ((-1, 3), (2, -1))]))
    steps = ["bias", "relu", "tanh", "max", "overlapping", "mean", "dropout"]
    usual = st.sampled_from(
        [["bias", "relu", "max"], ["bias", "max", "relu"], ["max", "bias", "relu"], ["relu", "max"]]
    )
    after = draw(usual | st.lists(st.sampled_from(steps), max_size=4))
    stage = {"strides": (1, 1), "image_dilation": (1, 1), "dilation": (1, 1), "padding": "SAME", "grouped": False}
    if not draw(st.booleans()):
        stage |= {"strides": draw(pair), "image_dilation": draw(pair), "dilation": draw(pair), "padding": padding}
        stage |= {"grouped": draw(st.booleans())}
    return stage | {"kernel": kernel, "after": after, "outputs": draw(st.integers(1, 4))}


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(st.data())
def test_random_networks_are_the_same(data):
    size, channels = data.draw(st.tuples(st.integers(6, 9), st.integers(6, 9))), data.draw(st.integers(1, 3))
    layout, drawn = data.draw(st.sampled_from(list(NUMBERS))), data.draw(st.lists(stages(), min_size=1, max_size=3))
    stack = Stack(layout, channels, size, drawn)
    assert_same(stack.model(), stack.shape)


def convolution(layout: str, *after: str) -> tuple[Model, tuple[int, ...]]:
    stage = {"kernel": (3, 3), "padding": "SAME", "outputs": 3, "grouped": False, "after": after}
    stage |= dict.fromkeys(("strides", "image_dilation", "dilation"), (1, 1))
    stack = Stack(layout, 2, (8, 6), [stage])
    return stack.model(), stack.shape


@pytest.mark.parametrize("layout", NUMBERS)
@pytest.mark.parametrize("after", [("bias", "relu", "max"), ("max", "bias", "relu"), ("relu", "max")], ids=" ".join)
def test_convolution_and_pooling_are_one_product(monkeypatch, layout, after):
    calls: list = []
    monkeypatch.setattr(rewrite, "convolve_and_pool", lambda *a: (calls.append(1), patches.convolve_and_pool(*a))[1])
    kernel = lambda x, w, b, *a: (calls.append(2), patches.convolve_and_pool(x, w, *a, b, True))[1]  # noqa: E731
    monkeypatch.setattr(rewrite.kernels, "conv_relu_pool", kernel)
    network = assert_same(*convolution(layout, *after))
    assert set(calls) == ({2} if "bias" in after else {1})
    assert network.traced(3, False).used == (1, 1, ())


def primitives(function: Callable, *arguments: Any) -> str:
    return str(jax.make_jaxpr(function)(*arguments))


def test_convolutions_and_poolings_are_gone():
    network = network_of(cnn(8, 3, channels=(2, 3), hidden=6), (8, 8))
    theta = network.model.init(jax.random.key(0))
    program = primitives(lambda theta: network.apply(theta, jnp.zeros((2, 8, 8)), None), theta)
    assert not [name for name in ("conv_general_dilated", "reduce_window") if name in program]


def test_what_is_not_recognized_stays():
    """Grouped convolutions, windows that overlap, and functions with a derivative of their own."""

    def apply(parameters: Any, x_N: jax.Array, key: Any) -> jax.Array:
        image = jax.lax.conv_general_dilated(
            x_N, parameters["w"], (1, 1), "SAME", dimension_numbers=NUMBERS["NHWC"], feature_group_count=2
        )
        image = jax.lax.reduce_window(image, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
        return jax.checkpoint(jnp.sin)(jax.nn.gelu(image)).sum(axis=(1, 2))

    model = Model(lambda key: {"w": jax.random.normal(key, (3, 3, 1, 4))}, apply)
    used = assert_same(model, (6, 6, 2)).traced(3, False).used
    assert used == (0, 0, ("convolution (groups)", "pooling (padding)"))


def test_network_with_side_effects_runs_as_it_is():
    """Evaluation of what an output needs would leave out what is printed."""
    seen: list = []

    def apply(parameters: Any, x_N: jax.Array, key: Any) -> jax.Array:
        out = jnp.tanh(x_N @ parameters["w"])
        jax.debug.callback(lambda norm: seen.append(float(norm)), jnp.sum(out))
        return out

    network = network_of(Model(lambda key: {"w": jax.random.normal(key, (6, 4))}, apply), (6,))
    split, theta = network.split(8), network.model.init(jax.random.key(0))
    assert not split.is_split
    assert split.first_layer is None
    x_M = jnp.ones((8, 6))
    outputs = jax.jit(lambda theta: split.apply(theta, split.rows(x_M), 8, jax.random.key(0)))(theta)
    np.testing.assert_allclose(outputs, jnp.tanh(x_M @ theta["w"]), rtol=1e-6)
    jax.effects_barrier()
    assert seen == [pytest.approx(float(outputs.sum()), rel=1e-5)]
    assert "side effects" in explain(network, 8)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def halved_gradient(x: jax.Array, limit: float) -> jax.Array:
    return x


halved_gradient.defvjp(lambda x, limit: (x, None), lambda limit, _, g: (jnp.clip(g, -limit, limit) / 2,))


def recurrent(parameters: Any, x_N: jax.Array, key: Any) -> jax.Array:
    def step(h_NH: jax.Array, x_N: jax.Array) -> tuple[jax.Array, None]:
        return jnp.tanh(h_NH @ parameters["square"] + x_N[:, None] * parameters["w"][0]), None

    return jax.lax.scan(step, jnp.zeros((len(x_N), 4)), x_N.T)[0]


OWN_KEY = jax.random.key(7)
TYPICAL: dict[str, Callable] = {
    "a derivative of its own": lambda p, x, key: halved_gradient(jnp.tanh(halved_gradient(x, 0.1) @ p["w"]), 0.05),
    "computed again": lambda p, x, key: jax.checkpoint(lambda h: jnp.tanh(h @ p["square"]))(x @ p["w"]),
    "recurrent": recurrent,
    "a branch": lambda p, x, key: jax.lax.cond(p["w"].sum() > 0, jnp.tanh, jnp.sin, x @ p["w"]),
    "a loop that ends": lambda p, x, key: jax.lax.fori_loop(0, 3, lambda _, h: jnp.tanh(h @ p["square"]), x @ p["w"]),
    "a mask of its own key": lambda p, x, key: jnp.where(jax.random.bernoulli(OWN_KEY, 0.8, (6,)), x, 0) @ p["w"],
    "dropout of its own key": lambda p, x, key: (
        jnp.where(jax.random.bernoulli(jax.random.key(3), 0.8, x.shape), x, 0) @ p["w"]
    ),
    "a transform": lambda p, x, key: jnp.abs(jnp.fft.rfft(x)) @ p["w"][:4],
    "bytes": lambda p, x, key: (x * 8).astype(jnp.uint8).astype(jnp.float32) @ p["w"] + x @ p["w"],
    "a sum over all axes": lambda p, x, key: (
        jnp.tanh(x) @ p["w"] + jnp.einsum("ij,ij->", p["square"], jnp.full((4, 4), 1.5))
    ),
    "a constant": lambda p, x, key: jnp.zeros((len(x), 4)) + p["w"][0],
}


@pytest.mark.parametrize("name", TYPICAL)
def test_typical_networks_are_the_same(name):
    def init(key: jax.Array) -> Any:
        keys = jax.random.split(key)
        return {"w": jax.random.normal(keys[0], (6, 4)), "square": jax.random.normal(keys[1], (4, 4)) / 2}

    assert_same(Model(init, TYPICAL[name]), (6,))


def test_half_precision_inside_is_the_same_up_to_its_rounding():
    def apply(parameters: Any, x_N: jax.Array, key: Any) -> jax.Array:
        image, weight = x_N.astype(jnp.bfloat16), parameters["w"].astype(jnp.bfloat16)
        image = jax.lax.conv_general_dilated(image, weight, (1, 1), "SAME", dimension_numbers=NUMBERS["NHWC"])
        image = jax.lax.reduce_window(image, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        return image.astype(jnp.float32).sum(axis=(1, 2))

    model = Model(lambda key: {"w": jax.random.normal(key, (3, 3, 1, 4))}, apply)
    network, theta = network_of(model, (6, 6, 1)), model.init(jax.random.key(0))
    x_N = jax.random.normal(jax.random.key(2), (3, 6, 6, 1))
    grads = [jax.grad(lambda theta: jnp.sum(f(theta, x_N, None) ** 2))(theta)["w"] for f in (network.apply, apply)]  # noqa: B023
    np.testing.assert_allclose(network.apply(theta, x_N, None), apply(theta, x_N, None), rtol=0.02, atol=0.1)
    np.testing.assert_allclose(*grads, rtol=0.05, atol=0.05 * float(jnp.abs(grads[1]).max()))
    assert network.traced(3, False).used == (1, 1, ())


def test_dropout_is_that_of_the_same_key():
    assert_same(cnn(8, 3, channels=(2, 3), hidden=6), (8, 8))


@pytest.mark.parametrize("equation", ["nh,hl->nl", "nh,lh->nl", "hn,hl->nl", "lh,nh->ln"])
def test_layers_of_few_outputs_are_the_same(monkeypatch, equation):
    calls: list = []
    monkeypatch.setattr(rewrite, "few_outputs", lambda *a: (calls.append(1), patches.few_outputs(*a))[1])
    one, other = equation.split("->")[0].split(",")
    weight = one if "l" in one else other

    def apply(parameters: Any, x_N: jax.Array, key: Any) -> jax.Array:
        h_NH = jnp.tanh(x_N * parameters["scale"])
        h = h_NH.T if "hn" in equation else h_NH
        out = jnp.einsum(equation, *((parameters["w"], h) if weight == one else (h, parameters["w"])))
        return out if equation.endswith("nl") else out.T

    shape = tuple({"h": 6, "l": 4}[axis] for axis in weight)
    assert_same(Model(lambda key: {"w": jax.random.normal(key, shape), "scale": jnp.ones(6)}, apply), (6,))
    assert calls


@pytest.mark.parametrize(("inputs", "outputs"), [(6, 24), (40, 20)])
@pytest.mark.parametrize(
    "equation", ["nth,hl->ntl", "nth,lh->ntl", "nht,hl->nlt", "hl,nth->lnt", "nth,hlk->ntlk", "nht,thl->nl"]
)
def test_dense_layers_are_the_same(monkeypatch, equation, inputs, outputs):
    calls: list = []
    for name in ("dense", "dense_rows"):
        function = getattr(patches, name)
        monkeypatch.setattr(rewrite, name, lambda *a, name=name, f=function: (calls.append(name), f(*a))[1])
    size, operands = {"h": inputs, "l": outputs, "k": 2, "t": 5}, equation.split("->")[0].split(",")
    weight, x = operands if "n" in operands[1] else operands[::-1]
    shape = tuple(size[axis] for axis in weight)

    def apply(parameters: Any, x_N: jax.Array, key: Any) -> jax.Array:
        h = jnp.tanh(x_N * parameters["scale"])
        out = jnp.einsum(equation, *((parameters["w"], h) if weight == operands[0] else (h, parameters["w"])))
        return jnp.moveaxis(out, equation.split("->")[1].index("n"), 0)

    def init(key: jax.Array) -> Any:
        return {"w": jax.random.normal(key, shape), "scale": jnp.ones(())}

    assert_same(Model(init, apply), tuple(size[axis] for axis in x[1:]))
    assert set(calls) == {"dense_rows" if "lh" in weight or (weight == "hl" and inputs > outputs) else "dense"}


def test_gpus_keep_dense_layers(monkeypatch):
    monkeypatch.setattr(rewrite, "on_cpu", lambda: False)
    monkeypatch.setattr(rewrite, "dense", None)
    model = Model(
        lambda key: {"w": jax.random.normal(key, (6, 24))}, lambda theta, x_N, key: jnp.tanh(x_N) @ theta["w"]
    )
    assert_same(model, (6,))

"""The works that are timed, the same for every peer, and how a peer reads its task and writes its result. In plain numpy.

A work is a round: clients who train one network by gradient descent, updates clipped as a whole, their mean, Gaussian
noise. Its examples are made from a seed. The noise is such that a few rounds lower the loss.

    mnist      the paper's non-IID MNIST: 100 clients of 2,000, 30 images of at most two digits, 25 epochs in batches of 20
               and 10, a 784-50-10 network
    femnist    the paper's FEMNIST network, two convolutions and dropout: 20 clients of 200, 100 images, 2 epochs in batches
               of 20
    sequence   a transformer of 0.9 million parameters that predicts the next token: 10 clients of 40, 40 sequences of 32
               tokens, one epoch in batches of 10

A network's parameters are arrays by name, inputs before outputs; the names are those of the same network in Flax.

Axis letters: K clients of the population, M examples of one client, N examples, T tokens, D units.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

SIDE, KERNEL = 28, 3
INPUTS = SIDE * SIDE
Parameters = dict[str, np.ndarray]


class Data(NamedTuple):
    """The examples of every client, and the server's own."""

    x_KM: np.ndarray
    y_KM: np.ndarray
    server_x_N: np.ndarray
    server_y_N: np.ndarray


@dataclasses.dataclass(frozen=True)
class Work:
    """The sizes of a round; the defaults are those of the paper's non-IID MNIST."""

    name: ClassVar[str] = "mnist"
    title: ClassVar[str] = "MNIST: 100 clients × 30 images × 25 epochs, a 784-50-10 network"
    classes: ClassVar[int] = 10
    clients: int = 2000
    cohort: int = 100
    samples: int = 30
    batch: int = 20
    epochs: int = 25
    hidden: int = 50
    learning_rate: float = 0.5
    clip: float = 1.0
    noise_multiplier: float = 0.1
    seed: int = 0

    @property
    def steps(self) -> int:
        """Gradient steps of one round for one model of each client; the last, partial batch of an epoch is kept."""
        return self.cohort * self.epochs * -(-self.samples // self.batch)

    @property
    def parameters(self) -> int:
        """How many numbers the network has."""
        return sum(math.prod(shape) for shape in self.shapes().values())

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The network's arrays, in the order in which examples go through them."""
        return _dense("Dense_0", INPUTS, self.hidden) | _dense("Dense_1", self.hidden, self.classes)

    def logits(self, model: Parameters, x: np.ndarray) -> np.ndarray:
        """The network's outputs without dropout, in double precision."""
        hidden = np.maximum(_apply(model, "Dense_0", x.reshape(len(x), -1) / 255), 0)
        return _apply(model, "Dense_1", hidden)

    def example_flops(self) -> int:
        """The matrix products of one example, forwards and backwards: additions and multiplications.

        An image goes forwards through I·H and H·C weights and backwards to their gradients: 2·(I·H + H·C) each way. The
        gradient of the hidden units costs another 2·H·C; that of the image is not needed.
        """
        return 4 * INPUTS * self.hidden + 6 * self.hidden * self.classes

    def draw_labels(self, rng: np.random.Generator) -> np.ndarray:
        """Every client's labels: two digits at most."""
        digits_K2 = rng.integers(self.classes, size=(self.clients, 2))
        return np.take_along_axis(digits_K2, rng.integers(2, size=(self.clients, self.samples)), axis=1)

    def data(self) -> Data:
        """Images of a faint shape for each class, and noise."""
        rng = np.random.default_rng(self.seed)
        shapes = (self.classes, SIDE, SIDE)
        shape_D = rng.random(shapes, np.float32) * (rng.random(shapes) < 0.2)

        def draw(y: np.ndarray) -> np.ndarray:
            x = np.empty((*y.shape, SIDE, SIDE), np.uint8)
            for i in range(len(y)):  # client by client, so that a large population needs no floats
                x[i] = 255 * (0.6 * shape_D[y[i]] + 0.4 * rng.random((*y[i].shape, SIDE, SIDE), np.float32) ** 4)
            return x

        y_KM = self.draw_labels(rng)
        server_y_N = np.arange(500) % self.classes
        return Data(draw(y_KM), y_KM, draw(server_y_N), server_y_N)


@dataclasses.dataclass(frozen=True)
class Femnist(Work):
    """The sizes of a round of the paper's FEMNIST network: 3 × 3 convolutions, 2 × 2 max pooling, two dense layers."""

    name: ClassVar[str] = "femnist"
    title: ClassVar[str] = "FEMNIST's network: 20 clients × 100 images × 2 epochs, two convolutions"
    classes: ClassVar[int] = 62
    clients: int = 200
    cohort: int = 20
    samples: int = 100
    epochs: int = 2
    hidden: int = 128
    channels: tuple[int, int] = (16, 32)
    learning_rate: float = 0.1
    noise_multiplier: float = 0.01

    def __post_init__(self) -> None:
        object.__setattr__(self, "channels", tuple(self.channels))  # JSON has lists

    @property
    def flat(self) -> int:
        """Inputs of the first dense layer."""
        return (SIDE // 4) ** 2 * self.channels[1]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The network's arrays, in the order in which examples go through them."""
        first, second = self.channels
        convolutions = _convolution("Conv_0", 1, first) | _convolution("Conv_1", first, second)
        dense = _dense("Dense_0", self.flat, self.hidden) | _dense("Dense_1", self.hidden, self.classes)
        return convolutions | dense

    def logits(self, model: Parameters, x: np.ndarray) -> np.ndarray:
        """The network's outputs without dropout, in double precision."""
        image = x[..., None] / 255
        for layer in ("Conv_0", "Conv_1"):
            padded = np.pad(image, ((0, 0), (1, 1), (1, 1), (0, 0)))
            windows = np.lib.stride_tricks.sliding_window_view(padded, (KERNEL, KERNEL), axis=(1, 2))
            kernel = np.asarray(model[f"{layer}/kernel"], np.float64)
            image = np.tensordot(windows, kernel, axes=((4, 5, 3), (0, 1, 2))) + model[f"{layer}/bias"]
            n, height, width, outputs = image.shape
            image = np.maximum(image.reshape(n, height // 2, 2, width // 2, 2, outputs).max(axis=(2, 4)), 0)
        hidden = np.maximum(_apply(model, "Dense_0", image.reshape(len(x), -1)), 0)
        return _apply(model, "Dense_1", hidden)

    def example_flops(self) -> int:
        """As for MNIST: forwards, to the weights' gradients, and to the inputs' of every layer but the first."""
        first, second = self.channels
        convolution = 2 * INPUTS * KERNEL**2 * first
        rest = 2 * (INPUTS // 4) * KERNEL**2 * first * second
        rest += 2 * (self.flat * self.hidden + self.hidden * self.classes)
        return 2 * convolution + 3 * rest

    def draw_labels(self, rng: np.random.Generator) -> np.ndarray:
        """Every client's labels: of all classes."""
        return rng.integers(self.classes, size=(self.clients, self.samples))


@dataclasses.dataclass(frozen=True)
class Sequence(Work):
    """The sizes of a round of a transformer with causal attention, layer norms before each part, and GELU."""

    name: ClassVar[str] = "sequence"
    title: ClassVar[str] = "A transformer of 0.9 million parameters: 10 clients × 40 sequences of 32 tokens"
    clients: int = 40
    cohort: int = 10
    samples: int = 40
    batch: int = 10
    epochs: int = 1
    hidden: int = 512  # units of a block's dense layer
    width: int = 128
    heads: int = 4
    blocks: int = 4
    length: int = 32
    vocabulary: int = 512
    learning_rate: float = 0.1
    noise_multiplier: float = 0.001

    @property
    def classes(self) -> int:  # type: ignore[override]
        """Outputs of each token."""
        return self.vocabulary

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The network's arrays, in the order in which tokens go through them."""
        width, shapes = self.width, {}
        for name, rows in (("Embed_0", self.vocabulary), ("Embed_1", self.length)):
            shapes[f"{name}/embedding"] = (rows, width)
        for number in range(self.blocks):
            block = _norm("LayerNorm_0", width) | _dense("Dense_0", width, 3 * width) | _dense("Dense_1", width, width)
            block |= _norm("LayerNorm_1", width) | _dense("Dense_2", width, self.hidden)
            block |= _dense("Dense_3", self.hidden, width)
            shapes |= {f"Block_{number}/{name}": shape for name, shape in block.items()}
        return shapes | _norm("LayerNorm_0", width) | _dense("Dense_0", width, self.vocabulary)

    def logits(self, model: Parameters, x: np.ndarray) -> np.ndarray:
        """The network's outputs for every token, in double precision."""
        h = model["Embed_0/embedding"][x].astype(np.float64) + model["Embed_1/embedding"]
        future_TT = np.triu(np.full((self.length, self.length), -np.inf), 1)
        for number in range(self.blocks):
            prefix = f"Block_{number}/"
            of_block = {name.removeprefix(prefix): part for name, part in model.items() if name.startswith(prefix)}
            qkv = _apply(of_block, "Dense_0", _normalize(of_block, "LayerNorm_0", h))
            q, k, v = (part.reshape(*h.shape[:2], self.heads, -1).swapaxes(1, 2) for part in np.split(qkv, 3, axis=-1))
            scores = q @ k.swapaxes(2, 3) / q.shape[-1] ** 0.5 + future_TT
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            attended = (weights / weights.sum(axis=-1, keepdims=True)) @ v
            h = h + _apply(of_block, "Dense_1", attended.swapaxes(1, 2).reshape(h.shape))
            up = _apply(of_block, "Dense_2", _normalize(of_block, "LayerNorm_1", h))
            gelu = 0.5 * up * (1 + np.tanh((2 / np.pi) ** 0.5 * (up + 0.044715 * up**3)))
            h = h + _apply(of_block, "Dense_3", gelu)
        return _apply(model, "Dense_0", _normalize(model, "LayerNorm_0", h))

    def example_flops(self) -> int:
        """Every weight of a matrix, and the products of attention: forwards, and twice as much backwards."""
        block = 4 * self.width**2 + 2 * self.width * self.hidden + 2 * self.length * self.width
        return 3 * 2 * self.length * (self.blocks * block + self.width * self.vocabulary)

    def data(self) -> Data:
        """Tokens of which half follow from the one before by a fixed rule, and half are drawn, some more often than others.

        The targets are the tokens that follow.
        """
        rng = np.random.default_rng(self.seed)
        next_token, frequency = rng.permutation(self.vocabulary), 1 / np.arange(1, self.vocabulary + 1)

        def draw(*shape: int) -> np.ndarray:
            tokens = rng.choice(self.vocabulary, (*shape, self.length + 1), p=frequency / frequency.sum())
            follows = rng.random(tokens.shape) < 0.5
            for t in range(1, self.length + 1):
                tokens[..., t] = np.where(follows[..., t], next_token[tokens[..., t - 1]], tokens[..., t])
            return tokens.astype(np.int32)

        tokens_KM, server_N = draw(self.clients, self.samples), draw(100)
        return Data(tokens_KM[..., :-1], tokens_KM[..., 1:], server_N[..., :-1], server_N[..., 1:])


WORKS: dict[str, type[Work]] = {kind.name: kind for kind in (Work, Femnist, Sequence)}


def _dense(name: str, inputs: int, outputs: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}/kernel": (inputs, outputs), f"{name}/bias": (outputs,)}


def _convolution(name: str, inputs: int, outputs: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}/kernel": (KERNEL, KERNEL, inputs, outputs), f"{name}/bias": (outputs,)}


def _norm(name: str, width: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}/scale": (width,), f"{name}/bias": (width,)}


def _apply(model: Parameters, name: str, x: np.ndarray) -> np.ndarray:
    """A dense layer."""
    return x @ np.asarray(model[f"{name}/kernel"], np.float64) + model[f"{name}/bias"]


def _normalize(model: Parameters, name: str, h: np.ndarray) -> np.ndarray:
    """A layer norm."""
    centred = h - h.mean(axis=-1, keepdims=True)
    normalized = centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + 1e-5)
    return normalized * model[f"{name}/scale"] + model[f"{name}/bias"]


def initial_model(work: Work) -> Parameters:
    """The first global model."""
    rng = np.random.default_rng([work.seed, 1])
    model = {}
    for name, shape in work.shapes().items():
        kind = name.rsplit("/")[-1]
        if kind == "kernel":
            area = math.prod(shape[:-2])
            limit = (6 / (area * (shape[-2] + shape[-1]))) ** 0.5
            model[name] = rng.uniform(-limit, limit, shape).astype(np.float32)
        elif kind == "embedding":
            model[name] = rng.normal(0, 0.02, shape).astype(np.float32)
        else:
            model[name] = np.full(shape, kind == "scale", np.float32)
    return model


def loss(work: Work, model: Parameters, data: Data) -> float:
    """The mean cross entropy of a model on the server's examples."""
    logits = work.logits(model, data.server_x_N)
    logits -= logits.max(axis=-1, keepdims=True)
    chosen = np.take_along_axis(logits, data.server_y_N[..., None], axis=-1)[..., 0]
    return float(np.mean(np.log(np.exp(logits).sum(axis=-1)) - chosen))


def flops(work: Work, models: int) -> int:
    """The matrix products of a round as it is written down, once in every epoch, for every client and every model.

    Adding gradients to weights is left out: it is no matrix product.
    """
    return work.example_flops() * work.samples * work.epochs * work.cohort * models


def as_dict(work: Work) -> dict[str, Any]:
    """A work's name and sizes, for JSON."""
    return {"name": work.name, **dataclasses.asdict(work)}


def from_dict(values: dict[str, Any]) -> Work:
    """The work that `as_dict` describes; sizes that are missing are the work's own."""
    return WORKS[values.get("name", "mnist")](**{name: value for name, value in values.items() if name != "name"})


class Task(NamedTuple):
    """What a peer runs."""

    work: Work
    rounds: int
    warm_up: int
    options: dict[str, Any]
    started: float  # by the clock of `time.monotonic`, which processes share, when the process was started
    out: Path


def read_task() -> Task:
    """Read the task from the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", default="{}")
    parser.add_argument("--options", default="{}")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--started", type=float, default=time.monotonic())
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    return Task(
        from_dict(json.loads(arguments.work)),
        arguments.rounds,
        arguments.warm_up,
        json.loads(arguments.options),
        arguments.started,
        arguments.out.absolute(),
    )


def time_rounds(task: Task, run_round: Callable[[int], None]) -> list[float]:
    """When the first round began and when each round ended, by `time.monotonic`; ``run_round`` returns with its result."""
    times = [time.monotonic()]
    for number in range(task.warm_up + task.rounds):
        run_round(number)
        times.append(time.monotonic())
    return times


def write_result(
    task: Task,
    data: Data,
    times: list[float],
    steps: float,
    model: Parameters,
    versions: dict[str, str],
    **more: Any,
) -> None:
    """Write what was measured, and what proves the work: steps of a round, and the loss before and after."""
    seconds = np.diff(times).tolist()
    result = {
        "seconds": seconds[task.warm_up :],
        "start_seconds": times[0] - task.started,
        "first_round_seconds": seconds[0],
        "steps": steps,
        "loss_before": loss(task.work, initial_model(task.work), data),
        "loss_after": loss(task.work, model, data),
        "rounds_played": task.warm_up + task.rounds,
        "memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "versions": versions,
        **more,
    }
    task.out.write_text(json.dumps(result))


def gemm(product: Callable[[Any, Any], Any], size: int = 2048, times: int = 8) -> float:
    """Billions of operations a second in a large single-precision matrix product, the best of several."""
    a = np.random.default_rng(0).random((size, size), np.float32)
    best = float("inf")
    product(a, a)
    for _ in range(times):
        start = time.perf_counter()
        product(a, a)
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best / 1e9

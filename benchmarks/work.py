"""The work that is timed, the same for every peer, and how a peer reads its task and writes its result. In plain numpy.

The paper's non-IID MNIST round: 100 clients of 2,000, 30 images of at most two digits each, 25 epochs in batches of 20 and
10, a 784-50-10 network of rectified units, gradient descent at rate 0.5, updates clipped as a whole, their mean, Gaussian
noise. The images are made from a seed: a faint shape for each digit, and noise.

Axis letters: K clients of the population, M images of one client, N images.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

SIDE, CLASSES = 28, 10
INPUTS = SIDE * SIDE


@dataclasses.dataclass(frozen=True)
class Work:
    """The sizes of a round; the default is the paper's."""

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
        return (INPUTS + 1) * self.hidden + (self.hidden + 1) * CLASSES


class Data(NamedTuple):
    """The images and digits of every client, and the server's own."""

    x_KM: np.ndarray
    y_KM: np.ndarray
    server_x_N: np.ndarray
    server_y_N: np.ndarray


def data(work: Work) -> Data:
    """Every client's images, two digits at most to a client."""
    rng = np.random.default_rng(work.seed)
    shape_D = rng.random((CLASSES, SIDE, SIDE), np.float32) * (rng.random((CLASSES, SIDE, SIDE)) < 0.2)

    def draw(y: np.ndarray) -> np.ndarray:
        x = np.empty((*y.shape, SIDE, SIDE), np.uint8)
        for i in range(len(y)):  # client by client, so that a large population needs no floats
            x[i] = 255 * (0.6 * shape_D[y[i]] + 0.4 * rng.random((*y[i].shape, SIDE, SIDE), np.float32) ** 4)
        return x

    digits_K2 = rng.integers(CLASSES, size=(work.clients, 2))
    y_KM = np.take_along_axis(digits_K2, rng.integers(2, size=(work.clients, work.samples)), axis=1)
    server_y_N = np.arange(500) % CLASSES
    return Data(draw(y_KM), y_KM, draw(server_y_N), server_y_N)


def initial_model(work: Work) -> list[np.ndarray]:
    """The first global model: weights and biases of the two layers, inputs before outputs."""
    rng = np.random.default_rng([work.seed, 1])
    sizes = ((INPUTS, work.hidden), (work.hidden, CLASSES))
    model = []
    for inputs, outputs in sizes:
        limit = (6 / (inputs + outputs)) ** 0.5
        model += [rng.uniform(-limit, limit, (inputs, outputs)).astype(np.float32), np.zeros(outputs, np.float32)]
    return model


def loss(model: list[np.ndarray], data: Data) -> float:
    """The mean cross entropy of a model on the server's images."""
    w1, b1, w2, b2 = (np.asarray(part, np.float64) for part in model)
    x = data.server_x_N.reshape(len(data.server_x_N), -1) / 255
    logits = np.maximum(x @ w1 + b1, 0) @ w2 + b2
    logits -= logits.max(axis=1, keepdims=True)
    chosen = np.take_along_axis(logits, data.server_y_N[:, None], axis=1)[:, 0]
    return float(np.mean(np.log(np.exp(logits).sum(axis=1)) - chosen))


def flops(work: Work, models: int) -> int:
    """The matrix products of a round as it is written down: additions and multiplications, forwards and backwards.

    An image goes forwards through I·H and H·C weights and backwards to their gradients: 2·(I·H + H·C) each way. The
    gradient of the hidden units costs another 2·H·C; that of the image is not needed. So 4·I·H + 6·H·C for an image, once
    in every epoch, for every client and every model. Adding gradients to weights is left out: it is no matrix product.
    """
    image = 4 * INPUTS * work.hidden + 6 * work.hidden * CLASSES
    return image * work.samples * work.epochs * work.cohort * models


class Task(NamedTuple):
    """What a peer runs."""

    work: Work
    rounds: int
    warm_up: int
    options: dict[str, Any]
    out: Path


def read_task() -> Task:
    """Read the task from the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", default="{}")
    parser.add_argument("--options", default="{}")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    return Task(
        Work(**json.loads(arguments.work)),
        arguments.rounds,
        arguments.warm_up,
        json.loads(arguments.options),
        arguments.out.absolute(),
    )


def time_rounds(task: Task, run_round: Callable[[int], None]) -> list[float]:
    """The seconds of each round after the warm-up; ``run_round`` returns when the result is computed."""
    seconds = []
    for number in range(task.warm_up + task.rounds):
        start = time.perf_counter()
        run_round(number)
        seconds.append(time.perf_counter() - start)
    return seconds[task.warm_up :]


def write_result(
    task: Task,
    data: Data,
    seconds: list[float],
    steps: float,
    model: list[np.ndarray],
    versions: dict[str, str],
    **more: Any,
) -> None:
    """Write what was measured, and what proves the work: steps of a round, and the loss before and after."""
    result = {
        "seconds": seconds,
        "steps": steps,
        "loss_before": loss(initial_model(task.work), data),
        "loss_after": loss(model, data),
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

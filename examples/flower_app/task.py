"""The task: a model, and each client's own handwriting. Replace this file with yours."""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Context

from fedhdp import mlp
from fedhdp.datasets.handwriting import client_examples, server_examples

MODEL = mlp(inputs=784, hidden=50, classes=10)
INPUT_SCALE = 1 / 255  # images are bytes
SIMULATED_LEVELS = ("open", "relaxed", "relaxed", "strict", "strict")  # of virtual clients, which have no owner


def logits(model: dict[str, Any], x_NF: Any) -> Any:
    """The same network on named arrays of NumPy, or of a framework with the same operators."""
    hidden_NH = x_NF @ model["first/w"] + model["first/b"]
    return (hidden_NH * (hidden_NH > 0)) @ model["rest/w"] + model["rest/b"]


def choose_level(context: Context) -> str | None:
    """The level that the client's owner chose; None gets the strictest."""
    if "privacy" in context.node_config:
        return str(context.node_config["privacy"])
    if "num-partitions" in context.node_config:  # a simulation
        return SIMULATED_LEVELS[int(context.node_config["partition-id"]) % len(SIMULATED_LEVELS)]
    return None


def load_examples(context: Context) -> dict[str, np.ndarray]:
    """The client's own training and test examples: generated once and stored in its directory."""
    number, samples = int(context.node_config["partition-id"]), int(context.run_config["app.samples"])
    directory = context.node_config.get("directory")
    if not directory:
        return make_examples(number, samples)
    file = Path(str(directory)) / "examples.npz"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        np.savez(file.with_suffix(".part.npz"), **make_examples(number, samples))
        os.replace(file.with_suffix(".part.npz"), file)
    with np.load(file) as archive:
        return dict(archive)


@lru_cache(maxsize=2000)
def make_examples(number: int, samples: int) -> dict[str, np.ndarray]:
    """One writer's digits."""
    examples = {}
    for part, count in {"train": samples, "test": max(samples // 3, 1)}.items():
        x_N, y_N = client_examples(np.array([number]), np.array([count]), part, split="by_writer")
        examples |= {f"{part}_x": x_N, f"{part}_y": y_N}
    return examples


@lru_cache(maxsize=1)
def load_server_test() -> tuple[np.ndarray, np.ndarray]:
    """The server's own, public test set."""
    return server_examples(2000, 10, seed=0)

"""The task: a model, and each client's own handwriting. Replace this file with yours."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Context

from fedhdp.datasets.handwriting import client_examples, server_examples
from fedhdp.models import mlp
from fedhdp.results.store import read_arrays, write_arrays

MODEL = mlp(inputs=784, hidden=50, classes=10)
LEVELS = ("open", "relaxed", "relaxed", "strict", "strict")  # in a simulation, where no owner is there to choose


def logits(model: dict[str, Any], x_N: Any) -> Any:
    """The same network on named arrays, which may be NumPy's or another framework's that has the same operators."""
    h_NH = x_N @ model["first/w"] + model["first/b"]
    return (h_NH * (h_NH > 0)) @ model["rest/w"].T + model["rest/b"]


def level(context: Context) -> str | None:
    """The level that the client's owner chose; None is left to the server, which takes the strictest."""
    if "privacy" in context.node_config:
        return str(context.node_config["privacy"])
    simulated = "num-partitions" in context.node_config
    return LEVELS[int(context.node_config["partition-id"]) % len(LEVELS)] if simulated else None


def own_examples(context: Context) -> dict[str, np.ndarray]:
    """The client's own training and test examples; here they are made up, once, and kept in its directory."""
    number, samples = int(context.node_config["partition-id"]), int(context.run_config["app.samples"])
    directory = context.node_config.get("directory")
    kept = Path(str(directory)) / "examples.npz" if directory else None
    if kept is not None and kept.exists():
        return read_arrays(kept)
    made = _make(number, samples)
    if kept is not None:
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_arrays(kept, made)
    return made


@lru_cache(maxsize=2000)
def _make(number: int, samples: int) -> dict[str, np.ndarray]:
    """One writer's digits."""
    parts = {"train": samples, "test": max(samples // 3, 1)}
    made = {}
    for part, count in parts.items():
        x_N, y_N = client_examples(np.array([number]), np.array([count]), part, split="by_writer")
        made |= {f"{part}_x": x_N, f"{part}_y": y_N}
    return made


@lru_cache(maxsize=1)
def server_test() -> tuple[np.ndarray, np.ndarray]:
    """The server's own, public test set."""
    return server_examples(2000, 10, seed=0)

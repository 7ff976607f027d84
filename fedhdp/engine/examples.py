"""Where examples are: on the devices, or fetched for a cohort.

Either way the engine sees arrays on its devices and, for each slot, where in them a client's part is. Examples that fit
stay on the devices from the first round to the last. Others are made or read for the clients of a round alone, so that
time and memory follow the cohort and not the population.

Axis letters: K clients of the population, C slots of a cohort, N examples.
"""

from __future__ import annotations

import jax
import numpy as np

from fedhdp.data import Examples, Source
from fedhdp.engine.low_rank import uses_low_rank
from fedhdp.engine.placement import CohortLayout
from fedhdp.engine.round import Engine
from fedhdp.models import Array

GIB = 2**30


class ShardedExamples:
    """Examples on the devices: on each those of its clients, one after the other."""

    def __init__(self, engine: Engine, examples: Examples):
        devices, clients = engine.devices, len(examples.count_K)
        homes = [np.arange(device, clients, devices) for device in range(devices)]
        each = max(1, *(int(examples.count_K[home].sum()) for home in homes))
        x_N = np.zeros((devices * each, *examples.x_N.shape[1:]), examples.x_N.dtype)
        y_N = np.zeros((devices * each, *examples.y_N.shape[1:]), examples.y_N.dtype)
        self.start_K = np.zeros(clients, np.int64)
        for device, home in enumerate(homes):
            count = examples.count_K[home]
            ends = np.cumsum(count)
            self.start_K[home] = ends - count
            rows = np.repeat(examples.start_K[home] - (ends - count), count) + np.arange(count.sum())
            x_N[device * each :][: len(rows)], y_N[device * each :][: len(rows)] = (
                examples.x_N[rows],
                examples.y_N[rows],
            )
        self.arrays = engine.put((x_N, y_N), engine.by_client)

    def fetch(self, seats: CohortLayout) -> tuple[Array, Array, np.ndarray]:
        """Inputs, targets, and where each client's begin."""
        return *self.arrays, self.start_K[seats.client_C]


class ReplicatedExamples:
    """Examples on every device."""

    def __init__(self, engine: Engine, examples: Examples):
        self.start_K = examples.start_K
        self.arrays = engine.put((examples.x_N, examples.y_N), engine.replicated)

    def fetch(self, seats: CohortLayout) -> tuple[Array, Array, np.ndarray]:
        """Inputs, targets, and where each client's begin."""
        return *self.arrays, self.start_K[seats.client_C]


class StreamedExamples:
    """Examples that are made or read when their clients are asked."""

    def __init__(self, engine: Engine, source: Source, capacity: int):
        self.engine, self.source, self.capacity = engine, source, capacity

    def fetch(self, seats: CohortLayout) -> tuple[Array, Array, np.ndarray]:
        """Inputs, targets, and where each client's begin."""
        if isinstance(self.source, Examples):  # spare seats as well: what is there is not looked at, and it is no work
            x_CM, y_CM = self.source.take(seats.client_C, self.capacity)
        else:
            came = np.flatnonzero(seats.is_participating_C)
            x, y = self.source.take(seats.client_C[came], self.capacity)
            x_CM = np.zeros((len(seats.client_C), *x.shape[1:]), x.dtype)
            y_CM = np.zeros((len(seats.client_C), *y.shape[1:]), y.dtype)
            x_CM[came], y_CM[came] = x, y
        flat = (x_CM.reshape(-1, *x_CM.shape[2:]), y_CM.reshape(-1, *y_CM.shape[2:]))
        return *self.engine.put(flat, self.engine.by_client), seats.place_C * self.capacity


def example_bytes_limit() -> int:
    """How many bytes of examples the devices may hold."""
    return (8 if jax.default_backend() == "gpu" else 1) * GIB


def fits_sharded(source: Source) -> bool:
    """Whether the devices hold every client's examples, each its own clients'."""
    return isinstance(source, Examples) and int(source.count_K.sum()) * source.x_N[:1].nbytes <= example_bytes_limit()


def should_replicate(source: Source, partition_by_owner: bool) -> bool:
    """Whether every device holds all examples: so that clients train anywhere, or since they share too few for copies."""
    return (
        isinstance(source, Examples)
        and source.x_N.nbytes <= example_bytes_limit()
        and not (partition_by_owner and fits_sharded(source))
    )


def make_example_store(
    engine: Engine, source: Source, capacity: int
) -> ShardedExamples | ReplicatedExamples | StreamedExamples:
    """Examples on the devices if they fit there."""
    if isinstance(source, Examples) and engine.config.replicated:
        return ReplicatedExamples(engine, source)
    if isinstance(source, Examples) and fits_sharded(source):
        return ShardedExamples(engine, source)
    return StreamedExamples(engine, source, capacity)


def make_gram_matrices(engine: Engine, kept: ShardedExamples | ReplicatedExamples | StreamedExamples) -> Array | None:
    """The products of clients' examples with each other: no round changes them, so one need not compute them again.

    Where clients train in the span, are alike, and these take no more room than the examples do.
    """
    size, config = engine.config.sizes[-1], engine.config
    low_rank = uses_low_rank(engine.model, size, config.inputs)
    if isinstance(kept, StreamedExamples) or not config.uniform_size or not low_rank:
        return None
    x_N, _ = kept.arrays
    behind_each_other = not (kept.start_K % size).any() and len(x_N) % size == 0
    return engine.gram_matrices(x_N) if behind_each_other and 4 * size * len(x_N) <= x_N.nbytes else None

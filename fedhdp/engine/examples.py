"""Where examples are: sharded or replicated over the devices, or streamed for each cohort.

Examples that fit stay on the devices. Others are generated or read for a cohort, so that time and memory follow it.

Axis letters: K clients, C slots of a cohort, N examples, M examples of one client, padded.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax
import numpy as np

from fedhdp.client import LocalTraining, scale_inputs
from fedhdp.data import Examples, ExampleSource, FederatedData
from fedhdp.engine.low_rank import uses_low_rank
from fedhdp.engine.network import Network
from fedhdp.engine.placement import CohortLayout, size_classes
from fedhdp.engine.round import Engine, EngineConfig
from fedhdp.models import Array, Model

GIB = 2**30


class ShardedExamples:
    """On each device the examples of its clients, one client after the other."""

    def __init__(self, engine: Engine, examples: Examples):
        devices, clients = engine.devices, len(examples.count_K)
        self.source, self.count_K = examples, examples.count_K
        shares = [np.arange(device, clients, devices) for device in range(devices)]
        size = max(1, *(int(examples.count_K[share].sum()) for share in shares))  # of each device's part
        local = engine.local_devices  # the others' examples are not read
        x_N = np.zeros((len(local) * size, *examples.x_N.shape[1:]), examples.x_N.dtype)
        y_N = np.zeros((len(local) * size, *examples.y_N.shape[1:]), examples.y_N.dtype)
        self.start_K = np.zeros(clients, np.int64)
        for device, share in enumerate(shares):
            count = examples.count_K[share]
            start = np.cumsum(count) - count
            self.start_K[share] = start
            if device not in local:
                continue
            rows = np.repeat(examples.start_K[share] - start, count) + np.arange(count.sum())
            first = (device - local.start) * size
            part = slice(first, first + len(rows))
            x_N[part], y_N[part] = examples.x_N[rows], examples.y_N[rows]
        self.arrays = engine.put_local((x_N, y_N))

    def fetch(self, layout: CohortLayout) -> tuple[Array, Array, np.ndarray]:
        """Inputs and targets on the devices, and where each slot's examples begin."""
        return *self.arrays, self.start_K[layout.client_C]


class ReplicatedExamples:
    """All examples on every device."""

    def __init__(self, engine: Engine, examples: Examples):
        self.start_K = examples.start_K
        self.arrays = engine.put((examples.x_N, examples.y_N), engine.replicated)

    def fetch(self, layout: CohortLayout) -> tuple[Array, Array, np.ndarray]:
        """Inputs and targets on the devices, and where each slot's examples begin."""
        return *self.arrays, self.start_K[layout.client_C]


class StreamedExamples:
    """Examples that are generated or read for each cohort."""

    def __init__(self, engine: Engine, source: ExampleSource, capacity: int):
        self.engine, self.source, self.capacity = engine, source, capacity

    def fetch(self, layout: CohortLayout) -> tuple[Array, Array, np.ndarray]:
        """Inputs and targets on the devices, and where each slot's examples begin."""
        slots, local = len(layout.client_C) // self.engine.devices, self.engine.local_devices
        own = slice(local.start * slots, local.stop * slots)  # the slots of this process
        client_C, is_participating_C = layout.client_C[own], layout.is_participating_C[own]
        if isinstance(self.source, Examples):  # empty slots as well, which are not used and cost nothing
            x_CM, y_CM = self.source.take(client_C, self.capacity)
        else:
            participating = np.flatnonzero(is_participating_C)
            x, y = self.source.take(client_C[participating], self.capacity)
            x_CM = np.zeros((len(client_C), *x.shape[1:]), x.dtype)
            y_CM = np.zeros((len(client_C), *y.shape[1:]), y.dtype)
            x_CM[participating], y_CM[participating] = x, y
        flat = (x_CM.reshape(-1, *x_CM.shape[2:]), y_CM.reshape(-1, *y_CM.shape[2:]))
        return *self.engine.put_local(flat), layout.place_C * self.capacity


def memories() -> int:
    """How many memories the devices have: one for each GPU, one for all cores."""
    return jax.device_count() if jax.default_backend() == "gpu" else 1


def example_bytes_limit() -> int:
    """How many bytes of examples a memory may hold."""
    return (8 if jax.default_backend() == "gpu" else 1) * GIB


def fits_sharded(source: ExampleSource) -> bool:
    """Whether the examples fit on the devices, each client's on one."""
    limit = memories() * example_bytes_limit()
    return isinstance(source, Examples) and int(source.count_K.sum()) * source.x_N[:1].nbytes <= limit


def train_by_owner(training: LocalTraining) -> bool:
    """Whether clients train on their own device: where their personal models are, or where a process has their examples."""
    return training.personalize or jax.process_count() > 1


def should_replicate(source: ExampleSource, partition_by_owner: bool) -> bool:
    """Whether every device holds all examples.

    Clients then train on any device. With ``partition_by_owner`` they train on their own device, and examples are
    replicated only where clients share so many that sharded ones would not fit.
    """
    return (
        isinstance(source, Examples)
        and source.x_N.nbytes <= example_bytes_limit()
        and not (partition_by_owner and fits_sharded(source))
    )


def engine_config(data: FederatedData, model: Model, training: LocalTraining, run_of: Sequence[int]) -> EngineConfig:
    """The layout of the data and the number of models; ``run_of``: each mechanism's global model."""
    x = input_of_model(data)
    split = Network(model, x, training).split(min(training.batch_size, int(data.train.count_K.max(initial=1))))
    sizes = size_classes(data.train, training.batch_size, several=split.first_layer is not None)
    replicated = should_replicate(data.train, train_by_owner(training))
    run_V = tuple(run_of) if training.personalize else ()
    uniform, runs = data.train.uniform_size, len(set(run_of))
    return EngineConfig(x, sizes, uniform, replicated, run_V, runs, data.input_scale)


def input_of_model(data: FederatedData) -> jax.ShapeDtypeStruct:
    """The shape and type of one input as the model gets it."""
    example = jax.ShapeDtypeStruct(data.input_shape, data.template.x_N.dtype)
    return jax.eval_shape(partial(scale_inputs, input_scale=data.input_scale), example)


def make_example_store(
    engine: Engine, source: ExampleSource, capacity: int
) -> ShardedExamples | ReplicatedExamples | StreamedExamples:
    """The examples on the devices if they fit there, else streamed at this capacity."""
    if isinstance(source, Examples) and engine.config.replicated:
        return ReplicatedExamples(engine, source)
    if isinstance(source, Examples) and fits_sharded(source):
        return ShardedExamples(engine, source)
    return StreamedExamples(engine, source, capacity)


def make_gram_matrices(engine: Engine, store: ShardedExamples | ReplicatedExamples | StreamedExamples) -> Array | None:
    """Each client's Gram matrix, for low-rank training of clients of one size, if these are no larger than the examples.

    Norms follow from it. Where a network computes its rows from the inputs, another program may round them otherwise, so
    there each round makes the matrix from the rows that it sums.
    """
    size, config = engine.config.sizes[-1], engine.config
    low_rank = uses_low_rank(engine.network, size, config.layers) and engine.network.split(size).keeps_finite
    if isinstance(store, StreamedExamples) or not config.uniform_size or not low_rank:
        return None
    x_N, _ = store.arrays
    contiguous = not (store.start_K % size).any() and len(x_N) % size == 0
    return engine.gram_matrices(x_N) if contiguous and 4 * size * len(x_N) <= x_N.nbytes else None

"""Where personal models are: sharded over the devices, or in a file of which a round reads and writes its cohort's rows.

Both stores check models out for a cohort, as arrays on the devices, and commit them after the round.

Axis letters: K clients, C slots of a cohort, B slots whose models are read from the file, V personal models of a client, P
parameters.
"""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import IO, Any

import jax
import jax.numpy as jnp
import numpy as np

from fedhdp.engine.examples import GIB, memories
from fedhdp.engine.placement import CohortLayout
from fedhdp.engine.round import Engine
from fedhdp.errors import RunError
from fedhdp.models import Array, Parameters, parameter_bytes

StateArrays = Mapping[str, np.ndarray | Callable[[], np.ndarray]]
PART = 256  # clients whose models are written to a checkpoint at a time
NO_ROW = -1  # the row of a client who has no models
ROW_TYPE = np.dtype(np.float32)


class ShardedPersonalModels:
    """Personal models on the devices: client k's are row k // D of device k mod D."""

    def __init__(self, engine: Engine, clients: int):
        self.engine = engine
        self.capacity = -(-clients // engine.devices) * engine.devices
        self.models = _zeros(engine, self.capacity)

    def checkout(self, layout: CohortLayout) -> tuple[Parameters, np.ndarray]:
        """The models as arrays on the devices, and the row of each slot's client."""
        return self.models, layout.client_C // self.engine.devices

    def commit(self, models: Parameters, layout: CohortLayout) -> None:
        """Store the models after a round."""
        self.models = models

    def release(self, models: Parameters) -> None:
        """Return models that were only read."""

    def rows(self, clients: np.ndarray) -> np.ndarray:
        """The models of these clients, of the shape (clients, V, parameters)."""
        return _flatten([self.engine.fetch(leaf)[self._index(clients)] for leaf in jax.tree.leaves(self.models)])

    def state_arrays(self, clients: np.ndarray) -> StateArrays:
        """The models of these clients as named arrays, in parts, whatever the number of devices."""
        parts = {}
        for i, leaf in enumerate(jax.tree.leaves(self.models)):
            for first in range(0, len(clients), PART):
                parts[f"personal_{i}_{first}"] = partial(self._part, leaf, clients[first : first + PART])
        return parts

    def _part(self, leaf: Array, clients: np.ndarray) -> np.ndarray:
        index = np.pad(self._index(clients), (0, PART - len(clients)))  # one size, so that it compiles once
        return self.engine.fetch(leaf[index])[: len(clients)]

    def restore(self, arrays: dict[str, Any], clients: np.ndarray) -> None:
        """Restore the models that `state_arrays` returned; each part is removed from the arrays."""
        leaves, tree = jax.tree.flatten(self.engine.like)
        local, rows_each = self.engine.local_devices, self.capacity // self.engine.devices
        shape = len(local) * rows_each, len(self.engine.run_V)
        restored = [np.zeros((*shape, *leaf.shape), leaf.dtype) for leaf in leaves]
        for i, rows in enumerate(restored):
            for first in range(0, len(clients), PART):
                index = self._index(clients[first : first + PART]) - local.start * rows_each
                is_own = (index >= 0) & (index < len(rows))
                part = arrays.pop(f"personal_{i}_{first}")
                rows[index[is_own]] = (part() if callable(part) else part)[is_own]
        self.models = self.engine.put_local(jax.tree.unflatten(tree, restored))

    def _index(self, clients: np.ndarray) -> np.ndarray:
        """Where these clients' models are in an array over all devices."""
        devices = self.engine.devices
        return clients % devices * (self.capacity // devices) + clients // devices


class MemoryMappedPersonalModels:
    """Personal models in a file with a row for each client who has taken part; memory follows the cohort.

    A round works in a staging buffer on the devices, with room for a cohort. Its models are written when the next round
    checks models out, to rows that neither a client nor the last checkpoint refers to. So a checkpoint's rows are never
    overwritten, and a run that was killed resumes from it. Without a path the file is temporary.
    """

    def __init__(self, engine: Engine, clients: int, path: Path | None):
        self.engine, self.path = engine, path
        self.shapes = [(len(engine.run_V), *leaf.shape) for leaf in jax.tree.leaves(engine.like)]
        self.offsets = np.cumsum([0, *(int(np.prod(shape)) for shape in self.shapes)])
        self.row_bytes = int(self.offsets[-1]) * ROW_TYPE.itemsize
        self.row_K = np.full(clients, NO_ROW, np.int32)
        self.checkpoint_row_K = self.row_K.copy()
        self.file: IO[bytes] | None = None  # opened by the first round, as it may hold the rows of a checkpoint
        self.file_rows, self.free = 0, np.zeros(0, np.int32)  # free: rows that nothing refers to
        self.staging: Parameters | None = None
        self.unwritten: tuple[Parameters, CohortLayout] | None = None

    def checkout(self, layout: CohortLayout) -> tuple[Parameters, np.ndarray]:
        """A staging buffer with the models of those clients who have any, and the row of each slot."""
        self._write()
        staging, self.staging = self.staging, None
        if staging is None or jax.tree.leaves(staging)[0].shape[0] != len(layout.client_C):
            staging = _zeros(self.engine, len(layout.client_C))
        has_row_C = layout.is_participating_C & (self.row_K[layout.client_C] != NO_ROW)
        if has_row_C.any():
            staging = self._fill(staging, layout, has_row_C)
        return staging, layout.place_C

    def _fill(self, staging: Parameters, layout: CohortLayout, has_row_C: np.ndarray) -> Parameters:
        """Read the models of some slots into the staging buffer, as many for each device."""
        slots = [np.flatnonzero(part) for part in np.split(has_row_C, self.engine.devices)]
        count = 1 << (max(16, *map(len, slots)) - 1).bit_length()  # few sizes, so that it rarely compiles
        outside = len(has_row_C)  # of every device's part, so that the padding is not written
        index_B = np.concatenate([np.pad(part, (0, count - len(part)), constant_values=outside) for part in slots])
        client_B = layout.client_C[has_row_C]
        leaves = [np.zeros((len(index_B), *shape), ROW_TYPE) for shape in self.shapes]
        for leaf, part in zip(leaves, self._read(client_B), strict=True):
            leaf[index_B != outside] = part
        rows = jax.tree.unflatten(jax.tree.structure(self.engine.like), leaves)
        return self.engine.scatter_rows(
            staging, *self.engine.put((rows, index_B.astype(np.int32)), self.engine.by_client)
        )

    def commit(self, models: Parameters, layout: CohortLayout) -> None:
        """Store the models after a round: they are written at the next checkout."""
        self.unwritten = models, layout

    def release(self, models: Parameters) -> None:
        """Return models that were only read."""
        self.staging = models

    def _write(self) -> None:
        """Write the last round's models to free rows."""
        if self.unwritten is None:
            return
        (models, layout), self.unwritten = self.unwritten, None
        participating = np.flatnonzero(layout.is_participating_C)
        clients = layout.client_C[participating]
        row_C = np.full(len(layout.client_C), NO_ROW, np.int32)
        row_C[participating] = self._allocate(len(clients))
        file = self._open("w+b")
        for shards in zip(*(leaf.addressable_shards for leaf in jax.tree.leaves(models)), strict=True):
            leaves, first = [np.asarray(shard.data) for shard in shards], shards[0].index[0].start or 0
            for slot, row in enumerate(row_C[first : first + len(leaves[0])].tolist()):
                if row != NO_ROW:
                    file.seek(row * self.row_bytes)
                    for leaf in leaves:
                        file.write(leaf[slot].data)
        file.flush()
        if os.fstat(file.fileno()).st_size < self.file_rows * self.row_bytes:  # the last rows are another process's
            file.truncate(self.file_rows * self.row_bytes)
        previous = self.row_K[clients]
        self.free = np.append(self.free, previous[(previous != NO_ROW) & (previous != self.checkpoint_row_K[clients])])
        self.row_K[clients] = row_C[participating]
        self.staging = models

    def _allocate(self, count: int) -> np.ndarray:
        reused, self.free = np.split(self.free, [count])
        appended = np.arange(self.file_rows, self.file_rows + count - len(reused), dtype=np.int32)
        self.file_rows += len(appended)
        return np.concatenate([reused, appended])

    def _read(self, clients: np.ndarray) -> list[np.ndarray]:
        """The models of these clients, who have some, leaf by leaf."""
        shape = (self.file_rows, int(self.offsets[-1]))
        rows = np.memmap(self._open("w+b"), ROW_TYPE, "r", shape=shape)[self.row_K[clients]]
        spans = zip(self.offsets, self.offsets[1:], self.shapes, strict=False)
        return [rows[:, start:end].reshape(-1, *shape) for start, end, shape in spans]

    def rows(self, clients: np.ndarray) -> np.ndarray:
        """The models of these clients, of the shape (clients, V, parameters); zeros for one who has none."""
        self._write()
        models = np.zeros((len(clients), len(self.engine.run_V), self.engine.parameters), ROW_TYPE)
        has_row = self.row_K[clients] != NO_ROW
        if has_row.any():
            models[has_row] = _flatten(self._read(clients[has_row]))
        return models

    def state_arrays(self, clients: np.ndarray) -> StateArrays:
        """Each client's row. The models stay in the file, which is written to the disk."""
        self._write()
        if self.file is not None:
            os.fsync(self.file.fileno())
        self.checkpoint_row_K = self.row_K.copy()
        self._find_free()
        return {"personal_row_K": self.checkpoint_row_K}

    def restore(self, arrays: dict[str, Any], clients: np.ndarray) -> None:
        """Restore the rows that `state_arrays` returned.

        Raises:
            RunError: If the file is missing or too short.
        """
        self.row_K = np.array(arrays["personal_row_K"])
        self.checkpoint_row_K, self.unwritten = self.row_K.copy(), None
        self.file_rows = int(self.row_K.max(initial=NO_ROW)) + 1
        if self._file_bytes() < self.file_rows * self.row_bytes:
            message = (
                f"{self.path or 'the temporary file'} is missing or too short: this run's personal models were in it"
            )
            raise RunError(message, "directory", self.path)
        if self.file_rows > 0:
            self._open("r+b")
        self._find_free()

    def _find_free(self) -> None:
        is_free = np.ones(self.file_rows, bool)
        for row_K in (self.row_K, self.checkpoint_row_K):
            is_free[row_K[row_K != NO_ROW]] = False
        self.free = np.flatnonzero(is_free).astype(np.int32)

    def _file_bytes(self) -> int:
        if self.path is not None:
            return self.path.stat().st_size if self.path.exists() else 0
        return 0 if self.file is None else os.fstat(self.file.fileno()).st_size

    def _open(self, mode: str) -> IO[bytes]:
        if self.file is None:
            temporary = self.path is None
            self.file = tempfile.TemporaryFile() if temporary else open(str(self.path), mode)  # noqa: SIM115
            weakref.finalize(self, self.file.close)
        return self.file


def _flatten(leaves: list[np.ndarray]) -> np.ndarray:
    """The leaves of models as one row of parameters for each model."""
    return np.concatenate([leaf.reshape(*leaf.shape[:2], -1) for leaf in leaves], axis=2)


def _zeros(engine: Engine, rows: int) -> Parameters:
    """Personal models of as many clients, all zero, spread over the devices."""

    def zeros() -> Parameters:
        return jax.tree.map(lambda leaf: jnp.zeros((rows, len(engine.run_V), *leaf.shape), leaf.dtype), engine.like)

    return jax.jit(zeros, out_shardings=engine.by_client)()


def personal_bytes_limit() -> int:
    """How many bytes of personal models the devices may hold together."""
    return (96 if jax.default_backend() == "gpu" else 3) * memories() * GIB


def make_personal_store(
    engine: Engine, clients: int, path: Path | None
) -> ShardedPersonalModels | MemoryMappedPersonalModels:
    """Personal models on the devices if they fit there, else in this file, or without a path in a temporary one."""
    size = len(engine.run_V) * clients * parameter_bytes(engine.model)
    if size <= personal_bytes_limit():
        return ShardedPersonalModels(engine, clients)
    return MemoryMappedPersonalModels(engine, clients, path)

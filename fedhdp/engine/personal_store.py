"""Where personal models are kept: on the devices where their clients live, or in a file that holds those who came.

What fits stays on the devices from the first round to the last. What does not is brought to a desk for the clients of a
round alone, so that memory follows the cohort and not the population.

Axis letters: K clients of the population, C slots of a cohort, B slots that need something brought, V personal models of a
client.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedhdp.engine.examples import GIB
from fedhdp.engine.placement import CohortLayout
from fedhdp.engine.round import Engine
from fedhdp.engine.row_file import RowFile
from fedhdp.errors import RunError
from fedhdp.models import Array, Model, Parameters
from fedhdp.results.store import PERSONAL

PART = 256  # clients whose models are written to a checkpoint at a time
NO_ROW = -1  # the row of a client who has no models
Packed = Mapping[str, np.ndarray | Callable[[], np.ndarray]]


class ShardedPersonalModels:
    """Personal models on the devices: client k's are row k // D of device k mod D."""

    def __init__(self, engine: Engine, clients: int):
        self.engine, self.clients = engine, clients
        self.capacity = -(-clients // engine.devices) * engine.devices

    def start(self) -> Parameters:
        """Room for everybody's."""
        return _room(self.engine, self.capacity)

    def checkout(self, kept: Parameters, seats: CohortLayout) -> tuple[Parameters, np.ndarray]:
        """The models, and the row of each slot's client."""
        return kept, seats.client_C // self.engine.devices

    def commit(self, kept: Parameters, lent: Parameters, seats: CohortLayout) -> Parameters:
        """The models after the round."""
        return lent

    def release(self, lent: Parameters) -> None:
        """Return models that were not changed: they never left."""

    def rows(self, kept: Parameters, clients: np.ndarray) -> np.ndarray:
        """The models of these clients, each as one row."""
        leaves = [self.engine.fetch(leaf)[self._home(clients)] for leaf in jax.tree.leaves(kept)]
        return np.concatenate([leaf.reshape(*leaf.shape[:2], -1) for leaf in leaves], axis=2)

    def pack(self, kept: Parameters, known: np.ndarray) -> Packed:
        """The models of these clients as named arrays, in their order, whatever the devices; made part by part."""
        parts = {}
        for i, leaf in enumerate(jax.tree.leaves(kept)):
            for first in range(0, len(known), PART):
                parts[f"personal_{i}_{first}"] = partial(self._part, leaf, known[first : first + PART])
        return parts

    def _part(self, leaf: Array, clients: np.ndarray) -> np.ndarray:
        rows = np.pad(self._home(clients), (0, PART - len(clients)))  # one size, so that it compiles once
        return self.engine.fetch(leaf[rows])[: len(clients)]

    def unpack(self, arrays: dict[str, np.ndarray], known: np.ndarray) -> Parameters:
        """The models that were packed."""
        leaves, tree = jax.tree.flatten(self.engine.like)
        made = [np.zeros((self.capacity, len(self.engine.run_V), *leaf.shape), leaf.dtype) for leaf in leaves]
        for i, rows in enumerate(made):
            for first in range(0, len(known), PART):
                part = arrays.pop(f"personal_{i}_{first}")
                rows[self._home(known[first : first + PART])] = part() if callable(part) else part
        return self.engine.put(jax.tree.unflatten(tree, made), self.engine.by_client)

    def _home(self, clients: np.ndarray) -> np.ndarray:
        devices = self.engine.devices
        return clients % devices * (self.capacity // devices) + clients // devices


class MemoryMappedPersonalModels:
    """Personal models in a file that holds those who came, whatever the population.

    A round works at a desk, an array with room for a cohort. There are two: while a round runs at one, what the round
    before left on the other is written down. A client who has no models yet needs nothing brought to the desk. A round's
    models are written behind each other at the end of the file, in one go; once it has three rows for each client in it,
    over those that are out of date. What the last checkpoint knows is never written over, so a run goes on from there.
    """

    def __init__(self, engine: Engine, clients: int, folder: Path | None):
        self.engine, self.clients = engine, clients
        self.path = None if folder is None else folder / PERSONAL
        self.file: RowFile | None = None
        self.written: list[Future] = []  # what the last round left on its desk
        self.writers = ThreadPoolExecutor(engine.devices)  # one for what is on each device
        weakref.finalize(self, self.writers.shutdown, wait=False)

    def _open(self, how: int) -> Any:
        numbers = [len(self.engine.run_V) * leaf.size for leaf in jax.tree.leaves(self.engine.like)]
        self.file = RowFile(self.path, how, numbers)
        self.out_of_date = np.zeros(0, np.int64)  # rows that nobody needs, as far as was looked
        self.desks: list[Parameters | None] = [None, None]
        self.written = []
        self.writing: dict[int, int] = {}  # whose that is, and in which slot
        return self

    def start(self) -> Any:
        """No models; the file is not touched before the first round, as it may be that of a checkpoint."""
        self.row_K = np.full(self.clients, NO_ROW, np.int32)
        self.kept_K = self.row_K.copy()  # as the last checkpoint knows it
        self.file = None
        return self

    def checkout(self, kept: Any, seats: CohortLayout) -> tuple[Parameters, np.ndarray]:
        """A desk with the models of those clients who have any, and their rows."""
        if self.file is None:
            self._open(os.O_CREAT | os.O_TRUNC)
        known_C = seats.is_participating_C & (self.row_K[seats.client_C] != NO_ROW)
        desk = self.desks.pop(0)
        if desk is None or jax.tree.leaves(desk)[0].shape[0] != len(seats.client_C):
            desk = _room(self.engine, len(seats.client_C))
        if known_C.any():
            desk = self._bring(desk, seats, known_C)
        return desk, seats.place_C

    def _bring(self, desk: Parameters, seats: CohortLayout, known_C: np.ndarray) -> Parameters:
        """Read the models of some slots onto the desk, as many for each device."""
        by_device = np.split(known_C, self.engine.devices)
        most = max(16, *(int(mine.sum()) for mine in by_device))
        each = 1 << (most - 1).bit_length()  # few sizes, so that it rarely compiles
        slots = [np.flatnonzero(mine) + device * len(mine) for device, mine in enumerate(by_device)]
        slot_B = np.concatenate([np.pad(mine, (0, each - len(mine)), constant_values=-1) for mine in slots])
        client_B = np.where(slot_B >= 0, seats.client_C[slot_B], -1)
        leaves = self._read(client_B)
        self._copy_unwritten(leaves, client_B)
        rows = np.where(slot_B >= 0, seats.place_C[slot_B], len(known_C)).astype(np.int32)
        brought = jax.tree.unflatten(jax.tree.structure(self.engine.like), leaves)
        return self.engine.scatter_rows(desk, *self.engine.put((brought, rows), self.engine.by_client))

    def _copy_unwritten(self, leaves: list[np.ndarray], client_B: np.ndarray) -> None:
        """Models of the last round that may not be in the file yet, from its desk: a client may be asked again at once."""
        again = [(b, self.writing[client]) for b, client in enumerate(client_B.tolist()) if client in self.writing]
        if not again:
            return
        for leaf, left in zip(leaves, jax.tree.leaves(self.desks[-1])):
            for shard in left.addressable_shards:
                first, part = shard.index[0].start or 0, np.asarray(shard.data)
                for b, slot in again:
                    if first <= slot < first + len(part):
                        leaf[b] = part[slot - first]

    def rows(self, kept: Any, clients: np.ndarray) -> np.ndarray:
        """The models of these clients, each as one row."""
        self._wait()
        return np.concatenate([leaf.reshape(*leaf.shape[:2], -1) for leaf in self._read(clients)], axis=2)

    def _read(self, client_B: np.ndarray) -> list[np.ndarray]:
        """The models of these clients; nothing but zeros for one who has none, or is -1."""
        shapes = [(len(client_B), len(self.engine.run_V), *leaf.shape) for leaf in jax.tree.leaves(self.engine.like)]
        leaves = [np.zeros(shape, np.float32) for shape in shapes]
        row_B = np.where(client_B >= 0, self.row_K[client_B], NO_ROW)
        for b in np.flatnonzero(row_B != NO_ROW):
            assert self.file is not None
            self.file.read(int(row_B[b]), [leaf[b] for leaf in leaves])
        return leaves

    def commit(self, kept: Any, lent: Parameters, seats: CohortLayout) -> Any:
        """Write the models down when the round is done, while the next one runs."""
        self._wait()
        clients = seats.client_C[seats.is_participating_C]
        self.row_K[clients] = self._rows_for(len(clients))
        row_C = np.where(seats.is_participating_C, self.row_K[seats.client_C], NO_ROW)
        self.writing = dict(zip(clients.tolist(), np.flatnonzero(seats.is_participating_C).tolist()))
        assert self.file is not None
        for shards in zip(*(leaf.addressable_shards for leaf in jax.tree.leaves(lent))):
            self.written.append(self.writers.submit(_write, self.file, shards, row_C))
        self.desks.append(lent)
        return kept

    def _rows_for(self, count: int) -> np.ndarray:
        """Where in the file to write as many models: at most two rows of a client are needed, now and by a checkpoint."""
        assert self.file is not None
        known = int(np.count_nonzero(self.row_K != NO_ROW))
        if len(self.out_of_date) < count and self.file.rows > 3 * max(known, count):
            needed = np.zeros(self.file.rows, bool)
            for row_K in (self.row_K, self.kept_K):
                needed[row_K[row_K != NO_ROW]] = True
            self.out_of_date = np.flatnonzero(~needed)
        if len(self.out_of_date) < count:
            return self.file.more(count)
        rows, self.out_of_date = self.out_of_date[:count], self.out_of_date[count:]
        return rows

    def release(self, lent: Parameters) -> None:
        """Return a desk at which nothing was changed."""
        self.desks.insert(0, lent)

    def _wait(self) -> None:
        for part in self.written:
            part.result()
        self.written, self.writing = [], {}

    def pack(self, kept: Any, known: np.ndarray) -> Packed:
        """Where in the file each client's models are; they stay there."""
        self._wait()
        if self.file is not None:
            self.file.sync()
        self.kept_K = self.row_K.copy()
        return {"personal_row": self.kept_K}

    def unpack(self, arrays: dict[str, np.ndarray], known: np.ndarray) -> Any:
        """Go on with the file."""
        if self.path is None or not self.path.exists():
            message = f"{self.path or 'the file'} is gone: the personal models of this run were in it"
            raise RunError(message, "directory", self.path)
        self.kept_K = arrays["personal_row"]
        self.row_K = self.kept_K.copy()
        return self._open(0)


def _write(file: RowFile, shards: Sequence[Any], row_C: np.ndarray) -> None:
    """Write what is on a device, each slot's models to their row, those who sit side by side in one go."""
    first = shards[0].index[0].start or 0
    parts = [np.asarray(shard.data) for shard in shards]
    here_C = row_C[first : first + len(parts[0])]
    came = np.flatnonzero(here_C != NO_ROW)
    for run in np.split(came, np.flatnonzero(np.diff(came) != 1) + 1):
        if len(run):
            file.write(here_C[run], [part[run[0] : run[-1] + 1] for part in parts])


def _room(engine: Engine, rows: int) -> Parameters:
    """Room for the personal models of as many clients, spread over the devices."""
    models = len(engine.run_V)

    def room() -> Parameters:
        return jax.tree.map(lambda leaf: jnp.zeros((rows, models, *leaf.shape), leaf.dtype), engine.like)

    return jax.jit(room, out_shardings=engine.by_client)()


def personal_bytes_limit() -> int:
    """How many bytes of personal models the devices may hold."""
    return (96 if jax.default_backend() == "gpu" else 3) * GIB


def personal_bytes(model: Model, clients: int) -> int:
    """What one personal model for each client takes."""
    leaves = jax.tree.leaves(jax.eval_shape(model.init, jax.random.key(0)))
    return clients * sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


def make_personal_store(
    engine: Engine, clients: int, folder: Path | None
) -> ShardedPersonalModels | MemoryMappedPersonalModels:
    """Personal models on the devices if they fit there."""
    fit = len(engine.run_V) * personal_bytes(engine.model, clients) <= personal_bytes_limit()
    return ShardedPersonalModels(engine, clients) if fit else MemoryMappedPersonalModels(engine, clients, folder)

"""Where personal models are kept: on the devices where their clients live, or in a file that holds those who came.

What fits stays on the devices from the first round to the last. What does not is brought to a desk for the clients of a
round alone, so that memory follows the cohort and not the population.

Axis letters: K clients of the population, C slots of a cohort, B slots that need something brought, V personal models of a
client.
"""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedhdp.engine import Engine
from fedhdp.models import Array, Model, Parameters
from fedhdp.results import PERSONAL
from fedhdp.stores import GIB, Seats

PART = 256  # clients whose models are written to a checkpoint at a time
Packed = Mapping[str, np.ndarray | Callable[[], np.ndarray]]


class PersonalAtHome:
    """Personal models on the devices: client k's are row k // D of device k mod D."""

    def __init__(self, engine: Engine, clients: int):
        self.engine, self.clients = engine, clients
        self.capacity = -(-clients // engine.devices) * engine.devices

    def start(self) -> Parameters:
        """Room for everybody's."""
        return _room(self.engine, self.capacity)

    def lend(self, kept: Parameters, seats: Seats) -> tuple[Parameters, np.ndarray]:
        """The models, and the row of each slot's client."""
        return kept, seats.client_C // self.engine.devices

    def take_back(self, kept: Parameters, lent: Parameters, seats: Seats) -> Parameters:
        """The models after the round."""
        return lent

    def give_back(self, lent: Parameters) -> None:
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
                rows[self._home(known[first : first + PART])] = arrays.pop(f"personal_{i}_{first}")
        return self.engine.put(jax.tree.unflatten(tree, made), self.engine.by_client)

    def _home(self, clients: np.ndarray) -> np.ndarray:
        devices = self.engine.devices
        return clients % devices * (self.capacity // devices) + clients // devices


class PersonalOnDisk:
    """Personal models in a file with holes: it holds what was written, whatever the population.

    A round works at a desk, an array with room for a cohort. There are two: while a round runs at one, what the round
    before left on the other is written down. A client who has no models yet needs nothing brought to the desk. Each client
    has two places in the file: what the last checkpoint knows is never written over, so a run goes on from there.
    """

    def __init__(self, engine: Engine, clients: int, folder: Path | None):
        self.engine, self.clients = engine, clients
        self.bytes = 4 * len(engine.run_V) * engine.parameters  # of a client
        self.path = None if folder is None else folder / PERSONAL
        self.writer = ThreadPoolExecutor(1)
        weakref.finalize(self, self.writer.shutdown, wait=False)

    def _open(self, how: int) -> int:
        if self.path is None:
            self.file, path = tempfile.mkstemp(prefix="fedhdp-")
            os.unlink(path)  # it is gone when nobody has it open any more
        else:
            self.file = os.open(self.path, os.O_RDWR | how)
        weakref.finalize(self, os.close, self.file)
        self.desks: list[Parameters | None] = [None, None]
        self.written: Future | None = None  # what the last round left on its desk
        self.writing: dict[int, int] = {}  # whose that is, and in which slot
        return self.file

    def start(self) -> Any:
        """An empty file."""
        self.place_K = np.zeros(self.clients, np.uint8)
        self.kept_K = np.full(self.clients, 2, np.uint8)  # 2: the checkpoint knows neither place
        self.known_K = np.zeros(self.clients, bool)
        return self._open(os.O_CREAT | os.O_TRUNC)

    def lend(self, kept: Any, seats: Seats) -> tuple[Parameters, np.ndarray]:
        """A desk with the models of those clients who have any, and their rows."""
        known_C = seats.came_C & self.known_K[seats.client_C]
        desk = self.desks.pop(0)
        if desk is None or jax.tree.leaves(desk)[0].shape[0] != len(seats.client_C):
            desk = _room(self.engine, len(seats.client_C))
        if known_C.any():
            desk = self._bring(desk, seats, known_C)
        return desk, seats.place_C

    def _bring(self, desk: Parameters, seats: Seats, known_C: np.ndarray) -> Parameters:
        """Read the models of some slots onto the desk, as many for each device."""
        by_device = np.split(known_C, self.engine.devices)
        most = max(16, *(int(mine.sum()) for mine in by_device))
        each = 1 << (most - 1).bit_length()  # few sizes, so that it rarely compiles
        slots = [np.flatnonzero(mine) + device * len(mine) for device, mine in enumerate(by_device)]
        slot_B = np.concatenate([np.pad(mine, (0, each - len(mine)), constant_values=-1) for mine in slots])
        leaves = self._read(seats.client_C[slot_B], slot_B >= 0)
        self._copy_unwritten(leaves, np.where(slot_B >= 0, seats.client_C[slot_B], -1))
        rows = np.where(slot_B >= 0, seats.place_C[slot_B], len(known_C)).astype(np.int32)
        brought = jax.tree.unflatten(jax.tree.structure(self.engine.like), leaves)
        return self.engine.lay(desk, *self.engine.put((brought, rows), self.engine.by_client))

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
        leaves = self._read(clients, np.ones(len(clients), bool))
        return np.concatenate([leaf.reshape(*leaf.shape[:2], -1) for leaf in leaves], axis=2)

    def _read(self, client_C: np.ndarray, came_C: np.ndarray) -> list[np.ndarray]:
        shapes = [(len(client_C), len(self.engine.run_V), *leaf.shape) for leaf in jax.tree.leaves(self.engine.like)]
        leaves = [np.zeros(shape, np.float32) for shape in shapes]
        for slot in np.flatnonzero(came_C):
            parts = [leaf[slot].data for leaf in leaves]
            os.preadv(
                self.file, parts, self._offset(int(client_C[slot]))
            )  # past the end of the file there is nothing yet
        return leaves

    def take_back(self, kept: Any, lent: Parameters, seats: Seats) -> Any:
        """Write the models down when the round is done, while the next one runs."""
        self._wait()
        clients = seats.client_C[seats.came_C]
        other = self.kept_K[clients] < 2
        self.place_K[clients[other]] = 1 - self.kept_K[clients[other]]
        self.known_K[clients] = True
        self.writing = dict(zip(clients.tolist(), np.flatnonzero(seats.came_C).tolist()))
        offset_C = [self._offset(client) for client in seats.client_C.tolist()]
        self.written = self.writer.submit(_write, self.file, jax.tree.leaves(lent), seats.came_C, offset_C)
        self.desks.append(lent)
        return kept

    def give_back(self, lent: Parameters) -> None:
        """Return a desk at which nothing was changed."""
        self.desks.insert(0, lent)

    def _wait(self) -> None:
        if self.written is not None:
            self.written.result()
        self.written, self.writing = None, {}

    def pack(self, kept: Any, known: np.ndarray) -> Packed:
        """Which place of each client holds; the models stay where they are."""
        self._wait()
        os.fsync(self.file)
        self.kept_K = np.where(self.known_K, self.place_K, 2).astype(np.uint8)
        return {"personal_place": self.kept_K}

    def unpack(self, arrays: dict[str, np.ndarray], known: np.ndarray) -> Any:
        """Go on with the file."""
        if self.path is None or not self.path.exists():
            raise ValueError(f"{self.path or 'the file'} is gone: the personal models of this run were in it")
        self.kept_K = arrays["personal_place"]
        self.known_K = self.kept_K < 2
        self.place_K = np.where(self.known_K, self.kept_K, 0).astype(np.uint8)
        return self._open(0)

    def _offset(self, client: int) -> int:
        return (2 * client + int(self.place_K[client])) * self.bytes


def _write(file: int, leaves: list[Array], came_C: np.ndarray, offset_C: list[int]) -> None:
    """Write each slot's models to its place, each device's as they lie there."""
    for shards in zip(*(leaf.addressable_shards for leaf in leaves)):
        first = shards[0].index[0].start or 0
        parts = [np.asarray(shard.data) for shard in shards]
        for row in np.flatnonzero(came_C[first : first + len(parts[0])]):
            os.pwritev(file, [part[row].data for part in parts], offset_C[first + row])


def _room(engine: Engine, rows: int) -> Parameters:
    """Room for the personal models of as many clients, spread over the devices."""
    models = len(engine.run_V)

    def room() -> Parameters:
        return jax.tree.map(lambda leaf: jnp.zeros((rows, models, *leaf.shape), leaf.dtype), engine.like)

    return jax.jit(room, out_shardings=engine.by_client)()


def personal_room() -> int:
    """How many bytes of personal models the devices may hold."""
    return (96 if jax.default_backend() == "gpu" else 3) * GIB


def personal_bytes(model: Model, clients: int) -> int:
    """What one personal model for each client takes."""
    leaves = jax.tree.leaves(jax.eval_shape(model.init, jax.random.key(0)))
    return clients * sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


def keep_personal(engine: Engine, clients: int, folder: Path | None) -> PersonalAtHome | PersonalOnDisk:
    """Personal models on the devices if they fit there."""
    fit = len(engine.run_V) * personal_bytes(engine.model, clients) <= personal_room()
    return PersonalAtHome(engine, clients) if fit else PersonalOnDisk(engine, clients, folder)

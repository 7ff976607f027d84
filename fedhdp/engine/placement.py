"""Which client is in which slot of which device, so that the clients that are trained together are alike.

A cohort is laid out in slots, as many on each device. Client k's examples and personal models are on device k mod D.

Axis letters: K clients, C slots of a cohort.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from typing import NamedTuple

import numpy as np

from fedhdp.data import ExampleSource
from fedhdp.engine.round import Engine, SlotTable
from fedhdp.mechanism import Mechanism
from fedhdp.models import Array

EMPTY_SLOT = -1


class CohortLayout(NamedTuple):
    """The client in each slot.

    Attributes:
        client_C: The client; 0 in an empty slot.
        is_participating_C: False in an empty slot.
        place_C: The slot's number on its device.
    """

    client_C: np.ndarray
    is_participating_C: np.ndarray
    place_C: np.ndarray


def assign_slots(shares: list[np.ndarray], slots: int) -> CohortLayout:
    """Assign each device's clients to its slots, in their order; ``EMPTY_SLOT`` leaves a slot empty."""
    slots_each = slots // len(shares)
    client_C = np.full(slots, EMPTY_SLOT, np.int32)
    for device, share in enumerate(shares):
        client_C[device * slots_each : device * slots_each + len(share)] = share
    is_participating_C = client_C != EMPTY_SLOT
    place_C = np.tile(np.arange(slots_each), len(shares))
    return CohortLayout(np.where(is_participating_C, client_C, 0), is_participating_C, place_C)


def size_classes(source: ExampleSource, batch_size: int, several: bool = True) -> tuple[int, ...]:
    """The capacities at which clients train, in 1, 2, 3, 4, 6, 8, … batches; a client's follows from its own size alone.

    With ``several`` False there is one capacity: for models whose time does not grow with it.
    """
    if source.uniform_size:
        return (int(source.count_K[0]),)
    batches = max(1, -(-int(source.count_K.max()) // batch_size))
    if not several:
        return (batches * batch_size,)
    steps = sorted({factor * 2**power for factor in (1, 3) for power in range(batches.bit_length())})
    return tuple(step * batch_size for step in steps[: bisect_left(steps, batches) + 1])


def group_by_size(clients: np.ndarray, count_K: np.ndarray, sizes: tuple[int, ...], chunk: int) -> np.ndarray:
    """Order a device's clients so that all of a chunk are of one size class, the largest first.

    A client's result then does not depend on the sizes of the others. ``EMPTY_SLOT`` follows a class that ends within a
    chunk.
    """
    class_C = np.searchsorted(sizes[:-1], count_K[clients])
    parts = []
    for number in reversed(range(len(sizes))):
        of_class = clients[class_C == number]
        parts += [of_class, np.full(-len(of_class) % chunk, EMPTY_SLOT)]
    return np.concatenate(parts[:-1]).astype(np.int64)  # the last class may end within its chunk


def partition_by_owner(engine: Engine, clients: np.ndarray) -> list[np.ndarray]:
    """The clients by the device that holds their examples and personal models."""
    return [clients[clients % engine.devices == device] for device in range(engine.devices)]


def partition_evenly(engine: Engine, clients: np.ndarray) -> list[np.ndarray]:
    """As many clients on each device."""
    return [clients[device :: engine.devices] for device in range(engine.devices)]


class Placement:
    """Lays cohorts out in slots, whose number rarely changes, so that a round rarely compiles.

    Args:
        engine: The engine whose devices have the slots.
        mechanism: Its expected cohort decides how many slots there are.
        count_K: How many examples each client has.
        by_owner: Whether clients train on the devices that hold their personal models. Else they are spread evenly.
    """

    def __init__(self, engine: Engine, mechanism: Mechanism, count_K: np.ndarray, by_owner: bool):
        self.engine, self.count_K, self.by_owner = engine, count_K, by_owner
        expected = mechanism.expected_cohort_size() / engine.devices
        fixed = mechanism.sampling == "fixed" and (not by_owner or engine.devices == 1)
        spare = 0 if fixed else 4 * expected**0.5 + 1  # enough for all but the rarest cohorts
        partial_chunks = (len(engine.config.sizes) - 1) * engine.chunk
        self.slots = engine.padded_cohort_size(math.ceil(expected + spare + partial_chunks))

    def layout(self, clients: np.ndarray) -> CohortLayout:
        """The slots of a cohort; there are more from then on where they do not suffice."""
        engine, sizes = self.engine, self.engine.config.sizes
        if not engine.config.uniform_size:  # those with most examples first, so that chunks are alike
            clients = clients[np.argsort(-self.count_K[clients], kind="stable")]
        shares = partition_by_owner(engine, clients) if self.by_owner else partition_evenly(engine, clients)
        while True:
            chunk = engine.chunk_size(self.slots // engine.devices)
            placed = [group_by_size(share, self.count_K, sizes, chunk) if len(sizes) > 1 else share for share in shares]
            needed = max(map(len, placed))
            if needed * engine.devices <= self.slots:
                return assign_slots(placed, self.slots)
            self.slots = engine.padded_cohort_size(needed)


def make_slot_table(
    engine: Engine,
    layout: CohortLayout,
    group_K: np.ndarray,
    start_C: np.ndarray,
    count_K: np.ndarray,
    row_C: np.ndarray,
    participated_K: np.ndarray,
) -> Array:
    """The slot table of a cohort, on the devices: see ``SlotTable`` for its columns."""
    client_C, is_participating_C = layout.client_C, layout.is_participating_C
    count_C = np.where(is_participating_C, count_K[client_C], 0)
    out_of_bounds_C = len(count_K) + len(client_C) + layout.place_C  # so that nothing is written
    row_C = np.where(is_participating_C, row_C, out_of_bounds_C)
    uninitialized_C = ~participated_K[client_C]
    columns = SlotTable(client_C, group_K[client_C], start_C, count_C, row_C, is_participating_C, uninitialized_C)
    return engine.put(np.stack([np.asarray(column, np.int32) for column in columns], axis=1), engine.by_client)

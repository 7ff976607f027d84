"""Who sits where in a round, and where examples are: on the devices, or fetched for a cohort.

Either way the engine sees arrays on its devices and, for each slot, where in them a client's part is. Examples that fit
stay on the devices from the first round to the last. Others are made or read for the clients of a round alone, so that
time and memory follow the cohort and not the population.

Axis letters: K clients of the population, C slots of a cohort, N examples.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

import numpy as np

from fedhdp.data import Source
from fedhdp.engine.round import Engine, SlotTable
from fedhdp.models import Array


class CohortLayout(NamedTuple):
    """Who sits in which slot; in a spare one client 0 is named and did not come."""

    client_C: np.ndarray
    is_participating_C: np.ndarray
    place_C: np.ndarray  # the slot's number on its device


EMPTY_SLOT = -1


def assign_slots(shares: list[np.ndarray], slots: int) -> CohortLayout:
    """Each device's share of the clients in its slots, in the order given; a share may name nobody."""
    each = slots // len(shares)
    client_C = np.full(slots, EMPTY_SLOT, np.int32)
    for device, mine in enumerate(shares):
        client_C[device * each : device * each + len(mine)] = mine
    is_participating_C = client_C != EMPTY_SLOT
    return CohortLayout(
        np.where(is_participating_C, client_C, 0), is_participating_C, np.tile(np.arange(each), len(shares))
    )


def size_classes(source: Source, batch_size: int, several: bool = True) -> tuple[int, ...]:
    """A few capacities for clients of unequal size, in 1, 2, 3, 4, 6, 8, … batches: a client's is by its own size alone.

    Several are worth it where time grows with them, in the span; else what is not there is never looked at.
    """
    if source.uniform_size:
        return (int(source.count_K[0]),)
    batches = max(1, -(-int(source.count_K.max()) // batch_size))
    if not several:
        return (batches * batch_size,)
    steps = sorted({factor * 2**power for factor in (1, 3) for power in range(batches.bit_length())})
    return tuple(step * batch_size for step in steps[: bisect_left(steps, batches) + 1])


def by_size(clients: np.ndarray, count_K: np.ndarray, sizes: tuple[int, ...], chunk: int) -> np.ndarray:
    """The clients so placed that all of a chunk are of one size class: whoever else comes, a client computes the same."""
    class_C = np.searchsorted(sizes[:-1], count_K[clients])
    placed = []
    for number in reversed(range(len(sizes))):
        of_class = clients[class_C == number]
        placed += [of_class, np.full(-len(of_class) % chunk, EMPTY_SLOT)]
    return np.concatenate(placed[:-1]).astype(np.int64)  # the last class may end within its chunk


def partition_by_owner(engine: Engine, clients: np.ndarray) -> list[np.ndarray]:
    """The clients who live on each device."""
    return [clients[clients % engine.devices == device] for device in range(engine.devices)]


def partition_evenly(engine: Engine, clients: np.ndarray) -> list[np.ndarray]:
    """As many clients for each device, wherever they live."""
    return [clients[device :: engine.devices] for device in range(engine.devices)]


def make_slot_table(
    engine: Engine,
    seats: CohortLayout,
    group_K: np.ndarray,
    start_C: np.ndarray,
    count_K: np.ndarray,
    row_C: np.ndarray,
    participated_K: np.ndarray,
) -> Array:
    """Who is asked, slot by slot, on the devices."""
    client_C, is_participating_C = seats.client_C, seats.is_participating_C
    count_C = np.where(is_participating_C, count_K[client_C], 0)
    nowhere_C = len(count_K) + len(client_C) + seats.place_C  # out of bounds, so that nothing is written
    row_C = np.where(is_participating_C, row_C, nowhere_C)
    columns = SlotTable(
        client_C, group_K[client_C], start_C, count_C, row_C, is_participating_C, ~participated_K[client_C]
    )
    return engine.put(np.stack([np.asarray(column, np.int32) for column in columns], axis=1), engine.by_client)

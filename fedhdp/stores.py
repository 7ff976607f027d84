"""Who sits where in a round, and where examples are: on the devices, or fetched for a cohort.

Either way the engine sees arrays on its devices and, for each slot, where in them a client's part is. Examples that fit
stay on the devices from the first round to the last. Others are made or read for the clients of a round alone, so that
time and memory follow the cohort and not the population.

Axis letters: K clients of the population, C slots of a cohort, N examples.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

import jax
import numpy as np

from fedhdp.client import trains_in_span
from fedhdp.engine import Engine, Slots
from fedhdp.models import Array
from fedhdp.population import Examples, Source

GIB = 2**30


class Seats(NamedTuple):
    """Who sits in which slot; in a spare one client 0 is named and did not come."""

    client_C: np.ndarray
    came_C: np.ndarray
    place_C: np.ndarray  # the slot's number on its device


NOBODY = -1


def seat(shares: list[np.ndarray], slots: int) -> Seats:
    """Each device's share of the clients in its slots, in the order given; a share may name nobody."""
    each = slots // len(shares)
    client_C = np.full(slots, NOBODY, np.int32)
    for device, mine in enumerate(shares):
        client_C[device * each : device * each + len(mine)] = mine
    came_C = client_C != NOBODY
    return Seats(np.where(came_C, client_C, 0), came_C, np.tile(np.arange(each), len(shares)))


def size_classes(source: Source, batch_size: int, several: bool = True) -> tuple[int, ...]:
    """A few capacities for clients of unequal size, in 1, 2, 3, 4, 6, 8, … batches: a client's is by its own size alone.

    Several are worth it where time grows with them, in the span; else what is not there is never looked at.
    """
    if source.alike:
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
        placed += [of_class, np.full(-len(of_class) % chunk, NOBODY)]
    return np.concatenate(placed[:-1]).astype(np.int64)  # the last class may end within its chunk


def at_home(engine: Engine, clients: np.ndarray) -> list[np.ndarray]:
    """The clients who live on each device."""
    return [clients[clients % engine.devices == device] for device in range(engine.devices)]


def evenly(engine: Engine, clients: np.ndarray) -> list[np.ndarray]:
    """As many clients for each device, wherever they live."""
    return [clients[device :: engine.devices] for device in range(engine.devices)]


def table_of(
    engine: Engine,
    seats: Seats,
    group_K: np.ndarray,
    start_C: np.ndarray,
    count_K: np.ndarray,
    row_C: np.ndarray,
    new_K: np.ndarray,
) -> Array:
    """Who is asked, slot by slot, on the devices."""
    client_C, came_C = seats.client_C, seats.came_C
    count_C = np.where(came_C, count_K[client_C], 0)
    nowhere_C = len(count_K) + len(client_C) + seats.place_C  # out of bounds, so that nothing is written
    row_C = np.where(came_C, row_C, nowhere_C)
    columns = Slots(client_C, group_K[client_C], start_C, count_C, row_C, came_C, new_K[client_C])
    return engine.put(np.stack([np.asarray(column, np.int32) for column in columns], axis=1), engine.by_client)


class ExamplesAtHome:
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

    def fetch(self, seats: Seats) -> tuple[Array, Array, np.ndarray]:
        """Inputs, targets, and where each client's begin."""
        return *self.arrays, self.start_K[seats.client_C]


class ExamplesEverywhere:
    """Examples on every device."""

    def __init__(self, engine: Engine, examples: Examples):
        self.start_K = examples.start_K
        self.arrays = engine.put((examples.x_N, examples.y_N), engine.everywhere)

    def fetch(self, seats: Seats) -> tuple[Array, Array, np.ndarray]:
        """Inputs, targets, and where each client's begin."""
        return *self.arrays, self.start_K[seats.client_C]


class ExamplesOnDemand:
    """Examples that are made or read when their clients are asked."""

    def __init__(self, engine: Engine, source: Source, capacity: int):
        self.engine, self.source, self.capacity = engine, source, capacity

    def fetch(self, seats: Seats) -> tuple[Array, Array, np.ndarray]:
        """Inputs, targets, and where each client's begin."""
        if isinstance(self.source, Examples):  # spare seats as well: what is there is not looked at, and it is no work
            x_CM, y_CM = self.source.take(seats.client_C, self.capacity)
        else:
            came = np.flatnonzero(seats.came_C)
            x, y = self.source.take(seats.client_C[came], self.capacity)
            x_CM = np.zeros((len(seats.client_C), *x.shape[1:]), x.dtype)
            y_CM = np.zeros((len(seats.client_C), *y.shape[1:]), y.dtype)
            x_CM[came], y_CM[came] = x, y
        flat = (x_CM.reshape(-1, *x_CM.shape[2:]), y_CM.reshape(-1, *y_CM.shape[2:]))
        return *self.engine.put(flat, self.engine.by_client), seats.place_C * self.capacity


def examples_room() -> int:
    """How many bytes of examples the devices may hold."""
    return (8 if jax.default_backend() == "gpu" else 1) * GIB


def fits_at_home(source: Source) -> bool:
    """Whether the devices hold every client's examples, each its own clients'."""
    return isinstance(source, Examples) and int(source.count_K.sum()) * source.x_N[:1].nbytes <= examples_room()


def belongs_everywhere(source: Source, at_home: bool) -> bool:
    """Whether every device holds all examples: so that clients train anywhere, or since they share too few for copies."""
    return (
        isinstance(source, Examples) and source.x_N.nbytes <= examples_room() and not (at_home and fits_at_home(source))
    )


def keep_examples(
    engine: Engine, source: Source, capacity: int
) -> ExamplesAtHome | ExamplesEverywhere | ExamplesOnDemand:
    """Examples on the devices if they fit there."""
    if isinstance(source, Examples) and engine.shape.everywhere:
        return ExamplesEverywhere(engine, source)
    if isinstance(source, Examples) and fits_at_home(source):
        return ExamplesAtHome(engine, source)
    return ExamplesOnDemand(engine, source, capacity)


def keep_grams(engine: Engine, kept: ExamplesAtHome | ExamplesEverywhere | ExamplesOnDemand) -> Array | None:
    """The products of clients' examples with each other: no round changes them, so one need not compute them again.

    Where clients train in the span, are alike, and these take no more room than the examples do.
    """
    size, in_span = engine.shape.sizes[-1], trains_in_span(engine.model, engine.shape.sizes[-1], engine.shape.inputs)
    if isinstance(kept, ExamplesOnDemand) or not engine.shape.full or not in_span:
        return None
    x_N, _ = kept.arrays
    behind_each_other = not (kept.start_K % size).any() and len(x_N) % size == 0
    return engine.grams(x_N) if behind_each_other and 4 * size * len(x_N) <= x_N.nbytes else None

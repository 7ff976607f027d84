"""Handwriting made by a program: any number of clients, nothing to download, the same bytes for the same seed.

A pen follows the strokes of `glyphs`, bent by the habits of a writer, by how that writer writes this glyph, and by
chance. All a client holds depends on the seed and on the client's number alone, so any clients of a population without
end can be made when they are wanted. Images are always made on the CPU: a graphics card would round a few pixels the
other way.

Axis letters: K clients, N images, B images of a chunk, V shapes, S points of a shape, M modes in which a shape bends,
D numbers that say how a glyph departs from its shape (at 3 levels: writer, writer's glyph, sample), H pixels of a side.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np

from fedhdp.data import FederatedData, Source, examples
from fedhdp.datasets.glyphs import GLYPHS, STROKES, shapes
from fedhdp.datasets.splits import Split

# How hard the data is: standard deviations of what a writer does to all glyphs, of what a writer does to one glyph, and
# of what happens to one sample. Shapes are in heights of a capital. Chosen so that a nearest mean, a linear model and a
# small network, trained on some writers and tested on others, are right as often as they are on MNIST.
BEND = (0.023, 0.020, 0.015)  # of the sheet: strokes that pass the same place bend the same way
WOBBLE = (0.0, 0.030, 0.025)  # of the pen along its way
MISPLACE = (0.0, 0.018, 0.014)  # of each stroke
SLANT = (0.15, 0.05, 0.06)
TURN = (0.05, 0.04, 0.04)  # radians
SIZE = (0.04, 0.03, 0.03)  # logarithm
ASPECT = (0.10, 0.08, 0.05)  # logarithm of width to height
SHARPNESS = (0.35, 0.2, 0.15)  # 0 writes curves, 1 writes straight lines between the same points
PEN = (0.16, 0.0, 0.07)  # logarithm of the pen's width
SHIFT = (0.0, 0.0, 0.4)  # pixels from the centre of mass
PRESSURE = (0.0, 0.1, 0.15)  # logarithm of the ink along the pen's way
CARELESSNESS = (0.4, 0.0, 0.0)  # logarithm of how far a writer's samples stray
TASTE = 0.3  # logarithm of how often a writer writes a class

SIDE = 28
HEIGHT = 17.5  # pixels of a capital
LEAN = 0.12  # the slant of the average writer
PEN_WIDTH = 0.6  # pixels: the standard deviation across a line
INK = 5.0  # how dark a line is: more makes it darker and broader
FAINTEST, DARKEST = 0.08, 0.95  # what is fainter leaves the paper blank, what is darker is full ink
WRITERS = 500  # whose samples the clients share where clients are not writers (MNIST's train images: 539)
SKEWED_CLASS = 7
MOST_IMAGES = 5_000_000  # of train images that are all made at once: 4 GB
TESTED = 2000  # clients who have test images where there are more
CHUNK = 256  # images made at once: one compilation, temporaries that stay in the cache

# One stream of random numbers for each purpose; a writer's number starts anew in each of the three crowds.
_TRAIN, _TEST, _SERVER, _CLIENTS_HANDS, _POOL_HANDS, _SERVER_HANDS, _CLASSES, _TASTES = range(8)
_BENDS, _WAVES = 5, 4
_SPREAD_3D = np.concatenate(
    [
        np.repeat(np.array([spread], np.float32).T, repeats, axis=1)
        for spread, repeats in (
            (BEND, 2 * _BENDS), (WOBBLE, 2 * _WAVES), (MISPLACE, 2 * STROKES), (SHIFT, 2), (PRESSURE, _WAVES),
            (SLANT, 1), (TURN, 1), (SIZE, 1), (ASPECT, 1), (SHARPNESS, 1), (PEN, 1), (CARELESSNESS, 1),
        )
    ],
    axis=1,
)  # fmt: skip


def handwriting(
    clients: int = 2000,
    samples: int = 30,
    test_samples: int = 10,
    server_test: int = 10_000,
    split: Split = "one_digit",
    classes: Literal[10, 62] = 10,
    skewed_clients: int = 0,
    sizes: Sequence[int] | None = None,
    seed: int = 0,
    test_sizes: Sequence[int] | None = None,
) -> FederatedData:
    """A population whose clients hold handwriting: each its own, or each that of many writers in one class.

    What would not fit into memory is written when a client is asked for it, and not everybody is tested: about
    ``TESTED`` clients, evenly among all.
    """
    _check(clients, samples, test_samples, server_test, split, classes, skewed_clients, sizes, test_sizes, seed)
    count_K = np.full(clients, samples) if sizes is None else np.asarray(sizes)
    test_count_K = np.full(clients, test_samples) if test_sizes is None else np.asarray(test_sizes)
    make = partial(client_examples, split=split, classes=classes, skewed_clients=skewed_clients, seed=seed)
    train: Source
    if count_K.sum() > MOST_IMAGES:
        train = OnDemand(count_K.astype(np.int32), make)
        test_count_K = np.where(np.arange(clients) % -(-clients // TESTED) == 0, test_count_K, 0)
    else:
        train = examples(*make(np.arange(clients), count_K, part="train"), count_K)
    test = examples(*make(np.arange(clients), test_count_K, part="test"), test_count_K)
    server_x_N, server_y_N = server_examples(server_test, classes, seed)
    return FederatedData(f"handwriting-{split}-{classes}", train, test, server_x_N, server_y_N, classes)


class OnDemand(NamedTuple):
    """Train examples that are written when their clients are asked."""

    count_K: np.ndarray
    make: Callable[..., tuple[np.ndarray, np.ndarray]]

    @property
    def uniform_size(self) -> bool:
        """Whether all clients have the same number of examples."""
        return bool((self.count_K == self.count_K[0]).all())

    def take(self, clients_C: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
        """The examples of these clients, each padded to the same capacity with zeros."""
        count_C = self.count_K[clients_C]
        made = examples(*self.make(clients_C, count_C, part="train"), count_C)
        return made.take(np.arange(len(clients_C)), capacity)


def client_examples(
    clients_K: np.ndarray,
    count_K: np.ndarray,
    part: Literal["train", "test"] = "train",
    split: Split = "one_digit",
    classes: Literal[10, 62] = 10,
    skewed_clients: int = 0,
    seed: int = 0,
) -> tuple[np.ndarray, np.ndarray]:
    """Images and labels of these clients, one after the other; they are the same whoever else is asked for."""
    client_N = np.repeat(clients_K, count_K).astype(np.int32)
    index_N = (np.arange(len(client_N)) - np.repeat(np.cumsum(count_K) - count_K, count_K)).astype(np.int32)
    sample_key = _key(seed, _TRAIN if part == "train" else _TEST)
    if split == "by_writer":
        hands, writer_N = _CLIENTS_HANDS, client_N
        label_N = _rows(_class_by_taste, (sample_key, _key(seed, _TASTES)), (client_N, index_N), classes)
    else:
        hands, writer_N = _POOL_HANDS, _rows(_any_writer, (sample_key,), (client_N, index_N))
        label_N = _rows(_class_of_client, (_key(seed, _CLASSES),), (client_N,), classes)
        label_N[client_N < (skewed_clients if split == "skewed" else 0)] = SKEWED_CLASS
    return _rows(_image, (sample_key, _key(seed, hands)), (client_N, index_N, writer_N, label_N)), label_N


def server_examples(count: int, classes: Literal[10, 62] = 10, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Images of every class equally often, each by a writer who is nobody's client."""
    index_N = np.arange(count, dtype=np.int32)
    label_N, writer_N = index_N % classes, index_N // classes
    keys = _key(seed, _SERVER), _key(seed, _SERVER_HANDS)
    return _rows(_image, keys, (np.zeros_like(index_N), index_N, writer_N, label_N)), label_N


def sheet(writers: int = 10, glyphs: str = "0123456789", seed: int = 0) -> np.ndarray:
    """One picture: a row for each writer, a column for each glyph."""
    unknown = [glyph for glyph in glyphs if glyph not in GLYPHS]
    if unknown or not glyphs:
        raise ValueError(f"glyphs: nobody knows how to write {''.join(unknown)!r}")
    if writers < 1:
        raise ValueError(f"writers must be at least 1, not {writers}")
    label_N = np.tile([list(GLYPHS).index(glyph) for glyph in glyphs], writers).astype(np.int32)
    index_N = np.tile(np.arange(len(glyphs), dtype=np.int32), writers)
    writer_N = np.repeat(np.arange(writers, dtype=np.int32), len(glyphs))
    keys = _key(seed, _TRAIN), _key(seed, _CLIENTS_HANDS)
    image_N = _rows(_image, keys, (writer_N, index_N, writer_N, label_N))
    return image_N.reshape(writers, len(glyphs), SIDE, SIDE).swapaxes(1, 2).reshape(writers * SIDE, -1)


def _image(sample_key, hand_key, client, index, writer, label):
    """The image that one writer makes of one glyph as this sample of this client."""
    hand_key = jax.random.fold_in(hand_key, writer)
    glyph_key = jax.random.fold_in(hand_key, 1 + label)
    keys = [jax.random.fold_in(key, 0) for key in (hand_key, glyph_key, _sample_key(sample_key, client, index))]
    normal_3D = jnp.stack([jax.random.normal(key, _SPREAD_3D.shape[1:], jnp.float32) for key in keys])
    hand_D, glyph_D, sample_D = normal_3D * _SPREAD_3D
    habit_D = hand_D + glyph_D + jnp.exp(hand_D[-1]) * sample_D
    luck = jax.random.uniform(jax.random.fold_in(glyph_key, 1), (), jnp.float32)
    variant = jnp.asarray(shapes().first)[label] + jnp.int32(luck * jnp.asarray(shapes().variants)[label])
    return _inked(*_path(habit_D, variant))


def _path(habit_D, variant):
    """Where the pen passes, in pixels, how much ink it leaves at each point, and how wide it is."""
    table, modes_SM = shapes(), jnp.asarray(_modes())[variant]
    bend, shift, pressure, (slant, turn, size, aspect, sharpness, pen, _) = jnp.split(
        habit_D, np.cumsum([2 * modes_SM.shape[1], 2, _WAVES])
    )
    round_S2, sharp_S2 = jnp.asarray(table.round_VS2)[variant], jnp.asarray(table.sharp_VS2)[variant]
    points_S2 = round_S2 + jnp.clip(sharpness, -0.5, 1.0) * (sharp_S2 - round_S2) + modes_SM @ bend.reshape(-1, 2)

    cos, sin, wide, scale = jnp.cos(turn), jnp.sin(turn), jnp.exp(aspect / 2), HEIGHT * jnp.exp(size)
    leaning_22 = jnp.array([[wide, 0.0], [-LEAN - slant, 1 / wide]])
    points_S2 = points_S2 @ leaning_22 @ jnp.array([[cos, sin], [-sin, cos]]) * scale
    pressure_S = jnp.exp(modes_SM[:, _BENDS : _BENDS + _WAVES] @ pressure)
    ink_S = jnp.asarray(table.length_VS)[variant] * scale * pressure_S
    centred_S2 = points_S2 - (ink_S @ points_S2) / ink_S.sum() + (SIDE - 1) / 2
    return centred_S2 + shift, ink_S, PEN_WIDTH * jnp.exp(pen)


def _inked(points_S2, ink_S, width):
    """The image that dots of ink at these points make, where more ink darkens the paper ever less."""
    # A dot of ink is a product of two bell curves, so that all dots of a glyph together are one matrix product.
    bell_S2H = jnp.exp(-(((np.arange(SIDE, dtype=np.float32) - points_S2[:, :, None]) / width) ** 2) / 2)
    ink_HH = (bell_S2H[:, 1] * ink_S[:, None]).T @ bell_S2H[:, 0] * (INK / (math.sqrt(2 * math.pi) * width))
    dark_HH = (1 - jnp.exp(-ink_HH) - FAINTEST) / (DARKEST - FAINTEST)
    return jnp.round(255 * jnp.clip(dark_HH, 0, 1)).astype(jnp.uint8)


@cache
def _modes() -> np.ndarray:
    """For each point of each shape, how much it moves in each of the modes: bends, waves, and moves of one stroke."""
    table = shapes()
    u, v = np.moveaxis(2 * table.round_VS2 - 1, -1, 0) * np.pi / 2
    bends = [np.sin(2 * u), np.cos(2 * u), np.sin(2 * v) / 2, np.cos(2 * v), np.sin(u) * np.sin(v)]
    waves = [np.cos(np.pi * k * table.along_VS) / k for k in range(1, _WAVES + 1)]
    strokes = [table.stroke_VS == k for k in range(STROKES)]
    return np.stack([*bends, *waves, *strokes], -1).astype(np.float32)


def _class_of_client(key, client, classes):
    """The one class of a client: every block of as many clients as classes holds each class once, shuffled."""
    order = jax.random.permutation(jax.random.fold_in(key, client // classes), classes)
    return order[client % classes].astype(jnp.int32)


def _class_by_taste(sample_key, taste_key, client, index, classes):
    """The class of one sample of a client that holds all classes, some a little more often than others."""
    taste = TASTE * jax.random.normal(jax.random.fold_in(taste_key, client), (classes,), jnp.float32)
    key = jax.random.fold_in(_sample_key(sample_key, client, index), 1)
    return jax.random.categorical(key, taste).astype(jnp.int32)


def _any_writer(sample_key, client, index):
    """Who of the pool wrote one sample of a client."""
    key = jax.random.fold_in(_sample_key(sample_key, client, index), 2)
    return jax.random.randint(key, (), 0, WRITERS, jnp.int32)


def _sample_key(key, client, index):
    """The key of one sample of one client."""
    return jax.random.fold_in(jax.random.fold_in(key, client), index)


def _key(seed: int, stream: int) -> jax.Array:
    """The key of one stream; the generator is named because its bytes are a promise."""
    return jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), stream)


def _rows(function: Callable, keys: tuple[jax.Array, ...], rows: tuple[np.ndarray, ...], *static: Any) -> np.ndarray:
    """The function of every row, a chunk of rows at a time."""
    compiled, total = _compiled(function, len(keys), len(rows), *static), len(rows[0])
    made = jax.eval_shape(compiled, *keys, *(jax.ShapeDtypeStruct((CHUNK,), np.int32) for _ in rows))
    out_N = np.empty((total, *made.shape[1:]), made.dtype)

    def make(start: int) -> None:
        chunk = [np.resize(row[start : start + CHUNK], CHUNK) for row in rows]
        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            out_N[start : start + CHUNK] = np.asarray(compiled(*keys, *chunk))[: total - start]

    make(0)  # so that it is compiled once
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        list(threads.map(make, range(CHUNK, total, CHUNK)))  # a list, so that an error is not lost
    return out_N


@cache
def _compiled(function: Callable, keys: int, rows: int, *static: Any) -> Callable:
    """The function over a chunk of rows, compiled."""
    return jax.jit(jax.vmap(lambda *args: function(*args, *static), in_axes=(None,) * keys + (0,) * rows))


def _check(
    clients, samples, test_samples, server_test, split, classes, skewed_clients, sizes, test_sizes, seed
) -> None:
    """Say which argument cannot be meant."""
    if split not in get_args(Split):
        raise ValueError(f"split must be one of {', '.join(get_args(Split))}, not {split!r}")
    if classes not in (10, 62):
        raise ValueError(f"classes must be 10 or 62, not {classes}")
    for name, value, least in (
        ("clients", clients, 1), ("samples", samples, 1), ("test_samples", test_samples, 0),
        ("server_test", server_test, 1), ("skewed_clients", skewed_clients, 0), ("seed", seed, 0),
    ):  # fmt: skip
        if value < least:
            raise ValueError(f"{name} must be at least {least}, not {value}")
    if seed >= 2**31:
        raise ValueError(f"seed must be below 2**31, not {seed}")
    if skewed_clients > clients:
        raise ValueError(f"skewed_clients must be at most clients ({clients}), not {skewed_clients}")
    if skewed_clients and split != "skewed":
        raise ValueError(f"skewed_clients is for the split 'skewed' only, but is {skewed_clients} with split {split!r}")
    for name, given, least in (("sizes", sizes, 1), ("test_sizes", test_sizes, 0)):
        if given is not None:
            if split != "by_writer":
                raise ValueError(f"{name} is for the split 'by_writer' only, not {split!r}")
            if len(given) != clients:
                raise ValueError(f"{name} must have one entry for each of the {clients} clients, not {len(given)}")
            if min(given) < least:
                raise ValueError(f"{name} must be at least {least}, not {min(given)}")

"""Generated handwriting: any number of clients, nothing to download, the same bytes for the same seed.

A pen follows the strokes of `glyphs`, deformed by the writer's style, by the writer's style for this glyph, and per
sample. A client's examples depend on the seed and the client's number only, so those of any client of an unlimited
population can be generated when they are needed. Images are always generated on the CPU: a GPU would round a few pixels
differently.

Axis letters: K clients, C clients of a cohort, N images, S points of a shape, M modes of deformation, D deformation
parameters of a glyph (at 3 levels: writer, writer and glyph, sample), H pixels of a side.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedhdp.data import ExampleSource, FederatedData, examples
from fedhdp.datasets.femnist import check_classes
from fedhdp.datasets.glyphs import GLYPHS, MAX_STROKES, shape_table
from fedhdp.datasets.kept import load_or_generate
from fedhdp.datasets.splits import Split, check_split, index_in_client
from fedhdp.devices import use_cpu_cores
from fedhdp.errors import require

# How difficult the data is: standard deviations of a writer's style, of a writer's style for one glyph, and of one
# sample. Lengths are in heights of a capital. A nearest mean, a linear model and a small network, trained on some
# writers and tested on others, are about as accurate as on MNIST.
BEND = (0.023, 0.020, 0.015)  # of the plane: strokes that pass the same place bend alike
WOBBLE = (0.0, 0.030, 0.025)  # along the pen's path
STROKE_SHIFT = (0.0, 0.018, 0.014)
SLANT = (0.15, 0.05, 0.06)
ROTATION = (0.05, 0.04, 0.04)  # radians
SIZE = (0.04, 0.03, 0.03)  # logarithm
ASPECT = (0.10, 0.08, 0.05)  # logarithm of width to height
SHARPNESS = (0.35, 0.2, 0.15)  # 0 for curves, 1 for straight lines between the same points
PEN = (0.16, 0.0, 0.07)  # logarithm of the pen's width
IMAGE_SHIFT = (0.0, 0.0, 0.4)  # pixels from the centre of mass
PRESSURE = (0.0, 0.1, 0.15)  # logarithm of the ink along the pen's path
CARELESSNESS = (0.4, 0.0, 0.0)  # logarithm of the scale of a writer's deviations per sample
CLASS_PREFERENCE = 0.3  # standard deviation of a writer's log-probabilities of the classes

SIDE = 28
HEIGHT = 17.5  # pixels of a capital
MEAN_SLANT = 0.12
PEN_WIDTH = 0.6  # pixels: the standard deviation across a line
INK = 5.0  # the density of a line: more makes it darker and broader
BLANK_INK, FULL_INK = 0.08, 0.95  # densities that become 0 and 255
POOL_WRITERS = 500  # the writers of all samples where clients are not writers (MNIST's train images: 539)
SKEWED_CLASS = 7
MAX_IMAGES_IN_MEMORY = 5_000_000  # train images: 4 GB
TESTED_CLIENTS = 2000  # about as many clients have test examples where train examples are streamed
CHUNK = 256  # images generated at once: one compilation, and temporaries that fit into the cache
SOURCES = [Path(__file__).with_name(f"{name}.py") for name in ("handwriting", "glyphs", "splits")]  # of every image

# Each purpose has one stream of random numbers. Writers are numbered from 0 in each of the three streams of styles.
_TRAIN, _TEST, _SERVER, _CLIENT_STYLES, _POOL_STYLES, _SERVER_STYLES, _CLASSES, _PREFERENCES = range(8)
_NUM_BENDS, _NUM_WAVES = 5, 4
_STDDEV_3D = np.array(
    [BEND] * 2 * _NUM_BENDS
    + [WOBBLE] * 2 * _NUM_WAVES
    + [STROKE_SHIFT] * 2 * MAX_STROKES
    + [IMAGE_SHIFT] * 2
    + [PRESSURE] * _NUM_WAVES
    + [SLANT, ROTATION, SIZE, ASPECT, SHARPNESS, PEN, CARELESSNESS],
    np.float32,
).T


def make_handwriting(
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
    """Generate handwriting for clients.

    More than ``MAX_IMAGES_IN_MEMORY`` train images are streamed: generated whenever their client is sampled. Then about
    ``TESTED_CLIENTS`` clients, evenly spaced, have test examples.

    Args:
        clients: The number of clients.
        samples: Train examples of each client.
        test_samples: Test examples of each client.
        server_test: Test examples of the server.
        split: ``by_writer``: each client is one writer with all classes. ``one_digit``: each client has one class,
            written by many writers. ``skewed``: the same, but the first clients all have a 7.
        classes: 10 for digits, 62 for digits and letters.
        skewed_clients: In the split ``skewed``: how many clients have a 7.
        sizes: In the split ``by_writer``: the train examples of each client, instead of ``samples``.
        seed: Determines every image.
        test_sizes: In the split ``by_writer``: the test examples of each client, instead of ``test_samples``.

    Returns:
        Images of 28 x 28 bytes. The server's are by writers who are not clients.

    Raises:
        InvalidValueError: If an argument is out of range.
    """
    check_split(split, skewed_clients)
    check_classes(classes)
    for name, value in {"clients": clients, "samples": samples, "server_test": server_test}.items():
        require(value >= 1, name, value, "at least 1")
    require(test_samples >= 0, "test_samples", test_samples, "at least 0")
    require(skewed_clients >= 0, "skewed_clients", skewed_clients, "at least 0")
    require(0 <= seed < 2**31, "seed", seed, "at least 0 and below 2**31")
    require(skewed_clients <= clients, "skewed_clients", skewed_clients, f"at most clients ({clients})")
    for name, counts, lowest in (("sizes", sizes, 1), ("test_sizes", test_sizes, 0)):
        _check_sizes(name, counts, lowest, clients, split)

    count_K = np.full(clients, samples) if sizes is None else np.asarray(sizes)
    test_count_K = np.full(clients, test_samples) if test_sizes is None else np.asarray(test_sizes)
    of_clients = partial(client_examples, split=split, classes=classes, skewed_clients=skewed_clients, seed=seed)
    is_streamed = bool(count_K.sum() > MAX_IMAGES_IN_MEMORY)
    if is_streamed:
        test_count_K = np.where(np.arange(clients) % -(-clients // TESTED_CLIENTS) == 0, test_count_K, 0)
    count_of = {"test": test_count_K} if is_streamed else {"train": count_K, "test": test_count_K}
    sizes_of_parts = [None if part is None else np.asarray(part).tolist() for part in (sizes, test_sizes)]
    described = (clients, samples, test_samples, server_test, sizes_of_parts, split, classes, skewed_clients, seed)
    generate = partial(_arrays, of_clients, count_of, server_test, classes, seed)
    arrays = load_or_generate("handwriting", SOURCES, described, generate)
    train: ExampleSource
    if is_streamed:
        train = StreamedHandwriting(count_K.astype(np.int32), of_clients)
    else:
        train = examples(arrays["train_x"], arrays["train_y"], count_K)
    test = examples(arrays["test_x"], arrays["test_y"], test_count_K)
    name, server = f"handwriting-{split}-{classes}", (arrays["server_x"], arrays["server_y"])
    return FederatedData(name, train, test, *server, classes, input_scale=1 / 255, server_has_client_data=False)


def _arrays(
    of_clients: Callable[..., tuple[np.ndarray, np.ndarray]],
    counts: Mapping[str, np.ndarray],
    server_test: int,
    classes: Literal[10, 62],
    seed: int,
) -> dict[str, np.ndarray]:
    """The images and labels of all clients, by ``PART_x`` and ``PART_y``, and those of the server."""
    arrays = {}
    for part, count_K in counts.items():
        arrays[f"{part}_x"], arrays[f"{part}_y"] = of_clients(np.arange(len(count_K)), count_K, part=part)
    arrays["server_x"], arrays["server_y"] = server_examples(server_test, classes, seed)
    return arrays


class StreamedHandwriting(NamedTuple):
    """Train examples that are generated whenever their clients are sampled."""

    count_K: np.ndarray
    generate: Callable[..., tuple[np.ndarray, np.ndarray]]  # as `client_examples`

    @property
    def uniform_size(self) -> bool:
        """Whether all clients have the same number of examples."""
        return bool((self.count_K == self.count_K[0]).all())

    def take(self, clients_C: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
        """The examples of these clients, each padded to the same capacity with zeros."""
        count_C = self.count_K[clients_C]
        generated = examples(*self.generate(clients_C, count_C, part="train"), count_C)
        return generated.take(np.arange(len(clients_C)), capacity)


def client_examples(
    clients_C: np.ndarray,
    count_C: np.ndarray,
    part: Literal["train", "test"] = "train",
    split: Split = "one_digit",
    classes: Literal[10, 62] = 10,
    skewed_clients: int = 0,
    seed: int = 0,
) -> tuple[np.ndarray, np.ndarray]:
    """Generate the examples of some clients; they do not depend on which other clients are generated.

    Args:
        clients_C: The numbers of the clients.
        count_C: The number of examples of each.
        part: Train or test examples. The arguments after it are as for `make_handwriting`.

    Returns:
        Images and labels, client after client.
    """
    client_N = np.repeat(clients_C, count_C).astype(np.int32)
    index_N = index_in_client(count_C).astype(np.int32)
    sample_key = _key(seed, _TRAIN if part == "train" else _TEST)
    if split == "by_writer":
        styles, writer_N = _CLIENT_STYLES, client_N
        keys = (sample_key, _key(seed, _PREFERENCES))
        label_N = _map_rows(_preferred_class, keys, (client_N, index_N), classes)
    else:
        styles, writer_N = _POOL_STYLES, _map_rows(_pool_writer, (sample_key,), (client_N, index_N))
        label_N = _map_rows(_class_of_client, (_key(seed, _CLASSES),), (client_N,), classes)
        label_N[client_N < (skewed_clients if split == "skewed" else 0)] = SKEWED_CLASS
    return _map_rows(_image, (sample_key, _key(seed, styles)), (client_N, index_N, writer_N, label_N)), label_N


def server_examples(count: int, classes: Literal[10, 62] = 10, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Generate the server's images and labels: every class equally often, by writers who are not clients."""
    index_N = np.arange(count, dtype=np.int32)
    label_N, writer_N = index_N % classes, index_N // classes
    keys = _key(seed, _SERVER), _key(seed, _SERVER_STYLES)
    return _map_rows(_image, keys, (np.zeros_like(index_N), index_N, writer_N, label_N)), label_N


def handwriting_sheet(writers: int = 10, glyphs: str = "0123456789", seed: int = 0) -> np.ndarray:
    """One image of many glyphs.

    Args:
        writers: The number of rows, one for each writer.
        glyphs: The columns: digits and letters.
        seed: Determines every image.

    Returns:
        Bytes where ink is high, 28 pixels a row and a column.

    Raises:
        InvalidValueError: If there is no writer, or a glyph is neither digit nor letter.
    """
    require(glyphs != "" and set(glyphs) <= set(GLYPHS), "glyphs", glyphs, f"some of {''.join(GLYPHS)}")
    require(writers >= 1, "writers", writers, "at least 1")
    label_N = np.tile([list(GLYPHS).index(glyph) for glyph in glyphs], writers).astype(np.int32)
    index_N = np.tile(np.arange(len(glyphs), dtype=np.int32), writers)
    writer_N = np.repeat(np.arange(writers, dtype=np.int32), len(glyphs))
    keys = _key(seed, _TRAIN), _key(seed, _CLIENT_STYLES)
    image_N = _map_rows(_image, keys, (writer_N, index_N, writer_N, label_N))
    return image_N.reshape(writers, len(glyphs), SIDE, SIDE).swapaxes(1, 2).reshape(writers * SIDE, -1)


def _check_sizes(name: str, counts: Sequence[int] | None, lowest: int, clients: int, split: str) -> None:
    if counts is None:
        return
    require(split == "by_writer", name, len(counts), f"absent with the split {split!r}")
    require(len(counts) == clients, name, len(counts), f"one number for each of the {clients} clients")
    require(min(counts) >= lowest, name, min(counts), f"at least {lowest}")


def _image(sample_key, style_key, client, index, writer, label):
    """The image of one glyph by one writer, as this sample of this client."""
    style_key = jax.random.fold_in(style_key, writer)
    glyph_key = jax.random.fold_in(style_key, 1 + label)
    keys = [jax.random.fold_in(key, 0) for key in (style_key, glyph_key, _sample_key(sample_key, client, index))]
    normal_3D = jnp.stack([jax.random.normal(key, _STDDEV_3D.shape[1:], jnp.float32) for key in keys])
    writer_D, glyph_D, sample_D = normal_3D * _STDDEV_3D
    deformation_D = writer_D + glyph_D + jnp.exp(writer_D[-1]) * sample_D
    table = shape_table()
    uniform = jax.random.uniform(jax.random.fold_in(glyph_key, 1), (), jnp.float32)
    shape = jnp.asarray(table.first_shape)[label] + jnp.int32(uniform * jnp.asarray(table.num_shapes)[label])
    return _render(*_pen_path(deformation_D, shape))


def _pen_path(deformation_D, shape):
    """The points of the pen's path in pixels, the ink at each, and the width of the pen."""
    table, modes_SM = shape_table(), jnp.asarray(_deformation_modes())[shape]
    bend, shift, pressure, (slant, rotation, size, aspect, sharpness, pen, _) = jnp.split(
        deformation_D, np.cumsum([2 * modes_SM.shape[1], 2, _NUM_WAVES])
    )
    curve_S2, polyline_S2 = jnp.asarray(table.curve_VS2)[shape], jnp.asarray(table.polyline_VS2)[shape]
    points_S2 = curve_S2 + jnp.clip(sharpness, -0.5, 1.0) * (polyline_S2 - curve_S2) + modes_SM @ bend.reshape(-1, 2)

    cos, sin, width, scale = jnp.cos(rotation), jnp.sin(rotation), jnp.exp(aspect / 2), HEIGHT * jnp.exp(size)
    slant_22 = jnp.array([[width, 0.0], [-MEAN_SLANT - slant, 1 / width]])
    points_S2 = points_S2 @ slant_22 @ jnp.array([[cos, sin], [-sin, cos]]) * scale
    pressure_S = jnp.exp(modes_SM[:, _NUM_BENDS : _NUM_BENDS + _NUM_WAVES] @ pressure)
    ink_S = jnp.asarray(table.length_VS)[shape] * scale * pressure_S
    centred_S2 = points_S2 - (ink_S @ points_S2) / ink_S.sum() + (SIDE - 1) / 2
    return centred_S2 + shift, ink_S, PEN_WIDTH * jnp.exp(pen)


def _render(points_S2, ink_S, width):
    """The image of Gaussian dots of ink at these points; much ink saturates."""
    # A Gaussian dot is a product of a row and a column, so that the sum of all dots is one matrix product.
    gauss_S2H = jnp.exp(-(((np.arange(SIDE, dtype=np.float32) - points_S2[:, :, None]) / width) ** 2) / 2)
    ink_HH = (gauss_S2H[:, 1] * ink_S[:, None]).T @ gauss_S2H[:, 0] * (INK / (math.sqrt(2 * math.pi) * width))
    density_HH = (1 - jnp.exp(-ink_HH) - BLANK_INK) / (FULL_INK - BLANK_INK)
    return jnp.round(255 * jnp.clip(density_HH, 0, 1)).astype(jnp.uint8)


@cache
def _deformation_modes() -> np.ndarray:
    """How far each mode moves each point of each shape: bends of the plane, waves along the path, shifts of a stroke."""
    table = shape_table()
    u, v = np.moveaxis(2 * table.curve_VS2 - 1, -1, 0) * np.pi / 2
    bends = [np.sin(2 * u), np.cos(2 * u), np.sin(2 * v) / 2, np.cos(2 * v), np.sin(u) * np.sin(v)]
    waves = [np.cos(np.pi * k * table.position_VS) / k for k in range(1, _NUM_WAVES + 1)]
    strokes = [table.stroke_VS == k for k in range(MAX_STROKES)]
    return np.stack([*bends, *waves, *strokes], -1).astype(np.float32)


def _class_of_client(key, client, classes):
    """A client's only class: in every block of as many clients as classes each class occurs once, in random order."""
    order = jax.random.permutation(jax.random.fold_in(key, client // classes), classes)
    return order[client % classes].astype(jnp.int32)


def _preferred_class(sample_key, preference_key, client, index, classes):
    """The class of one sample of a client who writes all classes, some a little more often."""
    logits = CLASS_PREFERENCE * jax.random.normal(jax.random.fold_in(preference_key, client), (classes,), jnp.float32)
    key = jax.random.fold_in(_sample_key(sample_key, client, index), 1)
    return jax.random.categorical(key, logits).astype(jnp.int32)


def _pool_writer(sample_key, client, index):
    """The writer of one sample of a client, from the pool."""
    key = jax.random.fold_in(_sample_key(sample_key, client, index), 2)
    return jax.random.randint(key, (), 0, POOL_WRITERS, jnp.int32)


def _sample_key(key, client, index):
    """The key of one sample of one client."""
    return jax.random.fold_in(jax.random.fold_in(key, client), index)


def _key(seed: int, stream: int) -> jax.Array:
    """The key of one stream; the generator is named so that JAX's default cannot change the images."""
    use_cpu_cores()  # this may be the first use of JAX, after which a simulation could not have the cores
    return jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), stream)


def _map_rows(
    function: Callable, keys: tuple[jax.Array, ...], rows: tuple[np.ndarray, ...], *static: Any
) -> np.ndarray:
    """Apply a function to every row, in chunks of rows on several threads."""
    compiled, total = _compile(function, len(keys), len(rows), *static), len(rows[0])
    output = jax.eval_shape(compiled, *keys, *(jax.ShapeDtypeStruct((CHUNK,), np.int32) for _ in rows))
    out_N = np.empty((total, *output.shape[1:]), output.dtype)

    def fill(start: int) -> None:
        chunk = [np.resize(row[start : start + CHUNK], CHUNK) for row in rows]
        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            out_N[start : start + CHUNK] = np.asarray(compiled(*keys, *chunk))[: total - start]

    fill(0)  # compiles once, before there are threads
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        list(threads.map(fill, range(CHUNK, total, CHUNK)))  # a list raises the threads' errors
    return out_N


@cache
def _compile(function: Callable, keys: int, rows: int, *static: Any) -> Callable:
    """The function over a chunk of rows, compiled."""
    return jax.jit(jax.vmap(lambda *args: function(*args, *static), in_axes=(None,) * keys + (0,) * rows))

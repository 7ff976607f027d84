"""Digits and letters by their writers: TFF's federated EMNIST, LEAF's FEMNIST, and 330 writers of the latter.

All are stored alike: the train images of all clients one after the other, then so the test images, ink high as in MNIST
(the files have paper high: they are inverted when they are imported). With ``classes=10`` only digits are taken: TFF
has its own split for that, with 3,383 clients, the paper's "FMNIST"; elsewhere letters and clients without digits are
left out. Clients come in an order that the seed shuffles.

Axis letters: K clients, N images.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, get_args

import numpy as np

from fedhdp.data import Examples, FederatedData, examples
from fedhdp.datasets import stored
from fedhdp.datasets.splits import shuffled

Origin = Literal["tff", "leaf", "330"]
NAMES = {"tff": "emnist-tff", "leaf": "femnist-leaf", "330": "femnist-330"}
PIXELS, SIDE, CLASSES = 784, 28, 62


def femnist(
    origin: Origin = "tff",
    classes: Literal[10, 62] = 62,
    clients: int | None = None,
    seed: int = 0,
    directory: Path | None = None,
) -> FederatedData:
    """A population of writers from the data directory: all of them, or so many that the seed chooses."""
    if origin not in get_args(Origin):
        raise ValueError(f"origin must be one of {', '.join(get_args(Origin))}, not {origin!r}")
    if classes not in (10, 62):
        raise ValueError(f"classes must be 10 or 62, not {classes}")
    arrays = stored.read(NAMES[origin], directory)
    prefix = ("digits_" if classes == 10 else "all_") if origin == "tff" else ""
    train, test = (
        examples(*(arrays[f"{prefix}{part}_{kind}"] for kind in ("x", "y", "count"))) for part in ("train", "test")
    )
    if classes == 10 and origin != "tff":
        train, test = _digits(train), _digits(test)
        with_digits_K = train.count_K > 0
        train, test = (
            part._replace(start_K=part.start_K[with_digits_K], count_K=part.count_K[with_digits_K])
            for part in (train, test)
        )
    rng = np.random.default_rng([seed, 0])  # stream 0 is the data's
    return shuffled(f"{NAMES[origin]}-{classes}", train, test, classes, clients, rng)


def _digits(part: Examples) -> Examples:
    """The same clients with their digits alone."""
    digit_N = part.y_N < 10
    client_N = np.repeat(np.arange(len(part.count_K)), part.count_K)
    count_K = np.bincount(client_N[digit_N], minlength=len(part.count_K))
    return examples(part.x_N[digit_N], part.y_N[digit_N], count_K)


def ink(paper_N: np.ndarray) -> np.ndarray:
    """Images as bytes with ink high, from numbers between 0 and 1 with paper at 1."""
    if not (paper_N.min(initial=0.0) >= 0 and paper_N.max(initial=0.0) <= 1):  # so that NaN does not pass
        raise ValueError("pixels must be between 0 and 1")
    return np.rint(255 * (1 - paper_N)).astype(np.uint8).reshape(-1, SIDE, SIDE)


def store_npz(path: Path, arrays: dict[str, np.ndarray], sha256: str, directory: Path | None = None) -> None:
    """Keep the 330 writers."""
    image_N, label_N, client_N, is_test_N = (arrays[name] for name in ("images", "labels", "client", "is_test"))
    for name in ("images", "labels", "client", "is_test", "client_ids"):
        if arrays[name].ndim != (3 if name == "images" else 1):
            raise ValueError(f"{path} is damaged: {name} has the shape {arrays[name].shape}")
        if name != "client_ids" and len(arrays[name]) != len(image_N):
            raise ValueError(f"{path} is damaged: {len(image_N)} images, but {len(arrays[name])} entries of {name}")
    if image_N.shape[1:] != (SIDE, SIDE) or image_N.dtype != np.uint8 or is_test_N.dtype != bool:
        raise ValueError(f"{path}: images are {image_N.dtype} {image_N.shape}, not 28x28 bytes, or is_test is not bool")
    if label_N.dtype.kind not in "iu" or not 0 <= label_N.min(initial=0) <= label_N.max(initial=0) < CLASSES:
        raise ValueError(f"{path}: labels are not all whole numbers from 0 to {CLASSES - 1}")
    if client_N.dtype.kind not in "iu":
        raise ValueError(f"{path}: client is {client_N.dtype}, not whole numbers")
    known = len(arrays["client_ids"])
    present_K = np.unique(client_N)
    if not np.array_equal(present_K, np.arange(known)):
        raise ValueError(f"{path}: {known} client_ids, but images of {len(present_K)} clients")
    if is_test_N.all() or not is_test_N.any():
        raise ValueError(f"{path}: all images are to {'test' if is_test_N.all() else 'train'}")
    with stored.writing("femnist-330", {path.name: sha256}, directory) as writer:
        for part, wanted_N in (("train", ~is_test_N), ("test", is_test_N)):
            rows_N = np.flatnonzero(wanted_N)
            rows_N = rows_N[np.argsort(client_N[rows_N], kind="stable")]
            count_K = np.bincount(client_N[rows_N], minlength=known).astype(np.int32)
            kept = {"x": 255 - image_N[rows_N], "y": label_N[rows_N].astype(np.uint8), "count": count_K}
            writer.add(**{f"{part}_{kind}": array for kind, array in kept.items()})
        writer.add(client_ids=arrays["client_ids"])

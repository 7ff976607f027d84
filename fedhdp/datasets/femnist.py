"""Digits and letters by writer: TFF's federated EMNIST, LEAF's FEMNIST, and 330 writers of the latter.

All are stored in one form: the train images of one client after another, then the test images, with high values for
ink as in MNIST. With ``classes=10`` only digits are used. TFF has a split for that, with 3,383 clients: the
paper's "FMNIST". Elsewhere letters, and clients without digits, are left out. The seed shuffles the clients.

Axis letters: K clients, N examples.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, get_args

import numpy as np

from fedhdp.data import Examples, FederatedData, examples
from fedhdp.datasets.cache import ArrayWriter, load_arrays
from fedhdp.datasets.splits import shuffle_clients
from fedhdp.errors import DataError, require

FemnistOrigin = Literal["tff", "leaf", "330"]
DATASET_OF = {"tff": "emnist-tff", "leaf": "femnist-leaf", "330": "femnist-330"}
SIDE, CLASSES = 28, 62
PIXELS = SIDE * SIDE


def load_femnist(
    origin: FemnistOrigin = "tff",
    classes: Literal[10, 62] = 62,
    clients: int | None = None,
    seed: int = 0,
    directory: Path | None = None,
) -> FederatedData:
    """Digits and letters by writer, from the data directory.

    Args:
        origin: Who split the images by writer.
        classes: 62, or 10 for digits only.
        clients: The number of clients, drawn at random; by default all.
        seed: Determines the clients and their order.
        directory: The data directory; by default the user's.

    Returns:
        One client for each writer. The server tests on the clients' test examples.

    Raises:
        InvalidValueError: If an argument is out of range.
        DataError: If the dataset is not in the data directory.
    """
    require(origin in get_args(FemnistOrigin), "origin", origin, f"one of {', '.join(get_args(FemnistOrigin))}")
    check_classes(classes)
    arrays = load_arrays(DATASET_OF[origin], directory)
    prefix = ("digits_" if classes == 10 else "all_") if origin == "tff" else ""
    train, test = (
        examples(*(arrays[f"{prefix}{part}_{field}"] for field in ("x", "y", "count"))) for part in ("train", "test")
    )
    if classes == 10 and origin != "tff":
        train, test = _only_digits(train), _only_digits(test)
        has_digits_K = train.count_K > 0
        train, test = (
            part._replace(start_K=part.start_K[has_digits_K], count_K=part.count_K[has_digits_K])
            for part in (train, test)
        )
    rng = np.random.default_rng([seed, 0])  # stream 0 is the data's
    return shuffle_clients(f"{DATASET_OF[origin]}-{classes}", train, test, classes, clients, rng)


def tff_client_sizes(classes: Literal[10, 62] = 62, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """The number of examples of each client of TFF's federated EMNIST, for other data of the same scale.

    Train and test counts are TFF's. The digits among them were counted in NIST's data for the same writers, which is
    near TFF's digits-only split, not equal: 381,761 in total instead of 382,705.

    Args:
        classes: 62 for all 3,400 clients, or 10 for the 3,383 clients with digits.
        seed: Shuffles the clients.

    Returns:
        The train and the test count of each client.

    Raises:
        InvalidValueError: If ``classes`` is neither.
    """
    check_classes(classes)
    path = Path(__file__).with_name("tff_sizes.csv")  # a line for each client, by size
    train_K, test_K, digits_K = np.loadtxt(path, int, delimiter=",", skiprows=1, unpack=True)
    if classes == 10:
        digits_K = digits_K[digits_K > 0]
        test_K = digits_K // 10 + 1  # as in TFF for most clients
        train_K = digits_K - test_K
    order_K = np.random.default_rng([seed, 0]).permutation(len(train_K))
    return train_K[order_K], test_K[order_K]


def check_classes(classes: int) -> None:
    """Raise `InvalidValueError` unless there are 10 classes (digits) or 62 (digits and letters)."""
    require(classes in (10, CLASSES), "classes", classes, f"10 or {CLASSES}")


def _only_digits(part: Examples) -> Examples:
    """The digits of the same clients."""
    is_digit_N = part.y_N < 10
    client_N = np.repeat(np.arange(len(part.count_K)), part.count_K)
    count_K = np.bincount(client_N[is_digit_N], minlength=len(part.count_K))
    return examples(part.x_N[is_digit_N], part.y_N[is_digit_N], count_K)


def create_part(writer: ArrayWriter, part: str, count_K: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Write the counts of the train or test examples; the returned images and labels are to be filled."""
    writer.write(**{f"{part}_count": count_K.astype(np.int32)})
    rows = int(count_K.sum())
    return writer.create(f"{part}_x", (rows, SIDE, SIDE), np.uint8), writer.create(f"{part}_y", (rows,), np.uint8)


def to_ink_bytes(paper_N: np.ndarray) -> np.ndarray:
    """Images as bytes where ink is 255, from numbers from 0 to 1 where paper is 1.

    Raises:
        DataError: If a pixel is out of this range or not a number.
    """
    lowest, highest = paper_N.min(initial=0.0), paper_N.max(initial=0.0)
    if not (lowest >= 0 and highest <= 1):  # NaN fails it
        raise DataError(f"pixels must be between 0 and 1, got {lowest:g} to {highest:g}", "pixels", (lowest, highest))
    return np.rint(255 * (1 - paper_N)).astype(np.uint8).reshape(-1, SIDE, SIDE)

"""Datasets in NumPy's npz files: MNIST's writers, and 330 writers of FEMNIST.

Axis letters: K clients, N images.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedhdp.archives import array_names, read_npz
from fedhdp.datasets.cache import write_dataset
from fedhdp.datasets.femnist import CLASSES, SIDE, create_part
from fedhdp.datasets.importers import refuse_damaged
from fedhdp.datasets.splits import group_by_client
from fedhdp.errors import DataError

ARRAYS_OF = {
    "mnist-writers": {"train", "test"},
    "femnist-330": {"images", "labels", "client", "is_test", "client_ids"},
}


def npz_dataset(path: Path) -> str | None:
    """The dataset that has these arrays; None if there is none."""
    names = _array_names(path)
    return next((dataset for dataset, expected in ARRAYS_OF.items() if names == expected), None)


def describe_mismatch(path: Path) -> str:
    """How the arrays of an npz differ from those of the datasets that share some of them."""
    names = _array_names(path) if path.suffix == ".npz" else set()
    similar = [(dataset, expected) for dataset, expected in ARRAYS_OF.items() if names & expected]
    return "".join(f" (its arrays are {sorted(names)}, {name} has {sorted(arrays)})" for name, arrays in similar)


def import_npz(dataset: str, path: Path, sha256: str) -> None:
    """Store a dataset of `ARRAYS_OF` from its npz; arrays that do not fit each other are refused."""
    with refuse_damaged(path, OSError, ValueError):
        arrays = read_npz(path)
    if dataset == "mnist-writers":
        _check_writers(path, arrays)
    else:
        _check_femnist(path, arrays)
    with write_dataset(dataset, {path.name: sha256}) as writer:
        if dataset == "mnist-writers":
            writer.write(**arrays)
            return
        for part, mask_N in (("train", ~arrays["is_test"]), ("test", arrays["is_test"])):
            image_N, label_N, client_N = (arrays[name][mask_N] for name in ("images", "labels", "client"))
            grouped = group_by_client(image_N, label_N, client_N, len(arrays["client_ids"]))
            x_N, y_N = create_part(writer, part, grouped.count_K)
            x_N[:], y_N[:] = 255 - grouped.x_N, grouped.y_N
        writer.write(client_ids=arrays["client_ids"])


def _array_names(path: Path) -> set[str]:
    with refuse_damaged(path, OSError, ValueError):
        return set(array_names(path))


def _check_writers(path: Path, arrays: dict[str, np.ndarray]) -> None:
    for part, images in (("train", 60_000), ("test", 10_000)):
        if arrays[part].shape != (images,) or arrays[part].dtype.kind not in "iu":
            raise _invalid(path, part, f"one integer for each of {images} images", arrays[part])


def _check_femnist(path: Path, arrays: dict[str, np.ndarray]) -> None:
    image_N, label_N, client_N, is_test_N = (arrays[name] for name in ("images", "labels", "client", "is_test"))
    if image_N.ndim != 3 or image_N.shape[1:] != (SIDE, SIDE) or image_N.dtype != np.uint8:
        raise _invalid(path, "images", f"uint8 (N, {SIDE}, {SIDE})", image_N)
    for name in ("labels", "client", "is_test"):
        if arrays[name].shape != image_N.shape[:1]:
            raise _invalid(path, name, f"of length {len(image_N)}, as images are", arrays[name])
    if arrays["client_ids"].ndim != 1:
        raise _invalid(path, "client_ids", "one-dimensional", arrays["client_ids"])
    if is_test_N.dtype != bool:
        raise _invalid(path, "is_test", "bool", is_test_N)
    if label_N.dtype.kind not in "iu" or not 0 <= label_N.min(initial=0) <= label_N.max(initial=0) < CLASSES:
        raise _invalid(path, "labels", f"integers from 0 to {CLASSES - 1}", label_N)
    if client_N.dtype.kind not in "iu":
        raise _invalid(path, "client", "integers", client_N)
    present_K, clients = np.unique(client_N), len(arrays["client_ids"])
    if not np.array_equal(present_K, np.arange(clients)):
        numbers = f"client_ids has {clients} clients, images have {len(present_K)}"
        raise DataError(f"{path}: {numbers}", "client_ids", clients)
    if is_test_N.all() or not is_test_N.any():
        part = "test" if is_test_N.all() else "train"
        raise DataError(f"{path}: is_test must be true for some images and false for some, all are {part}", "is_test")


def _invalid(path: Path, name: str, rule: str, array: np.ndarray) -> DataError:
    value = f"{array.dtype} {array.shape}"
    return DataError(f"{path}: {name} must be {rule}, got {value}", name, value)

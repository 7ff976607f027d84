"""Labels as targets: classes by their position among the names, numbers as they are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from fedhdp.data.values import as_array, refuse_missing
from fedhdp.errors import DataError, require


def class_targets(
    labels: Sequence[Any], classes: int | Sequence[str] | None
) -> tuple[list[np.ndarray], int, tuple[str, ...] | None]:
    """Labels of several parts as targets: text by its position among the classes' names, numbers as they are.

    Args:
        labels: For each part, the label of each example.
        classes: The number of classes, or their names in order; None to take them from the labels.

    Returns:
        The targets of each part, the number of classes (or of outputs), and the classes' names if they are known.

    Raises:
        DataError: If a label is missing, not finite, negative or of no class.
    """
    parts = [as_array(label, "y") for label in labels]
    names = None if classes is None or isinstance(classes, int) else tuple(map(str, classes))
    size = classes if isinstance(classes, int) else None if names is None else len(set(names))
    is_valid = size is None or (size >= 1 and size == (len(names) if names else size))
    require(is_valid, "classes", classes, "a number of at least 1, or names that differ")
    if any(part.dtype.kind in "OUS" for part in parts):
        return _text_targets(parts, names, size)
    for part in parts:
        _check_numbers(part)
        alike = (part.dtype.kind == "f") == (parts[0].dtype.kind == "f")
        require(alike, "y", str(part.dtype), f"{parts[0].dtype} in all parts", DataError)
    if parts[0].dtype.kind == "f":
        return parts, size or math.prod(parts[0].shape[1:]), names
    largest = max(int(part.max(initial=0)) for part in parts)
    size = largest + 1 if size is None else size
    require(largest < size, "y", largest, f"from 0 to {size - 1}, the classes", DataError)
    return [part.astype(np.int32) for part in parts], size, names


def _text_targets(
    parts: Sequence[np.ndarray], names: tuple[str, ...] | None, size: int | None
) -> tuple[list[np.ndarray], int, tuple[str, ...]]:
    for part in parts:
        refuse_missing(part, "y")
    texts = [part.astype(str) for part in parts]
    names = names or tuple(np.unique(np.concatenate(texts)).tolist())
    size = len(names) if size is None else size
    require(len(names) <= size, "classes", size, f"at least {len(names)}, the number of labels", DataError)
    return [_positions(text_N, names) for text_N in texts], size, names


def _positions(text_N: np.ndarray, names: Sequence[str]) -> np.ndarray:
    number_of = {name: number for number, name in enumerate(names)}
    for row, text in enumerate(text_N.tolist()):
        if text not in number_of:
            raise DataError(f"y must be one of {', '.join(names)}, got {text!r} in row {row + 1}", "y", text)
    return np.array([number_of[text] for text in text_N.tolist()], np.int32)


def _check_numbers(y_N: np.ndarray) -> None:
    require(y_N.dtype.kind in "biuf", "y", str(y_N.dtype), "numbers or text", DataError)
    valid_N = np.isfinite(y_N) if y_N.dtype.kind == "f" else y_N >= 0
    for row in np.flatnonzero(~valid_N.reshape(len(y_N), -1).all(axis=1)):
        rule = "finite" if y_N.dtype.kind == "f" else "at least 0"
        raise DataError(f"y must be {rule}, got {y_N[row]} in row {row + 1}", "y", y_N[row].tolist())

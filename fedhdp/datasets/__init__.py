"""Datasets as `FederatedData`: ``load_*`` reads the data directory or a file, ``make_*`` generates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fedhdp.datasets.cache import data_directory, is_available, load_arrays
from fedhdp.datasets.femnist import FemnistOrigin, load_femnist, tff_client_sizes
from fedhdp.datasets.mnist import load_mnist
from fedhdp.datasets.regression import make_linear_regression, make_point_estimation
from fedhdp.datasets.splits import Split
from fedhdp.datasets.tables import load_npz, load_table

if TYPE_CHECKING:
    from fedhdp.datasets.handwriting import handwriting_sheet, make_handwriting

__all__ = [
    "FemnistOrigin",
    "Split",
    "data_directory",
    "handwriting_sheet",
    "is_available",
    "load_arrays",
    "load_femnist",
    "load_mnist",
    "load_npz",
    "load_table",
    "make_handwriting",
    "make_linear_regression",
    "make_point_estimation",
    "tff_client_sizes",
]


def __getattr__(name: str) -> Any:
    """The generated handwriting, which needs JAX, when it is first used."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from fedhdp.datasets import handwriting

    return getattr(handwriting, name)

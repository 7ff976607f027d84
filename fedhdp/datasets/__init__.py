"""Datasets as `FederatedData`: ``load_*`` reads the data directory or a file, ``make_*`` generates."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedhdp.datasets.cache import data_directory as data_directory
    from fedhdp.datasets.cache import is_available as is_available
    from fedhdp.datasets.cache import load_arrays as load_arrays
    from fedhdp.datasets.femnist import FemnistOrigin as FemnistOrigin
    from fedhdp.datasets.femnist import load_femnist as load_femnist
    from fedhdp.datasets.femnist import tff_client_sizes as tff_client_sizes
    from fedhdp.datasets.handwriting import handwriting_sheet as handwriting_sheet
    from fedhdp.datasets.handwriting import make_handwriting as make_handwriting
    from fedhdp.datasets.mnist import load_mnist as load_mnist
    from fedhdp.datasets.regression import make_linear_regression as make_linear_regression
    from fedhdp.datasets.regression import make_point_estimation as make_point_estimation
    from fedhdp.datasets.splits import Split as Split
    from fedhdp.datasets.tables import load_npz as load_npz
    from fedhdp.datasets.tables import load_table as load_table

# A name is imported when it is first used: only the generated handwriting needs JAX.
_MODULES = {
    "cache": ("data_directory", "is_available", "load_arrays"),
    "femnist": ("FemnistOrigin", "load_femnist", "tff_client_sizes"),
    "handwriting": ("handwriting_sheet", "make_handwriting"),
    "mnist": ("load_mnist",),
    "regression": ("make_linear_regression", "make_point_estimation"),
    "splits": ("Split",),
    "tables": ("load_npz", "load_table"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}
__all__ = [*_MODULE_OF]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)

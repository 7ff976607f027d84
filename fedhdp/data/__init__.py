"""Federated data: the examples of every client, and how arrays, tables and datasets become them."""

from fedhdp.data.federated import FederatedData, check_values, hold_out
from fedhdp.data.levels import LevelSize, level_counts
from fedhdp.data.sources import Examples, ExampleSource, examples, from_lists

__all__ = [
    "ExampleSource",
    "Examples",
    "FederatedData",
    "LevelSize",
    "check_values",
    "examples",
    "from_lists",
    "hold_out",
    "level_counts",
]

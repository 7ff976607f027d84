"""Data that an experiment reads from a user's files: a table or an npz."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import msgspec

from fedhdp.data import FederatedData
from fedhdp.errors import require
from fedhdp.experiments.files import PinnedFiles
from fedhdp.experiments.groups import opted_out
from fedhdp.privacy.calibration import MechanismConfig


class DataFiles(PinnedFiles, frozen=True, kw_only=True):
    """Files with examples."""

    path_fields: ClassVar[tuple[str, ...]] = ("path", "test", "server")
    table: ClassVar[str] = "data."

    path: str  # relative to the experiment's file
    test: float | str = 0.2
    server: float | str = 0.0
    classes: int | list[str] | None = None
    validation: float = 0.0

    def __post_init__(self) -> None:
        for field, share in (("test", self.test), ("server", self.server)):
            require(isinstance(share, str) or 0 <= share < 1, field, share, "at least 0 and below 1, or a path")


class TableData(DataFiles, frozen=True, tag_field="name", tag="table"):
    """A CSV or Parquet file with one row for each example."""

    client: str
    label: str
    level: str | None = None
    features: list[str] | None = None
    categories: dict[str, list[str | int | bool]] = msgspec.field(default_factory=dict)
    fill: dict[str, float | str] = msgspec.field(default_factory=dict)
    standardize: Literal["none", "public", "server"] | dict[str, tuple[float, float]] = "none"

    def load(self, mechanism: MechanismConfig, seed: int) -> FederatedData:
        """Read the table; the levels of groups that opted out are public.

        Raises:
            DataError: If a file, a column or a cell cannot be used.
            ConfigError: If a file has changed.
        """
        from fedhdp.datasets.tables import load_table

        self.checksum()
        return load_table(
            self.path,
            self.client,
            self.label,
            self.level,
            self.test,
            self.server,
            features=self.features,
            categories=self.categories,
            fill=self.fill,
            standardize=self.standardize,
            public=opted_out(mechanism),
            classes=self.classes,
            seed=seed,
        )


class ArraysData(DataFiles, frozen=True, tag_field="name", tag="arrays"):
    """An npz with the arrays x, y and client."""

    test: float = 0.2
    server: float = 0.0
    input_scale: float | None = None

    def load(self, mechanism: MechanismConfig, seed: int) -> FederatedData:
        """Read the arrays.

        Raises:
            DataError: If the file or an array cannot be used.
            ConfigError: If the file has changed.
        """
        from fedhdp.datasets.tables import load_npz

        self.checksum()
        shares: dict[str, Any] = {"test": self.test, "server": self.server}
        return load_npz(self.path, **shares, classes=self.classes, input_scale=self.input_scale, seed=seed)

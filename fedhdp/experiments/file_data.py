"""Data that an experiment reads from a user's files: a table or an npz.

A run records one sha256 of the files, one after the other; it is neither resumed nor repeated with files that changed.
"""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import Any, Literal

import msgspec

from fedhdp.data import FederatedData, hold_out
from fedhdp.errors import ConfigError, require
from fedhdp.privacy.calibration import MechanismConfig


def opted_out(mechanism: MechanismConfig) -> list[str]:
    """The groups whose clients asked for no privacy."""
    return [group.name for group in mechanism.groups if group.epsilon == math.inf or group.noise_multiplier == 0]


class DataFiles(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Files with examples, and the checksum that they had when they were run."""

    path: str  # relative to the experiment's file
    test: float | str = 0.2
    server: float | str = 0.0
    classes: int | list[str] | None = None
    sha256: str | None = None  # None: any
    validation: float = 0.0

    def __post_init__(self) -> None:
        for field, share in (("test", self.test), ("server", self.server)):
            require(isinstance(share, str) or 0 <= share < 1, field, share, "at least 0 and below 1, or a path")

    @property
    def files(self) -> dict[str, str]:
        """The fields that are paths."""
        values = {field: getattr(self, field) for field in ("path", "test", "server")}
        return {field: value for field, value in values.items() if isinstance(value, str)}

    def resolve(self, directory: Path) -> DataFiles:
        """The same data with paths that are relative to this directory made absolute."""
        return msgspec.structs.replace(self, **{field: str(directory / file) for field, file in self.files.items()})

    def pin(self) -> DataFiles:
        """The same data with absolute paths and the files' checksum.

        Raises:
            ConfigError: If a file has changed or cannot be read.
        """
        return msgspec.structs.replace(self.resolve(Path.cwd()), sha256=self._checksum())

    def _checksum(self) -> str:
        digest = hashlib.sha256()
        for field, file in self.files.items():
            try:
                with open(file, "rb") as opened:
                    while block := opened.read(2**20):
                        digest.update(block)
            except OSError as error:
                raise ConfigError(f"{file} cannot be read: {error.strerror}", f"data.{field}", file) from error
        if self.sha256 not in (None, digest.hexdigest()):
            message = (
                f"{', '.join(self.files.values())} has changed: its sha256 is {digest.hexdigest()}, not {self.sha256}"
            )
            raise ConfigError(message, "data.sha256", digest.hexdigest())
        return digest.hexdigest()


class TableData(DataFiles, frozen=True, tag_field="name", tag="table"):
    """A CSV or Parquet file with one row for each example."""

    client: str
    label: str
    level: str | None = None
    features: list[str] | None = None
    categories: dict[str, list[str | int | bool]] = {}
    fill: dict[str, float | str] = {}
    standardize: Literal["none", "public", "server"] | dict[str, tuple[float, float]] = "none"

    def load(self, mechanism: MechanismConfig, seed: int) -> FederatedData:
        """Read the table; the levels of groups that opted out are public.

        Raises:
            DataError: If a file, a column or a cell cannot be used.
            ConfigError: If a file has changed.
        """
        from fedhdp.datasets.tables import load_table

        self._checksum()
        data = load_table(
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
        return hold_out(data, self.validation, seed)


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

        self._checksum()
        shares: dict[str, Any] = {"test": self.test, "server": self.server}
        data = load_npz(self.path, **shares, classes=self.classes, input_scale=self.input_scale, seed=seed)
        return hold_out(data, self.validation, seed)

"""Files and runs that an experiment names, by paths relative to its own file.

A run records their sha256; it is neither resumed nor repeated with files that have changed.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import ClassVar, Self

import msgspec
from msgspec.structs import replace

from fedhdp.errors import ConfigError, RunError
from fedhdp.results.models import find_variant
from fedhdp.results.schema import VariantResult
from fedhdp.results.store import MODEL_FILE, VariantDirectory


class PinnedFiles(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Files, and the checksum of all of them, one after the other, when the experiment was run."""

    path_fields: ClassVar[tuple[str, ...]] = ("file",)
    table: ClassVar[str] = ""  # the table of the experiment's file that has these fields, for errors

    sha256: str | None = None  # None: any

    @property
    def files(self) -> dict[str, str]:
        """The fields that are paths."""
        values = {field: getattr(self, field) for field in self.path_fields}
        return {field: value for field, value in values.items() if isinstance(value, str)}

    def resolve(self, directory: Path) -> Self:
        """The same files with paths that are relative to this directory made absolute."""
        return replace(self, **{field: str(directory / file) for field, file in self.files.items()})

    def pin(self) -> Self:
        """The same files with absolute paths and their checksum.

        Raises:
            ConfigError: If a file has changed or cannot be read.
        """
        return replace(self.resolve(Path.cwd()), sha256=self.checksum())

    def checksum(self) -> str:
        """The sha256 of the files; a `ConfigError` if one cannot be read, or they have changed."""
        digest = hashlib.sha256()
        for field, file in self.files.items():
            try:
                with open(file, "rb") as opened:
                    while block := opened.read(2**20):
                        digest.update(block)
            except OSError as error:
                raise ConfigError(f"{file} cannot be read: {error.strerror}", f"{self.table}{field}", file) from error
        return check_sha256(", ".join(self.files.values()), digest.hexdigest(), self.sha256, f"{self.table}sha256")


def check_sha256(files: str, actual: str, expected: str | None, field: str) -> str:
    """The checksum of files; a `ConfigError` unless it is the expected one."""
    if expected not in (None, actual):
        raise ConfigError(f"{files} has changed: its sha256 is {actual}, and was {expected}", field, actual)
    return actual


class StartFrom(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A run whose global model another run begins with.

    Args:
        run: Its directory, relative to the experiment's file.
        variant: The variant's name. None: the only one.
        sha256: The checksum of its ``model.npz`` when it was run. None: any.
    """

    run: str
    variant: str | None = None
    sha256: str | None = None

    def resolve(self, directory: Path) -> StartFrom:
        """The same run with an absolute path."""
        return replace(self, run=str(directory / self.run))

    def pin(self) -> StartFrom:
        """The same run with an absolute path, the variant's name and the model's checksum.

        Raises:
            ConfigError: If there is no such run or variant, or the model has changed.
        """
        start = self.resolve(Path.cwd())
        try:
            path = find_variant(start.run, start.variant)
        except RunError as error:
            raise ConfigError(f"start_from: {error}", "start_from", self.run) from error
        digest = hashlib.sha256((path / MODEL_FILE).read_bytes()).hexdigest()
        check_sha256(str(path / MODEL_FILE), digest, self.sha256, "start_from.sha256")
        return replace(start, variant=read_result(path).name, sha256=digest)


def as_start(value: str | StartFrom | None) -> StartFrom | None:
    """A run's directory as a value with its fields."""
    return StartFrom(value) if isinstance(value, str) else value


def read_result(path: Path) -> VariantResult:
    """The result in a directory that `find_variant` returned."""
    result = VariantDirectory(path).result()
    assert result is not None
    return result

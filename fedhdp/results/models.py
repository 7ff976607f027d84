"""Models of stored runs: a variant's global model, and the personal models of its clients.

Personal models are the clients' own. They carry no noise: who has one can find out what the client trained it on.
"""

from __future__ import annotations

import csv
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from fedhdp.errors import RunError, require
from fedhdp.results.store import (
    CLIENTS_FILE,
    MODEL_FILE,
    PERSONAL_CHECKSUMS_FILE,
    PERSONAL_FILE,
    RUNS_FILE,
    DamagedRunError,
    VariantDirectory,
    check_files,
    read_arrays,
    slug,
)

Arrays = dict[str, np.ndarray]


def find_variant(directory: Path | str, variant: str | None = None) -> Path:
    """The directory of a variant of a run.

    Args:
        directory: The run's directory.
        variant: The variant's name. None: the only one.

    Raises:
        RunError: If there is no finished run, no such variant, or several and none is named.
        DamagedRunError: If a file of the run is not as it was written.
    """
    directory = Path(directory)
    check_files(directory)
    if (directory / RUNS_FILE).exists():
        raise RunError(f"{directory} has several runs: name the directory of one", "directory", str(directory))
    paths = sorted(path.parent for path in directory.glob(f"*/{MODEL_FILE}"))
    names = {slug(result.name): result.name for path in paths if (result := VariantDirectory(path).result())}
    if not names:
        raise RunError(f"{directory} has no finished run", "directory", str(directory))
    shown = ", ".join(names.values())
    if variant is None and len(names) > 1:
        raise RunError(f"{directory} has several variants: name one of {shown}", "variant", None)
    exists = variant is None or slug(variant) in names
    require(exists, "variant", variant, f"one of {directory} ({shown})", RunError)
    return directory / (next(iter(names)) if variant is None else slug(variant))


def load_model(directory: Path | str, variant: str | None = None, model: str = "global") -> Arrays:
    """The final model of a run, as arrays named by their path in the model's parameters.

    Args:
        directory: The run's directory.
        variant: The variant's name. None: the only one.
        model: ``global`` or, where the server averages, ``average``.

    Raises:
        RunError: If there is no such model.
    """
    arrays = read_arrays(find_variant(directory, variant) / MODEL_FILE)
    named = {name.partition("/")[2]: array for name, array in arrays.items() if name.startswith(f"{model}/")}
    kinds = ", ".join(dict.fromkeys(name.partition("/")[0] for name in arrays))
    require(len(named) > 0, "model", model, f"one that was kept ({kinds})", RunError)
    return named


class PersonalModels(Mapping[str, Arrays]):
    """The personal models of a run that kept them, by client id: read from the file when they are asked for.

    Args:
        directory: The run's directory.
        variant: The variant's name. None: the only one.

    Raises:
        RunError: If there is no such variant, or it has kept no personal models.
        DamagedRunError: If a file is damaged.
    """

    def __init__(self, directory: Path | str, variant: str | None = None):
        path = find_variant(directory, variant)
        if not (path / PERSONAL_FILE).exists():
            message = f"{path} has no personal models: set keep_personal = true before the run is started"
            raise RunError(message, "keep_personal", False)
        shapes = load_model(path.parent, VariantDirectory(path).result().name)  # type: ignore[union-attr]
        try:
            with open(path.parent / CLIENTS_FILE, encoding="utf-8", newline="") as file:
                ids = [row["client"] for row in csv.DictReader(file)]
            self.rows = np.load(path / PERSONAL_FILE, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, KeyError) as error:
            raise DamagedRunError(f"{path / PERSONAL_FILE} is damaged: {error}") from error
        self._shapes = {name: (array.shape, array.dtype) for name, array in shapes.items()}
        self._path, declared = path / PERSONAL_FILE, (self.rows.shape, self.rows.dtype)
        if declared != ((len(ids), sum(array.size for array in shapes.values())), np.dtype(np.float32)):
            raise DamagedRunError(f"{self._path} is damaged: it has {declared[1]} of the shape {declared[0]}")
        self._row_of = {client: row for row, client in enumerate(ids)}
        checksums = path / PERSONAL_CHECKSUMS_FILE  # runs of older versions have none
        self._crc_K = read_arrays(checksums, ["crc32"])["crc32"] if checksums.exists() else None

    def __getitem__(self, client: str) -> Arrays:
        row, arrays, first = self._row_of[str(client)], dict[str, np.ndarray](), 0
        row_P = self.rows[row]
        if self._crc_K is not None and zlib.crc32(row_P.tobytes()) != self._crc_K[row]:
            raise DamagedRunError(f"{self._path} is damaged: the model of client {client} is not as it was written")
        for name, (shape, dtype) in self._shapes.items():
            size = int(np.prod(shape))
            arrays[name] = row_P[first : first + size].reshape(shape).astype(dtype)
            first += size
        return arrays

    def __iter__(self) -> Iterator[str]:
        return iter(self._row_of)

    def __len__(self) -> int:
        return len(self._row_of)


def load_personal(directory: Path | str, client_id: str | int, variant: str | None = None) -> Arrays:
    """A client's personal model, as arrays named by their path in the model's parameters.

    Args:
        directory: The directory of a run with ``keep_personal``.
        client_id: The client's id.
        variant: The variant's name. None: the only one.

    Raises:
        RunError: If there is no such client, variant or file.
    """
    models = PersonalModels(directory, variant)
    require(str(client_id) in models, "client_id", client_id, f"one of the run's {len(models):,}", RunError)
    return models[str(client_id)]

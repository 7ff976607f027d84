"""The public basis that an experiment's model names, its matrix in the run's directory, and whose data it took.

The matrix is made once and stored as ``basis.npy``; a resumed run reads it. The table of results names its checksum.
"""

from __future__ import annotations

import io
import math
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import msgspec
import numpy as np

from fedhdp.archives import read_npy
from fedhdp.basis import Moments, cosine_basis, fingerprint, pca_basis, public_moments, random_basis, with_basis
from fedhdp.errors import ConfigError, errors_of, require
from fedhdp.experiments.files import PinnedFiles
from fedhdp.experiments.groups import opted_out
from fedhdp.metrics import replace_metrics
from fedhdp.results.store import BASIS_FILE, DamagedRunError, atomic_write

if TYPE_CHECKING:
    from fedhdp.data import FederatedData
    from fedhdp.experiments.config import Experiment
    from fedhdp.models import Model


class _Basis(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="name"):
    size: int = 64
    scale: float = 1.0  # the root mean square of the columns' lengths

    def __post_init__(self) -> None:
        require(self.size >= 1, "size", self.size, "at least 1")
        require(0 < self.scale < math.inf, "scale", self.scale, "finite and above 0")

    @property
    def columns(self) -> int:
        """The number of columns, which are the model's inputs."""
        return self.size

    def about(self) -> str:
        """The basis in words, for tables."""
        return f"{self.size} columns"


class CosineBasis(_Basis, frozen=True, tag="cosine"):
    """The lowest frequencies of the cosine transform over the axes of an input."""

    exponent: float = 0.25
    shape: tuple[int, ...] | None = None  # of an input that the data has flat; None: the data's

    def make(self, data: FederatedData, opted_out: Collection[str]) -> np.ndarray:
        """The matrix."""
        shape, inputs = self.shape or data.input_shape, math.prod(data.input_shape)
        require(math.prod(shape) == inputs, "shape", shape, f"of {inputs} inputs, as the data has")
        return cosine_basis(shape, self.size, self.exponent) * np.float32(self.scale)

    def about(self) -> str:
        """The basis in words, for tables."""
        return f"{self.size} cosines, exponent {self.exponent:g}, scale {self.scale:g}"


class RandomBasis(_Basis, frozen=True, tag="random"):
    """Random orthonormal columns."""

    seed: int = 0

    def make(self, data: FederatedData, opted_out: Collection[str]) -> np.ndarray:
        """The matrix."""
        return random_basis(int(np.prod(data.input_shape)), self.size, self.seed) * np.float32(self.scale)

    def about(self) -> str:
        """The basis in words, for tables."""
        return f"{self.size} random columns, seed {self.seed}, scale {self.scale:g}"


class PcaBasis(_Basis, frozen=True, tag="pca"):
    """The principal directions of the training inputs of the clients who opted out."""

    size: int = 30
    exponent: float = 0.25

    def make(self, data: FederatedData, opted_out: Collection[str]) -> np.ndarray:
        """The matrix; no other client's examples are read."""
        return self.of_moments(public_moments(data, opted_out))

    def of_moments(self, moments: Moments) -> np.ndarray:
        """The matrix of the second moments of clients who opted out."""
        return pca_basis(moments, self.size, self.exponent) * np.float32(self.scale)

    def about(self) -> str:
        """The basis in words, for tables."""
        columns = f"{self.size} principal directions of the clients who opted out"
        return f"{columns}, exponent {self.exponent:g}, scale {self.scale:g}"


class MatrixBasis(PinnedFiles, frozen=True, tag_field="name", tag="matrix"):
    """A matrix of the user's, which must be public: an npy file of shape [inputs, columns]."""

    table: ClassVar[str] = "model.basis."

    file: str  # relative to the experiment's file

    @property
    def columns(self) -> int:
        """The number of columns, which are the model's inputs."""
        return int(self._read().shape[1])

    def make(self, data: FederatedData, opted_out: Collection[str]) -> np.ndarray:
        """The matrix."""
        matrix, inputs = self._read(), math.prod(data.input_shape)
        require(len(matrix) == inputs, "file", matrix.shape, f"a matrix with a row for each of {inputs} inputs")
        return matrix.astype(np.float32)

    def about(self) -> str:
        """The basis in words, for tables."""
        return f"the matrix {Path(self.file).name}"

    def _read(self) -> np.ndarray:
        self.checksum()
        try:
            matrix = read_npy(Path(self.file))
        except ValueError as error:
            message = f"model.basis.file must be an npy file, got {self.file}"
            raise ConfigError(message, "model.basis.file", self.file) from error
        is_matrix = matrix.ndim == 2 and matrix.dtype.kind in "fiu" and matrix.size > 0
        require(is_matrix, "model.basis.file", self.file, "a matrix of numbers", ConfigError)
        return matrix


BasisConfig = CosineBasis | PcaBasis | RandomBasis | MatrixBasis


def _read_stored(path: Path) -> np.ndarray:
    try:
        return read_npy(path)
    except (OSError, ValueError) as error:
        raise DamagedRunError(f"{path} is damaged: {error}") from error


def load_basis(config: BasisConfig, directory: Path, data: FederatedData, opted_out: Collection[str]) -> np.ndarray:
    """The matrix of a run: from its directory if it is there, else made and stored there.

    Raises:
        ConfigError: If the basis cannot be made of these data.
        FedHDPError: If a file cannot be used, or nobody opted out.
    """
    path = directory / BASIS_FILE
    if path.exists():
        return _read_stored(path)
    with errors_of("model.basis", ConfigError):
        basis = config.make(data, opted_out)
    content = io.BytesIO()
    np.save(content, basis)
    atomic_write(path, content.getvalue())
    return basis


def is_same_basis(first: BasisConfig | None, second: BasisConfig | None) -> bool:
    """Whether two pinned configurations are of the same basis; files are compared by their content."""
    if isinstance(first, MatrixBasis) and isinstance(second, MatrixBasis):
        return first.sha256 == second.sha256
    return first == second


def describe_basis(config: BasisConfig, basis: np.ndarray) -> str:
    """The basis in words, with its checksum."""
    return f"public basis of {config.about()} (sha256 {fingerprint(basis)[:12]})"


def takes_statistics(config: BasisConfig | None) -> bool:
    """Whether the basis is made from the examples of the clients who opted out, so that nothing protects them."""
    return isinstance(config, PcaBasis)


def build_model(experiment: Experiment, data: FederatedData, directory: Path) -> tuple[Model, FederatedData]:
    """The model of a run, on its public basis if it has one, and the data, which then name the basis.

    Args:
        experiment: The experiment.
        data: The clients' data, with levels.
        directory: The run's directory, which has the basis's matrix, or gets it.

    Raises:
        FedHDPError: If the basis or the model cannot be made.
    """
    basis_config = getattr(experiment.model, "basis", None)
    if basis_config is None:
        model = experiment.model.build(int(np.prod(data.input_shape)), data.classes)
    else:
        public = opted_out(experiment.mechanism)
        basis = load_basis(basis_config, directory, data, public)
        model = with_basis(experiment.model.build(basis.shape[1], data.classes), basis)
        about = "; ".join(filter(None, [data.preparation, describe_basis(basis_config, basis)]))
        levels = public if takes_statistics(basis_config) else []
        data = data._replace(preparation=about, public_levels=tuple(sorted({*data.public_levels, *levels})))
    return model._replace(metrics=replace_metrics(model.metrics, experiment.metrics)), data

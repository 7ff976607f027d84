"""The data and the model that an experiment names: built-in ones, and those of a user's Python file.

The file has one or both of two functions: ``data(seed)`` returns a ``FederatedData``, ``model()`` a ``Model``.
"""

from __future__ import annotations

import hashlib
import importlib.util
import math
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, get_args

import msgspec

from fedhdp.data import FederatedData
from fedhdp.datasets import Split
from fedhdp.devices import use_cpu_cores
from fedhdp.errors import ConfigError, DataError, ModelError, require
from fedhdp.experiments.bases import BasisConfig
from fedhdp.experiments.file_data import ArraysData, TableData
from fedhdp.experiments.files import PinnedFiles, check_sha256
from fedhdp.experiments.groups import opted_out, skewed_clients, with_skewed_levels
from fedhdp.memory import TRAINED_COPIES, require_memory
from fedhdp.models import Model, cnn, linear, mlp
from fedhdp.privacy.calibration import MechanismConfig

IMAGE_INPUTS = 784  # pixels of the built-in data's images
Transform = Literal["none", "scattering"]


class PythonFile(PinnedFiles, frozen=True, kw_only=True):
    """A user's Python file."""

    file: str  # relative to the experiment's file

    def call(self, function: str, *arguments: Any) -> Any:
        """Call one of the file's functions.

        Raises:
            ConfigError: If the file has changed, has no such function or fails; the message names the line.
        """
        module = _module(self.file, self.checksum())
        if not callable(getattr(module, function, None)):
            raise ConfigError(f"{self.file} has no function {function}()", "file", self.file)
        with _errors_located(self.file):
            return getattr(module, function)(*arguments)


@lru_cache(maxsize=8)  # so that data and model of a file come from one module
def _module(file: str, sha256: str) -> ModuleType:
    name, directory = f"fedhdp_user_{Path(file).stem}", str(Path(file).absolute().parent)
    spec = importlib.util.spec_from_loader(name, None, origin=file)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    module.__file__ = file
    sys.modules[name] = module
    if directory not in sys.path:
        sys.path.append(directory)  # so that the file can import its neighbours
    with _errors_located(file):
        code = Path(file).read_bytes()
        check_sha256(
            file, hashlib.sha256(code).hexdigest(), sha256, "sha256"
        )  # it may have changed since it was checked
        exec(compile(code, file, "exec"), module.__dict__)
    return module


@contextmanager
def _errors_located(file: str) -> Iterator[None]:
    """Turn an error in a user's file into one line that names the file's line."""
    try:
        yield
    except SyntaxError as error:
        raise ConfigError(f"{error.filename}, line {error.lineno}: {error.msg}", "file", file) from error
    except Exception as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
        place = f"{file}, line {lines[-1]}" if lines else file
        raise ConfigError(f"{place}: {type(error).__name__}: {error}", "file", file) from error


def _require_images(clients: int, samples: int, test_samples: int, others: int = 0) -> None:
    """Refuse more images, of a byte for each pixel, than this machine's memory holds; the largest number is named."""
    values = {"clients": clients, "samples": samples, "test_samples": test_samples}
    field = max(values, key=values.__getitem__)
    require_memory(IMAGE_INPUTS * clients * (samples + test_samples), field, values[field])
    require_memory(IMAGE_INPUTS * others, "server_test", others)


class HandwritingConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="name", tag="handwriting"):
    """The embedded handwriting."""

    clients: int
    samples: int = 30
    test_samples: int = 10
    server_test: int = 10_000
    split: Split = "one_digit"
    classes: Literal[10, 62] = 10
    sizes: Literal["alike", "tff"] = "alike"  # tff: as many examples as the clients of TFF's federated EMNIST have
    transform: Transform = "none"  # scattering: fixed features of the images are the inputs
    validation: float = 0.0  # the share of its train examples that a client holds out, to choose its pull by

    def __post_init__(self) -> None:
        _require_images(self.clients, self.samples, self.test_samples, self.server_test)

    def load(self, mechanism: MechanismConfig, seed: int) -> FederatedData:
        """Render the data; in the skewed split, the clients of the first group hold one digit."""
        from fedhdp.datasets import make_handwriting, tff_client_sizes

        skewed = skewed_clients(mechanism, self.clients, self.split)
        numbers = (self.clients, self.samples, self.test_samples, self.server_test)
        sizes, test_sizes = None, None
        if self.sizes == "tff":
            sizes, test_sizes = (size_K[: self.clients].tolist() for size_K in tff_client_sizes(self.classes, seed))
        data = make_handwriting(*numbers, self.split, self.classes, skewed, sizes, seed, test_sizes)
        return with_skewed_levels(data, mechanism, skewed, seed)


class MnistConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="name", tag="mnist"):
    """MNIST from the data directory: one digit for each client, or the images of one writer."""

    clients: int
    samples: int = 30
    test_samples: int = 100
    split: Split = "one_digit"
    transform: Transform = "none"
    validation: float = 0.0

    def __post_init__(self) -> None:
        _require_images(self.clients, self.samples, self.test_samples)

    def load(self, mechanism: MechanismConfig, seed: int) -> FederatedData:
        """Read the data; in the skewed split, the clients of the first group hold a 7."""
        from fedhdp.datasets import load_mnist

        skewed = skewed_clients(mechanism, self.clients, self.split)
        data = load_mnist(self.split, self.clients, skewed, self.samples, self.test_samples, seed)
        return with_skewed_levels(data, mechanism, skewed, seed)


class FemnistConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="name", tag="femnist"):
    """Digits and letters by writer from the data directory; TFF's with 10 classes are the paper's FMNIST."""

    clients: int
    origin: Literal["tff", "leaf", "330"] = "tff"
    classes: Literal[10, 62] = 62
    validation: float = 0.0

    def load(self, mechanism: MechanismConfig, seed: int) -> FederatedData:
        """Read the data."""
        from fedhdp.datasets import load_femnist

        return load_femnist(self.origin, self.classes, self.clients, seed)


class PythonData(PythonFile, frozen=True, tag_field="name", tag="python"):
    """Data from a user's file."""

    clients: int | None = None  # how many the data has; None: any number
    validation: float = 0.0

    def load(self, mechanism: MechanismConfig, seed: int) -> FederatedData:
        """Call the file's ``data(seed)``.

        Raises:
            DataError: If it returns no ``FederatedData``, or not as many clients as the experiment states.
        """
        data = self.call("data", seed)
        if not isinstance(data, FederatedData):
            kind = type(data).__name__
            raise DataError(f"data() of {self.file} must return a FederatedData, got {kind}", "data", kind)
        has_clients = self.clients in (None, data.num_clients)
        require(has_clients, "data.clients", self.clients, f"{data.num_clients}, as {self.file} has", DataError)
        for level in sorted({*data.public_levels} - {*opted_out(mechanism)}):
            message = f"{self.file} takes statistics of clients with level {level!r}, who have not opted out of privacy"
            raise DataError(message, "public_levels", level)
        return data


class MlpConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="name", tag="mlp"):
    """The paper's network for MNIST."""

    hidden: int = 50
    basis: BasisConfig | None = None  # its columns are the inputs of the network

    def __post_init__(self) -> None:
        require(self.hidden >= 1, "hidden", self.hidden, "at least 1")
        require_memory(TRAINED_COPIES * 4 * self.hidden, "hidden", self.hidden)

    def require_memory(self, inputs: int) -> None:
        """Refuse a network that this machine cannot hold."""
        require_memory(TRAINED_COPIES * 4 * self.hidden * inputs, "model.hidden", self.hidden)

    def build(self, inputs: int, classes: int) -> Model:
        """Build the model."""
        self.require_memory(inputs)
        return mlp(inputs, self.hidden, classes)


class CnnConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="name", tag="cnn"):
    """The paper's network for FEMNIST."""

    kernel: int = 3

    def __post_init__(self) -> None:
        require(1 <= self.kernel <= 999, "kernel", self.kernel, "between 1 and 999")

    def build(self, inputs: int, classes: int) -> Model:
        """Build the model; a `ModelError` if the inputs are not those of square images."""
        side = math.isqrt(inputs)
        if side**2 != inputs:
            message = f"model.name must not be 'cnn' where inputs are no square images, got {inputs} numbers"
            raise ModelError(message, "model.name", "cnn")
        return cnn(side, classes, self.kernel)


class LinearConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="name", tag="linear"):
    """Multinomial logistic regression."""

    basis: BasisConfig | None = None  # its columns are the inputs of the model

    def build(self, inputs: int, classes: int) -> Model:
        """Build the model."""
        return linear(inputs, classes)


class PythonModel(PythonFile, frozen=True, tag_field="name", tag="python"):
    """A model from a user's file."""

    basis: BasisConfig | None = None  # its columns are the inputs of the file's model

    def build(self, inputs: int, classes: int) -> Model:
        """Call the file's ``model()``; a `ModelError` if it returns no ``Model``."""
        model = self.call("model")
        if not isinstance(model, Model):
            kind = type(model).__name__
            raise ModelError(f"model() of {self.file} must return a Model, got {kind}", "model", kind)
        return model


BuiltInData = HandwritingConfig | MnistConfig | FemnistConfig
DataConfig = BuiltInData | PythonData | TableData | ArraysData
ModelConfig = MlpConfig | CnnConfig | LinearConfig | PythonModel
COMPONENT_NAMES = {
    table: tuple(struct.__struct_config__.tag for struct in get_args(union))
    for table, union in (("data", DataConfig), ("model", ModelConfig))
}


def describe_data(data: DataConfig) -> str:
    """The data whose clients are numbered: in other data, the same number is another client."""
    values = msgspec.to_builtins(data)
    same_clients = ("name", "validation", "sha256", "transform")
    shown = {name: value for name, value in values.items() if name not in same_clients}
    if isinstance(data, PythonData):
        shown["file"] = Path(data.file).name
    if isinstance(data, TableData | ArraysData):
        shown = {"path": Path(data.path).name} | ({"client": data.client} if isinstance(data, TableData) else {})
    return f"{values['name']} ({', '.join(f'{name} {value}' for name, value in shown.items())})"


def known_shape(data: DataConfig, model: ModelConfig) -> tuple[int, int] | None:
    """The numbers of inputs and classes that a model is built for; None where the data must be loaded."""
    if isinstance(data, HandwritingConfig | FemnistConfig | MnistConfig):
        return IMAGE_INPUTS, int(getattr(data, "classes", 10))
    return (0, 0) if isinstance(model, PythonModel) else None  # its file knows the shapes


def count_parameters(data: DataConfig, model: ModelConfig, load: Callable[[], FederatedData]) -> int:
    """Count the parameters of a model, without initializing it; data are loaded only if their shape is not known.

    Args:
        data: The data, which has the numbers of inputs and classes.
        model: The model.
        load: Loads the data.
    """
    import jax

    use_cpu_cores()  # before anything below uses JAX
    inputs, classes = known_shape(data, model) or _shape(load())
    if getattr(data, "transform", "none") == "scattering":
        from fedhdp.experiments.scattering import DIRECTIONS

        inputs = DIRECTIONS
    if (basis := getattr(model, "basis", None)) is not None:
        inputs = basis.columns
    shapes = jax.eval_shape(lambda: model.build(inputs, classes).init(jax.random.key(0)))
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))


def _shape(data: FederatedData) -> tuple[int, int]:
    return math.prod(data.input_shape), data.classes

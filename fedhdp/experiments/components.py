"""What an experiment chooses by name: its data and its model, those that are here and those of a file of your own.

A file of your own is plain Python with two functions, or one of them: ``population(seed)`` returns a ``FederatedData``, and
``model()`` a ``Model``. A run keeps the file's sha256, and neither goes on with nor repeats what another file would give.
"""

from __future__ import annotations

import hashlib
import importlib.util
import math
import sys
import traceback
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import msgspec

from fedhdp.data import FederatedData, hold_out
from fedhdp.datasets import Split
from fedhdp.errors import require
from fedhdp.mechanism import Mechanism
from fedhdp.models import Model, cnn, linear, mlp


class PythonFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A file of your own, and what it was when it was run."""

    file: str  # a relative path is beside the experiment's file
    sha256: str | None = None  # None: whatever it is

    def beside(self, folder: Path) -> PythonFile:
        """The same with the place of the file, wherever it is read from."""
        return msgspec.structs.replace(self, file=str(folder / self.file))

    def pinned(self) -> PythonFile:
        """The same with the file as it is now."""
        return msgspec.structs.replace(self.beside(Path.cwd()), sha256=hashlib.sha256(self._read()).hexdigest())

    def call(self, function: str, *arguments: Any) -> Any:
        """What one of its functions returns; what goes wrong in it is said with its line."""
        module = _module(self.file, self._read())
        if not callable(getattr(module, function, None)):
            raise ValueError(f"{self.file} has no function {function}()")
        return _located(self.file, lambda: getattr(module, function)(*arguments))

    def _read(self) -> bytes:
        try:
            code = Path(self.file).read_bytes()
        except OSError as error:
            raise ValueError(f"{self.file} cannot be read: {error.strerror}") from error
        found = hashlib.sha256(code).hexdigest()
        if self.sha256 not in (None, found):
            raise ValueError(f"{self.file} has changed: its sha256 is {found}, and was {self.sha256}")
        return code


@lru_cache(maxsize=8)  # data and model of one file are of one module
def _module(file: str, code: bytes) -> Any:
    name, folder = f"fedhdp_own_{Path(file).stem}", str(Path(file).absolute().parent)
    spec = importlib.util.spec_from_loader(name, None, origin=file)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    module.__file__ = file
    sys.modules[name] = module
    if folder not in sys.path:
        sys.path.append(folder)  # what lies beside it can be imported
    _located(file, lambda: exec(compile(code, file, "exec"), module.__dict__))
    return module


def _located(file: str, work: Any) -> Any:
    """What some work in a file gives; an error of its own is one line that says where."""
    try:
        return work()
    except SyntaxError as error:
        raise ValueError(f"{error.filename}, line {error.lineno}: {error.msg}") from error
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        place = "".join([f", line {frame.lineno}" for frame in frames if frame.filename == file][-1:])
        raise ValueError(f"{file}{place}: {type(error).__name__}: {error}") from error


class Handwriting(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="name", tag="handwriting"):
    """The embedded handwriting."""

    clients: int
    samples: int = 30
    test_samples: int = 10
    server_test: int = 10_000
    split: Split = "one_digit"
    classes: Literal[10, 62] = 10
    sizes: Literal["alike", "tff"] = "alike"  # tff: as many examples as the clients of TFF's federated EMNIST have
    validation: float = 0.0  # the share of its train examples that a client holds out, to choose its pull by

    def load(self, mechanism: Mechanism, seed: int) -> FederatedData:
        """Make it; in the skewed split it is the first group who all hold one digit."""
        from fedhdp.datasets import make_handwriting, tff_client_sizes

        skewed = mechanism.groups[0].clients if self.split == "skewed" else 0
        numbers = (self.clients, self.samples, self.test_samples, self.server_test)
        sizes, test_sizes = None, None
        if self.sizes == "tff":
            sizes, test_sizes = (size_K[: self.clients].tolist() for size_K in tff_client_sizes(self.classes, seed))
        made = make_handwriting(*numbers, self.split, self.classes, skewed, sizes, seed, test_sizes)
        return hold_out(made, self.validation, seed)


class Mnist(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="name", tag="mnist"):
    """MNIST from the data directory: one digit for each client, or the images of one writer."""

    clients: int
    samples: int = 30
    test_samples: int = 100
    split: Split = "one_digit"
    validation: float = 0.0

    def load(self, mechanism: Mechanism, seed: int) -> FederatedData:
        """Read it; in the skewed split it is the first group who all hold a 7."""
        from fedhdp.datasets import load_mnist

        skewed = mechanism.groups[0].clients if self.split == "skewed" else 0
        made = load_mnist(self.split, self.clients, skewed, self.samples, self.test_samples, seed)
        return hold_out(made, self.validation, seed)


class Femnist(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="name", tag="femnist"):
    """Digits and letters by writer from the data directory; TFF's with 10 classes are the paper's FMNIST."""

    clients: int
    origin: Literal["tff", "leaf", "330"] = "tff"
    classes: Literal[10, 62] = 62
    validation: float = 0.0

    def load(self, mechanism: Mechanism, seed: int) -> FederatedData:
        """Read it."""
        from fedhdp.datasets import load_femnist

        return hold_out(load_femnist(self.origin, self.classes, self.clients, seed), self.validation, seed)


class PythonData(PythonFile, frozen=True, tag_field="name", tag="python"):
    """Data of your own."""

    clients: int
    validation: float = 0.0

    def load(self, mechanism: Mechanism, seed: int) -> FederatedData:
        """Have the file's ``population(seed)`` make it."""
        made = self.call("population", seed)
        require(
            isinstance(made, FederatedData),
            f"what population() of {self.file} returns",
            type(made).__name__,
            "a Population",
        )
        require(
            made.num_clients == self.clients, "data.clients", self.clients, f"{made.num_clients}, as {self.file} has"
        )
        return hold_out(made, self.validation, seed)


class Mlp(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="name", tag="mlp"):
    """The paper's network for MNIST."""

    hidden: int = 50

    def __post_init__(self) -> None:
        require(self.hidden >= 1, "hidden", self.hidden, "at least 1")

    def build(self, inputs: int, classes: int) -> Model:
        """Make it."""
        return mlp(inputs, self.hidden, classes)


class Cnn(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="name", tag="cnn"):
    """The paper's network for FEMNIST."""

    kernel: int = 3

    def __post_init__(self) -> None:
        require(self.kernel >= 1, "kernel", self.kernel, "at least 1")

    def build(self, inputs: int, classes: int) -> Model:
        """Make it."""
        return cnn(math.isqrt(inputs), classes, self.kernel)


class Linear(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="name", tag="linear"):
    """Multinomial logistic regression."""

    def build(self, inputs: int, classes: int) -> Model:
        """Make it."""
        return linear(inputs, classes)


class PythonModel(PythonFile, frozen=True, tag_field="name", tag="python"):
    """A model of your own."""

    def build(self, inputs: int, classes: int) -> Model:
        """Have the file's ``model()`` make it."""
        made = self.call("model")
        require(isinstance(made, Model), f"what model() of {self.file} returns", type(made).__name__, "a Model")
        return made


Data = Handwriting | Mnist | Femnist | PythonData
ModelChoice = Mlp | Cnn | Linear | PythonModel
NAMES: dict[str, tuple[str, ...]] = {
    "data": ("handwriting", "mnist", "femnist", "python"),
    "model": ("mlp", "cnn", "linear", "python"),
}


def clients_of(data: Data) -> str:
    """Whose clients are numbered, in words: in other data the same number is somebody else."""
    kept = msgspec.to_builtins(data)
    said = {name: value for name, value in kept.items() if name not in ("name", "validation", "sha256")}
    if isinstance(data, PythonData):
        said["file"] = Path(data.file).name
    return f"{kept['name']} ({', '.join(f'{name} {value}' for name, value in said.items())})"

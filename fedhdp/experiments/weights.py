"""The number of a model's parameters, on which the theory's weights depend."""

from __future__ import annotations

import math
from collections.abc import Callable

from fedhdp.data import FederatedData
from fedhdp.devices import use_cpu_cores
from fedhdp.experiments.components import (
    IMAGE_INPUTS,
    DataConfig,
    FemnistConfig,
    HandwritingConfig,
    MnistConfig,
    ModelConfig,
    PythonModel,
)


def known_shape(data: DataConfig, model: ModelConfig) -> tuple[int, int] | None:
    """The numbers of inputs and classes from which the model is built; None where the data must be loaded."""
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

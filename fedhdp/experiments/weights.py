"""The number of a model's parameters, on which the theory's weights depend."""

from __future__ import annotations

import math
from collections.abc import Callable

from fedhdp.data import FederatedData
from fedhdp.devices import use_cpu_cores
from fedhdp.experiments.components import (
    DataConfig,
    FemnistConfig,
    HandwritingConfig,
    MnistConfig,
    ModelConfig,
    PythonModel,
)

PIXELS = 28 * 28


def has_known_shape(data: DataConfig, model: ModelConfig) -> bool:
    """Whether the model can be built without the data."""
    return isinstance(data, HandwritingConfig | FemnistConfig | MnistConfig) or isinstance(model, PythonModel)


def count_parameters(data: DataConfig, model: ModelConfig, load: Callable[[], FederatedData]) -> int:
    """Count the parameters of a model, without initializing it; data are loaded only if their shape is not known.

    Args:
        data: The data, which has the numbers of inputs and classes.
        model: The model.
        load: Loads the data.
    """
    import jax

    use_cpu_cores()  # before anything below uses JAX
    basis = getattr(model, "basis", None)
    if isinstance(data, HandwritingConfig | FemnistConfig):
        inputs, classes = PIXELS, int(data.classes)
    elif isinstance(data, MnistConfig):
        inputs, classes = PIXELS, 10
    elif isinstance(model, PythonModel):
        inputs, classes = 0, 0  # its file knows the shapes
    else:
        loaded = load()
        inputs, classes = math.prod(loaded.input_shape), loaded.classes
    if getattr(data, "transform", "none") == "scattering":
        from fedhdp.experiments.scattering import DIRECTIONS

        inputs = DIRECTIONS
    if basis is not None:
        inputs = basis.columns
    shapes = jax.eval_shape(lambda: model.build(inputs, classes).init(jax.random.key(0)))
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))

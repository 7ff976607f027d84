"""The number of a model's parameters, on which the theory's weights depend."""

from __future__ import annotations

import math

from fedhdp.devices import use_cpu_cores
from fedhdp.experiments.components import DataConfig, FemnistConfig, HandwritingConfig, MnistConfig, ModelConfig
from fedhdp.privacy.calibration import MechanismConfig

PIXELS = 28 * 28


def count_parameters(data: DataConfig, model: ModelConfig, mechanism: MechanismConfig, seed: int) -> int:
    """Count the parameters of a model, without initializing it; data are loaded only if their shape is not known.

    Args:
        data: The data, which has the numbers of inputs and classes.
        model: The model.
        mechanism: The mechanism by which data are loaded.
        seed: The seed of the data.
    """
    import jax

    use_cpu_cores()  # before anything below uses JAX
    if isinstance(data, HandwritingConfig | FemnistConfig):
        inputs, classes = PIXELS, int(data.classes)
    elif isinstance(data, MnistConfig):
        inputs, classes = PIXELS, 10
    else:
        loaded = data.load(mechanism, seed)
        inputs, classes = math.prod(loaded.input_shape), loaded.classes
    shapes = jax.eval_shape(lambda: model.build(inputs, classes).init(jax.random.key(0)))
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))

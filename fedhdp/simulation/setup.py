"""The engine of a simulation: compiled once for all that differ in numbers alone."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import jax

from fedhdp import server
from fedhdp.client import LocalTraining
from fedhdp.data import FederatedData
from fedhdp.engine.examples import engine_config
from fedhdp.engine.round import Engine, EngineConfig
from fedhdp.mechanism import Mechanism
from fedhdp.memory import TRAINED_COPIES, require_memory
from fedhdp.models import Model, parameter_sizes
from fedhdp.server import ServerOptimizer


def make_engine(
    data: FederatedData,
    model: Model,
    mechanism: Mechanism,
    training: LocalTraining,
    optimizer: ServerOptimizer,
    run_of: Sequence[int],
) -> Engine:
    """The engine for the data and the model; a model that this machine's memory cannot hold is refused.

    Args:
        data: Every client's examples.
        model: The network.
        mechanism: A mechanism, for its layers and its arithmetic.
        training: How clients train.
        optimizer: The server's optimizer.
        run_of: Each mechanism's run.
    """
    sizes = parameter_sizes(jax.eval_shape(model.init, jax.random.key(0)))
    parameters = sum(sizes.values())
    require_memory(TRAINED_COPIES * 4 * parameters * len(set(run_of)), "model", f"{parameters:,} parameters")
    layers, is_exact = server.make_layers(mechanism, sizes), mechanism.arithmetic == "exact"
    config = engine_config(data, model, training, run_of)._replace(layers=layers, exact=is_exact)
    return _engine(model, training, optimizer, config)


@lru_cache(maxsize=8)  # on CPUs each takes up to a thousand of the 65,530 memory maps that Linux gives a process
def _engine(model: Model, training: LocalTraining, optimizer: ServerOptimizer, config: EngineConfig) -> Engine:
    return Engine(model, training, optimizer, config)

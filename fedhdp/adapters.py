"""Modules of Flax (linen and nnx), Equinox and Haiku as models.

Dropout gets a key in training and is off in evaluation. A module that keeps state besides its parameters, such as batch
statistics, is refused: clients would share what they measured, without clipping and without noise.

Axis letters: N examples.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedhdp.errors import FedHDPError, ModelError, require
from fedhdp.models import Array, Model, Parameters, check_parameter_types

_TRAINING = ("train", "training", "is_training")  # arguments that are true in training; ``deterministic``: false


def from_flax(module: Any, example: Any, **loss_and_metrics: Any) -> Model:
    """A model from a module of Flax linen.

    An argument ``train``, ``training``, ``is_training`` or ``deterministic`` of the module's ``__call__`` is set.

    Args:
        module: The module; it takes a batch of inputs.
        example: One input, such as ``np.zeros((28, 28, 1))``.
        **loss_and_metrics: ``loss`` and ``metrics`` of the model.

    Raises:
        ModelError: If the module has other variables than parameters, parameters that are no floats, or fails.
    """
    import flax.linen as nn

    _check_type(isinstance(module, nn.Module), "a module of Flax linen", module)
    mode = _mode(type(module).__call__)

    def variables(key: Array) -> dict[str, Any]:
        return module.init(key, _batch(example), **mode(False))

    def init(key: Array) -> Parameters:
        return variables(key).get("params", {})

    def apply(parameters: Parameters, x_N: Array, key: Array | None) -> Array:
        rngs = None if key is None else {"dropout": key}
        return module.apply({"params": parameters}, x_N, rngs=rngs, **mode(key is not None))

    name = type(module).__name__
    _refuse_state(name, _shapes("init", name, lambda: variables(jax.random.key(0))).keys() - {"params"})
    return _checked(name, Model(init, apply, **loss_and_metrics), example)


def from_nnx(module: Any, **loss_and_metrics: Any) -> Model:
    """A model from a module of Flax nnx, whose ``train`` and ``eval`` are called.

    Args:
        module: A function or class that takes ``rngs`` and makes the module, or a module, with whose parameters every run
            then begins whatever its seed is. The module takes a batch of inputs.
        **loss_and_metrics: ``loss`` and ``metrics`` of the model.

    Raises:
        ModelError: If the module has other variables than parameters, parameters that are no floats, or cannot be made.
    """
    from flax import nnx

    name, make = _factory(module, nnx.Module, "Flax nnx", "rngs", nnx.Rngs)

    def init(key: Array) -> Parameters:
        return nnx.to_pure_dict(nnx.state(make(key), nnx.Param))

    abstract = _call("init", name, lambda: nnx.eval_shape(lambda: nnx.clone(make(jax.random.key(0)))))
    _check_type(isinstance(abstract, nnx.Module), f"a function that makes a module of Flax nnx ({name})", abstract)
    abstract.eval()
    parts: Any = nnx.split(abstract, nnx.Param, nnx.RngState, ...)
    evaluation, like, streams, state = parts
    abstract.train()
    training, mode = nnx.graphdef(abstract), _mode(type(abstract).__call__)
    _refuse_state(name, {type(variable).__name__ for _, variable in nnx.to_flat_state(state)})

    def apply(parameters: Parameters, x_N: Array, key: Array | None) -> Array:
        theta = jax.tree.map(lambda leaf: leaf, like)
        nnx.replace_by_pure_dict(theta, parameters)
        key_0 = jax.random.key(0) if key is None else key
        seeded = [_seed(leaf, key_0, number) for number, leaf in enumerate(jax.tree.leaves(streams))]
        rngs = jax.tree.unflatten(jax.tree.structure(streams), seeded)
        return nnx.merge(evaluation if key is None else training, theta, rngs)(x_N, **mode(key is not None))

    return _checked(name, Model(init, apply, **loss_and_metrics))


def from_equinox(module: Any, **loss_and_metrics: Any) -> Model:
    """A model from a module of Equinox.

    Args:
        module: A function or class that takes ``key`` and makes the module, or a module, with whose parameters every run
            then begins whatever its seed is. The module takes one input, and a ``key`` if it has dropout.
        **loss_and_metrics: ``loss`` and ``metrics`` of the model.

    Raises:
        ModelError: If the module has state, parameters that are no floats, or cannot be made.
    """
    import equinox as eqx

    is_module = isinstance(module, eqx.Module)
    name, make = _factory(module, eqx.Module, "Equinox", "key", lambda key: key)

    def init(key: Array) -> Parameters:
        return eqx.partition(make(key), eqx.is_inexact_array)[0]

    shapes = _call("init", name, lambda: eqx.filter_eval_shape(lambda: make(jax.random.key(0))))
    _check_type(isinstance(shapes, eqx.Module), f"a function that makes a module of Equinox ({name})", shapes)
    leaves = jax.tree.leaves(shapes, is_leaf=lambda leaf: isinstance(leaf, eqx.nn.StateIndex))
    _refuse_state(name, {type(leaf).__name__ for leaf in leaves if isinstance(leaf, eqx.nn.StateIndex)})
    if not is_module:
        check_parameter_types(
            f"the parameters of {name}", [leaf for leaf in leaves if isinstance(leaf, jax.ShapeDtypeStruct)]
        )
    static = module if is_module else eqx.filter(shapes, lambda leaf: not isinstance(leaf, jax.ShapeDtypeStruct))
    takes_key = "key" in inspect.signature(type(shapes).__call__).parameters

    def apply(parameters: Parameters, x_N: Array, key: Array | None) -> Array:
        net = eqx.nn.inference_mode(eqx.combine(parameters, static), key is None)
        if key is None or not takes_key:
            return jax.vmap(net)(x_N)
        return jax.vmap(lambda x, key: net(x, key=key))(x_N, jax.random.split(key, len(x_N)))

    return _checked(name, Model(init, apply, **loss_and_metrics))


def from_haiku(function: Any, example: Any, **loss_and_metrics: Any) -> Model:
    """A model from Haiku.

    An argument ``train``, ``training``, ``is_training`` or ``deterministic`` of the function is set.

    Args:
        function: A function of a batch of inputs that uses Haiku's modules, or what ``hk.transform`` makes of one, which
            must be the same in training and evaluation.
        example: One input, such as ``np.zeros((28, 28, 1))``.
        **loss_and_metrics: ``loss`` and ``metrics`` of the model.

    Raises:
        ModelError: If the function has state, parameters that are no floats, or fails.
    """
    import haiku as hk

    _check_type(callable(getattr(function, "init", function)), "a function, or what hk.transform returns", function)
    is_function = not isinstance(function, hk.Transformed | hk.TransformedWithState)
    name = getattr(function, "__name__", type(function).__name__)
    if isinstance(function, hk.TransformedWithState):
        _refuse_state(name, {"TransformedWithState"})
    mode = _mode(function) if is_function else lambda is_training: {}
    transformed = hk.transform(function) if is_function else function

    def init(key: Array) -> Parameters:
        return transformed.init(key, _batch(example), **mode(False))

    def apply(parameters: Parameters, x_N: Array, key: Array | None) -> Array:
        return transformed.apply(parameters, key, x_N, **mode(key is not None))

    return _checked(name, Model(init, apply, **loss_and_metrics), example)


def _mode(function: Callable[..., Any]) -> Callable[[bool], dict[str, bool]]:
    """The arguments that tell a function whether it is called in training."""
    names = inspect.signature(function).parameters

    def arguments(is_training: bool) -> dict[str, bool]:
        training = {name: is_training for name in _TRAINING if name in names}
        return training | ({"deterministic": not is_training} if "deterministic" in names else {})

    return arguments


def _factory(
    module: Any, kind: type, library: str, argument: str, seed: Callable[[Array], Any]
) -> tuple[str, Callable[[Array], Any]]:
    """The name of a module or of the function that makes it, and a function from a key to the module."""
    is_module = isinstance(module, kind)
    _check_type(is_module or callable(module), f"a module of {library}, or a function that makes one", module)
    name = type(module).__name__ if is_module else getattr(module, "__name__", "module")

    def make(key: Array) -> Any:
        if is_module:
            return module
        function = module.__init__ if inspect.isclass(module) else module
        by_name = argument in inspect.signature(function).parameters
        return module(**{argument: seed(key)}) if by_name else module(seed(key))

    return name, make


def _batch(example: Any) -> np.ndarray:
    """A batch of one input, as the engine has inputs: floats are of 32 bits."""
    x_N = np.asarray(example)[None]
    return x_N.astype(jax.dtypes.canonicalize_dtype(x_N.dtype))


def _seed(leaf: Any, key: Array, number: int) -> Array:
    """A random stream's key or its count, as if the stream had just been made from this key."""
    is_key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return jax.random.fold_in(key, number) if is_key else jnp.zeros(leaf.shape, leaf.dtype)


def _checked(name: str, model: Model, example: Any = None) -> Model:
    """The model, if its parameters are floats and it can be applied to the example."""
    shapes = _shapes("init", name, lambda: model.init(jax.random.key(0)))
    check_parameter_types(f"the parameters of {name}", shapes)
    if example is not None:
        x_N = _batch(example)
        for has_key in (False, True):
            key = partial(jax.random.key, 0) if has_key else lambda: None
            _shapes("apply", name, lambda theta, key=key: model.apply(theta, jnp.asarray(x_N), key()), shapes)
    return model


def _check_type(condition: bool, kind: str, value: Any) -> None:
    require(condition, "module", type(value).__name__, kind, ModelError)


def _refuse_state(name: str, state: Any) -> None:
    if state:
        kinds = ", ".join(sorted(state))
        rule = f"{name} must keep nothing but parameters, got state ({kinds})"
        raise ModelError(f"{rule}: normalize without statistics of a batch", "state", kinds)


def _shapes(field: str, name: str, function: Callable[..., Any], *arguments: Any) -> Any:
    return _call(field, name, lambda: jax.eval_shape(function, *arguments))


def _call(field: str, name: str, call: Callable[[], Any]) -> Any:
    """Turn what a module's library raises into one line."""
    try:
        return call()
    except FedHDPError:
        raise
    except Exception as error:
        cause = str(error).strip().split("\n")[0]
        raise ModelError(
            f"the module's {field} failed for {name}: {type(error).__name__}: {cause}", field, name
        ) from error

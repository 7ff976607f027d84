"""Optax transformations and schedules by name and arguments, as an experiment's file has them.

``OptimizerConfig("adam", learning_rate=0.01)`` is ``optax.adam(learning_rate=0.01)``, and a number may be a schedule:
``ScheduleConfig("cosine_decay_schedule", init_value=0.1, decay_steps=500)``. Both are the tables of an experiment's file:
frozen mappings that can be hashed, compared and written to TOML. Optax is imported when one is made, so that importing this
module does not wait for JAX.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import cache, partial
from types import FunctionType
from typing import TYPE_CHECKING, Any, NoReturn

from fedhdp.errors import InvalidValueError, errors_of, require

if TYPE_CHECKING:
    import optax

_SHARES = ("b1", "b2", "b3", "decay", "momentum", "rho")  # decays of averages
_NOT_NEGATIVE = ("eps", "eps_root", "initial_accumulator_value", "weight_decay")
_NOT_USABLE = ("lbfgs", "noisy_sgd", "optimistic_adam")  # needs the loss, needs a key, is deprecated


class FrozenTable(dict[str, Any]):
    """A table that cannot be changed and can be hashed; tables and lists in it are frozen too."""

    def __init__(self, /, **items: Any):
        super().__init__({key: _freeze(key, value) for key, value in items.items() if value is not None})

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), **self), ()

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError(f"{type(self).__name__} is frozen")

    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _refuse


class ScheduleConfig(FrozenTable):
    """An optax schedule: a number for every round, the first round being 0.

    Args:
        schedule: A schedule of optax, such as "cosine_decay_schedule" or "exponential_decay".
        **arguments: Its arguments. Tables with a key ``schedule`` are schedules; other keys that are digits are numbers.

    Raises:
        InvalidValueError: If there is no such schedule, or an argument is unknown, missing or out of range.
    """

    def __init__(self, /, schedule: str, **arguments: Any):
        super().__init__(schedule=schedule, **arguments)
        _check_arguments("schedule", schedule, _schedules(), self)
        for field, value in self.items():
            if field.endswith("_steps"):
                require(isinstance(value, int) and value >= 1, field, value, "a whole number, at least 1")
            elif _is_number(value):
                require(value >= 0, field, value, "at least 0")
        _check_call("schedule", schedule, lambda: _eval_shape(self.function(), 0))

    def function(self) -> Callable[[Any], Any]:
        """The schedule as optax has it: from the number of a round to the value."""
        return _call(_schedules()[self["schedule"]], "schedule", self)


class OptimizerConfig(FrozenTable):
    """An optimizer of optax by its name and arguments.

    Args:
        name: An optimizer of optax with a learning rate, such as "adam", "adamw", "sgd", "rmsprop", "yogi" or "lamb".
        **arguments: Its arguments. The learning rate is a number or a schedule.

    Raises:
        InvalidValueError: If there is no such optimizer, or an argument is unknown, missing or out of range.
    """

    def __init__(self, /, name: str, **arguments: Any):
        super().__init__(name=name, **arguments)
        _check_arguments("name", name, _optimizers(), self)
        require("learning_rate" in self, "learning_rate", None, f"given, as optax.{name} needs it")
        if _is_number(rate := self["learning_rate"]):
            require(rate > 0, "learning_rate", rate, "finite and above 0")
        for field in self.keys() & {*_SHARES, *_NOT_NEGATIVE}:
            if _is_number(value := self[field]):
                share = field in _SHARES
                valid = 0 <= value < 1 if share else value >= 0
                require(valid, field, value, "at least 0 and below 1" if share else "at least 0")
        _check_call("name", name, lambda: check_transformation(self.transformation()))

    def transformation(self, learning_rate: Any = None) -> optax.GradientTransformation:
        """The optax transformation; with a learning rate, that one instead of its own."""
        table = self if learning_rate is None else dict(self) | {"learning_rate": learning_rate}
        return _call(_optimizers()[self["name"]], "name", table)

    def rate(self, round: int) -> float:
        """The learning rate of a round, the first round being 0."""
        return value_at(self["learning_rate"], round, "learning_rate")

    @property
    def is_plain_sgd(self) -> bool:
        """Whether a step is the gradient times the learning rate."""
        return self["name"] == "sgd" and not self.get("momentum")


def as_optimizer(value: Any, field: str = "optimizer") -> Any:
    """The value of a field that names an optimizer: a table becomes an OptimizerConfig.

    Args:
        value: A table, an OptimizerConfig, an optax transformation or None.
        field: The field's name, for messages.

    Raises:
        InvalidValueError: If it is none of these.
    """
    if value is None or isinstance(value, OptimizerConfig):
        return value
    if isinstance(value, Mapping):
        require("name" in value, f"{field}.name", None, "given: an optimizer of optax, such as 'adam'")
        with errors_of(field):
            return OptimizerConfig(**value)
    valid = all(callable(getattr(value, method, None)) for method in ("init", "update"))
    require(valid, field, value, "a table with a name and arguments, or an optax transformation")
    return value


def as_schedule(value: Any, field: str) -> Any:
    """The value of a field that may be a schedule: a table becomes a ScheduleConfig, anything else stays.

    Raises:
        InvalidValueError: If a table is not a schedule.
    """
    if isinstance(value, ScheduleConfig) or not isinstance(value, Mapping):
        return value
    require("schedule" in value, f"{field}.schedule", None, "given: a schedule of optax")
    with errors_of(field):
        return ScheduleConfig(**value)


def value_at(value: Any, round: int, field: str) -> float:
    """A number, or the value of a schedule or function in a round, the first round being 0.

    Raises:
        InvalidValueError: If a schedule's value is negative or not finite.
    """
    function = value.function() if isinstance(value, ScheduleConfig) else value
    if not callable(function):
        return float(value)
    number = float(function(round))
    require(0 <= number < math.inf, field, number, f"finite and at least 0 in round {round + 1}")
    return number


def require_tables(optimizer: Any, field: str) -> None:
    """Refuse an optimizer that cannot be written to a file: one with a function, or a transformation of optax.

    Raises:
        InvalidValueError: If it is one.
    """
    is_table = optimizer is None or (isinstance(optimizer, OptimizerConfig) and not _has_function(optimizer))
    require(is_table, field, optimizer, "a table with a name and arguments in an experiment")


def _has_function(value: Any) -> bool:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, tuple) else ()
    return callable(value) or any(map(_has_function, items))


def check_transformation(transformation: optax.GradientTransformation, like: Any = None) -> None:
    """Trace the initialization and a step of an optax transformation.

    Args:
        transformation: Its update takes gradients, state and parameters, and nothing else.
        like: The shapes of the parameters; by default two numbers.

    Raises:
        ValueError: If a step changes the shapes or types of the parameters or of the state.
        Exception: What the transformation raises on such parameters.
    """
    import jax
    import numpy as np

    def step(theta: Any) -> tuple[Any, Any, Any]:
        state = transformation.init(theta)
        return (state, *transformation.update(theta, state, theta))

    def types(tree: Any) -> tuple[Any, ...]:
        return jax.tree.structure(tree), [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(tree)]

    like = jax.ShapeDtypeStruct((2,), np.float32) if like is None else like
    state, update, next_state = jax.eval_shape(step, like)
    if types(update) != types(like) or types(state) != types(next_state):
        raise ValueError("a step changes the shapes or types of the parameters or of the state")


def _eval_shape(function: Callable[..., Any], *arguments: Any) -> Any:
    import jax

    return jax.eval_shape(function, *arguments)


@cache
def _optimizers() -> dict[str, Callable[..., Any]]:
    """The factories of optax that have a learning rate and make a transformation."""
    import optax

    names = [name for name in sorted(vars(optax)) if name[0] != "_" and not name.startswith("scale_by")]
    functions = {name: value for name in names if isinstance(value := getattr(optax, name), FunctionType | partial)}
    usable = [name for name, value in functions.items() if "learning_rate" in _parameters(value)]
    return {name: functions[name] for name in usable if name not in _NOT_USABLE}


@cache
def _schedules() -> dict[str, Callable[..., Any]]:
    """The schedules of optax."""
    import optax

    names = [name for name in vars(optax) if name.endswith("_schedule") and not name.startswith("scale_by")]
    return {name: getattr(optax, name) for name in sorted([*names, "exponential_decay", "join_schedules"])}


def _parameters(factory: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(factory).parameters


def _check_arguments(tag: str, name: object, factories: Mapping[str, Callable[..., Any]], table: FrozenTable) -> None:
    """Check the arguments against the signature of the factory with this name."""
    similar = get_close_matches(str(name), factories, 3, cutoff=0.3) or list(factories)[:3]
    known = isinstance(name, str) and name in factories
    require(known, tag, name, f"a name that optax has, such as {', '.join(similar)}")
    parameters = _parameters(factories[str(name)])
    for field, value in table.items():
        if field == tag:
            continue
        if field not in parameters:
            similar = get_close_matches(field, parameters, 1)
            hint = f"; did you mean {similar[0]}?" if similar else f"; it has {', '.join(parameters)}"
            raise InvalidValueError(f"{field} = {value!r} is no argument of optax.{name}{hint}", field, value)
        _check_type(field, value, parameters[field].default)
        if _is_number(value):
            require(math.isfinite(value), field, value, "finite")
    for field, parameter in parameters.items():
        is_missing = parameter.default is inspect.Parameter.empty and field not in table
        require(not is_missing, field, None, f"given, as optax.{name} needs it")


def _check_type(field: str, value: Any, default: Any) -> None:
    """Check that an argument is what its name and its default say."""
    if isinstance(default, bool):
        require(isinstance(value, bool), field, value, "true or false")
    elif field in ("learning_rate", "weight_decay"):
        valid = _is_number(value) or callable(value) or isinstance(value, ScheduleConfig)
        require(valid, field, value, "a number or a schedule")
    elif field in ("schedules", "boundaries", "cosine_kwargs"):
        require(isinstance(value, tuple), field, value, "a list")
    elif field == "boundaries_and_scales":
        require(isinstance(value, FrozenTable), field, value, "a table of numbers")
    elif "type" not in field and not callable(value):  # functions are masks
        require(_is_number(value), field, value, "a number")


def _check_call(tag: str, name: str, call: Callable[[], Any]) -> None:
    """Turn what optax raises into one line."""
    try:
        call()
    except Exception as error:
        cause = str(error).strip().split("\n")[0]
        raise InvalidValueError(f"{tag}: optax.{name} fails with these arguments: {cause}", tag, name) from error


def _call(factory: Callable[..., Any], tag: str, table: Mapping[str, Any]) -> Any:
    return factory(**{key: _thaw(value) for key, value in table.items() if key != tag})


def _freeze(field: str, value: Any) -> Any:
    if isinstance(value, FrozenTable):
        return value
    if isinstance(value, Mapping):
        return (
            as_schedule(value, field) if "schedule" in value else FrozenTable(**{str(k): v for k, v in value.items()})
        )
    return tuple(_freeze(field, item) for item in value) if isinstance(value, list | tuple) else value


def _thaw(value: Any) -> Any:
    """A value as optax takes it."""
    if isinstance(value, ScheduleConfig):
        return value.function()
    if isinstance(value, FrozenTable):
        return {int(key) if key.isdigit() else key: _thaw(item) for key, item in value.items()}
    return [_thaw(item) for item in value] if isinstance(value, tuple) else value


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)

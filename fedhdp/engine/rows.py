"""What in a program belongs to single examples: found by rules for each primitive, from the inputs on.

A variable is *by row* where it depends on the inputs and constants alone and its slice along one axis, at an example's
place, depends on that example alone. It can then be computed once for all examples of a client instead of in every step.
What no rule covers is not by row, so a program that mixes examples, such as one that subtracts a batch's mean, is not
taken apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.extend.core import JaxprEqn, Literal, Var

from fedhdp.engine.tracing import Program, inner_program, shape_of

REDUCTIONS = {"reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "argmax", "argmin"}
POOLINGS = {"reduce_window_sum", "reduce_window_max", "reduce_window_min"}
ELEMENTWISE = {
    *("abs", "add", "add_any", "and", "atan2", "cbrt", "ceil", "clamp", "convert_element_type", "copy", "cos", "cosh"),
    *("div", "eq", "erf", "exp", "exp2", "expm1", "floor", "ge", "gt", "integer_pow", "is_finite", "le", "log"),
    *("log1p", "logistic", "lt", "max", "min", "mul", "ne", "neg", "not", "or", "pow", "rem", "round", "rsqrt"),
    *("select_n", "sign", "sin", "sinh", "sqrt", "square", "sub", "tan", "tanh", "xor", "stop_gradient"),
}


class Rows(NamedTuple):
    """By row, along this axis."""

    axis: int


class Constant(NamedTuple):
    """It depends on nothing, and may vary along these axes."""

    varies: frozenset[int]


Kind = Rows | Constant | None  # None: it depends on parameters or the key, or no rule covers it


def kinds(program: Program) -> dict[Var, Kind]:
    """The kind of each variable of a program."""
    return {program.x: Rows(0)} | _kinds(program.eqns, {program.x: Rows(0), **_constants(program.constants)})


def _constants(values: Any) -> dict[Var, Kind]:
    return {var: _any_constant(shape_of(var)) for var in values}


def _any_constant(shape: Sequence[int]) -> Constant:
    return Constant(frozenset(axis for axis, size in enumerate(shape) if size > 1))


def _kinds(eqns: Sequence[JaxprEqn], known: dict[Var, Kind]) -> dict[Var, Kind]:
    kind_of: dict[Var, Kind] = dict(known)
    for eqn in eqns:
        inputs = [_any_constant(np.shape(a.val)) if isinstance(a, Literal) else kind_of.get(a) for a in eqn.invars]
        for var, kind in zip(eqn.outvars, _outputs(eqn, inputs), strict=True):
            kind_of[var] = kind
    return kind_of


def _outputs(eqn: JaxprEqn, inputs: list[Kind]) -> list[Kind]:
    """The kinds of what an equation computes."""
    unknown: list[Kind] = [None] * len(eqn.outvars)
    if any(kind is None for kind in inputs) or eqn.effects or inner_program(eqn) is not None:
        return unknown
    name = eqn.primitive.name
    if all(isinstance(kind, Constant) for kind in inputs):
        if name in ELEMENTWISE:
            return [Constant(_varies(inputs))]
        if name in _CONSTANT_RULES:
            return [_CONSTANT_RULES[name](eqn, inputs[0])]
        return [_any_constant(shape_of(var)) for var in eqn.outvars]
    rule = _elementwise if name in ELEMENTWISE else _reduction if name in REDUCTIONS else _RULES.get(name)
    if name in POOLINGS:
        rule = _pooling
    axis = None if rule is None else rule(eqn, inputs)
    return unknown if axis is None else [Rows(axis)]


def _elementwise(eqn: JaxprEqn, inputs: list[Kind]) -> int | None:
    axes = {kind.axis for kind in inputs if isinstance(kind, Rows)}
    return axes.pop() if len(axes) == 1 and not axes & _varies(inputs) else None


def _varies(inputs: list[Kind]) -> frozenset[int]:
    """The axes along which a constant may vary."""
    return frozenset().union(*(kind.varies for kind in inputs if isinstance(kind, Constant)))


def _reduction(eqn: JaxprEqn, inputs: list[Kind]) -> int | None:
    axes, axis = eqn.params["axes"], _axis(inputs[0])
    return None if axis in axes else axis - sum(a < axis for a in axes)


def _pooling(eqn: JaxprEqn, inputs: list[Kind]) -> int | None:
    axis, params = _axis(inputs[0]), eqn.params
    names = ("window_dimensions", "window_strides", "base_dilation", "window_dilation")
    alone = all(params[name][axis] == 1 for name in names) and tuple(params["padding"][axis]) == (0, 0)
    return axis if alone else None


def _transpose(eqn: JaxprEqn, inputs: list[Kind]) -> int | None:
    return list(eqn.params["permutation"]).index(_axis(inputs[0]))


def _broadcast(eqn: JaxprEqn, inputs: list[Kind]) -> int | None:
    return int(eqn.params["broadcast_dimensions"][_axis(inputs[0])]) if isinstance(inputs[0], Rows) else None


def _squeeze(eqn: JaxprEqn, inputs: list[Kind]) -> int | None:
    axis, dimensions = _axis(inputs[0]), eqn.params["dimensions"]
    return None if axis in dimensions else axis - sum(d < axis for d in dimensions)


def _reshape(eqn: JaxprEqn, inputs: list[Kind]) -> int | None:
    """The axis that has as many numbers before it, and is as long."""
    axis, old, new = _axis(inputs[0]), shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    if eqn.params["dimensions"] is not None:
        return None
    before = math.prod(old[:axis])
    return next((a for a in range(len(new)) if math.prod(new[:a]) == before and new[a] == old[axis]), None)


def _slice(eqn: JaxprEqn, inputs: list[Kind]) -> int | None:
    axis, size = _axis(inputs[0]), shape_of(eqn.invars[0])
    return axis if shape_of(eqn.outvars[0])[axis] == size[axis] else None


def _pad(eqn: JaxprEqn, inputs: list[Kind]) -> int | None:
    return _axis(inputs[0]) if isinstance(inputs[0], Rows) and _unpadded(eqn, inputs) else None


def _unpadded(eqn: JaxprEqn, inputs: list[Kind]) -> bool:
    return tuple(eqn.params["padding_config"][_axis(inputs[0])]) == (0, 0, 0) and isinstance(inputs[1], Constant)


def _rev(eqn: JaxprEqn, inputs: list[Kind]) -> int | None:
    return None if _axis(inputs[0]) in eqn.params["dimensions"] else _axis(inputs[0])


def _concatenate(eqn: JaxprEqn, inputs: list[Kind]) -> int | None:
    axis = _elementwise(eqn, inputs)
    return None if axis == eqn.params["dimension"] else axis


def _dot(eqn: JaxprEqn, inputs: list[Kind]) -> int | None:
    """One side's rows times a constant; or both sides' rows, one by one."""
    contracted, batch = eqn.params["dimension_numbers"]
    sides = [side for side, kind in enumerate(inputs) if isinstance(kind, Rows)]
    axes = [_axis(inputs[side]) for side in sides]
    if any(axis in contracted[side] for side, axis in zip(sides, axes, strict=True)):
        return None
    places = [list(batch[side]).index(axis) for side, axis in zip(sides, axes, strict=True) if axis in batch[side]]
    if places:
        return places[0] if len(places) == 2 and places[0] == places[1] else None
    if len(sides) == 2:
        return None
    (side,), (axis,) = sides, axes
    free = [a for a in range(len(shape_of(eqn.invars[side]))) if a not in (*contracted[side], *batch[side])]
    before = len(shape_of(eqn.invars[0])) - len(contracted[0]) if side == 1 else len(batch[0])
    return before + free.index(axis)


def _convolution(eqn: JaxprEqn, inputs: list[Kind]) -> int | None:
    numbers = eqn.params["dimension_numbers"]
    by_row = isinstance(inputs[0], Rows) and inputs[0].axis == numbers.lhs_spec[0]
    alone = eqn.params["batch_group_count"] == 1 and isinstance(inputs[1], Constant)
    return numbers.out_spec[0] if by_row and alone else None


def _axis(kind: Kind) -> int:
    assert isinstance(kind, Rows)
    return kind.axis


_RULES: dict[str, Callable[[JaxprEqn, list[Kind]], int | None]] = {
    "transpose": _transpose,
    "broadcast_in_dim": _broadcast,
    "squeeze": _squeeze,
    "reshape": _reshape,
    "slice": _slice,
    "pad": _pad,
    "rev": _rev,
    "concatenate": _concatenate,
    "dot_general": _dot,
    "conv_general_dilated": _convolution,
}


def _broadcast_constant(eqn: JaxprEqn, kind: Constant) -> Constant:
    return Constant(frozenset(int(eqn.params["broadcast_dimensions"][axis]) for axis in kind.varies))


def _transposed_constant(eqn: JaxprEqn, kind: Constant) -> Constant:
    return Constant(frozenset(list(eqn.params["permutation"]).index(axis) for axis in kind.varies))


_CONSTANT_RULES: dict[str, Callable[[JaxprEqn, Any], Constant]] = {
    "broadcast_in_dim": _broadcast_constant,
    "transpose": _transposed_constant,
}


def same_rows(first: Program, second: Program, variables: Sequence[Var], kind_of: dict[Var, Kind]) -> bool:
    """Whether two programs, traced for other numbers of examples, compute these variables of the first in the same way.

    Shapes and settings may differ where one has its number of examples and the other its own, and nowhere else: a program
    that divides by the number of examples would be another one for each.
    """
    if len(first.eqns) != len(second.eqns):
        return False
    size = {first.examples: second.examples}
    needed = set(variables)
    for eqn, other in zip(reversed(first.eqns), reversed(second.eqns), strict=True):
        if not needed & set(eqn.outvars):
            continue
        if not _same_eqn(eqn, other, size) or not all(map(_is_named_alike(first, second), eqn.invars, other.invars)):
            return False
        for a, b in zip(eqn.outvars, other.outvars, strict=True):
            if not _same_shape(shape_of(a), shape_of(b), kind_of.get(a), size):
                return False
        needed |= {atom for atom in eqn.invars if isinstance(atom, Var)}
    return True


def _is_named_alike(first: Program, second: Program) -> Callable[[Any, Any], bool]:
    """Whether two atoms are the same place of their programs, or the same value."""
    counterpart = dict(
        zip((first.x, *first.leaves, *first.keys), (second.x, *second.leaves, *second.keys), strict=True)
    )

    def alike(a: Any, b: Any) -> bool:
        if isinstance(a, Literal) or isinstance(b, Literal):
            return isinstance(a, Literal) and isinstance(b, Literal) and _same_value(a.val, b.val)
        if a in counterpart:
            return counterpart[a] is b
        if a in first.constants:
            return b in second.constants and _same_value(first.constants[a], second.constants[b])
        return b in second.number_of and first.number_of[a] == second.number_of[b]

    return alike


def _same_value(a: Any, b: Any) -> bool:
    if a is b or np.shape(a) != np.shape(b):
        return a is b
    a_N, b_N = np.asarray(a), np.asarray(b)
    return np.array_equal(a_N, b_N, equal_nan=np.issubdtype(a_N.dtype, np.inexact))  # a deviation has NaN in it


def _same_shape(a: Sequence[int], b: Sequence[int], kind: Kind, size: dict[int, int]) -> bool:
    """Whether two shapes differ in the number of examples alone, along the axis of the rows."""
    if len(a) != len(b):
        return False
    if isinstance(kind, Rows):
        return all(
            size.get(m) == n if axis == kind.axis else m == n for axis, (m, n) in enumerate(zip(a, b, strict=True))
        )
    varies = kind.varies if kind is not None else range(len(a))
    return all(
        m == n or (axis not in varies and size.get(m) == n) for axis, (m, n) in enumerate(zip(a, b, strict=True))
    )


def _same_eqn(a: JaxprEqn, b: JaxprEqn, size: dict[int, int]) -> bool:
    same_names = a.primitive is b.primitive and a.params.keys() == b.params.keys()
    return same_names and all(_same_setting(a.params[name], b.params[name], size) for name in a.params)


def _same_setting(a: Any, b: Any, size: dict[int, int]) -> bool:
    """Whether two settings are equal, up to the number of examples."""
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(_same_setting(*pair, size) for pair in zip(a, b, strict=True))
    if isinstance(a, int | np.integer) and not isinstance(a, bool):
        return bool(a == b) or size.get(int(a)) == b
    return True if callable(a) else type(a) is type(b) and bool(np.all(a == b))

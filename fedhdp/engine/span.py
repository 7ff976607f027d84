"""The first layer of a program: one product of what is by row with a parameter that is used nowhere else, and its bias.

Such a parameter changes in training only by combinations of the rows, whatever follows the product (see ``low_rank.py``).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn, Var

from fedhdp.engine.rewrite import along_axis
from fedhdp.engine.rows import Kind, Rows
from fedhdp.engine.tracing import Program, dtype_of, shape_of
from fedhdp.models import Array

MOVES = {"transpose", "reshape", "squeeze"}  # they move numbers, each to one place, and lose none


class FirstLayer(NamedTuple):
    """A product of rows with a parameter, and the addition of a bias.

    Weights are a matrix [inputs, units] here, whatever the shape of the parameter.
    """

    rows: Var
    operand: Var  # the weights as the product has them
    weight: int  # the number of the parameter among the leaves
    bias: int | None
    inputs: int
    units: int
    output: Var  # with the bias, where there is one
    axis: int  # of the rows in the output
    to_matrix: Callable[[Array], Array]

    def from_matrix(self, matrix: Array, like: Any) -> Array:
        """A matrix in the shape of the parameter."""
        (leaf,) = jax.linear_transpose(self.to_matrix, jax.ShapeDtypeStruct(like.shape, matrix.dtype))(matrix)
        return leaf

    def place(self, output_BH: Array) -> Array:
        """The layer's outputs as the program has them."""
        shape = shape_of(self.output)
        rest = shape[: self.axis] + shape[self.axis + 1 :]
        return jnp.moveaxis(output_BH.reshape(-1, *rest), 0, self.axis)


def find_first_layer(program: Program, kind_of: dict[Var, Kind]) -> FirstLayer | None:
    """The first layer with most weights; None where there is none."""
    layers = [layer for eqn in program.eqns for side in (0, 1) if (layer := _layer(program, kind_of, eqn, side))]
    return max(layers, key=lambda layer: layer.inputs * layer.units, default=None)


def _layer(program: Program, kind_of: dict[Var, Kind], eqn: JaxprEqn, side: int) -> FirstLayer | None:
    """The layer whose product is this equation, with the rows on this side."""
    if eqn.primitive.name != "dot_general":
        return None
    contracted, batch = eqn.params["dimension_numbers"]
    (product,) = eqn.outvars
    rows, operand = eqn.invars[side], eqn.invars[1 - side]
    is_float = {dtype_of(atom) for atom in (*eqn.invars, product)} == {jnp.dtype(jnp.float32)}
    if not isinstance(rows, Var) or not isinstance(operand, Var) or any(batch) or not is_float:
        return None
    kind = kind_of.get(rows)
    if not isinstance(kind, Rows):
        return None
    inputs = [axis for axis in range(len(shape_of(rows))) if axis != kind.axis]
    weight = only_leaf(program, operand)
    if sorted(contracted[side]) != inputs or weight is None:
        return None
    shape = shape_of(operand)
    paired = [contracted[1 - side][list(contracted[side]).index(axis)] for axis in inputs]
    free = [axis for axis in range(len(shape)) if axis not in paired]
    size, units = math.prod(shape[axis] for axis in paired), math.prod(shape[axis] for axis in free)

    def to_matrix(leaf: Array) -> Array:
        (array,) = program.evaluate({program.leaves[weight]: leaf}, [operand])
        return array.transpose(*paired, *free).reshape(size, units)

    axis = 0 if side == 0 else len(free)
    layer = FirstLayer(rows, operand, weight, None, size, units, product, axis, to_matrix)
    return _with_bias(program, layer) if len(free) == 1 else layer


def _with_bias(program: Program, layer: FirstLayer) -> FirstLayer:
    """The layer with the parameter that is added to each of its outputs, if there is one."""
    var, axis = layer.output, layer.axis
    while (consumer := program.only_consumer(var)) is not None:
        if consumer.primitive.name == "transpose":
            axis = list(consumer.params["permutation"]).index(axis)
        elif consumer.primitive.name == "add" and shape_of(consumer.outvars[0]) == shape_of(var):
            other = next(atom for atom in consumer.invars if atom is not var)
            root = along_axis(program, other, 1 - axis, layer.units)
            bias = None if root is None else only_leaf(program, other, MOVES | {"broadcast_in_dim"})
            if bias is None or dtype_of(program.leaves[bias]) != jnp.float32:
                return layer
            if math.prod(shape_of(program.leaves[bias])) != layer.units:
                return layer
            return layer._replace(bias=bias, output=consumer.outvars[0], axis=axis)
        else:
            return layer
        var = consumer.outvars[0]
    return layer


def only_leaf(program: Program, atom: Any, allowed: set[str] = MOVES) -> int | None:
    """The number of a parameter that is used here and nowhere else, behind changes of its layout alone."""
    while isinstance(atom, Var) and program.uses[atom] == 1 and atom is not program.output:
        if atom in program.leaves:
            return program.leaves.index(atom)
        eqn = program.producer(atom)
        if eqn is None or eqn.primitive.name not in allowed or len(eqn.invars) > 1:
            return None
        atom = eqn.invars[0]
    return None

"""Rules that replace parts of a traced network by faster ones that compute the same.

| part                                                        | is computed as                                         |
| ----------------------------------------------------------- | ------------------------------------------------------ |
| a convolution without groups                                | a product of patches                                   |
| a convolution, a bias, rectified linear units and 2 x 2 max  | one product for the four outputs of a maximum, or a    |
| pooling, in this order or with the units last                | kernel on NVIDIA GPUs                                  |
| max and mean pooling of windows that do not overlap          | a reshape; the gradient needs the argmax alone         |
| a layer of few outputs                                      | a product whose operands are transposed in memory      |
| on CPUs, any other dense layer                               | the same, with the gradient of its weights as a         |
|                                                              | product whose smaller operand is transposed in memory  |

What no rule recognizes stays as it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Literal, Var

from fedhdp.engine import kernels
from fedhdp.engine.patches import (
    Convolution,
    convolve,
    convolve_and_pool,
    dense,
    dense_rows,
    few_outputs,
    materialized_transpose,
    max_pool,
    on_cpu,
    sum_pool,
)
from fedhdp.engine.tracing import Program, dtype_of, inner_program, shape_of
from fedhdp.models import Array

FEW_OUTPUTS = 16  # of a layer whose weights are transposed before its product
MAX_TAPS = 128  # pixels of a kernel, up to which patches are written out


class Used(NamedTuple):
    """How often rules were used, and for what they were not."""

    convolutions: int = 0
    poolings: int = 0
    left: tuple[str, ...] = ()  # what stays as it is, and why


def rewrite(program: Program, transposed: Sequence[int] = ()) -> Used:
    """Replace what the rules recognize.

    Args:
        program: The program.
        transposed: The parameters that are stored transposed while clients train, by their numbers.

    Returns:
        How often each rule was used.
    """
    reasons = [(eqn, _why_left(eqn)) for eqn in program.eqns if eqn.primitive.name in _NOUNS]
    poolings = [eqn for eqn, why in reasons if why is None and eqn.primitive.name in _POOLINGS]
    for eqn in poolings:
        pool = partial(_POOLINGS[eqn.primitive.name], window=eqn.params["window_dimensions"])
        program.replace(eqn.outvars[0], eqn.invars, pool)
    for eqn in program.eqns:
        if (layer := _find_dense(program, eqn)) is None:
            continue
        if _has_few_outputs(eqn, layer):
            program.replace(eqn.outvars[0], eqn.invars, partial(_few_outputs, eqn, layer.side))
        elif on_cpu():
            has_rows = layer.layout == "rows" or layer.weight in transposed
            program.replace(eqn.outvars[0], eqn.invars, partial(_dense, eqn, layer, has_rows))
    convolutions = [eqn for eqn, why in reasons if why is None and eqn.primitive.name == CONVOLUTION]
    for eqn in convolutions:
        if (pooled := _find_pooled(program, eqn)) is not None:
            program.replace(pooled.output, pooled.inputs, partial(_pooled, eqn, pooled))
        else:
            program.replace(eqn.outvars[0], eqn.invars, partial(_convolution, eqn))
    left = [f"{_NOUNS[eqn.primitive.name]} ({why})" for eqn, why in reasons if why is not None]
    return Used(len(convolutions), len(poolings), tuple(left))


CONVOLUTION = "conv_general_dilated"
_POOLINGS: dict[str, Callable[..., Array]] = {"reduce_window_max": max_pool, "reduce_window_sum": sum_pool}
_NOUNS = {CONVOLUTION: "convolution"} | dict.fromkeys(_POOLINGS, "pooling")


def _why_left(eqn: JaxprEqn) -> str | None:
    """Why a convolution or a pooling stays as it is; None where a rule replaces it."""
    return _why_no_patches(eqn) if eqn.primitive.name == CONVOLUTION else _why_no_reshape(eqn)


def _why_no_reshape(eqn: JaxprEqn) -> str | None:
    """Why a pooling is no reshape."""
    params, shape = eqn.params, shape_of(eqn.invars[0])
    window = tuple(params["window_dimensions"])
    if any(map(any, params["padding"])) or any(n < w for n, w in zip(shape, window, strict=True)):
        return "padding"
    if {*params["base_dilation"], *params["window_dilation"]} - {1}:
        return "dilation"
    if window != tuple(params["window_strides"]):
        return "its windows overlap or leave gaps"
    if not jnp.issubdtype(dtype_of(eqn.invars[0]), jnp.floating):
        return "integers"
    return None if 1 < max(window) <= MAX_TAPS else f"windows of {max(window)}"


def _why_no_patches(eqn: JaxprEqn) -> str | None:
    """Why a convolution is no product of patches."""
    params, (image, weight), (out,) = eqn.params, eqn.invars, eqn.outvars
    if (params["feature_group_count"], params["batch_group_count"]) != (1, 1):
        return "groups"
    if len({dtype_of(image), dtype_of(weight), dtype_of(out)}) > 1:
        return "mixed types"
    if math.prod(shape_of(out)) == 0:
        return "no outputs"
    taps = math.prod(shape_of(weight)[axis] for axis in params["dimension_numbers"].rhs_spec[2:])
    return None if taps <= MAX_TAPS else f"a kernel of {taps} pixels"


def _ordered(eqn: JaxprEqn, image: Array, weight: Array) -> tuple[Array, Array]:
    """Images [N, *pixels, inputs] and weights [*kernel, inputs, outputs] of a convolution."""
    numbers = eqn.params["dimension_numbers"]
    n, channel, *pixels = numbers.lhs_spec
    output, inputs, *kernel = numbers.rhs_spec
    return image.transpose(n, *pixels, channel), weight.transpose(*kernel, inputs, output)


def _convolution(eqn: JaxprEqn, image: Array, weight: Array) -> Array:
    params = eqn.params
    names = ("window_strides", "padding", "lhs_dilation", "rhs_dilation", "precision")
    out = convolve(*_ordered(eqn, image, weight), Convolution(*(params[name] for name in names)))
    n, channel, *pixels = params["dimension_numbers"].out_spec
    return out.transpose(np.argsort((n, *pixels, channel)))


class Dense(NamedTuple):
    """A product with a parameter, as one of matrices."""

    weight: int  # the number of the parameter among the leaves
    side: int  # of the parameter
    inputs: int
    outputs: int
    layout: str  # of the parameter: "columns" is a matrix [inputs, outputs], "rows" is [*outputs, *inputs]


def _find_dense(program: Program, eqn: JaxprEqn) -> Dense | None:
    """The product of a value with a parameter; None for other equations."""
    sides = [side for side, atom in enumerate(eqn.invars) if atom in program.leaves]
    if eqn.primitive.name != "dot_general" or len(sides) != 1:
        return None
    (axes_of, batch), side = eqn.params["dimension_numbers"], sides[0]
    is_float = {dtype_of(atom) for atom in (*eqn.invars, *eqn.outvars)} == {jnp.dtype(jnp.float32)}
    if any(batch) or not axes_of[0] or not is_float or math.prod(shape_of(eqn.outvars[0])) == 0:
        return None
    shape, axes = shape_of(eqn.invars[side]), axes_of[side]
    inputs = math.prod(shape[axis] for axis in axes)
    outputs = math.prod(shape) // inputs if inputs else 0
    layout = "columns" if len(shape) == 2 and axes == (0,) else "other" if 0 in axes else "rows"
    return Dense(program.leaves.index(eqn.invars[side]), side, inputs, outputs, layout) if outputs else None


def _has_few_outputs(eqn: JaxprEqn, layer: Dense) -> bool:
    """Whether a layer is a product of two matrices, summed over one axis, with few outputs."""
    are_matrices = all(len(shape_of(atom)) == 2 for atom in eqn.invars)
    sums_one_axis = len(eqn.params["dimension_numbers"][0][0]) == 1
    return are_matrices and sums_one_axis and eqn.params["precision"] is None and layer.outputs <= FEW_OUTPUTS


def transposed_weights(program: Program, first: int | None) -> list[int]:
    """The numbers of the parameters [inputs, outputs] that are stored transposed while clients train.

    They are the weights of layers of few outputs, and on CPUs of all layers with fewer outputs than inputs.

    Args:
        program: The program.
        first: The number of the first layer's weights, which may be trained by low-rank updates.
    """
    weights = set()
    for eqn in program.eqns:
        layer = _find_dense(program, eqn)
        if layer is not None and layer.layout == "columns":
            narrows = on_cpu() and layer.outputs < layer.inputs and layer.weight != first
            if _has_few_outputs(eqn, layer) or narrows:
                weights.add(layer.weight)
    return sorted(weights)


def _few_outputs(eqn: JaxprEqn, side: int, *operands: Array) -> Array:
    (axes, _), weight, h = eqn.params["dimension_numbers"], operands[side], operands[1 - side]
    w_LH = weight if axes[side][0] == 1 else materialized_transpose(weight)
    h_NH = h if axes[1 - side][0] == 1 else h.T
    out_NL = few_outputs(h_NH, w_LH)
    return out_NL if side == 1 else out_NL.T


def _dense(eqn: JaxprEqn, layer: Dense, has_rows: bool, *operands: Array) -> Array:
    """The product, from weights with a row (``has_rows``) or a column for each output."""
    axes_of, _ = eqn.params["dimension_numbers"]
    (weight, x), (paired, axes) = (pair if layer.side == 0 else pair[::-1] for pair in (operands, axes_of))
    free_w, free_x = ([a for a in range(of.ndim) if a not in taken] for of, taken in ((weight, paired), (x, axes)))
    x_NF, precision = x.transpose(*free_x, *axes).reshape(-1, layer.inputs), eqn.params["precision"]
    if has_rows:
        out_NH = dense_rows(x_NF, weight.transpose(*free_w, *paired).reshape(layer.outputs, layer.inputs), precision)
    else:
        out_NH = dense(x_NF, weight.transpose(*paired, *free_w).reshape(layer.inputs, layer.outputs), precision)
    return (out_NH.T if layer.side == 0 else out_NH).reshape(shape_of(eqn.outvars[0]))


class PooledConvolution(NamedTuple):
    """A convolution whose maxima over 2 x 2 pixels alone are used."""

    output: Var  # the maxima, with bias and units if these are next to the pooling
    axes: str  # of the maxima, as they are in the output, without those of size 1: a part of NHWC
    has_units: bool
    inputs: tuple[Any, ...]  # images and weights, and the bias if there is one


def _pooled(eqn: JaxprEqn, pooled: PooledConvolution, image: Array, weight: Array, *bias: Array) -> Array:
    """The maximum is taken before the bias is added and before the units, which are monotone."""
    images, weights = _ordered(eqn, image, weight)
    padding, precision = eqn.params["padding"], eqn.params["precision"]
    if bias and pooled.has_units:
        out = kernels.conv_relu_pool(images, weights, bias[0].reshape(-1), padding, precision)
    else:
        of_outputs = bias[0].reshape(-1) if bias else None
        out = convolve_and_pool(images, weights, padding, precision, of_outputs, pooled.has_units)
    order = sorted(range(4), key=lambda axis: (pooled.axes + "NHWC").index("NHWC"[axis]))
    return out.transpose(order).reshape(shape_of(pooled.output))


def _find_pooled(program: Program, eqn: JaxprEqn) -> PooledConvolution | None:
    """A convolution of stride 1 that leads through a bias, units and changes of layout to 2 x 2 max pooling alone."""
    params, var = eqn.params, eqn.outvars[0]
    if len(shape_of(var)) != 4 or {*params["window_strides"], *params["lhs_dilation"], *params["rhs_dilation"]} != {1}:
        return None
    label_of = dict(zip(params["dimension_numbers"].out_spec, "NCHW", strict=True))
    outputs = shape_of(var)[params["dimension_numbers"].out_spec[1]]
    axes, bias, has_units, is_pooled = [label_of[axis] for axis in _long(var)], None, False, False
    pooled = None
    while (consumer := program.only_consumer(var)) is not None:
        after, name = consumer.outvars[0], consumer.primitive.name
        if name == "add" and bias is None and not has_units:
            other = next(atom for atom in consumer.invars if atom is not var)
            axis = _long(var)[axes.index("C")] if "C" in axes else 0
            bias = along_axis(program, other, axis, outputs) if shape_of(after) == shape_of(var) else None
            if bias is None:
                break
        elif is_relu(consumer) and not has_units:
            has_units = True
        elif name == "reduce_window_max" and not is_pooled and _why_left(consumer) is None:
            window = dict(zip(range(len(shape_of(var))), consumer.params["window_dimensions"], strict=True))
            sizes = {label: window.pop(axis) for axis, label in zip(_long(var), axes, strict=True)}
            if set(window.values()) - {1} or {k: v for k, v in sizes.items() if v > 1} != {"H": 2, "W": 2}:
                break
            kept = [shape_of(after)[axis] > 1 for axis in _long(var)]
            axes, is_pooled = [label for label, is_kept in zip(axes, kept, strict=True) if is_kept], True
        elif (moved := _moved(consumer, axes)) is not None:
            axes = moved
        else:
            break
        var = after
        if is_pooled:
            inputs = (*eqn.invars, *([] if bias is None else [bias]))
            pooled = PooledConvolution(var, "".join(axes), has_units, inputs)
    return pooled


def _long(var: Var) -> list[int]:
    """The axes of more than one number."""
    return [axis for axis, size in enumerate(shape_of(var)) if size > 1]


def _moved(eqn: JaxprEqn, axes: list[str]) -> list[str] | None:
    """The axes after a change of layout, without those of size 1; None for anything else."""
    before, after, name = eqn.invars[0], eqn.outvars[0], eqn.primitive.name
    if isinstance(before, Literal) or len(eqn.invars) > 1:
        return None
    if name == "transpose":
        label_of = dict(zip(_long(before), axes, strict=True))
        return [label_of[axis] for axis in eqn.params["permutation"] if axis in label_of]
    sizes = [[shape_of(var)[axis] for axis in _long(var)] for var in (before, after)]
    return axes if name in ("reshape", "squeeze", "broadcast_in_dim") and sizes[0] == sizes[1] else None


def along_axis(program: Program, atom: Any, axis: int, size: int) -> Var | None:
    """A variable of so many numbers that another one repeats, each at its place along an axis."""
    while isinstance(atom, Var):
        if math.prod(shape_of(atom)) == size:
            return atom if set(_long(atom)) <= {axis} else None
        eqn = program.producer(atom)
        if eqn is None or eqn.primitive.name != "broadcast_in_dim":
            return None
        dimensions = list(eqn.params["broadcast_dimensions"])
        if size > 1 and axis not in dimensions:
            return None
        atom, axis = eqn.invars[0], dimensions.index(axis) if axis in dimensions else 0
    return None


def is_relu(eqn: JaxprEqn) -> bool:
    """Whether it is ``jax.nn.relu``, whose derivative at 0 is 0."""
    if eqn.primitive.name != "custom_jvp_call":
        return False
    while (inner := inner_program(eqn)) is not None:
        if len(inner.jaxpr.eqns) != 1:
            return False
        eqn = inner.jaxpr.eqns[0]
    zero = [atom.val for atom in eqn.invars if isinstance(atom, Literal)]
    return eqn.primitive.name == "max" and len(zero) == 1 and np.ndim(zero[0]) == 0 and zero[0] == 0

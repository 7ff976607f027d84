"""A model as the engine computes it: traced, rewritten, and taken apart into what is by row and the rest.

Axis letters: M examples of a client, B examples of a batch, N examples, F inputs and H units of the first layer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Var

from fedhdp.client import LocalTraining
from fedhdp.engine.rewrite import Used, rewrite, transposed_weights
from fedhdp.engine.rows import Rows, kinds, same_rows
from fedhdp.engine.span import FirstLayer, find_first_layer
from fedhdp.engine.tracing import Program, shape_of
from fedhdp.models import Array, Model, Parameters

LAYOUT = {"reshape", "transpose", "squeeze", "broadcast_in_dim", "slice", "rev"}  # finite inputs stay finite


class TracedNetwork:
    """The rewritten program for one number of examples.

    Attributes:
        first_layer: The first layer, if there is one.
        hoisted: What is by row and the rest of the program reads.
        hoisted_beside: The same, where the outputs of the first layer are known.
        transposed: The parameters, by their numbers, that are transposed while clients train.
    """

    def __init__(self, model: Model, like: Parameters, x_N: jax.ShapeDtypeStruct, has_key: bool):
        self.program = Program(model.apply, like, x_N, has_key)
        self.transposed, self.used = [], Used()
        if not self.program.effects:
            first = self.first_layer
            self.transposed = transposed_weights(self.program, None if first is None else first.weight)
            self.used = rewrite(self.program, self.transposed)

    @cached_property
    def kind_of(self) -> dict[Var, Any]:
        """The kinds of all variables."""
        return kinds(self.program)

    @cached_property
    def first_layer(self) -> FirstLayer | None:
        return find_first_layer(self.program, self.kind_of)

    @cached_property
    def hoisted(self) -> list[Var]:
        return self._hoisted(None)

    @cached_property
    def hoisted_beside(self) -> list[Var]:
        assert self.first_layer is not None
        return self._hoisted(self.first_layer.output)

    def _hoisted(self, known: Var | None) -> list[Var]:
        needed, hoisted = {self.program.output}, []
        for node in reversed(self.program.nodes):
            if not needed & set(node.outputs) or known in node.outputs:
                continue
            for atom in node.inputs:
                if isinstance(self.kind_of.get(atom) if isinstance(atom, Var) else None, Rows):
                    hoisted.append(atom)
                elif isinstance(atom, Var):
                    needed.add(atom)
        return self._within_size(list(dict.fromkeys(reversed(hoisted))))

    def _within_size(self, hoisted: list[Var]) -> list[Var]:
        """These variables; the inputs instead where they are more than twice as many numbers."""
        numbers: int = sum(math.prod(shape_of(var)) for var in hoisted)
        return hoisted if numbers <= 2 * math.prod(shape_of(self.program.x)) else [self.program.x]

    def values(self, x_N: Array, variables: Sequence[Var]) -> list[Array]:
        """Variables that are by row, with the examples along the first axis."""
        values = self.program.evaluate({self.program.x: x_N}, variables)
        return [jnp.moveaxis(value, self.kind_of[var].axis, 0) for var, value in zip(variables, values, strict=True)]

    def bind_rows(self, variables: Sequence[Var], values: Sequence[Array]) -> dict[Var, Array]:
        """What ``values`` returned, as known variables."""
        return {v: jnp.moveaxis(value, 0, self.kind_of[v].axis) for v, value in zip(variables, values, strict=True)}

    def agrees(self, other: TracedNetwork) -> bool:
        """Whether both take the network apart in the same way, and compute what is by row alike."""
        if (self.first_layer is None) != (other.first_layer is None):
            return False
        pairs = [(self.hoisted, other.hoisted)]
        if self.first_layer is not None and other.first_layer is not None:
            a, b = self.first_layer, other.first_layer
            if (a.weight, a.bias, a.inputs, a.units) != (b.weight, b.bias, b.inputs, b.units):
                return False
            pairs += [(self.hoisted_beside, other.hoisted_beside), ([a.rows, a.operand], [b.rows, b.operand])]
        places = [[self._places(a), other._places(b)] for a, b in pairs]
        variables = [var for a, _ in pairs for var in a]
        same_places = all(a == b for a, b in places)
        return same_places and same_rows(self.program, other.program, variables, self.kind_of)

    def _places(self, variables: Sequence[Var]) -> list[tuple[int | None, Any]]:
        """Where variables are in the program, and their kinds."""
        return [(self.program.number_of.get(var), self.kind_of.get(var)) for var in variables]


class SplitNetwork:
    """A network for clients of one capacity: what is computed once for a client's examples, and what in every step.

    Attributes:
        first_layer: The first layer, if it can be trained in the span of a client's examples.
        keeps_finite: Whether its rows are finite where the inputs are.
    """

    def __init__(self, network: Network, capacity: int):
        self.of_client = network.traced(capacity, has_key=True)
        self._network = network
        self.is_split = not self.of_client.program.effects and all(
            self.of_client.agrees(network.traced(size, has_key=True)) for size in network.batch_sizes(capacity)
        )
        first = None if self.of_client.program.effects else self.of_client.first_layer
        self.first_layer = first if self.is_split and network.is_plain_sgd else None
        self._transposed_leaves = set(self.of_client.transposed) - {None if first is None else first.weight}

    @property
    def has_bias(self) -> bool:
        """Whether the first layer has a bias, which is then trained with its weights."""
        return self.first_layer is not None and self.first_layer.bias is not None

    def transpose(self, parameters: Parameters) -> Parameters:
        """Parameters, under any leading axes, in the layout of training, and back: a step transposes no weights."""
        leaves, tree = jax.tree.flatten(parameters)
        return jax.tree.unflatten(tree, [self._transposed(leaf, number) for number, leaf in enumerate(leaves)])

    def _transposed(self, leaf: Array, number: int) -> Array:
        return jnp.swapaxes(leaf, -1, -2) if number in self._transposed_leaves else leaf

    @property
    def keeps_finite(self) -> bool:
        assert self.first_layer is not None
        return LAYOUT.issuperset(self.of_client.program.primitives([self.first_layer.rows]))

    @property
    def once(self) -> list[str]:
        """The arithmetic that is done once, by its primitives."""
        traced, first = self.of_client, self.first_layer
        if not self.is_split:
            return []
        variables = traced.hoisted if first is None else [first.rows, *traced.hoisted_beside]
        return list(dict.fromkeys(name for name in traced.program.primitives(variables) if name not in LAYOUT))

    def rows(self, x_M: Array) -> list[Array]:
        """What is computed once."""
        return self.of_client.values(x_M, self.of_client.hoisted) if self.is_split else [x_M]

    def apply(self, parameters: Parameters, rows_B: Sequence[Array], examples: int, key: Array) -> Array:
        """The outputs of a batch of so many examples, from parameters in the layout of training."""
        parameters = self.transpose(parameters)
        if not self.is_split:
            return self._network.apply(parameters, rows_B[0], key)
        traced = self._network.traced(examples, has_key=True)
        known = traced.program.bind_parameters(jax.tree.leaves(parameters), key) | traced.bind_rows(
            traced.hoisted, rows_B
        )
        return traced.program.evaluate(known, [traced.program.output])[0]

    def first_rows(self, x_M: Array) -> tuple[Array, list[Array]]:
        """The rows of the first layer as a matrix [M, F], and what else is computed once."""
        assert self.first_layer is not None
        rows, *others = self.of_client.values(x_M, [self.first_layer.rows, *self.of_client.hoisted_beside])
        return rows.reshape(len(rows), -1), others

    def apply_rest(self, rest: Sequence[Array], output_BH: Array, others_B: Sequence[Array], key: Array) -> Array:
        """The outputs of a batch from those of the first layer.

        Args:
            rest: The other parameters in order, in the layout of training.
            output_BH: The outputs of the first layer.
            others_B: What else was computed once.
            key: For dropout.
        """
        traced = self._network.traced(len(output_BH), has_key=True)
        layer = traced.first_layer
        assert layer is not None
        remaining, taken = iter(rest), (layer.weight, layer.bias)
        numbers = range(len(traced.program.leaves))
        leaves = [None if n in taken else self._transposed(next(remaining), n) for n in numbers]
        known = traced.program.bind_parameters(leaves, key) | traced.bind_rows(traced.hoisted_beside, others_B)
        known[layer.output] = layer.place(output_BH)
        return traced.program.evaluate(known, [traced.program.output])[0]


class Network:
    """A model, rewritten for the numbers of examples that it meets.

    Args:
        model: The model.
        x: The shape and type of one input as the model gets it.
        training: How clients train.
    """

    def __init__(self, model: Model, x: jax.ShapeDtypeStruct, training: LocalTraining):
        self.model, self.x, self.training = model, x, training
        self.like = jax.eval_shape(model.init, jax.random.key(0))
        self._traced: dict[tuple[int, bool], TracedNetwork] = {}
        self._split: dict[int, SplitNetwork] = {}

    @property
    def is_plain_sgd(self) -> bool:
        """Whether a step is the gradient times the rate, which alone keeps a layer in the span of the examples."""
        return self.training.is_plain_sgd

    def batch_sizes(self, capacity: int) -> set[int]:
        """The sizes of the batches of clients with this capacity."""
        size = min(self.training.batch_size, capacity)
        return {size, capacity % size or size}

    def traced(self, examples: int, has_key: bool) -> TracedNetwork:
        """The network for so many examples."""
        if (examples, has_key) not in self._traced:
            x_N = jax.ShapeDtypeStruct((examples, *self.x.shape), self.x.dtype)
            self._traced[examples, has_key] = TracedNetwork(self.model, self.like, x_N, has_key)
        return self._traced[examples, has_key]

    def split(self, capacity: int) -> SplitNetwork:
        """The network for clients of this capacity."""
        if capacity not in self._split:
            self._split[capacity] = SplitNetwork(self, capacity)
        return self._split[capacity]

    def apply(self, parameters: Parameters, x_N: Array, key: Array | None) -> Array:
        """What the model's ``apply`` returns."""
        program = self.traced(len(x_N), key is not None).program
        if program.effects:  # which evaluation would leave out
            return self.model.apply(parameters, x_N, key)
        known = program.bind_parameters(jax.tree.leaves(parameters), key) | {program.x: x_N}
        return program.evaluate(known, [program.output])[0]

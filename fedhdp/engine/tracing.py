"""A model's ``apply`` as a program: traced once, with nested calls written out, evaluated from any of its variables on.

A *node* computes some variables from others. It is one equation of the traced program, until a rule replaces it by a faster
one (see ``rewrite.py``). Evaluation runs the nodes that are needed, and no others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr, DropVar, Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun

from fedhdp.models import Array, Parameters

CALLS = {"jit", "pjit", "closed_call", "core_call"}  # that are written out; derivatives of one's own are kept


class Node(NamedTuple):
    """Variables that are computed together."""

    inputs: tuple[Var | Literal, ...]
    outputs: tuple[Var, ...]
    run: Callable[..., Sequence[Any]]


class Program:
    """A traced function of parameters, inputs and a random key.

    Args:
        apply: The function, as in ``Model``.
        like: The shapes of its parameters.
        x_N: The shape of its inputs.
        has_key: Whether the key is given, or None.

    Attributes:
        leaves: The variables of the parameters, in the order of the tree.
        x: The variable of the inputs.
        eqns: The equations, in order.
        nodes: A node for each equation; rules replace them.
        output: The result.
        effects: Whether it does more than compute, such as print.
    """

    def __init__(self, apply: Callable, like: Parameters, x_N: jax.ShapeDtypeStruct, has_key: bool):
        keys = (jax.eval_shape(lambda: jax.random.key(0)),) if has_key else ()
        leaves, tree = jax.tree.flatten(like)

        def of_leaves(leaves: list[Array], x_N: Array, *keys: Array) -> Array:
            return apply(jax.tree.unflatten(tree, leaves), x_N, keys[0] if keys else None)

        nested = jax.make_jaxpr(of_leaves)(leaves, x_N, *keys)
        closed = jax.make_jaxpr(lambda *values: _write_out(nested.jaxpr, nested.consts, values))(*nested.in_avals)
        jaxpr = closed.jaxpr
        self.leaves, (self.x, *self.keys) = jaxpr.invars[: len(leaves)], jaxpr.invars[len(leaves) :]
        self.constants = dict(zip(jaxpr.constvars, closed.consts, strict=True))
        self.eqns: list[JaxprEqn] = jaxpr.eqns
        self.output: Var | Literal = jaxpr.outvars[0]
        self.effects = bool(jaxpr.effects)
        self.examples = x_N.shape[0]
        self.nodes = [_node(jaxpr, eqn) for eqn in self.eqns]
        self.number_of = {var: number for number, eqn in enumerate(self.eqns) for var in eqn.outvars}
        inputs = (atom for eqn in self.eqns for atom in eqn.invars)
        self.uses = Counter(atom for atom in (*inputs, self.output) if isinstance(atom, Var))

    def producer(self, atom: Any) -> JaxprEqn | None:
        """The equation that computes a variable; None for what the program is given."""
        return self.eqns[self.number_of[atom]] if isinstance(atom, Var) and atom in self.number_of else None

    def consumers(self, var: Var) -> list[JaxprEqn]:
        """The equations that read a variable."""
        return [eqn for eqn in self.eqns if any(atom is var for atom in eqn.invars)]

    def only_consumer(self, var: Var) -> JaxprEqn | None:
        """The equation that reads a variable, where it is the only use of it."""
        return self.consumers(var)[0] if self.uses[var] == 1 and var is not self.output else None

    def replace(self, output: Var, inputs: Iterable[Var | Literal], function: Callable[..., Array]) -> None:
        """Compute a variable by this function of these variables instead."""
        number = self.number_of[output]
        assert len(self.eqns[number].outvars) == 1, "a node with several outputs cannot be replaced"
        self.nodes[number] = Node(tuple(inputs), (output,), lambda *values: [function(*values)])

    def evaluate(self, known: Mapping[Var, Any], variables: Sequence[Var | Literal]) -> list[Any]:
        """The values of some variables, from those of others."""
        values = {**self.constants, **known}
        needed, steps = {atom for atom in variables if isinstance(atom, Var)} - values.keys(), []
        for node in reversed(self.nodes):
            if needed & set(node.outputs):
                steps.append(node)
                needed |= {atom for atom in node.inputs if isinstance(atom, Var)} - values.keys()

        def value(atom: Var | Literal) -> Any:
            return atom.val if isinstance(atom, Literal) else values[atom]

        for node in reversed(steps):
            values |= dict(zip(node.outputs, node.run(*map(value, node.inputs)), strict=True))
        return [value(atom) for atom in variables]

    def primitives(self, variables: Sequence[Var]) -> list[str]:
        """The names of the primitives that compute some variables, in order."""
        needed, names = set(variables), []
        for eqn in reversed(self.eqns):
            if needed & set(eqn.outvars):
                names.append(eqn.primitive.name)
                needed |= {atom for atom in eqn.invars if isinstance(atom, Var)}
        return names[::-1]

    def bind_parameters(self, leaves: Sequence[Any], key: Any) -> dict[Var, Any]:
        """Parameters and the key as known variables; parameters that are None are not known."""
        known = {var: leaf for var, leaf in zip(self.leaves, leaves, strict=True) if leaf is not None}
        return known | dict.fromkeys(self.keys, key)


def _node(jaxpr: Jaxpr, eqn: JaxprEqn) -> Node:
    """The node that computes an equation, as a program of its own."""
    inputs = list(dict.fromkeys(atom for atom in eqn.invars if isinstance(atom, Var)))
    outputs = [var for var in eqn.outvars if not isinstance(var, DropVar)]
    alone = jaxpr.replace(constvars=[], invars=inputs, outvars=outputs, eqns=[eqn])
    return Node(tuple(inputs), tuple(outputs), jaxpr_as_fun(ClosedJaxpr(alone, [])))


def _write_out(jaxpr: Jaxpr, constants: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
    """Evaluate a program with the calls in it, so that tracing this gives one without."""
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*constants, *inputs), strict=True))

    def value(atom: Var | Literal) -> Any:
        return atom.val if isinstance(atom, Literal) else values[atom]

    for eqn in jaxpr.eqns:
        inner = inner_program(eqn) if eqn.primitive.name in CALLS else None
        if inner is not None:
            outputs = _write_out(inner.jaxpr, inner.consts, [value(atom) for atom in eqn.invars])
            values |= dict(zip(eqn.outvars, outputs, strict=True))
        else:
            node = _node(jaxpr, eqn)
            values |= dict(zip(node.outputs, node.run(*map(value, node.inputs)), strict=True))
    return [value(atom) for atom in jaxpr.outvars]


def inner_program(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """The program that an equation calls."""
    inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
    return ClosedJaxpr(inner, ()) if isinstance(inner, Jaxpr) and not inner.constvars else inner


def shape_of(atom: Any) -> tuple[int, ...]:
    """The shape of a variable or a literal."""
    return atom.aval.shape


def dtype_of(atom: Any) -> Any:
    """The type of a variable's or a literal's numbers."""
    return atom.aval.dtype

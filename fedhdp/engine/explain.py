"""Which path a network takes through the engine, and why, in one line."""

from __future__ import annotations

import jax

from fedhdp.engine.low_rank import MAX_INPUTS, uses_low_rank
from fedhdp.engine.network import Network
from fedhdp.server import Layers


def explain(network: Network, capacity: int, layers: Layers | None = None) -> str:
    """How a network is trained.

    Args:
        network: The network.
        capacity: The examples of a client, padded.
        layers: The layers that are clipped one by one; None with a flat clip.
    """
    traced = network.split(capacity).of_client
    if traced.program.effects:
        return "as it is: the network has side effects, such as those of jax.debug.print"
    parts, used = [_first_layer(network, capacity, layers)], traced.used
    if used.convolutions:
        parts.append(f"{_count(used.convolutions, 'convolution')} as products of patches")
    if used.poolings:
        parts.append(f"{_count(used.poolings, 'pooling')} as reshapes")
    if used.left:
        parts.append(f"as they are: {', '.join(dict.fromkeys(used.left))}")
    hoisted = network.split(capacity).once
    if hoisted:
        parts.append(f"once a round for a client's examples: {', '.join(hoisted)}")
    return "; ".join(parts)


def _first_layer(network: Network, capacity: int, layers: Layers | None) -> str:
    split = network.split(capacity)
    first = split.of_client.first_layer
    if first is None:
        reason = "no float32 product of the inputs with a parameter that is used nowhere else was found"
        return f"first layer: by all parameters, as {reason}"
    paths = [
        jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in jax.tree.leaves_with_path(network.like)
    ]
    name = f"{paths[first.weight]} ({first.inputs} inputs → {first.units} units)"
    if uses_low_rank(network, capacity, layers):
        return f"first layer: {name} is trained in the span of a client's {_count(capacity, 'example')}"
    if not network.training.is_plain_sgd:
        reason = "the optimizer is not plain SGD"
    elif not split.is_split:
        reason = "it depends on the number of examples in a batch"
    elif capacity >= first.inputs:
        reason = f"a client has {capacity} examples, no fewer than inputs"
    elif first.inputs > MAX_INPUTS:
        reason = f"more than {MAX_INPUTS} inputs leave no bound on rounding"
    else:
        reason = "the clip divides weights and bias"
    return f"first layer: {name} by all parameters, as {reason}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")

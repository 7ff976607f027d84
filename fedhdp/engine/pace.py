"""In which order many clients take their batches: all the same one at a time, or each at its own pace.

``step(epoch, first, size, held_C)`` trains on the batch that begins at example ``first`` and leaves alone who has no such
batch; ``epoch`` and ``first`` are one number for all, or one for each client. Either way a client takes its own batches
in its own order, so the results are the same.

Axis letters: C clients.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from fedhdp.models import Array, Parameters, take

FEW = 4  # batches that are worth a copy of what is known of them
Step = Callable[..., Parameters]


def together(
    step: Step, know: Callable, held_C: Parameters, epochs: range, size: int, batches: int | Array, rest: int = 0
) -> Parameters:
    """Every client takes the same batch at a time: so many that are whole, then one of what is left.

    A few that everybody has (a number known beforehand) are looked at once for all epochs, others when their turn comes.
    """
    known = []
    if isinstance(batches, int) and batches + (rest > 0) <= FEW:
        cuts = [(batch * size, size) for batch in range(batches)] + [(batches * size, rest)] * (rest > 0)
        known = [(*cut, know(*cut)) for cut in cuts]

    def of_epoch(epoch: Array, held_C: Parameters) -> Parameters:
        if known:
            for first, many, of_batch in known:
                held_C = step(epoch, first, many, held_C, of_batch)
            return held_C
        held_C = jax.lax.fori_loop(0, batches, lambda batch, held_C: step(epoch, batch * size, size, held_C), held_C)
        return step(epoch, batches * size, rest, held_C) if rest else held_C

    return jax.lax.fori_loop(epochs.start, epochs.stop, of_epoch, held_C)


def apart(step: Step, held_C: Parameters, epochs: range, size: int, batches_C: Array) -> Parameters:
    """Each client goes through its batches at its own pace; when the last ones are done, the others go on without them.

    Fast where those with most batches come first.
    """

    def turn(number: Array, held_C: Parameters) -> Parameters:
        each_C = batches_C[: jax.tree.leaves(held_C)[0].shape[0]]
        epoch_C = number // jnp.maximum(each_C, 1)
        batch_C = jnp.where(epoch_C < len(epochs), number - epoch_C * each_C, each_C)  # one too many: it is done
        return step(epochs.start + epoch_C, batch_C * size, size, held_C)

    def turns(number: Array, held_C: Parameters) -> Parameters:
        """As many as there are epochs: everybody is done after a multiple of that, and it is known beforehand."""
        first = number * len(epochs)
        return jax.lax.fori_loop(first, first + len(epochs), turn, held_C)

    done: list[Parameters] = []
    begun, clients = jnp.int32(0), _fewer(len(batches_C))
    for here, left in zip(clients, [*clients[1:], 0]):
        held_C = take(held_C, slice(here))
        until = jnp.maximum(begun, jnp.max(batches_C[left:]))
        held_C = jax.lax.fori_loop(begun, until, turns, held_C)
        done.insert(0, take(held_C, slice(left, None)))
        begun = until
    return jax.tree.map(lambda *parts: jnp.concatenate(parts), *done)


def _fewer(clients: int) -> list[int]:
    """How many train at a time while others get done: all, then an eighth of them less each time, or 8."""
    return list(range(clients, 0, -max(8, -(-clients // 8))))

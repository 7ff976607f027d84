"""A round with exact arithmetic: the devices train and return every client's update, the host sums them in integers.

All updates of a cohort are in memory at a time: slots × runs × parameters, in single precision.

Axis letters: K clients of the population, C slots of the cohort, R global models, G groups, P parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from fedhdp.engine.placement import CohortLayout
from fedhdp.engine.round import Engine, ExampleArrays, RoundParamsBatch
from fedhdp.exact import ExactRound, RandomBytes
from fedhdp.mechanism import Mechanism
from fedhdp.models import Array, Parameters
from fedhdp.server import ServerState


def exact_round(
    engine: Engine,
    runs: Sequence[Mechanism],
    group_C: np.ndarray,
    layout: CohortLayout,
    random_bytes: Callable[[], RandomBytes],
    state_R: ServerState,
    *inputs: Parameters | ExampleArrays | RoundParamsBatch | Array | None,
) -> tuple[ServerState, Parameters | None, Array]:
    """One round of Algorithm 1.

    Args:
        engine: The engine, compiled for exact arithmetic.
        runs: The mechanism of every run.
        group_C: The group of the client in each slot.
        layout: Which slots have a client.
        random_bytes: Returns a run's source of random bytes.
        state_R: The server's states.
        *inputs: The other arguments of ``Engine.round``: personal models, examples, slots, constants, rates, and the key
            of the batches.

    Returns:
        The server's states and the personal models after the round, and a value that is ready with them.
    """
    segments = None if engine.config.layers is None else engine.config.layers.segments
    update_CRP, personal = engine.train_cohort(state_R, *inputs)
    sums_R = [
        ExactRound(run.grid_params, clip, engine.parameters, segments, random_bytes())
        for run, clip in zip(runs, np.asarray(state_R.clip), strict=True)
    ]  # whose noise is drawn before any update is read
    update_CRP = np.asarray(update_CRP)
    for slot in np.flatnonzero(layout.is_participating_C):
        for sums, update_P in zip(sums_R, update_CRP[slot], strict=True):
            sums.add(update_P, int(group_C[slot]))
    update_RP, clip_R = (np.stack(values) for values in zip(*(sums.finish() for sums in sums_R), strict=True))
    refused_RG = np.stack([sums.refused_G for sums in sums_R])
    released = engine.put((update_RP, clip_R, refused_RG), engine.replicated)
    state_R, done = engine.apply_updates(state_R, *released)
    return state_R, personal, done

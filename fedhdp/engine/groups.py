"""Which client is in which group: by the name of its level, never by its position.

Axis letters: K clients, G groups.
"""

from __future__ import annotations

import numpy as np

from fedhdp.data import FederatedData
from fedhdp.errors import DataError
from fedhdp.mechanism import Mechanism


def client_groups(data: FederatedData, mechanism: Mechanism, seed: int) -> np.ndarray:
    """Each client's group, as an index into the mechanism's groups.

    Args:
        data: The clients and their levels. Where these are not known, they are drawn at random by the groups' counts.
        mechanism: The groups.
        seed: Seed of the draw.

    Raises:
        DataError: If a level has no group, a group has no client, or a group's count is not that of the data.
    """
    if data.levels is None:
        if mechanism.clients != data.num_clients:
            message = f"groups have {mechanism.clients} clients in total, the data has {data.num_clients}"
            raise DataError(message, "groups", mechanism.clients)
        data = data.draw_levels({group.name: group.clients for group in mechanism.groups}, seed)
    group_K = data.level_indices([group.name for group in mechanism.groups])
    for group, members in zip(mechanism.groups, members_by_group(group_K, len(mechanism.groups)), strict=True):
        if len(members) != group.clients:
            message = f"group {group.name!r} has {group.clients} clients, but its level has {len(members)} in the data"
            raise DataError(message, f"clients of {group.name!r}", group.clients)
    return group_K


def members_by_group(group_K: np.ndarray, groups: int) -> list[np.ndarray]:
    """The numbers of each group's clients."""
    return [np.flatnonzero(group_K == group) for group in range(groups)]

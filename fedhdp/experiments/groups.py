"""Who is in which group of an experiment: by the data's own levels, by lists of ids, or drawn by counts and shares."""

from __future__ import annotations

import math

import numpy as np

from fedhdp.data import FederatedData, LevelSize, level_counts
from fedhdp.errors import ConfigError, DataError
from fedhdp.privacy.calibration import MechanismConfig


def opted_out(mechanism: MechanismConfig) -> list[str]:
    """The groups whose clients asked for no privacy."""
    return [group.name for group in mechanism.groups if group.epsilon == math.inf or group.noise_multiplier == 0]


def group_counts(mechanism: MechanismConfig, clients: int | None, levels: np.ndarray | None = None) -> dict | None:
    """The number of clients of each group; None where only the data knows it.

    Args:
        mechanism: The groups.
        clients: The number of all clients; None: not known.
        levels: The clients' levels; None: not known.

    Raises:
        DataError: If the groups' sizes do not add up to all clients.
    """
    names = [group.name for group in mechanism.groups]
    if levels is not None:
        return {name: int(np.sum(levels == name)) for name in names}
    sizes = {group.name: group.size for group in mechanism.groups}
    if clients is not None and None not in sizes.values():
        return level_counts(group_sizes(mechanism), clients)
    counts = {group.name: group.count for group in mechanism.groups}
    return None if None in counts.values() else counts


def skewed_clients(mechanism: MechanismConfig, clients: int, split: str) -> int:
    """The number of clients who hold one digit: in the skewed split those of the first group."""
    return level_counts(group_sizes(mechanism), clients)[mechanism.groups[0].name] if split == "skewed" else 0


def with_skewed_levels(data: FederatedData, mechanism: MechanismConfig, skewed: int, seed: int) -> FederatedData:
    """The data whose first clients, who hold one digit, have the level of the first group; the others' are drawn."""
    if skewed == 0:
        return data
    (first, _), *others = level_counts(group_sizes(mechanism), data.num_clients).items()
    return data.draw_levels({first: data.ids[:skewed].tolist(), **dict(others)}, seed)


def with_group_levels(data: FederatedData, mechanism: MechanismConfig, seed: int) -> FederatedData:
    """The data with each client's level: its own, or where it has none by the ids, counts and shares of the groups.

    Raises:
        ConfigError: If the data has no levels and a group has no size.
        DataError: If the data's levels are not those of the groups, or a group's clients or share are not the data's.
    """
    if data.levels is None:
        return data.draw_levels(group_sizes(mechanism), seed)
    index_K = data.level_indices([group.name for group in mechanism.groups])
    for index, group in enumerate(mechanism.groups):
        _check_size(f"mechanism.groups[{index}]", group.name, group.size, data, np.flatnonzero(index_K == index))
    return data


def group_sizes(mechanism: MechanismConfig) -> dict[str, LevelSize]:
    """The sizes of the groups, for data without levels."""
    sizes: dict[str, LevelSize] = {}
    for index, group in enumerate(mechanism.groups):
        if group.size is None:
            field = f"mechanism.groups[{index}].clients"
            raise ConfigError(f"{field} is missing, and so is share: the data has no levels", field)
        sizes[group.name] = group.size
    return sizes


def _check_size(path: str, name: str, size: LevelSize | None, data: FederatedData, members: np.ndarray) -> None:
    """Refuse a size that is not that of the clients of the data who have the group's level."""
    has = f"but the data has {len(members)} clients with the level {name!r}"
    if isinstance(size, float):
        if abs(size * data.num_clients - len(members)) >= 1:
            quota = f"{size:g} ({size * data.num_clients:g} of {data.num_clients} clients)"
            raise DataError(f"{path}.share is {quota}, {has}", f"{path}.share", size)
    elif isinstance(size, int):
        if size != len(members):
            raise DataError(f"{path}.clients is {size}, {has}", f"{path}.clients", size)
    elif size is not None:
        mismatches = sorted(set(size) ^ set(data.ids[members].tolist()))
        if mismatches:
            kind = "does not have" if mismatches[0] in size else "is missing, but has"
            message = f"{path}.clients: {mismatches[0]!r} {kind} the level {name!r} in the data"
            raise DataError(message, f"{path}.clients", mismatches[0])

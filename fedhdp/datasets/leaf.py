"""LEAF's FEMNIST: JSON shards, read one client at a time.

A shard is ``{"users": [...], "num_samples": [...], "user_data": {user: {"x": [[784 numbers]], "y": [label]}}}``. LEAF
writes train and test shards into folders of those names, or, before it splits, everything into ``all_data``; what is
not split is split here, nine tenths of each client's images to train. A shard is held as text and only one client's
numbers are ever decoded, so memory is bounded by the largest shard.

Axis letters: K clients, N images.
"""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import numpy as np

from fedhdp.datasets import stored
from fedhdp.datasets.femnist import CLASSES, PIXELS, SIDE, ink
from fedhdp.datasets.splitting import nine_tenths
from fedhdp.datasets.tff import Progress


class _Shard(msgspec.Struct):
    users: list[str]
    num_samples: list[int]
    user_data: dict[str, msgspec.Raw]  # views of the text, not yet decoded


class _User(msgspec.Struct):
    x: list[list[float]]
    y: list[int]


def part_of(path: Path) -> str:
    """Whether a shard is to train, to test, or not split yet (all), as LEAF names folders and files."""
    named = re.search(r"_(train|test)_\d+$", path.stem)
    if named:
        return named[1]
    return path.parent.name if path.parent.name in ("train", "test") else "all"


def store_leaf(paths: dict[Path, str], progress: Progress, directory: Path | None = None) -> None:
    """Keep LEAF's FEMNIST from its shards, each with its sha256."""
    shards: dict[str, list[Path]] = {}
    for path in sorted(paths):
        shards.setdefault(part_of(path), []).append(path)
    if set(shards) not in ({"train", "test"}, {"all"}):
        first = min(paths)
        raise ValueError(f"{first}: LEAF's shards must be train and test, or all of neither; these are {sorted(shards)}")
    total, sums = len(paths) * 2, {path.name: sha256 for path, sha256 in paths.items()}
    counts: dict[str, dict[str, int]] = {}
    for part, those in shards.items():
        counts[part] = {}
        for path in those:
            _count(path, counts[part])
            progress("counting LEAF's shards", sum(map(len, counts.values())), total)
    with stored.writing("femnist-leaf", sums, directory) as writer:
        _store(shards, counts, writer, progress)


def _shard(path: Path) -> _Shard:
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Shard)
    except msgspec.MsgspecError as error:
        raise ValueError(f"{path} is damaged, or is no shard of LEAF: {error}") from error


def _count(path: Path, counts: dict[str, int]) -> None:
    """Add how many examples the clients of a shard have."""
    shard = _shard(path)
    if len(shard.users) != len(shard.num_samples) or set(shard.users) != set(shard.user_data):
        raise ValueError(f"{path} is damaged: its users, num_samples and user_data are not of the same clients")
    for user, count in zip(shard.users, shard.num_samples):
        if user in counts:
            raise ValueError(f"{path}: client {user} is in another shard, too")
        counts[user] = count


def _images(path: Path, user: str, raw: msgspec.Raw, count: int) -> tuple[np.ndarray, np.ndarray]:
    try:
        data = msgspec.json.decode(raw, type=_User)
        x_N = np.array(data.x, np.float32)
        if x_N.shape != (count, PIXELS) or len(data.y) != count:
            raise ValueError(f"images {x_N.shape} and {len(data.y)} labels, not {count} of {PIXELS} pixels")
        if not all(0 <= label < CLASSES for label in data.y):
            raise ValueError(f"labels must be from 0 to {CLASSES - 1}")
        return ink(x_N), np.array(data.y, np.uint8)
    except (ValueError, msgspec.MsgspecError) as error:
        raise ValueError(f"{path}, client {user}: {error}") from error

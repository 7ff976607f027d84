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
from fedhdp.datasets.importers.tff import Progress
from fedhdp.datasets.splits import nine_tenths, tested


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


def is_where_shards_are(path: Path) -> bool:
    """Whether a file is named as LEAF names shards, or lies in a folder of theirs."""
    return path.name.startswith("all_data") or path.parent.name in ("train", "test", "all_data")


def store_leaf(paths: dict[Path, str], progress: Progress, directory: Path | None = None) -> None:
    """Keep LEAF's FEMNIST from its shards, each with its sha256."""
    shards: dict[str, list[Path]] = {}
    for path in sorted(paths):
        shards.setdefault(part_of(path), []).append(path)
    if set(shards) not in ({"train", "test"}, {"all"}):
        held = ", ".join(f"{len(those)} {part}" for part, those in sorted(shards.items()))
        where = min(paths).parent
        raise ValueError(
            f"{where}: shards of LEAF must be train and test, or all not split yet, but these are {held}; "
            "import the folder of the ones or of the others"
        )
    _refuse_gaps(shards)
    counts: dict[str, dict[str, int]] = {part: {} for part in shards}
    for done, path in enumerate(sorted(paths), start=1):
        _count(path, counts[part_of(path)])
        progress("counting the examples of LEAF's shards", done, len(paths))
    sums = {f"{path.parent.name}/{path.name}": sha256 for path, sha256 in paths.items()}
    with stored.writing("femnist-leaf", sums, directory) as writer:
        _store(sorted(paths), counts, writer, progress)


def _refuse_gaps(shards: dict[str, list[Path]]) -> None:
    """LEAF numbers its shards from 0, and those to train as those to test: one that is missing is missed."""
    numbers = {
        part: {int(found[1]) for path in those if (found := re.match(r"all_data_(\d+)", path.name))}
        for part, those in shards.items()
    }
    last = max((number for have in numbers.values() for number in have), default=-1)
    for part, have in numbers.items():
        if have and (missing := set(range(last + 1)) - have):
            where = shards[part][0].parent
            raise ValueError(f"{where} is not whole: all_data_{min(missing)} is missing among LEAF's {part} shards")


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
        if not 0 <= count * PIXELS <= path.stat().st_size:  # a pixel is a character at least
            raise ValueError(f"{path} is damaged: num_samples says {count} of client {user}")
        counts[user] = count


def _images(path: Path, user: str, raw: msgspec.Raw, count: int) -> tuple[np.ndarray, np.ndarray]:
    try:
        data = msgspec.json.decode(raw, type=_User)
        if not (count or data.x or data.y):
            return np.empty((0, SIDE, SIDE), np.uint8), np.empty(0, np.uint8)
        x_N = np.array(data.x, np.float32)
        if x_N.shape != (count, PIXELS) or len(data.y) != count:
            raise ValueError(f"images {x_N.shape} and {len(data.y)} labels, not {count} of {PIXELS} pixels")
        if not all(0 <= label < CLASSES for label in data.y):
            raise ValueError(f"labels must be from 0 to {CLASSES - 1}")
        return ink(x_N), np.array(data.y, np.uint8)
    except (ValueError, msgspec.MsgspecError) as error:
        raise ValueError(f"{path}, client {user}: {error}") from error


def _store(paths: list[Path], counts: dict[str, dict[str, int]], writer: stored.Writer, progress: Progress) -> None:
    if "all" in counts:
        test = {user: int(tested(count)) for user, count in counts["all"].items()}
        sizes = {"train": {user: count - test[user] for user, count in counts["all"].items()}, "test": test}
    else:
        sizes = counts
    users = sorted(user for user, count in sizes["train"].items() if count)
    strangers = {user for user, count in sizes["test"].items() if count} - set(users)
    if strangers:
        raise ValueError(f"{paths[0].parent}: client {min(strangers)} has test examples but none to train")
    arrays, start = {}, {}
    for part, of in sizes.items():
        count_K = np.array([of.get(user, 0) for user in users], np.int32)
        writer.add(**{f"{part}_count": count_K})
        arrays[part] = (
            writer.empty(f"{part}_x", (int(count_K.sum()), SIDE, SIDE), np.uint8),
            writer.empty(f"{part}_y", (int(count_K.sum()),), np.uint8),
        )
        start[part] = dict(zip(users, np.cumsum(count_K) - count_K))
    writer.add(client_ids=np.array(users))
    place = {user: number for number, user in enumerate(users)}
    for done, path in enumerate(paths, start=1):
        for user, raw in _shard(path).user_data.items():
            part = part_of(path)
            images = _images(path, user, raw, counts[part][user])
            if user not in place:
                continue
            is_test_N = np.full(len(images[1]), part == "test")
            if part == "all":
                is_test_N = nine_tenths(np.zeros(len(images[1]), int), np.random.default_rng([0, place[user]]))
            for name, those_N in (("train", ~is_test_N), ("test", is_test_N)):
                first, size = start[name][user], int(those_N.sum())
                for array, given in zip(arrays[name], images):
                    array[first : first + size] = given[those_N]
        progress("reading LEAF's shards", done, len(paths))

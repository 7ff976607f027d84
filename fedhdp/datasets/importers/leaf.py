"""LEAF's FEMNIST: JSON shards, read one client at a time.

A shard is ``{"users": [...], "num_samples": [...], "user_data": {user: {"x": [[784 numbers]], "y": [label]}}}``. LEAF
writes train and test shards into folders of those names, or, before it splits, everything into ``all_data``. Unsplit
shards are split here, with nine tenths of each client's images for training. A shard stays text and one client's numbers
are decoded at a time, so memory is bounded by the largest shard.

Axis letters: K clients, N images.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import msgspec
import numpy as np

from fedhdp.datasets.cache import ArrayWriter, write_dataset
from fedhdp.datasets.femnist import CLASSES, PIXELS, create_part, to_ink_bytes
from fedhdp.datasets.importers import ProgressCallback, refuse_damaged
from fedhdp.datasets.splits import draw_test_mask, num_test_examples
from fedhdp.errors import DataError, errors_in

Counts = dict[str, int]  # examples by client


class _Shard(msgspec.Struct):
    users: list[str]
    num_samples: list[int]
    user_data: dict[str, msgspec.Raw]  # views of the text, not decoded


class _UserData(msgspec.Struct):
    x: list[list[float]]
    y: list[int]


def part_of(path: Path) -> str:
    """``train``, ``test``, or ``all`` for unsplit shards, by LEAF's names of folders and files."""
    match = re.search(r"_(train|test)_\d+$", path.stem)
    if match:
        return match[1]
    return path.parent.name if path.parent.name in ("train", "test") else "all"


def has_shard_name(path: Path) -> bool:
    """Whether a file has a shard's name, or lies in a folder for shards."""
    return path.name.startswith("all_data") or path.parent.name in ("train", "test", "all_data")


def check_neighbours(shards: list[Path], files: Iterable[Path]) -> None:
    """Raise `DataError` if other JSON files lie where shards are expected: they may be damaged shards."""
    folders = {path.parent for path in shards}
    for path in files if shards else ():
        if path.suffix == ".json" and path not in shards and (path.parent in folders or part_of(path) != "all"):
            raise DataError(f"{path} lies among LEAF shards, but is damaged or none of them", "file", path)


def import_leaf(sha256_of: dict[Path, str], progress: ProgressCallback) -> None:
    """Store LEAF's FEMNIST from its shards and their checksums; a damaged or missing shard is refused."""
    paths = sorted(sha256_of)
    shards: dict[str, list[Path]] = {}
    for path in paths:
        shards.setdefault(part_of(path), []).append(path)
    if set(shards) not in ({"train", "test"}, {"all"}):
        numbers = ", ".join(f"{len(files)} {part}" for part, files in sorted(shards.items()))
        rule = "LEAF shards must be train and test, or all unsplit"
        raise DataError(f"{paths[0].parent}: {rule}, got {numbers}; import one of the folders", "shards", numbers)
    _check_numbering(shards)
    counts: dict[str, Counts] = {part: {} for part in shards}
    for done, path in enumerate(paths, start=1):
        _count_examples(path, counts[part_of(path)])
        progress("counting the examples of LEAF's shards", done, len(paths))
    sums = {f"{path.parent.name}/{path.name}": sha256 for path, sha256 in sha256_of.items()}
    with write_dataset("femnist-leaf", sums) as writer:
        _write(paths, counts, writer, progress)


def _check_numbering(shards: dict[str, list[Path]]) -> None:
    """LEAF numbers shards from 0, train and test shards alike: refuse a gap."""
    numbers = {
        part: {int(match[1]) for path in files if (match := re.match(r"all_data_(\d+)", path.name))}
        for part, files in shards.items()
    }
    last = max((number for present in numbers.values() for number in present), default=-1)
    for part, present in numbers.items():
        if present and (missing := set(range(last + 1)) - present):
            folder, name = shards[part][0].parent, f"all_data_{min(missing)}"
            raise DataError(f"{folder} is incomplete: LEAF's {part} shard {name} is missing", "shards", name)


def _read_shard(path: Path) -> _Shard:
    with refuse_damaged(path, msgspec.MsgspecError, UnicodeDecodeError):
        return msgspec.json.decode(path.read_bytes(), type=_Shard)


def _count_examples(path: Path, counts: Counts) -> None:
    """Add the number of examples of a shard's clients."""
    shard = _read_shard(path)
    if len(shard.users) != len(shard.num_samples) or set(shard.users) != set(shard.user_data):
        raise DataError(f"{path} is damaged: users, num_samples and user_data name different clients", "users")
    for user, count in zip(shard.users, shard.num_samples, strict=True):
        if user in counts:
            raise DataError(f"{path}: client {user} is in another shard, too", "users", user)
        if not 0 <= count * PIXELS <= path.stat().st_size:  # a pixel has at least one character
            raise DataError(f"{path} is damaged: num_samples of client {user} is {count}", "num_samples", count)
        counts[user] = count


def _decode_images(raw: msgspec.Raw, count: int) -> tuple[np.ndarray, np.ndarray]:
    """A client's images and labels."""
    try:
        data = msgspec.json.decode(raw, type=_UserData)
        x_N = np.array(data.x or np.empty((0, PIXELS)), np.float32)
    except (ValueError, msgspec.MsgspecError) as error:
        raise DataError(str(error), "user_data") from error
    if x_N.shape != (count, PIXELS) or len(data.y) != count:
        shapes = f"images {x_N.shape} and {len(data.y)} labels"
        raise DataError(f"num_samples is {count}, but there are {shapes}", "num_samples", count)
    if not all(0 <= label < CLASSES for label in data.y):
        raise DataError(f"labels must be from 0 to {CLASSES - 1}", "labels", data.y)
    return to_ink_bytes(x_N), np.array(data.y, np.uint8)


def _write(paths: list[Path], counts: dict[str, Counts], writer: ArrayWriter, progress: ProgressCallback) -> None:
    """Write the train and test examples of every client that has any for training."""
    sizes = _part_sizes(counts)
    users = sorted(user for user, count in sizes["train"].items() if count)
    if only_test := {user for user, count in sizes["test"].items() if count} - set(users):
        user = min(only_test)
        raise DataError(f"{paths[0].parent}: client {user} has test examples but no train examples", "users", user)
    arrays, start = {}, {}
    for part, size_of in sizes.items():
        count_K = np.array([size_of.get(user, 0) for user in users], np.int32)
        arrays[part] = create_part(writer, part, count_K)
        start[part] = dict(zip(users, np.cumsum(count_K) - count_K, strict=True))
    writer.write(client_ids=np.array(users))
    index_of = {user: index for index, user in enumerate(users)}
    for done, path in enumerate(paths, start=1):
        for user, raw in _read_shard(path).user_data.items():
            with errors_in(f"{path}, client {user}"):
                images = _decode_images(raw, counts[part_of(path)][user])
            if user not in index_of:
                continue
            is_test_N = _test_mask(part_of(path), len(images[1]), index_of[user])
            for part, mask_N in (("train", ~is_test_N), ("test", is_test_N)):
                first, size = start[part][user], int(mask_N.sum())
                for array_N, values_N in zip(arrays[part], images, strict=True):
                    array_N[first : first + size] = values_N[mask_N]
        progress("reading LEAF's shards", done, len(paths))


def _part_sizes(counts: dict[str, Counts]) -> dict[str, Counts]:
    """The train and test examples of each client, once unsplit shards are split."""
    if "all" not in counts:
        return counts
    test = {user: int(num_test_examples(count)) for user, count in counts["all"].items()}
    return {"train": {user: count - test[user] for user, count in counts["all"].items()}, "test": test}


def _test_mask(part: str, count: int, client: int) -> np.ndarray:
    if part != "all":
        return np.full(count, part == "test")
    return draw_test_mask(np.zeros(count, int), np.random.default_rng([0, client]))

"""TFF's federated EMNIST: one SQLite file of ``tf.train.Example`` messages, read without TensorFlow.

A message is ``Example{features=1{feature=1{key=1, value=2{float_list=2|int64_list=3{value=1}}}}}``; of the wire format
that is all there is to know: a field is a number and a kind, then a varint, four or eight bytes, or a length and bytes.

Axis letters: K clients, N images.
"""

from __future__ import annotations

import lzma
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

import numpy as np

from fedhdp.datasets import stored
from fedhdp.datasets.femnist import CLASSES, PIXELS, SIDE, ink

Progress = Callable[[str, int, int], None]  # is told what is being done, how far it is, and how far it goes
SPLITS = {
    "digits_train": "digits_only_train",
    "digits_test": "digits_only_test",
    "all_train": "all_train",
    "all_test": "all_test",
}
CLIENTS = {"digits": 3383, "all": 3400}  # of the whole dataset
BATCH = 4096
XZ, LZMA_ALONE, SQLITE = b"\xfd7zXZ\0", b"\x5d\0\0", b"SQLite format 3\0"


def store_tff(path: Path, sha256: str, progress: Progress, directory: Path | None = None) -> None:
    """Keep TFF's EMNIST from its SQLite file, compressed or not."""
    with stored.writing("emnist-tff", {path.name: sha256}, directory) as writer:
        with open(path, "rb") as file:
            compressed = file.read(len(SQLITE)) != SQLITE
        # SQLite cannot read a stream, so the 4.7 GB must lie on the disk for a while.
        unpacked = writer.folder / "unpacked.sqlite"
        if compressed:
            _unpack(path, unpacked, progress)
        database = unpacked if compressed else path
        _refuse_short(database, path)
        connection = _connect(database)
        try:
            _store(connection, path, writer, progress)
        except sqlite3.Error as error:
            raise ValueError(f"{path} is damaged, or is not TFF's EMNIST: {error}") from error
        finally:
            connection.close()
            unpacked.unlink(missing_ok=True)


def is_tff(path: Path) -> bool:
    """Whether a SQLite database has the tables of TFF's; a damaged one is refused."""
    _refuse_short(path, path)
    try:
        with closing(_connect(path)) as connection:
            tables = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
            return {"examples", "client_metadata"} <= {name for (name,) in tables}
    except sqlite3.Error as error:
        raise ValueError(f"{path} is damaged: {error}") from error


def _connect(path: Path) -> sqlite3.Connection:
    """A database that is read alone."""
    return sqlite3.connect(f"file:{quote(str(path.absolute()))}?mode=ro&immutable=1", uri=True)


def _unpack(path: Path, unpacked: Path, progress: Progress) -> None:
    total = path.stat().st_size
    try:
        with open(path, "rb") as raw, lzma.open(raw) as packed, open(unpacked, "wb") as out:
            while chunk := packed.read(1 << 22):
                out.write(chunk)
                progress(f"unpacking {path.name}", raw.tell(), total)
    except (lzma.LZMAError, EOFError) as error:
        raise ValueError(f"{path} is damaged or ends too early: {error}") from error


def _refuse_short(database: Path, path: Path) -> None:
    """SQLite notices a missing end only when it comes there: look at what the header promises."""
    with open(database, "rb") as file:
        header = file.read(100)
    if len(header) < 100 or header[:16] != SQLITE:
        raise ValueError(f"{path} holds no SQLite database")
    page = int.from_bytes(header[16:18], "big")
    wanted = (65536 if page == 1 else page) * int.from_bytes(header[28:32], "big")
    size = database.stat().st_size
    if size < wanted:
        raise ValueError(f"{path} ends too early: {size} of {wanted} bytes of the database are there")


class _Part:
    """One split as it is being read: where the next image of each client goes, and a batch that waits to be written."""

    def __init__(self, writer: stored.Writer, name: str, counts: dict[str, int]):
        total = sum(counts.values())
        self.x_N = writer.empty(f"{name}_x", (total, SIDE, SIDE), np.uint8)
        self.y_N = writer.empty(f"{name}_y", (total,), np.uint8)
        writer.add(**{f"{name}_count": np.array(list(counts.values()), np.int32)})
        self.end = dict(zip(counts, np.cumsum(list(counts.values())).tolist()))
        self.next = {client: self.end[client] - count for client, count in counts.items()}
        self.pixels, self.labels, self.rows = list[bytes](), list[int](), list[int]()

    def take(self, client: str, message: bytes) -> None:
        """One example of a client."""
        row = self.next.get(client, -1)
        if row < 0 or row == self.end[client]:
            raise ValueError(f"client {client} has more examples than client_metadata says")
        if not isinstance(message, bytes):
            raise ValueError(f"its message is {message!r}, not bytes")
        pixels, label = parse_example(message)
        self.next[client] = row + 1
        self.pixels.append(pixels)
        self.labels.append(label)
        self.rows.append(row)
        if len(self.rows) == BATCH:
            self.flush()

    def flush(self) -> None:
        """Write the batch."""
        self.x_N[self.rows] = ink(np.frombuffer(b"".join(self.pixels), "<f4"))
        self.y_N[self.rows] = self.labels
        self.pixels, self.labels, self.rows = [], [], []

    def finish(self) -> None:
        """All examples must have come."""
        self.flush()
        for client, end in self.end.items():
            if self.next[client] != end:
                raise ValueError(
                    f"client {client} has {end - self.next[client]} examples less than client_metadata says"
                )


def _store(connection: sqlite3.Connection, path: Path, writer: stored.Writer, progress: Progress) -> None:
    counts = _counts(connection, path)
    parts = {split: _Part(writer, name, counts[name]) for name, split in SPLITS.items()}
    for name in ("digits", "all"):
        writer.add(**{f"{name}_client_ids": np.array(list(counts[f"{name}_train"]))})
    total, done = sum(sum(of.values()) for of in counts.values()), 0
    rows = connection.execute("SELECT split_name, client_id, serialized_example_proto FROM examples")
    for done, (split, client, message) in enumerate(rows, start=1):
        if split not in parts:
            continue
        try:
            parts[split].take(client, message)
        except ValueError as error:
            raise ValueError(f"{path}, example {done} ({split}): {error}") from error
        if done % 8192 == 0:
            progress(f"reading {path.name}", done, total)
    for split, part in parts.items():
        try:
            part.finish()
        except ValueError as error:
            raise ValueError(f"{path} is not whole ({split}): {error}") from error
    progress(f"reading {path.name}", total, total)


def _counts(connection: sqlite3.Connection, path: Path) -> dict[str, dict[str, int]]:
    """How many examples each client has in each split; the clients of a train split and its test split in one order."""
    found: dict[str, dict[str, int]] = {}
    rows = connection.execute("SELECT split_name, client_id, num_examples FROM client_metadata ORDER BY client_id")
    for split, client, count in rows:
        if not isinstance(client, str) or not isinstance(count, int) or not 0 <= count < 2**31:
            raise ValueError(f"{path} is damaged: client_metadata says {count!r} examples for client {client!r}")
        found.setdefault(split, {})[client] = count
    for split in SPLITS.values():
        if not sum(found.get(split, {}).values()):
            raise ValueError(f"{path} has no examples of the split {split}")
    for name in ("digits", "all"):
        train, test = found[SPLITS[f"{name}_train"]], found[SPLITS[f"{name}_test"]]
        if strangers := test.keys() - train.keys():
            raise ValueError(f"{path}: client {min(strangers)} has test examples but none to train")
        if len(train) != CLIENTS[name]:
            split = SPLITS[f"{name}_train"]
            raise ValueError(f"{path} is not whole: {len(train):,} clients in {split}, where TFF has {CLIENTS[name]:,}")
        found[SPLITS[f"{name}_test"]] = {client: test.get(client, 0) for client in train}
    promised = 4 * PIXELS * sum(sum(found[split].values()) for split in SPLITS.values())
    ((pages, size),) = connection.execute("SELECT page_count, page_size FROM pragma_page_count, pragma_page_size")
    if promised > pages * size:
        raise ValueError(
            f"{path} is not whole: client_metadata says more examples than its {pages * size:,} bytes hold"
        )
    return {name: found[split] for name, split in SPLITS.items()}


def parse_example(message: bytes) -> tuple[bytes, int]:
    """The pixels, as the bytes of little-endian floats, and the label of one message."""
    feature = {}
    for features in _inside(message, 0, len(message), 1):
        for entry in _inside(message, *features, 1):
            key = [message[start:end] for start, end in _inside(message, *entry, 1)]
            value = list(_inside(message, *entry, 2))
            if key and value:
                feature[key[-1]] = value[-1]
    for wanted in (b"pixels", b"label"):
        if wanted not in feature:
            raise ValueError(f"no feature {wanted.decode()}")
    pixels = b"".join(
        message[a:b] for part in _inside(message, *feature[b"pixels"], 2) for a, b in _inside(message, *part, 1)
    )
    labels = [at for part in _inside(message, *feature[b"label"], 3) for at in _inside(message, *part, 1)]
    label = _varint(message, labels[0][0])[0] if labels and labels[0][0] < labels[0][1] else -1
    if len(pixels) != 4 * PIXELS or not 0 <= label < CLASSES:
        raise ValueError(f"{len(pixels) // 4} pixels and label {label}, not {PIXELS} and one below {CLASSES}")
    return pixels, label


def _inside(message: bytes, at: int, end: int, wanted: int) -> list[tuple[int, int]]:
    """From where to where each field of this number lies, less its length if it has one."""
    found = []
    while at < end:
        tag, at = _varint(message, at)
        kind, start = tag & 7, at
        if kind == 2:
            length, start = _varint(message, at)
            at = start + length
        elif kind == 0:
            _, at = _varint(message, at)
        elif kind in (1, 5):
            at += 8 if kind == 1 else 4
        else:
            raise ValueError(f"no protocol buffer: wire kind {kind}")
        if at > end:
            raise ValueError("the message ends too early")
        if tag >> 3 == wanted:
            found.append((start, at))
    return found


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """A whole number in pieces of seven bits, and where it ends."""
    value = shift = 0
    while True:
        if at >= len(message) or shift > 63:
            raise ValueError("the message ends too early")
        byte = message[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at

"""TFF's federated EMNIST: one SQLite file of ``tf.train.Example`` messages, read without TensorFlow.

A message is ``Example{features=1{feature=1{key=1, value=2{float_list=2|int64_list=3{value=1}}}}}``. In the wire format a
field is a tag (number and wire type) and then a varint, four or eight bytes, or a length and bytes.

Axis letters: K clients, N images.
"""

from __future__ import annotations

import lzma
import sqlite3
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

import numpy as np

from fedhdp.datasets.cache import ArrayWriter, write_dataset
from fedhdp.datasets.femnist import CLASSES, PIXELS, create_part, to_ink_bytes
from fedhdp.datasets.importers import ProgressCallback, refuse_damaged
from fedhdp.errors import DataError, errors_in

SPLITS = {
    "digits_train": "digits_only_train",
    "digits_test": "digits_only_test",
    "all_train": "all_train",
    "all_test": "all_test",
}
NUM_CLIENTS = {"digits": 3383, "all": 3400}
BATCH = 4096
XZ, LZMA_ALONE, SQLITE = b"\xfd7zXZ\0", b"\x5d\0\0", b"SQLite format 3\0"
VARINT, FIXED64, LENGTH_DELIMITED, FIXED32 = 0, 1, 2, 5  # wire types


def import_tff(path: Path, sha256: str, progress: ProgressCallback) -> None:
    """Store TFF's federated EMNIST from its SQLite file, compressed or not; a damaged or incomplete one is refused."""
    with write_dataset("emnist-tff", {path.name: sha256}) as writer:
        with open(path, "rb") as file:
            compressed = file.read(len(SQLITE)) != SQLITE
        # SQLite cannot read a stream, so the 4.7 GB are on disk during the import.
        unpacked = writer.folder / "unpacked.sqlite"
        if compressed:
            _unpack(path, unpacked, progress)
        database = unpacked if compressed else path
        _check_length(database, path)
        with refuse_damaged(path, sqlite3.Error), closing(_connect(database)) as connection:
            _write(connection, path, writer, progress)
        unpacked.unlink(missing_ok=True)


def has_tff_tables(path: Path) -> bool:
    """Whether a SQLite database has TFF's tables; raises `DataError` if it is damaged."""
    _check_length(path, path)
    with refuse_damaged(path, sqlite3.Error), closing(_connect(path)) as connection:
        tables = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        return {"examples", "client_metadata"} <= {name for (name,) in tables}


def _connect(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(f"file:{quote(str(path.absolute()))}?mode=ro&immutable=1", uri=True)


def _unpack(path: Path, unpacked: Path, progress: ProgressCallback) -> None:
    total = path.stat().st_size
    damage = refuse_damaged(path, lzma.LZMAError, EOFError)
    with damage, open(path, "rb") as raw, lzma.open(raw) as content, open(unpacked, "wb") as out:
        while chunk := content.read(1 << 22):
            out.write(chunk)
            progress(f"unpacking {path.name}", raw.tell(), total)


def _check_length(database: Path, path: Path) -> None:
    """Compare the file's length with its header: SQLite notices a truncated file only when it reads the missing pages."""
    with open(database, "rb") as file:
        header = file.read(100)
    if len(header) < 100 or not header.startswith(SQLITE):
        raise DataError(f"{path} contains no SQLite database", "file", path)
    page_size = int.from_bytes(header[16:18], "big")
    expected = (65536 if page_size == 1 else page_size) * int.from_bytes(header[28:32], "big")
    size = database.stat().st_size
    if size < expected:
        raise DataError(f"{path} is truncated: the database has {size} of {expected} bytes", "file", path)


class _SplitWriter:
    """Collects the examples of one split and writes them in batches, each client's to its place."""

    def __init__(self, writer: ArrayWriter, name: str, counts: dict[str, int]):
        count_K = np.array(list(counts.values()))
        self.x_N, self.y_N = create_part(writer, name, count_K)
        self.end_row = dict(zip(counts, np.cumsum(count_K).tolist(), strict=True))
        self.next_row = {client: self.end_row[client] - count for client, count in counts.items()}
        self.pixels, self.labels, self.rows = list[bytes](), list[int](), list[int]()

    def add(self, client: str, message: bytes) -> None:
        """Add an example of a client."""
        row = self.next_row.get(client, -1)
        if row < 0 or row == self.end_row[client]:
            raise DataError(f"client {client} has more examples than its num_examples", "num_examples", client)
        if not isinstance(message, bytes):
            rule = "serialized_example_proto must be bytes"
            raise DataError(f"{rule}, got {message!r}", "serialized_example_proto", message)
        pixels, label = parse_example(message)
        self.next_row[client] = row + 1
        self.pixels.append(pixels)
        self.labels.append(label)
        self.rows.append(row)
        if len(self.rows) == BATCH:
            self.flush()

    def flush(self) -> None:
        """Write the batch."""
        self.x_N[self.rows] = to_ink_bytes(np.frombuffer(b"".join(self.pixels), "<f4"))
        self.y_N[self.rows] = self.labels
        self.pixels, self.labels, self.rows = [], [], []

    def finish(self) -> None:
        """Write the last batch and check that no example is missing."""
        self.flush()
        for client, end in self.end_row.items():
            if missing := end - self.next_row[client]:
                raise DataError(f"client {client} lacks {missing} of its num_examples", "num_examples", client)


def _write(connection: sqlite3.Connection, path: Path, writer: ArrayWriter, progress: ProgressCallback) -> None:
    counts = _read_counts(connection, path)
    splits = {split: _SplitWriter(writer, name, counts[name]) for name, split in SPLITS.items()}
    for name in NUM_CLIENTS:
        writer.write(**{f"{name}_client_ids": np.array(list(counts[f"{name}_train"]))})
    total = sum(sum(count_of.values()) for count_of in counts.values())
    rows = connection.execute("SELECT split_name, client_id, serialized_example_proto FROM examples")
    for done, (split, client, message) in enumerate(rows, start=1):
        if split not in splits:
            continue
        with errors_in(f"{path}, example {done} ({split})"):
            splits[split].add(client, message)
        if done % 8192 == 0:
            progress(f"reading {path.name}", done, total)
    for split, split_writer in splits.items():
        with errors_in(f"{path} ({split})"):
            split_writer.finish()
    progress(f"reading {path.name}", total, total)


def _read_counts(connection: sqlite3.Connection, path: Path) -> dict[str, dict[str, int]]:
    """The number of examples of each client in each split; train and test splits have the same clients in one order."""
    counts: dict[str, dict[str, int]] = {split: {} for split in SPLITS.values()}
    rows = connection.execute("SELECT split_name, client_id, num_examples FROM client_metadata ORDER BY client_id")
    for split, client, count in rows:
        if not isinstance(client, str) or not isinstance(count, int) or not 0 <= count < 2**31:
            complaint = f"num_examples of client {client!r} is {count!r}"
            raise DataError(f"{path} is damaged: {complaint}", "num_examples", count)
        counts.setdefault(split, {})[client] = count
    for split in SPLITS.values():
        if not sum(counts[split].values()):
            raise DataError(f"{path} has no examples of the split {split}", "split_name", split)
    for name, num_clients in NUM_CLIENTS.items():
        split, test_split = SPLITS[f"{name}_train"], SPLITS[f"{name}_test"]
        train, test = counts[split], counts[test_split]
        if only_test := test.keys() - train.keys():
            client = min(only_test)
            raise DataError(f"{path}: client {client} has test examples but no train examples", "client_id", client)
        if len(train) != num_clients:
            complaint = f"{len(train):,} of {num_clients:,} clients in {split}"
            raise DataError(f"{path} is incomplete: {complaint}", "client_metadata", len(train))
        counts[test_split] = {client: test.get(client, 0) for client in train}
    pixel_bytes = 4 * PIXELS * sum(sum(counts[split].values()) for split in SPLITS.values())
    ((pages, page_size),) = connection.execute("SELECT page_count, page_size FROM pragma_page_count, pragma_page_size")
    if pixel_bytes > pages * page_size:
        complaint = f"num_examples add up to more than its {pages * page_size:,} bytes"
        raise DataError(f"{path} is incomplete: {complaint}", "num_examples", pixel_bytes)
    return {name: counts[split] for name, split in SPLITS.items()}


def parse_example(message: bytes) -> tuple[bytes, int]:
    """The pixels, as the bytes of little-endian floats, and the label of a ``tf.train.Example``."""
    feature = {}
    for features in _fields(message, 0, len(message), 1):
        for entry in _fields(message, *features, 1):
            keys = [message[start:end] for start, end in _fields(message, *entry, 1)]
            values = _fields(message, *entry, 2)
            if keys and values:
                feature[keys[-1]] = values[-1]
    for name in ("pixels", "label"):
        if name.encode() not in feature:
            raise DataError(f"the message has no feature {name}", name)
    pixels = b"".join(
        message[start:end]
        for floats in _fields(message, *feature[b"pixels"], 2)
        for start, end in _fields(message, *floats, 1)
    )
    labels = [span for ints in _fields(message, *feature[b"label"], 3) for span in _fields(message, *ints, 1)]
    label = _varint(message, labels[0][0])[0] if labels and labels[0][0] < labels[0][1] else -1
    if len(pixels) != 4 * PIXELS:
        raise DataError(f"an example must have {PIXELS} pixels, got {len(pixels) // 4}", "pixels", len(pixels) // 4)
    if not 0 <= label < CLASSES:
        raise DataError(f"label must be from 0 to {CLASSES - 1}, got {label}", "label", label)
    return pixels, label


def _fields(message: bytes, position: int, end: int, number: int) -> list[tuple[int, int]]:
    """Where the values of all fields with this number start and end."""
    spans = []
    while position < end:
        tag, position = _varint(message, position)
        wire_type, start = tag & 7, position
        if wire_type == LENGTH_DELIMITED:
            length, start = _varint(message, position)
            position = start + length
        elif wire_type == VARINT:
            _, position = _varint(message, position)
        elif wire_type in (FIXED64, FIXED32):
            position += 8 if wire_type == FIXED64 else 4
        else:
            raise DataError(f"the message is no protocol buffer: wire type {wire_type}", "wire_type", wire_type)
        if position > end:
            raise DataError("the message is truncated", "message")
        if tag >> 3 == number:
            spans.append((start, position))
    return spans


def _varint(message: bytes, position: int) -> tuple[int, int]:
    """The integer in groups of seven bits from this position on, and the position after it."""
    value = shift = 0
    while True:
        if position >= len(message) or shift > 63:
            raise DataError("the message is truncated", "message")
        byte = message[position]
        value |= (byte & 127) << shift
        position, shift = position + 1, shift + 7
        if byte < 128:
            return value, position

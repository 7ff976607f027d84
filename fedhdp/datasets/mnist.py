"""MNIST: reading its idx files, and the populations that are made of it.

``one_digit`` and ``skewed`` are the paper's non-IID MNIST: each client holds samples of one digit, as many clients of
each digit as its share of the images. With 2,000 clients of 30 samples that is all 60,000 train images, but for the few
that a digit has over or lacks: no digit's count is a multiple of 30, so 42 images are held by two clients and 42 by
none. A client's own test data are ``test_samples`` of the test images of its digit, drawn anew for each client. The
paper does not say how many; its variances across clients (0.13 where 94% are right) leave room for no fewer than about
50, and 100 are the default. ``by_writer`` gives each client the images that one person wrote, nine tenths to train.

The order of clients is shuffled by the seed, so that the first clients, who become the first group, are any clients;
in ``skewed`` they all hold a 7.

Axis letters: K clients, M samples of a client, N images.
"""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path
from typing import get_args

import numpy as np

from fedhdp.data import FederatedData, examples
from fedhdp.datasets import stored
from fedhdp.datasets.splits import Split, by_client, nine_tenths

SKEWED_DIGIT = 7
PARTS = {  # the idx file of each stored array
    "train_x": "train-images-idx3-ubyte.gz",
    "train_y": "train-labels-idx1-ubyte.gz",
    "test_x": "t10k-images-idx3-ubyte.gz",
    "test_y": "t10k-labels-idx1-ubyte.gz",
}


def mnist(
    split: Split = "one_digit",
    clients: int | None = None,
    skewed_clients: int = 0,
    samples: int = 30,
    test_samples: int = 100,
    seed: int = 0,
    directory: Path | None = None,
) -> FederatedData:
    """MNIST among clients (by default 2,000, or all 836 writers), from the data directory."""
    if split not in get_args(Split):
        raise ValueError(f"split must be one of {', '.join(get_args(Split))}, not {split!r}")
    if skewed_clients and split != "skewed":
        raise ValueError(f"skewed_clients is for the split 'skewed' only, but is {skewed_clients} with split {split!r}")
    rng = np.random.default_rng([seed, 0])  # stream 0 is the data's
    arrays = stored.read("mnist", directory)
    if split == "by_writer":
        return _by_writer(arrays, stored.read("mnist-writers", directory), clients, rng)
    return _one_digit(arrays, split, 2000 if clients is None else clients, skewed_clients, samples, test_samples, rng)


def _by_writer(arrays: dict, writers: dict, clients: int | None, rng: np.random.Generator) -> FederatedData:
    """Both parts of MNIST pooled, as nobody wrote for both; the server tests on all clients' test images."""
    x_N, y_N = (np.concatenate([arrays[f"train_{a}"], arrays[f"test_{a}"]]) for a in "xy")
    names_K, client_N = np.unique(np.concatenate([writers["train"], writers["test"]]), return_inverse=True)
    if len(client_N) != len(y_N):
        raise ValueError(f"mnist-writers names the writers of {len(client_N)} images, but mnist has {len(y_N)}")
    is_test_N = nine_tenths(client_N, rng)
    return by_client("mnist-by_writer", x_N, y_N, client_N, is_test_N, len(names_K), 10, clients, rng)


def _one_digit(
    arrays: dict, split: str, clients: int, skewed: int, samples: int, test_samples: int, rng: np.random.Generator
) -> FederatedData:
    """Each client holds one digit, each digit has as many clients as its share of the images."""
    pools = [np.flatnonzero(arrays["train_y"] == digit) for digit in range(10)]
    test_pools = [np.flatnonzero(arrays["test_y"] == digit) for digit in range(10)]
    most, most_test = min(map(len, pools)), min(map(len, test_pools))
    for name, value, upper in (("samples", samples, most), ("test_samples", test_samples, most_test)):
        if not 1 <= value <= upper:
            raise ValueError(f"{name} must be from 1 to {upper}, the images of the rarest digit, not {value}")
    if clients < 1:
        raise ValueError(f"clients must be at least 1, not {clients}")
    share_10 = shares(clients, np.array([len(pool) for pool in pools]))
    # A pool that has too few images for all its clients starts over: no client has an image twice.
    row_KM = np.concatenate(
        [np.resize(rng.permutation(pool), (share, samples)) for pool, share in zip(pools, share_10)]
    )
    digit_K = np.repeat(np.arange(10), share_10)
    order_K = rng.permutation(clients)
    if split == "skewed":
        order_K = _skewed_first(order_K, digit_K[order_K], skewed)
    row_KM, digit_K = row_KM[order_K], digit_K[order_K]
    test_row_KM = np.stack([rng.choice(test_pools[d], test_samples, replace=False) for d in digit_K])
    train, test = (
        examples(arrays[f"{part}_x"][rows.ravel()], np.repeat(digit_K, rows.shape[1]).astype(np.int32), counts)
        for part, rows, counts in (
            ("train", row_KM, np.full(clients, samples)),
            ("test", test_row_KM, np.full(clients, test_samples)),
        )
    )
    return FederatedData(f"mnist-{split}", train, test, arrays["test_x"], arrays["test_y"].astype(np.int32), 10)


def _skewed_first(order_K: np.ndarray, digit_K: np.ndarray, skewed: int) -> np.ndarray:
    """The same clients with this many of those who hold a 7 in front."""
    sevens = np.flatnonzero(digit_K == SKEWED_DIGIT)
    if not 0 <= skewed <= len(sevens):
        raise ValueError(f"skewed_clients must be at most the {len(sevens)} clients who hold a 7, not {skewed}")
    return np.concatenate([order_K[sevens[:skewed]], np.delete(order_K, sevens[:skewed])])


def shares(clients: int, counts: np.ndarray) -> np.ndarray:
    """Clients shared out in proportion to the counts, by the largest remainder."""
    quotas = clients * counts / counts.sum()
    whole = np.floor(quotas).astype(int)
    whole[np.argsort(whole - quotas, kind="stable")[: clients - whole.sum()]] += 1
    return whole


def is_idx(path: Path) -> bool:
    """Whether a file, compressed by gzip or not, begins as an idx file of bytes does."""
    with open(path, "rb") as file:
        head = file.read(3)
    if head[:2] == b"\x1f\x8b":
        try:
            with gzip.open(path) as packed:
                head = packed.read(3)
        except (EOFError, OSError, zlib.error) as error:
            raise ValueError(f"{path} is damaged or ends too early: {error}") from error
    return head == b"\0\0\x08"


def content(path: Path) -> bytes:
    """What is in a file, uncompressed if it is compressed by gzip."""
    raw = path.read_bytes()
    if raw[:2] != b"\x1f\x8b":
        return raw
    try:
        return gzip.decompress(raw)
    except (EOFError, OSError, zlib.error) as error:
        raise ValueError(f"{path} is damaged or ends too early: {error}") from error


def parse_idx(raw: bytes, where: object) -> np.ndarray:
    """The array in an idx file of unsigned bytes; one that is too short or too long is refused."""
    if len(raw) < 4 or raw[:3] != b"\0\0\x08" or not 1 <= raw[3] <= 4:
        raise ValueError(f"{where} is no idx file of bytes: it starts with {raw[:4].hex() or 'nothing'}")
    header = 4 + 4 * raw[3]
    shape = tuple(np.frombuffer(raw[4:header], ">u4").tolist()) if len(raw) >= header else ()
    wanted = header + int(np.prod(shape, dtype=object))
    if not shape or len(raw) != wanted:
        size = "x".join(map(str, shape)) or "no"
        raise ValueError(f"{where} is damaged: {len(raw)} bytes, but {wanted} are in an idx file of {size} bytes")
    return np.frombuffer(raw, np.uint8, offset=header).reshape(shape)


def read_idx(path: Path) -> np.ndarray:
    """The array in an idx file, compressed or not."""
    return parse_idx(content(path), path)


def store_mnist(files: dict[str, Path], sums: dict[str, str], directory: Path | None = None) -> None:
    """Keep MNIST from its four files, by their names in `PARTS`."""
    arrays = {part: read_idx(files[name]) for part, name in PARTS.items()}
    for part in ("train", "test"):
        x_N, y_N = arrays[f"{part}_x"], arrays[f"{part}_y"]
        where = files[PARTS[f"{part}_y"]]
        if x_N.ndim != 3 or y_N.shape != x_N.shape[:1]:
            raise ValueError(f"{where} has labels {y_N.shape} for images {x_N.shape}")
        if y_N.max(initial=0) > 9:
            raise ValueError(f"{where} has the label {y_N.max()}, not only digits")
    with stored.writing("mnist", sums, directory) as writer:
        writer.add(**arrays)


def store_writers(path: Path, arrays: dict[str, np.ndarray], sha256: str, directory: Path | None = None) -> None:
    """Keep who wrote MNIST."""
    for part, images in (("train", 60_000), ("test", 10_000)):
        if arrays[part].shape != (images,) or arrays[part].dtype.kind not in "iu":
            held = f"{arrays[part].dtype} {arrays[part].shape}"
            raise ValueError(f"{path}: {part} is {held}, not one whole number for each of MNIST's {images} images")
    with stored.writing("mnist-writers", {path.name: sha256}, directory) as writer:
        writer.add(train=arrays["train"], test=arrays["test"])

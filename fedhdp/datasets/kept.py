"""A cache of generated arrays on disk, so that the next run starts sooner.

It is off in the library; `keep_in` names its folder, as the command line does. Arrays are generated again if they come from
other code or another version of JAX, or if their checksum is wrong.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

import numpy as np

from fedhdp.archives import read_npz

MAX_BYTES = 2**27  # of the arrays of one file
Arrays = dict[str, np.ndarray]
_folder: Path | None = None


def keep_in(folder: Path | None) -> None:
    """Cache generated arrays in a folder, which must be the user's alone; None: no cache."""
    global _folder
    _folder = folder


def load_or_generate(name: str, sources: Sequence[Path], arguments: object, generate: Callable[[], Arrays]) -> Arrays:
    """Read arrays from the cache, or generate and store them.

    Args:
        name: The start of the file's name.
        sources: The source files of the code that generates them.
        arguments: All else that they depend on, as a value whose ``repr`` is complete.
        generate: A function that generates them.
    """
    if _folder is None:
        return generate()
    made_by = [path.read_bytes() for path in sources] + [f"jax {version('jax')} {version('jaxlib')}".encode()]
    digest = hashlib.sha256(b"\0".join([*made_by, repr(arguments).encode()])).hexdigest()[:32]
    path = _folder / f"{name}-{digest}.npz"
    try:
        arrays = read_npz(path)
        os.utime(path)  # the oldest are removed first
        return arrays
    except (OSError, ValueError):  # there is none, or it is damaged
        arrays = generate()
    if sum(array.nbytes for array in arrays.values()) <= MAX_BYTES:
        _write(path, arrays)
    return arrays


def _write(path: Path, arrays: Arrays) -> None:
    """Write a file atomically; if it cannot be written, there is none."""
    with contextlib.suppress(OSError):
        number, partial = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".part")
        try:
            with os.fdopen(number, "wb") as file:
                np.savez(file, allow_pickle=False, **arrays)
            os.replace(partial, path)
        except BaseException:
            os.unlink(partial)
            raise

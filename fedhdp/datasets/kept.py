"""Generated arrays that the command line keeps in the user's cache, so that the next run starts sooner.

The library keeps none: `keep_in` names a folder. Arrays that other code or another JAX has made, or whose checksum is wrong,
are generated again.
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

MAX_BYTES = 2**27  # of the arrays that are kept together
Arrays = dict[str, np.ndarray]
_folder: Path | None = None


def keep_in(folder: Path | None) -> None:
    """Keep generated arrays in a folder, which must be the user's alone; None: keep none."""
    global _folder
    _folder = folder


def load_or_generate(name: str, sources: Sequence[Path], arguments: object, generate: Callable[[], Arrays]) -> Arrays:
    """The arrays that were kept, or those that are generated now.

    Args:
        name: What they are, for the file's name.
        sources: The files of the code that generates them.
        arguments: What they depend on besides, as a value whose ``repr`` says all of it.
        generate: Generates them.
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
    """Write a file that is complete or absent; where it cannot be written nothing is kept."""
    with contextlib.suppress(OSError):
        number, partial = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".part")
        try:
            with os.fdopen(number, "wb") as file:
                np.savez(file, allow_pickle=False, **arrays)
            os.replace(partial, path)
        except BaseException:
            os.unlink(partial)
            raise

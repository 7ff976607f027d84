"""The command line's cache: compiled programs and generated images, so that the next run starts sooner.

``FEDHDP_COMPILATION_CACHE`` names another folder, or ``off``. Settings of JAX's own, such as ``JAX_COMPILATION_CACHE_DIR``,
have precedence. A program that is read is executed, so the folder must belong to the user.
"""

from __future__ import annotations

import glob
import hashlib
import os
import platform
import re
import stat
import sys
import warnings
from pathlib import Path
from typing import Any

VARIABLE, OFF = "FEDHDP_COMPILATION_CACHE", "off"
MAX_BYTES = 2**29  # the oldest files are removed above it
_FAILED = re.compile(r"Error (reading|writing) persistent compilation cache entry for '(.+?)'")


def use_compilation_cache() -> None:
    """Keep compiled programs and generated images, where the folder is the user's. Call it before anything is compiled."""
    directory = os.environ.get(VARIABLE, "")
    if directory == OFF or "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return
    folder = (Path(directory).expanduser() if directory else _default_directory()) / _machine()
    if not _is_own_folder(folder):
        return
    import jax

    _remove_oldest(folder)
    _remove_damaged(folder)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)  # a start has many small programs
    from fedhdp.datasets.kept import keep_in

    keep_in(folder)


def _default_directory() -> Path:
    from fedhdp.datasets.cache import cache_home

    return cache_home() / "fedhdp" / "compiled"


def _machine() -> str:
    """A name for this kind of machine: a program that is compiled for one processor may fail on another."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = [f"flags: {platform.processor()}"]
    features = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return f"{platform.machine()}-{hashlib.sha256(features.encode()).hexdigest()[:12]}"


def _is_own_folder(folder: Path) -> bool:
    """Make the folder if it is missing, and say whether it is the user's and nobody else's to write or replace."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
        above = [parent.stat().st_mode for parent in folder.resolve().parents]
    except OSError:
        return False
    foreign = hasattr(os, "getuid") and (status.st_uid != os.getuid() or bool(status.st_mode & 0o022))
    replaceable = any(mode & stat.S_IWOTH and not mode & stat.S_ISVTX for mode in above)
    return not (foreign or (os.name == "posix" and replaceable)) and os.access(folder, os.W_OK | os.X_OK)


def _remove_oldest(folder: Path) -> None:
    """Remove the oldest files of a folder that is too large, down to half of the limit."""
    files = []
    for path in folder.iterdir():
        try:
            status = path.stat()
        except OSError:  # another process has removed it
            continue
        files.append((status.st_mtime, status.st_size, path))
    size = sum(size for _, size, _ in files)
    if size <= MAX_BYTES:
        return
    for _, bytes_of_file, path in sorted(files):
        _unlink(path)
        size -= bytes_of_file
        if size <= MAX_BYTES // 2:
            return


def _remove_damaged(folder: Path) -> None:
    """Let no warning be shown where a program cannot be read or written, and remove it: JAX then compiles and stores it."""
    if sys.warnoptions:  # the user says what happens to warnings
        return
    show = warnings.showwarning

    def show_or_remove(message: Warning | str, *arguments: Any, **options: Any) -> None:
        failed = _FAILED.match(str(message))
        if failed is None:
            return show(message, *arguments, **options)
        for path in folder.glob(f"{glob.escape(failed[2])}-*"):
            _unlink(path)

    warnings.filterwarnings("always", _FAILED.pattern)
    warnings.showwarning = show_or_remove


def _unlink(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError:  # another process reads it, on Windows
        return

"""Which code produced a result: fedhdp's version and, in a git checkout, the commit."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
from functools import cache
from pathlib import Path
from typing import NamedTuple

import fedhdp

GIT_SECONDS = 5


class Provenance(NamedTuple):
    """The version of fedhdp, the commit of its checkout, and whether the package's files differ from that commit."""

    version: str
    commit: str | None = None
    modified: bool | None = None


@cache
def provenance() -> Provenance:
    """The provenance of the package that is running; without commit outside of a checkout or without git."""
    package = Path(fedhdp.__file__).parent
    if not (package.parent / ".git").exists():  # a repository further up is another project's
        return Provenance(fedhdp.__version__)
    commit = _git(package, "rev-parse", "HEAD")
    changes = _git(package, "status", "--porcelain", "--", ".")
    return Provenance(fedhdp.__version__, commit, None if changes is None else changes != "")


def utc_now() -> str:
    """The time in UTC, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(sep=" ", timespec="seconds").removesuffix("+00:00")


def describe_machine() -> str:
    """The system, its cores, and the versions of Python and JAX, without the machine's name."""
    system = (
        f"{platform.system()} {platform.machine()}, {os.cpu_count() or 1} cores, Python {platform.python_version()}"
    )
    return f"{system}, jax {importlib.metadata.version('jax')}"


def _git(directory: Path, *arguments: str) -> str | None:
    command = ["git", "-C", str(directory), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=GIT_SECONDS, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None

"""Settings and fixtures of all tests."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
from helpers import tiny_data
from hypothesis import settings

from fedhdp.data import FederatedData

# Tests compile the same small programs in many processes: they share what is compiled.
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "2")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", os.path.join(tempfile.gettempdir(), "fedhdp-tests-compiled"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
settings.register_profile("fedhdp", deadline=None)  # a machine with too much to do fails no test
settings.load_profile("fedhdp")

OPTIMIZED = ("engine", "simulation", "test_")  # where numbers are compared to the last bit, or with bounds on rounding


MAX_MEMORY_MAPS = (
    20_000  # Linux gives a process 65,530, every compiled program takes some, and without any it is aborted
)


@pytest.fixture(scope="module", autouse=True)
def _compiler(request):
    """Optimize the programs of some tests as users' are, and those of others little, which compiles faster.

    Modules of one kind share what is compiled while there are memory maps for it.
    """
    import jax  # not above: it would not see the cache's folder

    subject = request.path.relative_to(Path(__file__).parent).as_posix()
    is_optimized = subject.startswith(OPTIMIZED)
    if jax.config.read("jax_disable_most_optimizations") is is_optimized or _memory_maps() > MAX_MEMORY_MAPS:
        jax.clear_caches()
    jax.config.update("jax_disable_most_optimizations", not is_optimized)
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = str(int(not is_optimized))  # of other processes


def _memory_maps() -> int:
    """The memory maps of this process; 0 on systems that do not tell."""
    try:
        with open("/proc/self/maps", "rb") as maps:
            return sum(1 for _ in maps)
    except OSError:
        return 0


@pytest.fixture(scope="session")
def data() -> FederatedData:
    """Nineteen clients, from one example each to thirteen."""
    return tiny_data([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 4, 4, 4, 9, 1, 6])


@pytest.fixture
def drawn(monkeypatch) -> list:
    """The figures of matplotlib that a test saves, in the resolution of their files: letters have whole pixels."""
    kind = pytest.importorskip("matplotlib.figure").Figure
    saved, save = [], kind.savefig

    def keep(figure: Any, *args: Any, **options: Any) -> None:
        save(figure, *args, **options)
        figure.set_dpi(options.get("dpi", figure.dpi))
        saved.append(figure)

    monkeypatch.setattr(kind, "savefig", keep)
    return saved

"""The command line's compilation cache: which folder, whose, and what a damaged program does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fedhdp.cli import _compilation_cache
from fedhdp.cli._compilation_cache import use_compilation_cache

COMPILE = """
from fedhdp.cli._compilation_cache import use_compilation_cache
use_compilation_cache()
import jax
print(jax.jit(lambda x: x + 1)(1.0))
"""


def run_in_process(code: str, folder: Path | str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a program whose cache folder is this one."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    variables = {**inherited, "FEDHDP_COMPILATION_CACHE": str(folder), **environment}
    return subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=True)


def programs(folder: Path) -> dict[Path, int]:
    """The compiled programs of a folder, with their sizes."""
    return {path: path.stat().st_size for path in folder.rglob("*-cache")}


@pytest.fixture
def _variables(monkeypatch):
    """No setting of JAX's own, and no change to JAX in this process."""
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)

    def refuse(*arguments: object) -> None:
        raise AssertionError(arguments)

    monkeypatch.setattr("jax.config.update", refuse)


@pytest.mark.process
def test_programs_are_kept_and_damaged_ones_replaced_in_silence(tmp_path):
    first = run_in_process(COMPILE, tmp_path)
    kept = programs(tmp_path)
    assert len(kept) > 0
    assert all(path.parent.stat().st_mode & 0o077 == 0 for path in kept)
    for path, size in kept.items():
        os.truncate(path, size // 2)  # as a process that was killed while it wrote
    second = run_in_process(COMPILE, tmp_path)
    assert (second.stdout, second.stderr) == (first.stdout, "")
    assert programs(tmp_path) == kept


@pytest.mark.process
def test_generated_images_are_kept_beside_the_programs(tmp_path):
    use = "from fedhdp.cli._compilation_cache import use_compilation_cache; use_compilation_cache()"
    code = f"{use}; from fedhdp.datasets import make_handwriting; make_handwriting(2, 1, 1, 10)"
    run_in_process(code, tmp_path)
    (images,) = tmp_path.rglob("handwriting-*.npz")
    assert images.stat().st_mode & 0o077 == 0
    assert images.parent in {path.parent for path in programs(tmp_path)}


@pytest.mark.process
def test_library_keeps_no_programs(tmp_path):
    code = "import fedhdp.simulation, fedhdp.experiments, fedhdp.cli, jax; print(jax.config.jax_compilation_cache_dir)"
    assert run_in_process(code, tmp_path).stdout == "None\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.process
def test_default_is_in_the_cache_of_the_user(tmp_path):
    run_in_process(COMPILE, "", XDG_CACHE_HOME=str(tmp_path))
    assert all(path.is_relative_to(tmp_path / "fedhdp" / "compiled") for path in programs(tmp_path))
    assert programs(tmp_path)


@pytest.mark.usefixtures("_variables")
def test_off(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("FEDHDP_COMPILATION_CACHE", "off")
    use_compilation_cache()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("_variables")
def test_setting_of_jax_has_precedence(monkeypatch, tmp_path):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "own"))
    monkeypatch.setenv("FEDHDP_COMPILATION_CACHE", str(tmp_path / "other"))
    use_compilation_cache()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("_variables")
def test_folder_that_cannot_be_made_is_not_used(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FEDHDP_COMPILATION_CACHE", str(tmp_path / "file"))
    use_compilation_cache()


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="needs file modes")
@pytest.mark.usefixtures("_variables")
@pytest.mark.parametrize("name", ["compiled", "."])
def test_folder_that_others_can_write_or_replace_is_not_used(monkeypatch, tmp_path, name):
    """Whoever writes there could have their programs executed."""
    folder = tmp_path / "compiled"
    folder.mkdir(mode=0o700)
    assert _compilation_cache._is_own_folder(folder)
    (tmp_path / name).chmod(0o777)
    assert not _compilation_cache._is_own_folder(folder)
    monkeypatch.setenv("FEDHDP_COMPILATION_CACHE", str(folder))
    use_compilation_cache()


def test_oldest_programs_go_first(monkeypatch, tmp_path):
    monkeypatch.setattr(_compilation_cache, "MAX_BYTES", 40)
    for age, name in enumerate("abcde"):
        path = tmp_path / name
        path.write_bytes(bytes(10))
        os.utime(path, (1000 - age, 1000 - age))
    _compilation_cache._remove_oldest(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]

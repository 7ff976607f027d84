"""Fixtures of the experiments' tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from experiment_helpers import keep_going, tiny

from fedhdp.experiments import run


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory) -> Path:
    """The directory of an uninterrupted run of the tiny experiment."""
    directory = tmp_path_factory.mktemp("finished") / "run"
    run(tiny(), directory, keep_going)
    return directory

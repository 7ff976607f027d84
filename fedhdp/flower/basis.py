"""The public basis of a deployment: the matrix in the run directory, made once of the second moments that clients sent."""

from __future__ import annotations

import io
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from fedhdp.basis import Moments, add_moments
from fedhdp.errors import DataError
from fedhdp.flower.config import Deployment
from fedhdp.results.store import BASIS_FILE, atomic_write


def read_basis(deployment: Deployment) -> np.ndarray | None:
    """The matrix that a run has; None: it is not made yet."""
    path = Path(deployment.out) / BASIS_FILE
    return np.load(path, allow_pickle=False) if path.exists() else None


def write_basis(deployment: Deployment, moments: Iterable[Moments]) -> np.ndarray:
    """Make the matrix of the second moments of clients who opted out, and store it.

    Raises:
        DataError: If there are none, or their inputs have fewer directions than the basis has columns.
        InvalidValueError: If the basis has more columns than there are inputs.
    """
    config, moments = deployment.basis, list(moments)
    assert config is not None
    if not moments:
        raise DataError("basis must be of clients who opted out and sent second moments, got none", "basis", "pca")
    basis = config.of_moments(add_moments(moments))
    content = io.BytesIO()
    np.save(content, basis)
    Path(deployment.out).mkdir(parents=True, exist_ok=True)
    atomic_write(Path(deployment.out) / BASIS_FILE, content.getvalue())
    return basis

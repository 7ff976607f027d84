"""The server: the initial model, and its metrics on the server's own test set."""

from __future__ import annotations

from task import INPUT_SCALE, MODEL, load_server_test

from fedhdp.flower import Arrays, initial_arrays, scorer, server_app


def score(arrays: Arrays) -> dict[str, float]:
    """The model's metrics on the server's test set."""
    return scorer(MODEL, *load_server_test(), INPUT_SCALE)(arrays)


app = server_app(lambda deployment: initial_arrays(MODEL, deployment.seed), score)

"""The server: where the model starts and how good it is on the server's own test set. Everything else is fedhdp's."""

from __future__ import annotations

from task import MODEL, server_test

from fedhdp.flower.server_app import server_app
from fedhdp.flower.trainer import score_with, start_model

app = server_app(
    start_model=lambda deployment: start_model(MODEL, deployment.seed),
    score=lambda arrays: score_with(MODEL, *server_test())(arrays),
)

"""A Flower app for tests that start processes: a model of six numbers, clients that add a half, some that misbehave."""

from __future__ import annotations

from pathlib import Path

PYPROJECT = """
[project]
name = "processes"
version = "1.0.0"
description = "For tests: a model of six numbers, clients that add a half, and some that misbehave."
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "fedhdp"

[tool.flwr.app.components]
serverapp = "server_app:app"
clientapp = "client_app:app"

[tool.flwr.app.config]
out = ""
ledger = ""
rounds = 3
clip = 1.0
min-available-clients = 1
enroll-timeout-seconds = 30.0
reply-timeout-seconds = 20.0
levels.open.sampling-rate = 1.0
levels.open.noise-multiplier = 0.0
levels.strict.sampling-rate = 1.0
levels.strict.noise-multiplier = 1.0
"""
SERVER_APP = """
import numpy as np
from fedhdp.flower import server_app

app = server_app(lambda deployment: {"w": np.zeros((2, 3), np.float32)})
"""
CLIENT_APP = """
import time
from pathlib import Path
from fedhdp.flower import Trainer, client_app


def trainer(context):
    config = context.node_config

    def fit(parameters, personal, pull, round):
        with open(Path(config["directory"]) / "rounds", "a") as rounds:
            rounds.write(f"{round}\\n")
        time.sleep(config.get("seconds", 0))
        gate, deadline = config.get("gate"), time.monotonic() + 60
        while gate and not Path(gate).exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        step = float("nan") if config.get("nan") else 0.5
        return {"w": parameters["w"] + step}, {"w": personal["w"] + 0.25}

    return Trainer(fit)


app = client_app(trainer)
"""


def write_app(folder: Path, server_app: str = SERVER_APP, client_app: str = CLIENT_APP) -> Path:
    """Write the app's files into a new folder."""
    folder.mkdir()
    for name, text in {"pyproject.toml": PYPROJECT, "server_app.py": server_app, "client_app.py": client_app}.items():
        (folder / name).write_text(text)
    return folder

"""Flower apps for tests: one for processes, and the examples over the in-process grid.

The app for processes has a model of six numbers, clients that add a half, and some that misbehave.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType

from flower_helpers import InProcessGrid, Node
from flwr.app import Context, RecordDict

from fedhdp.results.schema import VariantResult
from fedhdp.results.store import VariantDirectory

EXAMPLES = Path(__file__).parents[1] / "examples"

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


@contextlib.contextmanager
def app_modules(folder: Path) -> Iterator[Callable[[str], ModuleType]]:
    """Imports an app's modules by name, as Flower does."""
    names = [file.stem for file in folder.glob("*.py")]
    sys.path.insert(0, str(folder))
    try:
        for name in names:
            sys.modules.pop(name, None)
        yield importlib.import_module
    finally:
        sys.path.remove(str(folder))
        for name in names:
            sys.modules.pop(name, None)


def run_config(folder: Path, tmp_path: Path, **changes: object) -> dict:
    """An app's configuration, with the run in a directory of the test."""

    def flat(table, prefix=""):
        for key, value in table.items():
            yield from flat(value, f"{prefix}{key}.") if isinstance(value, dict) else [(prefix + key, value)]

    config = tomllib.loads((folder / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    return dict(flat(config)) | {"out": str(tmp_path / "run"), "ledger": str(tmp_path / "ledger")} | changes


def run_app(
    client_app: ModuleType, server_app: ModuleType, config: dict, node_configs: Iterable[dict]
) -> VariantResult:
    """Run an app with a node for each of the node configurations."""
    nodes = [Node(id, client_app.app, **node_config) for id, node_config in enumerate(node_configs, 1)]
    for node in nodes:
        node.context.run_config = config
    server_app.app(InProcessGrid(nodes), Context(1, 1, {}, RecordDict(), config))
    return VariantDirectory(Path(config["out"]) / "fedhdp").result()

"""A variant to log, and the functions of MLflow and Weights & Biases that the loggers call, which record their arguments."""

from __future__ import annotations

import math
import sys
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

from fedhdp.results.loggers import LoggedVariant
from fedhdp.results.schema import MetricRow

ROWS = [
    MetricRow(5, "server", "global", "accuracy", 0.5),
    MetricRow(5, "server", "global", "clip", 0.25),
    MetricRow(5, "opted out", "global", "accuracy_clients", 4.0),
    MetricRow(5, "opted out", "global", "epsilon", math.inf),
    MetricRow(5, "private", "global", "epsilon", 1.5),
    MetricRow(5, "private", "global", "refused", 1.0),
]
PUBLIC = {"server/global/accuracy": 0.5, "server/global/clip": 0.25, "private/global/epsilon": 1.5}
ALL = PUBLIC | {"opted out/global/accuracy_clients": 4.0, "private/global/refused": 1.0}
CONFIG = {"rounds": 9, "mechanism": {"groups": [{"clients": ["ann", "bob"]}, {"clients": 5}]}}


def variant_in(directory, round: int = 0) -> LoggedVariant:
    """A variant whose directory exists."""
    path = directory / "run" / "fedhdp"
    path.mkdir(parents=True, exist_ok=True)
    return LoggedVariant("tiny", "run-0123", "FedHDP", path, round, CONFIG, False, False)


class Entity(NamedTuple):
    """A parameter, or a metric with its time and round."""

    key: str
    value: Any
    timestamp: int | None = None
    step: int | None = None


class FakeMlflow:
    """A tracking server: runs by id, each with its parameters, metrics and statuses."""

    def __init__(self, uri: str):
        self.uri, self.runs, self.experiments = uri, {}, {}

    def install(self, monkeypatch) -> FakeMlflow:
        """Put modules of MLflow's names in place."""
        mlflow, entities = ModuleType("mlflow"), ModuleType("mlflow.entities")
        mlflow.get_tracking_uri, mlflow.MlflowClient = (lambda: self.uri), lambda uri=None: self
        entities.Metric = entities.Param = Entity
        mlflow.__spec__ = entities.__spec__ = SimpleNamespace(name="mlflow")
        monkeypatch.setitem(sys.modules, "mlflow", mlflow)
        monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
        return self

    def get_experiment_by_name(self, name):
        return SimpleNamespace(experiment_id=self.experiments[name]) if name in self.experiments else None

    def create_experiment(self, name):
        self.experiments[name] = f"experiment {len(self.experiments)}"
        return self.experiments[name]

    def create_run(self, experiment, run_name):
        run = f"run {len(self.runs)}"
        self.runs[run] = SimpleNamespace(name=run_name, metrics=[], params={}, statuses=["RUNNING"])
        return SimpleNamespace(info=SimpleNamespace(run_id=run))

    def update_run(self, run, status):
        self.runs[run].statuses.append(status)

    set_terminated = update_run

    def log_batch(self, run, metrics=(), params=()):
        assert len(metrics) <= 1000
        assert len(params) <= 100
        self.runs[run].metrics += metrics
        self.runs[run].params |= {param.key: param.value for param in params}


class FakeWandb:
    """Runs by id; a run that is initialized again goes on."""

    def __init__(self) -> None:
        self.runs: dict[str, SimpleNamespace] = {}

    def install(self, monkeypatch) -> FakeWandb:
        """Put a module of W&B's name in place."""
        module = ModuleType("wandb")
        module.init, module.__spec__ = self.init, SimpleNamespace(name="wandb")
        monkeypatch.setitem(sys.modules, "wandb", module)
        return self

    def init(self, *, id, resume, reinit, **options):
        assert (resume, reinit) == ("allow", "create_new")
        run = self.runs.setdefault(id, SimpleNamespace(metrics=[], starts=[], ends=[]))
        run.starts.append(options)
        run.log = lambda values, step: run.metrics.append((step, values))
        run.finish = lambda exit_code: run.ends.append(exit_code)
        return run

"""Loggers: TensorBoard, MLflow and Weights & Biases, by name in an experiment's file.

A logger is a value with ``start``. It returns two functions: ``log(round, values)``, and ``finish(completed)``. Each variant
is a run of its own; a run that resumes continues it.

What is measured on clients' data has no noise. A remote logger gets it, and the ids of clients, only if ``client_metrics``
asks for it. It always gets epsilons, the clip, unless that moves without noise, and what is measured on the server's test
set, unless that set consists of clients' examples. Of a variant that gives no noise to clients who chose some, models and
clips follow their data, so that it gets neither. Remote is what may be on another machine: W&B, also offline, since its
files are made to be uploaded, and every address of MLflow that is neither a path nor a database file.
"""

from __future__ import annotations

import hashlib
import importlib.util
import math
import re
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec

from fedhdp.errors import ConfigError, RunError, require
from fedhdp.mechanism import SERVER
from fedhdp.results.schema import MetricRow
from fedhdp.results.store import atomic_write, slug

MLFLOW_FILE = "mlflow_run"  # in a variant's directory: the run's id, which MLflow chooses
MLFLOW_PARAMS, MLFLOW_METRICS, MLFLOW_LENGTH = 100, 1000, 500  # the most in one request, and the longest value
LOCAL_SCHEMES = ("file", "sqlite")
SQLITE = "sqlite:///"
WANDB_SILENT = {  # the terminal shows what clients measure; a diff of the repository may have their data
    "console": "off",
    "disable_git": True,
    "disable_code": True,
    "save_code": False,
}


class LoggedVariant(NamedTuple):
    """The variant whose run a logger starts or continues.

    Args:
        experiment: The experiment's name.
        run: The run's id, which is unique.
        name: The variant's name.
        path: The variant's directory.
        round: The rounds completed, more than 0 where the run resumes.
        config: The experiment and the variant.
        server_has_client_data: Whether the server's test set consists of clients' examples, or the model follows the data
            of clients who chose noise without it.
        clip_has_client_data: Whether the clip follows clients' updates without noise.
    """

    experiment: str
    run: str
    name: str
    path: Path
    round: int
    config: dict[str, Any]
    server_has_client_data: bool = True
    clip_has_client_data: bool = True


class LogRun(NamedTuple):
    """A run in a logger."""

    log: Callable[[int, dict[str, float]], None]
    finish: Callable[[bool], None]


class TensorBoard(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="name", tag="tensorboard"):
    """Event files, written by tensorboardX.

    Args:
        directory: Where to write, relative to the experiment's file: in ``directory/RUN/VARIANT``. None: the folder
            ``tensorboard`` of the run's directory.
    """

    directory: str | None = None

    def __post_init__(self) -> None:
        _check_directory(self.directory)

    @property
    def takes_client_metrics(self) -> bool:
        """Whether it gets what is measured on clients' data: always, since its files are local."""
        return True

    def start(self, variant: LoggedVariant) -> LogRun:
        """Open an event file; steps after the checkpoint from which a run resumes are purged."""
        from tensorboardX import SummaryWriter

        base = variant.path.parent / "tensorboard" if self.directory is None else Path(self.directory) / variant.run
        directory = base / variant.path.name
        purge_step = variant.round + 1 if directory.exists() else None
        suffix = f".{time.time_ns()}"  # files are otherwise named by the second
        writer = SummaryWriter(str(directory), purge_step=purge_step, filename_suffix=suffix)
        if purge_step is None:
            lines = (f"{key} = {value}" for key, value in _flatten(variant.config))
            writer.add_text("experiment", "\n".join(f"    {line}" for line in lines), 0)

        def log(round: int, values: dict[str, float]) -> None:
            for name, value in values.items():
                writer.add_scalar(name.replace(" ", "_"), value, round)
            writer.flush()

        return LogRun(log, lambda completed: writer.close())


class MLflow(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="name", tag="mlflow"):
    """MLflow's tracking.

    Args:
        tracking_uri: A server, or a database as ``sqlite:///runs.db``, relative to the experiment's file. None: MLflow's own
            setting.
        project: MLflow's experiment. None: the experiment's name.
        client_metrics: Whether a server also gets what is measured on clients' data, without noise.
    """

    tracking_uri: str | None = None
    project: str | None = None
    client_metrics: bool = False

    @property
    def takes_client_metrics(self) -> bool:
        """Whether it gets what is measured on clients' data: if it is local, or asked for."""
        import mlflow

        return self.client_metrics or _is_local(str(self.tracking_uri or mlflow.get_tracking_uri()))

    def start(self, variant: LoggedVariant) -> LogRun:
        """Create a run, or continue the one whose id is in the variant's directory."""
        import mlflow
        from mlflow.entities import Metric, Param

        client, path = mlflow.MlflowClient(self.tracking_uri), variant.path / MLFLOW_FILE
        if path.exists():
            run = path.read_text(encoding="utf-8")
            client.update_run(run, status="RUNNING")
        else:
            project = self.project or variant.experiment
            existing = client.get_experiment_by_name(project)
            experiment = client.create_experiment(project) if existing is None else existing.experiment_id
            run = client.create_run(experiment, run_name=f"{variant.run}/{variant.name}").info.run_id
            params = [Param(key, str(value)[:MLFLOW_LENGTH]) for key, value in _flatten(variant.config)]
            for part in _parts(params, MLFLOW_PARAMS):
                client.log_batch(run, params=part)

        def log(round: int, values: dict[str, float]) -> None:
            if not path.exists():
                atomic_write(path, run.encode())
            now = int(1000 * time.time())
            metrics = [Metric(name, value, now, round) for name, value in values.items()]
            for part in _parts(metrics, MLFLOW_METRICS):
                client.log_batch(run, metrics=part)

        return LogRun(log, lambda completed: client.set_terminated(run, "FINISHED" if completed else "KILLED"))


class WandB(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="name", tag="wandb"):
    """Weights & Biases.

    Args:
        project: The project. None: the experiment's name.
        entity: The user or team. None: W&B's own setting.
        directory: Where W&B keeps its local files, relative to the experiment's file. None: the variant's directory.
        client_metrics: Whether W&B also gets what is measured on clients' data, without noise.
    """

    project: str | None = None
    entity: str | None = None
    directory: str | None = None
    client_metrics: bool = False

    def __post_init__(self) -> None:
        _check_directory(self.directory)

    @property
    def takes_client_metrics(self) -> bool:
        """Whether it gets what is measured on clients' data: only if asked for."""
        return self.client_metrics

    def start(self, variant: LoggedVariant) -> LogRun:
        """Create a run or continue it; its id follows from the run's and the variant's name."""
        import wandb

        name = f"{variant.run}/{variant.name}"
        run = wandb.init(
            project=self.project or slug(variant.experiment),
            entity=self.entity,
            dir=self.directory or str(variant.path),
            id=hashlib.sha256(name.encode()).hexdigest()[:16],
            name=name,
            config=variant.config,
            resume="allow",
            reinit="create_new",
            settings={} if self.client_metrics else WANDB_SILENT,
        )
        return LogRun(
            lambda round, values: run.log(values, step=round),
            lambda completed: run.finish(exit_code=0 if completed else 1),
        )


Logger = TensorBoard | MLflow | WandB
_PACKAGES = {
    "mlflow": "mlflow",
    "wandb": "wandb",
    "tensorboard": "tensorboardX",
}  # in the order of starting: files last
_LOGGERS: dict[str, type[Logger]] = {"mlflow": MLflow, "wandb": WandB, "tensorboard": TensorBoard}


def name_of(logger: str | Logger) -> str:
    """A logger's name."""
    return logger if isinstance(logger, str) else str(type(logger).__struct_config__.tag)


def check_names(loggers: Sequence[str | Logger]) -> None:
    """Refuse unknown loggers and two of a kind.

    Raises:
        InvalidValueError: If there are such.
    """
    names = [name_of(logger) for logger in loggers]
    for name in names:
        require(name in _PACKAGES, "loggers", name, f"one of {', '.join(sorted(_PACKAGES))}")
    require(len(set(names)) == len(names), "loggers", names, "different ones")


def resolve_paths(loggers: Iterable[str | Logger], directory: Path) -> tuple[str | Logger, ...]:
    """The loggers with paths that are relative to this directory made absolute."""

    def resolve(logger: str | Logger) -> str | Logger:
        if isinstance(logger, MLflow) and (uri := logger.tracking_uri or "").startswith(SQLITE):
            path = directory / uri.removeprefix(SQLITE)
            return msgspec.structs.replace(logger, tracking_uri=f"{SQLITE}{path.as_posix()}")
        if isinstance(logger, str | MLflow) or logger.directory is None:
            return logger
        return msgspec.structs.replace(logger, directory=str(directory / logger.directory))

    return tuple(map(resolve, loggers))


def check_installed(loggers: Iterable[str | Logger]) -> None:
    """Refuse loggers whose package is missing.

    Raises:
        ConfigError: If one is; it names the extra to install.
    """
    for name in map(name_of, loggers):
        if importlib.util.find_spec(_PACKAGES[name]) is None:
            hint = f"needs the package {_PACKAGES[name]}: pip install 'fedhdp[{name}]'"
            raise ConfigError(f"loggers: {name!r} {hint}", "loggers", name)


class VariantLog:
    """The loggers of one variant, started.

    Raises:
        RunError: If a logger does not start. A logger that fails later warns, and gets no more.
    """

    def __init__(self, loggers: Iterable[str | Logger], variant: LoggedVariant):
        self._runs: dict[str, tuple[bool, LogRun]] = {}  # whether it takes client metrics
        self._variant = variant
        values = {name_of(logger): _LOGGERS[logger]() if isinstance(logger, str) else logger for logger in loggers}
        for name in (name for name in _PACKAGES if name in values):
            logger = values[name]
            try:
                takes_all = logger.takes_client_metrics
                config = variant.config if takes_all else without_ids(variant.config)
                self._runs[name] = takes_all, logger.start(variant._replace(config=config))
            except Exception as error:  # of any class, by the package
                self.finish(completed=False)
                raise RunError(f"loggers: {name} does not start: {_line(error)}", "loggers", name) from error

    def log(self, round: int, rows: Iterable[MetricRow]) -> None:
        """Log what was measured after so many rounds; values that are not finite are left out."""
        rows = [row for row in rows if math.isfinite(row.value)]
        for name, (takes_all, run) in list(self._runs.items()):
            values = {_tag(row): row.value for row in rows if takes_all or self._is_public(row)}
            self._attempt(name, partial(run.log, round, values))

    def finish(self, completed: bool) -> None:
        """End the runs; one that was not completed may be continued."""
        for name, (_, run) in list(self._runs.items()):
            self._attempt(name, partial(run.finish, completed))
        self._runs = {}

    def _is_public(self, row: MetricRow) -> bool:
        """Whether a row has nothing of clients' data without noise: epsilons, most clips, the server's own test set."""
        if row.metric == "clip" or row.metric.startswith("clip/"):
            return not self._variant.clip_has_client_data
        return row.metric == "epsilon" or (row.group == SERVER and not self._variant.server_has_client_data)

    def _attempt(self, name: str, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # the training is worth more than its log
            del self._runs[name]
            warnings.warn(
                f"{name} failed and gets no more measurements of this variant: {_line(error)}",
                RuntimeWarning,
                stacklevel=3,
            )


def without_ids(config: Any) -> Any:
    """A configuration in which lists of client ids are replaced by their number."""
    if isinstance(config, Mapping):
        return {
            key: len(value) if key == "clients" and isinstance(value, list | tuple) else without_ids(value)
            for key, value in config.items()
        }
    return [without_ids(value) for value in config] if isinstance(config, list | tuple) else config


def _is_local(uri: str) -> bool:
    """Whether an address of MLflow is a path or a database file of this machine."""
    parts = urlsplit(uri)
    if len(parts.scheme) <= 1:  # a drive's letter looks like a scheme
        return not uri.startswith(("databricks", "//", r"\\"))
    return parts.scheme in LOCAL_SCHEMES and parts.netloc in ("", "localhost")


def _check_directory(directory: str | None) -> None:
    require("://" not in (directory or ""), "directory", directory, "a folder of this machine")


def _tag(row: MetricRow) -> str:
    """A row's name in a logger: the characters that all of them allow."""
    return re.sub(r"[^\w./ -]", "_", f"{row.group}/{row.model}/{row.metric}", flags=re.ASCII)


def _flatten(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """A nested configuration by dotted keys."""
    if isinstance(config, Mapping):
        items: Iterable[tuple[Any, Any]] = config.items()
    elif isinstance(config, list | tuple):
        items = enumerate(config)
    else:
        yield prefix, config
        return
    for key, value in items:
        yield from _flatten(value, f"{prefix}.{key}" if prefix else str(key))


def _parts(values: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    for first in range(0, len(values), size):
        yield values[first : first + size]


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"

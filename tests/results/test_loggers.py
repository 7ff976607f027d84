"""Loggers: TensorBoard's files are read back; MLflow and W&B are recorded by fakes."""

from __future__ import annotations

from pathlib import Path

import pytest
from experiment_helpers import keep_going, tiny
from fake_loggers import ALL, CONFIG, PUBLIC, ROWS, FakeMlflow, FakeWandb, variant_in
from helpers import raises_field, tiny_data
from msgspec.structs import replace

from fedhdp.data import FederatedData
from fedhdp.errors import ConfigError, RunError
from fedhdp.experiments import Interrupted, Variant, resume, run
from fedhdp.results import loggers
from fedhdp.results.loggers import MLflow, TensorBoard, VariantLog, WandB, without_ids


def read_events(directory) -> tuple[dict[str, dict[int, float]], list[str]]:
    """Scalars by tag and step, as TensorBoard shows them, and the tags of texts."""
    event_pb2 = pytest.importorskip("tensorboardX.proto.event_pb2")
    record = pytest.importorskip("tensorboardX.record_writer")
    assert record
    scalars, texts = {}, []
    for path in sorted(directory.glob("events.*")):
        content = path.read_bytes()
        while content:
            size = int.from_bytes(content[:8], "little")
            event, content = event_pb2.Event.FromString(content[12 : 12 + size]), content[16 + size :]
            if event.session_log.status == 1:  # START: later steps are purged
                for steps in scalars.values():
                    for step in [step for step in steps if step >= event.step]:
                        del steps[step]
            for value in event.summary.value:
                if value.HasField("simple_value"):
                    scalars.setdefault(value.tag, {})[event.step] = value.simple_value
                else:
                    texts.append(value.tag)
    return scalars, texts


def test_tensorboard_continues_without_the_rounds_that_are_run_again(tmp_path):
    pytest.importorskip("tensorboardX")
    for round, first in ((0, 5), (5, 10), (5, 10)):  # the second one dies after round 10 without a checkpoint
        log = VariantLog(("tensorboard",), variant_in(tmp_path, round))
        for step in range(first, first + 10, 5):
            log.log(step, [row._replace(round=step, value=row.value + round) for row in ROWS])
        log.finish(completed=True)
    scalars, texts = read_events(tmp_path / "run" / "tensorboard" / "fedhdp")
    assert scalars["server/global/accuracy"] == {5: 0.5, 10: 5.5, 15: 5.5}
    assert set(scalars) == {name.replace(" ", "_") for name in ALL}
    assert texts == ["experiment/text_summary"]


def test_tensorboard_in_a_directory_of_ones_own(tmp_path):
    pytest.importorskip("tensorboardX")
    log = VariantLog((TensorBoard(str(tmp_path / "logs")),), variant_in(tmp_path))
    log.finish(completed=True)
    assert len(list((tmp_path / "logs" / "run-0123" / "fedhdp").iterdir())) == 1


@pytest.mark.parametrize(
    ("logger", "uri", "values"),
    [
        (MLflow(), "https://tracking.example", PUBLIC),
        (MLflow(), "http://localhost:5000", PUBLIC),
        (MLflow(), "databricks", PUBLIC),
        (MLflow(), "databricks-uc", PUBLIC),
        (MLflow(), "file://storage.example/runs", PUBLIC),
        (MLflow(), "//storage.example/runs", PUBLIC),
        (MLflow(), "s3://bucket/runs", PUBLIC),
        (MLflow("postgresql://host/db"), "", PUBLIC),
        (MLflow(client_metrics=True), "https://tracking.example", ALL),
        (MLflow(), "file:///runs", ALL),
        (MLflow("sqlite:///runs.db"), "https://tracking.example", ALL),
        (MLflow("mlruns"), "https://tracking.example", ALL),
        (MLflow(r"C:\runs"), "https://tracking.example", ALL),
    ],
)
def test_mlflow_on_a_server_gets_clients_metrics_only_if_asked_for(monkeypatch, tmp_path, logger, uri, values):
    server = FakeMlflow(uri).install(monkeypatch)
    log = VariantLog((logger,), variant_in(tmp_path))
    log.log(5, ROWS)
    log.finish(completed=True)
    (run,) = server.runs.values()
    assert {metric.key: metric.value for metric in run.metrics} == values
    assert {metric.step for metric in run.metrics} == {5}
    assert ("mechanism.groups.0.clients.0" in run.params) == (values is ALL)
    assert (run.params["rounds"], list(server.experiments)) == ("9", ["tiny"])


def test_mlflow_continues_a_run(monkeypatch, tmp_path):
    server = FakeMlflow("file:///runs").install(monkeypatch)
    for round, completed in ((0, False), (5, True)):
        log = VariantLog(("mlflow",), variant_in(tmp_path, round))
        log.log(round + 5, ROWS)
        log.finish(completed)
    (run,) = server.runs.values()
    assert run.statuses == ["RUNNING", "KILLED", "RUNNING", "FINISHED"]
    assert {metric.step for metric in run.metrics} == {5, 10}


@pytest.mark.parametrize(("client_metrics", "values"), [(False, PUBLIC), (True, ALL)])
def test_wandb_gets_clients_metrics_only_if_asked_for(monkeypatch, tmp_path, client_metrics, values):
    server = FakeWandb().install(monkeypatch)
    for round, completed in ((0, False), (5, True)):
        log = VariantLog((WandB(project="hospitals", client_metrics=client_metrics),), variant_in(tmp_path, round))
        log.log(round + 5, ROWS)
        log.finish(completed)
    (run,) = server.runs.values()
    assert run.metrics == [(5, values), (10, values)]
    assert run.ends == [1, 0]
    config = CONFIG if client_metrics else without_ids(CONFIG)
    assert [(start["project"], start["config"]) for start in run.starts] == [("hospitals", config)] * 2
    assert (config["mechanism"]["groups"][0]["clients"] == 2) != client_metrics
    assert [start["settings"] for start in run.starts] == [{} if client_metrics else loggers.WANDB_SILENT] * 2


@pytest.mark.parametrize(("field", "name"), [("server_has_client_data", "accuracy"), ("clip_has_client_data", "clip")])
def test_what_follows_clients_data_without_noise_is_clients_data(monkeypatch, tmp_path, field, name):
    server = FakeWandb().install(monkeypatch)
    log = VariantLog(("wandb",), variant_in(tmp_path)._replace(**{field: True}))
    log.log(5, ROWS)
    (run,) = server.runs.values()
    assert run.metrics == [(5, {key: value for key, value in PUBLIC.items() if not key.endswith(name)})]


def test_models_of_a_variant_without_noise_stay_on_the_machine(monkeypatch, tmp_path):
    server = FakeMlflow("https://tracking.example").install(monkeypatch)
    variants = (Variant("Non-Private", "non_private"), Variant("FedHDP"))
    run(tiny(rounds=1, variants=variants, loggers=("mlflow",)), tmp_path / "run", keep_going)
    without, private = ({metric.key for metric in logged.metrics} for logged in server.runs.values())
    assert without == set()
    assert private == set(PUBLIC)


def test_data_is_clients_unless_it_says_otherwise():
    data = tiny_data([3, 4])
    assert not data.server_has_client_data
    assert FederatedData("mine", data.train, data.test, data.test.x_N, data.test.y_N, 3).server_has_client_data


@pytest.mark.parametrize("logger", [TensorBoard, WandB])
def test_an_address_is_no_folder(logger):
    with raises_field("directory"):
        logger(directory="s3://bucket/runs")


def test_paths_are_relative_to_the_experiments_file(tmp_path):
    named = (TensorBoard("logs"), MLflow("sqlite:///runs.db"), MLflow("https://tracking.example"), "wandb")
    resolved = loggers.resolve_paths(named, tmp_path)
    assert resolved == (TensorBoard(str(tmp_path / "logs")), MLflow(f"sqlite:///{tmp_path}/runs.db"), *named[2:])
    assert loggers.resolve_paths(resolved, Path("elsewhere")) == resolved


def test_a_logger_that_does_not_start_is_an_error(monkeypatch, tmp_path):
    def fail(**options):
        raise LookupError("no login\nsecond line")

    server = FakeMlflow("file:///runs").install(monkeypatch)
    FakeWandb().install(monkeypatch)
    monkeypatch.setattr("wandb.init", fail)
    with raises_field("loggers", RunError) as caught:
        VariantLog(("wandb", "mlflow"), variant_in(tmp_path))
    assert caught.value.value == "wandb"
    assert [run.statuses for run in server.runs.values()] == [["RUNNING", "KILLED"]]
    assert list((tmp_path / "run" / "fedhdp").iterdir()) == []


def test_a_logger_that_fails_later_warns_once(monkeypatch, tmp_path):
    server = FakeMlflow("file:///runs").install(monkeypatch)
    log = VariantLog(("mlflow",), variant_in(tmp_path))
    monkeypatch.setattr(server, "log_batch", lambda *_, **__: 1 / 0)
    with pytest.warns(RuntimeWarning, match="ZeroDivisionError"):
        log.log(5, ROWS)
    log.log(10, ROWS)
    log.finish(completed=True)


@pytest.mark.parametrize("name", ["tensorboard", "mlflow", "wandb"])
def test_a_missing_package_is_named_before_training(monkeypatch, tmp_path, name):
    monkeypatch.setattr(loggers.importlib.util, "find_spec", lambda package: None)
    with raises_field("loggers", ConfigError) as caught:
        run(tiny(loggers=(name,)), tmp_path / "run", keep_going)
    assert f"fedhdp[{name}]" in str(caught.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("value", "shown"), [(("tensorbord",), "tensorbord"), (("wandb", WandB()), ["wandb", "wandb"])]
)
def test_unknown_loggers_are_refused(value, shown):
    with raises_field("loggers") as caught:
        tiny(loggers=value)
    assert caught.value.value == shown


@pytest.mark.slow
def test_a_run_that_resumes_goes_on_in_its_loggers(monkeypatch, tmp_path):
    pytest.importorskip("tensorboardX")
    server = FakeWandb().install(monkeypatch)
    experiment = tiny(loggers=("tensorboard", WandB()), metrics=("auc", "accuracy"))
    experiment = replace(experiment, variants=(*experiment.variants, Variant(algorithm="non_private")))
    with pytest.raises(Interrupted):
        run(experiment, tmp_path / "run", lambda progress: progress.round < 6)
    summary = resume(tmp_path / "run", keep_going)
    assert len(server.runs) == len(summary.variants)
    for logged, result in zip(server.runs.values(), summary.variants, strict=True):
        assert [step for step, _ in logged.metrics] == [4, 8, 12]
        assert not [name for _, values in logged.metrics for name in values if name.startswith("private/personal")]
        is_private = result.name != "Non-Private"  # whose clip and model follow clients who chose noise
        shown = {"server/global/auc": result.value("auc")} if is_private else {}
        assert {name: logged.metrics[-1][1].get(name) for name in shown} == shown
        assert any(name.startswith("server/global/auc") for name in logged.metrics[-1][1]) == is_private
        assert ("server/global/clip" in logged.metrics[-1][1]) == is_private
        assert ("private/global/epsilon" in logged.metrics[-1][1]) == is_private
        assert logged.starts[0]["config"]["variant"]["name"] == result.name
    scalars, _ = read_events(tmp_path / "run" / "tensorboard" / "fedhdp")
    assert list(scalars["private/personal/accuracy"]) == [4, 8, 12]
    assert scalars["server/global/auc"][12] == pytest.approx(summary.variants[1].value("auc"), abs=1e-6)

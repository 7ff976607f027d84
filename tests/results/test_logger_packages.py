"""MLflow and Weights & Biases themselves, where they are installed; fakes stand in for them in `test_loggers`."""

from __future__ import annotations

import subprocess

import pytest
from fake_loggers import ALL, PUBLIC, ROWS, variant_in

from fedhdp.results.loggers import MLflow, VariantLog, WandB

pytestmark = pytest.mark.filterwarnings("ignore")  # the packages' own


@pytest.mark.slow
def test_mlflows_database_has_all_metrics_of_a_run_that_goes_on(tmp_path):
    mlflow = pytest.importorskip("mlflow")
    uri = f"sqlite:///{tmp_path}/runs.db"
    for round in (0, 5):
        log = VariantLog((MLflow(uri, "hospitals"),), variant_in(tmp_path, round))
        log.log(round + 5, ROWS)
        log.finish(completed=round == 5)
    client = mlflow.MlflowClient(uri)
    experiment = client.get_experiment_by_name("hospitals").experiment_id
    (run,) = client.search_runs([experiment])
    assert (run.info.status, run.info.run_name) == ("FINISHED", "run-0123/FedHDP")
    assert run.data.metrics == ALL
    assert run.data.params["mechanism.groups.0.clients.0"] == "ann"
    assert [metric.step for metric in client.get_metric_history(run.info.run_id, "server/global/accuracy")] == [5, 10]


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("client_metrics", [False, True])
def test_wandb_writes_what_is_public(monkeypatch, tmp_path, client_metrics):
    wandb = pytest.importorskip("wandb")
    monkeypatch.chdir(tmp_path)
    for name, value in (("MODE", "offline"), ("SILENT", "true"), ("SAVE_CODE", "true")):
        monkeypatch.setenv(f"WANDB_{name}", value)
    git = ("git", "-c", "user.name=a", "-c", "user.email=a@b")
    (tmp_path / "patients.csv").write_text("ann,0\n")
    for command in (["init", "-q"], ["add", "patients.csv"], ["commit", "-qm", "data"]):
        subprocess.run([*git, *command], check=True)
    (tmp_path / "patients.csv").write_text("ann,12345\n")
    log = VariantLog((WandB(client_metrics=client_metrics),), variant_in(tmp_path))
    log.log(5, ROWS)
    print("the terminal shows 67890")
    log.finish(completed=True)
    wandb.teardown()  # its process may still be writing
    (file,) = (tmp_path / "run" / "fedhdp" / "wandb").glob("offline-run-*/run-*.wandb")
    written = b"".join(path.read_bytes() for path in file.parent.rglob("*") if path.is_file())
    expected = {name.encode() for name in (ALL if client_metrics else PUBLIC)}
    assert {name for name in map(str.encode, ALL) if name in written} == expected
    assert (b'"ann"' in written) == client_metrics
    assert client_metrics or not [secret for secret in (b"12345", b"67890") if secret in written]

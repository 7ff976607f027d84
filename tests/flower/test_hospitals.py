"""The hospitals' Flower app, with its PyTorch network, over the in-process grid."""

from __future__ import annotations

import csv

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedhdp[flower]'")
pytest.importorskip("torch", reason="PyTorch is not installed")

from flower_apps import EXAMPLES, app_modules, run_app, run_config

APP, PATIENTS = EXAMPLES / "hospitals_flower", EXAMPLES / "hospitals" / "patients.csv"


@pytest.fixture
def load_module():
    with app_modules(APP) as load:
        yield load


@pytest.mark.slow
def test_twenty_virtual_hospitals(tmp_path, load_module):
    rates = {f"levels.{level}.sampling-rate": 1.0 for level in ("open", "mild", "strict")}
    settings = {"app.patients": str(PATIENTS), "app.epochs": 3, "noise-seed": 0}
    config = run_config(APP, tmp_path, rounds=2, **rates, **settings)
    node_configs = [{"partition-id": number, "num-partitions": 20} for number in range(20)]
    variant = run_app(load_module("client_app"), load_module("server_app"), config, node_configs)
    assert {group.name: group.clients for group in variant.groups} == {"strict": 8, "mild": 8, "open": 4}
    assert sum(group.refused for group in variant.groups) == 0
    assert all(group.values["personal/auc"] > 0.7 for group in variant.groups)


def test_hospital_with_its_own_table(tmp_path, load_module):
    with open(PATIENTS, encoding="utf-8", newline="") as file:
        header, *rows = csv.reader(file)
    node_configs = []
    for hospital, level in {"H03": "strict", "H05": "open", "H07": None}.items():
        path = tmp_path / f"{hospital}.csv"
        with open(path, "w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows([header, *(row for row in rows if row[0] == hospital)])
        node_configs.append({"patients": str(path)} | ({"privacy": level} if level else {}))
    config = run_config(APP, tmp_path, rounds=1, **{"min-available-clients": 3, "app.epochs": 1})
    variant = run_app(load_module("client_app"), load_module("server_app"), config, node_configs)
    assert {group.name: group.clients for group in variant.groups} == {"strict": 2, "open": 1}
    assert sum(group.refused for group in variant.groups) == 0


def test_auc_counts_ties_half(load_module, monkeypatch):
    import torch

    client_app = load_module("client_app")
    monkeypatch.setattr(client_app, "load_model", lambda arrays: lambda x: x)
    logits = torch.tensor([[0.0, 2.0], [0.0, 1.0], [0.0, 1.0], [0.0, 0.0]])
    scores = client_app.score({}, (logits, torch.tensor([1, 1, 0, 0])))
    assert scores["auc"] == pytest.approx((1 + 1 + 0.5 + 1) / 4)

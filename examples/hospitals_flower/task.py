"""The task: one hospital's patients, and a small PyTorch network that tells malignant tumors from benign ones."""

from __future__ import annotations

import csv
from functools import lru_cache

import numpy as np
import torch
from flwr.app import Context
from torch import nn

NOT_FEATURES = ("hospital", "privacy", "diagnosis")
Patients = tuple[torch.Tensor, torch.Tensor]  # features and diagnoses

torch.set_num_threads(1)  # the table of a hospital is small, and several hospitals share a machine in a simulation


def new_model() -> nn.Module:
    """The network."""
    return nn.Sequential(nn.Linear(30, 8), nn.ReLU(), nn.Linear(8, 2))


@lru_cache
def read_rows(path: str) -> list[dict[str, str]]:
    """The rows of a table of patients."""
    with open(path, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def own_rows(context: Context) -> list[dict[str, str]]:
    """The hospital's own rows: all of the table that it names in its node config; in a simulation, its part of one table."""
    if "patients" in context.node_config:
        return read_rows(str(context.node_config["patients"]))
    rows = read_rows(str(context.run_config["app.patients"]))
    hospitals = sorted({row["hospital"] for row in rows})
    return [row for row in rows if row["hospital"] == hospitals[int(context.node_config["partition-id"])]]


def choose_level(context: Context) -> str | None:
    """The level that the hospital chose in its node config; None gets the strictest."""
    if "num-partitions" in context.node_config:  # a simulation, where nodes cannot be configured
        return own_rows(context)[0]["privacy"]
    level = context.node_config.get("privacy")
    return None if level is None else str(level)


def load_patients(context: Context) -> tuple[Patients, Patients]:
    """The hospital's patients to train on, and every fourth to test on; standardized by statistics that never leave it."""
    rows = own_rows(context)
    x_NF = np.array([[float(row[name]) for name in row if name not in NOT_FEATURES] for row in rows], np.float32)
    y = torch.tensor([row["diagnosis"] == "malignant" for row in rows]).long()
    is_test = np.arange(len(rows)) % 4 == 3
    x = torch.tensor((x_NF - x_NF[~is_test].mean(axis=0)) / (x_NF[~is_test].std(axis=0) + 1e-6))
    return (x[~is_test], y[~is_test]), (x[is_test], y[is_test])

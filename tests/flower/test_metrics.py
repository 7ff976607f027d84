"""Metrics in a deployment: what is asked for, sent, and named in the results."""

from __future__ import annotations

import math

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedhdp[flower]'")

from flower_helpers import (
    PLAIN_MODEL,
    TWO_LEVELS,
    InProcessGrid,
    Node,
    make_deployment,
    plain_node,
    plain_trainer,
    strict_node,
    with_records,
)
from flwr.app import Context, MetricRecord

from fedhdp.flower import Deployment, Trainer, client_app
from fedhdp.flower.serverapp import run_deployment

METRICS = ("auc", "loss", "mine")


def measuring_trainer(context: Context) -> Trainer:
    """A trainer with metrics of its own; AUC is undefined for some, and one metric is not asked for."""
    auc = math.nan if context.node_config["privacy"] == "open" else 0.75
    scores = {"secret": 1.0, "mine": 3.0, "loss": 0.5, "auc": auc}
    return plain_trainer(context)._replace(score=lambda arrays: scores)


def test_metrics_are_named_in_the_results(tmp_path):
    grid = InProcessGrid(
        [Node(id, client_app(measuring_trainer), privacy=("strict", "open")[id % 2]) for id in range(4)]
    )
    deployment = make_deployment(tmp_path, levels=TWO_LEVELS, evaluate_every=1, metrics=METRICS)
    server_scores = {"auc": 0.9, "loss": math.nan, "mine": 2.0}
    (result,) = run_deployment(grid, deployment, PLAIN_MODEL, lambda arrays: server_scores).variants
    assert [metric.name for metric in result.metrics] == list(METRICS)
    assert [metric.higher_is_better for metric in result.metrics] == [True, False, True]
    assert result.values == {"global/auc": 0.9, "global/mine": 2.0}
    groups = {group.name: group for group in result.groups}
    assert groups["strict"].value("auc", "personal") == 0.75
    assert groups["strict"].value("auc_clients") == groups["open"].value("mine_clients") == 2
    assert groups["open"].value("auc") is None
    assert not [name for group in result.groups for name in group.values if "secret" in name]
    assert sum(group.refused for group in result.groups) == 0


@pytest.mark.parametrize("name", ["global/secret", "global/auc_variance", "average/auc", "auc"])
def test_metrics_that_were_not_requested_are_refused(tmp_path, name):
    grid = InProcessGrid([strict_node(tmp_path), plain_node(2, privacy="open")])
    grid.tamper = lambda message, reply, node: [
        with_records(reply, scores=MetricRecord({name: 1.0})) if "scores" in reply.content else reply
    ]
    deployment = make_deployment(tmp_path, levels=TWO_LEVELS, rounds=1, evaluate_every=1, metrics=METRICS)
    (result,) = run_deployment(grid, deployment, PLAIN_MODEL).variants
    assert [group.values for group in result.groups] == [{}, {}]


def test_a_single_number_is_the_first_metric(tmp_path):
    deployment = make_deployment(tmp_path, levels=TWO_LEVELS, rounds=1, evaluate_every=1, metrics=("mine",))
    (result,) = run_deployment(InProcessGrid([strict_node(tmp_path)]), deployment, PLAIN_MODEL, lambda _: 0.5).variants
    assert result.value("mine") == 0.5
    assert result.groups[0].value("mine", "personal") is not None


def test_metrics_of_a_run_configuration_are_one_text():
    config = {"out": "o", "ledger": "l", "rounds": 3, "clip.initial": 1.0, "metrics": "auc, f1"}
    config |= {"levels.strict.sampling-rate": 0.5, "levels.strict.epsilon": 2.0}
    assert Deployment.from_run_config(config).metrics == ("auc", "f1")

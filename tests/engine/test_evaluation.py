"""Metrics and the pull that each client chooses."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import group_by_group, raises_field
from msgspec.structs import replace
from simulations import CHOSEN, MODEL, TRAINING, trained

from fedhdp.algorithms import dp_fedavg
from fedhdp.data import Examples, hold_out
from fedhdp.engine.evaluation import choose_pulls
from fedhdp.errors import DataError, ModelError
from fedhdp.metrics import Metric
from fedhdp.results.metrics import group_rows
from fedhdp.results.schema import ACCURACY
from fedhdp.server import ServerOptimizer
from fedhdp.simulation import simulate


@pytest.mark.slow
def test_metrics_agree_with_a_plain_loop(data):
    simulation = trained(data, CHOSEN)
    rows = {(r.group, r.model, r.metric): r.value for r in simulation.evaluate()[0]}
    test = data.test
    scores = {"global": [], "personal": []}
    for k in range(data.num_clients):
        rows_of_client = slice(test.start_K[k], test.start_K[k] + test.count_K[k])
        x, y = test.x_N[rows_of_client] / np.float32(255), test.y_N[rows_of_client]
        for model in scores:
            theta = simulation.model(client=k if model == "personal" else None)
            scores[model].append(float((np.argmax(MODEL.apply(theta, x, None), axis=1) == y).mean()))
    for number, group in enumerate(CHOSEN.groups):
        for model, all_scores in scores.items():
            group_scores = np.array(all_scores)[simulation.group_K == number]
            assert rows[group.name, model, "accuracy"] == pytest.approx(np.mean(group_scores), abs=1e-6)
            assert rows[group.name, model, "accuracy_variance"] == pytest.approx(np.var(group_scores), abs=1e-6)
            assert rows[group.name, model, "accuracy_worst_decile"] == pytest.approx(min(group_scores), abs=1e-6)


@pytest.mark.slow
def test_group_metrics_are_means_of_client_scores(data):
    data = data.with_levels(np.random.default_rng(0).permutation(group_by_group(CHOSEN)))
    result = simulate(data, MODEL, CHOSEN, TRAINING, ServerOptimizer(average=0.5), rounds=2, seed=3, noise_seed=1)
    assert set(result.scores) == {"global/accuracy", "personal/accuracy", "average/accuracy"}
    rows = {(r.group, r.model, r.metric): r.value for r in result.history}
    for key, score_K in result.scores.items():
        model = key.split("/")[0]
        assert score_K.shape == (data.num_clients,)
        for group in CHOSEN.groups:
            group_scores = score_K[data.levels == group.name]
            assert rows[group.name, model, "accuracy"] == pytest.approx(group_scores.mean())
            assert rows[group.name, model, "accuracy_variance"] == pytest.approx(group_scores.var())
    assert (result.scores["global/accuracy"] != result.scores["personal/accuracy"]).any()


def test_worst_decile_of_thirty_clients_is_the_mean_of_three():
    score_K = np.random.default_rng(0).permutation(30) / 30
    rows = {row.metric: row.value for row in group_rows(1, "global", ACCURACY, ["all"], np.zeros(30, int), score_K)}
    assert rows["accuracy_worst_decile"] == pytest.approx(1 / 30)
    assert rows["accuracy"] == pytest.approx(14.5 / 30)


@pytest.mark.slow
def test_client_chooses_pull_on_validation_examples(data):
    chosen = hold_out(data, 0.3, seed=5)
    pulls = [replace(CHOSEN, groups=tuple(replace(g, pull=pull) for g in CHOSEN.groups)) for pull in (0.0, 0.5, 4.0)]
    simulation = trained(chosen, pulls, rounds=4)
    rows = simulation.evaluate()
    validation, test = chosen.validation, chosen.test

    def score(own_P: np.ndarray, examples: Examples, k: int) -> float:
        rows_of_client = slice(examples.start_K[k], examples.start_K[k] + examples.count_K[k])
        if not examples.count_K[k]:
            return 0.0
        theta = simulation.engine.unravel(own_P)
        guess = np.argmax(MODEL.apply(theta, examples.x_N[rows_of_client] / np.float32(255), None), axis=1)
        return float((guess == examples.y_N[rows_of_client]).mean())

    everybody = np.arange(chosen.num_clients)
    own = [simulation.personal_models(everybody, number) for number in range(3)]
    best = [max(range(3), key=lambda v, k=k: (score(own[v][k], validation, k), -v)) for k in everybody]
    expected = np.array([score(own[best[k]][k], test, k) for k in everybody])
    assert len(set(best)) > 1
    for number, group in enumerate(CHOSEN.groups):
        accuracies = [row.value for table in rows for row in table if row[1:4] == (group.name, "chosen", "accuracy")]
        assert accuracies == pytest.approx([expected[simulation.group_K == number].mean()] * 3, abs=1e-6)


def accuracy_on_host(outputs, labels):
    return (outputs.argmax(axis=1) == labels).mean()


def zeros_among_labels(outputs, labels):
    """Undefined for clients without a 0."""
    return (outputs[labels == 0, 0] > 0).mean() if (labels == 0).any() else np.nan


@pytest.mark.slow
def test_functions_on_the_host_agree_with_the_devices(data):
    metrics = ("auc", accuracy_on_host, "accuracy", zeros_among_labels)
    simulation = trained(hold_out(data, 0.3, 5), [CHOSEN, dp_fedavg(CHOSEN)], model=MODEL._replace(metrics=metrics))
    values = simulation.client_scores()
    for model in ("global", "personal", "chosen"):
        np.testing.assert_allclose(values[f"{model}/accuracy_on_host"], values[f"{model}/accuracy"], atol=1e-6)
    for rows in simulation.evaluate():
        of = {(row.group, row.model, row.metric): row.value for row in rows}
        assert of["server", "global", "accuracy_on_host"] == pytest.approx(of["server", "global", "accuracy"], abs=1e-6)
    has_zero_K = np.array([(data.test.labels(k) == 0).any() for k in range(data.num_clients)])
    assert 0 < has_zero_K.sum() < len(has_zero_K)
    np.testing.assert_array_equal(np.isnan(values["global/zeros_among_labels"][:, 0]), ~has_zero_K)
    counts = [row.value for row in rows if (row.model, row.metric) == ("global", "zeros_among_labels_clients")]
    assert sum(counts) == has_zero_K.sum()


@pytest.mark.parametrize("sign", [1, -1])
def test_pulls_are_chosen_by_the_better_value(sign):
    held_out_KV = np.array([[0.1, 0.3, np.nan, 0.9], [np.nan, np.nan, np.nan, 0.0]])
    choice_KV = choose_pulls([0, 0, 0, 1], sign * held_out_KV)
    best = 1 if sign == 1 else 0
    assert choice_KV.tolist() == [[best, best, best, 3], [0, 0, 0, 3]]


@pytest.mark.parametrize(
    ("metric", "kind"),
    [
        ("mean_squared_error", DataError),
        (lambda outputs, labels: 0.0, ModelError),
        (Metric("mine", lambda outputs, labels: outputs), ModelError),
        (Metric("mine", lambda outputs, labels, mask: outputs), ModelError),
        (Metric("mine", lambda outputs, labels, mask: outputs @ labels), ModelError),
    ],
)
def test_metrics_are_checked_before_training(data, metric, kind):
    with raises_field("metrics", kind):
        trained(data, CHOSEN, rounds=0, model=MODEL._replace(metrics=(metric,)))


@pytest.mark.slow
def test_server_without_a_test_set(data):
    blind = data._replace(server_x_N=data.server_x_N[:0], server_y_N=data.server_y_N[:0])
    result = simulate(blind, MODEL, CHOSEN, TRAINING, rounds=1).result("x")
    assert result.server_accuracy is None
    assert result.groups[0].value("accuracy") is not None

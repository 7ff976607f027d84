"""Statistics by group and intervals over seeds."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fedhdp.mechanism import Mechanism, PrivacyGroup
from fedhdp.privacy.accounting import compose
from fedhdp.privacy.costs import privacy_costs
from fedhdp.results.metrics import group_rows, half_interval, tenths
from fedhdp.results.schema import ACCURACY, MetricInfo, MetricRow, VariantResult, account_groups, attach_metrics


def test_group_rows_skip_clients_without_examples():
    scores = np.array([0.2, 0.4, math.nan, math.nan])
    rows = group_rows(3, "global", ACCURACY, ["a", "b"], np.array([0, 0, 0, 1]), scores)
    assert {row.group for row in rows} == {"a"}
    names = ["accuracy", "accuracy_variance", "accuracy_worst_decile", "accuracy_clients"]
    assert [row.metric for row in rows] == names
    assert [row.value for row in rows] == pytest.approx([0.3, 0.01, 0.2, 2])


def test_tenths_go_from_the_worst_to_the_best():
    values = np.arange(25.0)
    assert tenths(values)[0] == values[:2].mean()  # the same clients as the worst decile
    assert tenths(values)[9] == values[22:].mean()
    assert tenths(values, higher_is_better=False)[0] == values[23:].mean()
    assert tenths(values[:9]) == []


def test_the_worst_decile_of_an_error_is_its_largest():
    loss = MetricInfo("loss", higher_is_better=False)
    rows = group_rows(3, "global", loss, ["a"], np.zeros(20, int), np.arange(20.0))
    assert {row.metric: row.value for row in rows}["loss_worst_decile"] == 18.5


def test_infinite_losses_have_no_variance():
    loss = MetricInfo("loss", higher_is_better=False)
    rows = group_rows(3, "global", loss, ["a"], np.zeros(2, int), np.array([math.inf, 1.0]))
    values = {row.metric: row.value for row in rows}
    assert values == {"loss": math.inf, "loss_worst_decile": math.inf, "loss_clients": 2}


def test_half_interval_is_students():
    assert half_interval([90.0]) is None
    assert half_interval([90.0, 91.0, 92.0]) == pytest.approx(4.302653 / math.sqrt(3), rel=1e-5)


def test_attached_metrics_are_of_the_last_round():
    mechanism = Mechanism((PrivacyGroup("a", 10, 1.0, 0.5),), clip=1.0)
    groups = account_groups(mechanism, lambda name: [privacy_costs(mechanism, 2)[name]], lambda name: 1e-4, "rdp")
    history = [MetricRow(n, "a", "personal", "accuracy", n / 10) for n in (1, 2)]
    history += [MetricRow(2, "server", "global", "clip", 0.7), MetricRow(2, "a", "global", "refused", 4.0)]
    result = attach_metrics(VariantResult("x", "fedhdp", 2, 0.0, False, groups), history)
    assert (result.clip, result.server_accuracy) == (0.7, None)
    assert (result.groups[0].values, result.groups[0].refused) == ({"personal/accuracy": 0.2}, 4)


def test_epsilon_states_its_basis():
    mechanism = Mechanism((PrivacyGroup("a", 10, 1.0, 0.5),), clip=1.0)
    cost = privacy_costs(mechanism, 5)["a"]
    (group,) = account_groups(mechanism, lambda name: [cost], lambda name: 1e-5, "rdp")
    assert group.epsilon == compose([cost], 1e-5)
    assert (group.accountant, group.epsilon_target, group.surplus) == ("rdp", None, None)
    assert (group.rounds, group.delta, group.unprotected) == (5, 1e-5, False)
    assert "delta 1e-05" in group.epsilon_basis


def test_groups_without_noise_are_unprotected():
    groups = (PrivacyGroup("open", 10, 0.0, 0.5), PrivacyGroup("private", 10, 1.0, 0.5))
    mechanism = Mechanism(groups, clip=1.0)
    costs = privacy_costs(mechanism, 5)
    open_group, private = account_groups(mechanism, lambda name: [costs[name]], lambda name: 1e-4, "rdp")
    assert (open_group.unprotected, open_group.epsilon) == (True, math.inf)
    assert not private.unprotected
    assert 0 < private.epsilon < math.inf


def test_too_little_noise_is_unprotected():
    groups = (PrivacyGroup("weak", 10, 0.005, 0.5), PrivacyGroup("strong", 10, 2.0, 0.5, weight=1e-6))
    mechanism = Mechanism(groups, clip=1.0)
    costs = privacy_costs(mechanism, 5)
    weak, strong = account_groups(mechanism, lambda name: [costs[name]], lambda name: 1e-4, "rdp")
    assert (weak.unprotected, weak.epsilon) == (True, math.inf)
    assert not strong.unprotected


def test_epsilon_is_unknown_without_accounting(monkeypatch):
    monkeypatch.setattr("fedhdp.results.schema.is_accounting_installed", lambda: False)
    groups = (PrivacyGroup("open", 10, 0.0, 0.5), PrivacyGroup("private", 10, 1.0, 0.5))
    mechanism = Mechanism(groups, clip=1.0)
    costs = privacy_costs(mechanism, 5)
    open_group, private = account_groups(mechanism, lambda name: [costs[name]], lambda name: 1e-4, "rdp")
    assert open_group.epsilon == math.inf
    assert private.epsilon is None

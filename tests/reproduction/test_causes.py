"""What the paper leaves open: every choice trains, and cohorts of all clients have the drawn counts."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import raises_field, tiny_data

from fedhdp.errors import ConfigError
from fedhdp.reproduction import causes
from fedhdp.reproduction.causes import CHOICES, mechanisms_of, run_causes, with_counts


def test_counts_of_a_joint_cohort():
    mechanism = with_counts(mechanisms_of(CHOICES["base"])[0], np.array([3, 97]))
    assert [mechanism.expected_cohort_size(group) for group in mechanism.groups] == [3, 97]
    assert mechanism.expected_weight == 100


def test_unknown_choice_is_refused():
    with raises_field("--rows", ConfigError):
        run_causes("causes", "base,luck", range(1), 2)


@pytest.mark.slow
def test_choices_train(monkeypatch):
    data = tiny_data([20] * 2000, inputs=784, classes=10)
    monkeypatch.setattr(causes, "load_mnist", lambda *_: data)
    names = ("cohorts of all clients", "inputs standardized", "uniform start")
    lines = []
    result = run_causes("causes", ",".join(names), range(2), 2, lines.append)
    assert [row.choice for row in result.causes] == [name for name in names for _ in causes.READINGS]
    assert len(lines) == 3
    assert all(0 <= value <= 100 for row in result.causes for value in row.mean)
    assert result.command.startswith("fedhdp reproduce causes --seeds 2 --rows 'cohorts of all clients,")

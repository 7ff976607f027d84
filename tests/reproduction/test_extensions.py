"""Extensions keep the paper's epsilon, and their numbers are what accounting and theory compute."""

from __future__ import annotations

import pytest
from helpers import raises_field
from reproduction_runs import HANDWRITING

from fedhdp.errors import ConfigError
from fedhdp.privacy.accounting import gaussian_epsilon
from fedhdp.privacy.calibration import noise_multiplier_for
from fedhdp.reproduction import extensions
from fedhdp.reproduction.extensions import EXTENSIONS, extension_part, parse_rows


def test_extensions_keep_the_papers_epsilon_by_poisson_sampling():
    rows, parts = parse_rows("noniid-mnist", "extensions")
    assert rows == []
    assert set(parts) == {name for name, extension in EXTENSIONS.items() if extension.measured_in is None}
    for name in parts:
        experiment = extension_part(name, HANDWRITING["noniid-mnist"])
        noise, rate = experiment.mechanism.groups[1].noise_multiplier, experiment.mechanism.groups[1].sampling_rate
        accountant = "rdp" if EXTENSIONS[name].noise_multiplier is None else "pld"
        epsilon = gaussian_epsilon(noise, rate, experiment.rounds, experiment.delta, accountant)
        assert experiment.mechanism.sampling == "poisson"
        assert round(epsilon, 1) == extensions.EPSILON


def test_pld_noise_is_the_least_for_the_epsilon():
    noise = noise_multiplier_for(extensions.EPSILON, 0.05, 500, 1e-4, "pld")
    assert pytest.approx(noise, rel=0.003) == extensions.PLD_NOISE
    assert gaussian_epsilon(extensions.PLD_NOISE, 0.05, 500, 1e-4, "pld") <= extensions.EPSILON


def test_weight_of_theory_is_near_the_papers():
    (variant,) = extension_part("theory", HANDWRITING["noniid-mnist"]).variants
    assert 0.02 <= variant.weights["private"] <= 0.03


@pytest.mark.parametrize(
    ("table", "rows", "field"),
    [
        ("mnist", None, "TABLE"),
        ("noniid-mnist", "fedavg", "--rows"),
        ("noniid-mnist", "fedhdp:", "--rows"),
        ("noniid-mnist", "fedhdp:-1", "--rows"),
        ("noniid-mnist", "fedhdp:nan", "--rows"),
        ("noniid-mnist", "", "--rows"),
        ("fmnist", "extensions", "--rows"),
        ("levels", "dp-fedavg", "--rows"),
    ],
)
def test_unknown_tables_and_rows_are_refused(table, rows, field):
    with raises_field(field, ConfigError) as error:
        parse_rows(table, rows)
    assert error.value.value == (rows if field == "--rows" else table)

"""Extensions keep the paper's epsilon, and their numbers are what accounting and theory compute."""

from __future__ import annotations

import math

import pytest
from helpers import raises_field
from msgspec.structs import replace
from reproduction_runs import HANDWRITING

from fedhdp.errors import ConfigError
from fedhdp.experiments.presets import OPTED_OUT, PRIVATE, plan_experiment
from fedhdp.privacy.accounting import gaussian_epsilon
from fedhdp.privacy.calibration import noise_multiplier_for
from fedhdp.reproduction import extensions
from fedhdp.reproduction.extensions import EXTENSIONS, extension_part, make_parts, parse_rows
from fedhdp.reproduction.runner import incompatible_fields
from fedhdp.reproduction.tables import TABLES, Options, TableRow, variants_of
from fedhdp.theory.planning import LevelShare, plan
from fedhdp.theory.training import suggest_training


def test_extensions_keep_the_papers_epsilon_by_poisson_sampling():
    rows, parts = parse_rows("noniid-mnist", "extensions")
    assert rows == []
    of_table = {name: extension for name, extension in EXTENSIONS.items() if extensions.BASE in extension.tables}
    assert set(parts) == {name for name, extension in of_table.items() if extension.measured_in is None}
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


def test_row_of_the_plan_is_what_the_plan_suggests():
    levels = [LevelShare(OPTED_OUT, math.inf, 0.05), LevelShare(PRIVATE, extensions.EPSILON, 0.95)]
    suggested = plan(2000, 100, 500, 1e-4, levels)
    planned, row = (
        plan_experiment(suggested, suggest_training(suggested)),
        extension_part("basis-plan", HANDWRITING["noniid-mnist"]),
    )
    assert (planned.model, planned.training, planned.server) == (row.model, row.training, row.server)
    assert (planned.rounds, planned.delta) == (row.rounds, row.delta)
    for group, of_row in zip(suggested.mechanism.groups, row.mechanism.groups, strict=True):
        assert (group.clients, group.sampling_rate) == (of_row.clients, of_row.sampling_rate)
        assert group.noise_multiplier == pytest.approx(of_row.noise_multiplier, rel=0.003)
    for variant in row.variants:
        assert variant.weights[PRIVATE] == pytest.approx(suggested.mechanism.groups[1].weight, rel=0.05)


@pytest.mark.parametrize("pull", [(0.05, 0.005), 0.05])
def test_a_row_has_a_pull_for_each_group(pull):
    (variant,) = variants_of([TableRow("fedhdp", 0.01)], [pull])
    pulls = (0.05, 0.005) if isinstance(pull, tuple) else (0.05, 0.05)
    assert variant.pulls == dict(zip((OPTED_OUT, PRIVATE), pulls, strict=True))
    assert variant.name.rpartition(", λ=")[2] == ("0.005 and 0.05" if isinstance(pull, tuple) else "0.05")


@pytest.mark.parametrize("table", ["noniid-mnist", "skewed-mnist", "fmnist"])
def test_rows_on_a_basis_train_as_they_say(table):
    assert parse_rows(table, "ours") == parse_rows(table, "extensions")
    names = [name for name in parse_rows(table, "ours")[1] if EXTENSIONS[name].basis is not None]
    assert names
    for part in make_parts(table, ",".join(names), (0,), Options("handwriting", batches="whole", personal_epochs=1)):
        extension, experiment = EXTENSIONS[part.name], part.experiment
        assert experiment.name == f"{table}/{part.name}"
        assert experiment.model.basis == extension.basis
        assert experiment.training == extension.training  # with all batches and its own personal epochs
        assert {variant.algorithm for variant in experiment.variants} == {extension.algorithm}
        noise = extension.noise_multiplier or TABLES[table].noise_multiplier
        assert experiment.mechanism.groups[1].noise_multiplier == noise


def test_parts_on_a_basis_and_others_are_one_table_but_not_other_training():
    paper, momentum, basis = make_parts("noniid-mnist", "dp-fedavg,momentum,basis", (0,), Options("handwriting"))
    assert incompatible_fields(paper.experiment, basis.experiment) == []
    other = replace(momentum.experiment, training=replace(momentum.experiment.training, epochs=2))
    assert incompatible_fields(paper.experiment, other) == ["training"]
    assert incompatible_fields(basis.experiment, replace(basis.experiment, training=other.training)) == ["training"]


@pytest.mark.parametrize(
    ("table", "rows", "field"),
    [
        ("mnist", None, "TABLE"),
        ("noniid-mnist", "fedavg", "--rows"),
        ("noniid-mnist", "fedhdp:", "--rows"),
        ("noniid-mnist", "fedhdp:-1", "--rows"),
        ("noniid-mnist", "fedhdp:nan", "--rows"),
        ("noniid-mnist", "", "--rows"),
        ("femnist", "extensions", "--rows"),
        ("skewed-mnist", "momentum", "--rows"),
        ("levels", "dp-fedavg", "--rows"),
    ],
)
def test_unknown_tables_and_rows_are_refused(table, rows, field):
    with raises_field(field, ConfigError) as error:
        parse_rows(table, rows)
    assert error.value.value == (rows if field == "--rows" else table)

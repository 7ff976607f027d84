"""Several privacy levels: every row keeps the epsilons, and has the server's rate of the plan's rule for its noise."""

from __future__ import annotations

import pytest

from fedhdp.reproduction.extensions import make_parts
from fedhdp.reproduction.levels import (
    BASIS_TRAINING,
    LARGEST_RATE,
    LEVEL_TABLES,
    LEVELS,
    OURS,
    PFA,
    RIVALS,
    SERVER_RATES,
    rival_labels,
    server_rate,
)
from fedhdp.reproduction.tables import Options, Part


def parts_of(names: str) -> dict[str, Part]:
    """The parts with these names, by the name of their folder."""
    return {part.name: part for part in make_parts("levels", names, options=Options("handwriting", pulls=()))}


def test_all_parts_have_all_methods():
    parts = parts_of(",".join(LEVEL_TABLES))
    for name in LEVEL_TABLES:
        part, pfa = parts[name].experiment, parts[f"{name}.pfa"].experiment
        labels = [f"{name}: {variant.name}" for variant in (*part.variants, *pfa.variants)]
        assert f"{name}: {OURS}" in labels
        levels = [level for level, _, _ in LEVELS[LEVEL_TABLES[name].levels]]
        assert len(rival_labels(name, labels)) == 10 + len(levels[:-1])
        of_threshold = [v.options["level"] for v in part.variants if v.algorithm == "threshold"]
        assert of_threshold == levels[:-1]  # at the strictest it is DP-FedAvg
        assert {*RIVALS} < {variant.algorithm for variant in part.variants}
        assert all(variant.name.startswith(PFA) for variant in pfa.variants)


@pytest.mark.parametrize("name", LEVELS)
def test_rows_on_a_basis_have_their_own_servers_rate(name):
    plain, basis = (parts_of(name + end)[name + end].experiment for end in ("", "-basis"))
    assert {str(variant.server) for variant in plain.variants} == {"{}"}
    assert plain.mechanism == basis.mechanism
    assert (plain.training.epochs, basis.training) == (25, BASIS_TRAINING)
    rates = {variant.name: variant.server["optimizer"]["learning_rate"] for variant in basis.variants}
    assert SERVER_RATES[name].keys() <= rates.keys()
    assert rates == dict.fromkeys(rates, LARGEST_RATE) | SERVER_RATES[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", LEVELS)
def test_servers_rates_are_those_of_the_rule(name):
    experiment = parts_of(f"{name}-basis")[f"{name}-basis"].experiment
    mechanisms = experiment.variant_mechanisms(experiment.build_mechanism())
    for variant, mechanism in zip(experiment.variants, mechanisms, strict=True):
        assert variant.server["optimizer"]["learning_rate"] == server_rate(mechanism), variant.name

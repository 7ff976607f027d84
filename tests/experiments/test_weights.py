"""Weights that an experiment does not state are the theory's."""

from __future__ import annotations

import pytest
from experiment_helpers import keep_going, tiny
from helpers import raises_field, tiny_data
from msgspec.structs import replace

from fedhdp.data import FederatedData
from fedhdp.experiments import Experiment, Variant, run
from fedhdp.experiments.components import (
    CnnConfig,
    FemnistConfig,
    LinearConfig,
    MlpConfig,
    MnistConfig,
    PythonData,
    PythonModel,
    count_parameters,
)
from fedhdp.privacy import epsilon
from fedhdp.theory import with_optimal_weights

PARAMETERS = (784 + 1) * 8 + (8 + 1) * 10  # of the tiny experiment's network


def unweighted(**changes: object) -> Experiment:
    """The tiny experiment without weights."""
    groups = tuple(replace(group, weight=None) for group in tiny().mechanism.groups)
    return tiny(mechanism=replace(tiny().mechanism, groups=groups), **changes)


def no_data() -> FederatedData:
    pytest.fail("data were loaded")


def weights_of(mechanism) -> dict[str, float]:
    return {group.name: group.weight for group in mechanism.groups}


@pytest.mark.parametrize(
    ("data", "model", "parameters"),
    [
        (tiny().data, MlpConfig(hidden=8), PARAMETERS),
        (MnistConfig(clients=10), MlpConfig(), 39_760),  # not downloaded
        (FemnistConfig(clients=10), LinearConfig(), 785 * 62),
        (FemnistConfig(clients=10, classes=10), LinearConfig(), 785 * 10),
    ],
)
def test_parameters_are_counted_without_data(data, model, parameters):
    assert count_parameters(data, model, no_data) == parameters


def test_parameters_of_a_users_file(tmp_path):
    own = tmp_path / "own.py"
    own.write_text("from fedhdp.models import linear\nmodel = lambda: linear(5, 3)\n")
    data = PythonData(file=str(own), clients=4)
    assert count_parameters(data, PythonModel(file=str(own)), no_data) == (5 + 1) * 3
    loaded = tiny_data([3, 4], inputs=6)
    assert count_parameters(data, LinearConfig(), lambda: loaded) == (6 + 1) * 3


def test_parameters_of_a_convolutional_network():
    assert count_parameters(FemnistConfig(clients=10), CnnConfig(), no_data) > 100_000


def test_weights_are_the_theorys():
    experiment = unweighted()
    mechanism = experiment.build_mechanism()
    assert mechanism == with_optimal_weights(mechanism, experiment.rounds, PARAMETERS)
    assert weights_of(mechanism)["opted out"] == 1
    assert 0 < weights_of(mechanism)["private"] < 0.5


def test_given_weights_stay_and_need_no_count(monkeypatch):
    monkeypatch.setattr("fedhdp.experiments.config.count_parameters", lambda *a: pytest.fail("counted"))
    assert weights_of(tiny().build_mechanism()) == {"opted out": 1, "private": 0.1}


def test_a_variant_that_changes_noise_or_weights_has_its_own_optimum():
    variants = (
        Variant("plain"),
        Variant("more noise", noise_multipliers={"private": 9.0}),
        Variant("by hand", weights={"private": 0.25}),
        Variant("equal", "hdp_fedavg"),
    )
    experiment = unweighted(variants=variants)
    base = experiment.build_mechanism()
    plain, noisy, by_hand, equal = experiment.variant_mechanisms(base)
    assert plain == base
    assert weights_of(noisy)["private"] < weights_of(plain)["private"]
    assert noisy == with_optimal_weights(noisy, experiment.rounds, PARAMETERS)
    assert weights_of(by_hand) == {"opted out": 1, "private": 0.25}
    assert weights_of(equal) == {"opted out": 1, "private": 1}


def test_results_have_the_weights_that_were_run(tmp_path):
    experiment = unweighted(variants=tiny().variants[1:], rounds=1)
    (variant,) = run(experiment, tmp_path / "run", keep_going).variants
    assert {group.name: group.weight for group in variant.groups} == weights_of(experiment.build_mechanism())


def test_accountant_of_a_run(tmp_path):
    fixed = replace(tiny().variants[0], name="fixed", sampling="fixed")
    assert tiny().run_accountant == "pld"
    assert tiny(accountant="rdp").run_accountant == "rdp"
    assert tiny(ledger="population").run_accountant == "rdp"
    assert tiny(variants=(*tiny().variants, fixed)).run_accountant == "rdp"
    for changes in ({"ledger": "population"}, {"variants": (fixed,)}):
        with raises_field("accountant"):
            tiny(accountant="pld", **changes)


def test_a_variant_is_calibrated_for_its_own_sampling():
    fixed = replace(tiny().variants[1], name="fixed", sampling="fixed")
    experiment = tiny(variants=(tiny().variants[1], fixed))
    poisson, cohorts = experiment.variant_mechanisms(experiment.build_mechanism())
    assert cohorts.groups[1].noise_multiplier > poisson.groups[1].noise_multiplier
    for mechanism in (poisson, cohorts):
        had = epsilon(mechanism, experiment.rounds, experiment.delta, experiment.run_accountant)
        assert 0.98 * 8 <= had["private"] <= 8


def test_targets_are_not_those_of_other_noise():
    experiment = tiny()
    assert experiment.epsilon_targets(experiment.variants[0]) == {"private": 8.0}
    assert experiment.epsilon_targets(Variant("other", noise_multipliers={"private": 2.0})) == {}

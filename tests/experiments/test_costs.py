"""What an experiment costs before it is run, and which of its variants share a training."""

from __future__ import annotations

from msgspec.structs import replace

from fedhdp.experiments import EXPERIMENTS, Variant
from fedhdp.experiments.costs import account_experiment
from fedhdp.privacy import epsilon

EXPERIMENT = EXPERIMENTS["quickstart"]()


def test_costs_are_the_mechanisms_epsilons():
    cost = account_experiment(EXPERIMENT)
    mechanisms = EXPERIMENT.variant_mechanisms(EXPERIMENT.build_mechanism())
    epsilon_of = {name: report for report in cost.mechanisms for name in report.variants}
    assert list(epsilon_of) == [variant.name for variant in EXPERIMENT.variants]
    for variant, mechanism in zip(EXPERIMENT.variants, mechanisms, strict=True):
        groups = {group.group: group.epsilon for group in epsilon_of[variant.name].groups}
        assert groups == epsilon(mechanism, EXPERIMENT.rounds, EXPERIMENT.delta, cost.accountant)
    assert (cost.rounds_allowed, cost.drops_groups, cost.notes) == ({}, False, [])


def test_noise_from_a_seed_is_noted():
    cost = account_experiment(replace(EXPERIMENT, noise_seed=1))
    assert cost.repeatable
    assert "nothing is private" in cost.notes[0]


def test_variants_that_differ_in_pulls_share_a_training():
    variants = (
        Variant(name="a", pulls={"private": 0.1}),
        Variant(name="b", pulls={"private": 0.2}),
        Variant(name="c", weights={"private": 0.5}),
    )
    experiment = replace(EXPERIMENT, variants=variants)
    assert experiment.by_training(experiment.variant_mechanisms(experiment.build_mechanism())) == [[0, 1], [2]]

"""A plan as an experiment: its levels and weights beside the baselines, on the embedded handwriting."""

from __future__ import annotations

import math

from fedhdp.experiments.components import Handwriting, Mlp
from fedhdp.experiments.config import Experiment, Variant
from fedhdp.experiments.presets import PAPER_TRAINING
from fedhdp.privacy.calibration import GroupConfig, MechanismConfig
from fedhdp.theory.planning import Plan

PIXELS, CLASSES = 784, 10


def planned(plan: Plan) -> Experiment:
    """The experiment; the network has as many parameters as a hidden layer can make it."""
    hidden = max(1, round((plan.parameters - CLASSES) / (PIXELS + 1 + CLASSES)))
    groups = tuple(
        GroupConfig(
            level.name,
            level.clients,
            sampling_rate=group.sampling_rate,
            epsilon=level.epsilon_asked,
            weight=group.weight,
        )
        for level, group in zip(plan.levels, plan.mechanism.groups)
    )
    asked = ", ".join(f"{level.name} ({_in_words(level.epsilon_asked)})" for level in plan.levels)
    return Experiment(
        name="plan",
        about=f"{plan.clients} clients who chose among {asked}, by the weights of `fedhdp plan`.",
        rounds=plan.rounds,
        delta=plan.delta,
        data=Handwriting(clients=plan.clients),
        model=Mlp(hidden=hidden),
        mechanism=MechanismConfig(groups, plan.mechanism.clip),
        variants=(
            Variant("Non-Private+Ditto", "non_private"),
            Variant("DP-FedAvg+Ditto", "dp_fedavg"),
            Variant("HDP-FedAvg+Ditto", "hdp_fedavg"),
            Variant("FedHDP", "fedhdp"),
        ),
        training=PAPER_TRAINING,
    )


def _in_words(epsilon: float) -> str:
    return "opted out" if epsilon == math.inf else f"epsilon {epsilon:g}"

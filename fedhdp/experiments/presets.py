"""The built-in experiments on the embedded handwriting, each a function that returns an Experiment.

All but ``letters`` have the paper's non-IID MNIST shape: 2,000 clients with 30 samples, of whom 5% are sampled in a round
and 5% opted out.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from msgspec.structs import replace

from fedhdp.client import LocalTraining
from fedhdp.clips import AdaptiveClip
from fedhdp.experiments.bases import CosineBasis
from fedhdp.experiments.components import CnnConfig, HandwritingConfig, MlpConfig
from fedhdp.experiments.config import Experiment
from fedhdp.experiments.variant import Variant
from fedhdp.privacy.calibration import GroupConfig, MechanismConfig
from fedhdp.server import ServerOptimizer

if TYPE_CHECKING:
    from fedhdp.theory.planning import Plan
    from fedhdp.theory.training import SuggestedTraining

PAPER_TRAINING = LocalTraining(epochs=25, batch_size=20, learning_rate=0.5, decay=0.9, decay_every=50)
OPTED_OUT, PRIVATE = "opted out", "private"
SMALL_PULL = 0.005  # where a client holds one digit: its personal model learns it, though the global one nearly has it
PIXELS, CLASSES = 784, 10
BASELINES = (
    Variant("Non-Private+Ditto", "non_private"),
    Variant("DP-FedAvg+Ditto", "dp_fedavg"),
    Variant("HDP-FedAvg+Ditto", "hdp_fedavg"),
)


def _two_levels(weight: float, noise_multiplier: float = 1.5, pull: float = SMALL_PULL) -> MechanismConfig:
    opted_out = GroupConfig(OPTED_OUT, 100, sampling_rate=0.05, noise_multiplier=0.0, pull=pull)
    private = GroupConfig(
        PRIVATE, 1900, sampling_rate=0.05, noise_multiplier=noise_multiplier, weight=weight, pull=pull
    )
    return MechanismConfig((opted_out, private), AdaptiveClip(initial=0.5))


def _comparison(weight: float) -> tuple[Variant, ...]:
    return (*BASELINES, Variant(f"FedHDP r={weight:g}", "fedhdp"))


def quickstart() -> Experiment:
    """FedHDP against its baselines: 2,000 clients with one digit each, 5% of them opted out."""
    weight = 0.01
    return Experiment(
        name="quickstart",
        about=quickstart.__doc__ or "",
        rounds=500,
        data=HandwritingConfig(clients=2000, split="one_digit"),
        mechanism=_two_levels(weight),
        variants=_comparison(weight),
        training=PAPER_TRAINING,
    )


def skewed() -> Experiment:
    """As quickstart, but opted-out clients hold only the digit 7, so private updates matter more."""
    return replace(
        quickstart(),
        name="skewed",
        about=skewed.__doc__ or "",
        rounds=300,
        data=HandwritingConfig(clients=2000, split="skewed"),
        mechanism=_two_levels(weight=0.1),
        variants=_comparison(weight=0.1),
    )


def by_writer() -> Experiment:
    """Clients are writers with all digits, at the noise of the paper's FMNIST, where personal models help."""
    weight = 0.025
    return replace(
        quickstart(),
        name="by-writer",
        about=by_writer.__doc__ or "",
        rounds=300,
        data=HandwritingConfig(clients=2000, split="by_writer"),
        mechanism=_two_levels(weight, noise_multiplier=4.0, pull=0.05),
        variants=(*_comparison(weight), Variant("Local only", "local_only")),
        training=replace(PAPER_TRAINING, learning_rate=0.1),
    )


def three_levels() -> Experiment:
    """Three privacy levels: opted out, relaxed (noise 0.75) and strict (noise 3), with both kinds of noise."""
    groups = (
        GroupConfig(OPTED_OUT, 100, sampling_rate=0.05, noise_multiplier=0.0, pull=SMALL_PULL),
        GroupConfig("relaxed", 900, sampling_rate=0.05, noise_multiplier=0.75, weight=0.02, pull=SMALL_PULL),
        GroupConfig("strict", 1000, sampling_rate=0.05, noise_multiplier=3.0, weight=0.005, pull=SMALL_PULL),
    )
    return replace(
        quickstart(),
        name="three-levels",
        about=three_levels.__doc__ or "",
        rounds=300,
        mechanism=MechanismConfig(groups, AdaptiveClip(initial=0.5)),
        variants=(
            *BASELINES,
            Variant("FedHDP", "fedhdp"),
            Variant("FedHDP, noise per group", "fedhdp", noise="per_group"),
            Variant("FedHDP, r=0", "fedhdp", weights={"relaxed": 0.0, "strict": 0.0}),
        ),
    )


def letters() -> Experiment:
    """62 classes by writer with the paper's convolutional network (slow without a GPU)."""
    weight = 0.1
    opted_out = GroupConfig(OPTED_OUT, 25, sampling_rate=0.1, noise_multiplier=0.0, pull=0.25)
    private = GroupConfig(PRIVATE, 475, sampling_rate=0.1, noise_multiplier=1.0, weight=weight, pull=0.25)
    return Experiment(
        name="letters",
        about=letters.__doc__ or "",
        rounds=20,
        data=HandwritingConfig(clients=500, samples=100, test_samples=20, split="by_writer", classes=62),
        model=CnnConfig(),
        mechanism=MechanismConfig((opted_out, private), AdaptiveClip(initial=2.0)),
        variants=_comparison(weight),
        training=LocalTraining(epochs=5, batch_size=20, learning_rate=0.02),
        evaluate_every=5,
    )


def plan_experiment(plan: Plan, suggested: SuggestedTraining | None = None) -> Experiment:
    """A plan's levels and weights beside the baselines, with the network whose number of parameters is the nearest.

    Args:
        plan: The plan, from `fedhdp.theory.planning.plan`.
        suggested: Training from `fedhdp.theory.training.suggest_training`. None: the paper's.
    """
    hidden = max(1, round((plan.parameters - CLASSES) / (PIXELS + 1 + CLASSES)))
    groups = tuple(
        GroupConfig(
            level.name,
            level.clients,
            sampling_rate=group.sampling_rate,
            epsilon=level.target_epsilon,
            weight=group.weight,
        )
        for level, group in zip(plan.levels, plan.mechanism.groups, strict=True)
    )
    epsilons = (f"epsilon {g.epsilon:g}" if g.epsilon != math.inf else "opted out" for g in groups)
    levels = ", ".join(f"{group.name} ({epsilon})" for group, epsilon in zip(groups, epsilons, strict=True))
    experiment = Experiment(
        name="plan",
        about=f"{plan.clients} clients who chose among {levels}, by the weights of `fedhdp plan`.",
        rounds=plan.rounds,
        delta=plan.delta,
        accountant=None if plan.accountant == "pld" else plan.accountant,
        data=HandwritingConfig(clients=plan.clients),
        model=MlpConfig(hidden=hidden),
        mechanism=MechanismConfig(groups, plan.mechanism.clip),
        variants=(*BASELINES, Variant("FedHDP", "fedhdp")),
        training=PAPER_TRAINING,
    )
    return experiment if suggested is None else _with_suggestion(experiment, suggested)


def _with_suggestion(experiment: Experiment, suggested: SuggestedTraining) -> Experiment:
    """FedHDP alone, on the basis and with the training that was suggested for it."""
    basis = CosineBasis(suggested.basis_size, exponent=suggested.basis_exponent)
    server = {"name": "sgd", "learning_rate": suggested.server_rate, "momentum": suggested.momentum}
    return replace(
        experiment,
        model=replace(experiment.model, basis=basis),
        variants=experiment.variants[-1:],
        training=LocalTraining(
            epochs=suggested.epochs,
            batch_size=PAPER_TRAINING.batch_size,
            learning_rate=suggested.learning_rate,
            personal_learning_rate=suggested.personal_learning_rate,
        ),
        server=ServerOptimizer(server, average=suggested.average),
    )


EXPERIMENTS: dict[str, Callable[[], Experiment]] = {
    preset.__name__.replace("_", "-"): preset for preset in (quickstart, skewed, by_writer, three_levels, letters)
}

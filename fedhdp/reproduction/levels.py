"""Two, three and five privacy levels: FedHDP beside its baselines and its rivals, all at the same epsilons.

Every row samples by Poisson, unless another sampling is asked for. The parts ``two``, ``three`` and ``five`` have the
paper's training, clip and server. In ``two-basis`` and so on all rows have the training that `fedhdp plan` suggests: a
public basis, few epochs, and a server with momentum. Each row has the server's rate of the plan's rule for its own noise, so
that none is compared at a rate that suits another. Those rates are constants, since pricing all rivals takes long; a test
computes them again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from msgspec.structs import replace

from fedhdp import AdaptiveClip, LocalTraining, ServerOptimizer
from fedhdp.algorithms import ALGORITHM_NAMES, algorithm_options
from fedhdp.experiments.bases import CosineBasis
from fedhdp.experiments.components import BuiltInData, MlpConfig
from fedhdp.experiments.config import Experiment
from fedhdp.experiments.presets import OPTED_OUT, PRIVATE
from fedhdp.experiments.variant import Variant
from fedhdp.mechanism import Sampling, ScheduledMechanism, mechanism_at
from fedhdp.privacy.calibration import GroupConfig, MechanismConfig
from fedhdp.reproduction import tables
from fedhdp.reproduction.tables import ROUNDS
from fedhdp.theory.planning import MLP_PARAMETERS, estimate_error, with_optimal_weights
from fedhdp.theory.training import LARGEST_RATE, RATE_TIMES_NOISE_SQUARED

BASE = "noniid-mnist"  # the table whose data and clip these have
LEVELS = {  # name, share of the clients, noise multiplier of each level
    "two": ((OPTED_OUT, 0.05, 0.0), (PRIVATE, 0.95, 1.5)),
    "three": ((OPTED_OUT, 0.05, 0.0), ("relaxed", 0.45, 0.75), ("strict", 0.5, 3.0)),
    "five": (
        (OPTED_OUT, 0.05, 0.0),
        ("relaxed", 0.2, 0.75),
        ("medium", 0.25, 1.0),
        (PRIVATE, 0.25, 1.5),
        ("strict", 0.25, 3.0),
    ),
}
OURS = "FedHDP, shared noise"
STAND_INS = (100.0, 1000.0)  # epsilons that stand for those who opted out, where a rival needs one
RIVALS = ("threshold", "weiavg", "idp_scale", "idp_sample", "time_adaptive", "gdpfed")
PFA = "PFA"
PFA_FOLDER = ".pfa"  # of the runs of a part's rows of PFA
BASIS_TRAINING = LocalTraining(epochs=3, batch_size=20, learning_rate=0.5, personalize=False)
MOMENTUM, LONG_AVERAGE = 0.9, 0.99


class LevelsPart(NamedTuple):
    """A part of the table."""

    levels: str  # a key of LEVELS
    on_basis: bool


LEVEL_TABLES = {name + end: LevelsPart(name, bool(end)) for end in ("", "-basis") for name in LEVELS}
SERVER_RATES = {  # by levels and row, where it is below the largest
    "two": {
        **{"DP-FedAvg+Ditto": 0.05, "HDP-FedAvg+Ditto": 0.05, "WeiAvg, ε∞=100": 0.3, "GDPFed": 0.05},
        **{"IDP-Scale, ε∞=100": 0.07, "IDP-Scale, ε∞=1000": 0.1, "IDP-Sample, ε∞=100": 0.1},
    },
    "three": {
        **{"DP-FedAvg+Ditto": 0.01, "HDP-FedAvg+Ditto": 0.01, "WeiAvg, ε∞=100": 0.2, "GDPFed": 0.01},
        **{"IDP-Scale, ε∞=100": 0.1, "IDP-Scale, ε∞=1000": 0.1, "IDP-Sample, ε∞=100": 0.2, "Threshold, relaxed": 0.05},
    },
    "five": {
        **{"DP-FedAvg+Ditto": 0.01, "HDP-FedAvg+Ditto": 0.01, "WeiAvg, ε∞=100": 0.2, "GDPFed": 0.009},
        **{"IDP-Scale, ε∞=100": 0.1, "IDP-Scale, ε∞=1000": 0.1, "IDP-Sample, ε∞=100": 0.2},
        **{"Threshold, relaxed": 0.01, "Threshold, medium": 0.03, "Threshold, private": 0.03},
    },
}


def theory_weights(mechanism: MechanismConfig, noise: str) -> tuple[float, ...]:
    """The theory's weights for the paper's rounds and network, to two digits."""
    promise = replace(mechanism.build(ROUNDS, 1e-4, "pld"), noise=noise)
    return tuple(float(f"{g.weight:.2g}") for g in with_optimal_weights(promise, ROUNDS, MLP_PARAMETERS).groups)


def server_rate(mechanism: ScheduledMechanism) -> float:
    """The server's rate with momentum by the plan's rule, rate·noise² constant, to one digit."""
    noise = estimate_error(mechanism_at(mechanism, ROUNDS - 1), ROUNDS, 1).noise_per_parameter
    rate = LARGEST_RATE if noise == 0 else min(LARGEST_RATE, RATE_TIMES_NOISE_SQUARED / noise**2)
    return float(f"{rate:.1g}")


def levels_part(name: str, data: BuiltInData, sampling: Sampling, rounds: int = ROUNDS, seed: int = 0) -> Experiment:
    """A part as an experiment: the baselines, FedHDP with both kinds of noise, and the rivals."""
    experiment, weights = _part_without_rows(name, data, sampling, rounds, seed)
    variants = [
        *(Variant(label, algorithm) for algorithm, label in tables.LABELS.items()),
        Variant(OURS, "fedhdp", weights=weights["shared"], noise="shared"),
        Variant("FedHDP, noise per group", "fedhdp", weights=weights["per_group"], noise="per_group"),
        *(variant for algorithm in RIVALS for variant in _rivals(algorithm, weights["shared"], sampling)),
    ]
    return replace(experiment, variants=tuple(_with_server_rate(name, variant) for variant in variants))


def pfa_part(name: str, data: BuiltInData, sampling: Sampling, rounds: int = ROUNDS, seed: int = 0) -> Experiment:
    """A part's rows of PFA: the mechanisms of WeiAvg, whose releases `fedhdp.reproduction.pfa` projects."""
    experiment, _ = _part_without_rows(name, data, sampling, rounds, seed)
    variants = [Variant(_stand_in(PFA, epsilon), "weiavg", options=_options(epsilon)) for epsilon in STAND_INS]
    return replace(experiment, variants=tuple(_with_server_rate(name, variant) for variant in variants))


def _part_without_rows(
    name: str, data: BuiltInData, sampling: Sampling, rounds: int, seed: int
) -> tuple[Experiment, dict[str, dict[str, float]]]:
    """What all rows of a part have, and the theory's weights by the kind of noise."""
    table, (levels, on_basis) = tables.TABLES[BASE], LEVEL_TABLES[name]
    groups = tuple(
        GroupConfig(level, round(share * data.clients), sampling_rate=table.sampling_rate, noise_multiplier=noise)
        for level, share, noise in LEVELS[levels]
    )
    mechanism = MechanismConfig(groups, AdaptiveClip(initial=table.clip), sampling=sampling)
    names = [group.name for group in groups]
    weights = {
        noise: dict(zip(names, theory_weights(mechanism, noise), strict=True)) for noise in ("shared", "per_group")
    }
    about = f"{levels} privacy levels on non-IID MNIST" + (", on 64 cosines with momentum" if on_basis else "")
    fields: dict[str, Any] = {"rounds": rounds, "seed": seed, "about": about}
    experiment = tables.make_experiment("levels", name, data, mechanism, (Variant(),), **fields)
    if on_basis:
        server = ServerOptimizer(_momentum(LARGEST_RATE), average=LONG_AVERAGE)
        model = MlpConfig(basis=CosineBasis(64))
        experiment = replace(experiment, model=model, training=BASIS_TRAINING, server=server)
    return experiment, weights


def _momentum(rate: float) -> dict[str, Any]:
    return {"name": "sgd", "learning_rate": rate, "momentum": MOMENTUM}


def _with_server_rate(part: str, variant: Variant) -> Variant:
    """The row with its server's rate, where the part has one for each row; PFA's projection leaves little noise."""
    levels, on_basis = LEVEL_TABLES[part]
    rate = SERVER_RATES.get(levels, {}).get(variant.name, LARGEST_RATE)
    return replace(variant, server={"optimizer": _momentum(rate)}) if on_basis else variant


def _stand_in(name: str, epsilon: float) -> str:
    return f"{name}, ε∞={epsilon:g}"


def _options(epsilon: float) -> dict[str, Any]:
    return {"opted_out_epsilon": epsilon}


def _rivals(algorithm: str, weights: dict[str, float], sampling: Sampling) -> list[Variant]:
    """The rows of a rival; time-adaptive spending has FedHDP's weights, the others set their own."""
    name, options = ALGORITHM_NAMES[algorithm], algorithm_options(algorithm)
    if sampling == "fixed" and algorithm in ("idp_sample", "time_adaptive"):
        return []  # they need Poisson sampling
    if "opted_out_epsilon" in options:
        return [Variant(_stand_in(name, epsilon), algorithm, options=_options(epsilon)) for epsilon in STAND_INS]
    if algorithm == "threshold":
        levels = list(weights)[:-1]  # at the strictest it is DP-FedAvg
        return [Variant(f"{name}, {level}", algorithm, options={"level": level}) for level in levels]
    kept = weights if algorithm == "time_adaptive" else {}
    return [Variant(name, algorithm, weights=kept)]


def rival_labels(part: str, rows: Sequence[str]) -> list[str]:
    """The labels of a part's rivals among the rows of a table."""
    names = tuple(f"{part}: {name}" for name in (*(ALGORITHM_NAMES[algorithm] for algorithm in RIVALS), PFA))
    return [row for row in rows if row.startswith(names)]

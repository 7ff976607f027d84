"""Two, three and five privacy levels: FedHDP beside its baselines and its rivals, all at the same epsilons.

Every row samples by Poisson and has the paper's training, clip and server, unless another sampling is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from fedhdp import AdaptiveClip
from fedhdp.algorithms import ALGORITHM_NAMES, algorithm_options
from fedhdp.experiments.components import BuiltInData
from fedhdp.experiments.config import Experiment
from fedhdp.experiments.presets import OPTED_OUT, PRIVATE
from fedhdp.experiments.variant import Variant
from fedhdp.mechanism import Sampling
from fedhdp.privacy.calibration import GroupConfig, MechanismConfig
from fedhdp.reproduction import tables
from fedhdp.reproduction.tables import ROUNDS
from fedhdp.theory.planning import MLP_PARAMETERS, with_optimal_weights

BASE = "noniid-mnist"  # the table whose data, training and clip these have
LEVEL_TABLES = {  # name, share of the clients, noise multiplier of each level
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


def theory_weights(mechanism: MechanismConfig, noise: str) -> tuple[float, ...]:
    """The theory's weights for the paper's rounds and network, to two digits."""
    promise = replace(mechanism.build(ROUNDS, 1e-4, "pld"), noise=noise)
    return tuple(float(f"{g.weight:.2g}") for g in with_optimal_weights(promise, ROUNDS, MLP_PARAMETERS).groups)


def levels_part(name: str, data: BuiltInData, sampling: Sampling, rounds: int = ROUNDS, seed: int = 0) -> Experiment:
    """Several privacy levels as an experiment: the baselines, FedHDP with both kinds of noise, and the rivals."""
    table = tables.TABLES[BASE]
    groups = tuple(
        GroupConfig(level, round(share * data.clients), sampling_rate=table.sampling_rate, noise_multiplier=noise)
        for level, share, noise in LEVEL_TABLES[name]
    )
    mechanism = MechanismConfig(groups, AdaptiveClip(initial=table.clip), sampling=sampling)
    names = [group.name for group in groups]
    shared, per_group = (
        dict(zip(names, theory_weights(mechanism, noise), strict=True)) for noise in ("shared", "per_group")
    )
    variants = (
        *(Variant(label, algorithm) for algorithm, label in tables.LABELS.items()),
        Variant(OURS, "fedhdp", weights=shared, noise="shared"),
        Variant("FedHDP, noise per group", "fedhdp", weights=per_group, noise="per_group"),
        *(variant for algorithm in RIVALS for variant in _rivals(algorithm, shared, sampling)),
    )
    about = f"{name} privacy levels on non-IID MNIST"
    return tables.make_experiment("levels", name, data, mechanism, variants, rounds=rounds, seed=seed, about=about)


def _rivals(algorithm: str, weights: dict[str, float], sampling: Sampling) -> list[Variant]:
    """The rows of a rival; time-adaptive spending has FedHDP's weights, the others set their own."""
    name, options = ALGORITHM_NAMES[algorithm], algorithm_options(algorithm)
    if sampling == "fixed" and algorithm in ("idp_sample", "time_adaptive"):
        return []  # they need Poisson sampling
    if "opted_out_epsilon" in options:
        stated: list[dict[str, Any]] = [{"opted_out_epsilon": epsilon} for epsilon in STAND_INS]
        return [Variant(f"{name}, ε∞={o['opted_out_epsilon']:g}", algorithm, options=o) for o in stated]
    kept = weights if algorithm == "time_adaptive" else {}
    return [Variant(name, algorithm, weights=kept)]


def rival_labels(part: str, rows: Sequence[str]) -> list[str]:
    """The labels of a part's rivals among the rows of a table."""
    names = tuple(f"{part}: {ALGORITHM_NAMES[algorithm]}" for algorithm in RIVALS)
    return [row for row in rows if row.startswith(names)]

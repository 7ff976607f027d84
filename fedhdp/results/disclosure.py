"""Which numbers of a run may be published, and a run without the others.

An epsilon covers what is released through the noise: models, clips, and what follows from these and from data that is not
the clients'. It covers nothing of a variant that gives no noise to clients who chose some, and nothing that comes from a
noise seed. What is measured on clients' data is never covered. See docs/explanation/limits.md.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

from msgspec.structs import replace

from fedhdp.mechanism import SERVER, Mechanism
from fedhdp.results.schema import MetricRow, VariantResult
from fedhdp.results.stored import StoredVariant

PROMISED = {"noise_multiplier": 0.0, "epsilon": math.inf}  # what a group or level states that opted out


def groups_with_noise(raw: dict[str, Any]) -> set[str]:
    """The groups of an experiment's or a deployment's file that chose noise."""
    levels = raw.get("levels", {}).items() if "levels" in raw else ((g["name"], g) for g in raw["mechanism"]["groups"])
    return {name for name, level in levels if not any(level.get(key) == value for key, value in PROMISED.items())}


def is_covered(result: VariantResult, with_noise: Collection[str]) -> bool:
    """Whether a variant's epsilons cover its global models: groups that chose noise have it, and it is not from a seed.

    The same must hold of the model that it began with. A weight of 0 in the last round says nothing of earlier ones.
    """
    unprotected = {group.name for group in result.groups if group.unprotected and group.rounds}
    return not result.repeatable and not unprotected & set(with_noise) and result.start_covered is not False


def may_publish(row: MetricRow, result: VariantResult, mechanism: Mechanism | None) -> bool:
    """Whether a measurement of a covered variant may be published."""
    if row.metric == "epsilon":
        return True
    if row.group != SERVER:
        return False
    if row.metric.partition("/")[0] == "clip":
        return mechanism is not None and (not mechanism.is_adaptive or mechanism.bit_noise_stddev > 0)
    return not result.server_has_client_data


def publishable(variant: StoredVariant, mechanism: Mechanism | None, with_noise: Collection[str]) -> StoredVariant:
    """The variant without what may not be published."""
    result = variant.result
    covered = is_covered(result, with_noise)
    history = [row for row in variant.history if covered and may_publish(row, result, mechanism)]
    groups = [replace(group, values={}, refused=0) for group in result.groups]
    values = result.values if covered and not result.server_has_client_data else {}
    clip = result.clip if any(row.metric.startswith("clip") for row in history) else None
    return variant.replace(replace(result, groups=groups, values=values, clip=clip), history)

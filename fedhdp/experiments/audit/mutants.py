"""Faults put into the server, each of which an audit must find: the functions of a round with one of them replaced.

All run under one mechanism, in which each fault shows: two private groups of different weight and noise, one that opted
out, and an adaptive clip for each of two layers. Axis letters as in ``server.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from msgspec.structs import replace

from fedhdp import server
from fedhdp.clips import LayerClip
from fedhdp.errors import require
from fedhdp.experiments.audit.run import audit_mechanism
from fedhdp.experiments.audit.system import SOUND, ServerFunctions
from fedhdp.mechanism import Mechanism, PrivacyGroup, RoundParams
from fedhdp.privacy.audit.results import AuditReport, MutantResult
from fedhdp.rng import os_entropy

ROUNDS, CANARIES = 120, 400
PROBE = Mechanism(
    groups=(
        PrivacyGroup("opted out", 100, 0.0, 0.1, weight=0.5),
        PrivacyGroup("relaxed", 400, 0.75, 0.1, weight=0.2),
        PrivacyGroup("strict", 400, 2.0, 0.1, weight=0.1),
    ),
    clip=LayerClip({"first": 0.5, "rest": 0.2}),
)


class Mutant(NamedTuple):
    """A fault: how it changes the functions of a round."""

    about: str
    make: Callable[[], ServerFunctions]


def _with_noise(stddev: Callable[[Mechanism], float]) -> ServerFunctions:
    """The server with another standard deviation of the update's noise, in clips."""

    def round_params(mechanism: Mechanism) -> RoundParams:
        return mechanism.round_params._replace(update_noise_stddev=np.float32(stddev(mechanism)))

    return SOUND._replace(round_params=round_params)


def _halved() -> ServerFunctions:
    return _with_noise(lambda mechanism: mechanism.update_noise_stddev / 2)


def _bits_free() -> ServerFunctions:
    def stddev(mechanism: Mechanism) -> float:
        return max(mechanism.l2_sensitivity(group) * group.noise_multiplier for group in mechanism.sampled_groups)

    return _with_noise(stddev)


def _reused() -> ServerFunctions:
    def stddev(mechanism: Mechanism) -> float:
        private = [group for group in mechanism.sampled_groups if not group.opted_out]
        return min(mechanism.l2_sensitivity(group) * mechanism.update_noise_multiplier(group) for group in private)

    return _with_noise(stddev)


def _next_clip() -> ServerFunctions:
    def private_mean(params, clip, sums, key, layers=None):
        _, next_clip = server.private_mean(params, clip, sums, key, layers)
        update_P, _ = server.private_mean(params, next_clip, sums, key, layers)  # whose noise the next clip scales
        return update_P, next_clip

    return SOUND._replace(private_mean=private_mean)


def _weights_last() -> ServerFunctions:
    def clip_and_sum(params, clip, updates, group_C, is_participating_C):
        groups = len(params.weight_G)
        of_groups = [
            server.clip_and_sum(
                params._replace(weight_G=jnp.arange(groups) == group), clip, updates, group_C, is_participating_C
            )
            for group in range(groups)
        ]
        return of_groups[0]._replace(update_P=jnp.stack([sums.update_P for sums in of_groups]))

    def private_mean(params, clip, sums, key, layers=None):
        sums_GP = sums.update_P
        means_P = [
            server.private_mean(params, clip, sums._replace(update_P=sum_P), jax.random.fold_in(key, group), layers)[0]
            for group, sum_P in enumerate(sums_GP)
        ]
        _, next_clip = server.private_mean(params, clip, sums._replace(update_P=sums_GP[0]), key, layers)
        return jnp.asarray(params.weight_G) @ jnp.stack(means_P), next_clip

    return SOUND._replace(clip_and_sum=clip_and_sum, private_mean=private_mean)


def _divided_by_cohort() -> ServerFunctions:
    def clip_and_sum(params, clip, updates, group_C, is_participating_C):
        sums = server.clip_and_sum(params, clip, updates, group_C, is_participating_C)
        weight = jnp.sum(jnp.asarray(params.weight_G)[group_C] * is_participating_C)
        return sums._replace(update_P=jnp.append(sums.update_P, weight))

    def private_mean(params, clip, sums, key, layers=None):
        sums, weight = sums._replace(update_P=sums.update_P[:-1]), sums.update_P[-1]
        return server.private_mean(params._replace(expected_weight=weight), clip, sums, key, layers)

    return SOUND._replace(clip_and_sum=clip_and_sum, private_mean=private_mean)


def _sampled_twice() -> ServerFunctions:
    def sample_cohort(mechanism, members_G, rng):
        groups = tuple(replace(group, sampling_rate=min(2 * group.sampling_rate, 1)) for group in mechanism.groups)
        return server.sample_cohort(replace(mechanism, groups=groups), members_G, rng)

    return SOUND._replace(sample_cohort=sample_cohort)


def _layer_unclipped() -> ServerFunctions:
    def dense_updates(update_CP, layers=None):
        updates = server.dense_updates(update_CP, layers)
        return updates._replace(norm_C=updates.norm_C.at[:, -1].set(0.0))  # which is below any clip

    return SOUND._replace(dense_updates=dense_updates)


def _noise_repeated() -> ServerFunctions:
    words: list[np.ndarray] = []

    def noise_key() -> np.ndarray:
        if not words:
            words.append(os_entropy(2))
            return words[0]
        return words.pop()

    return SOUND._replace(noise_key=noise_key)


def _few_bits() -> ServerFunctions:
    def private_mean(params, clip, sums, key, layers=None):
        without = params._replace(update_noise_stddev=jnp.float32(0))
        update_P, next_clip = server.private_mean(without, clip, sums, key, layers)
        clip_P = clip if layers is None else layers.by_parameter(clip)
        noise_P = params.update_noise_stddev * clip_P * jax.random.normal(key, update_P.shape)
        return update_P + noise_P / params.expected_weight, next_clip

    return SOUND._replace(private_mean=private_mean)


MUTANTS: dict[str, Mutant] = {
    "noise halved": Mutant("the update's noise has half of its standard deviation", _halved),
    "noise by the next clip": Mutant("the clip of the next round scales the noise of this one", _next_clip),
    "weights applied after the noise": Mutant("each group's sum gets the noise, then its weight", _weights_last),
    "division by who came": Mutant("the sum is divided by the weight of the clients who came", _divided_by_cohort),
    "one group's noise reused for another": Mutant("the noise that one group requires counts for all", _reused),
    "bits not accounted": Mutant("the clip bits are released, and the update's noise is as without them", _bits_free),
    "sampling at twice the rate": Mutant("clients are sampled with twice their probability", _sampled_twice),
    "clip ignored for one layer": Mutant("the updates of the last layer are not clipped", _layer_unclipped),
    "noise repeated in two rounds": Mutant("every second round has the noise of the one before", _noise_repeated),
    "noise with 23-bit tails": Mutant("the noise is JAX's, from 23 random bits a sample", _few_bits),
}


def audit_mutants(
    names: list[str] | None = None,
    *,
    rounds: int = ROUNDS,
    seed: int = 0,
    confidence: float = 0.999,
    progress: Callable[[str, int, int], None] | None = None,
) -> tuple[AuditReport, list[MutantResult]]:
    """Audit the server, which must pass, and mutants of it, which must be caught.

    Args:
        names: The mutants; None: all.
        rounds: The number of rounds of each audit.
        seed: The seed of the canaries' coins.
        confidence: The probability that the server passes.
        progress: Called with the name of what is audited, how many mutants are done, and how many there are.

    Returns:
        The audit of the server itself, and what became of each mutant.

    Raises:
        InvalidValueError: If there is no such mutant, or a value is out of range.
    """
    names = list(MUTANTS) if names is None else names
    for name in names:
        require(name in MUTANTS, "mutants", name, f"one of {', '.join(MUTANTS)}")
    watch = progress or (lambda name, done, total: None)
    watch("the server itself", 0, len(names) + 1)
    sound, results = audit_probe(SOUND, rounds, seed, confidence), []
    for number, name in enumerate(names, 1):
        watch(name, number, len(names) + 1)
        caught_by = failures(audit_probe(MUTANTS[name].make(), rounds, seed, confidence))
        results.append(MutantResult(name, bool(caught_by), caught_by, MUTANTS[name].about))
    return sound, results


def audit_probe(
    functions: ServerFunctions, rounds: int = ROUNDS, seed: int = 0, confidence: float = 0.999
) -> AuditReport:
    """The audit of a server with these functions, under the mutants' mechanism."""
    report = audit_mechanism(PROBE, rounds, canaries=CANARIES, confidence=confidence, seed=seed, functions=functions)
    return replace(report, experiment="the mutants' mechanism")


def failures(report: AuditReport) -> list[str]:
    """What an audit found, in words: the checks that failed, and the attacks with a bound above the claim."""
    names = [check.name for check in report.checks if not check.holds]
    for group in report.groups:
        attacks = {"unknown coins": group.unknown_coins, "known coins": group.known_coins, "clip bits": group.clip_bits}
        names += [f"{name} of {group.name}" for name, attack in attacks.items() if attack and not attack.holds]
        if group.opted_out and group.found is False:
            names.append(f"{group.name} not found")
    return names

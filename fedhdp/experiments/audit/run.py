"""The audit of a mechanism, and of an experiment."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import numpy as np
from msgspec.structs import replace

import fedhdp
from fedhdp.devices import use_cpu_cores
from fedhdp.errors import require
from fedhdp.experiments.audit.simulator import simulator_checks
from fedhdp.experiments.audit.system import SOUND, ServerFunctions, ServerSystem
from fedhdp.experiments.audit.training import audit_training
from fedhdp.experiments.config import Experiment
from fedhdp.mechanism import ScheduledMechanism, mechanism_at
from fedhdp.memory import require_memory
from fedhdp.privacy.accounting import Accountant, default_accountant
from fedhdp.privacy.audit import meter
from fedhdp.privacy.audit.canaries import System, audit_rounds, make_layout
from fedhdp.privacy.audit.meter import Check
from fedhdp.privacy.audit.report import attack_training, audit_groups, make_claims, transcript_checks
from fedhdp.privacy.audit.results import AuditReport
from fedhdp.privacy.costs import ADJACENCY

TAIL_SAMPLES = 2**20  # of one round's noise, whose tails are read
CANARIES = 1000  # of each group
MAX_RUNS = 10_000
CLIENT_BYTES = 16  # of a client in the memory of an audit, at least
TRAINING_CANARIES = 200  # of each group, in a real run
Watch = Callable[[str, int, int], None]


def audit_mechanism(
    schedule: ScheduledMechanism,
    rounds: int,
    delta: float | Callable[[str], float] = 1e-4,
    *,
    canaries: int = CANARIES,
    runs: int = 1,
    confidence: float = 0.999,
    seed: int = 0,
    accountant: Accountant | None = None,
    functions: ServerFunctions = SOUND,
    progress: Watch | None = None,
) -> AuditReport:
    """Attack the server under a mechanism, and read its noise.

    Args:
        schedule: The mechanism, or a function that returns that of a round.
        rounds: The number of rounds of a run.
        delta: The delta at which epsilon is claimed, or that of each group.
        canaries: How many clients of each group are canaries; all of a smaller group.
        runs: How many runs, with fresh coins.
        confidence: The probability that a server that keeps its promise passes everything, at least.
        seed: The seed of the canaries' coins. Noise and cohorts are from the operating system's entropy.
        accountant: What computes epsilon; None: the default.
        functions: The server's functions; a mutant's are others.
        progress: Called with what is done, how many rounds of it are, and how many there are.

    Raises:
        InvalidValueError: If a value is out of range.
    """
    require(rounds >= 1, "rounds", rounds, "at least 1")
    require(1 <= runs <= MAX_RUNS, "runs", runs, f"between 1 and {MAX_RUNS:,}")
    require(canaries >= 1, "canaries", canaries, "at least 1")
    require(0.5 <= confidence < 1, "confidence", confidence, "at least 0.5 and below 1")
    require(0 <= seed < 2**31, "seed", seed, "at least 0 and below 2**31")
    use_cpu_cores()
    start, rng = time.monotonic(), np.random.default_rng(seed)
    mechanism = mechanism_at(schedule, 0)
    require_memory(CLIENT_BYTES * mechanism.clients, "clients", mechanism.clients)
    accountant = accountant or default_accountant(mechanism.sampling)
    delta_of = delta if callable(delta) else lambda group: delta
    claims = make_claims(schedule, rounds, delta_of, accountant)
    layout = make_layout(mechanism, canaries)
    system: System = ServerSystem(mechanism, layout.width, functions)
    transcripts = []
    for number in range(runs):
        watch = progress and partial(progress, f"run {number + 1} of {runs}")
        transcripts.append(audit_rounds(system, schedule, layout, rounds, rng, watch))
    level = (1 - confidence) / 3  # the same for checks, for these attacks, and for those on training
    checks = transcript_checks(schedule, transcripts, rounds)
    if mechanism.update_noise_stddev > 0 and mechanism.expected_weight > 0:
        checks.append(_tail_check(schedule, functions))
    if functions is SOUND:
        checks += simulator_checks(mechanism)
    checks = meter.judge(checks, level)
    groups = audit_groups(schedule, claims, transcripts, layout, level, rng)
    return AuditReport(
        experiment="",
        variant="",
        version=fedhdp.__version__,
        rounds=rounds,
        runs=runs,
        sampling=mechanism.sampling,
        adjacency=ADJACENCY[mechanism.sampling],
        arithmetic=mechanism.arithmetic,
        accountant=accountant,
        confidence=confidence,
        seed=seed,
        seconds=time.monotonic() - start,
        groups=groups,
        checks=checks,
        mutants=[],
        holds=all(check.holds for check in checks) and all(group.holds for group in groups),
    )


def _tail_check(schedule: ScheduledMechanism, functions: ServerFunctions) -> Check:
    """The tails of the noise of one round in which nobody takes part."""
    mechanism = mechanism_at(schedule, 0)
    layers = max(len(mechanism.layers), 1)
    width = TAIL_SAMPLES // layers
    system = ServerSystem(mechanism, width, functions)
    clip = mechanism.initial_clip
    released_P, _ = system.release(mechanism, clip, np.zeros(0, np.int64), np.zeros((0, width * layers), np.float32))
    scale_L = mechanism.expected_weight / (np.float64(clip).reshape(-1) * mechanism.update_noise_stddev)
    noise_P = (released_P.reshape(layers, width) * scale_L[:, None]).ravel()
    step = 2.0**-22  # of a number in single precision between 2 and 4
    if mechanism.arithmetic == "exact":
        step = max(step, 1 / mechanism.grid_params.update_noise_stddev)
    return meter.tail_check(noise_P, step)


def audit_experiment(
    experiment: Experiment,
    variant: str | None = None,
    *,
    canaries: int = CANARIES,
    runs: int = 1,
    confidence: float = 0.999,
    seed: int = 0,
    training: bool = False,
    progress: Watch | None = None,
) -> AuditReport:
    """Audit the mechanism of one of an experiment's variants.

    Args:
        experiment: The experiment.
        variant: The variant's name; None: the first whose algorithm is fedhdp, or the last.
        canaries: As for `audit_mechanism`, as are the others.
        runs: How many runs.
        confidence: The probability that a sound server passes.
        seed: The seed of the canaries' coins.
        training: Whether canaries join a training too, whose released models are attacked.
        progress: As for `audit_mechanism`.

    Raises:
        FedHDPError: If there is no such variant, a value is out of range, or the data cannot be loaded.
    """
    number = find_variant(experiment, variant)
    data = experiment.load_if_needed()
    schedule = experiment.variant_mechanisms(experiment.build_mechanism(data), data)[number]
    report = audit_mechanism(
        schedule,
        experiment.rounds,
        experiment.delta_of,
        canaries=canaries,
        runs=runs,
        confidence=confidence,
        seed=seed,
        accountant=experiment.run_accountant,
        progress=progress,
    )
    name = experiment.variants[number].name
    if training:
        report = _with_training(report, experiment, number, schedule, canaries, progress)
    return replace(report, experiment=experiment.name, variant=name)


def find_variant(experiment: Experiment, name: str | None) -> int:
    """The number of the variant that is audited."""
    names = [variant.name for variant in experiment.variants]
    if name is not None:
        require(name in names, "variant", name, f"one of {', '.join(names)}")
        return names.index(name)
    own = [number for number, variant in enumerate(experiment.variants) if variant.algorithm == "fedhdp"]
    return own[0] if own else len(names) - 1


def _with_training(
    report: AuditReport,
    experiment: Experiment,
    number: int,
    schedule: ScheduledMechanism,
    canaries: int,
    progress: Watch | None,
) -> AuditReport:
    """The report with the attacks on the models of a real run."""
    start, rng = time.monotonic(), np.random.default_rng([report.seed, 1])
    watch = progress and partial(progress, "training")
    scores_G = audit_training(experiment, number, schedule, min(canaries, TRAINING_CANARIES), rng, watch)
    alpha = (1 - report.confidence) / 3 / len(scores_G)
    groups = []
    for group, scores in zip(report.groups, scores_G, strict=True):
        attack = attack_training(group.claimed_epsilon, group.delta, scores, alpha, rng)
        groups.append(replace(group, training=attack, holds=group.holds and attack.holds))
    holds = report.holds and all(group.holds for group in groups)
    seconds = report.seconds + time.monotonic() - start
    return replace(report, groups=groups, holds=holds, seconds=seconds)

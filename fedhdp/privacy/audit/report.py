"""An audit from its transcripts: claims, lower bounds, checks.

The probability that a sound system fails is divided equally among all bounds and checks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from fedhdp.mechanism import SENSITIVITY, Mechanism, PrivacyGroup, ScheduledMechanism, mechanism_at
from fedhdp.privacy.accounting import Accountant, compose
from fedhdp.privacy.audit import meter
from fedhdp.privacy.audit.bounds import (
    MIN_SAMPLES,
    Rates,
    Scores,
    area_under_curve,
    clopper_pearson,
    epsilon_at,
    gaussian_bound,
    gdp_epsilon,
    gdp_mu,
    mu_of,
    one_run_bound,
    roc_curve,
    threshold_bound,
    true_positive_rate,
)
from fedhdp.privacy.audit.canaries import Layout, Transcript, bit_scores, known_scores, power, total_scores
from fedhdp.privacy.audit.meter import Check
from fedhdp.privacy.audit.results import Attack, GroupAudit
from fedhdp.privacy.costs import scheduled_costs

CLOPPER_PEARSON, GAUSSIAN, ONE_RUN = "Clopper-Pearson", "Gaussian", "one run"
BOUNDS = 7  # of a group: three on all rounds, two on one round, two on the clip bits
FOUND_POWER = 0.5  # the share of an attack's power that it must show
TOLERANCE = 1e-6  # relative; bounds of floating-point numbers


class Claim(NamedTuple):
    """What a mechanism promises a group."""

    epsilon: float  # of all rounds
    delta: float
    round_mu: float  # of one round whose cohort is known
    bit_mu: float  # of its clip bits alone
    update_mu: float  # how far one client really moves a round's sum, in standard deviations of its noise


def make_claims(
    schedule: ScheduledMechanism, rounds: int, delta_of: Callable[[str], float], accountant: Accountant
) -> dict[str, Claim]:
    """What a mechanism, or a function of the round, promises each group, by name.

    Args:
        schedule: The mechanism, or that of each round.
        rounds: The number of rounds.
        delta_of: The delta of each group.
        accountant: What computes epsilon.
    """
    first, claims = mechanism_at(schedule, 0), {}
    costs = scheduled_costs(schedule, rounds)
    for group in first.groups:
        delta, of_group = delta_of(group.name), costs[group.name]
        smallest = min(cost.noise_multiplier for cost in of_group)
        epsilon = math.inf if smallest == 0 else compose(of_group, delta, accountant)
        mu = math.inf if smallest == 0 else 1 / smallest
        bit_mu = math.inf if group.opted_out else SENSITIVITY[first.sampling] / max(first.bit_noise_multiplier, 1e-9)
        claims[group.name] = Claim(epsilon, delta, mu, bit_mu, update_mu(first, group))
    return claims


def update_mu(mechanism: Mechanism, group: PrivacyGroup) -> float:
    """How many standard deviations lie between the sums with a canary and without it."""
    return power(mechanism, group) * SENSITIVITY[mechanism.sampling]


def audit_groups(
    schedule: ScheduledMechanism,
    claims: dict[str, Claim],
    transcripts: Sequence[Transcript],
    layout: Layout,
    level: float,
    rng: np.random.Generator,
) -> list[GroupAudit]:
    """The audit of each group.

    Args:
        schedule: The mechanism, or that of each round.
        claims: What each group is promised.
        transcripts: The runs.
        layout: The canaries.
        level: The probability that a sound system fails.
        rng: Divides scores into halves.
    """
    mechanism = mechanism_at(schedule, 0)
    alpha = level / (BOUNDS * len(mechanism.groups))
    groups = []
    for number, group in enumerate(mechanism.groups):
        claim = claims[group.name]
        all_rounds = _attack_run(claim, total_scores(list(transcripts), layout, number), alpha, rng)
        one_round = attack_round(claim.round_mu, claim.delta, known_scores(list(transcripts), number), alpha, rng)
        bits = attack_round(claim.bit_mu, claim.delta, bit_scores(list(transcripts), number), alpha, rng)
        has_bits = mechanism.is_adaptive and bits.with_canary + bits.without_canary > 0
        is_found = _is_found(one_round, claim.update_mu, alpha)
        attacks = [all_rounds, one_round, *([bits] if has_bits else [])]
        groups.append(
            GroupAudit(
                name=group.name,
                clients=group.clients,
                opted_out=group.opted_out,
                delta=claim.delta,
                claimed_epsilon=claim.epsilon,
                claimed_mu=all_rounds.claimed_mu,
                lower_bounds=all_rounds.lower_bounds,
                unknown_coins=all_rounds,
                known_coins=one_round,
                clip_bits=bits if has_bits else None,
                training=None,
                found=is_found,
                holds=all(attack.holds for attack in attacks) and (is_found is not False or not group.opted_out),
            )
        )
    return groups


def _is_found(attack: Attack, mu: float, alpha: float) -> bool | None:
    """Whether an attack shows at least half of what canaries move the release by; None for too few scores to tell."""
    scores = min(attack.with_canary, attack.without_canary)
    half = np.array([float(scores // 2)])
    if scores < MIN_SAMPLES or mu * math.sqrt(scores / 2) < 3 * math.sqrt(2 * math.log(1 / alpha)):
        return None
    best = Rates(clopper_pearson(half, scores // 2, alpha / 2)[0], clopper_pearson(0 * half, scores // 2, alpha / 2)[1])
    shown = max((value for value in attack.lower_mus.values() if value is not None), default=0.0)
    return shown >= FOUND_POWER * min(mu, float(mu_of(best)[0]))


def _attack_run(claim: Claim, scores: Scores, alpha: float, rng: np.random.Generator) -> Attack:
    """An attack on all rounds: bounds on epsilon at the claim's delta."""
    claimed_mu = gdp_mu(claim.epsilon, claim.delta)
    mu = gaussian_bound(scores, alpha)
    bounds = {
        CLOPPER_PEARSON: threshold_bound(scores, alpha, epsilon_at(claim.delta), rng),
        GAUSSIAN: None if mu is None else gdp_epsilon(mu, claim.delta),
        ONE_RUN: one_run_bound(scores, claim.delta, alpha, rng),
    }
    mus = {name: None if bound is None else gdp_mu(bound, claim.delta) for name, bound in bounds.items()}
    return _attack(claim.epsilon, claimed_mu, bounds, mus, scores)


def attack_training(
    claimed_epsilon: float, delta: float, scores: Scores, alpha: float, rng: np.random.Generator
) -> Attack:
    """An attack on released models: the one-run bound, which holds although the scores of a run depend on each other."""
    bounds = {ONE_RUN: one_run_bound(scores, delta, alpha, rng)}
    mus = {name: None if bound is None else gdp_mu(bound, delta) for name, bound in bounds.items()}
    return _attack(claimed_epsilon, gdp_mu(claimed_epsilon, delta), bounds, mus, scores)


def attack_round(claimed_mu: float, delta: float, scores: Scores, alpha: float, rng: np.random.Generator) -> Attack:
    """An attack on a round whose cohort is known: bounds on the mu of the Gaussian mechanism, and epsilons from these."""
    mus = {CLOPPER_PEARSON: threshold_bound(scores, alpha, mu_of, rng), GAUSSIAN: gaussian_bound(scores, alpha)}
    bounds = {name: None if mu is None else gdp_epsilon(mu, delta) for name, mu in mus.items()}
    return _attack(gdp_epsilon(claimed_mu, delta), claimed_mu, bounds, mus, scores)


def _attack(
    claimed_epsilon: float,
    claimed_mu: float,
    bounds: dict[str, float | None],
    mus: dict[str, float | None],
    scores: Scores,
) -> Attack:
    return Attack(
        claimed_epsilon=claimed_epsilon,
        claimed_mu=claimed_mu,
        lower_bounds=bounds,
        lower_mus=mus,
        auc=area_under_curve(scores),
        tpr_at_1_percent_fpr=true_positive_rate(scores, 0.01),
        with_canary=len(scores.in_N),
        without_canary=len(scores.out_N),
        roc=roc_curve(scores),
        holds=all(bound is None or bound <= claimed_epsilon * (1 + TOLERANCE) for bound in bounds.values()),
    )


def transcript_checks(schedule: ScheduledMechanism, transcripts: Sequence[Transcript], rounds: int) -> list[Check]:
    """What the noise meter reads in the rounds of an audit."""
    mechanism = mechanism_at(schedule, 0)
    checks: list[Check] = []
    noise_TP = np.concatenate([transcript.noise_TP for transcript in transcripts]).astype(np.float64)
    signal_TP = np.concatenate([transcript.signal_TP for transcript in transcripts]).astype(np.float64)
    if mechanism.update_noise_stddev > 0 and mechanism.expected_weight > 0:
        checks += [*meter.noise_checks(noise_TP), meter.signal_check(noise_TP, signal_TP)]
    if mechanism.is_adaptive and mechanism.bit_noise_stddev > 0:
        bit_noise_TL = np.concatenate([transcript.bit_noise_TL for transcript in transcripts])
        checks.append(meter.variance_check(bit_noise_TL, "noise of the clip bits"))
    for number, group in enumerate(mechanism.groups):
        sampled = sum(int(transcript.sampled_G[number]) for transcript in transcripts)
        trials = group.clients * rounds * len(transcripts)
        probability, is_fixed = mechanism.sampling_probability(group), mechanism.sampling == "fixed"
        checks.append(meter.sampling_check(group.name, sampled, trials, probability, is_fixed))
    return checks

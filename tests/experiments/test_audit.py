"""Audits of the server: it passes, its mutants are caught, and the attack has the power that it must have."""

from __future__ import annotations

import math

import numpy as np
import pytest
from helpers import raises_field
from msgspec.structs import replace

from fedhdp.clips import AdaptiveClip, LayerClip
from fedhdp.experiments.audit import MUTANTS, audit_mechanism, audit_mutants
from fedhdp.experiments.audit.mutants import PROBE, audit_probe, failures
from fedhdp.experiments.audit.simulator import simulator_checks
from fedhdp.experiments.audit.system import SOUND, ServerSystem
from fedhdp.mechanism import Mechanism, PrivacyGroup
from fedhdp.privacy.audit import meter

SURE = 1 - 1e-6  # the noise is real, so a sound server fails once in a million audits
SMALL = Mechanism(
    (
        PrivacyGroup("open", 60, 0.0, 0.2),
        PrivacyGroup("relaxed", 150, 0.8, 0.2, weight=0.3),
        PrivacyGroup("strict", 150, 1.5, 0.2, weight=0.2),
    ),
    clip=AdaptiveClip(0.5),
)
KINDS = {
    "adaptive clip": SMALL,
    "fixed clip": replace(SMALL, clip=0.7),
    "clip by layer": replace(SMALL, clip=LayerClip({"a": 0.5, "b": 2.0})),
    "noise per group": replace(SMALL, noise="per_group"),
    "fixed cohorts": replace(SMALL, sampling="fixed"),
    "exact arithmetic": replace(SMALL, arithmetic="exact"),
    "exact, by layer": replace(SMALL, arithmetic="exact", clip=LayerClip({"a": 0.5, "b": 2.0})),
    "another quantile": replace(SMALL, clip=AdaptiveClip(0.5, quantile=0.8)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_server_passes_and_the_attack_is_strong(kind):
    mechanism = KINDS[kind]
    report = audit_mechanism(mechanism, 80, canaries=150, confidence=0.99999)
    assert failures(report) == []
    assert report.holds
    for group in report.groups:
        assert group.found or not group.opted_out
        assert group.found is not False
        assert group.unknown_coins.auc > 0.5
        known = group.known_coins
        if not group.opted_out:
            rate = 2 if mechanism.sampling == "fixed" else 1
            assert known.claimed_mu == pytest.approx(
                rate / mechanism.effective_noise_multiplier(_group(mechanism, group))
            )
            best = max(mu for mu in known.lower_mus.values() if mu is not None)
            assert 0.25 * known.claimed_mu < best <= known.claimed_mu


def _group(mechanism: Mechanism, audit) -> PrivacyGroup:
    return next(group for group in mechanism.groups if group.name == audit.name)


def test_opted_out_group_that_is_not_found_fails():
    """The control: an attack that sees nothing does not pass for privacy."""
    deaf = SOUND._replace(dense_updates=_send_nothing)
    report = audit_mechanism(SMALL, 40, canaries=60, confidence=SURE, functions=deaf)
    group = report.groups[0]
    assert group.opted_out
    assert group.found is False
    assert not group.holds
    assert not report.holds
    assert "open not found" in failures(report)


def _send_nothing(update_CP, layers=None):
    return SOUND.dense_updates(0 * update_CP, layers)


def test_group_without_noise_that_claims_it_is_refuted():
    """All bounds on the group are above its claim where the server adds no noise."""
    silent = SOUND._replace(round_params=lambda m: m.round_params._replace(update_noise_stddev=np.float32(0)))
    report = audit_mechanism(SMALL, 60, canaries=150, confidence=SURE, functions=silent)
    for group in report.groups[1:]:
        assert not group.holds
        assert not group.known_coins.holds
        assert group.known_coins.auc == 1


def test_unknown_coins_find_too_little_noise():
    mechanism = Mechanism((PrivacyGroup("only", 400, 5.0, 0.5),), clip=1.0)
    less = SOUND._replace(
        round_params=lambda m: m.round_params._replace(update_noise_stddev=np.float32(m.update_noise_stddev / 8))
    )
    report = audit_mechanism(mechanism, 20, canaries=400, runs=4, functions=less)
    assert not report.groups[0].unknown_coins.holds
    assert report.groups[0].lower_bounds["Clopper-Pearson"] > report.groups[0].claimed_epsilon


def test_known_coins_find_half_of_the_noise_with_50_canaries():
    mechanism = Mechanism((PrivacyGroup("only", 50, 1.5, 0.05),), clip=1.0)
    halved = SOUND._replace(
        round_params=lambda m: m.round_params._replace(update_noise_stddev=np.float32(m.update_noise_stddev / 2))
    )
    report = audit_mechanism(mechanism, 500, canaries=50, functions=halved)
    assert not report.groups[0].known_coins.holds


def test_clip_bits_without_noise_are_found():
    mechanism = Mechanism((PrivacyGroup("only", 100, 4.0, 0.2),), clip=AdaptiveClip(0.5))
    bare = SOUND._replace(round_params=lambda m: m.round_params._replace(bit_noise_stddev=np.float32(0)))
    report = audit_mechanism(mechanism, 150, canaries=100, confidence=SURE, functions=bare)
    assert not report.groups[0].clip_bits.holds
    assert "noise of the clip bits" in failures(report)


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_caught(name):
    assert failures(audit_probe(MUTANTS[name].make(), 60, confidence=SURE))


def test_the_mutants_server_itself_passes():
    assert failures(audit_probe(SOUND, 60, confidence=SURE)) == []
    with raises_field("mutants"):
        audit_mutants(["other"])


def test_mechanism_without_noise_has_nothing_to_refute():
    report = audit_mechanism(replace(SMALL, groups=SMALL.groups[:1]), 30, canaries=60, confidence=SURE)
    assert report.holds
    assert report.groups[0].claimed_epsilon == math.inf
    assert not [check.name for check in report.checks if check.name.startswith("noise v")]


def test_group_of_weight_0_shows_nothing():
    groups = (SMALL.groups[0], replace(SMALL.groups[1], weight=0.0))
    report = audit_mechanism(replace(SMALL, groups=groups), 40, canaries=100, confidence=SURE)
    assert report.holds
    assert report.groups[1].known_coins.lower_bounds["Clopper-Pearson"] < 0.5


def test_simulator_noise_is_that_promised(monkeypatch):
    level = 1e-6
    assert [check.name for check in meter.judge(simulator_checks(SMALL), level) if not check.holds] == []
    from fedhdp.simulation import Simulation

    def same_keys(self, round):
        return [np.array([1, round // 2], np.uint32)] * len(self.runs)

    monkeypatch.setattr(Simulation, "_noise_keys", same_keys)
    assert "simulator: rounds and runs" in [c.name for c in meter.judge(simulator_checks(SMALL), level) if not c.holds]


def test_noise_is_fresh_though_the_seed_is_the_same():
    system, empty = ServerSystem(PROBE, 50), np.zeros((0, 100), np.float32)
    first, second = (system.release(PROBE, PROBE.initial_clip, np.zeros(0, np.int64), empty)[0] for _ in range(2))
    assert not np.any(first == second)


@pytest.mark.parametrize(
    ("field", "value"),
    [("rounds", 0), ("runs", 0), ("runs", 10**21), ("canaries", 0), ("confidence", 1.0), ("seed", -1)],
)
def test_values_out_of_range(field, value):
    values = {"rounds": 2, field: value}
    with raises_field(field):
        audit_mechanism(SMALL, values.pop("rounds"), **values)


def test_clients_that_no_memory_holds_are_not_audited(monkeypatch):
    monkeypatch.setattr("fedhdp.memory.machine_memory", lambda: 10**9)
    with raises_field("clients"):
        audit_mechanism(replace(SMALL, groups=(replace(SMALL.groups[1], clients=10**10),)), 2)

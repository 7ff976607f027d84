"""The results of an audit as plain numbers."""

from __future__ import annotations

import msgspec

from fedhdp.privacy.audit.meter import Check


class Attack(msgspec.Struct, frozen=True):
    """How well canaries of a group were found, beside what the promise allows."""

    claimed_epsilon: float
    claimed_mu: float
    lower_bounds: dict[str, float | None]  # on epsilon, by method; None where the method does not apply
    lower_mus: dict[str, float | None]
    auc: float
    tpr_at_1_percent_fpr: float
    with_canary: int  # how many scores
    without_canary: int
    roc: list[tuple[float, float]]  # false and true positive rates
    holds: bool  # no lower bound is above the claim


class GroupAudit(msgspec.Struct, frozen=True):
    """The audit of a group: against the whole run, against one round whose cohort is known, and its clip bits."""

    name: str
    clients: int
    opted_out: bool
    delta: float
    claimed_epsilon: float  # of all rounds
    claimed_mu: float
    lower_bounds: dict[str, float | None]  # on the epsilon of all rounds, by method
    unknown_coins: Attack  # all rounds; who was sampled is secret
    known_coins: Attack  # one round; who was sampled is given to the attacker
    clip_bits: Attack | None  # one round, by the clip bits alone
    training: Attack | None  # canaries of a real run
    found: bool | None  # the attack with known coins has half of its possible power; None: too few scores to tell
    holds: bool

    def verdict(self, attack: Attack) -> str:
        """The result of an attack on this group in a word; for clients without noise, whether it finds them."""
        if self.opted_out and attack is self.known_coins:
            return {True: "found", False: "NOT FOUND", None: "too few"}[self.found]
        return "holds" if attack.holds else "REFUTED"


class MutantResult(msgspec.Struct, frozen=True):
    """Whether the audit finds a fault that was put into the system."""

    name: str
    caught: bool
    caught_by: list[str]
    about: str


class AuditReport(msgspec.Struct, frozen=True):
    """All that an audit found, and what repeats it."""

    experiment: str
    variant: str
    version: str
    rounds: int
    runs: int
    sampling: str
    adjacency: str
    arithmetic: str
    accountant: str
    confidence: float  # that a sound system passes everything
    seed: int  # of the canaries' coins
    seconds: float
    groups: list[GroupAudit]
    checks: list[Check]
    mutants: list[MutantResult]
    holds: bool

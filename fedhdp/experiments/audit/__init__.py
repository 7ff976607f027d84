"""Audits of experiments: the server under attack by canaries, mutants of it, and canaries in a real run."""

from __future__ import annotations

from fedhdp.experiments.audit.mutants import MUTANTS, audit_mutants
from fedhdp.experiments.audit.run import audit_experiment, audit_mechanism

__all__ = ["MUTANTS", "audit_experiment", "audit_mechanism", "audit_mutants"]

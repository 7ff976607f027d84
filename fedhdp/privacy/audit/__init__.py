"""Audits: does a system keep the epsilon that it claims? The statistics; no JAX.

``fedhdp.experiments.audit`` audits an experiment with them, `check_release` anyone's function.
"""

from fedhdp.privacy.audit.conformance import ConformanceReport, ReleaseClaim, check_release
from fedhdp.privacy.audit.meter import Check
from fedhdp.privacy.audit.results import Attack, AuditReport, GroupAudit, MutantResult

__all__ = [
    "Attack",
    "AuditReport",
    "Check",
    "ConformanceReport",
    "GroupAudit",
    "MutantResult",
    "ReleaseClaim",
    "check_release",
]

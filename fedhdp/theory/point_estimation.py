"""Federated point estimation in which clients may opt out of privacy (paper: appendix B), in the paper's formulas.

One coordinate and two groups: opted out (no noise) and private (variance N_p gamma2 on each update, N_p private
clients). This is the two-group case of ``linear_regression`` in the paper's symbols, so that tests check one against the
other. rho is the share of clients that opted out; sigma_c2 = alpha2 + tau2.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import msgspec

from fedhdp.errors import require
from fedhdp.theory.linear_regression import Problem, TheoryGroup


class OptOut(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Clients of whom the share ``rho`` opted out."""

    clients: int
    rho: float
    gamma2: float
    alpha2: float
    tau2: float

    def __post_init__(self) -> None:
        require(1 <= self.clients < math.inf, "clients", self.clients, "finite and at least 1")
        require(0 <= self.rho <= 1, "rho", self.rho, "between 0 and 1")
        for name in ("gamma2", "alpha2", "tau2"):
            require(0 <= getattr(self, name) < math.inf, name, getattr(self, name), "finite and at least 0")
        require(self.alpha2 + self.tau2 > 0, "alpha2", self.alpha2, "above 0 where tau2 is 0")

    @property
    def private(self) -> float:
        """N_p, the number of private clients."""
        return (1 - self.rho) * self.clients

    @property
    def sigma_c2(self) -> float:
        """The variance of a local estimate around the global truth."""
        return self.alpha2 + self.tau2

    @property
    def problem(self) -> Problem:
        """The case as a `Problem`, without groups that have no clients."""
        private = round(self.private)
        groups = [TheoryGroup("opted out", self.clients - private, 0.0)] if private < self.clients else []
        groups += [TheoryGroup("private", private, self.gamma2)] if private > 0 else []
        return Problem(tuple(groups), self.alpha2, self.tau2)


class Gaps(NamedTuple):
    """Differences of server errors."""

    hdp_fedavg_over_optimal: float
    dp_fedavg_over_optimal: float
    dp_fedavg_over_hdp_fedavg: float


def optimal_ratio(case: OptOut) -> float:
    """r* = sigma_c2 / (sigma_c2 + N_p gamma2)."""
    return case.sigma_c2 / (case.sigma_c2 + case.private * case.gamma2)


def server_variance(case: OptOut, ratio: float) -> float:
    """The server's error where a private client has ``ratio`` times the weight of an opted-out one."""
    require(0 <= ratio < math.inf, "ratio", ratio, "finite and at least 0")
    opted_out, private = case.rho * case.clients, case.private
    total = opted_out + ratio * private
    require(total > 0, "ratio", ratio, "above 0 where no client opted out")
    return (opted_out * case.sigma_c2 + ratio**2 * private * (case.sigma_c2 + private * case.gamma2)) / total**2


def optimal_server_variance(case: OptOut) -> float:
    """sigma_c2 (sigma_c2 + N_p gamma2) / (sigma_c2 + rho N_p gamma2) / N."""
    noise = case.private * case.gamma2
    return case.sigma_c2 * (case.sigma_c2 + noise) / (case.sigma_c2 + case.rho * noise) / case.clients


def performance_gaps(case: OptOut) -> Gaps:
    """The gap lemma; its third line is rho (1 - rho) gamma2 once the common factor is cancelled."""
    rho, N, gamma2 = case.rho, case.clients, case.gamma2
    denominator = case.sigma_c2 + rho * (1 - rho) * gamma2 * N
    return Gaps(
        hdp_fedavg_over_optimal=rho * (1 - rho) ** 3 * gamma2**2 * N / denominator,
        dp_fedavg_over_optimal=rho * (1 - rho) * gamma2 * (case.sigma_c2 + (1 - rho) * gamma2 * N) / denominator,
        dp_fedavg_over_hdp_fedavg=rho * (1 - rho) * gamma2,
    )


def optimal_pulls(case: OptOut) -> tuple[float, float]:
    """lambda* of an opted-out and of a private client; infinite without heterogeneity and noise."""
    if case.alpha2 == 0:
        return 0.0, 0.0
    upsilon2, gamma2 = case.tau2 / case.alpha2, case.private * case.gamma2 / case.alpha2
    N, opted_out = case.clients, case.rho * case.clients
    numerator = N + N * upsilon2 + opted_out * gamma2
    denominator = N * upsilon2 * (upsilon2 + 1) + (opted_out + 1) * upsilon2 * gamma2 + gamma2
    return _divide(1.0, upsilon2), _divide(numerator, denominator)


def _divide(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator > 0 else math.inf

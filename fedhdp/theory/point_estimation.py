"""Federated point estimation in which clients may opt out of privacy (paper: appendix B), as the paper writes it.

One coordinate, two levels: opted out (no noise) and private (noise of variance N_p gamma2 on each update, N_p private
clients). Everything here is the two-level case of ``linear_regression`` written out in the paper's own symbols, so that
each can be checked against the other. rho is the share that opted out, sigma_c2 = alpha2 + tau2.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import msgspec

from fedhdp.errors import require
from fedhdp.theory.linear_regression import Level, Problem


class OptOut(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """So many clients of whom a share opted out; rho 0: all are private, rho 1: none is."""

    clients: int
    rho: float
    gamma2: float
    alpha2: float
    tau2: float

    def __post_init__(self) -> None:
        require(1 <= self.clients < math.inf, "clients", self.clients, "finite and at least 1")
        require(0 <= self.rho <= 1, "rho", self.rho, "between 0 and 1")
        require(0 <= self.gamma2 < math.inf, "gamma2", self.gamma2, "finite and at least 0")
        require(0 <= self.alpha2 < math.inf, "alpha2", self.alpha2, "finite and at least 0")
        require(0 <= self.tau2 < math.inf, "tau2", self.tau2, "finite and at least 0")
        require(self.alpha2 + self.tau2 > 0, "alpha2", self.alpha2, "above 0 where tau2 is 0")

    @property
    def private(self) -> float:
        """N_p."""
        return (1 - self.rho) * self.clients

    @property
    def sigma_c2(self) -> float:
        """How far a client's own estimate is from the global truth."""
        return self.alpha2 + self.tau2

    @property
    def problem(self) -> Problem:
        """The same as levels; a level without clients is left out."""
        private = round(self.private)
        levels = [Level("opted out", self.clients - private, 0.0)] if private < self.clients else []
        levels += [Level("private", private, self.gamma2)] if private > 0 else []
        return Problem(tuple(levels), self.alpha2, self.tau2)


class Gaps(NamedTuple):
    """How much larger one server error is than another."""

    hdp_fedavg_over_optimal: float
    dp_fedavg_over_optimal: float
    dp_fedavg_over_hdp_fedavg: float


def optimal_ratio(case: OptOut) -> float:
    """r* = sigma_c2 / (sigma_c2 + N_p gamma2)."""
    return case.sigma_c2 / (case.sigma_c2 + case.private * case.gamma2)


def server_variance(case: OptOut, ratio: float) -> float:
    """The server's error when a private client counts for ``ratio`` of an opted-out one."""
    require(0 <= ratio < math.inf, "ratio", ratio, "finite and at least 0")
    open_, private = case.rho * case.clients, case.private
    total = open_ + ratio * private
    require(total > 0, "ratio", ratio, "above 0 where nobody opted out")
    return (open_ * case.sigma_c2 + ratio**2 * private * (case.sigma_c2 + private * case.gamma2)) / total**2


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
    """lambda* of an opted-out and of a private client, infinite where clients do not differ and nobody adds noise."""
    if case.alpha2 == 0:
        return 0.0, 0.0
    upsilon2, gamma2 = case.tau2 / case.alpha2, case.private * case.gamma2 / case.alpha2
    N, opted_out = case.clients, case.rho * case.clients
    numerator = N + N * upsilon2 + opted_out * gamma2
    denominator = N * upsilon2 * (upsilon2 + 1) + (opted_out + 1) * upsilon2 * gamma2 + gamma2
    return _over(1.0, upsilon2), _over(numerator, denominator)


def _over(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator > 0 else math.inf

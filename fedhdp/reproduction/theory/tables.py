"""The tables of docs/theory.md: the theory in numbers. Axis letters: D coordinates (twice: a matrix)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fedhdp.reproduction.theory import general
from fedhdp.theory import linear_regression as regression
from fedhdp.theory import shared_noise
from fedhdp.theory.linear_regression import Problem, TheoryGroup


class TheoryTable(NamedTuple):
    """A title, a header, and rows of text."""

    title: str
    header: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]

    @property
    def markdown(self) -> str:
        """The table as Markdown writes it."""
        lines = [self.header, tuple("---" for _ in self.header), *self.rows]
        return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def tables() -> list[TheoryTable]:
    """Every table of docs/theory.md, in its order."""
    return [own_noise(), opting_out(), shared_noise_gains(), general_losses()]


def own_noise() -> TheoryTable:
    """The two pulls of one group, and the loss of the first where own noise cannot be subtracted."""
    rows = []
    for clients in (2, 5, 20, 1000):
        problem = _problem((clients, 1.0))
        pulls = [float(find(problem)[0]) for find in (regression.optimal_pulls, regression.own_noise_pulls)]
        errors = [float(regression.client_mse(problem, [1.0], pull)[0]) for pull in pulls]
        rows.append((f"{clients:,}", *(f"{pull:.3f}" for pull in pulls), f"{errors[0] / errors[1] - 1:.2%}"))
    header = ("clients", "pull, noise subtracted", "pull, noise included", "excess error of the first, noise included")
    return TheoryTable("Own noise: one level, alpha2 = gamma2 = 1, tau2 = 0.25", header, rows)


def opting_out() -> TheoryTable:
    """The gain of one private client who opts out, at its best pull, for unchanged noise of the others or gamma2."""
    rows = []
    for opted_out, private in ((4, 16), (200, 800)):
        stays = _least_errors(_problem((opted_out, 0.0), (private, 1.0)))[1]
        left = [_problem((opted_out + 1, 0.0), (private - 1, g)) for g in (private / (private - 1), 1.0)]
        gains = [f"{1 - _least_errors(problem)[0] / stays:.3%}" for problem in left]
        rows.append((f"{opted_out + private:,}", f"{opted_out:,}", *gains))
    header = ("clients", "opted out", "gain, the others' noise unchanged", "gain, gamma2 unchanged")
    return TheoryTable("Opting out: alpha2 = gamma2 = 1, tau2 = 0.25", header, rows)


def shared_noise_gains() -> TheoryTable:
    """The ratio of server errors: noise for each group over shared noise."""
    cases = [
        ((200, 800), (0, 30)),
        ((500, 500), (15, 30)),
        ((100, 300, 600), (0, 15, 60)),
        ((333, 333, 334), (10, 20, 40)),
        ((200,) * 5, (0, 10, 20, 40, 80)),
        ((200,) * 5, (10, 20, 30, 40, 50)),
        ((200,) * 5, (40,) * 5),
    ]
    rows = []
    for clients, noises in cases:
        gain = shared_noise.gain(_problem(*((n, (z / n) ** 2) for n, z in zip(clients, noises, strict=True))))
        rows.append((str(len(clients)), ", ".join(map(str, clients)), ", ".join(map(str, noises)), f"{gain:.2f}"))
    title = "Shared noise: alpha2 = 1, tau2 = 0.25, gamma of a group = noise / clients"
    return TheoryTable(title, ("groups", "clients", "noise", "gain"), rows)


def general_losses() -> TheoryTable:
    """The loss of one weight and one pull per group against the optimum, for unequal clients."""
    cases = [(None, (40, 40)), (1, (40, 40)), (1, (15, 200)), (100, (40, 40)), (100, (15, 200))]
    rows = []
    for condition, (fewest, most) in cases:
        results = [_general_loss(condition, (fewest, most), tau2) for tau2 in (0.05, 0.5)]
        losses = [f"{loss:z.1%}" for result in results for loss in (result.server_loss, np.mean(result.client_loss))]
        samples = str(most) if fewest == most else f"{fewest} to {most}"
        rows.append((samples, "orthogonal" if condition is None else str(condition), *losses))
    title = (
        "Unequal clients: 40 with gamma2 = 0, 60 with 0.05, 100 with 0.2; 10 coordinates, beta2 = 10, Gaussian features "
        "of covariance diag(1 ... 1/condition) in equal ratios, seed 0; a client's loss is the mean over groups"
    )
    pairs = (f"{who}, tau2 = {tau2}" for tau2 in (0.05, 0.5) for who in ("server", "client"))
    return TheoryTable(title, ("samples", "condition", *pairs), rows)


def _problem(*groups: tuple[int, float]) -> Problem:
    return Problem(tuple(TheoryGroup(f"level {i + 1}", *group) for i, group in enumerate(groups)), 1.0, 0.25)


def _least_errors(problem: Problem) -> np.ndarray:
    """The clients' errors at the best weights and pulls, with own noise in the global estimate."""
    return regression.client_mse(problem, regression.optimal_weights(problem), regression.own_noise_pulls(problem))


def _general_loss(condition: float | None, samples: tuple[int, int], tau2: float) -> general.GeneralLoss:
    groups = (TheoryGroup("opted out", 40, 0.0), TheoryGroup("middle", 60, 0.05), TheoryGroup("strict", 100, 0.2))
    rng = np.random.default_rng(0)
    covariance_DD = np.diag(np.geomspace(1, 1 / (condition or 1), 10))
    features = general.random_features(200, samples, covariance_DD, rng)
    if condition is None:
        features = [len(F) ** 0.5 * np.linalg.qr(F)[0] for F in features]
    return general.compare(general.from_features(groups, features, beta2=10.0, tau2=tau2))

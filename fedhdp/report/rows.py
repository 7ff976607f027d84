"""The rows of a page: each variant with all its seeds, its mechanism, what its rounds cost, and its measurements."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from msgspec.structs import replace

from fedhdp.algorithms import ALGORITHMS
from fedhdp.clips import parse_clip
from fedhdp.errors import FedHDPError
from fedhdp.mechanism import SERVER, Mechanism, PrivacyGroup
from fedhdp.privacy.accounting import Accountant, compose, is_accounting_installed
from fedhdp.privacy.costs import PrivacyCost, privacy_cost
from fedhdp.report.charts import DASHES
from fedhdp.report.html import Disclosure, short, style_of, with_isolated
from fedhdp.report.live import results_so_far
from fedhdp.results.disclosure import groups_with_noise, is_covered, publishable
from fedhdp.results.metrics import half_interval
from fedhdp.results.palette import COLOURS
from fedhdp.results.schema import GroupResult, MetricInfo, VariantResult
from fedhdp.results.stored import RepeatedRun, StoredVariant, read_runs

MODELS = {"global": "global model", "personal": "personal models"}
REPEATED = ("dp_fedavg", "non_private", "local_only", "gdpfed")  # algorithms that also change clip or noise, in one way
SHARES_NOISE = ("idp_scale", "idp_sample")
PALER = 2  # paler shades, once all dashes are used
SAME = 1e-6  # relative difference up to which two epsilons are the same


class Point(NamedTuple):
    """The mean over seeds after a round, with half of its 95% interval."""

    round: int
    mean: float
    half: float | None


class Row(NamedTuple):
    """A variant with all its seeds.

    Attributes:
        number: Its number on the page.
        name: Its name, with the run's where there are several.
        style: The class of its colour.
        dash: Which dashes its lines have.
        seeds: The variant with each seed.
        mechanism: The mechanism of its last round; None where the files do not say.
        covered: Whether its epsilons cover its global models.
    """

    number: int
    name: str
    style: str
    dash: int
    seeds: list[StoredVariant]
    mechanism: Mechanism | None
    covered: bool

    @property
    def result(self) -> VariantResult:
        """The result with the first seed."""
        return self.seeds[0].result

    def group(self, name: str) -> GroupResult:
        """The result of a group with the first seed."""
        return next(group for group in self.result.groups if group.name == name)

    def has(self, name: str) -> bool:
        """Whether there is a group of this name."""
        return any(group.name == name for group in self.result.groups)

    def series(self, group: str, model: str, metric: str) -> list[Point]:
        """A measurement over rounds, as means over the seeds that have it."""
        values: dict[int, list[float]] = {}
        for variant in self.seeds:
            for row in variant.history:
                if (row.group, row.model, row.metric) == (group, model, metric) and math.isfinite(row.value):
                    values.setdefault(row.round, []).append(row.value)
        return [Point(round, fmean(of), half_interval(of)) for round, of in sorted(values.items())]

    def last(self, group: str, model: str, metric: str) -> Point | None:
        """The measurement of the last round."""
        series = self.series(group, model, metric)
        return series[-1] if series else None

    @property
    def why_uncovered(self) -> str:
        """Why no epsilon covers its global models, where none does."""
        if self.result.repeatable:
            return "its noise or cohorts came from a seed"
        if self.result.start_covered is False:
            return "no ε covers the model that it began with"
        return "clients who chose noise have none"

    def costs(self, group: str) -> list[PrivacyCost] | None:
        """What the run's rounds cost a group, if it follows from the mechanism of the last round.

        That is so where the cost composes to the epsilon that the run recorded; where weights change from round to round or
        rounds were run again, it does not, and the page has the recorded epsilon alone.
        """
        result = self.group(group)
        if self.mechanism is None or not is_accounting_installed():
            return None
        of_group = next(g for g in self.mechanism.groups if g.name == group)
        cost = privacy_cost(self.mechanism, of_group, result.rounds)
        if result.epsilon is None or result.delta is None:
            return [cost] if cost.noise_multiplier == 0 else None
        epsilon = compose([cost], result.delta, accountant_of(result))
        return [cost] if math.isclose(epsilon, result.epsilon, rel_tol=SAME) else None


def accountant_of(result: GroupResult) -> Accountant:
    """The accountant of a group's epsilon."""
    return "rdp" if result.accountant == "rdp" else "pld"


class Study(NamedTuple):
    """What a page shows: rows of runs that can be compared.

    Attributes:
        runs: The runs.
        rows: Their variants.
        groups: The names of the groups, the last of the mechanism first, as in tables.
        metric: The metric of charts and cards.
        public: Whether what may not be published was left out.
        server_is_public: Whether the server's test set has no client's example.
    """

    runs: list[RepeatedRun]
    rows: list[Row]
    groups: list[str]
    metric: MetricInfo
    public: bool
    server_is_public: bool

    @property
    def title(self) -> str:
        """The names of the experiments."""
        return ", ".join(dict.fromkeys(run.runs[0].experiment for run in self.runs))

    @property
    def seeds(self) -> int:
        """The largest number of seeds of a row."""
        return max(len(row.seeds) for row in self.rows)

    @property
    def rounds(self) -> int:
        """The largest number of rounds of a row."""
        return max(row.result.rounds for row in self.rows)

    @property
    def repeatable(self) -> bool:
        """Whether noise or cohorts came from a seed."""
        return any(row.result.repeatable for row in self.rows)

    @property
    def main(self) -> Row:
        """The row that sentences and cards are about: the best FedHDP, else the best of all."""
        owners = [(SERVER, "global"), *((group, "global") for group in self.groups)]
        sign = 1 if self.metric.higher_is_better else -1

        def score(row: Row) -> float:
            points = (row.last(*owner, self.metric.name) for owner in owners)
            return next((sign * point.mean for point in points if point is not None), -math.inf)

        return max([row for row in self.rows if row.result.algorithm == "fedhdp"] or self.rows, key=score)

    @property
    def rival(self) -> Row | None:
        """The row that the main one is compared with: DP-FedAvg."""
        return next((row for row in self.rows if row.result.algorithm == "dp_fedavg"), None)

    @property
    def metric_words(self) -> str:
        """The metric's name in words."""
        return self.metric.name.replace("_", " ")

    @property
    def unit(self) -> str:
        """The metric with its unit."""
        return self.metric_words + (", %" if self.metric.percent else "")

    @property
    def limits(self) -> tuple[float, float] | None:
        """The least and the largest value of the metric in charts; None if it is not a share."""
        return (0.0, 100.0) if self.metric.percent else None

    def sentence(self, words: str) -> str:
        """A sentence in which the names of variants and groups are isolated (see `with_isolated`)."""
        return with_isolated(words, dict.fromkeys((*(row.result.name for row in self.rows), *self.groups)))

    def scaled(self, value: float) -> float:
        """A value of the metric as charts show it."""
        return 100 * value if self.metric.percent else value

    def format(self, value: float) -> str:
        """A value of the metric as text."""
        return self.format_scaled(self.scaled(value))

    def format_scaled(self, value: float) -> str:
        """The same for a value as charts show it."""
        return f"{value:.1f}%" if self.metric.percent else f"{value:.4g}"

    @property
    def server_disclosure(self) -> Disclosure:
        """Whether what is measured on the server's test set may be published."""
        covered = [row.covered for row in self.rows if not self.public]
        if self.public:  # the others' measurements are not there
            return "public"
        if not self.server_is_public or not any(covered):
            return "clients"
        return "public" if all(covered) else "mixed"

    @property
    def uncovered_words(self) -> str:
        """Which rows no epsilon covers, and why."""
        by_reason: dict[str, list[str]] = {}
        for row in self.rows:
            if not row.covered:
                by_reason.setdefault(row.why_uncovered, []).append(short(row.name))
        return " ".join(f"No ε covers {', '.join(names)}: {why}." for why, names in by_reason.items())


def read_study(directories: Iterable[Path], public: bool = False) -> Study:
    """Read runs, finished or under way.

    Args:
        directories: Directories of runs, of several runs, or of deployments.
        public: Whether to leave out what may not be published.

    Raises:
        RunError: If a directory has no run, or nothing was measured yet.
        DamagedRunError: If its files are damaged.
    """
    runs = read_runs(directories, results_so_far)
    if public:
        for part in (part for repeated in runs for part in repeated.runs):
            part.variants = [
                publishable(variant, mechanism_of(variant.result, part.raw), groups_with_noise(part.raw))
                for variant in part.variants
            ]
    runs = [RepeatedRun(label, run.runs) for label, run in zip(_labels(runs), runs, strict=True)]
    prefix = {run.label: f"{run.label}: " if len(runs) > 1 else "" for run in runs}
    variants = [(run, seeds) for run in runs for seeds in run.variants()]
    algorithms = [seeds[0].result.algorithm for _, seeds in variants]
    rows = []
    for number, (run, seeds) in enumerate(variants):
        raw, result = run.runs[0].raw, seeds[0].result
        style, dash = _style(algorithms, number)
        covered = all(is_covered(variant.result, groups_with_noise(raw)) for variant in seeds)
        name = f"{prefix[run.label]}{result.name}"
        rows.append(Row(number, name, style, dash, seeds, mechanism_of(result, raw), covered))
    groups = list(dict.fromkeys(group.name for row in rows for group in reversed(row.result.groups)))
    server_is_public = not any(variant.result.server_has_client_data for _, seeds in variants for variant in seeds)
    return Study(runs, rows, groups, rows[0].result.metrics[0], public, server_is_public)


def _labels(runs: Sequence[RepeatedRun]) -> list[str]:
    """Names of runs without the folders that they share."""
    return [re.sub(r"^seed-\d+/", "", name) for name in without_shared_folders([Path(run.label) for run in runs])]


def without_shared_folders(directories: Sequence[Path]) -> list[str]:
    """Directories without the folders that they share, so that a page does not show where on a machine they are."""
    paths = [path.absolute() for path in directories]
    shared = Path(os.path.commonpath([path.parent for path in paths]))
    return [path.relative_to(shared).as_posix() for path in paths]


def _style(algorithms: Sequence[str], number: int) -> tuple[str, int]:
    """The class of a row's colour, and its dashes, which tell lines of one algorithm apart; further ones are paler."""
    algorithm = algorithms[number]
    dash = algorithms[:number].count(algorithm)
    others = [name for name in dict.fromkeys(algorithms) if name not in COLOURS]
    style = style_of(algorithm, others.index(algorithm) if algorithm in others else 0)
    paler = min(dash // len(DASHES), PALER)
    return f"{style} paler-{paler}" if paler else style, dash


def mechanism_of(result: VariantResult, raw: dict[str, Any]) -> Mechanism | None:
    """The mechanism of a variant's last round: its groups as they were run, and what the file says of the rest."""
    config = raw.get("mechanism", raw)
    changes: dict[str, Any] = next((row for row in raw.get("variants", ()) if row.get("name") == result.name), {})
    try:
        groups = tuple(
            PrivacyGroup(g.name, g.clients, g.noise_multiplier, g.sampling_rate, g.weight, g.pull)
            for g in result.groups
        )
        mechanism = Mechanism(
            groups,
            parse_clip(changes.get("clip", config["clip"])),
            changes.get("noise", config.get("noise", "shared")),
            changes.get("sampling", config.get("sampling", "poisson")),
            config.get("arithmetic", "exact" if "levels" in raw else "float32"),
        )
    except (FedHDPError, KeyError):
        return None
    if result.algorithm in SHARES_NOISE:
        return replace(mechanism, noise="shared")
    return ALGORITHMS[result.algorithm](mechanism) if result.algorithm in REPEATED else mechanism

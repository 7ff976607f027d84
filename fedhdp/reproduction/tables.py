"""The paper's tables as experiments: rows, hyper-parameters (appendix D), and the data of each table.

A table is run seed by seed. Each seed consists of parts, each an experiment: ``paper`` has all of the paper's rows, and
each extension (`extensions.py`) is a part. A variant is a row with a pull.
"""

from __future__ import annotations

import csv
import functools
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Literal, NamedTuple

from msgspec.structs import replace

from fedhdp import AdaptiveClip, LocalTraining, ServerOptimizer
from fedhdp.datasets import FemnistOrigin, is_available, load_arrays, load_femnist
from fedhdp.errors import require
from fedhdp.experiments.components import (
    BuiltInData,
    CnnConfig,
    DataConfig,
    FemnistConfig,
    HandwritingConfig,
    MlpConfig,
    MnistConfig,
    ModelConfig,
)
from fedhdp.experiments.config import Experiment
from fedhdp.experiments.presets import OPTED_OUT, PAPER_TRAINING, PRIVATE
from fedhdp.experiments.variant import Variant
from fedhdp.mechanism import Sampling
from fedhdp.privacy.calibration import GroupConfig, MechanismConfig

ROUNDS, COHORT, OPTED_OUT_SHARE = 500, 100, 0.05
PULLS = (0.005, 0.05, 0.25)
AVERAGED = ServerOptimizer(average=0.9)  # trains as the paper does, and also keeps an average of the global models
BASELINES = {"non-private": "non_private", "dp-fedavg": "dp_fedavg", "hdp-fedavg": "hdp_fedavg"}
LABELS = {"non_private": "Non-Private+Ditto", "dp_fedavg": "DP-FedAvg+Ditto", "hdp_fedavg": "HDP-FedAvg+Ditto"}
PUBLISHED_COLUMNS = (
    *("acc_g", "acc_g_p", "var_g_p", "acc_g_np", "var_g_np", "delta_g"),
    *("acc_l_p", "var_l_p", "acc_l_np", "var_l_np", "delta_l"),
)

BatchRule = Literal["whole", "all"]
Pull = float | tuple[float, float]  # of both groups, or of the opted-out and of the private clients


class TableRow(NamedTuple):
    """A row of a table: an algorithm, and the weight of private clients for FedHDP."""

    algorithm: str
    weight: float | None = None

    @property
    def label(self) -> str:
        """The name of the row in tables."""
        return LABELS.get(self.algorithm) or f"FedHDP r={self.weight:g}"


class PublishedRow(NamedTuple):
    """A row of the paper's tables at one pull, with its numbers."""

    dataset: str
    pull: float
    row: TableRow
    numbers: dict[str, float]


class DataSource(NamedTuple):
    """Data on which a table can be run."""

    about: str
    required: tuple[str, ...]  # what the data directory must have
    build: Callable[[], BuiltInData]


class PaperTable(NamedTuple):
    """A table of the paper: its hyper-parameters, and the data that it can be run on."""

    about: str
    dataset: str  # in paper_tables.csv
    epsilon: float  # as the paper states it, at delta 1e-4
    clients: int
    sampling_rate: float
    noise_multiplier: float
    clip: float
    training: LocalTraining
    sources: dict[str, DataSource]  # the paper's data first, then substitutes from near to far
    model: ModelConfig = MlpConfig()


class Options(NamedTuple):
    """How all parts of a table are run."""

    data: str = "auto"
    sampling: Sampling | None = None  # None: fixed for the paper's rows, Poisson for extensions
    batches: BatchRule = "whole"
    personal_epochs: int | None = None  # None: all epochs of a round
    pulls: tuple[float, ...] = PULLS  # empty: no personal models
    rounds: int = ROUNDS
    noise_seed: int | None = None  # of seed 0; None: noise and cohorts from the operating system's entropy


class Part(NamedTuple):
    """An experiment of one seed."""

    seed: int
    name: str
    experiment: Experiment

    @property
    def folder(self) -> str:
        """Its run directory, relative to the table's directory."""
        return f"seed-{self.seed}/{self.name}"


def _stored_femnist(origin: FemnistOrigin, classes: Literal[10, 62], limit: int) -> FemnistConfig:
    """The first clients of a stored FEMNIST, at most ``limit``."""
    return FemnistConfig(min(limit, load_femnist(origin, classes).num_clients), origin, classes)


def _one_digit_sources(split: Literal["one_digit", "skewed"]) -> dict[str, DataSource]:
    def handwriting() -> BuiltInData:
        return HandwritingConfig(2000, test_samples=100, split=split)

    return {
        "mnist": DataSource("MNIST", ("mnist",), lambda: MnistConfig(2000, split=split)),
        "handwriting": DataSource("the embedded handwriting", (), handwriting),
    }


def _by_writer_sources(classes: Literal[10, 62], clients: int, writers: DataSource) -> dict[str, DataSource]:
    def handwriting() -> BuiltInData:
        return HandwritingConfig(clients, split="by_writer", classes=classes, sizes="tff")

    return {
        "tff": DataSource("TFF's federated EMNIST", ("emnist-tff",), lambda: FemnistConfig(clients, "tff", classes)),
        "leaf": DataSource("LEAF's FEMNIST", ("femnist-leaf",), lambda: _stored_femnist("leaf", classes, clients)),
        "writers": writers,
        "handwriting": DataSource("the embedded handwriting in the sizes of TFF's clients", (), handwriting),
    }


MNIST_WRITERS = DataSource(
    "MNIST by its 836 writers", ("mnist", "mnist-writers"), lambda: MnistConfig(836, split="by_writer")
)
FEMNIST_WRITERS = DataSource("real writers of FEMNIST", ("femnist-330",), lambda: _stored_femnist("330", 62, 330))
FMNIST_TRAINING = LocalTraining(epochs=50, batch_size=20, learning_rate=0.01, decay=0.9, decay_every=50)
FEMNIST_TRAINING = LocalTraining(epochs=25, batch_size=20, learning_rate=0.02)
MNIST = (3.6, 2000, 0.05, 1.5, 0.5, PAPER_TRAINING)
TABLES = {
    "noniid-mnist": PaperTable(
        "non-IID MNIST: clients hold one digit each", "noniid_mnist", *MNIST, _one_digit_sources("one_digit")
    ),
    "skewed-mnist": PaperTable(
        "skewed non-IID MNIST: all opted-out clients hold a 7",
        "skewed_noniid_mnist",
        *MNIST,
        _one_digit_sources("skewed"),
    ),
    "fmnist": PaperTable(
        "FMNIST: digits by their writers",
        *("fmnist", 0.6, 3383, 0.03, 4.0, 0.5, FMNIST_TRAINING),
        _by_writer_sources(10, 3383, MNIST_WRITERS),
    ),
    "femnist": PaperTable(
        "FEMNIST: digits and letters by their writers",
        *("femnist", 4.1, 3400, 0.03, 1.0, 2.0, FEMNIST_TRAINING),
        _by_writer_sources(62, 3400, FEMNIST_WRITERS),
        model=CnnConfig(),
    ),
}


@functools.cache
def published_rows(dataset: str | None = None) -> tuple[PublishedRow, ...]:
    """The rows of the paper's four tables, or of one dataset."""
    algorithms = {label: algorithm for algorithm, label in LABELS.items()}
    rows = []
    with Path(__file__).with_name("paper_tables.csv").open(newline="") as file:
        for line in csv.DictReader(file):
            row = TableRow(algorithms.get(line["algorithm"], "fedhdp"), float(line["r"]) if line["r"] else None)
            numbers = {name: float(line[name]) for name in PUBLISHED_COLUMNS if line[name]}
            rows.append(PublishedRow(line["dataset"], float(line["lambda"]), row, numbers))
    return tuple(row for row in rows if dataset in (None, row.dataset))


def paper_rows(table: PaperTable) -> list[TableRow]:
    """The rows of a table, each once, in the paper's order."""
    return list(dict.fromkeys(published.row for published in published_rows(table.dataset)))


def parse_row(name: str) -> TableRow | None:
    """A row by its name on the command line, such as ``dp-fedavg`` or ``fedhdp:0.01``; None if there is none."""
    if name in BASELINES:
        return TableRow(BASELINES[name])
    algorithm, _, weight = name.partition(":")
    try:
        row = TableRow("fedhdp", float(weight)) if algorithm == "fedhdp" and weight else None
    except ValueError:
        return None
    return row if row is None or 0 <= (row.weight or 0.0) < math.inf else None


def choose_data(sources: dict[str, DataSource], name: str) -> BuiltInData:
    """Build the data of this name.

    Args:
        sources: The data that the table can be run on.
        name: One of them, or ``auto``: the first that the data directory has.

    Raises:
        InvalidValueError: If there is no such data.
        DataError: If the data directory does not have it.
    """
    require(name == "auto" or name in sources, "--data", name, f"one of {', '.join(['auto', *sources])} for this table")
    if name == "auto":
        name = next(key for key, source in sources.items() if all(map(is_available, source.required)))
    for file in sources[name].required:
        load_arrays(file)  # missing data is an error before anything is run
    return sources[name].build()


def describe_data(table: PaperTable, data: DataConfig) -> str:
    """What the data is, and of what it is a substitute where it is not the paper's."""
    assert isinstance(data, BuiltInData)
    kinds = {HandwritingConfig: "handwriting", MnistConfig: "writers" if "writers" in table.sources else "mnist"}
    origin = {"330": "writers"}.get(data.origin, data.origin) if isinstance(data, FemnistConfig) else kinds[type(data)]
    about = f"{table.sources[origin].about}, {data.clients:,} clients"
    paper_origin, paper_source = next(iter(table.sources.items()))
    if origin == paper_origin and data.clients == table.clients:
        return about
    return f"{about}; a substitute for {paper_source.about}, {table.clients:,} clients, of the paper"


def groups_of(table: PaperTable, data: BuiltInData) -> tuple[GroupConfig, GroupConfig]:
    """The groups of a table: 5% of the clients opted out; the expected cohort is the paper's with fewer clients too."""
    rate = table.sampling_rate if data.clients == table.clients else min(1.0, round(COHORT / data.clients, 4))
    opted_out = max(1, round(OPTED_OUT_SHARE * data.clients))
    return (
        GroupConfig(OPTED_OUT, opted_out, sampling_rate=rate, noise_multiplier=0.0),
        GroupConfig(PRIVATE, data.clients - opted_out, sampling_rate=rate, noise_multiplier=table.noise_multiplier),
    )


def variants_of(rows: Iterable[TableRow], pulls: Iterable[Pull] = PULLS) -> tuple[Variant, ...]:
    """Every row with every pull; without pulls, every row once."""
    weighted = [(row, {} if row.weight is None else {PRIVATE: row.weight}) for row in rows]
    if not (pulls := tuple(pulls)):
        return tuple(Variant(row.label, row.algorithm, weights) for row, weights in weighted)
    variants = []
    for row, weights in weighted:
        for pull in pulls:
            opted_out, private = pull if isinstance(pull, tuple) else (pull, pull)
            name = f"{row.label}, λ={pull_label((opted_out, private))}"
            variants.append(Variant(name, row.algorithm, weights, {OPTED_OUT: opted_out, PRIVATE: private}))
    return tuple(variants)


def pull_label(pulls: tuple[float, float]) -> str:
    """The pulls of the opted-out and of the private clients, once if they are equal."""
    return f"{pulls[0]:g}" if pulls[0] == pulls[1] else f"{pulls[1]:g} and {pulls[0]:g}"


def make_experiment(
    name: str, part: str, data: BuiltInData, mechanism: MechanismConfig, variants: tuple[Variant, ...], **fields: object
) -> Experiment:
    """A part of a table, with the paper's training and rounds unless ``fields`` say otherwise."""
    table = TABLES.get(name, TABLES["noniid-mnist"])
    defaults = {"rounds": ROUNDS, "server": AVERAGED, "evaluate_every": 100, "about": table.about}
    fixed = {"data": data, "mechanism": mechanism, "variants": variants, "model": table.model, "keep_checkpoint": False}
    return Experiment(name=f"{name}/{part}", training=table.training, **fixed, **(defaults | fields))  # type: ignore[arg-type]


def apply_options(experiment: Experiment, options: Options) -> Experiment:
    """The experiment with the options that hold for all parts of a table.

    The paper does not say whether clients train on an epoch's last, partial batch. Its personal models of non-IID MNIST
    look as if they were trained for one epoch of a round.
    """
    training = replace(
        experiment.training,
        drop_remainder=options.batches == "whole",
        personal_epochs=options.personal_epochs,
        personalize=bool(options.pulls),
    )
    noise_seed = None if options.noise_seed is None else options.noise_seed + experiment.seed
    return replace(experiment, training=training, noise_seed=noise_seed)


def paper_part(
    name: str,
    rows: list[TableRow],
    data: BuiltInData,
    sampling: Sampling,
    pulls: Iterable[float] = PULLS,
    **fields: object,
) -> Experiment:
    """These rows of the paper in one experiment."""
    table = TABLES[name]
    mechanism = MechanismConfig(groups_of(table, data), AdaptiveClip(initial=table.clip), sampling=sampling)
    return make_experiment(name, "paper", data, mechanism, variants_of(rows, pulls), **fields)

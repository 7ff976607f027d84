"""The paper's tables as experiments: its rows, its hyper-parameters (appendix D), and the data that stands for its data.

A table is run seed by seed. Each seed is one or several experiments, its parts: ``paper`` holds all of the paper's rows,
and each row of our own (`own.py`) is a part of its own. A variant is a row with a pull.
"""

from __future__ import annotations

import csv
import functools
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Literal, NamedTuple

from msgspec.structs import replace

from fedhdp.client import LocalTraining
from fedhdp.datasets import FemnistOrigin, is_available, load_arrays, load_femnist
from fedhdp.errors import require
from fedhdp.experiments.components import Cnn, Data, Femnist, Handwriting, Mlp, Mnist, ModelChoice
from fedhdp.experiments.config import Experiment, GroupConfig, MechanismConfig, Variant
from fedhdp.experiments.presets import OPTED_OUT, PAPER_TRAINING, PRIVATE
from fedhdp.mechanism import AdaptiveClip, Sampling
from fedhdp.server import ServerOptimizer

ROUNDS, COHORT, OPTED_OUT_SHARE = 500, 100, 0.05
PULLS = (0.005, 0.05, 0.25)
AVERAGED = ServerOptimizer(average=0.9)  # the model is the paper's; its average is measured beside it
BASELINES = {"non-private": "non_private", "dp-fedavg": "dp_fedavg", "hdp-fedavg": "hdp_fedavg"}
LABELS = {"non_private": "Non-Private+Ditto", "dp_fedavg": "DP-FedAvg+Ditto", "hdp_fedavg": "HDP-FedAvg+Ditto"}
NUMBERS = ("acc_g", "acc_g_p", "var_g_p", "acc_g_np", "var_g_np", "delta_g", "acc_l_p", "var_l_p", "acc_l_np",
           "var_l_np", "delta_l")  # fmt: skip

Batches = Literal["whole", "all"]


class Row(NamedTuple):
    """A row of a table: an algorithm, and the weight of private clients where it has one."""

    algorithm: str
    weight: float | None = None

    @property
    def label(self) -> str:
        """The row as tables have it."""
        return LABELS.get(self.algorithm) or f"FedHDP r={self.weight:g}"


class Printed(NamedTuple):
    """A line of the paper's tables, with the numbers that it has."""

    dataset: str
    pull: float
    row: Row
    numbers: dict[str, float]


class Choice(NamedTuple):
    """Data that a table can be run on."""

    about: str
    sources: tuple[str, ...]  # what must be in the data directory
    data: Callable[[], Data]


class PaperTable(NamedTuple):
    """A table of the paper: where its numbers stand, and its hyper-parameters."""

    about: str
    dataset: str
    epsilon: float  # as the paper states it, at delta 1e-4
    clients: int
    sampling_rate: float
    noise_multiplier: float
    clip: float
    training: LocalTraining
    choices: dict[str, Choice]  # the paper's own data first, then by nearness
    model: ModelChoice = Mlp()


class Options(NamedTuple):
    """How a table is run, its rows and seeds apart."""

    data: str = "auto"
    sampling: Sampling | None = None  # None: fixed for the paper's rows, Poisson for ours
    batches: Batches = "whole"
    personal_epochs: int | None = None  # None: all of a round's
    pulls: tuple[float, ...] = PULLS  # none: no personal models
    rounds: int = ROUNDS
    noise_seed: int | None = None  # of seed 0; None: noise and cohorts from the operating system's entropy


class Part(NamedTuple):
    """An experiment of one seed."""

    seed: int
    name: str
    experiment: Experiment

    @property
    def folder(self) -> str:
        """Where it is run, inside of the table's folder."""
        return f"seed-{self.seed}/{self.name}"


def _all_there(origin: FemnistOrigin, classes: Literal[10, 62], most: int) -> Femnist:
    return Femnist(min(most, load_femnist(origin, classes).num_clients), origin, classes)


def _one_digit(split: Literal["one_digit", "skewed"]) -> dict[str, Choice]:
    return {
        "mnist": Choice("MNIST", ("mnist",), lambda: Mnist(2000, split=split)),
        "handwriting": Choice("the embedded handwriting", (), lambda: Handwriting(2000, test_samples=100, split=split)),
    }


def _by_writer(classes: Literal[10, 62], clients: int, writers: Choice) -> dict[str, Choice]:
    return {
        "tff": Choice("TFF's federated EMNIST", ("emnist-tff",), lambda: Femnist(clients, "tff", classes)),
        "leaf": Choice("LEAF's FEMNIST", ("femnist-leaf",), lambda: _all_there("leaf", classes, clients)),
        "writers": writers,
        "handwriting": Choice(
            "the embedded handwriting in the sizes of TFF's clients",
            (),
            lambda: Handwriting(clients, split="by_writer", classes=classes, sizes="tff"),
        ),
    }


MNIST_WRITERS = Choice("MNIST by its 836 writers", ("mnist", "mnist-writers"), lambda: Mnist(836, split="by_writer"))
FEMNIST_WRITERS = Choice("real writers of FEMNIST", ("femnist-330",), lambda: _all_there("330", 62, 330))
SLOWER = LocalTraining(epochs=50, batch_size=20, learning_rate=0.01, decay=0.9, decay_every=50)
STEADY = LocalTraining(epochs=25, batch_size=20, learning_rate=0.02)
NONIID = ("noniid_mnist", 3.6, 2000, 0.05, 1.5, 0.5, PAPER_TRAINING, _one_digit("one_digit"))
SKEWED = ("skewed_noniid_mnist", 3.6, 2000, 0.05, 1.5, 0.5, PAPER_TRAINING, _one_digit("skewed"))
FMNIST = ("fmnist", 0.6, 3383, 0.03, 4.0, 0.5, SLOWER, _by_writer(10, 3383, MNIST_WRITERS))
FEMNIST = ("femnist", 4.1, 3400, 0.03, 1.0, 2.0, STEADY, _by_writer(62, 3400, FEMNIST_WRITERS))
TABLES = {
    "noniid-mnist": PaperTable("non-IID MNIST: clients hold one digit each", *NONIID),
    "skewed-mnist": PaperTable("skewed non-IID MNIST: those who opted out all hold a 7", *SKEWED),
    "fmnist": PaperTable("FMNIST: digits by their writers", *FMNIST),
    "femnist": PaperTable("FEMNIST: digits and letters by their writers", *FEMNIST, model=Cnn()),
}


@functools.cache
def printed(dataset: str | None = None) -> tuple[Printed, ...]:
    """The lines of the paper's four tables, or of one of them."""
    algorithms = {label: algorithm for algorithm, label in LABELS.items()}
    found = []
    with Path(__file__).with_name("paper_tables.csv").open(newline="") as file:
        for line in csv.DictReader(file):
            row = Row(algorithms.get(line["algorithm"], "fedhdp"), float(line["r"]) if line["r"] else None)
            numbers = {name: float(line[name]) for name in NUMBERS if line[name]}
            found.append(Printed(line["dataset"], float(line["lambda"]), row, numbers))
    return tuple(line for line in found if dataset in (None, line.dataset))


def paper_rows(table: PaperTable) -> list[Row]:
    """The rows of a table, each once, in the paper's order."""
    return list(dict.fromkeys(line.row for line in printed(table.dataset)))


def row_named(name: str) -> Row | None:
    """A row by its name on the command line: ``dp-fedavg``, ``fedhdp:0.01``."""
    if name in BASELINES:
        return Row(BASELINES[name])
    algorithm, _, weight = name.partition(":")
    try:
        row = Row("fedhdp", float(weight)) if algorithm == "fedhdp" and weight else None
    except ValueError:
        return None
    return row if row is None or 0 <= (row.weight or 0.0) < math.inf else None


def choose_data(choices: dict[str, Choice], asked: str) -> Data:
    """The data by its name, or the nearest to the paper's that is there."""
    known = ", ".join(["auto", *choices])
    require(asked == "auto" or asked in choices, "--data", asked, f"one of {known} for this table")
    if asked == "auto":
        asked = next(name for name, one in choices.items() if all(is_available(source) for source in one.sources))
    for source in choices[asked].sources:
        load_arrays(source)  # what is not there is refused before anything is run
    return choices[asked].data()


def stands_for(table: PaperTable, data: Data) -> str:
    """What the data is, and where it is not the paper's, that it is a substitute."""
    kinds = {Handwriting: "handwriting", Mnist: "writers" if "writers" in table.choices else "mnist"}
    origin = {"330": "writers"}.get(data.origin, data.origin) if isinstance(data, Femnist) else kinds[type(data)]
    about = f"{table.choices[origin].about}, {data.clients:,} clients"
    if origin == next(iter(table.choices)) and data.clients == table.clients:
        return about
    papers = next(iter(table.choices.values())).about
    return f"{about}; a substitute for {papers}, {table.clients:,} clients, which the paper has"


def groups_of(table: PaperTable, data: Data) -> tuple[GroupConfig, GroupConfig]:
    """5% of the clients opted out; where clients are fewer than the paper's, as many of them come to a round."""
    rate = table.sampling_rate if data.clients == table.clients else min(1.0, round(COHORT / data.clients, 4))
    opted_out = max(1, round(OPTED_OUT_SHARE * data.clients))
    return (
        GroupConfig(OPTED_OUT, opted_out, sampling_rate=rate, noise_multiplier=0.0),
        GroupConfig(PRIVATE, data.clients - opted_out, sampling_rate=rate, noise_multiplier=table.noise_multiplier),
    )


def variants_of(rows: Iterable[Row], pulls: Iterable[float] = PULLS) -> tuple[Variant, ...]:
    """Every row with every pull; without pulls, every row."""
    weighed = [(row, {} if row.weight is None else {PRIVATE: row.weight}) for row in rows]
    if not (pulls := tuple(pulls)):
        return tuple(Variant(row.label, row.algorithm, weights) for row, weights in weighed)
    return tuple(
        Variant(f"{row.label}, λ={pull:g}", row.algorithm, weights, {OPTED_OUT: pull, PRIVATE: pull})
        for row, weights in weighed
        for pull in pulls
    )


def experiment(
    name: str, part: str, data: Data, mechanism: MechanismConfig, variants: tuple[Variant, ...], **others: object
) -> Experiment:
    """A part of a table: the paper's training, rounds and all else that no row changes."""
    table = TABLES.get(name, TABLES["noniid-mnist"])
    chosen = {"rounds": ROUNDS, "server": AVERAGED, "evaluate_every": 100, "about": table.about} | others
    fixed = {"data": data, "mechanism": mechanism, "variants": variants, "model": table.model}
    return Experiment(name=f"{name}/{part}", training=table.training, **fixed, **chosen)  # type: ignore[arg-type]


def as_asked(experiment: Experiment, options: Options) -> Experiment:
    """The experiment with what holds for all parts of a table.

    Clients leave out an epoch's last, partial batch, or train on all: the paper does not say. Personal models may train
    for fewer epochs than global ones, as the paper's numbers of non-IID MNIST look; or there are none.
    """
    chosen = {
        "whole_batches": options.batches == "whole",
        "personal_epochs": options.personal_epochs,
        "personalize": bool(options.pulls),
    }
    noise_seed = None if options.noise_seed is None else options.noise_seed + experiment.seed
    return replace(experiment, training=replace(experiment.training, **chosen), noise_seed=noise_seed)


def paper_part(
    name: str, rows: list[Row], data: Data, sampling: Sampling, pulls: Iterable[float] = PULLS, **others: object
) -> Experiment:
    """All of the paper's rows that are asked for, in one experiment."""
    table = TABLES[name]
    mechanism = MechanismConfig(groups_of(table, data), AdaptiveClip(initial=table.clip), sampling=sampling)
    return experiment(name, "paper", data, mechanism, variants_of(rows, pulls), **others)

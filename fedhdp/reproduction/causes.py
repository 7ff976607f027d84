"""What the paper leaves open, one choice at a time, and its effect on the global accuracy of non-IID MNIST.

Each choice trains non-private, DP-FedAvg and FedHDP at r = 0.025 and r = 0.1 in one program, without personal models, and
evaluates every 20 rounds. A run is read in three ways: ``late`` is the mean of the last five evaluations, ``last`` the
last, ``best`` the best (which nobody without the test set could choose). Needs MNIST in the data directory.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from msgspec.structs import replace

import fedhdp
from fedhdp import AdaptiveClip, FederatedData, LocalTraining, Mechanism, Model, PrivacyGroup, Simulation, mlp
from fedhdp.algorithms import dp_fedavg, non_private
from fedhdp.datasets import load_mnist
from fedhdp.errors import ConfigError
from fedhdp.experiments.presets import PAPER_TRAINING
from fedhdp.mechanism import SERVER, Sampling
from fedhdp.reproduction.render import TextTable
from fedhdp.reproduction.summary import SUMMARY, published_means
from fedhdp.reproduction.tables import TABLES, TableRow
from fedhdp.results import store

TRAINING = replace(PAPER_TRAINING, drop_remainder=False, personalize=False)
CLIP = AdaptiveClip(initial=0.5)
COLUMNS = ("non-private", "DP-FedAvg", "r = 0.025", "r = 0.1")
PAPER_ROWS = (TableRow("non_private"), TableRow("dp_fedavg"), TableRow("fedhdp", 0.025), TableRow("fedhdp", 0.1))
READINGS = ("late", "last", "best")
BASE_TABLES = {"causes": "noniid-mnist", "skewed-causes": "skewed-mnist"}


class Choice(NamedTuple):
    """A setting that the paper leaves open."""

    training: LocalTraining = TRAINING
    clip: float | AdaptiveClip = CLIP
    sampling: Sampling = "fixed"
    joint_cohorts: bool = False  # cohorts of all clients, not a fixed share of each group
    samples: int = 30
    model: Callable[[], Model] = mlp
    preprocess: Callable[[FederatedData], FederatedData] | None = None


class CauseRow(msgspec.Struct, frozen=True):
    """A choice, read in one way: each column's mean over seeds and its standard error."""

    choice: str
    reading: str
    mean: tuple[float, ...]
    standard_error: tuple[float | None, ...]


class Causes(msgspec.Struct, frozen=True):
    """The choices of one table."""

    table: str
    command: str
    rounds: int
    seeds: int
    version: str
    causes: tuple[CauseRow, ...]


def standardize(data: FederatedData) -> FederatedData:
    """Inputs minus their mean, over their standard deviation."""

    def scale(x: Any) -> np.ndarray:
        return ((x / 255 - 0.1307) / 0.3081).astype(np.float32)

    train: Any = data.train
    test: Any = data.test
    return data._replace(
        train=train._replace(x_N=scale(train.x_N)),
        test=test._replace(x_N=scale(test.x_N)),
        server_x_N=scale(data.server_x_N),
        input_scale=None,
    )


def uniform_start() -> Model:
    """The network with weights and biases uniform within one over the root of the inputs."""
    import jax

    network, inputs = mlp(), {"first": 784, "rest": 50}

    def init(key: Any) -> Any:
        shapes = jax.eval_shape(network.init, key)
        layers: Any = {name: {} for name in shapes}
        for name, layer in shapes.items():
            bound = inputs[name] ** -0.5
            for part, leaf in layer.items():
                key, draw_key = jax.random.split(key)
                layers[name][part] = jax.random.uniform(draw_key, leaf.shape, minval=-bound, maxval=bound)
        return layers

    return network._replace(init=init)


CHOICES = {
    "base": Choice(),
    "whole batches": Choice(replace(TRAINING, drop_remainder=True)),
    "Poisson cohorts": Choice(sampling="poisson"),
    "cohorts of all clients": Choice(joint_cohorts=True),
    "whole batches and cohorts of all clients": Choice(replace(TRAINING, drop_remainder=True), joint_cohorts=True),
    "60 samples a client": Choice(samples=60),
    "20 samples a client": Choice(samples=20),
    "inputs standardized": Choice(preprocess=standardize),
    "uniform start": Choice(model=uniform_start),
    "clip at quantile 0.3": Choice(clip=AdaptiveClip(0.5, quantile=0.3)),
    "clip at quantile 0.7": Choice(clip=AdaptiveClip(0.5, quantile=0.7)),
    "clip fixed at 0.5": Choice(clip=0.5),
    "clip bits noised at 20": Choice(clip=AdaptiveClip(0.5, bit_noise_stddev=20.0)),
    "rate 0.25": Choice(replace(TRAINING, learning_rate=0.25)),
    "no decay": Choice(replace(TRAINING, decay=1.0)),
    "5 epochs": Choice(replace(TRAINING, epochs=5)),
}


def mechanisms_of(choice: Choice) -> list[Mechanism]:
    """The mechanism of each column."""
    groups = (PrivacyGroup("opted out", 100, 0.0, 0.05), PrivacyGroup("private", 1900, 1.5, 0.05))
    equal = Mechanism(groups, choice.clip, sampling=choice.sampling)
    weighted = [replace(equal, groups=(groups[0], replace(groups[1], weight=r))) for r in (0.025, 0.1)]
    return [non_private(equal), dp_fedavg(equal), *weighted]


def with_counts(mechanism: Mechanism, count_G: np.ndarray) -> Mechanism:
    """The mechanism with cohorts of exactly so many clients of each group.

    The paper's algorithm draws a cohort of all clients and divides by the number of each group in it. These numbers reveal
    who was sampled to someone who knows the other groups, so no epsilon holds: for comparison only.
    """
    pairs = zip(mechanism.groups, count_G.tolist(), strict=True)
    groups = tuple(replace(group, sampling_rate=count / group.clients) for group, count in pairs)
    return replace(mechanism, groups=groups)


def accuracies(choice: Choice, seed: int, skewed: bool, rounds: int) -> np.ndarray:
    """The server's accuracy in percent, evaluation by evaluation and column by column."""
    opted_out = 100 if skewed else 0
    data = load_mnist("skewed" if skewed else "one_digit", 2000, opted_out, choice.samples, 2, seed)
    data = data.with_levels(["opted out"] * 100 + ["private"] * 1900)  # the first 100 hold one digit where it is skewed
    data = data if choice.preprocess is None else choice.preprocess(data)
    mechanisms = mechanisms_of(choice)
    simulation = Simulation(data, choice.model(), mechanisms, choice.training, seed=seed)
    clients_G = [group.clients for group in mechanisms[0].groups]

    def draw_joint_cohort(simulation: Simulation) -> None:
        rng = np.random.default_rng([seed, simulation.round])
        count_G = rng.multivariate_hypergeometric(clients_G, 100)
        simulation.set_mechanisms([with_counts(mechanism, count_G) for mechanism in mechanisms])

    simulation.run(rounds, before_round=draw_joint_cohort if choice.joint_cohorts else None, evaluate_every=20)
    key = (SERVER, "global", "accuracy")
    columns = [[100 * row.value for row in rows if row[1:4] == key] for rows in simulation.histories]
    return np.array(columns).T


def read(accuracy_TC: np.ndarray) -> dict[str, np.ndarray]:
    """The three readings of a run (T evaluations, C columns)."""
    return {"late": accuracy_TC[-5:].mean(axis=0), "last": accuracy_TC[-1], "best": accuracy_TC.max(axis=0)}


def run_causes(
    table: str, names: str | None, seeds: range, rounds: int, print_line: Callable[[str], None] = print
) -> Causes:
    """Train every choice with every seed.

    Args:
        table: ``causes`` or ``skewed-causes``, in which all opted-out clients hold a 7.
        names: Choices, comma-separated; None for all.
        seeds: The seeds.
        rounds: The number of rounds.
        print_line: Called with a line of progress after each choice.

    Raises:
        ConfigError: If there is no such choice.
    """
    labels = list(CHOICES) if names is None else [word.strip() for word in names.split(",")]
    for name in labels:
        if name not in CHOICES:
            raise ConfigError(f"there is no row {name!r} in {table}; there are {', '.join(CHOICES)}", "--rows", name)
    rows = []
    for name in labels:
        runs = [read(accuracies(CHOICES[name], seed, table == "skewed-causes", rounds)) for seed in seeds]
        for reading in READINGS:
            accuracy_SC = np.array([run[reading] for run in runs])
            mean = tuple(round(float(value), 3) for value in accuracy_SC.mean(axis=0))
            errors: tuple[float | None, ...] = (None,) * len(mean)
            if len(runs) > 1:
                errors = tuple((accuracy_SC.std(axis=0, ddof=1) / len(runs) ** 0.5).round(3).tolist())
            rows.append(CauseRow(name, reading, mean, errors))
        print_line(f"{name}: {', '.join(f'{column} {value:.2f}' for column, value in zip(COLUMNS, mean, strict=True))}")
    words = ["fedhdp", "reproduce", table, "--seeds", str(len(seeds)), *(["--rows", names] if names else [])]
    return Causes(table, shlex.join(words), rounds, len(seeds), fedhdp.__version__, tuple(rows))


def causes_table(causes: Causes) -> TextTable:
    """The choices beside the paper."""
    readings = {row.reading for row in causes.causes}
    rows = []
    for row in causes.causes:
        label = row.choice if readings == {"late"} else f"{row.choice}, {row.reading}"
        pairs = zip(row.mean, row.standard_error, strict=True)
        rows.append([label, *(f"{mean:.2f}" + ("" if error is None else f" ±{error:.2f}") for mean, error in pairs)])
    paper_table = TABLES[BASE_TABLES[causes.table]]
    paper = [published_means(paper_table, row, None)["acc_g"] for row in PAPER_ROWS]
    rows.append(["the paper", *(f"{value:.2f}" for value in paper)])
    return TextTable(["choice", *COLUMNS], rows, [None] * len(rows))


def write_causes(out: Path, causes: Causes) -> None:
    """Write ``summary.json``."""
    out.mkdir(parents=True, exist_ok=True)
    store.write_value(out / SUMMARY, causes)

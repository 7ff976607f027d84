"""Rows of our own: what the paper's promise buys once it is spent better, and tables with more than two levels.

All of them sample by Poisson, for which the epsilon that the paper states really holds. One more row is one more line of
`OURS`; its part's folder has its name. Numbers are written here, not computed, so that a run needs no accountant; tests
compute them anew.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from msgspec.structs import replace

from fedhdp.experiments.components import DataConfig
from fedhdp.experiments.config import Experiment, GroupConfig, MechanismConfig, Variant
from fedhdp.experiments.presets import OPTED_OUT, PRIVATE
from fedhdp.mechanism import AdaptiveClip, Mechanism, Sampling
from fedhdp.reproduction import tables as paper
from fedhdp.reproduction.tables import AVERAGED, PULLS, ROUNDS, Options, Part, Row
from fedhdp.server import ServerOptimizer
from fedhdp.theory.planning import PAPERS_PARAMETERS, with_optimal_weights

BASE = "noniid-mnist"  # the table that they stand beneath
PROMISE = paper.TABLES[BASE].epsilon
PLD_NOISE = 1.401  # the least noise that PLD accounting finds enough for the promise, less than the paper's
TUNED = (0.01, 0.025)  # the paper's best weights
HELD_OUT = 0.2  # of each client's train examples, on which it chooses its pull
LONGER = ServerOptimizer(average=0.95)  # a longer average
MOMENTUM = ServerOptimizer(learning_rate=0.3, momentum=0.9, average=0.95)


class Own(NamedTuple):
    """A row of our own: what it changes in FedHDP with the paper's numbers."""

    about: str
    noise_multiplier: float | None = None  # None: the paper's
    weights: tuple[float, ...] | None = TUNED  # None: the one that theory suggests
    server: ServerOptimizer = AVERAGED
    averaged: bool = False  # its model is the average of the global models
    held_out: float = 0.0
    pulls: tuple[float, ...] = (0.05,)
    read_from: str | None = None  # the part that it is measured in; None: its own


OURS = {
    "poisson": Own("Poisson sampling, nothing else changed", server=LONGER),
    "average": Own("and the average of the global models", averaged=True, read_from="poisson"),
    "pld": Own("noise for the same epsilon by PLD", noise_multiplier=PLD_NOISE),
    "theory": Own("the weight that theory suggests", weights=None),
    "momentum": Own("momentum on the server", server=MOMENTUM),
    "chosen-pull": Own("each client chooses its pull on a fifth of its data", held_out=HELD_OUT, pulls=PULLS),
    "together": Own("all of the above", PLD_NOISE, None, MOMENTUM, True, HELD_OUT, PULLS),
    "together-tuned": Own("PLD, the average and momentum, at the paper's weights", PLD_NOISE, TUNED, MOMENTUM, True),
}


def own_part(name: str, data: DataConfig, personal: bool = True, rounds: int = ROUNDS, seed: int = 0) -> Experiment:
    """One row of our own as an experiment."""
    own, table = OURS[name], paper.TABLES[BASE]
    opted_out, private = paper.groups_of(table, data)
    if own.noise_multiplier is not None:
        private = replace(private, noise_multiplier=own.noise_multiplier)
    groups = (opted_out, private)
    mechanism = MechanismConfig(groups, AdaptiveClip(initial=table.clip))
    weights = own.weights or _weights(mechanism, "shared")[1:]
    held = replace(data, validation=own.held_out) if own.held_out else data
    variants = paper.variants_of([Row("fedhdp", weight) for weight in weights], own.pulls if personal else ())
    others = {"server": own.server, "rounds": rounds, "seed": seed, "about": own.about}
    return paper.experiment(BASE, name, held, mechanism, variants, **others)


def _weights(mechanism: MechanismConfig, noise: str) -> tuple[float, ...]:
    """The weights that theory suggests for the paper's rounds and network, to two digits."""
    chosen: Mechanism = replace(mechanism.build(ROUNDS, 1e-4), noise=noise)
    return tuple(float(f"{g.weight:.2g}") for g in with_optimal_weights(chosen, ROUNDS, PAPERS_PARAMETERS).groups)


LEVELS = {  # name, share of the clients, noise multiplier
    "three": ((OPTED_OUT, 0.05, 0.0), ("relaxed", 0.45, 0.75), ("strict", 0.5, 3.0)),
    "five": (
        (OPTED_OUT, 0.05, 0.0),
        ("relaxed", 0.2, 0.75),
        ("medium", 0.25, 1.0),
        (PRIVATE, 0.25, 1.5),
        ("strict", 0.25, 3.0),
    ),
}


def levels_part(name: str, data: DataConfig, sampling: Sampling, rounds: int = ROUNDS, seed: int = 0) -> Experiment:
    """Several privacy levels as an experiment: the baselines, and FedHDP with shared noise and with noise per group."""
    table = paper.TABLES[BASE]
    groups = tuple(
        GroupConfig(level, round(share * data.clients), sampling_rate=table.sampling_rate, noise_multiplier=noise)
        for level, share, noise in LEVELS[name]
    )
    mechanism = MechanismConfig(groups, AdaptiveClip(initial=table.clip), sampling=sampling)
    names = [group.name for group in groups]
    weights = {noise: dict(zip(names, _weights(mechanism, noise))) for noise in ("shared", "per_group")}
    variants = (
        *(Variant(label, algorithm) for algorithm, label in paper.LABELS.items()),
        Variant("FedHDP, shared noise", "fedhdp", weights["shared"], noise="shared"),
        Variant("FedHDP, noise per group", "fedhdp", weights["per_group"], noise="per_group"),
    )
    about = f"{name} privacy levels on non-IID MNIST"
    return paper.experiment("levels", name, data, mechanism, variants, rounds=rounds, seed=seed, about=about)


def parts(
    name: str, asked: str | None = None, seeds: Iterable[int] = (0,), options: Options | None = None
) -> list[Part]:
    """All that is run for a table: the rows that are asked for, or the paper's and ours, seed by seed."""
    options = options or Options()
    rows, own = rows_of(name, asked)
    data = paper.choose_data(paper.TABLES[BASE if name == "levels" else name].choices, options.data)
    rounds, found = options.rounds, []
    for seed in seeds:
        if rows:
            sampling = options.sampling or "fixed"
            part = paper.paper_part(name, rows, data, sampling, options.pulls, rounds=rounds, seed=seed)
            found.append(Part(seed, "paper", part))
        for one in own:
            if name == "levels":
                part = levels_part(one, data, options.sampling or "poisson", rounds, seed)
            else:
                part = own_part(one, data, bool(options.pulls), rounds, seed)
            found.append(Part(seed, one, part))
    return [part._replace(experiment=paper.as_asked(part.experiment, options)) for part in found]


def rows_of(name: str, asked: str | None) -> tuple[list[Row], list[str]]:
    """The paper's rows and the parts of our own that are asked for; by default all of the table's."""
    known = [*paper.TABLES, "levels"]
    if name not in known:
        raise ValueError(f"there is no table {name!r}; there are {', '.join(known)}")
    theirs = [] if name == "levels" else paper.paper_rows(paper.TABLES[name])
    ours = list(LEVELS) if name == "levels" else list(OURS) if name == BASE else []
    if asked is None:
        return theirs, _parts_of(ours)
    rows: list[Row] = []
    own: list[str] = []
    for word in (word.strip() for word in asked.split(",")):
        row = None if name == "levels" else paper.row_named(word)
        if row is not None:
            rows.append(row)
        elif word == "paper" and theirs:
            rows += theirs
        elif word == "ours" and ours:
            own += ours
        elif word in ours:
            own.append(word)
        else:
            raise ValueError(f"there is no row {word!r} in {name}; there are {', '.join(_known(theirs, ours))}")
    return list(dict.fromkeys(rows)), _parts_of(own)


def _parts_of(own: list[str]) -> list[str]:
    """Each once; a row that is read from another's part is run there."""
    return list(dict.fromkeys(OURS[name].read_from or name if name in OURS else name for name in own))


def _known(theirs: list[Row], ours: list[str]) -> list[str]:
    weights = ", ".join(f"{row.weight:g}" for row in theirs if row.weight is not None)
    papers = ["paper", *paper.BASELINES, f"fedhdp:R (the paper has R = {weights})"] if theirs else []
    return papers + (["ours", *ours] if ours else [])

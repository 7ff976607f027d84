"""Extensions of the paper's tables: FedHDP with other accounting, weights, server and pulls. More levels: `levels.py`.

All extensions sample by Poisson, for which the paper's epsilon holds. An extension is an entry of `EXTENSIONS`; its part
has the same name. Noise and weights are constants, so that a run needs no accountant; tests recompute them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from msgspec.structs import replace

from fedhdp import AdaptiveClip, LocalTraining, ServerOptimizer
from fedhdp.errors import ConfigError
from fedhdp.experiments.bases import BasisConfig, CosineBasis, PcaBasis
from fedhdp.experiments.components import BuiltInData, MlpConfig
from fedhdp.experiments.config import Experiment
from fedhdp.privacy.calibration import MechanismConfig
from fedhdp.reproduction import tables
from fedhdp.reproduction.levels import LEVEL_TABLES, PFA_FOLDER, levels_part, pfa_part, theory_weights
from fedhdp.reproduction.tables import AVERAGED, PULLS, ROUNDS, TABLES, Options, Part, Pull, TableRow

BASE = "noniid-mnist"  # the table that has extensions
EPSILON = TABLES[BASE].epsilon
PLD_NOISE = 1.401  # the least noise multiplier for this epsilon by PLD accounting
TUNED_WEIGHTS = (0.01, 0.025)  # the best of the paper
VALIDATION = 0.2  # the share of each client's train examples on which it chooses its pull
LONG_AVERAGE = ServerOptimizer(average=0.95)
MOMENTUM = ServerOptimizer({"name": "sgd", "learning_rate": 0.3, "momentum": 0.9}, average=0.95)
ALL_EXTENSIONS = ("extensions", "ours")  # on the command line
COSINES, LONG_COSINES, DIRECTIONS = CosineBasis(64), CosineBasis(64, scale=2.35), PcaBasis(30)
FEW_EPOCHS = LocalTraining(epochs=3, batch_size=20, learning_rate=0.5, personal_learning_rate=5.0)
WRITERS_TRAINING = replace(FEW_EPOCHS, personal_learning_rate=1.0)  # whose clients have all digits
BASIS_PULLS = (0.0005, 0.002)


def _momentum(rate: float) -> ServerOptimizer:
    """Momentum on the server, and a long average."""
    return ServerOptimizer({"name": "sgd", "learning_rate": rate, "momentum": 0.9}, average=0.99)


class Extension(NamedTuple):
    """FedHDP with the paper's numbers and these changes."""

    about: str
    noise_multiplier: float | None = None  # None: the paper's
    weights: tuple[float, ...] | None = TUNED_WEIGHTS  # None: the theory's
    server: ServerOptimizer = AVERAGED
    averaged: bool = False  # whether its model is the average of the global models
    validation: float = 0.0
    pulls: tuple[Pull, ...] = (0.05,)
    measured_in: str | None = None  # the part with its runs; None: its own
    tables: tuple[str, ...] = (BASE,)
    algorithm: str = "fedhdp"
    basis: BasisConfig | None = None
    scattering: bool = False  # whether its inputs are fixed features of the images: another model
    training: LocalTraining | None = None  # None: the paper's


EXTENSIONS = {
    "poisson": Extension("Poisson sampling, nothing else changed", server=LONG_AVERAGE),
    "average": Extension("and the average of the global models", averaged=True, measured_in="poisson"),
    "pld": Extension("noise for the same epsilon by PLD", noise_multiplier=PLD_NOISE),
    "theory": Extension("the weight of theory", weights=None),
    "momentum": Extension("momentum on the server", server=MOMENTUM),
    "chosen-pull": Extension("each client chooses its pull on a fifth of its data", validation=VALIDATION, pulls=PULLS),
    "together": Extension("all of the above", PLD_NOISE, None, MOMENTUM, True, VALIDATION, PULLS),
    "together-tuned": Extension(
        "PLD, the average and momentum, at the paper's weights", PLD_NOISE, TUNED_WEIGHTS, MOMENTUM, True
    ),
    "dp": Extension(
        "DP-FedAvg with noise for the same epsilon by PLD, and the average",
        *(PLD_NOISE, (), LONG_AVERAGE, True),
        algorithm="dp_fedavg",
    ),
    "ceiling": Extension(
        "no noise, 3 epochs, momentum and a long average",
        *(PLD_NOISE, (), _momentum(0.4), True),
        algorithm="non_private",
        training=FEW_EPOCHS,
    ),
    "basis": Extension(
        "PLD, 64 cosines, 3 epochs, momentum and a long average",
        *(PLD_NOISE, (0.025,), _momentum(0.4), True, 0.0, BASIS_PULLS),
        basis=COSINES,
        training=FEW_EPOCHS,
    ),
    "basis-plan": Extension(
        "what `fedhdp plan --training` suggests, without a tuning run",
        *(PLD_NOISE, None, _momentum(0.4), True, 0.0, BASIS_PULLS),
        basis=COSINES,
        training=FEW_EPOCHS,
    ),
    "basis-pca": Extension(
        "the same with 30 principal directions of the opted-out clients",
        *(PLD_NOISE, (0.025,), _momentum(0.4), True, 0.0, BASIS_PULLS),
        basis=DIRECTIONS,
        training=FEW_EPOCHS,
    ),
    "basis-dp": Extension(
        "DP-FedAvg with 64 cosines, 3 epochs, momentum and a long average",
        *(PLD_NOISE, (), _momentum(0.04), True, 0.0, BASIS_PULLS),
        tables=(BASE, "skewed-mnist"),
        algorithm="dp_fedavg",
        basis=LONG_COSINES,
        training=FEW_EPOCHS,
    ),
    "basis-none": Extension(
        "no noise, with 64 cosines, 3 epochs, momentum and a long average",
        *(PLD_NOISE, (), _momentum(0.4), True, 0.0, BASIS_PULLS),
        algorithm="non_private",
        basis=COSINES,
        training=FEW_EPOCHS,
    ),
    "scattering": Extension(
        "PLD, 64 scattering features, 3 epochs, momentum and a long average",
        *(PLD_NOISE, (0.025,), _momentum(0.4), True, 0.0, BASIS_PULLS),
        scattering=True,
        training=FEW_EPOCHS,
    ),
    "scattering-dp": Extension(
        "DP-FedAvg with 64 scattering features, 3 epochs, momentum and a long average",
        *(PLD_NOISE, (), _momentum(0.04), True, 0.0, BASIS_PULLS),
        algorithm="dp_fedavg",
        scattering=True,
        training=FEW_EPOCHS,
    ),
    "scattering-none": Extension(
        "no noise, with 64 scattering features, 3 epochs, momentum and a long average",
        *(PLD_NOISE, (), _momentum(0.4), True, 0.0, BASIS_PULLS),
        algorithm="non_private",
        scattering=True,
        training=FEW_EPOCHS,
    ),
    "basis-skewed": Extension(
        "PLD, 64 cosines, 3 epochs, momentum and a long average",
        *(PLD_NOISE, (0.5,), _momentum(0.05), True, 0.0, BASIS_PULLS),
        tables=("skewed-mnist",),
        basis=LONG_COSINES,
        training=FEW_EPOCHS,
    ),
    "poisson-writers": Extension(
        "Poisson sampling and the average, nothing else changed",
        *(None, (0.025, 0.05), LONG_AVERAGE, True),
        tables=("fmnist",),
    ),
    "basis-writers": Extension(
        "64 cosines, 3 epochs, momentum and a long average",
        *(None, (0.01,), _momentum(0.2), True, 0.0, (0.005, 0.05, (0.05, 0.005))),
        tables=("fmnist",),
        basis=COSINES,
        training=WRITERS_TRAINING,
    ),
}


def is_trained_otherwise(part: str) -> bool:
    """Whether a part of a table has a model and training of its own."""
    if part in LEVEL_TABLES:
        return LEVEL_TABLES[part].on_basis
    return part in EXTENSIONS and EXTENSIONS[part].training is not None


def extension_part(
    name: str, data: BuiltInData, personal: bool = True, rounds: int = ROUNDS, seed: int = 0, table_name: str = BASE
) -> Experiment:
    """A key of `EXTENSIONS` as an experiment; ``personal`` says whether personal models are trained."""
    extension, table = EXTENSIONS[name], TABLES[table_name]
    opted_out, private = tables.groups_of(table, data)
    if extension.noise_multiplier is not None:
        private = replace(private, noise_multiplier=extension.noise_multiplier)
    mechanism = MechanismConfig((opted_out, private), AdaptiveClip(initial=table.clip))
    weights = extension.weights if extension.weights is not None else theory_weights(mechanism, "shared")[1:]
    if extension.scattering:
        data = replace(data, transform="scattering")
    if extension.validation:
        data = replace(data, validation=extension.validation)
    rows = [TableRow(extension.algorithm, weight) for weight in weights or (None,)]
    variants = tables.variants_of(rows, extension.pulls if personal else ())
    fields = {"server": extension.server, "rounds": rounds, "seed": seed, "about": extension.about}
    experiment = tables.make_experiment(table_name, name, data, mechanism, variants, **fields)
    if extension.basis is not None:
        experiment = replace(experiment, model=MlpConfig(basis=extension.basis))
    return replace(experiment, training=extension.training or experiment.training)


def make_parts(
    name: str, row_names: str | None = None, seeds: Iterable[int] = (0,), options: Options | None = None
) -> list[Part]:
    """The parts of a table, seed by seed.

    Args:
        name: The table.
        row_names: The rows, comma-separated; None for all of the table.
        seeds: The seeds.
        options: How all parts are run.

    Raises:
        ConfigError: If there is no such table or row.
    """
    options = options or Options()
    rows, extensions = parse_rows(name, row_names)
    data = tables.choose_data(TABLES[BASE if name == "levels" else name].sources, options.data)
    parts = []
    for seed in seeds:
        if rows:
            sampling = options.sampling or "fixed"
            fields = {"rounds": options.rounds, "seed": seed}
            parts.append(("paper", tables.paper_part(name, rows, data, sampling, options.pulls, **fields)))
        for part in extensions:
            if name == "levels":
                of_levels = (part, data, options.sampling or "poisson", options.rounds, seed)
                parts += [(part, levels_part(*of_levels)), (part + PFA_FOLDER, pfa_part(*of_levels))]
            else:
                personal, rounds = bool(options.pulls), options.rounds
                parts.append((part, extension_part(part, data, personal, rounds, seed, name)))
    return [Part(e.seed, folder, _apply_options(e, options)) for folder, e in parts]


def _apply_options(experiment: Experiment, options: Options) -> Experiment:
    """The experiment with the options; a part with training of its own keeps its batches and personal epochs."""
    part, changed = experiment.name.partition("/")[2], tables.apply_options(experiment, options)
    if part in LEVEL_TABLES and LEVEL_TABLES[part].on_basis:
        return replace(changed, training=experiment.training)
    if part not in EXTENSIONS or EXTENSIONS[part].training is None:
        return changed
    return replace(changed, training=replace(experiment.training, personalize=bool(options.pulls)))


def parse_rows(name: str, row_names: str | None) -> tuple[list[TableRow], list[str]]:
    """The paper's rows and the parts of extensions with these names.

    Args:
        name: The table.
        row_names: Comma-separated names; None for all of the table.

    Returns:
        The paper's rows, and the names of the extensions' parts, each once.

    Raises:
        ConfigError: If there is no such table or row.
    """
    table_names = [*TABLES, "levels"]
    if name not in table_names:
        raise ConfigError(f"there is no table {name!r}; there are {', '.join(table_names)}", "TABLE", name)
    paper_rows = [] if name == "levels" else tables.paper_rows(TABLES[name])
    extensions = list(LEVEL_TABLES) if name == "levels" else [e for e in EXTENSIONS if name in EXTENSIONS[e].tables]
    if row_names is None:
        return paper_rows, _parts_of(extensions)
    rows: list[TableRow] = []
    parts: list[str] = []
    for word in (word.strip() for word in row_names.split(",")):
        row = None if name == "levels" else tables.parse_row(word)
        if row is not None:
            rows.append(row)
        elif word == "paper" and paper_rows:
            rows += paper_rows
        elif word in ALL_EXTENSIONS and extensions:
            parts += extensions
        elif word in extensions:
            parts.append(word)
        else:
            choices = ", ".join(_row_names(paper_rows, extensions))
            raise ConfigError(f"there is no row {word!r} in {name}; there are {choices}", "--rows", word)
    return list(dict.fromkeys(rows)), _parts_of(parts)


def _parts_of(names: list[str]) -> list[str]:
    """The parts that these extensions are measured in, each once."""
    return list(dict.fromkeys(EXTENSIONS[name].measured_in or name if name in EXTENSIONS else name for name in names))


def _row_names(paper_rows: list[TableRow], extensions: list[str]) -> list[str]:
    weights = ", ".join(f"{row.weight:g}" for row in paper_rows if row.weight is not None)
    names = ["paper", *tables.BASELINES, f"fedhdp:R (the paper has R = {weights})"] if paper_rows else []
    return names + ([ALL_EXTENSIONS[0], *extensions] if extensions else [])

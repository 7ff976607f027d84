"""Experiments as TOML: read, written, refused with the field and the value."""

from __future__ import annotations

import math

import optax
import pytest
from experiment_helpers import TINY, tiny
from helpers import raises_field
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from fedhdp.algorithms import ALGORITHM_NAMES, ALGORITHMS
from fedhdp.client import LocalTraining
from fedhdp.clips import AdaptiveClip
from fedhdp.errors import ConfigError
from fedhdp.experiments import EXPERIMENTS, Experiment, Variant, find, from_toml, to_toml
from fedhdp.experiments.components import CnnConfig, HandwritingConfig, LinearConfig, MlpConfig, MnistConfig, PythonData
from fedhdp.optimizers import OptimizerConfig
from fedhdp.privacy.accounting import epsilon, gaussian_epsilon
from fedhdp.privacy.budget import Budget
from fedhdp.privacy.calibration import GroupConfig, MechanismConfig
from fedhdp.results.store import slug
from fedhdp.server import ServerOptimizer

SCHEDULE = {"schedule": "exponential_decay", "init_value": 0.1, "transition_steps": 50, "decay_rate": 0.9}
BY_RATES = ("idp_sample", "time_adaptive")  # whose rates keep epsilons, for Poisson sampling alone
ADAM = {"name": "adam", "learning_rate": SCHEDULE, "b1": 0.5}
BAD = {  # what is wrong: the text, its replacement, and the field and value of the error
    "unknown key": ("seed = 1", "sede = 1", "sede", 1),
    "unknown key of a group": ("weight = 0.1", "wieght = 0.1", "mechanism.groups[1].wieght", 0.1),
    "unknown accountant": ("rounds = 12", 'rounds = 12\naccountant = "exact"', "accountant", "exact"),
    "accountant of a ledger": ("rounds = 12", 'rounds = 12\naccountant = "pld"\nledger = "l"', "accountant", "pld"),
    "negative weight": ("weight = 0.1", "weight = -0.1", "mechanism.groups[1].weight", -0.1),
    "text for a number": ("epochs = 1", 'epochs = "many"', "training.epochs", "many"),
    "number for a table": ("rounds = 12", "rounds = 12\nserver = 1", "server", 1),
    "missing key": ("rounds = 12", "", "rounds", None),
    "missing key of a group": ("clients = 15\n", "", "mechanism.groups[1].clients", None),
    "list for a number": ("hidden = 8", "hidden = [8]", "model.hidden", [8]),
    "negative noise": ("noise_multiplier = 0.0", "noise_multiplier = -1.0", "mechanism.groups[0].noise_multiplier", -1),
    "NaN": ("learning_rate = 0.1", "learning_rate = nan", "training.learning_rate", math.nan),
    "unknown optimizer": ("learning_rate = 0.1", 'optimizer = {name = "adamm"}', "training.optimizer.name", "adamm"),
    "unknown argument of an optimizer": (
        "learning_rate = 0.1",
        'optimizer = {name = "adam", learning_rate = 0.1, beta = 2}',
        "training.optimizer.beta",
        2,
    ),
    "two rates": (
        "learning_rate = 0.1",
        'learning_rate = 0.1\noptimizer = {name = "sgd", learning_rate = 0.2}',
        "training.learning_rate",
        0.1,
    ),
    "old key of the server": ("rounds = 12", "rounds = 12\nserver.momentum = 0.9", "server.momentum", 0.9),
    "schedule of the server": (
        "rounds = 12",
        'rounds = 12\nserver.optimizer = {name = "sgd", learning_rate = {schedule = "cosine"}}',
        "server.optimizer.learning_rate.schedule",
        "cosine",
    ),
    "rate above 1": ("sampling_rate = 0.3", "sampling_rate = 1.5", "mechanism.groups[0].sampling_rate", 1.5),
    "number of clients": ("clients = 15", "clients = 14", "mechanism.groups", 19),
    "unknown data": ('name = "handwriting"', 'name = "cats"', "data.name", "cats"),
    "unknown model": ('name = "mlp"', 'name = "llm"', "model.name", "llm"),
    "unknown algorithm": ('"dp_fedavg"', '"dpfedavg"', "variants[0].algorithm", "dpfedavg"),
    "noise and epsilon": (
        "epsilon = 8.0",
        "epsilon = 8.0\nnoise_multiplier = 1.0",
        "mechanism.groups[1].noise_multiplier",
        1.0,
    ),
    "neither noise nor epsilon": ("epsilon = 8.0", "", "mechanism.groups[1].noise_multiplier", None),
    "unknown group": (
        'algorithm = "fedhdp"',
        'algorithm = "fedhdp"\nweights = {nobody = 1.0}',
        "variants[1].weights",
        "nobody",
    ),
    "budget without ledger": (
        "[data]",
        "[budgets.private]\nepsilon = 1.0\ndelta = 1e-4\n[data]",
        "budgets",
        ["private"],
    ),
    "missing key of a budget": (
        "[data]",
        '[budgets]\n"opted out" = {epsilon = 1.0, delta = 1e-4}\nprivate = {epsilon = 1.0}\n[data]',
        "budgets.private.delta",
        None,
    ),
    "misspelt key of a budget": (
        "[data]",
        '[budgets]\n"opted out" = {epsilon = 1.0, delta = 1e-4}\nprivate = {epsilom = 1.0}\n[data]',
        "budgets.private.epsilom",
        1.0,
    ),
    "text for a weight": (
        'algorithm = "fedhdp"',
        'algorithm = "fedhdp"\npulls = {"opted out" = 1.0, private = "a"}',
        "variants[1].pulls.private",
        "a",
    ),
    "unknown choice": ("[data]", '[data]\nsplit = "one-digit"', "data.split", "one-digit"),
    "equal directories": ('"DP-FedAvg"', '"fedHDP"', "variants", ["fedHDP", "FedHDP"]),
    "no TOML": ("rounds = 12", "rounds = = 12", None, None),
    "unknown metric": ("rounds = 12", 'rounds = 12\nmetrics = ["auc", "auk"]', "metrics", "auk"),
    "metric twice": ("rounds = 12", 'rounds = 12\nmetrics = ["auc", "auc"]', "metrics", ["auc", "auc"]),
    "text for a list": ("rounds = 12", 'rounds = 12\nmetrics = "auc"', "metrics", "auc"),
    "unknown logger": ("rounds = 12", 'rounds = 12\nloggers = ["tensorbord"]', "loggers", "tensorbord"),
    "logger twice": (
        "rounds = 12",
        'rounds = 12\nloggers = ["wandb", { name = "wandb" }]',
        "loggers",
        ["wandb", "wandb"],
    ),
    "unknown argument of a logger": (
        "rounds = 12",
        'rounds = 12\nloggers = [{ name = "mlflow", uri = "x" }]',
        "loggers[0].uri",
        "x",
    ),
    "no units": ("hidden = 8", "hidden = 0", "model.hidden", 0),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_names_field_and_value(case):
    old, new, field, value = BAD[case]
    text = TINY.read_text()
    assert old in text
    with pytest.raises(ConfigError) as error:
        from_toml(text.replace(old, new, 1), "bad.toml")
    assert error.value.field == field
    assert error.value.value == value or value is math.nan
    assert str(error.value).startswith("bad.toml: ")
    assert "\n" not in str(error.value)
    assert field is None or field in str(error.value)


def test_misspelled_key_gets_a_suggestion():
    with pytest.raises(ConfigError, match="did you mean seed"):
        from_toml(TINY.read_text().replace("seed = 1", "sede = 1", 1), "bad.toml")


@pytest.mark.parametrize(
    ("override", "field", "value"),
    [
        ({"server": {"optimizer": "adam"}}, "server.optimizer", "adam"),
        ({"training": {"epochs": 0}}, "training.epochs", 0),
        ({"training": {"proximal": 1e9}}, "training.proximal", 1e9),
    ],
)
def test_bad_override_of_a_variant(override, field, value):
    variant = replace(tiny().variants[1], name="other", **override)
    with pytest.raises(ConfigError) as error:
        tiny(variants=(tiny().variants[0], variant))
    assert (error.value.field, error.value.value) == (f"variants[1].{field}", value)


@pytest.mark.parametrize("name", ["summary.json", "Run.JSON", "experiment.toml", "long " * 50])
def test_variant_named_like_a_file_is_refused(name):
    with raises_field("name"):
        replace(tiny().variants[0], name=name)


@pytest.mark.parametrize("name", ["nosuch", "missing.toml"])
def test_unknown_experiment_is_refused(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with raises_field("experiment", ConfigError):
        find(name, EXPERIMENTS)


def test_directory_of_a_run_is_not_an_experiment(tmp_path):
    (tmp_path / "experiment.toml").write_text(to_toml(tiny()))
    with raises_field("experiment", ConfigError) as error:
        find(str(tmp_path), EXPERIMENTS)
    assert f"fedhdp run --resume {tmp_path}" in str(error.value)


def test_names_default_to_the_file_and_the_algorithm(tmp_path):
    text = TINY.read_text().replace('name = "tiny"\n', "").replace('name = "FedHDP"\n', "")
    (tmp_path / "clinics.toml").write_text(text)
    experiment = find(str(tmp_path / "clinics.toml"), EXPERIMENTS)
    assert experiment.name == "clinics"
    assert [variant.name for variant in experiment.variants] == ["DP-FedAvg", "FedHDP"]


def test_every_algorithm_has_a_name():
    assert ALGORITHM_NAMES.keys() == ALGORITHMS.keys()
    assert len({slug(name) for name in ALGORITHM_NAMES.values()}) == len(ALGORITHMS)


def test_paths_are_relative_to_the_file(tmp_path):
    (tmp_path / "my.toml").write_text(to_toml(tiny(ledger="population.ledger")))
    assert find(str(tmp_path / "my.toml"), EXPERIMENTS).ledger == str(tmp_path / "population.ledger")


def test_each_group_keeps_its_epsilon_at_its_own_delta():
    _, private = tiny().mechanism.groups
    groups = tuple(
        replace(private, name=name, epsilon=3.0, delta=delta, weight=1.0) for name, delta in (("a", None), ("b", 1e-6))
    )
    mechanism = replace(tiny().mechanism, groups=groups).build(12, 1e-4, "pld")
    for group, delta in zip(mechanism.groups, (1e-4, 1e-6), strict=True):
        assert group.noise_multiplier > 0
        assert 2.97 <= gaussian_epsilon(group.noise_multiplier, group.sampling_rate, 12, delta, "pld") <= 3.0


words = st.text("abc d.-\"'\\[x]é", min_size=1, max_size=8)
positive = st.floats(1e-3, 1e3)
shares = st.floats(0.01, 1.0)
deltas = st.floats(1e-9, 0.1)


@st.composite
def privacy(draw) -> dict[str, float]:
    """A noise multiplier or an epsilon."""
    if draw(st.booleans()):
        return {"noise_multiplier": draw(st.sampled_from([0.0, 0.5, 3.0]))}
    return {"epsilon": draw(positive | st.just(math.inf)), "delta": draw(st.none() | deltas)}


@st.composite
def experiments(draw) -> Experiment:
    """Any experiment that is valid."""
    names = draw(st.lists(words, min_size=1, max_size=3, unique=True))
    groups = tuple(
        GroupConfig(
            name=name,
            clients=draw(st.integers(1, 50)),
            sampling_rate=draw(shares),
            weight=draw(shares),
            pull=draw(shares),
            **draw(privacy()),
        )
        for name in names
    )
    clients = sum(group.clients for group in groups)
    data = draw(
        st.sampled_from(
            [
                HandwritingConfig(clients=clients, validation=0.25, classes=62),
                MnistConfig(clients=clients, split="by_writer"),
                PythonData(clients=clients, file="a file.py", sha256="0" * 64),
            ]
        )
    )
    algorithms = [draw(st.sampled_from(list(ALGORITHMS))) for _ in range(draw(st.integers(1, 3)))]
    variants = tuple(
        Variant(
            name=f"variant {number}",
            algorithm=algorithm,
            weights=draw(st.dictionaries(st.sampled_from(names), shares)),
            pulls=draw(st.dictionaries(st.sampled_from(names), shares)),
            noise=draw(st.sampled_from([None, "shared", "per_group"])),
            sampling=draw(st.sampled_from([None, "poisson"] if algorithm in BY_RATES else [None, "poisson", "fixed"])),
            training=draw(st.sampled_from([{}, {"epochs": 3, "learning_rate": 0.25}, {"optimizer": ADAM}])),
            server=draw(st.sampled_from([{}, {"average": 0.25}, {"optimizer": ADAM}])),
        )
        for number, algorithm in enumerate(algorithms)
    )
    ledger = draw(st.none() | words)
    return Experiment(
        name=draw(words),
        rounds=draw(st.integers(1, 1000)),
        data=data,
        mechanism=MechanismConfig(groups, draw(st.sampled_from([0.5, AdaptiveClip(initial=0.25)]))),
        variants=variants,
        about=draw(words),
        model=draw(st.sampled_from([MlpConfig(), CnnConfig(kernel=5), LinearConfig()])),
        training=LocalTraining(epochs=draw(st.integers(1, 9)), batch_size=4, learning_rate=draw(shares)),
        server=ServerOptimizer({"name": "sgd", "learning_rate": draw(positive)}),
        seed=draw(st.integers(0, 2**31 - 1)),
        noise_seed=draw(st.none() | st.integers(0, 2**31 - 1)),
        evaluate_every=draw(st.integers(1, 100)),
        checkpoint_seconds=draw(positive),
        delta=draw(deltas),
        ledger=ledger,
        budgets=draw(st.dictionaries(st.sampled_from(names), st.builds(Budget, positive, deltas))) if ledger else {},
        on_budget_exhausted=draw(st.sampled_from(["stop", "drop_group"])),
    )


@pytest.mark.slow
@settings(deadline=None, max_examples=50)
@given(experiments())
def test_toml_round_trip(experiment):
    assert from_toml(to_toml(experiment), "x") == experiment


def test_optimizer_of_a_variant_replaces_the_rate():
    experiment = from_toml(TINY.read_text(), "tiny.toml")
    variant = replace(experiment.variants[0], name="adam", training={"optimizer": ADAM}, server={"optimizer": ADAM})
    experiment = replace(experiment, variants=(*experiment.variants, variant))
    training, server = from_toml(to_toml(experiment), "x").overrides(len(experiment.variants) - 1)
    assert training == replace(experiment.training, learning_rate=None, optimizer=OptimizerConfig(**ADAM))
    assert server == ServerOptimizer(OptimizerConfig(**ADAM))


@pytest.mark.parametrize("optimizer", [optax.adam(0.1), OptimizerConfig("adam", learning_rate=lambda round: 0.1)])
def test_experiment_has_optimizers_by_name_alone(optimizer):
    experiment = from_toml(TINY.read_text(), "tiny.toml")
    with raises_field("server.optimizer"):
        replace(experiment, server=ServerOptimizer(optimizer))
    with raises_field("training.optimizer"):
        replace(experiment, training=LocalTraining(optimizer=optimizer))


@pytest.mark.parametrize("samplings", [("fixed", "poisson"), ("fixed", "fixed"), ("poisson", "fixed")])
@pytest.mark.parametrize("epsilons", [{}, {"private": 5.0}])
def test_what_calibrates_a_variant_also_prints_its_epsilon(samplings, epsilons):
    """The accountant is the experiment's, also where no variant samples as the experiment does."""
    base, sampling = samplings
    variant = Variant("FedHDP", sampling=sampling, epsilons=epsilons)
    experiment = tiny(mechanism=replace(tiny().mechanism, sampling=base), variants=(variant,))
    [mechanism] = experiment.variant_mechanisms(experiment.build_mechanism())
    had = epsilon(mechanism, experiment.rounds, experiment.delta, experiment.run_accountant)["private"]
    asked = experiment.epsilon_targets(variant)["private"]
    assert 0.98 * asked <= had <= asked

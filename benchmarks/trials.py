"""Settings on a public basis that were tried: `python benchmarks/trials.py --seeds 0-2 SECTION…` runs and stores them.

Results are added to docs/results/basis-trials.json, whatever they are, and the tables of docs/results/basis-trials.md are
made anew from it (`--tables`: that alone). A trial that is stored is not run again. MNIST must be in the data directory.

Axis letters: N examples, F inputs, C channels.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy.stats import t as student

from fedhdp import AdaptiveClip, LocalTraining, Mechanism, PrivacyGroup, ServerOptimizer, mlp, simulate
from fedhdp.basis import cosine_basis, pca_basis, public_moments, random_basis, second_moments, with_basis
from fedhdp.data import FederatedData
from fedhdp.datasets import load_mnist, make_handwriting
from fedhdp.privacy.calibration import noise_multiplier_for

EPSILON, DELTA = 3.6, 1e-4
RESULTS = Path(__file__).parents[1] / "docs" / "results" / "basis-trials.json"
BEGIN, END = "<!-- tables of benchmarks/trials.py -->\n", "<!-- end of the tables -->"


@dataclass(frozen=True)
class Trial:
    """The paper's 2,000 clients with one digit each, of whom 5% opted out, and a training; by default the row `basis`."""

    algorithm: str = "fedhdp"  # dp: noise for all; none: no noise
    weight: float = 0.025
    clients: int = 2000
    basis: str = "cosine"  # none, pca, random, handwriting
    size: int = 64
    exponent: float = 0.25
    scale: float = 1.0
    features: str = ""  # scattering, convolution
    cohort: int = 100
    rounds: int = 500
    epochs: int = 3
    learning_rate: float = 0.5
    rate: float = 0.4
    final_rate: float = 0.0  # towards which the server's rate falls, round by round; 0: it is constant
    momentum: float = 0.9
    average: float = 0.99
    quantile: float = 0.5
    hidden: int = 50


BASE = Trial()
DP = replace(BASE, algorithm="dp", weight=1.0, rate=0.04, scale=2.35)
NO_NOISE = replace(BASE, algorithm="none", weight=1.0)


def vary(base: Trial, **values: tuple) -> list[Trial]:
    """The trial with each of the values, one field at a time."""
    return [replace(base, **{name: value}) for name, of_field in values.items() for value in of_field]


def _work(base: Trial) -> list[Trial]:
    """Cohorts against rounds at equal work, with server rates around the one that suits so many rounds."""
    trials = []
    for cohort, rounds in ((50, 1000), (200, 250), (400, 125)):
        average = 1 - 5 / rounds  # over the same share of the rounds
        for factor in (1.0, 2.0):
            rate = float(f"{base.rate * factor:.2g}")
            trials.append(replace(base, cohort=cohort, rounds=rounds, average=float(f"{average:.4g}"), rate=rate))
    return trials


SECTIONS = {
    "features": [
        replace(base, features=features, basis=basis, size=size, scale=1.0)
        for features, basis, size in (
            ("scattering", "handwriting", 64),
            ("convolution", "handwriting", 64),
            ("scattering", "pca", 30),
        )
        for base in (BASE, DP, NO_NOISE)
    ],
    "work": [*_work(BASE), *_work(DP)],
    "dp": [
        DP,
        *vary(
            DP,
            quantile=(0.2, 0.3, 0.7),
            rate=(0.03, 0.06),
            size=(36, 49, 81),
            scale=(1.6, 3.3),
            exponent=(0.15, 0.35),
            average=(0.98, 0.995),
            momentum=(0.8, 0.95),
            learning_rate=(0.25,),
            epochs=(1,),
        ),
        replace(DP, basis="handwriting", size=30, scale=1.0),
        *(replace(DP, basis="handwriting", size=size, scale=scale) for size in (30, 40) for scale in (1.6, 2.35)),
        replace(DP, basis="handwriting", size=64),
        replace(DP, average=0.995, rate=0.06),
        replace(DP, size=49, rate=0.06),
        replace(DP, size=49, average=0.995, rate=0.06),
        replace(DP, rate=0.08, final_rate=0.01),
        replace(DP, rate=0.06, final_rate=0.02),
        replace(DP, rate=0.1, final_rate=0.005, average=0.98),
        replace(DP, quantile=0.3, rate=0.06),
    ],
    "fedhdp": [
        BASE,
        *vary(
            BASE,
            size=(49, 81),
            exponent=(0.15, 0.35),
            momentum=(0.8, 0.95),
            average=(0.98, 0.995),
            learning_rate=(0.25, 1.0),
            epochs=(1, 6),
            quantile=(0.3, 0.7),
            rate=(0.2, 0.3),
        ),
        replace(BASE, basis="handwriting", size=30),
        replace(BASE, basis="handwriting", size=64),
        NO_NOISE,
    ],
}


def load(trial: Trial, seed: int) -> FederatedData:
    """The clients of a trial, with the levels `opted out` and `private`."""
    opted_out = trial.clients // 20
    return load_mnist("one_digit", trial.clients, test_samples=1, seed=seed).draw_levels(
        {"opted out": opted_out, "private": trial.clients - opted_out}, seed
    )


@cache
def noise_for(rate: float, rounds: int) -> float:
    """The least noise multiplier for the epsilon, by PLD."""
    return noise_multiplier_for(EPSILON, rate, rounds, DELTA, "pld")


def mechanism_of(trial: Trial) -> Mechanism:
    """The promise of a trial: every row with noise has the same epsilon."""
    rate = trial.cohort / trial.clients
    z = 0.0 if trial.algorithm == "none" else noise_for(rate, trial.rounds)
    opted_out = trial.clients // 20
    weight = trial.weight if trial.algorithm == "fedhdp" else 1.0
    groups = (
        PrivacyGroup("opted out", opted_out, z if trial.algorithm == "dp" else 0.0, rate),
        PrivacyGroup("private", trial.clients - opted_out, z, rate, weight),
    )
    return Mechanism(groups, AdaptiveClip(initial=0.5, quantile=trial.quantile))


def basis_of(trial: Trial, data: FederatedData) -> np.ndarray | None:
    """The matrix of a trial."""
    inputs, scale = math.prod(data.input_shape), np.float32(trial.scale)
    if trial.basis == "none":
        return None
    if trial.basis == "cosine":
        return cosine_basis(data.input_shape, trial.size, trial.exponent) * scale
    if trial.basis == "random":
        return random_basis(inputs, trial.size) * scale
    if trial.basis == "pca":
        return pca_basis(public_moments(data, ["opted out"]), trial.size, trial.exponent) * scale
    assert trial.basis == "handwriting"  # the package's own images, no client's data
    return pca_basis(second_moments(public_features(trial.features)), trial.size, trial.exponent) * scale


@cache
def public_features(kind: str) -> np.ndarray:
    """The features of the embedded handwriting, which are no client's data."""
    drawn = make_handwriting(500, split="by_writer", server_test=10)
    return featurize(kind, np.asarray(drawn.train.x_N), drawn.input_scale)


@cache
def feature_scale(kind: str) -> float:
    """What features are multiplied by, so that they are as long as images: of public images too."""
    lengths = [float(np.sqrt((public_features(of) ** 2).mean(axis=0).sum())) for of in ("", kind)]
    return lengths[0] / lengths[1]


def wavelets(width: int = 7, angles: int = 8) -> np.ndarray:
    """Morlet wavelets of two scales: complex, of mean 0, of shape [C, width, width]."""
    y, x = np.mgrid[:width, :width] - width // 2
    filters = []
    for sigma, frequency in ((0.8, 3 * math.pi / 4), (1.6, 3 * math.pi / 8)):
        for angle in np.arange(angles) * math.pi / angles:
            along = x * math.cos(angle) + y * math.sin(angle)
            envelope = np.exp(-(x**2 + y**2) / (2 * sigma**2))
            wave = np.exp(1j * frequency * along)
            wave = envelope * (wave - (envelope * wave).sum() / envelope.sum())
            filters.append(wave / np.abs(wave).sum())
    return np.stack(filters)


@partial(jax.jit, static_argnames="kind")
def _transform(images_N: jax.Array, kind: str) -> jax.Array:
    """Fixed features of images: nothing of them is learned."""

    def convolve(image_N: jax.Array, filter_C: np.ndarray) -> jax.Array:
        kernel = jnp.asarray(filter_C, jnp.float32)[:, None]
        return jax.lax.conv_general_dilated(image_N[:, None], kernel, (1, 1), "SAME")

    if kind == "scattering":  # first order: the mean modulus of each wavelet, and the mean of the image
        filters = wavelets()
        modulus = jnp.hypot(convolve(images_N, filters.real), convolve(images_N, filters.imag))
        maps = jnp.concatenate([images_N[:, None], modulus], axis=1)
    else:  # random filters, and relu
        filters = np.random.default_rng(0).normal(size=(16, 5, 5))
        filters -= filters.mean(axis=(1, 2), keepdims=True)
        filters /= np.sqrt((filters**2).sum(axis=(1, 2), keepdims=True))
        maps = jnp.concatenate([images_N[:, None], jax.nn.relu(convolve(images_N, filters))], axis=1)
    means = maps.reshape(*maps.shape[:2], 7, 4, 7, 4).mean(axis=(3, 5))
    return means.reshape(len(images_N), -1)


def featurize(kind: str, x_N: np.ndarray, input_scale: float | None) -> np.ndarray:
    """The features of images, as floats; without a kind the images."""
    if not kind:
        return np.asarray(x_N, np.float32).reshape(len(x_N), -1) * np.float32(input_scale or 1.0)
    parts = np.array_split(x_N, max(1, len(x_N) // 2000))
    scaled = (jnp.asarray(part, jnp.float32).reshape(-1, 28, 28) * (input_scale or 1.0) for part in parts)
    return np.concatenate([np.asarray(_transform(part, kind)) for part in scaled])


def with_features(data: FederatedData, kind: str) -> FederatedData:
    """The data with fixed features of its images as inputs."""
    if not kind:
        return data

    def convert(x_N: np.ndarray) -> np.ndarray:
        return featurize(kind, x_N, data.input_scale) * np.float32(feature_scale(kind))

    train, test = (part._replace(x_N=convert(part.x_N)) for part in (data.train, data.test))
    return data._replace(train=train, test=test, server_x_N=convert(data.server_x_N), input_scale=None)


def run(trial: Trial, seed: int) -> float:
    """The averaged model's accuracy on MNIST's test images, in percent."""
    data = with_features(load(trial, seed), trial.features)
    basis = basis_of(trial, data)
    if basis is None:
        model = mlp(math.prod(data.input_shape), trial.hidden, 10)
    else:
        model = with_basis(mlp(basis.shape[1], trial.hidden, 10), basis)
    training = LocalTraining(trial.epochs, 20, trial.learning_rate, personalize=False)
    rate: Any = trial.rate
    if trial.final_rate:
        rate = {
            "schedule": "linear_schedule",
            "init_value": rate,
            "end_value": trial.final_rate,
            "transition_steps": trial.rounds,
        }
    server = {"name": "sgd", "learning_rate": rate, "momentum": trial.momentum}
    optimizer = ServerOptimizer(server, average=trial.average)
    result = simulate(data, model, mechanism_of(trial), training, optimizer, trial.rounds, seed=seed)
    (value,) = (r.value for r in result.history if (r.group, r.model, r.metric) == ("server", "average", "accuracy"))
    return 100 * value


def changes(trial: Trial, base: Trial) -> dict[str, object]:
    """What differs from a base."""
    values, of_base = asdict(trial), asdict(base)
    return {name: value for name, value in values.items() if value != of_base[name]}


def key_of(trial: Trial) -> str:
    """A trial as the results name it."""
    return json.dumps(changes(trial, BASE))


def read_results() -> dict[str, dict[str, float]]:
    """Accuracies by trial and seed."""
    return json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}


def store(trial: Trial, seed: int, accuracy: float) -> None:
    """Add a result to the file, which another process may have written."""
    results = read_results()
    results.setdefault(key_of(trial), {})[str(seed)] = round(accuracy, 2)
    part = RESULTS.with_suffix(".part")
    lines = (f"{json.dumps(key)}: {json.dumps(values)}" for key, values in results.items())
    part.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    os.replace(part, RESULTS)


def describe(trial: Trial, base: Trial) -> str:
    """What is changed, in words."""
    words = {"learning_rate": "local rate", "rate": "server's rate", "basis": "basis of"}
    different = changes(trial, base)
    return ", ".join(f"{words.get(name, name)} {value}" for name, value in different.items()) or "as the row"


def interval(values: list[float]) -> str:
    """Mean and half of its 95% interval."""
    mean = statistics.mean(values)
    if len(values) < 2:
        return f"{mean:.2f}"
    return f"{mean:.2f} ±{student.ppf(0.975, len(values) - 1) * statistics.stdev(values) / len(values) ** 0.5:.2f}"


def table(name: str, results: dict[str, dict[str, float]]) -> Iterator[str]:
    """The lines of a section."""
    yield from ("| changed | accuracy | beside the row, same seeds | seeds |", "| --- | ---: | ---: | --- |")
    for trial in SECTIONS[name]:
        scores = results.get(key_of(trial))
        if not scores:
            continue
        base = {"dp": DP, "none": NO_NOISE}.get(trial.algorithm, BASE)
        beside = results.get(key_of(base), {})
        differences = [scores[seed] - beside[seed] for seed in scores if seed in beside]
        difference = interval(differences) if differences and trial != base else "–"
        label = {"dp": "DP-FedAvg: ", "none": "no noise: "}.get(trial.algorithm, "") + describe(trial, base)
        yield f"| {label} | {interval(list(scores.values()))} | {difference} | {', '.join(sorted(scores, key=int))} |"


def write_tables() -> None:
    """Make the tables of the page anew."""
    page, results = RESULTS.with_suffix(".md"), read_results()
    text = page.read_text(encoding="utf-8")
    head, tail = text.partition(BEGIN)[0], text.partition(END)[2]
    blocks = []
    for name, title in TITLES.items():
        lines = list(table(name, results))
        if len(lines) > 2:
            blocks.append(f"## {title}\n\n`python benchmarks/trials.py {name}`\n\n" + "\n".join(lines))
    page.write_text(head + BEGIN + "\n" + "\n\n".join(blocks) + "\n\n" + END + tail, encoding="utf-8")


TITLES = {
    "fedhdp": "FedHDP, non-IID MNIST",
    "dp": "DP-FedAvg, non-IID MNIST",
    "work": "Cohorts against rounds, at equal work",
    "features": "Fixed features: another model",
}


def main() -> None:
    """Run what is not stored yet, seed by seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=", ".join(SECTIONS))
    parser.add_argument("--seeds", default="0-2")
    parser.add_argument("--tables", action="store_true")
    options = parser.parse_args()
    first, _, last = options.seeds.partition("-")
    for seed in range(int(first), int(last or first) + 1):
        for section in [] if options.tables else options.sections:
            for trial in SECTIONS[section]:
                if str(seed) not in read_results().get(key_of(trial), {}):
                    accuracy = run(trial, seed)
                    store(trial, seed, accuracy)
                    print(f"{section} seed {seed}: {accuracy:.2f}  {describe(trial, BASE)}", flush=True)
    write_tables()


if __name__ == "__main__":
    main()

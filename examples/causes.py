"""What the paper leaves open, one thing at a time: how much each choice moves the global accuracy on non-IID MNIST.

    python examples/causes.py                      all choices, two seeds; about a quarter of an hour on two cores
    python examples/causes.py --only "base,whole batches" --seeds 3 --skewed --read last,best

Columns are non-private, DP-FedAvg and FedHDP at r = 0.025 and 0.1, each with its standard error over seeds. ``--read``
says what a run's evaluations, one in 20 rounds, come to: the mean of the last five (late), because one round's model is
worth half a point more or less; the last; or the best, which nobody could know who has no test set. Needs MNIST in the
data directory (`fedhdp data`). The four run together in one program; personal models do not touch the global one and
are left out.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from msgspec.structs import replace

from fedhdp.algorithms import dp_fedavg, non_private
from fedhdp.client import LocalTraining
from fedhdp.data import FederatedData
from fedhdp.datasets import load_mnist
from fedhdp.engine.round import RoundParamsBatch
from fedhdp.mechanism import SERVER, AdaptiveClip, Mechanism, PrivacyGroup
from fedhdp.models import Model, mlp
from fedhdp.simulation import Simulation

PAPER = LocalTraining(25, 20, 0.5, decay=0.9, decay_every=50, personalize=False)
CLIP = AdaptiveClip(initial=0.5)


class Choice(NamedTuple):
    """A way to fill in what the paper leaves open."""

    training: LocalTraining = PAPER
    clip: float | AdaptiveClip = CLIP
    sampling: str = "fixed"
    simulation: type[Simulation] = Simulation
    samples: int = 30
    model: Callable[[], Model] = mlp
    change: Callable[[FederatedData], FederatedData] = lambda population: population


class UniformCohorts(Simulation):
    """The paper's algorithm to the letter: so many clients of all there are, divided by how many of each group came.

    How many came of a group then depends on chance, and with it how much the group weighs in the round. Nothing in the
    package does this: who knows the others' groups learns from the denominators whether a client came.
    """

    def draw_cohort(self, round: int) -> np.ndarray:
        """Who is asked; the round's numbers follow who came."""
        count = int(self.mechanism.expected_cohort_size())
        drawn = np.random.default_rng([self.seed, 100, round]).choice(self.data.num_clients, count, replace=False)
        came_G = np.bincount(self.group_K[drawn], minlength=len(self.mechanism.groups))
        terms = [
            run.round_params._replace(expected_weight=np.float32(run.round_params.weight_G @ came_G))
            for run in self.runs
        ]
        terms_R = jax.tree.map(lambda *each: np.stack(each), *terms)
        no_pulls = np.zeros((0, len(came_G)), np.float32)
        self._round_params = self.engine.put(RoundParamsBatch(terms_R, no_pulls), self.engine.replicated)
        return np.sort(drawn)


def standardised(population: FederatedData) -> FederatedData:
    """Inputs less their mean, over their standard deviation."""

    def scale(x: np.ndarray) -> np.ndarray:
        return ((x / 255 - 0.1307) / 0.3081).astype(np.float32)

    train: Any = population.train
    test = population.test
    return population._replace(
        train=train._replace(x_N=scale(train.x_N)),
        test=test._replace(x_N=scale(test.x_N)),
        server_x_N=scale(population.server_x_N),
    )


def other_start() -> Model:
    """Weights and biases uniform within one over the root of the inputs."""
    plain = mlp()

    def init(key: jax.Array) -> Any:
        shapes = jax.eval_shape(plain.init, key)
        keys = jax.random.split(key, 4)

        def draw(key: jax.Array, shape: tuple[int, ...], inputs: int) -> jax.Array:
            return jax.random.uniform(key, shape, minval=-(inputs**-0.5), maxval=inputs**-0.5)

        first, rest = shapes["first"], shapes["rest"]
        return {
            "first": {"w": draw(keys[0], first["w"].shape, 784), "b": draw(keys[1], first["b"].shape, 784)},
            "rest": {"w": draw(keys[2], rest["w"].shape, 50), "b": draw(keys[3], rest["b"].shape, 50)},
        }

    return plain._replace(init=init)


CHOICES = {
    "base": Choice(),
    "whole batches": Choice(replace(PAPER, whole_batches=True)),
    "Poisson cohorts": Choice(sampling="poisson"),
    "cohorts of all clients": Choice(simulation=UniformCohorts),
    "whole batches and cohorts of all clients": Choice(replace(PAPER, whole_batches=True), simulation=UniformCohorts),
    "60 samples a client": Choice(samples=60),
    "20 samples a client": Choice(samples=20),
    "inputs standardised": Choice(change=standardised),
    "another start": Choice(model=other_start),
    "clip at quantile 0.3": Choice(clip=AdaptiveClip(0.5, quantile=0.3)),
    "clip at quantile 0.7": Choice(clip=AdaptiveClip(0.5, quantile=0.7)),
    "clip fixed at 0.5": Choice(clip=0.5),
    "clip bits noised at 20": Choice(clip=AdaptiveClip(0.5, bit_noise_stddev=20.0)),
    "rate 0.25": Choice(replace(PAPER, learning_rate=0.25)),
    "no decay": Choice(replace(PAPER, decay=1.0)),
    "5 epochs": Choice(replace(PAPER, epochs=5)),
}


def mechanism(weight: float, choice: Choice) -> Mechanism:
    """Two levels, 5% of the clients opted out."""
    groups = (PrivacyGroup("opted out", 100, 0.0, 0.05), PrivacyGroup("private", 1900, 1.5, 0.05, weight))
    return Mechanism(groups, choice.clip, sampling=choice.sampling)  # type: ignore[arg-type]


def accuracies(choice: Choice, seed: int, skewed: bool, rounds: int) -> np.ndarray:
    """The four columns for one seed, evaluation by evaluation."""
    split = ("skewed", 2000, 100) if skewed else ("one_digit", 2000, 0)
    population = choice.change(load_mnist(*split, choice.samples, 2, seed))  # type: ignore[arg-type]
    several = [non_private(mechanism(1.0, choice)), dp_fedavg(mechanism(1.0, choice))]
    several += [mechanism(0.025, choice), mechanism(0.1, choice)]
    simulation = choice.simulation(population, choice.model(), several, choice.training, seed=seed)
    simulation.run(rounds, evaluate_every=20)
    on_server = (SERVER, "global", "accuracy")
    columns = [[100 * row.value for row in rows if row[1:4] == on_server] for rows in simulation.histories]
    return np.transpose(columns)


READ = {
    "late": lambda found: found[-5:].mean(axis=0),
    "last": lambda found: found[-1],
    "best": lambda found: found.max(axis=0),
}


def main() -> None:
    """Run what was asked for and print a table."""
    parser = argparse.ArgumentParser(description="What the paper leaves open, one thing at a time.")
    parser.add_argument("--only", default=",".join(CHOICES), help="some of the choices, comma-separated")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--skewed", action="store_true", help="those who opted out all hold a 7")
    parser.add_argument("--read", default="late", help="what to make of a run's evaluations: late, last, best")
    given = parser.parse_args()
    only, reads = ([word.strip() for word in text.split(",")] for text in (given.only, given.read))
    for word, known in [(word, CHOICES) for word in only] + [(word, READ) for word in reads]:
        if word not in known:
            parser.error(f"no {word!r}; there are {', '.join(known)}")
    print("| choice | non-private | DP-FedAvg | r = 0.025 | r = 0.1 |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for name in only:
        runs = [accuracies(CHOICES[name], seed, given.skewed, given.rounds) for seed in range(given.seeds)]
        for read in reads:
            found = np.array([READ[read](run) for run in runs])
            errors = found.std(axis=0, ddof=1) / len(found) ** 0.5 if len(found) > 1 else np.full(4, np.nan)
            cells = [
                f"{mean:.2f}" + ("" if np.isnan(e) else f" ±{e:.2f}") for mean, e in zip(found.mean(axis=0), errors)
            ]
            shown = name if reads == ["late"] else f"{name}, {read}"
            print(f"| {shown} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()

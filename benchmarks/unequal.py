"""What clients of unequal size cost beside the ideal, in which each costs what it would among clients of its own size.

    python benchmarks/unequal.py                    clients in the sizes of TFF's federated EMNIST, digits
    python benchmarks/unequal.py --data writers     the 836 real writers of MNIST, from the data directory

The ideal is measured: data sets in which all clients have n examples give the seconds of a client of n, for
several n, and straight lines between them. The same training as the paper's FMNIST, with personal models.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time

import numpy as np

from fedhdp.client import LocalTraining
from fedhdp.clips import AdaptiveClip
from fedhdp.data import FederatedData, examples
from fedhdp.datasets import load_mnist, make_handwriting, tff_client_sizes
from fedhdp.mechanism import Mechanism, PrivacyGroup
from fedhdp.models import mlp
from fedhdp.simulation import Simulation

COHORT = 100
TRAINING = LocalTraining(50, 20, 0.01)


def seconds(data: FederatedData, rounds: int) -> float:
    """Seconds of a round with a cohort of a hundred."""
    group = PrivacyGroup("all", data.num_clients, 1.0, COHORT / data.num_clients)
    simulation = Simulation(data, mlp(), Mechanism((group,), AdaptiveClip(0.5), sampling="fixed"), TRAINING)
    ends = []

    def record(simulation: Simulation) -> None:
        simulation.wait()
        ends.append(time.perf_counter())

    simulation.run(rounds + 2, on_round=record)
    return statistics.median(end - start for start, end in itertools.pairwise(ends[1:]))


def alike(size: int) -> FederatedData:
    """Clients who all have this many random images."""
    rng = np.random.default_rng(size)
    x_N = rng.integers(0, 256, (500 * size, 28, 28), dtype=np.uint8)
    y_N = rng.integers(0, 10, 500 * size).astype(np.int32)
    clients = examples(x_N, y_N, np.full(500, size))
    return FederatedData("alike", clients, clients, x_N[:10], y_N[:10], 10, input_scale=1 / 255)


def main() -> None:
    """Measure both and print the ratio."""
    parser = argparse.ArgumentParser(description="Clients of unequal size beside the ideal.")
    parser.add_argument("--data", choices=("tff-sizes", "writers"), default="tff-sizes")
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    if arguments.data == "writers":
        data = load_mnist("by_writer")
    else:
        sizes, _ = tff_client_sizes(10, 0)
        data = make_handwriting(1000, split="by_writer", sizes=sizes[:1000].tolist(), test_samples=1, server_test=10)
    count_K = data.train.count_K
    grid = np.unique(np.linspace(count_K.min(), count_K.max(), 7).astype(int))
    seconds_of_size = [seconds(alike(int(size)), arguments.rounds) / COHORT for size in grid]
    for size, client_seconds in zip(grid, seconds_of_size, strict=True):
        print(f"clients of {size:4d} examples: {1000 * client_seconds:.3f} ms a client")
    ideal = COHORT * float(np.mean(np.interp(count_K, grid, seconds_of_size)))
    measured = seconds(data, arguments.rounds)
    spread = np.quantile(count_K, [0, 0.25, 0.5, 0.75, 1]).astype(int).tolist()
    print(f"{data.num_clients} clients of {spread} examples (quartiles): {1000 * measured:.0f} ms a round,")
    print(
        f"ideally {1000 * ideal:.0f} ms: {measured / ideal:.2f} times the ideal; all at the size of the largest it would be"
    )
    print(f"{COHORT * seconds_of_size[-1] / ideal:.2f} times")


if __name__ == "__main__":
    main()

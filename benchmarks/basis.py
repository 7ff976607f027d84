"""The time of a round with and without a public basis: `python benchmarks/basis.py`, at MNIST's shape.

The two models take turns. Beside the fastest round are the seconds of all cores, which other load on the machine moves less.
"""

from __future__ import annotations

import time

from fedhdp import AdaptiveClip, LocalTraining, Mechanism, PrivacyGroup, Simulation, mlp
from fedhdp.basis import cosine_basis, with_basis
from fedhdp.datasets import make_handwriting

TURNS, ROUNDS = 5, 40


def main() -> None:
    """Print milliseconds a round of both models, for few and for many local epochs."""
    data = make_handwriting(2000, samples=30, test_samples=1).draw_levels({"opted out": 100, "private": 1900}, 0)
    groups = (PrivacyGroup("opted out", 100, 0.0, 0.05), PrivacyGroup("private", 1900, 1.4, 0.05, weight=0.025))
    mechanism = Mechanism(groups, AdaptiveClip(initial=0.5))
    models = {"784 inputs": mlp(784, 50, 10), "64 cosines": with_basis(mlp(64, 50, 10), cosine_basis((28, 28), 64))}
    for epochs in (3, 25):
        training = LocalTraining(epochs=epochs, batch_size=20, learning_rate=0.5, personalize=False)
        simulations = {name: Simulation(data, model, mechanism, training) for name, model in models.items()}
        fastest, cores = dict.fromkeys(models, float("inf")), dict.fromkeys(models, float("inf"))
        for _ in range(TURNS + 1):  # the first turn compiles
            for name, simulation in simulations.items():
                begun = time.process_time()
                for _ in range(ROUNDS):
                    start = time.perf_counter()
                    simulation.run_round()
                    simulation.wait()
                    fastest[name] = min(fastest[name], time.perf_counter() - start)
                cores[name] = min(cores[name], (time.process_time() - begun) / ROUNDS)
        for name in models:
            times = f"{1000 * fastest[name]:.1f} ms a round, {1000 * cores[name]:.1f} ms of all cores"
            print(f"{epochs} epochs, {name}: {times}", flush=True)


if __name__ == "__main__":
    main()

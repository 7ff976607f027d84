"""A thousand virtual clients in Flower's simulation engine and in the project's own simulator, on the same rounds.

    python benchmarks/flower_scale.py [--clients 1000] [--rounds 20]

The Flower side is the example app with everything: enrollment by messages, ledger, checkpoints, and the ClientApp in
Flower's workers. The simulator trains the same model on the same clients with the same mechanism and local training. The
seconds per round leave out the first round, in which programs are compiled.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "examples" / "flower_app"))
from fleet import Fleet  # noqa: E402
from task import MODEL, SIMULATED_LEVELS  # noqa: E402

from fedhdp.datasets import make_handwriting  # noqa: E402
from fedhdp.flower import Deployment  # noqa: E402
from fedhdp.results.store import VariantDirectory  # noqa: E402
from fedhdp.simulation import Simulation, simulate  # noqa: E402

APP = ROOT / "examples" / "flower_app"
RATE, SAMPLES = 0.05, 30


def time_flower(clients: int, rounds: int) -> tuple[float, float]:
    """Seconds until the first round is completed, and seconds for each further round."""
    with tempfile.TemporaryDirectory(prefix="flower-scale-") as directory, Fleet(Path(directory)) as fleet:
        fleet.superlink("--insecure", "--simulation")
        started, completed_at = time.monotonic(), dict[int, float]()
        out = fleet.directory / "run"
        run_config = sampling_rates() | {
            "out": str(out),
            "ledger": str(fleet.directory / "ledger"),
            "rounds": rounds,
            "min_available_clients": clients,
            "evaluate_every": 0,
            "enroll_timeout_seconds": 300.0,
            "app.samples": SAMPLES,
        }
        run = fleet.submit(APP, clients, **run_config)
        fleet.follow(run)

        def is_done() -> bool:
            variant = out / "fedhdp"
            for row in VariantDirectory(variant).history() if variant.exists() else []:
                completed_at.setdefault(row.round, time.monotonic())
            return rounds in completed_at

        fleet.wait_for(run, is_done, 1800)
        return completed_at[1] - started, (completed_at[rounds] - completed_at[1]) / (rounds - 1)


def time_simulator(clients: int, rounds: int) -> tuple[float, float]:
    """The same for the project's own simulator."""
    levels = Counter(SIMULATED_LEVELS[k % len(SIMULATED_LEVELS)] for k in range(clients))
    deployment = Deployment.from_app(APP, rounds=rounds, **sampling_rates())
    started, completed_at = time.monotonic(), list[float]()

    def record_time(simulation: Simulation) -> None:
        simulation.wait()
        completed_at.append(time.monotonic())

    data = make_handwriting(clients, SAMPLES, SAMPLES // 3, 2000, "by_writer")
    mechanism, training = deployment.mechanism(levels), deployment.training
    simulate(data, MODEL, mechanism, training, rounds=rounds, on_round=record_time)
    return completed_at[0] - started, (completed_at[-1] - completed_at[0]) / (rounds - 1)


def sampling_rates() -> dict[str, object]:
    """The changes of the app's configuration that both sides share."""
    return {f"levels.{name}.sampling-rate": RATE for name in dict.fromkeys(SIMULATED_LEVELS)}


def main() -> None:
    """Run both and print their times."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    for name, engine in {"fedhdp's simulator": time_simulator, "Flower's simulation engine": time_flower}.items():
        with contextlib.suppress(KeyboardInterrupt):
            first, seconds = engine(arguments.clients, arguments.rounds)
            print(
                f"{name}: {arguments.clients} clients, {arguments.clients * RATE:.0f} a round on average: "
                f"{first:.1f} s to the end of the first round, then {seconds:.3f} s a round",
                flush=True,
            )


if __name__ == "__main__":
    main()

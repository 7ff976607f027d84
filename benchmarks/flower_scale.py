"""A thousand virtual clients through Flower's simulation engine, beside the project's own simulator, on the same rounds.

    python benchmarks/flower_scale.py [--clients 1000] [--rounds 20]

The Flower side is the example app, whole: registration by messages, ledger, checkpoints, the real ClientApp in Flower's
workers. The simulator trains the same model on the same clients with the same mechanism, seeds and local training. A
round's time is the mean of all but the first, in which things are compiled.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "examples" / "flower_app"))
from demo import Fleet  # noqa: E402
from task import LEVELS, MODEL  # noqa: E402

from fedhdp.client import LocalTraining  # noqa: E402
from fedhdp.datasets.handwriting import handwriting  # noqa: E402
from fedhdp.flower.config import Deployment  # noqa: E402
from fedhdp.privacy.calibration import PrivacyLevel  # noqa: E402
from fedhdp.results.store import VariantDirectory  # noqa: E402
from fedhdp.simulation import Simulation, simulate  # noqa: E402

RATE, SAMPLES = 0.05, 30
TRAINING = LocalTraining(epochs=10, batch_size=20, learning_rate=0.3)


def flower(clients: int, rounds: int) -> tuple[float, float]:
    """Seconds until the first round is done, and seconds a round after that."""
    with tempfile.TemporaryDirectory(prefix="flower-scale-") as folder, Fleet(Path(folder)) as fleet:
        fleet.superlink("--insecure", "--simulation")
        begun, at = time.monotonic(), dict[int, float]()
        out = fleet.folder / "run"
        rates = {f"levels.{name}.sampling-rate": RATE for name in dict.fromkeys(LEVELS)}
        settings = {"out": str(out), "ledger": str(fleet.folder / "ledger"), "rounds": rounds, "least_clients": clients}
        settings |= {"evaluate_every": 0, "gather_seconds": 300.0, "app.samples": SAMPLES}
        run = fleet.submit(ROOT / "examples" / "flower_app", clients, **settings, **rates)
        fleet.follow(run)

        def done() -> bool:
            part = out / "fedhdp"
            history = VariantDirectory(part).history() if part.exists() else []
            for row in history:
                at.setdefault(row.round, time.monotonic())
            return rounds in at

        fleet.wait_until(done, 1800, f"{rounds} rounds")
        return at[1] - begun, (at[rounds] - at[1]) / (rounds - 1)


def own(clients: int, rounds: int) -> tuple[float, float]:
    """The same of the project's own simulator."""
    counts = {name: sum(LEVELS[k % len(LEVELS)] == name for k in range(clients)) for name in dict.fromkeys(LEVELS)}
    levels = {
        "open": PrivacyLevel(sampling_rate=RATE, epsilon=float("inf")),
        "relaxed": PrivacyLevel(sampling_rate=RATE, epsilon=8.0, weight=0.003, pull=0.1),
        "strict": PrivacyLevel(sampling_rate=RATE, epsilon=2.0, weight=0.001),
    }
    mechanism = Deployment("-", "-", rounds, levels, clip=2.0).mechanism(counts)
    start, ends = time.monotonic(), list[float]()

    def record(simulation: Simulation) -> None:
        simulation.wait()
        ends.append(time.monotonic())

    data = handwriting(clients, SAMPLES, SAMPLES // 3, 2000, "by_writer")
    simulate(data, MODEL, mechanism, TRAINING, rounds=rounds, on_round=record)
    return ends[0] - start, (ends[-1] - ends[0]) / (rounds - 1)


def main() -> None:
    """Run both and print them beside each other."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    for name, engine in {"fedhdp's simulator": own, "Flower's simulation engine": flower}.items():
        with contextlib.suppress(KeyboardInterrupt):
            first, each = engine(arguments.clients, arguments.rounds)
            print(
                f"{name}: {arguments.clients} clients, {arguments.clients * RATE:.0f} a round on average: "
                f"{first:.1f} s to the end of the first round, then {each:.3f} s a round",
                flush=True,
            )


if __name__ == "__main__":
    main()

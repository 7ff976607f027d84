"""The paper's two shapes, and one of clients of unequal size, on whatever device JAX has, an accelerator above all.

    python benchmarks/gpu.py              a line for each
    python benchmarks/gpu.py --profile    and where a round of the second spends its time, kernel by kernel

Non-IID MNIST: 2,000 clients, about 100 a round, 30 samples, 25 epochs, the 784-50-10 network. FEMNIST: 3,400 clients, about
102 a round, 200 samples, 25 epochs in batches of 20, the convolutional network; then the same clients with as many samples
as TFF's have, 198 on average. All with personal models and an adaptive clip. Timed after compilation, with the drawing and
gathering of cohorts on the host, until the last result is there.
"""

from __future__ import annotations

import argparse
import collections
import gzip
import json
import tempfile
import time
from pathlib import Path

import jax
import numpy as np
from msgspec.structs import replace

from fedhdp.client import LocalTraining
from fedhdp.clips import AdaptiveClip
from fedhdp.data import FederatedData, examples
from fedhdp.datasets import tff_client_sizes
from fedhdp.devices import use_cpu_cores
from fedhdp.mechanism import Mechanism, PrivacyGroup
from fedhdp.models import Model, cnn, mlp
from fedhdp.simulation import Simulation


def noise_images(count_K: np.ndarray, classes: int) -> FederatedData:
    """Random images, this many for each client."""
    rng = np.random.default_rng(0)
    x_N = rng.integers(0, 256, (count_K.sum(), 28, 28), dtype=np.uint8)
    y_N = rng.integers(0, classes, count_K.sum()).astype(np.int32)
    clients = examples(x_N, y_N, count_K)
    return FederatedData("noise", clients, clients, x_N[:100], y_N[:100], classes, input_scale=1 / 255)


def seconds(
    data: FederatedData,
    model: Model,
    training: LocalTraining,
    rate: float,
    rounds: int,
    runs: int = 1,
    pulls: tuple[float, ...] = (0.05,),
    profile: bool = False,
) -> tuple[float, float]:
    """Seconds to compile and run the first two rounds, and seconds for the rounds after; a profile adds a round."""
    opted_out = data.num_clients // 20
    groups = (
        PrivacyGroup("open", opted_out, 0.0, rate),
        PrivacyGroup("private", data.num_clients - opted_out, 1.0, rate, 0.01),
    )
    mechanism = Mechanism(groups, AdaptiveClip(0.5), sampling="fixed")
    mechanisms = [
        replace(mechanism, groups=tuple(replace(g, weight=g.weight / (1 + r), pull=pull) for g in groups))
        for r in range(runs)
        for pull in pulls
    ]
    simulation = Simulation(data, model, mechanisms, training)
    start = time.monotonic()
    simulation.run(2)
    simulation.wait()
    compiled = time.monotonic()
    simulation.run(2 + rounds)
    simulation.wait()
    ended = time.monotonic()
    if profile:
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                simulation.run_round()
                simulation.wait()
            print_kernels(Path(folder))
    return compiled - start, ended - compiled


def print_kernels(folder: Path) -> None:
    """The kernels of a trace that took longest on the accelerator."""
    (file,) = folder.rglob("*.trace.json.gz")
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e.get("ph") == "M" and e["name"] == "process_name"}
    on_device = [e for e in events if e.get("ph") == "X" and "device:GPU" in names.get(e["pid"], "")]
    microseconds_by_name: collections.Counter[str] = collections.Counter()
    for event in on_device:
        microseconds_by_name[event["name"]] += event["dur"]
    for name, microseconds in microseconds_by_name.most_common(15):
        print(f"  {microseconds / 1000:8.2f} ms  {name}")


def main() -> None:
    """Time them and print a line for each."""
    parser = argparse.ArgumentParser(description="The paper's two shapes on an accelerator.")
    parser.add_argument("--profile", action="store_true", help="where a round of FEMNIST's shape spends its time")
    arguments = parser.parse_args()
    use_cpu_cores()
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}")
    slow_training, sizes_K = LocalTraining(learning_rate=0.02), tff_client_sizes(62, seed=0)[0]
    works = {
        "non-IID MNIST": (noise_images(np.full(2000, 30), 10), mlp(), LocalTraining(), 0.05, 500),
        "FEMNIST": (noise_images(np.full(3400, 200), 62), cnn(), slow_training, 0.03, 20),
        "FEMNIST, TFF's sizes": (noise_images(sizes_K, 62), cnn(), slow_training, 0.03, 20),
    }
    works["8 runs × 3 pulls of MNIST"] = (*works["non-IID MNIST"][:-1], 200, 8, (0.005, 0.05, 0.25))
    for name, work in works.items():
        compiling, running = seconds(*work, profile=arguments.profile and name == "FEMNIST")
        per_round = running / work[4]
        print(f"{name}: {work[4]} rounds in {running:.2f} s, {1000 * per_round:.2f} ms a round")
        print(f"  (compiled, with two rounds, in {compiling:.1f} s)")


if __name__ == "__main__":
    main()

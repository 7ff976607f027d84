"""What a larger population costs: the same cohort out of ten thousand clients and out of a million.

    python benchmarks/population.py                            10,000 and 1,000,000 clients, a cohort of 1,000
    python benchmarks/population.py --clients 10000,1000000 --cohort 1000 --rounds 12

Each line is the quickest of three processes, those of each size in turn, as other load on the machine only adds time;
beside it the slowest. Each has its own peak of memory. ``pool``: every client holds 30 images in a row of a
pool of images that lie in memory. ``handwriting``: every client's 30 images are generated on demand. Personal models
are on the devices where they fit, else in a file.
"""

from __future__ import annotations

import argparse
import itertools
import json
import resource
import statistics
import subprocess
import sys
import time

SAMPLES = 30


def measure(clients: int, cohort: int, rounds: int, data: str, personal: bool) -> dict:
    """Seconds of each round, and the peak memory of this process."""
    import numpy as np

    from fedhdp.client import LocalTraining
    from fedhdp.clips import AdaptiveClip
    from fedhdp.data import Examples, FederatedData, examples
    from fedhdp.datasets.handwriting import StreamedHandwriting, client_examples, make_handwriting, server_examples
    from fedhdp.mechanism import Mechanism, PrivacyGroup
    from fedhdp.models import mlp
    from fedhdp.simulation import Simulation

    count_K = np.full(clients, SAMPLES, np.int32)
    if data == "pool":
        pool = make_handwriting(1000, SAMPLES, 1, 1000)
        start_K = np.arange(clients) % 1000 * SAMPLES
        train: Examples | StreamedHandwriting = Examples(pool.train.x_N, pool.train.y_N, start_K, count_K)  # type: ignore[attr-defined]
    else:
        train = StreamedHandwriting(count_K, client_examples)
    tested_K = np.where(np.arange(clients) % (clients // 1000) == 0, 10, 0)
    test = examples(*client_examples(np.arange(clients), tested_K, part="test"), tested_K)
    federated = FederatedData("scale", train, test, *server_examples(1000), 10, input_scale=1 / 255)
    public, rate = clients // 20, cohort / clients
    groups = (PrivacyGroup("opted out", public, 0.0, rate), PrivacyGroup("private", clients - public, 1.5, rate, 0.01))
    training = LocalTraining(personalize=personal)
    simulation = Simulation(federated, mlp(), Mechanism(groups, AdaptiveClip(0.5), sampling="fixed"), training)
    ends: list[float] = []
    simulation.run(rounds + 3, on_round=lambda _: ends.append(time.perf_counter()))
    simulation.wait()
    seconds = [end - before for before, end in itertools.pairwise(ends[2:])]
    start = time.perf_counter()
    rows = simulation.evaluate()[0]
    return {
        "seconds": seconds,
        "evaluation": time.perf_counter() - start,
        "accuracy": rows[0].value,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "examples": type(simulation.examples).__name__,
        "personal": type(simulation.store).__name__,
    }


def main() -> None:
    """Measure each size in its own processes and print a table."""
    parser = argparse.ArgumentParser(description="The same cohort out of populations of growing size.")
    parser.add_argument("--clients", default="10000,1000000", help="sizes of the population")
    parser.add_argument("--cohort", type=int, default=1000, help="clients of a round")
    parser.add_argument("--rounds", type=int, default=12, help="timed rounds, after two")
    parser.add_argument("--turns", type=int, default=3, help="processes of each size, in turn; the quickest counts")
    parser.add_argument("--data", default="pool,handwriting", help="where examples come from")
    parser.add_argument("--measure", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(**arguments.measure)))
        return
    print(
        "| data | personal models | clients | seconds a round | slowest | against the first | peak MB | evaluation s |"
    )
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    sizes = [int(size) for size in arguments.clients.split(",")]
    for data, personal in itertools.product(arguments.data.split(","), (False, True)):
        reports: dict[int, list[dict]] = {clients: [] for clients in sizes}
        for _, clients in itertools.product(range(arguments.turns), sizes):
            task = {"clients": clients, "cohort": arguments.cohort, "rounds": arguments.rounds}
            task |= {"data": data, "personal": personal}
            process = subprocess.run(
                [sys.executable, __file__, "--measure", json.dumps(task)], check=True, capture_output=True, text=True
            )
            reports[clients].append(json.loads(process.stdout.splitlines()[-1]))
        medians = {clients: [statistics.median(report["seconds"]) for report in reports[clients]] for clients in sizes}
        for clients in sizes:
            quickest, against = min(medians[clients]), min(medians[clients]) / min(medians[sizes[0]])
            store = reports[clients][0]["personal"] if personal else "–"
            peak = max(report["peak_mb"] for report in reports[clients])
            line = (data, store, f"{clients:,}", f"{quickest:.3f}", f"{max(medians[clients]):.3f}", f"{against:.2f} ×")
            line += (f"{peak:.0f}", f"{min(report['evaluation'] for report in reports[clients]):.1f}")
            print("| " + " | ".join(line) + " |", flush=True)


if __name__ == "__main__":
    main()

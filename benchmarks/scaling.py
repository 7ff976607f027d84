"""Seconds and bytes of a round for a million and a hundred million clients on 1 to 64 GPUs, on paper.

    python benchmarks/scaling.py                the table
    python benchmarks/scaling.py --measure      the host's part, measured on this machine

A round is the sum of its parts, none of which overlap here:

    host       drawing a cohort and assigning slots, by the number of clients that are sampled
    launch     what a chunk of clients that train side by side takes, however few they are
    training   the models of the busiest GPU's share of the cohort
    transfer   the cohort's examples and personal models to the GPUs and back, where not all fit there
    sums       adding the updates over GPUs

Launch and training come from ``benchmarks/gpu.py``, the host's part from ``--measure``. Transfer and sums are bytes by the
bandwidths that manufacturers state. There are no measurements on several GPUs to compare with.

Axis letters: K clients of the population.
"""

from __future__ import annotations

import argparse
import math
import time
from typing import Any, NamedTuple

GB, GIB = 10**9, 2**30
LAUNCH_SECONDS = (32 * 2.49e-3 - 2 * 7.12e-3) / 30  # of 2 and of 32 models for each of 100 clients, non-IID MNIST
HOST_SECONDS = 1.4e-7  # for each client that is sampled
PCIE, NVLINK, NETWORK = 64 * GB, 450 * GB, 50 * GB  # bytes a second: PCIe 5.0 x16, NVLink 4, one way; 400 Gb/s a GPU
GPUS_OF_HOST = 8
EXAMPLES_LIMIT, PERSONAL_LIMIT = 8 * GIB, 96 * GIB  # of a GPU: `engine/examples.py`, `engine/personal_store.py`
SAMPLED = 0.01


class Work(NamedTuple):
    """A network and the examples of a client."""

    name: str
    samples: int
    parameters: int
    seconds: float  # of one model of one client
    chunk: int  # clients that train side by side on a GPU: `Engine._gpu_chunk`
    gram: bool  # Gram matrices are stored


WORKS = (
    Work("MNIST", 30, 39_760, (7.12e-3 - 2.49e-3) / 3000, 256, True),
    Work("FEMNIST", 200, 213_630, (213.38e-3 - LAUNCH_SECONDS) / 204, 128, False),
)


class Round(NamedTuple):
    """What a round takes."""

    seconds: dict[str, float]  # by part
    examples: float  # bytes on each GPU
    is_resident: bool  # all examples are on the GPUs
    personal: float  # bytes on each GPU

    @property
    def bound(self) -> str:
        """The part that takes longest."""
        return max(self.seconds, key=lambda part: self.seconds[part])


def predict(work: Work, clients: int, gpus: int) -> Round:
    """A round with a personal model for each client."""
    cohort, model_bytes = SAMPLED * clients, 4 * work.parameters
    share = cohort / gpus
    busiest = share if gpus == 1 else share + 3 * share**0.5  # clients are on a GPU by their number
    client_bytes = work.samples * 784 + (4 * work.samples**2 if work.gram else 0)
    is_resident = clients / gpus * work.samples * 784 <= EXAMPLES_LIMIT
    personal = clients / gpus * model_bytes
    sent = 0.0 if is_resident else busiest * work.samples * 784
    sent += 0.0 if personal <= PERSONAL_LIMIT else 2 * busiest * model_bytes
    bandwidth = NVLINK if gpus <= GPUS_OF_HOST else NETWORK
    seconds = {
        "host": HOST_SECONDS * cohort,
        "launch": LAUNCH_SECONDS * math.ceil(busiest / work.chunk),
        "training": 2 * busiest * work.seconds,
        "transfer": sent / PCIE,
        "sums": 2 * (gpus - 1) / gpus * model_bytes / bandwidth,
    }
    examples = (clients / gpus if is_resident else busiest) * client_bytes
    return Round(seconds, examples, is_resident, personal)


def table() -> str:
    """Markdown: a line for each work, population and number of GPUs."""
    header = ("work", "clients", "a round", "GPUs", "seconds", "of which host", "bound by")
    header += ("examples on a GPU", "personal models on a GPU")
    rows = [f"| {' | '.join(header)} |", "| --- |" + " ---: |" * 5 + " --- |" + " ---: |" * 2]
    for work in WORKS:
        for clients in (10**6, 10**8):
            for gpus in (1, 8, 64):
                of_round = predict(work, clients, gpus)
                total = sum(of_round.seconds.values())
                fits, places = of_round.personal <= PERSONAL_LIMIT, (", in a file", ": too many")
                cells = (
                    work.name,
                    f"{clients:,}",
                    f"{SAMPLED * clients:,.0f}",
                    str(gpus),
                    f"{total:,.0f}" if total >= 100 else f"{total:.2g}",
                    f"{of_round.seconds['host']:.2g}",
                    of_round.bound,
                    f"{of_round.examples / GB:.1f} GB" + ("" if of_round.is_resident else " of the cohort"),
                    f"{of_round.personal / GB:,.1f} GB" + ("" if fits else places[gpus > GPUS_OF_HOST]),
                )
                rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


class Slots:
    """What placement needs of an engine, without devices."""

    def __init__(self, devices: int):
        from types import SimpleNamespace

        self.devices, self.chunk, self.by_client = devices, 256, None
        self.config = SimpleNamespace(sizes=(30,), uniform_size=True)

    def put(self, value: Any, sharding: None) -> Any:
        """The same arrays."""
        return value


def measure(clients: int) -> tuple[float, float]:
    """Seconds of a core to draw a cohort and to assign its slots, and the host's bytes for each client."""
    import numpy as np

    from fedhdp import server
    from fedhdp.engine.placement import Placement, make_slot_table
    from fedhdp.engine.round import Engine
    from fedhdp.mechanism import Mechanism, PrivacyGroup

    for name in ("padded_cohort_size", "chunk_size"):
        setattr(Slots, name, getattr(Engine, name))
    group = PrivacyGroup("all", clients, 1.0, SAMPLED)
    mechanism, engine = Mechanism((group,), 1.0), Slots(8)
    count_K, start_K = np.full(clients, 30, np.int32), np.arange(clients, dtype=np.int64)
    group_K, participated_K, members_G = np.zeros(clients, np.int32), np.zeros(clients, bool), [np.arange(clients)]
    placement = Placement(engine, mechanism, count_K, by_owner=True)  # type: ignore[arg-type]
    seconds = []
    for round in range(3):
        start = time.process_time()
        cohort = server.sample_cohort(mechanism, members_G, np.random.default_rng(round))
        layout = placement.layout(cohort)
        row_C = layout.client_C // engine.devices
        make_slot_table(engine, layout, group_K, start_K[layout.client_C], count_K, row_C, participated_K)  # type: ignore[arg-type]
        participated_K[cohort] = True
        seconds.append(time.process_time() - start)
    arrays = (count_K, start_K, group_K, participated_K, *members_G)
    return min(seconds), sum(array.nbytes for array in arrays) / clients


def main() -> None:
    parser = argparse.ArgumentParser(description="A round on many GPUs, on paper.")
    parser.add_argument("--measure", action="store_true", help="measure the host's part on this machine")
    if not parser.parse_args().measure:
        print(table())
        return
    for clients in (10**6, 10**7, 10**8):
        seconds, size = measure(clients)
        each = 1e6 * seconds / (SAMPLED * clients)
        print(
            f"{clients:,} clients: {seconds:.3f} s, {each:.2f} µs for each that is sampled, {size:.0f} bytes a client"
        )


if __name__ == "__main__":
    main()

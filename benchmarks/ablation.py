"""What each part of the engine is worth: a round of each work as it is, and with a part changed.

    python benchmarks/ablation.py                          all works, all changes
    python benchmarks/ablation.py --work femnist --rounds 9
    python benchmarks/ablation.py --changes "as it is,--xla_cpu_multi_thread_eigen=false"     a flag of XLA

Each line has a process of its own. Beside the seconds of a round are the seconds of all cores, which other load on the
machine moves less.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE / "peers"), str(HERE.parent)]
import work as w  # noqa: E402


def no_rewriting() -> None:
    """Convolutions and pooling as they are written."""
    from fedhdp.engine import network

    network.rewrite = lambda *arguments: network.Used()  # type: ignore[assignment]


def all_parameters() -> None:
    """No training in the span of the examples."""
    from fedhdp.engine import network

    network.find_first_layer = lambda *arguments: None  # type: ignore[assignment]


def no_random_bits() -> None:
    """Dropout of every other unit, which costs no random bits: what cheaper bits could gain at most."""
    import jax
    import jax.numpy as jnp

    jax.random.bernoulli = lambda key, p, shape: (jnp.arange(shape[-1]) % 2 == 0) & jnp.ones(shape, bool)  # type: ignore[assignment]


def clients_side_by_side() -> None:
    """All clients of a chunk in one product, where they train one after the other."""
    import jax

    from fedhdp.engine import chunk

    chunk._one_by_one = jax.vmap  # type: ignore[assignment]


def chunks_of(clients: int) -> Callable[[], None]:
    """Chunks of about so many clients: of as many as divide the cohort's share of a core."""

    def change() -> None:
        from fedhdp.engine.round import Engine

        initialize = Engine.__init__

        def with_chunk(self: Engine, *arguments: object) -> None:
            initialize(self, *arguments)  # type: ignore[arg-type]
            self.chunk = clients

        Engine.__init__ = with_chunk  # type: ignore[assignment,method-assign]

    return change


CHANGES: dict[str, Callable[[], None]] = {
    "as it is": lambda: None,
    "no rewriting": no_rewriting,
    "all parameters": all_parameters,
    "no random bits": no_random_bits,
    "side by side": clients_side_by_side,
    **{f"chunks of {clients}": chunks_of(clients) for clients in (1, 4, 20, 40)},
}


def measure(name: str, change: str, personal: bool, rounds: int) -> dict[str, float]:
    """Seconds of a round and of all cores, after two rounds of warm-up."""
    if change.startswith("--"):  # a flag of XLA
        os.environ["XLA_FLAGS"] = change
    else:
        CHANGES[change]()
    import fedhdp

    fedhdp.use_cpu_cores()
    import fedhdp_rounds

    work = w.from_dict({"name": name})
    options = {"personal": personal, "network": "jax" if name == "sequence" else "built-in"}
    simulation, _ = fedhdp_rounds.make_simulation(work, work.data(), options)
    seconds, of_cores = [], 0.0
    for number in range(rounds + 2):
        start, cpu = time.perf_counter(), time.process_time()
        simulation.run_round()
        simulation.wait()
        if number >= 2:
            seconds.append(time.perf_counter() - start)
            of_cores += (time.process_time() - cpu) / rounds
    return {"seconds": statistics.median(seconds), "of_cores": of_cores}


def main() -> None:
    parser = argparse.ArgumentParser(description="What each part of the engine is worth.")
    parser.add_argument("--work", default=",".join(w.WORKS), help="some works")
    parser.add_argument("--changes", default=",".join(CHANGES), help="some changes")
    parser.add_argument("--personal", action="store_true", help="with personal models")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds")
    parser.add_argument("--measure", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(*arguments.measure)))
        return
    print("| work | change | seconds a round | seconds of all cores | beside the first |")
    print("| --- | --- | ---: | ---: | ---: |")
    for name in arguments.work.split(","):
        first = None
        for change in arguments.changes.split(","):
            task = [name, change, arguments.personal, arguments.rounds]
            command = [sys.executable, __file__, "--measure", json.dumps(task)]
            output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            measured = json.loads(output.splitlines()[-1])
            first = first or measured
            ratio = measured["of_cores"] / first["of_cores"]
            cells = (name, change, f"{measured['seconds']:.4f}", f"{measured['of_cores']:.4f}", f"{ratio:.2f} ×")
            print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()

"""A deployment on one machine: a SuperLink, five SuperNodes with three privacy levels, and a table of results.

    python demo.py                # in a temporary directory; every process is stopped afterwards
    python demo.py --simulate 20  # no SuperNodes: twenty virtual clients; needs Ray
    python demo.py --keep DIR     # in a directory that stays

It ends with status 1 and one line if the run fails; then the logs stay.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from fleet import Fleet, FleetError

APP = Path(__file__).parent
LEVEL_OF_OWNER = {"anna": "open", "ben": "relaxed", "cleo": "relaxed", "dan": "strict", "eve": None}  # Eve chooses none
PATIENCE_SECONDS = 300  # more than the app's reply-timeout-seconds
EXPECTED_WARNING = re.compile("--insecure|authentication is disabled")


def parse_arguments() -> argparse.Namespace:
    """The command's arguments, once everything that they need is installed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--keep", type=Path, metavar="DIR", help="work in this directory, which stays")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--simulate", type=int, metavar="N", help="with N virtual clients")
    parser.add_argument(
        "--patience",
        type=float,
        default=PATIENCE_SECONDS,
        metavar="SECONDS",
        help="how long the run may make no progress (default: %(default)g)",
    )
    arguments = parser.parse_args()
    for option in ("rounds", "simulate", "patience"):
        value = getattr(arguments, option)
        if value is not None and not 0 < value < float("inf"):
            parser.error(f"--{option} must be above 0, got {value}")
    if arguments.keep is not None and results_of(arguments.keep).exists():
        parser.error(f"--keep {arguments.keep} has a finished run: name another directory")
    if importlib.util.find_spec("flwr") is None:
        parser.error("Flower is not installed: pip install 'fedhdp[flower]'")
    if arguments.simulate and importlib.util.find_spec("ray") is None:
        parser.error("--simulate needs Ray, which is not installed: pip install 'flwr[simulation]'")
    return arguments


def main() -> None:
    """Run the demonstration, and keep its directory if that was wanted or the run fails."""
    arguments = parse_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    directory, stays = arguments.keep or Path(tempfile.mkdtemp(prefix="flower-demo-")), arguments.keep is not None
    try:
        run_demo(directory.resolve(), arguments)
    except (FleetError, OSError) as error:
        stays = True
        sys.exit(f"demo.py: {error}; all logs are in {directory}")
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        if not stays:
            shutil.rmtree(directory, ignore_errors=True)


def results_of(directory: Path) -> Path:
    """The file that a run writes last."""
    return directory / "run" / "summary.json"


def run_demo(directory: Path, arguments: argparse.Namespace) -> None:
    """Start the processes, submit a run, wait until it is completed, print its results, and stop everything."""
    started, results, ledger = time.monotonic(), results_of(directory), directory / "population.ledger"
    run_config = {"out": str(results.parent), "ledger": str(ledger), "rounds": arguments.rounds}
    with Fleet(directory) as fleet:
        if arguments.simulate:
            fleet.superlink("--insecure", "--simulation")
            run_config["min_available_clients"] = arguments.simulate
        else:
            fleet.superlink()
            start_supernodes(fleet)
        run = fleet.submit(APP, arguments.simulate or 0, **run_config)
        print(f"run {run} at 127.0.0.1:{fleet.port}, logs in {fleet.directory}", flush=True)
        wait_for_results(fleet, run, results, arguments.patience)
        print_results(results, ledger)
        print(f"{time.monotonic() - started:.0f} seconds in all; stopping everything", flush=True)


def start_supernodes(fleet: Fleet) -> None:
    """Start a SuperNode for each owner, with the level that the owner chose."""
    for number, (owner, level) in enumerate(LEVEL_OF_OWNER.items()):
        privacy = {} if level is None else {"privacy": level}
        fleet.supernode(owner, wait=False, partition_id=number, directory=str(fleet.directory / owner), **privacy)
    print(", ".join(f"{owner}: {level or 'no choice'}" for owner, level in LEVEL_OF_OWNER.items()), flush=True)


def wait_for_results(fleet: Fleet, run: str, results: Path, patience: float) -> None:
    """Wait until a run has written its results; print its rounds, and the warnings of all processes."""
    fleet.follow(run)
    printed_lines, printed_warnings = dict.fromkeys(fleet.processes, 0), set[str]()

    def print_once(text: str) -> None:
        """Print a warning, unless it differs in numbers alone from one before: a lost connection is tried every second."""
        if (kind := re.sub(r"[\d.]+", "", text)) not in printed_warnings:
            printed_warnings.add(kind)
            print(text, flush=True)

    def is_done() -> bool:
        for name, printed in printed_lines.items():
            *lines, _ = fleet.log_text(name).split("\n")  # the last line may be half written
            printed_lines[name] = len(lines)
            for line in lines[printed:]:
                text = line_to_print(name, line)
                if text is not None:
                    print(text, flush=True) if name.startswith("run ") else print_once(text)
            if not results.exists() and (status := fleet.processes[name].poll()) is not None and name in LEVEL_OF_OWNER:
                print_once(f"warning: {name} ended with status {status} (log: {fleet.log(name)})")
        return results.exists()

    fleet.wait_for(run, is_done, patience)


def line_to_print(name: str, line: str) -> str | None:
    """What is printed of a line of a log: rounds and clients of the run, and warnings."""
    level, separator, text = line.partition(":")
    is_run = name.startswith("run ")
    if separator and level.strip() in ("WARNING", "ERROR") and not EXPECTED_WARNING.search(text):
        return f"{level.strip().lower()}{'' if is_run else f' of {name}'}: {text.strip()}"
    return text.strip() if is_run and text.strip().startswith(("round ", "client ", "waiting ")) else None


def print_results(results: Path, ledger: Path) -> None:
    """Print the table of results and the ledger."""
    from fedhdp.results.schema import Summary
    from fedhdp.results.store import read_value
    from fedhdp.results.tables import format_table

    print("\n" + format_table(read_value(results, Summary).variants), flush=True)
    command = [sys.executable, "-m", "fedhdp", "ledger", "show", str(ledger)]
    print("\n" + subprocess.run(command, capture_output=True, text=True, check=True).stdout, flush=True)


if __name__ == "__main__":
    main()

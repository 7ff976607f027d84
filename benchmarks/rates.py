"""Rows of `fedhdp reproduce levels` at other server rates than the rule's: `python benchmarks/rates.py three-basis`.

The comparison is fair only if its rate suits every row. So each row with noise is run at multiples of its rate; × 1 is the
row as the table has it. Runs are stored in OUT, a folder for each part and seed; finished ones are not run again.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import fmean

from msgspec.structs import replace

from fedhdp.algorithms import ALGORITHMS
from fedhdp.cli._compilation_cache import use_compilation_cache
from fedhdp.experiments import runner
from fedhdp.experiments.variant import Variant
from fedhdp.reproduction.extensions import make_parts
from fedhdp.results import store
from fedhdp.results.schema import Summary


def at_rate(variant: Variant, factor: float) -> Variant:
    """The row at a multiple of its rate."""
    optimizer = variant.server["optimizer"]
    rate = float(f"{optimizer['learning_rate'] * factor:.2g}")
    return replace(
        variant, name=f"{variant.name} x{factor:g}", server={"optimizer": {**optimizer, "learning_rate": rate}}
    )


def run(part: str, seed: int, factors: list[float], algorithms: list[str], out: Path) -> dict[str, float]:
    """The accuracy of the averaged model by row and factor."""
    folder, experiment = out / f"{part}-{seed}", make_parts("levels", part, (seed,))[0].experiment
    if (folder / store.SUMMARY_FILE).exists():
        summary = store.read_value(folder / store.SUMMARY_FILE, Summary)
    else:
        noisy = [variant for variant in experiment.variants if variant.algorithm in algorithms]
        variants = tuple(at_rate(variant, factor) for variant in noisy for factor in factors)
        summary = runner.run(replace(experiment, variants=variants), folder, lambda _: True)
    return {variant.name: 100 * (variant.value("accuracy", "average") or 0.0) for variant in summary.variants}


def main() -> None:
    """Run the seeds, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["two-basis", "three-basis", "five-basis"])
    parser.add_argument("--seeds", type=int, default=1, help="the first so many")
    parser.add_argument("--factors", type=float, nargs="+", default=[0.5, 1, 2, 4])
    parser.add_argument("--algorithms", nargs="+", default=[name for name in ALGORITHMS if name != "non_private"])
    parser.add_argument("--out", type=Path, default=Path("runs/rates"))
    options = parser.parse_args()
    use_compilation_cache()
    seeds = [run(options.part, seed, options.factors, options.algorithms, options.out) for seed in range(options.seeds)]
    print("| row | " + " | ".join(f"× {factor:g}" for factor in options.factors) + " |")
    print("| --- |" + " ---: |" * len(options.factors))
    for row in dict.fromkeys(name.rpartition(" x")[0] for name in seeds[0]):
        means = (fmean(seed[f"{row} x{factor:g}"] for seed in seeds) for factor in options.factors)
        print(f"| {row} | " + " | ".join(f"{mean:.1f}" for mean in means) + " |")


if __name__ == "__main__":
    main()

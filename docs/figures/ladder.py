"""From DP-FedAvg to the best row at one epsilon: `python docs/figures/ladder.py` writes ladder.png beside it.

The numbers are those of committed summaries, which `fedhdp reproduce noniid-mnist --pulls none --rows ROWS` measures.
"""

from __future__ import annotations

from pathlib import Path

from matplotlib import pyplot as plt

from fedhdp.reproduction.summary import Cell, Comparison, read_summary
from fedhdp.results.palette import COLOURS, GRID_COLOUR, STYLE

FOLDER = Path(__file__).parent
SUMMARIES = ("noniid-mnist-ladder", "noniid-mnist-20-seeds", "noniid-mnist-basis")
RUNGS = {
    "dp": "DP-FedAvg: the strictest noise for all",
    "pld r=0.025": "FedHDP: each group its noise and weight",
    "basis-dp": "DP-FedAvg on a public basis, 3 epochs",
    "together-tuned r=0.01": "FedHDP with momentum on the server",
    "basis r=0.025": "FedHDP on a public basis, 3 epochs",
}  # all at one epsilon
CEILING = "ceiling"  # the same network without noise
COLUMN = "average"  # the averaged model, which all of these runs have


def read_rows() -> dict[str, tuple[Comparison, str, Cell]]:
    """The table, the algorithm and the accuracy of each row, by its label."""
    rows = {}
    for name in SUMMARIES:
        table = read_summary(FOLDER.parent / "results" / name / "summary.json")
        for line in table.global_lines:
            rows[line.key.row] = (table, line.key.algorithm, line.cells[COLUMN])
    return rows


def epsilons(rows: dict[str, tuple[Comparison, str, Cell]]) -> set[float]:
    """The epsilons of private clients in the rungs."""
    costs = (cost for label in RUNGS for cost in rows[label][0].costs if label in cost.rows and cost.group == "private")
    return {round(cost.epsilon, 2) for cost in costs if cost.epsilon is not None}


def main() -> None:
    """Draw a point for each rung, and a line for the model without noise."""
    rows = read_rows()
    (epsilon,) = epsilons(rows)  # one epsilon, or there is no ladder
    counts = sorted({rows[label][2].count for label in [*RUNGS, CEILING]})
    gain = rows[list(RUNGS)[-1]][2].mean - rows[next(iter(RUNGS))][2].mean
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(7.5, 3.0), layout="constrained")
        for place, label in enumerate(RUNGS):
            _, algorithm, cell = rows[label]
            axes.errorbar(cell.mean, place, xerr=cell.half, fmt="o", capsize=4, color=COLOURS[algorithm])
            axes.annotate(f"{cell.mean:.1f}", (cell.mean, place), (0, 7), textcoords="offset points", ha="center")
        ceiling = rows[CEILING][2].mean
        axes.axvline(ceiling, color=COLOURS["non_private"])
        place = (ceiling, 0)
        style = {"ha": "right", "va": "center", "color": COLOURS["non_private"]}
        axes.annotate(f"without noise, {ceiling:.1f}", place, (-5, 0), textcoords="offset points", **style)
        axes.set_yticks(range(len(RUNGS)), RUNGS.values())
        axes.set(ylim=(len(RUNGS) - 0.5, -0.7), xlabel="accuracy on MNIST's test images, %; 95% intervals")
        axes.grid(axis="x", color=GRID_COLOUR)
        title = f"At ε = {epsilon:g} FedHDP on a public basis is {gain:.1f} points above DP-FedAvg"
        figure.suptitle(f"{title} ({counts[0]} to {counts[-1]} seeds)", fontsize=10)
        figure.savefig(FOLDER / "ladder.png", dpi=160)


if __name__ == "__main__":
    main()

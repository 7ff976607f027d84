"""From DP-FedAvg to the best row at one epsilon: `python docs/figures/ladder.py` writes ladder.png beside it.

The numbers are those of committed summaries, which `fedhdp reproduce noniid-mnist --pulls none --rows ROWS` measures.
"""

from __future__ import annotations

from pathlib import Path

from matplotlib import pyplot as plt

from fedhdp.reproduction.summary import Cell, Comparison, read_summary
from fedhdp.results.palette import COLOURS, GRID_COLOUR, STYLE

FOLDER = Path(__file__).parent
SUMMARIES = ("noniid-mnist-ladder", "noniid-mnist-20-seeds", "noniid-mnist-basis", "noniid-mnist-scattering")
RUNGS = {
    "dp": "DP-FedAvg: the strictest noise for all",
    "pld r=0.025": "FedHDP: each group its noise and weight",
    "basis-dp": "DP-FedAvg on a public basis, 3 epochs",
    "together-tuned r=0.01": "FedHDP with momentum on the server",
    "basis r=0.025": "FedHDP on a public basis, 3 epochs",
}
ANOTHER_MODEL = {
    "scattering-dp": "DP-FedAvg on 64 scattering features",
    "scattering r=0.025": "FedHDP on 64 scattering features",
}  # below a line; all rows are at one epsilon
CEILINGS = ("ceiling", "scattering-none")  # the network, and the other model, without noise
GAP = 0.6  # between the models
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
    labels = (*RUNGS, *ANOTHER_MODEL)
    costs = (
        cost for label in labels for cost in rows[label][0].costs if label in cost.rows and cost.group == "private"
    )
    return {round(cost.epsilon, 2) for cost in costs if cost.epsilon is not None}


def main() -> None:
    """Draw a point for each rung, and lines for the models without noise."""
    rows, rungs = read_rows(), RUNGS | ANOTHER_MODEL
    (epsilon,) = epsilons(rows)  # one epsilon, or there is no ladder
    counts = sorted({rows[label][2].count for label in [*rungs, *CEILINGS]})
    first, *_, best = RUNGS
    gain = rows[best][2].mean - rows[first][2].mean
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(7.5, 4.2), layout="constrained")
        places = {label: number + GAP * (label in ANOTHER_MODEL) for number, label in enumerate(rungs)}
        for label, place in places.items():
            _, algorithm, cell = rows[label]
            face = {"markerfacecolor": "white"} if label in ANOTHER_MODEL else {}
            axes.errorbar(cell.mean, place, xerr=cell.half, fmt="o", capsize=4, color=COLOURS[algorithm], **face)
            axes.annotate(f"{cell.mean:.1f}", (cell.mean, place), (0, 7), textcoords="offset points", ha="center")
        border, end = len(RUNGS) - 0.4, places[label] + 0.5
        axes.axhline(border, color=GRID_COLOUR)
        style = {"textcoords": "offset points", "va": "top"}
        axes.annotate("another model", (0, border), (5, -4), xycoords=("axes fraction", "data"), **style)
        for label, low, high in zip(CEILINGS, (-0.7, border), (border, end), strict=True):
            ceiling = rows[label][2].mean
            axes.vlines(ceiling, low, high, color=COLOURS["non_private"])
            text = f"without noise, {ceiling:.1f}"
            axes.annotate(text, (ceiling, low), (-5, -4), ha="right", color=COLOURS["non_private"], **style)
        axes.set_yticks(list(places.values()), rungs.values())
        axes.set(ylim=(end, -0.7), xlabel="accuracy on MNIST's test images, %; 95% intervals")
        axes.grid(axis="x", color=GRID_COLOUR)
        title = f"At ε = {epsilon:g} FedHDP on a public basis is {gain:.1f} points above DP-FedAvg"
        figure.suptitle(f"{title} ({counts[0]} to {counts[-1]} seeds)", fontsize=10)
        figure.savefig(FOLDER / "ladder.png", dpi=160)


if __name__ == "__main__":
    main()

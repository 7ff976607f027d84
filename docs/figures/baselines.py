"""FedHDP beside its baselines, from a committed table: `python docs/figures/baselines.py` writes baselines.png beside it."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

from matplotlib import pyplot as plt
from scipy.stats import t as student

FOLDER = Path(__file__).parent
TABLE = FOLDER.parent / "results" / "noniid-mnist-20-seeds" / "summary.json"
BASELINES = {
    "non_private": ("without noise", "#2e7d32"),
    "dp_fedavg": ("DP-FedAvg: everybody the strictest noise", "#8e3b46"),
}


def interval(values: list[float]) -> tuple[float, float]:
    """The mean and half of its 95% interval."""
    half = student.ppf(0.975, len(values) - 1) * statistics.stdev(values) / len(values) ** 0.5
    return statistics.mean(values), half


def main() -> None:
    """Draw the global model's accuracy against the weight of the private clients."""
    table = json.loads(TABLE.read_text(encoding="utf-8"))
    rows = [row for row in table["rows"] if row["part"] == "paper"]
    _, axes = plt.subplots(figsize=(7.5, 3.4), layout="constrained")
    for algorithm, (label, color) in BASELINES.items():
        (row,) = (row for row in rows if row["algorithm"] == algorithm)
        mean, half = interval(row["cells"]["acc_g"])
        axes.axhline(mean, color=color)
        axes.axhspan(mean - half, mean + half, color=color, alpha=0.15, linewidth=0)
        axes.annotate(f"{label}, {mean:.1f}%", (0, mean + half), (4, 4), textcoords="offset points", color=color)
    fedhdp = sorted((row for row in rows if row["algorithm"] == "fedhdp"), key=lambda row: row["weight"])
    means, halves = zip(*(interval(row["cells"]["acc_g"]) for row in fedhdp), strict=True)
    places = range(len(fedhdp))
    axes.errorbar(places, means, halves, marker="o", capsize=4, color="#1a4f8b")
    best = max(places, key=means.__getitem__)
    axes.annotate(
        f"FedHDP: each group its own noise and weight, {means[best]:.1f}%",
        (best, means[best] + halves[best]),
        (-150, 6),
        textcoords="offset points",
        color="#1a4f8b",
    )
    axes.set_xticks(places, [f"{row['weight']:g}" for row in fedhdp])
    axes.set_xlabel("weight r of an update of a private client; one of an opted-out client weighs 1")
    axes.set_ylabel("accuracy, %")
    axes.set_title(f"Non-IID MNIST, 5% opted out: global model, {len(table['seeds'])} seeds", loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.04, y=0.12)
    plt.savefig(FOLDER / "baselines.png", dpi=160)


if __name__ == "__main__":
    main()

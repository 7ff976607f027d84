"""The results as a table, and as a figure that can be read in black and white."""

from __future__ import annotations

from pathlib import Path
from typing import Any

OURS = ("fedhdp", "fedhdp+personal")


def table(result: dict[str, Any]) -> str:
    """Markdown: every contender, the floor of the arithmetic, the sweeps."""
    ours = result["seconds_per_round"]["fedhdp"]
    rows = ["| what | setting | seconds a round | min – max | against fedhdp | peak MB | work done |"]
    rows += ["| --- | --- | ---: | ---: | ---: | ---: | --- |"]
    for name, peer in result["peers"].items():
        if peer["seconds"] is None:
            rows.append(f"| {name} | – | – | – | – | – | {peer['reason']} |")
            continue
        each, check = peer["spread"], peer["check"]
        against = f"{peer['seconds'] / ours:.1f} ×" if ours else "–"
        done = f"{check['steps']:,.0f} steps, loss {check['loss_before']:.2f} → {check['loss_after']:.2f}"
        if not peer["did_the_work"]:
            done = f"NOT the work: {done}"
        rows.append(
            f"| {name} | {peer['setting']} | {peer['seconds']:.4f} | {each['min']:.4f} – {each['max']:.4f} "
            f"| {against} | {peer['memory_mb']:,.0f} | {done} |"
        )
    floor = result["naive_at_peak"]
    rows += ["", f"Matrix products at their peak: {result['gemm_gflops']:.0f} GFLOP/s; "]
    rows[-1] += f"the plain arithmetic of a round with personal models at that rate: {floor:.4f} s."
    personal = result["seconds_per_round"]["fedhdp+personal"]
    if personal:
        rows[-1] += f" fedhdp+personal takes {personal / floor:.2f} of it."
    host = result["machine"]
    rows += [
        "",
        f"{host['cpu']}, {host['cores']} cores, {host['memory_gb']} GB, load beforehand {host['load_before']:.2f}.",
    ]
    for name, peer in result["peers"].items():
        if peer["seconds"] is not None:
            versions = ", ".join(f"{package} {version}" for package, version in peer["versions"].items())
            rows.append(f"{name}: {versions}.")
    return "\n".join(rows + sweep_table(result))


def sweep_table(result: dict[str, Any]) -> list[str]:
    """Markdown of the sweeps, if there are any."""
    if not result["sweeps"]:
        return []
    names = [name for name in OURS if name in result["sweeps"][0]]
    rows = ["", "| along | at | " + " | ".join(f"{name}: rounds/s | MB" for name in names) + " |"]
    rows += ["| --- | ---: |" + " ---: | ---: |" * len(names)]
    for point in result["sweeps"]:
        cells = []
        for name in names:
            rate = point[name]["rounds_per_second"]
            cells += ["–", "–"] if rate is None else [f"{rate:.2f}", f"{point[name]['memory_mb']:,.0f}"]
        rows.append(f"| {point['along']} | {point['value']:,} | " + " | ".join(cells) + " |")
    return rows


def figure(result: dict[str, Any], path: Path) -> None:
    """Bars of seconds a round on a log scale, shortest first, and the sweeps below if there are any."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    alongs = list(dict.fromkeys(point["along"] for point in result["sweeps"]))
    shape = [["bars"] * len(alongs), alongs] if alongs else [["bars"]]
    fig, axes = plt.subplot_mosaic(shape, figsize=(8, 6.5 if alongs else 3.5), layout="constrained")
    _bars(axes["bars"], result)
    titles = {"cohort": "clients in a round", "samples": "samples of a client", "hidden": "hidden units"}
    for along in alongs:
        _lines(axes[along], result, along, titles[along])
    fig.savefig(path, dpi=150)
    plt.close(fig)


def _bars(ax: Any, result: dict[str, Any]) -> None:
    measured = {name: peer for name, peer in result["peers"].items() if peer["seconds"] is not None}
    names = sorted(measured, key=lambda name: -measured[name]["seconds"])
    for place, name in enumerate(names):
        each = measured[name]["spread"]
        style = {"color": "black"} if name in OURS else {"facecolor": "white", "edgecolor": "black", "hatch": "///"}
        ax.barh(place, each["median"], **style)
        ax.plot([each["min"], each["max"]], [place + 0.32] * 2, color="grey", linewidth=3)
        written = {"va": "center", "bbox": {"facecolor": "white", "edgecolor": "none", "pad": 1}}
        ax.text(max(each["median"], each["max"]) * 1.1, place, f"{each['median']:.3g} s", **written)
    floor = result["naive_at_peak"]
    ax.axvline(floor, color="black", linestyle="--", linewidth=1)
    ax.annotate(
        "plain arithmetic, two models, at the matrix-product peak", (floor, len(names) - 0.4), fontsize=8, xytext=(3, 2),
        textcoords="offset points",
    )  # fmt: skip
    ax.set_yticks(range(len(names)), [f"{name}\n({measured[name]['setting']})" for name in names], fontsize=8)
    ax.set_ylim(-0.6, len(names))
    ax.set_xscale("log")
    low = min([floor, *(measured[name]["seconds"] for name in names)])
    high = max([floor, *(measured[name]["spread"]["max"] for name in names)])
    ax.set_xlim(low / 3, high * 4)
    ax.set_xlabel("seconds a round (median; grey: from shortest to longest)")


def _lines(ax: Any, result: dict[str, Any], along: str, title: str) -> None:
    for name, style in zip(OURS, ("o-", "s--"), strict=False):
        points = [point for point in result["sweeps"] if point["along"] == along and name in point]
        points = [point for point in points if point[name]["rounds_per_second"]]
        values = [point["value"] for point in points]
        ax.plot(values, [point[name]["rounds_per_second"] for point in points], style, color="black", label=name)
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlabel(title)
    ax.set_ylabel("rounds a second")
    ax.legend(fontsize=7)

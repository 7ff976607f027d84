"""The results as a table, and as a figure that can be read in black and white.

The *floor* of a contender is the time for the operations of plain gradient descent at the rate of the machine's fastest
matrix products.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import work as w

NOTE_LETTERS = 100  # of a line below the bars, which fits beside the longest names
OURS = ("fedhdp", "fedhdp-user", "fedhdp+personal")


def table(result: dict[str, Any]) -> str:
    """Markdown: every contender, the floor of the arithmetic, the sweeps."""
    ours = result["seconds_per_round"]["fedhdp"]
    header = ("what", "setting", "seconds a round", "min – max", "against fedhdp", "times the floor")
    header += ("start-up s", "compile s", "peak MB", "work done")
    rows = [f"### {w.WORKS[result['work']['name']].title}", "", _row(header)]
    rows += ["| --- | --- |" + " ---: |" * (len(header) - 3) + " --- |"]
    notes = []
    for name, peer in result["peers"].items():
        if peer["seconds"] is None:
            rows.append(_row((name, *["–"] * (len(header) - 2), _cell(peer["reason"]))))
            continue
        each, check = peer["spread"], peer["check"]
        done = f"{check['steps']:,.0f} steps, loss {check['loss_before']:.2f} → {check['loss_after']:.2f}"
        cells = [name, peer["setting"], f"{peer['seconds']:.4f}", f"{each['min']:.4f} – {each['max']:.4f}"]
        cells += [f"{peer['seconds'] / ours:.1f} ×" if ours else "–", f"{peer['seconds'] / floor(result, peer):.2f}"]
        cells += [f"{peer['start_seconds']:.1f}", f"{peer['compile_seconds']:.1f}", f"{peer['memory_mb']:,.0f}"]
        rows.append(_row((*cells, done if peer["did_the_work"] else f"NOT the work: {done}")))
        others = [
            f"{setting} {seconds:.4f} s" for setting, seconds in peer["settings"].items() if setting != peer["setting"]
        ]
        others += [f"{_cell(reason)} (failed, so another setting counts)" for reason in peer["failed_settings"]]
        notes += [f"{name}, other settings: {'; '.join(others)}."] if others else []
    floors = [f"{floor(result, peer):.4f} s for {name}" for name, peer in result["peers"].items() if peer["seconds"]]
    notes.append(f"Floor: plain gradient descent at {result['gemm_gflops']:.0f} GFLOP/s: {'; '.join(floors)}.")
    host = result["machine"]
    notes.append(
        f"{host['cpu']}, {host['cores']} cores, {host['memory_gb']} GB, load beforehand {host['load_before']:.2f}."
    )
    for name, peer in result["peers"].items():
        if peer["seconds"] is not None:
            versions = ", ".join(f"{package} {version}" for package, version in peer["versions"].items())
            notes.append(f"{name}: {versions}.")
    return "\n".join([*rows, "", *notes, *sweep_table(result)])


def floor(result: dict[str, Any], peer: dict[str, Any]) -> float:
    """The seconds of a round's plain arithmetic at the machine's fastest rate of matrix products."""
    return peer["flops"] / result["gemm_gflops"] / 1e9


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(text: str) -> str:
    """A reason as the cell of a table."""
    return text.replace("|", "/")


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

    from fedhdp.results.palette import STYLE

    alongs = list(dict.fromkeys(point["along"] for point in result["sweeps"]))
    bars = max(3, sum(peer["seconds"] is not None for peer in result["peers"].values()))
    heights = [0.42 * bars + 1.9, 2.6] if alongs else [0.42 * bars + 1.9]
    shape = [["bars"] * len(alongs), alongs] if alongs else [["bars"]]
    labels = {"cohort": "clients in a round", "samples": "samples of a client", "hidden": "hidden units"}
    with plt.rc_context(STYLE):
        fig, axes = plt.subplot_mosaic(shape, figsize=(8.5, sum(heights)), height_ratios=heights, layout="constrained")
        _bars(axes["bars"], result)
        for along in alongs:
            _lines(axes[along], result, along, labels[along])
        fig.savefig(path, dpi=150)
    plt.close(fig)


def _bars(ax: Any, result: dict[str, Any]) -> None:
    from fedhdp.results.palette import COLOURS

    measured = {name: peer for name, peer in result["peers"].items() if peer["seconds"] is not None}
    names = sorted(measured, key=lambda name: -measured[name]["seconds"])
    for place, name in enumerate(names):
        each, at_peak = measured[name]["spread"], floor(result, measured[name])
        style = {"facecolor": "white", "edgecolor": "black", "hatch": "///"}
        if name in OURS:
            style = {"color": COLOURS["fedhdp"]}
        ax.barh(place, each["median"], 0.7, **style)
        ax.plot([each["min"], each["max"]], [place + 0.42] * 2, color="grey", linewidth=3)
        ax.plot(at_peak, place, "D", color="black", markeredgecolor="white", markersize=7.5, zorder=3)
        written = {"va": "center", "bbox": {"facecolor": "white", "edgecolor": "none", "pad": 1}, "zorder": 2}
        ax.text(max(each["median"], each["max"], 1.2 * at_peak) * 1.15, place, f"{each['median']:.3g} s", **written)
    ax.set_yticks(range(len(names)), [f"{name}\n({measured[name]['setting']})" for name in names], fontsize=8)
    ax.set_ylim(-0.6, len(names) - 0.3)
    ax.set_xscale("log")
    ends = [(floor(result, peer), peer["seconds"], peer["spread"]["max"]) for peer in measured.values()]
    ax.set_xlim(min(map(min, ends), default=0.1) / 2, max(map(max, ends), default=1) * 5)
    notes = ("seconds a round, log scale; bar: median, grey: shortest to longest", *_floor_notes(result, measured))
    ax.set_xlabel("\n".join(textwrap.fill(note, NOTE_LETTERS) for note in notes), fontsize=9)
    ax.set_title(f"{title(result)}\n{w.WORKS[result['work']['name']].title}, on {result['machine']['cores']} CPU cores")


def title(result: dict[str, Any]) -> str:
    """What is seen, in one line: a round's time here, and that of the fastest and the slowest peer beside it."""
    seconds = {name: value for name, value in result["seconds_per_round"].items() if value}
    rivals = {name: value for name, value in seconds.items() if name not in OURS}
    if "fedhdp" not in seconds or not rivals:
        return "Seconds a round, less is better"
    ours = seconds["fedhdp"]
    ratios = (min(rivals.values()) / ours, max(rivals.values()) / ours)
    times = " to ".join(dict.fromkeys(f"{ratio:.{0 if ratio > 10 else 1}f}" for ratio in ratios))
    return f"fedhdp takes {ours:.2g} s a round, its peers {times} times as long"


def _floor_notes(result: dict[str, Any], measured: dict[str, Any]) -> list[str]:
    """What the diamonds are, and why a bar may end before its own."""
    rate = f"{result['gemm_gflops']:.0f} GFLOP/s, this machine's fastest matrix products"
    notes = [f"◆ the operations of plain gradient descent at {rate}"]
    shorter = [name for name, peer in measured.items() if peer["seconds"] < floor(result, peer)]
    reason = "the same result from fewer operations"
    return [*notes, f"less time than ◆ ({', '.join(shorter)}): {reason}"] if shorter else notes


def _lines(ax: Any, result: dict[str, Any], along: str, label: str) -> None:
    from fedhdp.results.palette import COLOURS, GRID_COLOUR

    for name, style in (("fedhdp", "o-"), ("fedhdp+personal", "s--")):
        points = [point for point in result["sweeps"] if point["along"] == along and name in point]
        points = [point for point in points if point[name]["rounds_per_second"]]
        rates = [point[name]["rounds_per_second"] for point in points]
        spreads = [point[name]["spread"] for point in points]
        below = [rate - 1 / spread["max"] for rate, spread in zip(rates, spreads, strict=True)]
        above = [1 / spread["min"] - rate for rate, spread in zip(rates, spreads, strict=True)]
        bars = {"yerr": [below, above], "capsize": 2, "elinewidth": 1}
        ax.errorbar([point["value"] for point in points], rates, fmt=style, color=COLOURS["fedhdp"], label=name, **bars)
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlabel(label)
    ax.set_ylabel("rounds a second")
    ax.set_title("median; bars: slowest to fastest round", fontsize=8)
    ax.grid(color=GRID_COLOUR, linewidth=0.6)
    ax.legend(fontsize=7)

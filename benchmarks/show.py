"""The results as a table, and as a figure that can be read in black and white."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import work as w

OURS = ("fedhdp", "fedhdp-user", "fedhdp+personal")


def table(result: dict[str, Any]) -> str:
    """Markdown: every contender, the floor of the arithmetic, the sweeps."""
    ours = result["seconds_per_round"]["fedhdp"]
    rows = [f"### {w.WORKS[result['work']['name']].title}", ""]
    rows += [
        "| what | setting | seconds a round | min – max | against fedhdp | start-up s | compile s | peak MB | work done |"
    ]
    rows += ["| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | --- |"]
    notes = []
    for name, peer in result["peers"].items():
        if peer["seconds"] is None:
            rows.append(f"| {name} | – | – | – | – | – | – | – | {_cell(peer['reason'])} |")
            continue
        each, check = peer["spread"], peer["check"]
        against = f"{peer['seconds'] / ours:.1f} ×" if ours else "–"
        done = f"{check['steps']:,.0f} steps, loss {check['loss_before']:.2f} → {check['loss_after']:.2f}"
        if not peer["did_the_work"]:
            done = f"NOT the work: {done}"
        rows.append(
            f"| {name} | {peer['setting']} | {peer['seconds']:.4f} | {each['min']:.4f} – {each['max']:.4f} "
            f"| {against} | {peer['start_seconds']:.1f} | {peer['compile_seconds']:.1f} "
            f"| {peer['memory_mb']:,.0f} | {done} |"
        )
        others = [
            f"{setting} {seconds:.4f} s" for setting, seconds in peer["settings"].items() if setting != peer["setting"]
        ]
        others += [f"{_cell(reason)} (failed, so another setting counts)" for reason in peer["failed_settings"]]
        notes += [f"{name}, other settings: {'; '.join(others)}."] if others else []
    floor = result["naive_at_peak"]
    notes.append(f"Matrix products at their peak: {result['gemm_gflops']:.0f} GFLOP/s; ")
    notes[-1] += f"the plain arithmetic of a round with personal models at that rate: {floor:.4f} s."
    personal = result["seconds_per_round"]["fedhdp+personal"]
    if personal:
        notes[-1] += f" fedhdp+personal takes {personal / floor:.2f} of it."
    host = result["machine"]
    notes.append(
        f"{host['cpu']}, {host['cores']} cores, {host['memory_gb']} GB, load beforehand {host['load_before']:.2f}."
    )
    for name, peer in result["peers"].items():
        if peer["seconds"] is not None:
            versions = ", ".join(f"{package} {version}" for package, version in peer["versions"].items())
            notes.append(f"{name}: {versions}.")
    return "\n".join([*rows, "", *notes, *sweep_table(result)])


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
        each, floor = measured[name]["spread"], measured[name]["arithmetic_at_peak"]
        style = {"facecolor": "white", "edgecolor": "black", "hatch": "///"}
        if name in OURS:
            style = {"color": COLOURS["fedhdp"]}
        ax.barh(place, each["median"], 0.7, **style)
        ax.plot([each["min"], each["max"]], [place + 0.42] * 2, color="grey", linewidth=3)
        ax.plot(floor, place, "D", color="tab:orange", markeredgecolor="black", markersize=7, zorder=3)
        written = {"va": "center", "bbox": {"facecolor": "white", "edgecolor": "none", "pad": 1}, "zorder": 2}
        ax.text(max(each["median"], each["max"], 1.2 * floor) * 1.15, place, f"{each['median']:.3g} s", **written)
    ax.set_yticks(range(len(names)), [f"{name}\n({measured[name]['setting']})" for name in names], fontsize=8)
    ax.set_ylim(-0.6, len(names) - 0.3)
    ax.set_xscale("log")
    ends = [(peer["arithmetic_at_peak"], peer["seconds"], peer["spread"]["max"]) for peer in measured.values()]
    ax.set_xlim(min(map(min, ends), default=0.1) / 2, max(map(max, ends), default=1) * 5)
    ax.set_xlabel(
        "seconds a round, log scale: bar: median; grey: shortest to longest\n" + _floor_note(result, measured)
    )
    ax.xaxis.label.set_fontsize(9)
    host = result["machine"]
    title = f"{w.WORKS[result['work']['name']].title}, {host['cores']} CPU cores"
    ax.set_title("\n".join([title, *_comparison(measured)]))


def _comparison(measured: dict[str, Any]) -> list[str]:
    """How long the fastest of the others takes, against fedhdp."""
    others = {name: peer["seconds"] for name, peer in measured.items() if name not in OURS and peer["did_the_work"]}
    if not others or "fedhdp" not in measured:
        return []
    fastest = min(others, key=others.__getitem__)
    ratio = others[fastest] / measured["fedhdp"]["seconds"]
    return [f"A round of {fastest}, the fastest of the others, takes {ratio:.1f} times as long as one of fedhdp"]


def _floor_note(result: dict[str, Any], measured: dict[str, Any]) -> str:
    """What the diamonds are, and why a bar may end before its own."""
    note = f"◆ the operations of plain gradient descent at {result['gemm_gflops']:.0f} GFLOP/s,"
    note += " the fastest matrix products of this machine"
    shorter = [name for name, peer in measured.items() if peer["seconds"] < peer["arithmetic_at_peak"]]
    if shorter:
        note += (
            f"\n{' and '.join(shorter)}: less time than ◆, because the same result is computed with fewer operations"
        )
    return note


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

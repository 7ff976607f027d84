"""What other libraries' releases do: the conformance kit against each, in its own environment.

    make conformance                      a table
    make conformance ARGS="--json"        one JSON document
    make conformance ARGS="--only flower" some of them

Environments are under build/conformance. A library that cannot be installed is listed with the reason.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
import bench  # noqa: E402

bench.BUILD = HERE.parents[1] / "build" / "conformance"
KIT = ("numpy<2", "scipy", "msgspec")  # what the kit needs
LIBRARIES: dict[str, tuple[str, tuple[str, ...] | None]] = {  # script, and packages; None: this environment
    "fedhdp": ("fedhdp_adapter.py", None),
    "flower": ("flower_adapter.py", None),
    "pfl": ("pfl_adapter.py", ("pfl==0.6.0", *KIT)),
}
LIMIT = 600.0  # seconds to install a library, and to check it


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(LIBRARIES), help="libraries, separated by commas")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    arguments = parser.parse_args()
    reports: list[dict[str, Any]] = []
    for name in arguments.only.split(","):
        if name not in LIBRARIES:
            parser.error(f"--only must be of {', '.join(LIBRARIES)}, got {name!r}")
        reports += run(name)
    if arguments.json:
        print(json.dumps(reports, indent=2))
    else:
        print("\n".join(table(reports)))


def run(name: str) -> list[dict[str, Any]]:
    """The reports of a library, or why there are none."""
    script, packages = LIBRARIES[name]
    try:
        python = bench.environment(name, packages, LIMIT)
    except bench.BenchmarkError as error:
        return [{"name": name, "reason": str(error), "checks": []}]
    bench.log(f"{name}: checking")
    process = subprocess.run([str(python), str(HERE / script)], capture_output=True, text=True, timeout=LIMIT)
    if process.returncode:
        return [{"name": name, "reason": bench.error_tail(process.stderr), "checks": []}]
    return [json.loads(line) for line in process.stdout.splitlines()]


def table(reports: list[dict[str, Any]]) -> list[str]:
    """Each check as a line of Markdown, with what was measured for each release; bold where it fails."""
    measured = [report for report in reports if report["checks"]]
    names = list(dict.fromkeys(check["name"] for report in measured for check in report["checks"]))
    lines = [
        "| check | " + " | ".join(report["name"] for report in measured) + " |",
        "| --- " * (len(measured) + 1) + "|",
    ]
    for name in names:
        cells = [cell(name, report) for report in measured]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    lines += [f"{report['name']}: {report['reason']}" for report in reports if not report["checks"]]
    return lines


def cell(name: str, report: dict[str, Any]) -> str:
    """What was measured, with what was claimed in brackets; bold where the check fails."""
    checks = {check["name"]: check for check in report["checks"]}
    if name not in checks:
        return "–"
    check = checks[name]
    text = f"{check['measured']:.3g} ({check['promised']:.3g})"
    return text if check["holds"] else f"**{text}**"


if __name__ == "__main__":
    main()

"""The shape of the project: imports point down, each dependency stands in its own place."""

from __future__ import annotations

import ast
import re
import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "fedhdp"

RULE = {  # what each part of the package may import besides itself
    "errors": set(),
    "mechanism": set(),
    "data": set(),
    "rng": set(),
    "models": set(),
    "algorithms": {"mechanism"},
    "server": {"mechanism", "models"},
    "client": {"mechanism", "models"},
    "privacy": {"mechanism"},
    "theory": {"mechanism", "algorithms", "privacy"},
    "results": {"mechanism", "privacy"},
    "engine": {"client", "server", "models", "data", "mechanism", "rng"},
    "simulation": {"engine", "client", "server", "models", "data", "mechanism", "rng", "results", "privacy"},
    "datasets": {"data", "mechanism"},
}
RULE["experiments"] = set(RULE) | {"simulation"}
RULE["reproduction"] = RULE["flower"] = RULE["experiments"] | {"experiments"}
RULE["cli"] = RULE["reproduction"] | {"reproduction", "flower"}
PENDING: set[tuple[str, str]] = set()


def imports() -> list[tuple[str, str]]:
    """Every (file, module it imports), also those inside functions, less what is for type checkers alone."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                node.body = []
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                found += [(str(path.relative_to(PACKAGE)), alias.name) for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                whole = node.module == "fedhdp"
                names = [f"fedhdp.{alias.name}" for alias in node.names] if whole else [node.module]
                found += [(str(path.relative_to(PACKAGE)), name) for name in names]
    return found


def part(file: str) -> str:
    """The part of the package that a file belongs to."""
    return Path(file).parts[0].removesuffix(".py")


def test_imports_point_down_only():
    wrong = set()
    for file, module in imports():
        if not module.startswith("fedhdp.") or part(file) in ("__init__", "__main__"):
            continue
        target = module.split(".")[1]
        if target == part(file) or target == "__version__":
            continue
        if target != "errors" and target not in RULE[part(file)]:
            wrong.add((file, module))
    assert wrong == PENDING


def test_every_part_has_its_place_among_the_levels():
    parts = {path.name.removesuffix(".py") for path in PACKAGE.iterdir() if path.name[0] not in "._"}
    assert parts - {"py.typed"} <= {*RULE, "__init__", "__main__"}


@pytest.mark.parametrize(
    ("library", "places"),
    [
        ("dp_accounting", {"privacy"}),
        ("flwr", {"flower"}),
        ("matplotlib", {"reproduction"}),
        ("sqlite3", {"privacy", "datasets"}),
    ],
)
def test_a_library_is_imported_in_its_own_place_alone(library, places):
    assert {part(file) for file, module in imports() if module.split(".")[0] == library} <= places


@pytest.mark.parametrize("name", ["errors", "mechanism", "privacy", "theory", "results"])
def test_jax_is_nowhere_in_what_must_run_without_it(name):
    assert not [file for file, module in imports() if part(file) == name and module.split(".")[0] == "jax"]


def test_the_page_of_results_says_what_the_tables_beside_it_say():
    kept = [set(table.read_text().splitlines()) for table in (ROOT / "docs" / "results").glob("*/table.md")]
    starts = ("| global model |", "| personal models |", "| the paper's orderings |")
    heads = {line for lines in kept for line in lines if line.startswith(starts)}
    blocks = re.findall(r"^\|.*\|$(?:\n\|.*\|$)+", (ROOT / "docs" / "results.md").read_text(), flags=re.MULTILINE)
    copied = [block for block in blocks if block.splitlines()[0] in heads]
    assert len(copied) > 10
    assert [block for block in copied if not any(lines.issuperset(block.splitlines()) for lines in kept)] == []


@pytest.mark.parametrize(
    ("table", "row", "other", "said"),
    [
        ("noniid-mnist-20-seeds", "momentum r=0.01", "poisson r=0.01", "1.2 ±0.4"),
        ("noniid-mnist-20-seeds", "average r=0.025", "poisson r=0.025", "0.5 ±0.2 (0.025)"),
        ("noniid-mnist-20-seeds", "pld r=0.01", "poisson r=0.01", "−0.1 ±0.3"),
        ("levels", "three: FedHDP, shared noise", "three: FedHDP, noise per group", "0.2 ±0.4"),
    ],
)
def test_the_differences_on_the_page_of_results_are_those_of_its_command(table, row, other, said, monkeypatch, capsys):
    folder = ROOT / "docs" / "results" / table
    monkeypatch.setattr(sys, "argv", ["differences.py", str(folder), row, other])
    runpy.run_path(str(ROOT / "examples" / "differences.py"), run_name="__main__")
    difference, half = re.match(r"([+-][\d.]+) ±([\d.]+)", capsys.readouterr().out).groups()
    printed = f"{float(difference):.1f} ±{float(half):.1f}".replace("-", "−")
    assert said.startswith(printed)
    assert said in (ROOT / "docs" / "results.md").read_text()


def commands(command, *words: str):
    """Every command of the command line, with the words that call it."""
    if not hasattr(command, "commands"):
        yield words, command
    for name, one in getattr(command, "commands", {}).items():
        yield from commands(one, *words, name)


def test_every_command_says_what_it_does_and_what_each_of_its_words_means():
    import typer.main

    from fedhdp.cli import app

    found = list(commands(typer.main.get_command(app)))
    assert len(found) > 10
    for words, command in found:
        assert command.help, words
        assert [one.name for one in command.params if not one.help] == [], words

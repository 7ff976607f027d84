"""The shape of the project: imports point down, each dependency stands in its own place."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import fedhdp

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "fedhdp"

RULE = {  # what each part of the package may import besides itself
    "errors": set(),
    "mechanism": set(),
    "data": set(),
    "devices": set(),
    "rng": set(),
    "models": set(),
    "algorithms": {"mechanism"},
    "server": {"mechanism", "models"},
    "client": {"mechanism", "models"},
    "privacy": {"mechanism"},
    "theory": {"mechanism", "algorithms", "privacy"},
    "results": {"mechanism", "privacy"},
    "engine": {"client", "server", "models", "data", "mechanism", "rng"},
    "simulation": {"engine", "devices", "client", "server", "models", "data", "mechanism", "rng", "results", "privacy"},
    "datasets": {"data", "devices", "mechanism"},
}
RULE["experiments"] = set(RULE) | {"simulation"}
RULE["reproduction"] = RULE["flower"] = RULE["experiments"] | {"experiments"}
RULE["cli"] = RULE["reproduction"] | {"reproduction", "flower"}
PENDING: set[tuple[str, str]] = set()


def imports() -> list[tuple[str, str]]:
    """Every (file, module it imports), also those inside functions, less what is for type checkers alone."""
    modules = []
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                node.body = []
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                modules += [(str(path.relative_to(PACKAGE)), alias.name) for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                whole = node.module == "fedhdp"
                names = [f"fedhdp.{alias.name}" for alias in node.names] if whole else [node.module]
                modules += [(str(path.relative_to(PACKAGE)), name) for name in names]
    return modules


def part(file: str) -> str:
    """The part of the package that a file belongs to."""
    return Path(file).parts[0].removesuffix(".py")


def test_imports_point_down_only():
    wrong = set()
    for file, module in imports():
        if part(file) == "reproduction" and module.split(".")[1:] and module.split(".")[1] in fedhdp.__all__:
            continue  # a leaf may use every public name
        if not module.startswith("fedhdp.") or part(file) in ("__init__", "__main__"):
            continue
        target = module.split(".")[1]
        if target == part(file) or target == "__version__":
            continue
        if target != "errors" and target not in RULE[part(file)]:
            wrong.add((file, module))
    assert wrong == PENDING


def test_reproduction_is_a_leaf():
    inside = {(file, module) for file, module in imports() if part(file) == "reproduction"}
    users = {part(file) for file, module in imports() if module.startswith("fedhdp.reproduction")}
    assert users <= {"cli", "reproduction"}
    assert not [module for _, module in inside if module.startswith("fedhdp.") and "._" in module]
    assert not [module for _, module in inside if module.split(".")[:2] in (["fedhdp", "engine"], ["fedhdp", "cli"])]
    for path in (PACKAGE / "reproduction").rglob("*.py"):
        names = [alias.name for node in ast.walk(ast.parse(path.read_text())) for alias in imported_names(node)]
        assert not [name for name in names if name.startswith("_") and name != "__version__"], path


def imported_names(node: ast.AST) -> list[ast.alias]:
    """The names that a statement imports from the package."""
    is_inside = isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fedhdp")
    return node.names if is_inside else []


def test_every_package_has_a_rule():
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
def test_library_is_imported_by_one_package(library, places):
    assert {part(file) for file, module in imports() if module.split(".")[0] == library} <= places


@pytest.mark.parametrize("name", ["errors", "mechanism", "privacy", "theory", "results"])
def test_packages_without_jax(name):
    assert not [file for file, module in imports() if part(file) == name and module.split(".")[0] == "jax"]


def commands(command, *words: str):
    """Every command of the command line, with the words that call it."""
    if not hasattr(command, "commands"):
        yield words, command
    for name, subcommand in getattr(command, "commands", {}).items():
        yield from commands(subcommand, *words, name)


def test_every_command_and_option_has_help():
    import typer.main

    from fedhdp.cli import app

    all_commands = list(commands(typer.main.get_command(app)))
    assert len(all_commands) > 10
    for words, command in all_commands:
        assert command.help, words
        assert [option.name for option in command.params if not option.help] == [], words

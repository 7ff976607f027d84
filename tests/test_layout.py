"""The shape of the project: imports point down, each dependency stands in its own place."""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import re
from pathlib import Path

import pytest

import fedhdp
from fedhdp.engine.low_rank import Parametrization

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "fedhdp"

RULE = """
cli → reproduction, flower, report → experiments → simulation, datasets, theory, basis
simulation → engine, results → privacy        adapters, basis → models        results, datasets → archives → memory
engine → client, server, exact → models, metrics, optimizers, data, rng, devices, memory
theory → algorithms, privacy → mechanism        datasets → data, devices, mechanism        (privacy, theory, results: no JAX)
client, server, exact, algorithms → mechanism → clips   models, metrics, optimizers, data, rng, devices, memory → only errors
"""  # a part may import what is to the right of an arrow, and what that may import


def allowed_imports() -> dict[str, set[str]]:
    """For each part of the package, the parts that it may import."""
    direct: dict[str, set[str]] = {}
    for chain in re.split(r"\n|\s{3,}", re.sub(r"\(.*?\)|only errors", "", RULE)):
        columns = [{name.strip() for name in column.split(",") if name.strip()} for column in chain.split("→")]
        for left, right in itertools.pairwise(columns):
            for name in left:
                direct.setdefault(name, set()).update(right)
        for name in columns[-1]:
            direct.setdefault(name, set())

    def closure(name: str) -> set[str]:
        return direct[name].union(*(closure(other) for other in direct[name]), {"errors"})

    return {name: closure(name) for name in direct} | {"errors": set()}


ALLOWED = allowed_imports()


@functools.cache
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
                is_package = node.module == "fedhdp"
                names = [f"fedhdp.{alias.name}" for alias in node.names] if is_package else [node.module]
                modules += [(str(path.relative_to(PACKAGE)), name) for name in names]
    return modules


def part(file: str) -> str:
    """The part of the package that a file belongs to."""
    return Path(file).parts[0].removesuffix(".py")


def test_imports_point_down_only():
    wrong = []
    for file, module in imports():
        _, _, target = module.partition("fedhdp.")
        target = target.split(".")[0]
        if part(file) in ("__init__", "__main__") or target in ("", "__version__", part(file)):
            continue
        is_public_name = part(file) == "reproduction" and target in fedhdp.__all__
        if target not in ALLOWED[part(file)] and not is_public_name:
            wrong.append(f"{file} imports {module}")
    assert wrong == []


def test_the_rule_has_five_lines_and_is_in_the_docs():
    lines = RULE.strip().splitlines()
    assert len(lines) == 5
    assert "\n".join(lines) in (ROOT / "docs" / "explanation" / "design.md").read_text()


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
    assert parts - {"py.typed"} <= {*ALLOWED, "__init__", "__main__"}


@pytest.mark.parametrize(
    ("library", "places"),
    [
        ("dp_accounting", {"privacy"}),
        ("flwr", {"flower"}),
        ("matplotlib", {"reproduction", "results"}),
        ("sqlite3", {"privacy", "datasets"}),
    ],
)
def test_library_is_imported_by_one_package(library, places):
    assert {part(file) for file, module in imports() if module.split(".")[0] == library} <= places


@pytest.mark.parametrize("name", ["errors", "clips", "mechanism", "exact", "privacy", "theory", "results"])
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


def test_engine_is_imported_where_clients_train_alone():
    files = {file for file, module in imports() if module.startswith("fedhdp.engine") and part(file) != "engine"}
    assert {file for file in files if part(file) != "simulation"} == {
        "flower/trainer.py",
        "experiments/audit/training.py",
    }


def functions(path: Path) -> dict[str, ast.FunctionDef]:
    """The functions and methods of a file by name."""
    return {node.name: node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


def test_algorithm_1_is_in_one_function():
    local_train = functions(PACKAGE / "client.py")["local_train"]
    assert local_train.end_lineno - local_train.lineno + 1 <= 40
    update = re.compile(r"pull \* \(")
    assert [path.name for path in PACKAGE.rglob("*.py") if update.search(path.read_text())] == ["client.py"]


def test_parametrization_has_five_methods():
    methods = [name for name, value in vars(Parametrization).items() if callable(value) and not name.startswith("_")]
    assert len(methods) <= 5


def test_one_round_in_the_docs_is_what_is_called():
    text = (ROOT / "docs" / "explanation" / "design.md").read_text()
    lines = text.partition("## One round, call by call")[2].partition("```text\n")[2].partition("\n```")[0].splitlines()
    assert 10 < len(lines) <= 15
    for line in lines:
        name, file = line.split()[:2]
        assert (
            name.split(".")[-1] in functions(PACKAGE / file)
            or f"self.{name.split('.')[-1]} = jax.jit" in (PACKAGE / file).read_text()
        ), line


def test_readme_maps_the_package():
    text = (ROOT / "README.md").read_text()
    package_map = text.partition("```text\nfedhdp/\n")[2].partition("```")[0]
    paths = [path for path in PACKAGE.iterdir() if path.name[0] not in "_." and path.name != "py.typed"]
    names = [f" {path.name}/" if path.is_dir() else f" {path.name}" for path in paths]
    assert [name for name in names if name not in package_map] == []


@pytest.mark.parametrize("name", sorted(set(fedhdp.__all__) - {"__version__"}))
def test_public_names_document_arguments_and_results(name):
    value = getattr(fedhdp, name)
    text = inspect.getdoc(value) or ""
    assert "Args:" in text or "Attributes:" in text
    assert isinstance(value, type) or "Returns:" in text or inspect.signature(value).return_annotation == "Model"

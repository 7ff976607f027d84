"""The pages of the documentation: their programs run, their sessions print what is written, their tables are complete.

In README.md and docs/, a ```python block is a part of its page's one program, a block with a title is a file beside it,
and a ```console block is a session whose output is written below each command (… for lines left out). ```py and ```sh
blocks are shown alone.
"""

from __future__ import annotations

import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, get_args

import msgspec
import pytest

from fedhdp.algorithms import ALGORITHMS
from fedhdp.client import LocalTraining
from fedhdp.clips import AdaptiveClip, LayerClip
from fedhdp.experiments.components import DataConfig, ModelConfig
from fedhdp.experiments.config import Experiment
from fedhdp.experiments.variant import Variant
from fedhdp.mechanism import Mechanism, PrivacyGroup
from fedhdp.privacy.calibration import GroupConfig, MechanismConfig
from fedhdp.privacy.ledger import Budget, Ledger
from fedhdp.results import store
from fedhdp.server import ServerOptimizer

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^```(\w+)(?: title=\"([^\"]+)\")?[^\n]*\n(.*?)^```", re.DOTALL | re.MULTILINE)
SMALLER = {"clients=2000": "clients=40", '"opted out", 100': '"opted out", 2', '"private", 1900': '"private", 38'}


class Block(NamedTuple):
    """A fenced block of a page."""

    language: str
    title: str
    text: str


def blocks_of(text: str) -> list[Block]:
    return [Block(*match) for match in BLOCK.findall(text)]


def is_executed(block: Block) -> bool:
    return block.language in ("python", "console")


PAGES = [
    page
    for page in sorted(DOCS.rglob("*.md"))
    if DOCS / "results" not in page.parents and any(map(is_executed, blocks_of(page.read_text(encoding="utf-8"))))
]


@pytest.fixture
def run_command(monkeypatch, capfdbinary):
    """Run a command line in this process and return what it prints."""
    from fedhdp import cli

    def run(command: str) -> str:
        words = shlex.split(command)
        if words[0] == "python":
            return subprocess.run([sys.executable, *words[1:]], capture_output=True, text=True, check=True).stdout
        monkeypatch.setattr(sys, "argv", words)
        capfdbinary.readouterr()
        with pytest.raises(SystemExit) as exit_info:
            cli.main()
        sys.stdout.flush()
        out, err = capfdbinary.readouterr()
        assert not exit_info.value.code, err.decode()
        return out.decode()

    return run


def sessions_of(text: str) -> Iterator[tuple[str, list[str]]]:
    """Every command of a console block with the lines that are written below it."""
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        command, _, output = part.partition("\n")
        yield command, [line for line in lines_of(output) if line not in ("", "…")]


def lines_of(text: str) -> list[str]:
    """Lines without what only aligns them."""
    return [" ".join(line.split()) for line in text.splitlines() if set(line) - set("─ ")]


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_page_runs(page, run_command, capfdbinary, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    program: dict[str, Any] = {"__name__": page.stem}
    for number, block in enumerate(blocks_of(page.read_text(encoding="utf-8")), 1):
        if block.title:
            (tmp_path / block.title).write_text(block.text, encoding="utf-8")
        elif block.language == "python":
            exec(compile(block.text, f"{page.name}, block {number}", "exec"), program)
        elif block.language == "console":
            for command, expected in sessions_of(block.text):
                lines = lines_of(run_command(command))
                assert [line for line in expected if line not in lines] == [], command
    sys.stdout.flush()
    check = CHECKS.get(page.name)
    if check is not None:
        check(program, capfdbinary.readouterr().out.decode())


def check_tutorial(program: dict[str, Any], out: str) -> None:
    with Ledger("clinics.ledger", read_only=True) as ledger:
        assert sum(cost.rounds for cost in ledger.costs("strict")) == program["simulation"].round == 5


def check_compare(program: dict[str, Any], out: str) -> None:
    first, *others = program["tables"]
    table = program["format_table"](first, other_seeds=others)
    assert len(re.findall(r"\d ±\d", table)) >= 3 * 7  # three algorithms; the server and two models of three groups
    assert {"plot.png", "private.svg", "runs"} <= {path.name for path in Path.cwd().iterdir()}
    assert [value for _, value in program["curve"] if not 0 <= value <= 1] == []
    assert len(program["runs"]) == 6


def check_own_data(program: dict[str, Any], out: str) -> None:
    assert program["resumed"].round == 5
    assert program["run"].scores["personal/mean_squared_error"].shape == (60,)


CHECKS = {"tutorial.md": check_tutorial, "compare.md": check_compare, "own-data.md": check_own_data}


def test_pages_with_programs_are_found():
    assert {"tutorial.md", "own-data.md", "compare.md", "budgets.md", "accounting.md"} <= {page.name for page in PAGES}


@pytest.mark.slow
def test_readme_python_runs(capsys):
    [block] = [block for block in blocks_of(README) if block.language == "python"]
    text = block.text.replace("rounds=100", "rounds=2")
    for full, small in SMALLER.items():
        assert full in text
        text = text.replace(full, small)
    exec(compile(text, "README.md", "exec"), {})
    assert "FedHDP" in capsys.readouterr().out


def test_readme_is_short():
    [block] = [block for block in blocks_of(README) if block.language == "python"]
    lines = [line for line in block.text.splitlines() if line]
    imports = [line for line in lines if "import" in line]
    assert len(README.splitlines()) <= 120
    assert len(lines) <= 15
    assert len(imports) == 1


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"])
def test_links_lead_somewhere(name):
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", (ROOT / name).read_text(encoding="utf-8"))
    files = [link for link in links if not link.startswith("http")]
    assert [link for link in files if not (ROOT / link).exists()] == []


def keys_of(*structs: type) -> set[str]:
    return {field.encode_name for struct in structs for field in msgspec.structs.fields(struct)}


def names_in(page: Path) -> set[str]:
    """Every word that the page has in code."""
    return set(re.findall(r"\w+", " ".join(re.findall(r"`([^`\n]+)`", page.read_text(encoding="utf-8")))))


def test_experiment_keys_are_documented():
    clips = [AdaptiveClip, LayerClip]
    structs = [Experiment, MechanismConfig, GroupConfig, *clips, Variant, Budget, LocalTraining, ServerOptimizer]
    page = DOCS / "reference" / "configuration.md"
    assert keys_of(*structs, *get_args(DataConfig), *get_args(ModelConfig)) - names_in(page) == set()
    assert [name for name in ALGORITHMS if f'`"{name}"`' not in page.read_text(encoding="utf-8")] == []


def test_deployment_keys_are_documented():
    config = pytest.importorskip("fedhdp.flower.config")
    page = (DOCS / "reference" / "deployment.md").read_text(encoding="utf-8").replace("-", "_")
    words = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`\n]+)`", page))))
    assert keys_of(config.Deployment) - words == set()


def test_files_of_a_run_are_documented():
    files = {value for value in vars(store).values() if isinstance(value, str) and re.fullmatch(r"\w+\.\w{3,4}", value)}
    page = (DOCS / "reference" / "files.md").read_text(encoding="utf-8")
    assert len(files) >= 6
    assert [file for file in files if file not in page] == []


@pytest.mark.parametrize("promise", [Mechanism, PrivacyGroup, AdaptiveClip, LayerClip])
def test_every_term_of_the_promise_is_in_the_glossary(promise):
    names = {name for name in vars(promise) if not name.startswith("_")}
    assert names - names_in(DOCS / "glossary.md") == set()


def test_command_line_page_has_every_command():
    text = runpy.run_path(str(DOCS / "hooks.py"))["command_line"]()
    for command in ("run", "account", "plan", "ledger show", "theory tables"):
        assert f"## `fedhdp {command}`" in text


def formulas_of(page: Path) -> list[str]:
    text = page.read_text(encoding="utf-8")
    blocks = [block.text for block in blocks_of(text) if block.language == "math"]
    prose = re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)
    return blocks + re.findall(r"\$([^$]+)\$", prose)


def test_formulas_become_mathml():
    pytest.importorskip("latex2mathml")
    make_mathml = runpy.run_path(str(DOCS / "hooks.py"))["on_page_content"]
    formulas = [formula for page in DOCS.rglob("*.md") for formula in formulas_of(page)]
    assert len(formulas) > 100
    for formula in formulas:
        mathml = make_mathml(rf'<div class="arithmatex">\[{formula}\]</div>')
        assert mathml.startswith("<math"), formula
        assert "\\" not in re.sub(r"<mo>&#x0005C;</mo>", "", mathml), formula  # an unknown command stays as text

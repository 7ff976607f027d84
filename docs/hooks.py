"""What is made while the site is built: the reference of the command line, and formulas as MathML.

MathML needs no script and no network. `python docs/hooks.py` prints the reference of the command line.
"""

from __future__ import annotations

import html
import inspect
import re
import warnings
from collections.abc import Iterator
from typing import Any

MARKER = "<!-- every command -->"
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace the marker by every command with its arguments and options.

    Args:
        markdown: The text of a page.

    Returns:
        The text with the commands in it, where the page has the marker.
    """
    return markdown.replace(MARKER, command_line()) if MARKER in markdown else markdown


def on_page_content(content: str, **_: Any) -> str:
    """Replace the formulas of a page, which are in TeX, by MathML."""
    return FORMULA.sub(_mathml, content) if "arithmatex" in content else content


def _mathml(match: re.Match[str]) -> str:
    from latex2mathml.converter import convert

    return convert(html.unescape(match.group(2)), display="block" if match.group(1) == "div" else "inline")


def command_line() -> str:
    """Every command, its arguments and its options as Markdown."""
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # typer's, about names in click
        import typer.main

        from fedhdp.cli import app

        command = typer.main.get_command(app)
    return "\n".join(_section(command, "fedhdp"))


def _section(command: Any, name: str) -> Iterator[str]:
    subcommands = getattr(command, "commands", {})
    params = [param for param in command.params if param.name != "help"]
    if not subcommands or params:
        yield from (f"## `{name}`", "", inspect.cleandoc(command.help or ""), "")
    if params:
        yield from ("| argument or option | meaning | default |", "| --- | --- | --- |")
        yield from map(_row, params)
        yield ""
    for subname, subcommand in subcommands.items():
        yield from _section(subcommand, f"{name} {subname}")


def _row(param: Any) -> str:
    is_option = param.param_type_name == "option"
    names = ", ".join(f"`{option}`" for option in param.opts) if is_option else f"`{param.name}`"
    value = "" if getattr(param, "is_flag", False) else f" {param.metavar or _type(param)}"
    default = "" if param.default in (None, False, ()) or callable(param.default) else f"`{param.default}`"
    meaning = " ".join((param.help or "").split()).replace("|", "\\|")
    return f"| {names}{value} | {meaning} | {'required' if param.required else default} |"


def _type(param: Any) -> str:
    choices = getattr(param.type, "choices", None)
    return " or ".join(f"`{choice}`" for choice in choices) if choices else str(param.type.name)


if __name__ == "__main__":
    print(command_line())

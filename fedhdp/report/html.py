"""HTML as text: escaped content, panels with a mark of what may be published, and the page around them.

A page is one file: its style, its script and its numbers are in it, and a policy in its head forbids every request.
Everything that a user names is escaped here, in `element` and `text`; `Html` marks what is markup already.
"""

from __future__ import annotations

import base64
import hashlib
import html
import unicodedata
from collections.abc import Iterable, Sequence
from importlib import resources
from typing import Literal, NamedTuple

import msgspec

from fedhdp.results.palette import COLOURS, OTHER_COLOURS

Disclosure = Literal["public", "clients", "mixed"]
MARKS: dict[str, tuple[str, str]] = {
    "public": (
        "may be published",
        "It follows from settings, from noised models, or from data that is not the clients'.",
    ),
    "clients": ("not to be published", "It was measured on clients' data without noise, or no epsilon covers it."),
    "mixed": (
        "not all may be published",
        "Marked columns, or the variants that are named, are not covered by an epsilon.",
    ),
}


DIRECTIONAL = {
    "R",
    "AL",
    "AN",
    "RLE",
    "RLO",
    "LRE",
    "LRO",
    "RLI",
    "LRI",
    "FSI",
    "PDF",
    "PDI",
}  # Unicode's classes of characters that change the direction of writing
ISOLATES = "\u2066\u2067\u2068\u2069"  # removed from names, which could end their isolation with them


class Html(str):
    """Text that is markup."""


Content = str | Html


def text(value: object) -> Html:
    """A value as text of the page."""
    return value if isinstance(value, Html) else Html(html.escape(str(value), quote=True))


def join(parts: Iterable[Content], separator: str = "") -> Html:
    """Parts of a page, one after the other."""
    return Html(separator.join(text(part) for part in parts))


def element(tag: str, *parts: Content, **attributes: object) -> Html:
    """An element with escaped content; an attribute's trailing underscore is dropped, others become hyphens."""
    names = {key.rstrip("_").replace("_", "-"): value for key, value in attributes.items()}
    written = [
        name if value is True else f'{name}="{text(value)}"' for name, value in names.items() if value is not None
    ]
    head = " ".join([tag, *written])
    return Html(f"<{head}>{join(parts)}</{tag}>")


def name(value: str) -> Html:
    """A name that a user chose: its direction of writing does not change what stands beside it."""
    return element("bdi", value)


def short(value: str, length: int = 42) -> str:
    """A name that fits into a heading, isolated."""
    return isolated(value if len(value) <= length else f"{value[: length - 1]}…")


def isolated(value: str) -> str:
    """A name whose direction of writing cannot change that of the text around it."""
    if not any(unicodedata.bidirectional(letter) in DIRECTIONAL for letter in value):
        return value
    return f"\u2068{''.join(letter for letter in value if letter not in ISOLATES)}\u2069"


def with_isolated(sentence: str, names: Iterable[str]) -> str:
    """A sentence in which these names are isolated."""
    for value in names:
        if (safe := isolated(value)) != value:
            sentence = sentence.replace(value, safe)
    return sentence


def mark(disclosure: Disclosure) -> Html:
    """The mark of what may be published."""
    words, reason = MARKS[disclosure]
    sign = {"public": "✓", "clients": "✕", "mixed": "◐"}[disclosure]
    return element(
        "span", element("span", sign, aria_hidden="true"), f" {words}", class_=f"mark {disclosure}", title=reason
    )


class Panel(NamedTuple):
    """A part of a page with a heading of its own."""

    title: Content
    body: Html
    disclosure: Disclosure = "public"
    wide: bool = False

    def render(self) -> Html:
        """The panel as an article."""
        head = element("header", element("h3", self.title), mark(self.disclosure))
        return element("article", head, self.body, class_="panel wide" if self.wide else "panel")


class Section(NamedTuple):
    """A part of a page: what it answers, a sentence, and panels."""

    anchor: str
    title: str
    lead: Content
    panels: Sequence[Panel] = ()
    before: Html = Html("")  # controls above the panels

    def render(self) -> Html:
        """The section."""
        lead = element("p", self.lead, class_="lead") if self.lead else ""
        panels = element("div", *(panel.render() for panel in self.panels), class_="panels") if self.panels else ""
        return element("section", element("h2", self.title), lead, self.before, panels, id=self.anchor)


class Page(NamedTuple):
    """A page.

    Attributes:
        title: Of the browser's window.
        heading: The largest line: what was run.
        lead: The sentence that everybody reads.
        details: What to know beside it.
        cards: The numbers below it.
        sections: The rest.
        data: What the script needs, by name: the numbers of charts, texts to copy.
        footer: The last lines.
        notice: A warning above everything else.
        controls: Check boxes that stay in view.
        toggles: For each group of variants that one element shows, their numbers: it is hidden when none is checked.
        refresh: The address whose content tells a live page that it has changed; None for a file.
    """

    title: str
    heading: Content
    lead: Content
    cards: Sequence[Html]
    sections: Sequence[Section]
    data: dict[str, object]
    footer: Content = ""
    details: Content = ""
    notice: Content = ""
    controls: Html = Html("")
    toggles: Sequence[Sequence[int]] = ()
    refresh: str | None = None

    def render(self) -> str:
        """The file's content."""
        style, script = _asset("page.css") + _classes(self.toggles), _asset("page.js")
        body = [element("h1", self.heading), element("p", self.lead, class_="headline")]
        if self.details:
            body.append(element("p", self.details, class_="details"))
        if self.notice:
            body.append(element("p", self.notice, class_="notice", role="note"))
        if self.cards:
            body.append(element("div", *self.cards, class_="cards"))
        links = [element("a", section.title, href=f"#{section.anchor}") for section in self.sections]
        body += [element("nav", *links, aria_label="contents"), self.controls]
        body += [section.render() for section in self.sections]
        main = element("main", *body)
        footer = element("footer", self.footer)
        data = {**self.data, "refresh": self.refresh}
        embedded = msgspec.json.encode(data).decode().replace("<", "\\u003c")  # no tag can end the script
        head = (
            '<meta charset="utf-8">\n<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f'<meta http-equiv="Content-Security-Policy" content="{_policy(style, script, self.refresh)}">\n'
            '<meta name="color-scheme" content="light dark">\n<link rel="icon" href="data:,">\n'
            f"<title>{text(self.title)}</title>\n<style>{style}</style>"
        )
        return (
            f'<!doctype html>\n<html lang="en">\n<head>\n{head}\n</head>\n<body>\n{main}\n{footer}\n'
            f'<script type="application/json" id="data">{embedded}</script>\n<script>{script}</script>\n</body>\n</html>\n'
        )


def _asset(file: str) -> str:
    return resources.files("fedhdp.report").joinpath(file).read_text(encoding="utf-8")


def _classes(toggles: Sequence[Sequence[int]]) -> str:
    """Classes with the colour of each algorithm, and the rules by which check boxes hide series."""
    names = [*COLOURS.items(), *((f"other-{i}", colour) for i, colour in enumerate(OTHER_COLOURS))]
    rules = [f".c-{key.replace('_', '-')}{{--c:{colour}}}" for key, colour in names]
    for numbers in toggles:
        unchecked = "".join(f":has(#show-{i}:not(:checked))" for i in numbers)
        rules.append(f"body{unchecked} .{variants_class(numbers)}{{display:none}}")
    return "".join(rules)


def style_of(algorithm: str, other: int = 0) -> str:
    """The CSS class of an algorithm's colour; ``other`` numbers the algorithms that have no colour of their own."""
    return f"c-{algorithm.replace('_', '-')}" if algorithm in COLOURS else f"c-other-{other % len(OTHER_COLOURS)}"


def variants_class(numbers: Sequence[int]) -> str:
    """The class of what is shown of variants, by their numbers."""
    return f"v{'-'.join(map(str, numbers))}"


def _policy(style: str, script: str, refresh: str | None) -> str:
    """The policy of a page: its own style and script, and no request but a live page's to its own server."""
    hashed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    connect = "'self'" if refresh else "'none'"
    return (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{hashed}'; img-src data:; "
        f"connect-src {connect}; base-uri 'none'; form-action 'none'"
    )


def card(label: Content, value: Content, *details: Content, disclosure: Disclosure = "public") -> Html:
    """A number that stands out, with what it is and what to know of it."""
    notes = [element("span", detail, class_="detail") for detail in details if detail]
    head = element("span", label, class_="label")
    shown = element("strong", value)
    return element("div", head, shown, *notes, mark(disclosure), class_="card")


def table(
    header: Sequence[Content],
    rows: Sequence[Sequence[Content]],
    texts: int = 1,
    *,
    sortable: bool = False,
    private_columns: Iterable[int] = (),
) -> Html:
    """A table: the first columns are text, the others are numbers; columns measured on clients' data are marked."""
    private = set(private_columns)
    heads = []
    for i, column in enumerate(header):
        inside = element("button", column, type="button") if sortable else text(column)
        classes = " ".join(["text" if i < texts else "number"] + ["private"] * (i in private))
        sign = element("span", "✕", class_="sign", title=MARKS["clients"][1]) if i in private else ""
        heads.append(element("th", inside, sign, scope="col", class_=classes))
    lines = []
    for row in rows:
        cells = [
            element("th", cell, scope="row", class_="text") if i == 0 else _cell(cell, i, texts)
            for i, cell in enumerate(row)
        ]
        lines.append(element("tr", *cells))
    body = element(
        "table",
        element("thead", element("tr", *heads)),
        element("tbody", *lines),
        class_="sortable" if sortable else None,
    )
    return element("div", body, class_="scroll", tabindex="0")


def _cell(cell: Content, column: int, texts: int) -> Html:
    return element("td", cell, class_="text" if column < texts else "number")


def definitions(pairs: Iterable[tuple[Content, Content]]) -> Html:
    """Terms with what they are here."""
    return element("dl", *(join([element("dt", term), element("dd", meaning)]) for term, meaning in pairs))


def copyable(texts: dict[str, str]) -> Html:
    """Texts to copy, by name: a button each, and the text itself to open."""
    parts = []
    for label, content in texts.items():
        button = element("button", f"Copy {label}", type="button", class_="copy js")
        area = element("textarea", content, readonly=True, rows="8", spellcheck="false", aria_label=label)
        parts.append(element("details", element("summary", label, button), area, class_="copyable"))
    return element("div", *parts, class_="copies")

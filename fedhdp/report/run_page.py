"""The page of runs: what came out, what was promised, how training went, the table, and what of it may be published."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from fedhdp.mechanism import SERVER
from fedhdp.privacy.accounting import format_epsilon, pluralize
from fedhdp.report.charts import Charts
from fedhdp.report.groups import groups_section
from fedhdp.report.html import (
    Content,
    Disclosure,
    Html,
    Page,
    Panel,
    Section,
    card,
    definitions,
    element,
    join,
    mark,
    name,
    short,
)
from fedhdp.report.privacy import curve_of, epsilon_section, format_mu, privacy_notes, promise_section
from fedhdp.report.rows import Row, Study, read_study, without_shared_folders
from fedhdp.report.tables import sweep_section, table_section, toggles
from fedhdp.report.training import clip_section, rounds_section
from fedhdp.results.headline import headline
from fedhdp.results.store import RUN_FILE, RunInfo, read_value

SEEDED = "Noise or cohorts came from a given seed. This run is repeatable, and nothing of it is private."


def run_page(
    directories: Iterable[Path],
    public: bool = False,
    published: Sequence[tuple[str, float]] = (),
    refresh: str | None = None,
    version: str = "",
    commands: Sequence[str] = (),
) -> str:
    """The page of runs, as one HTML file.

    Args:
        directories: Directories of runs, finished or under way, of several runs, or of deployments.
        public: Whether to leave out what may not be published.
        published: Names and values of published numbers of the global model, which are lines in its chart.
        refresh: The address that tells a live page its newest version; None for a file.
        version: The version of this one.
        commands: The commands that made the runs, where these are no experiments of their own.

    Raises:
        RunError: If a directory has no run, or nothing was measured yet.
        DamagedRunError: If its files are damaged.
    """
    study, charts = read_study(directories, public), Charts()
    notes = privacy_notes(study)
    sections = [
        promise_section(study, charts),
        rounds_section(study, charts, published),
        epsilon_section(study, charts),
        groups_section(study, charts),
        clip_section(study, charts),
        sweep_section(study, charts),
        table_section(study, notes),
        publishing_section(study),
        provenance_section(study, commands),
    ]
    first, *others = map(study.sentence, _sentences(study))
    page = Page(
        title=f"{study.title} – fedhdp",
        heading=join([name(study.title), f" · {pluralize(study.rounds)}", _seeds(study), _state(study)]),
        lead=first if _is_headline_public(study) else join([first, mark("clients")], " "),
        details=join([" ".join(others), mark("clients")], " ") if others else "",
        cards=_cards(study),
        sections=[section for section in sections if section is not None],
        data={"charts": charts.data, "version": version},
        footer="Made by fedhdp. This file loads nothing from anywhere.",
        notice=SEEDED if study.repeatable else "",
        controls=toggles(study) if len(study.rows) > 1 else Html(""),
        toggles=sorted({*charts.toggles, *((row.number,) for row in study.rows)}),
        refresh=refresh,
    )
    return page.render()


def write_run_page(
    directories: Sequence[Path],
    path: Path,
    public: bool = False,
    published: Sequence[tuple[str, float]] = (),
    commands: Sequence[str] = (),
) -> Path:
    """Write the page of runs to a file (see `run_page`), and return its path."""
    from fedhdp.results.store import atomic_write

    content = run_page(directories, public, published, commands=commands).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(path, content)
    return path


def _seeds(study: Study) -> str:
    return f" · mean of {study.seeds} seeds" if study.seeds > 1 else " · one seed"


def _state(study: Study) -> str:
    return " · under way" if any(part.unfinished for run in study.runs for part in run.runs) else ""


def _sentences(study: Study) -> list[str]:
    """The result in sentences: the first is the page's headline, the others are about clients' own data."""
    words = "nothing of what was measured may be published" if study.public else "nothing is measured yet"
    return headline([[variant.result for variant in row.seeds] for row in study.rows]) or [
        f"{pluralize(len(study.rows), 'variant')}; {words}."
    ]


def _is_headline_public(study: Study) -> bool:
    """Whether the first sentence may be published: it is about the server's test set and the rows that it names."""
    rows = [row for row in (study.main, study.rival) if row is not None]
    measured = study.main.last(SERVER, "global", study.metric.name) is not None
    return study.public or (measured and study.server_is_public and all(row.covered for row in rows))


def _cards(study: Study) -> list[Html]:
    row, info = study.main, study.metric

    def value(group: str, model: str, metric: str) -> str | None:
        point = row.last(group, model, metric)
        return None if point is None else study.format(point.mean)

    cards = []
    if (server := value(SERVER, "global", info.name)) is not None:
        disclosure: Disclosure = "public" if study.server_is_public and row.covered else "clients"
        cards.append(card("server's test set", server, name(short(row.name, 30)), disclosure=disclosure))
    for group in study.groups:
        personal = value(group, "personal", info.name)
        model = "global" if personal is None else "personal"
        mean, worst = value(group, model, info.name), value(group, model, f"{info.name}_worst_decile")
        if mean is not None:
            words = "personal models" if personal else "global model"
            cards.append(
                card(join([name(short(group, 30)), f", {words}"]), mean, f"worst tenth {worst}", disclosure="clients")
            )
    cards += [_privacy_card(row, group) for group in study.groups if row.has(group)]
    left = _budget_left(study, row)
    return [*cards, card("budget left", left[0], left[1])]


def _privacy_card(row: Row, group: str) -> Html:
    result, curve = row.group(group), curve_of(row, group)
    epsilon = "ε not known" if result.epsilon is None else f"ε {format_epsilon(result.epsilon, 2)}"
    delta = f", δ {result.delta:g}" if result.delta is not None else ""
    clients = f"{result.clients:,} clients" if result.clients else ""
    return card(join([name(short(group, 30)), ", privacy"]), epsilon, f"μ {format_mu(curve)}{delta}", clients)


def _budget_left(study: Study, row: Row) -> tuple[str, str]:
    """What is left of the smallest budget, in words: by the ledger, or of what groups asked for."""
    ledger = next((run.settings["ledger"] for run in study.runs if run.settings.get("ledger")), None)
    if ledger is not None and Path(ledger).exists():
        return _ledger_left(Path(ledger), row)
    shares = {
        group.name: 1 - group.epsilon / group.epsilon_target
        for group in row.result.groups
        if group.epsilon_target not in (None, math.inf) and group.epsilon is not None and group.epsilon_target
    }
    if not shares:
        return "no budget", "none was set, and no epsilon asked for"
    group = min(shares, key=lambda key: shares[key])
    return f"{max(0.0, shares[group]):.0%}", f"of the ε that {short(group, 30)} asked for"


def _ledger_left(path: Path, row: Row) -> tuple[str, str]:
    from fedhdp.privacy.ledger import Ledger
    from fedhdp.privacy.reports import group_standing

    with Ledger(path, read_only=True) as ledger:
        known = [group for group in row.result.groups if group.name in ledger.groups()]
        standings = [group_standing(ledger, group.name, group.delta or 1e-4) for group in known]
    left = {s.group: s.rounds_left for s in standings if s.rounds_left is not None and s.rounds_left < math.inf}
    if not left:
        return "–", "the ledger has no budget"
    group = min(left, key=lambda key: left[key])
    return pluralize(int(left[group])), f"for {short(group, 30)}, by {path.name}"


def publishing_section(study: Study) -> Section:
    """What of the page may be published."""
    pairs: list[tuple[Content, Content]] = [
        (
            "May be published",
            "settings, group sizes; epsilons, μ and attack curves; clip and noise, where the clip's bits carry noise",
        ),
        (
            "Only if it is not the clients' data",
            "what is measured on the server's test set: here it has no client's example"
            if study.server_is_public
            else "what is measured on the server's test set: here it has clients' examples, or the run does not say",
        ),
        (
            "Not to be published",
            "means, spreads, worst tenths and counts measured on clients' own data: they have no noise",
        ),
    ]
    if study.uncovered_words:
        pairs.append(
            ("Not covered at all", f"{study.uncovered_words} Nothing that was measured there may be published.")
        )
    state = "It was left out of this file." if study.public else "fedhdp report DIR --public makes a page without it."
    return Section(
        "publish", "What of this may be published", state, [Panel("By kind of number", definitions(pairs), wide=True)]
    )


def _several(values: Iterable[Content], otherwise: str, at_most: int = 3) -> Html:
    """The different values; if there are many, the first ones and the number of the others."""
    unique = list(dict.fromkeys(value for value in values if value))
    rest = [f"and {len(unique) - at_most + 1} more"] if len(unique) > at_most else []
    return join([*unique[: at_most - len(rest)], *rest] or [otherwise], "; ")


def provenance_section(study: Study, commands: Sequence[str] = ()) -> Section:
    """Where the numbers come from."""
    parts = [part for run in study.runs for part in run.runs]
    infos = [read_value(part.path / RUN_FILE, RunInfo) for part in parts if (part.path / RUN_FILE).exists()]
    codes = {(i.version, i.commit, i.modified) for i in infos}
    code = [
        f"{v or 'not recorded'}{f', commit {c}' if c else ''}{', modified' if m else ''}"
        for v, c, m in sorted(codes, key=str)
    ]
    seeds = [", ".join(f"{key.replace('_', ' ')} {value}" for key, value in part.seeds.items()) for part in parts]
    seconds = sum(variant.result.seconds for row in study.rows for variant in row.seeds)
    places = without_shared_folders([part.path for part in parts])
    own = [
        f"fedhdp run {place}/experiment.toml"
        for place, part in zip(places, parts, strict=True)
        if "levels" not in part.raw
    ]
    started = sorted(info.started for info in infos if info.started)
    period = f"{started[0]} to {started[-1]}, {len(started)} runs" if len(started) > 1 else "".join(started)
    pairs: list[tuple[Content, Content]] = [
        ("Runs again with", _several([element("code", c) for c in commands or own], "the deployment's app")),
        ("fedhdp", _several(code, "not recorded")),
        ("Seeds", _several(seeds, "the operating system's entropy alone", 20)),
        ("Machine", _several([info.machine for info in infos], "not recorded")),
        ("Started (UTC)", period or "not recorded"),
        ("Training took", f"{seconds:,.0f} s"),
    ]
    return Section("provenance", "Where it comes from", "", [Panel("Provenance", definitions(pairs), wide=True)])

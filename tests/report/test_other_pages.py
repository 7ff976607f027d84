"""Pages of plans, costs, ledgers and audits: their numbers are those of the tables, and the browser draws them."""

from __future__ import annotations

import datetime
import json
import math
import re
from pathlib import Path

import pytest
from experiment_helpers import TINY, command, tiny
from msgspec.structs import replace
from report_runs import HOSTILE, VARIANTS

from fedhdp.experiments import Variant
from fedhdp.experiments.costs import account_experiment
from fedhdp.mechanism import Mechanism, PrivacyGroup
from fedhdp.privacy.accounting import format_epsilon
from fedhdp.privacy.costs import privacy_costs
from fedhdp.privacy.ledger import Ledger
from fedhdp.privacy.reports import group_standing
from fedhdp.privacy.spending import Spending, rounds_per_week, spending, weeks_left
from fedhdp.report.cost_page import mechanisms_page
from fedhdp.report.ledger_page import ledger_page

WEEK = datetime.timedelta(weeks=1)
NOW = datetime.datetime(2026, 3, 1, tzinfo=datetime.UTC)
PAGES = {
    "plan": ("plan", "--level", "none:inf:5%", "--level", "strict:2:95%", "--rounds", 50),
    "sets": ("plan", "--compare", "today=none:inf:5%,strict:2:95%", "--compare", "offer=none:inf:50%,mild:8:50%"),
    "experiment": ("account", TINY),
    "rounds": ("account", "--epsilon", 4, "--sampling-rate", 0.1, "--rounds", 50),
    "trainings": ("account", "--noise-multiplier", 2, "--sampling-rate", 0.1, "--rounds", 5, "--trainings", 20),
}


def write_ledger(path: Path, name: str = "strict") -> Path:
    """A ledger with two runs of a group that has a budget and one that opted out."""
    groups = (PrivacyGroup("open", 5, 0.0, 0.2), PrivacyGroup(name, 15, 1.5, 0.2))
    mechanism = Mechanism(groups, 0.5)
    with Ledger(path) as ledger:
        ledger.promise(name, 6.0, 1e-4)
        for run in ("first", "second"):
            ledger.begin(run, mechanism)
            ledger.charge(run, privacy_costs(mechanism, 10))
    return path


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> dict[str, Path]:
    """A page by each command."""
    folder, paths = tmp_path_factory.mktemp("pages"), {}
    for name, arguments in PAGES.items():
        paths[name] = folder / f"{name}.html"
        done = command(*arguments, "--report", paths[name])
        assert done.code == 0, done.stderr
        assert done.stdout.splitlines()[-1] == str(paths[name])
    ledger = write_ledger(folder / "a.ledger")
    done = command("ledger", "report", ledger)
    paths["ledger"] = Path(done.stdout.strip())
    return paths


def test_report_leaves_json_one_document(tmp_path):
    done = command("account", TINY, "--json", "--report", tmp_path / "x.html")
    document = json.loads(done.stdout)
    page = (tmp_path / "x.html").read_text()
    for group in (group for part in document["mechanisms"] for group in part["groups"]):
        epsilon = math.inf if group["epsilon"] == "inf" else group["epsilon"]
        assert f">{format_epsilon(epsilon)}<" in page
    assert "x.html" in done.stderr


def test_ledger_page_has_the_standing(tmp_path):
    path = write_ledger(tmp_path / "a.ledger")
    with Ledger(path, read_only=True) as ledger:
        standing = group_standing(ledger, "strict", 1e-4)
        page = ledger_page(ledger, 1e-4, datetime.datetime.now(datetime.UTC) + 2 * WEEK)
        points = spending(ledger, "strict", 1e-4)
    assert [point.rounds for point in points] == [10, 10]
    assert points[-1].epsilon == standing.epsilon
    assert points[0].epsilon < points[1].epsilon
    assert f">{format_epsilon(standing.epsilon)}<" in page
    assert f"{standing.rounds_left} rounds" in page
    assert f"{standing.rounds_left / 10:.1f} weeks at 10 rounds a week" in page
    assert "open: ε ∞ spent" in page


@pytest.mark.parametrize(
    ("later", "unit"),
    [
        (datetime.timedelta(seconds=40), "minutes"),
        (datetime.timedelta(hours=5), "hours"),
        (datetime.timedelta(days=9), "days"),
    ],
)
def test_ledger_page_has_a_unit_of_time_and_goes_on_until_now(tmp_path, later, unit):
    with Ledger(write_ledger(tmp_path / "a.ledger"), read_only=True) as ledger:
        start = spending(ledger, "strict", 1e-4)[0].time
        page = ledger_page(ledger, 1e-4, start + later)
    assert f"{unit} since the first run" in page
    [text] = re.findall(r'id="data">(.*?)</script>', page)
    [line] = json.loads(text)["charts"]["spending-1"]["lines"]
    assert line["p"][-1][0] == pytest.approx(later / datetime.timedelta(**{unit: 1}), rel=1e-3)


def test_page_of_an_experiment_is_about_fedhdp_in_the_colours_of_algorithms(tmp_path):
    variants = (*VARIANTS, Variant("Local only", "local_only"))
    experiment = replace(tiny(), variants=variants, noise_seed=None)
    cost = account_experiment(experiment)
    page = mechanisms_page("tiny", cost.mechanisms, {v.name: v.algorithm for v in variants})
    assert "An attacker who may be wrong once in a hundred finds at most" in page
    assert re.findall(r'<p class="headline">(.*?)</p>', page)[0].endswith("(FedHDP).")
    swatches = re.findall(r'class="swatch (c-[a-z-]+)" aria-hidden="true">.*?<bdi[^>]*>(.*?)</bdi>', page)
    styles = {
        "Non-Private": "c-non-private",
        "DP-FedAvg": "c-dp-fedavg",
        "FedHDP": "c-fedhdp",
        "Local only": "c-local-only",
    }
    assert swatches
    assert all(style == styles[label.rpartition("; ")[2]] for style, label in swatches)


def test_page_of_sets_compares_them(pages):
    page = pages["sets"].read_text()
    [lead] = re.findall(r'<p class="headline">(.*?)</p>', page)
    assert re.fullmatch(r"Expected error of the model by set .*: offer 0\.\d+, today 0\.\d+\.", lead)
    assert "clients of “offer: mild”" in page


def test_pace_is_that_of_the_last_four_weeks():
    old, new = (Spending(NOW - weeks * WEEK, "run", 30, 1.0) for weeks in (40, 1))
    assert rounds_per_week([old, new], NOW) == 30 / 4
    assert rounds_per_week([new], NOW) == 30
    assert rounds_per_week([old], NOW) == 0
    assert rounds_per_week([], NOW) == 0
    assert rounds_per_week([Spending(NOW, "run", 3, 1.0)], NOW) == pytest.approx(21)


@pytest.mark.parametrize(
    ("left", "pace", "weeks"), [(None, 5.0, None), (30, 10.0, 3.0), (30, 0.0, math.inf), (math.inf, 1.0, math.inf)]
)
def test_weeks_left(left, pace, weeks):
    assert weeks_left(left, pace) == weeks


def test_hostile_group_is_text_in_a_ledgers_page(tmp_path):
    with Ledger(write_ledger(tmp_path / "a.ledger", HOSTILE[0]), read_only=True) as ledger:
        page = ledger_page(ledger, 1e-4)
    assert "<script>alert" not in page
    assert page.count("<script") == 2


def test_hostile_names_are_text_before_anything_is_run(tmp_path):
    file, name = tmp_path / "hostile.toml", json.dumps(HOSTILE[0])
    file.write_text(TINY.read_text().replace('"private"', name).replace('"tiny"', name).replace('"FedHDP"', name))
    level = HOSTILE[1].replace(":", " ")
    for arguments in (("account", file), ("plan", "--level", f"{level}:inf:5%", "--level", f"{HOSTILE[3]}:2:95%")):
        arguments = [str(argument).replace("\u202e", "") for argument in arguments]  # no group has it in its name
        assert command(*arguments, "--report", tmp_path / "page.html").code == 0
        page = (tmp_path / "page.html").read_text()
        assert page.count("<script") == 2
        assert "</script><b>" not in page


@pytest.mark.slow
def test_audit_page_has_every_verdict(tmp_path):
    page, file, name = tmp_path / "audit.html", tmp_path / "hostile.toml", json.dumps(HOSTILE[0])
    file.write_text(TINY.read_text().replace('"private"', name).replace('"tiny"', name))
    done = command("audit", file, "--canaries", 15, "--runs", 2, "--json", "--report", page)
    document = json.loads(done.stdout)
    text = page.read_text()
    assert text.count("✓") > 0
    assert text.count("<script") == 2
    assert len(re.findall(r">(?:found|NOT FOUND|too few)</td>", text)) == 1  # of the group without noise
    for group in document["groups"]:
        assert f"AUC {group['unknown_coins']['auc']:.3f}" in text
    assert len(re.findall(r">(?:holds|OFF)</td>", text)) >= len(document["checks"])


@pytest.mark.browser
@pytest.mark.parametrize("name", [*PAGES, "ledger"])
def test_browser_draws_every_page(open_page, pages, name):
    for width in (360, 1400):
        with open_page(pages[name], width=width) as tab:
            widths = "[...document.querySelectorAll('svg.plot .line')].map(line => line.getBBox().width)"
            assert tab.page.evaluate(widths)
            assert min(tab.page.evaluate(widths)) > 0 or name == "ledger"  # of a ledger, all on one day
            assert tab.page.evaluate("document.documentElement.scrollWidth") <= width
            assert tab.requests == [pages[name].absolute().as_uri()]
            assert tab.errors == []

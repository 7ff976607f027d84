"""Pages in a headless browser: drawn, quiet, offline, usable at every width, on paper and without a script."""

from __future__ import annotations

import re

import pytest
from report_runs import HOSTILE, write_page_run

from fedhdp.experiments import Variant
from fedhdp.report.run_page import write_run_page

pytestmark = pytest.mark.browser

OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
DRAWN = """[...document.querySelectorAll('svg.plot')].map(svg => {
  const lines = [...svg.querySelectorAll('.series .line')].map(line => line.getBBox());
  return [svg.id, lines.length, Math.max(...lines.map(box => box.width))];
})"""


def test_charts_are_drawn_without_an_error_or_a_request(open_page, seeds_page):
    with open_page(seeds_page) as tab:
        charts = tab.page.evaluate(DRAWN)
        assert {"attack-0", "attack-1", "server", "personal-0", "epsilon-0", "clip-0", "noise", "unclipped"} <= {
            ident for ident, *_ in charts
        }
        assert [ident for ident, *_ in charts if ident.startswith("sweep")]
        assert [chart for chart in charts if chart[1] < 1 or chart[2] < 100] == []
        assert tab.page.locator(".band").count() > 0
        assert tab.requests == [seeds_page.absolute().as_uri()]
        assert tab.errors == []


def test_policy_forbids_requests(open_page, seeds_page):
    with open_page(seeds_page) as tab:
        tab.page.evaluate("fetch('http://127.0.0.1:9/').catch(() => {})")
        tab.page.evaluate("document.body.append(Object.assign(new Image(), {src: 'http://127.0.0.1:9/x.png'}))")
        tab.page.wait_for_timeout(100)
        assert len(tab.errors) >= 2
        assert all("Content Security Policy" in error or "violates" in error for error in tab.errors)


def test_check_boxes_hide_variants(open_page, seeds_page):
    with open_page(seeds_page) as tab:
        line = tab.page.locator("#server .v1")
        assert line.is_visible()
        tab.page.locator("#show-1").uncheck()
        assert not line.is_visible()
        assert tab.page.locator("#server .v2").is_visible()
        assert tab.errors == []


def test_line_of_several_variants_is_hidden_with_the_last_of_them(open_page, tmp_path):
    page = write_run_page([write_page_run(tmp_path / "run")], tmp_path / "page.html")
    with open_page(page) as tab:
        line = tab.page.locator("#attack-0 .v1-2")  # DP-FedAvg and FedHDP give private clients the same noise
        assert line.count() == 1
        tab.page.locator("#show-1").uncheck()
        assert line.is_visible()
        tab.page.locator("#show-2").uncheck()
        assert not line.is_visible()


def test_smoothing_moves_lines(open_page, seeds_page):
    with open_page(seeds_page) as tab:
        path = "document.querySelector('#server .series .line').getAttribute('d')"
        before = tab.page.evaluate(path)
        tab.page.locator("#smooth").fill("0.9")
        assert tab.page.evaluate(path) != before
        tab.page.locator("#smooth").fill("0")
        numbers = [
            [float(x) for x in text.replace("M", "").replace("L", " ").split()]
            for text in (before, tab.page.evaluate(path))
        ]
        assert numbers[0] == pytest.approx(numbers[1], abs=0.11)


def test_pointer_reads_values(open_page, seeds_page):
    with open_page(seeds_page) as tab:
        tab.page.locator("#server").hover(position={"x": 400, "y": 100})
        text = tab.page.locator(".tip").inner_text()
        assert "round: 12" in text or "round: 8" in text
        assert text.count("%") == 4


def test_table_sorts(open_page, seeds_page):
    with open_page(seeds_page) as tab:
        table = tab.page.locator("#table table")
        table.locator("th button", has_text="Acc_g").click()
        falling = [float(text.split()[0]) for text in table.locator("tbody td:nth-child(2)").all_inner_texts()]
        assert falling == sorted(falling, reverse=True)
        table.locator("th button", has_text="Acc_g").click()
        assert table.locator("tbody td:nth-child(2)").all_inner_texts()[0].startswith(f"{min(falling):.2f}")
        assert table.locator("th[aria-sort=ascending]").count() == 1


@pytest.mark.parametrize(
    ("label", "start"), [("CSV", "run,variant"), ("Markdown", "| algorithm |"), ("LaTeX", "% needs")]
)
def test_texts_are_copied(open_page, seeds_page, label, start):
    with open_page(seeds_page, permissions=["clipboard-read", "clipboard-write"]) as tab:
        tab.page.get_by_role("button", name=f"Copy {label}").click()
        tab.page.wait_for_timeout(100)
        assert tab.page.evaluate("navigator.clipboard.readText()").startswith(start)


@pytest.mark.parametrize("width", [360, 1400])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_page_fits(open_page, seeds_page, width, scheme):
    with open_page(seeds_page, width=width, color_scheme=scheme) as tab:
        assert tab.page.evaluate(OVERFLOW) == 0
        back, ink = tab.page.evaluate("(s => [s.backgroundColor, s.color])(getComputedStyle(document.body))")
        brightness = [sum(map(int, colour[4:-1].split(","))) for colour in (back, ink)]
        assert (brightness[0] < brightness[1]) == (scheme == "dark")
        smallest = (
            "Math.min(...[...document.querySelectorAll('svg.plot text')].map(t => t.getBoundingClientRect().height))"
        )
        assert tab.page.evaluate(smallest) >= 9


def test_page_prints(open_page, seeds_page):
    with open_page(seeds_page) as tab:
        pdf = tab.page.pdf(prefer_css_page_size=True)
        assert pdf.startswith(b"%PDF")
        boxes = re.findall(rb"/MediaBox \[0 0 ([0-9.]+) ([0-9.]+)\]", pdf)
        assert 2 <= len(boxes) <= 12
        assert {tuple(round(float(side)) for side in box) for box in boxes} == {(595, 842)}  # A4


def test_page_is_readable_without_a_script(open_page, seeds_page):
    with open_page(seeds_page, java_script_enabled=False) as tab:
        assert tab.page.locator("svg.plot").count() >= 8
        assert tab.page.locator("#server .line").first.is_visible()
        assert tab.page.locator("#table tbody tr").count() == 4
        assert not tab.page.locator("button.copy").first.is_visible()
        assert not tab.page.get_by_text("Press a column's name to sort.").is_visible()
        tab.page.locator("#show-1").uncheck()  # a rule of the style hides, not the script
        assert not tab.page.locator("#server .v1").is_visible()
        tab.page.locator("#table summary").first.click()
        assert tab.page.locator("#table textarea").first.is_visible()


def test_hostile_names_are_text(open_page, tmp_path):
    variants = tuple(Variant(f"{number} {name}") for number, name in enumerate(HOSTILE))
    groups = {"private": HOSTILE[0], "opted out": "o" * 120}
    run = write_page_run(tmp_path / "run", variants=variants, groups=groups)
    page = write_run_page([run], tmp_path / "page.html")
    for width in (360, 1400):
        with open_page(page, width=width) as tab:
            tab.page.on("dialog", lambda dialog: pytest.fail("a script of a name ran"))
            shown = tab.page.locator("#table tbody th").all_inner_texts()
            assert shown == [variant.name for variant in variants]
            assert tab.page.evaluate("document.scripts.length") == 2
            assert tab.page.evaluate(OVERFLOW) == 0
            assert tab.errors == []


WORD = """([selector, word]) => {
  const node = document.createTreeWalker(document.querySelector(selector), NodeFilter.SHOW_TEXT).nextNode();
  const start = node.data.indexOf(word), range = document.createRange();
  return [...word].map((_, i) => {
    range.setStart(node, start + i);
    range.setEnd(node, start + i + 1);
    return range.getBoundingClientRect().left;
  });
}"""


def test_name_from_right_to_left_turns_no_other_word(open_page, tmp_path):
    variants = (Variant("DP-FedAvg", "dp_fedavg"), Variant("\u202eFedHDP שלום"))
    run = write_page_run(tmp_path / "run", variants=variants, groups={"private": "פרטי"})
    with open_page(write_run_page([run], tmp_path / "page.html")) as tab:
        for selector, word in ((".headline", "accuracy"), (".details", "brackets")):
            places = tab.page.evaluate(WORD, [selector, word])
            assert places == sorted(places), word
        tab.page.locator("#server").hover(position={"x": 400, "y": 100})
        tip = tab.page.locator(".tip div").last
        assert tip.locator("bdi").inner_text() == variants[1].name
        assert tip.inner_text().endswith("%")


def test_text_of_charts_is_large_enough_on_paper_and_on_a_telephone(open_page, seeds_page):
    heights = (
        "[...document.querySelectorAll('svg.plot text, .dots text')].map(t => t.getScreenCTM().a * parseFloat("
        + ("getComputedStyle(t).fontSize))")
    )
    for width, media in ((360, "screen"), (695, "print")):  # pixels, of which A4 has 695 between its margins
        with open_page(seeds_page, width=width) as tab:
            tab.page.emulate_media(media=media)
            assert min(tab.page.evaluate(heights)) >= 9.5, media

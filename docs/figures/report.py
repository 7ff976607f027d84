"""The picture of a page in the README: ``python docs/figures/report.py REPORT.html``, with playwright and Chromium."""

from __future__ import annotations

import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

OUT = Path(__file__).with_suffix(".png")


def main(page: Path) -> None:
    """Take the picture of the page's head and its attack curves."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": 1160, "height": 1292})
        tab.goto(page.absolute().as_uri())
        tab.screenshot(path=OUT)
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

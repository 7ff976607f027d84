"""A headless browser that reports every error and every request, and pages to open in it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from report_runs import write_page_run

from fedhdp.report.run_page import write_run_page


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    """Chromium, driven by playwright."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: make browser")
    path = shutil.which("chromium") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("Chromium is not installed: make browser")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


class Tab:
    """A page in the browser.

    Attributes:
        page: playwright's page.
        errors: What the console said, and the script's errors.
        requests: The addresses that were requested, the page's own among them.
    """

    def __init__(self, page: Any):
        self.page = page
        self.errors: list[str] = []
        self.requests: list[str] = []
        page.on("console", lambda message: self.errors.append(message.text))
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("request", lambda request: self.requests.append(request.url))


@pytest.fixture
def open_page(chromium) -> Callable[..., Any]:
    """Open a file or an address: ``with open_page(path, width=360) as tab``."""

    @contextmanager
    def opened(path: Path | str, width: int = 1400, **options: Any) -> Iterator[Tab]:
        context = chromium.new_context(viewport={"width": width, "height": 900}, **options)
        tab = Tab(context.new_page())
        tab.page.goto(path.absolute().as_uri() if isinstance(path, Path) else path)
        yield tab
        context.close()

    return opened


@pytest.fixture(scope="session")
def seeds_page(tmp_path_factory) -> Path:
    """The page of a run with two seeds and a sweep over weights."""
    from fedhdp.experiments import Variant

    folder = tmp_path_factory.mktemp("seeds")
    weights = tuple(Variant(f"FedHDP r={weight:g}", weights={"private": weight}) for weight in (0.01, 0.1, 1.0))
    variants = (Variant("DP-FedAvg", "dp_fedavg"), *weights)
    runs = [write_page_run(folder / str(seed), seed=seed, variants=variants) for seed in (0, 1)]
    return write_run_page(runs, folder / "page.html")

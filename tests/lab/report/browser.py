"""The browser that a page is opened in, and a page that complains of nothing."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
# Nothing but the page is to be loaded, and no machine is to be asked for anything.
_ARGUMENTS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
)


@contextmanager
def a_browser() -> Iterator[Browser]:
    """Chromium or Chrome. Without one, a test fails in CI and is skipped elsewhere."""
    named = os.environ.get("ATTNSPAN_BROWSER")
    path = next(filter(None, map(shutil.which, (named,) if named else _NAMES)), None)
    if path is None:
        required = os.environ.get("CI") or os.environ.get("ATTNSPAN_REQUIRE_BROWSER")
        (pytest.fail if required else pytest.skip)("no browser: install chromium, or set ATTNSPAN_BROWSER")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(_ARGUMENTS))
        yield browser
        browser.close()


@contextmanager
def opened(browser: Browser, path: Path, width: int = 1280, **options: Any) -> Iterator[Page]:
    """Open a page. By the end its console is empty, and nothing was fetched but the file itself."""
    page, said = browser.new_page(viewport={"width": width, "height": 900}, **options), list[str]()
    for event in ("console", "pageerror", "dialog"):
        page.on(event, lambda x: said.append(str(x)))  # type: ignore[call-overload]
    page.on("request", lambda x: said.append(x.url) if not x.url.startswith(("data:", "blob:")) else None)
    page.goto(path.as_uri())
    yield page
    assert set(said) == {page.url.split("#")[0]}, said
    page.close()


def draw_all(page: Page) -> list[dict[str, Any]]:
    """Scroll past every chart that is shown. Return its title, its marks and its headings of axes."""
    found: list[dict[str, Any]] = page.evaluate(
        """async () => {
          const found = [];
          for (const holder of document.querySelectorAll("figure:not([hidden]) .chart")) {
            holder.scrollIntoView();
            while (!holder.querySelector("svg.main-svg")) await new Promise(requestAnimationFrame);
            const count = (marks) => holder.querySelectorAll(marks).length;
            found.push({
              title: holder.parentElement.querySelector("b").textContent,
              marks: count(".point path, path.point, path.js-line, path.js-fill, .textpoint text, .hm image"),
              axes: count(".xtitle") && (count(".ytitle") || count(".ytick text, .textpoint text")),
            });
          }
          return found;
        }"""
    )
    return found

"""The browser that the page is opened in: whichever Chromium or Chrome the machine has."""

from __future__ import annotations

import shutil
from collections.abc import Mapping

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
REMEDY = "install one (Debian, Ubuntu: sudo apt-get install chromium), or name it in ATTNSPAN_BROWSER"
# Nothing but the page is to be loaded, and no machine is to be asked for anything.
ARGUMENTS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


def find_browser(environment: Mapping[str, str]) -> str:
    """Path of a browser; without one the test fails where one is required, and is skipped elsewhere."""
    named = environment.get("ATTNSPAN_BROWSER")
    for name in (named,) if named else NAMES:
        path = shutil.which(name, path=environment.get("PATH"))
        if path is not None:
            return path
    missing = f"no browser: {named or ', '.join(NAMES)} not found on PATH; {REMEDY}"
    if environment.get("CI") or environment.get("ATTNSPAN_REQUIRE_BROWSER"):
        pytest.fail(missing)
    pytest.skip(missing)

"""The system's Chromium, for tests of the web page. ``make test`` installs it where it can."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Browser, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
SCREENS = Path(__file__).parents[2] / "build" / "screens"
"""Where screenshots are kept, to be looked at."""


@contextmanager
def chromium() -> Iterator[Browser]:
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip("No Chromium on this machine: install it with `make browser`, or apt-get install chromium.")
    SCREENS.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        # Without its own sandbox: containers forbid it what it needs, and it only sees our own page.
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield browser
        browser.close()

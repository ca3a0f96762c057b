"""The web page in a real browser, against a real scripted server: fixtures, as a pytest plugin."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from playwright.sync_api import Browser, expect

from support.browser import chromium
from support.live_server import KEY, MODEL, Live, live
from support.web_page import PATIENCE_MS, WIDE, Open
from support.web_turns import EXTRA, plan_document


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Not for the session: Playwright keeps an event loop running, and other tests in the process call asyncio.run."""
    with chromium() as found:
        yield found


@pytest.fixture(scope="session")
def web_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    log = tmp_path_factory.mktemp("web") / "log"
    with live(log, step_s=0.0005, plan=plan_document(), turns=list(EXTRA.values())) as running:
        yield running


@pytest.fixture
def open_page(browser: Browser, web_server: Live) -> Open:
    """A page with its own storage: settings as given, and the key unless it is left out."""

    @contextmanager
    def opened(seed: int = 0, *, key: bool = True, **settings: Any) -> Any:
        context = browser.new_context(
            viewport=WIDE,
            reduced_motion="reduce",
            permissions=["clipboard-read", "clipboard-write"],
        )
        context.set_default_timeout(PATIENCE_MS)
        kept = json.dumps({"seed": str(seed), **settings})
        context.add_init_script(f"localStorage.setItem('microscale.settings', {json.dumps(kept)})")
        if key:
            context.add_init_script(f"sessionStorage.setItem('microscale.key', '{KEY}')")
        page = context.new_page()
        asked: list[str] = []
        troubles: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.on("console", lambda line: troubles.append(line.text) if "Content Security" in line.text else None)
        page.goto(web_server.address)
        if key:
            expect(page.locator("#model")).to_have_text(MODEL, timeout=PATIENCE_MS)
        yield page
        context.close()
        assert not troubles
        assert all(url.startswith(web_server.address) for url in asked), "nothing is loaded from elsewhere"

    return opened

"""What tests of the web page do with it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from playwright.sync_api import Page, Request, expect

from support.browser import SCREENS

PATIENCE_MS = 30_000
WIDE: Any = {"width": 1280, "height": 860}
NARROW: Any = {"width": 390, "height": 844}
Open = Callable[..., AbstractContextManager[Page]]


def ask(page: Page, text: str) -> None:
    page.get_by_label("Your message").fill(text)
    page.keyboard.press("Enter")


def done(page: Page, count: int = 1) -> None:
    expect(page.locator(".turn.model:not([aria-busy])")).to_have_count(count, timeout=PATIENCE_MS)


def sent_body(request: Request) -> dict[str, Any]:
    """The JSON that the page sent."""
    body: dict[str, Any] | None = request.post_data_json
    assert body is not None
    return body


def keep_looks(page: Page, name: str, at: str | None = None) -> None:
    """Screenshots, wide and narrow, light and dark, scrolled to ``at``; nothing is ever wider than the window."""
    for size, width in (("narrow", NARROW), ("wide", WIDE)):
        page.set_viewport_size(width)
        if at is not None:
            page.locator(at).evaluate("(element) => element.scrollIntoView()")
        for scheme in ("dark", "light"):
            page.emulate_media(color_scheme=scheme)
            page.screenshot(path=SCREENS / f"{name}-{size}-{scheme}.png")
        assert page.evaluate("[...document.querySelectorAll('.scroll')].every((e) => e.scrollWidth <= innerWidth)")

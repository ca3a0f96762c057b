"""Every page of the site on a desktop and on a phone, light and dark: ``make docs-screens``. Nothing may be cut off."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.browser import SCREENS, chromium
from support.built_site import build, pages, served

SIZES = {"desktop": (1360, 1000), "phone": (390, 844)}
SCHEMES = ("light", "dark")
TALLEST = 2600
"""A long page shows its first screens; the rest is more of the same."""


@pytest.mark.timeout(900)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("size", SIZES)
def test_photographs(size: str, scheme: str, tmp_path: Path) -> None:
    site = build(tmp_path)
    folder = SCREENS / "docs" / f"{size}-{scheme}"
    folder.mkdir(parents=True, exist_ok=True)
    width, height = SIZES[size]
    wide = []
    with served(site) as address, chromium() as browser:
        context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)  # type: ignore[arg-type]
        context.set_default_timeout(120_000)
        page = context.new_page()
        for path in pages(site):
            name = str(path.relative_to(site))
            page.goto(address + name)
            tall = min(int(page.evaluate("document.documentElement.scrollHeight")), TALLEST)
            clip = {"x": 0, "y": 0, "width": width, "height": tall}
            shot = folder / (name.replace("/", "_") + ".png")
            page.screenshot(path=shot, full_page=True, clip=clip, animations="disabled")  # type: ignore[arg-type]
            if page.evaluate("document.documentElement.scrollWidth") > width:
                wide.append(name)
    assert not wide

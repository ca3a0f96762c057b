"""The documentation site: it builds without a warning, its links lead somewhere, it loads nothing from elsewhere, and
it can be read and searched in a browser without a network."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Route

from support.browser import chromium
from support.built_site import broken, build, is_outside, pages, served
from support.doc_commands import ROOT, nav

pytestmark = pytest.mark.nightly

# Of this project's machines. Pages may speak of folders that any machine has.
PRIVATE = re.compile(rf"{re.escape(str(ROOT))}|/(root|home)/\w|/simple/\w")
# The widest tables and the longest lines.
WIDE = ("index.html", "comparison.html", "benchmarks.html", "flags.html", "clients.html", "start/rtx_5090.html")


def test_the_site_is_whole_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    site = build(tmp_path)
    found = pages(site)
    for source in nav():
        name = "demo" if source == "demo/README.md" else source.removeprefix("docs/").removesuffix(".md")
        assert site / f"{name.replace('README', 'index').lower()}.html" in found, source
    assert not broken(site, found)
    for path, page in found.items():
        assert not [target for target in page.loads if is_outside(target)], path
        assert not PRIVATE.search(page.text), path
    for path in site.rglob("*.css"):
        assert not re.search(r"url\(\s*[\"']?(https?:)?//", path.read_text()), path


def test_what_is_broken_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        '<h1 id="here"></h1><a href="b.html#x"></a><a href="#here"></a><a href="c.html"></a>'
    )
    (tmp_path / "b.html").write_text('<script src="https://example.org/x.js"></script><a href="a.html#there"></a>')
    found = pages(tmp_path)
    assert broken(tmp_path, found) == ["a.html: b.html#x", "a.html: c.html", "b.html: a.html#there"]
    assert found[tmp_path / "b.html"].loads == ["https://example.org/x.js"]


@pytest.mark.slow
def test_it_is_read_and_searched_without_a_network(tmp_path: Path) -> None:
    site = build(tmp_path)
    asked: list[str] = []

    def only_here(route: Route) -> None:
        if urlsplit(route.request.url).hostname == "127.0.0.1":
            route.continue_()
        else:
            asked.append(route.request.url)
            route.abort()

    with served(site) as address, chromium() as browser:
        context = browser.new_context(viewport={"width": 390, "height": 800})
        context.route("**/*", only_here)
        context.set_default_timeout(120_000)
        page = context.new_page()
        for name in WIDE:
            page.goto(address + name)
            # What is too wide scrolls inside of its own box.
            assert page.evaluate("document.documentElement.scrollWidth") <= 390, name
        page.set_viewport_size({"width": 1280, "height": 800})
        page.goto(address + "index.html")
        search = page.locator("input.md-search__input")
        search.click()
        # Keys that come before the index is there would be lost.
        page.locator(".md-search-result__meta", has_text="Type to start searching").wait_for(state="attached")
        search.press_sequentially("page cache")
        # One question for the whole list, asked again until it is true: each key searches anew and may remove any link.
        page.locator(".md-search-result__link[href*='dgx_spark']").first.wait_for(state="attached")
    assert not asked


def test_the_menu_lists_pages_that_exist() -> None:
    """A page that is not listed is built all the same, and found by the search."""
    listed = set(nav())
    assert listed >= {"README.md", "docs/flags.md", "docs/api.md", "docs/architecture.md"}
    assert all((ROOT / page).exists() for page in listed)

"""The documentation site: it builds without a warning, has no broken links, loads nothing from elsewhere, and can be
read and searched in a browser without a network, from a server or from a folder."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Page, Route

from support.browser import chromium
from support.built_site import broken, build, is_outside, pages, served
from support.doc_commands import ROOT, nav

pytestmark = pytest.mark.nightly

# Paths of the machine that built the site.
PRIVATE = re.compile(rf"{re.escape(str(ROOT))}|/(root|home)/\w|/simple/\w")
# The widest tables and the longest lines.
WIDE = ("index.html", "comparison.html", "benchmarks.html", "flags.html", "clients.html", "recipes/from_vllm.html")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("site"))


def test_the_site_is_whole_and_loads_nothing_from_elsewhere(site: Path) -> None:
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


def search(page: Page, text: str, wanted: str) -> None:
    """Type into the search box and wait for a result whose address contains ``wanted``."""
    box = page.locator("input.md-search__input")
    box.click()
    # Keys that arrive before the index is loaded would be lost.
    page.locator(".md-search-result__meta", has_text="Type to start searching").wait_for(state="attached")
    box.press_sequentially(text)
    # One query for the whole list, repeated until it succeeds: each key starts a search that may remove any link.
    page.locator(f".md-search-result__link[href*='{wanted}']").first.wait_for(state="attached")


@contextmanager
def offline_page(allowed: Callable[[str], bool], width: int) -> Iterator[Page]:
    """A page of a browser that may load only what is allowed; fails if it asked for anything else."""
    refused: list[str] = []

    def only_here(route: Route) -> None:
        if allowed(route.request.url):
            route.continue_()
        else:
            refused.append(route.request.url)
            route.abort()

    with chromium() as browser:
        context = browser.new_context(viewport={"width": width, "height": 800})
        context.route("**/*", only_here)
        context.set_default_timeout(120_000)
        yield context.new_page()
    assert not refused


@pytest.mark.slow
def test_it_is_read_and_searched_without_a_network(site: Path) -> None:
    with served(site) as address, offline_page(lambda url: urlsplit(url).hostname == "127.0.0.1", 390) as page:
        for name in WIDE:
            page.goto(address + name)
            # What is too wide scrolls inside of its own box.
            assert page.evaluate("document.documentElement.scrollWidth") <= 390, name
        page.set_viewport_size({"width": 1280, "height": 800})
        page.goto(address + "index.html")
        search(page, "swapoff", "troubleshooting")


@pytest.mark.slow
def test_the_copy_button_takes_commands_without_prompts(site: Path) -> None:
    with served(site) as address, offline_page(lambda url: urlsplit(url).hostname == "127.0.0.1", 1280) as page:
        page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        page.goto(address + "using.html")
        block = page.locator(".highlight", has_text="microscale chat").first
        assert "$ " in block.inner_text()
        block.hover()
        block.locator("[data-clipboard-target], .md-code__button, .md-clipboard").first.click()
        page.wait_for_function("navigator.clipboard.readText().then((text) => text.includes('microscale chat'))")
        copied = page.evaluate("navigator.clipboard.readText()")
    assert copied.splitlines()[0].startswith(".venv/bin/microscale chat")
    assert "$ " not in copied


@pytest.mark.slow
@pytest.mark.parametrize("name", ["index.html", "recipes/codex.html"])
def test_it_is_searched_when_opened_from_the_folder(name: str, site: Path) -> None:
    with offline_page(lambda url: url.startswith(site.as_uri()), 1280) as page:
        page.goto((site / name).as_uri())
        search(page, "swapoff", "troubleshooting")


def test_the_menu_lists_pages_that_exist() -> None:
    """A page that is not listed is built and searched all the same."""
    listed = set(nav())
    assert listed >= {"README.md", "docs/flags.md", "docs/api.md", "docs/architecture.md"}
    assert all((ROOT / page).exists() for page in listed)

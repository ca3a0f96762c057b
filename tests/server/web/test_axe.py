"""The rules of axe-core on every state of the page. npm brings axe-core, pinned by version and hash."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from support.live_server import SEEDS as PLAIN
from support.web_page import NARROW, Open, ask, done
from support.web_turns import SEEDS

pytest_plugins = ["support.web_fixtures"]
VERSION = "4.14.0"
SHA256 = "2277b0a3ef47af9b52497faa3e71598e86e0a0e5e6eb295207a5657ede4709af"
# All rules but one: the levels of the headings within an answer are the model's.
RUN = """async () => {
  const { violations } = await axe.run(document, { rules: { "heading-order": { enabled: false } } });
  const why = (node) => node.any.map((check) => check.message).join(" ").slice(0, 200);
  return violations.flatMap(({ id, nodes }) => nodes.map((node) => `${id}: ${node.html.slice(0, 160)} ${why(node)}`));
}"""


@pytest.fixture(scope="module")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("npm is not installed, and axe-core comes from it.")
    folder = tmp_path_factory.mktemp("axe")
    command = [npm, "pack", "--silent", "--fetch-retries=0", "--fetch-timeout=30000", f"axe-core@{VERSION}"]
    try:
        subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=True)
    except subprocess.SubprocessError as error:
        pytest.skip(f"npm cannot fetch axe-core: {error}")
    archive = folder / f"axe-core-{VERSION}.tgz"
    assert hashlib.sha256(archive.read_bytes()).hexdigest() == SHA256
    with tarfile.open(archive) as files:
        script = files.extractfile("package/axe.min.js")
        assert script is not None
        return script.read().decode()


def expect_clean(page: Page, axe: str) -> None:
    if not page.evaluate("typeof axe === 'object'"):
        page.evaluate(f"() => {{ {axe} }}")
    assert page.evaluate(RUN) == []


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("size", ["wide", "narrow"])
def test_the_chat(open_page: Open, axe: str, scheme: str, size: str, tmp_path: Path) -> None:
    with open_page(SEEDS["formulas"]) as page:
        page.emulate_media(color_scheme="dark" if scheme == "dark" else "light")
        if size == "narrow":
            page.set_viewport_size(NARROW)
        expect_clean(page, axe)
        ask(page, "Formulas, please")
        done(page)
        expect(page.locator(".typeset")).to_have_count(5)
        page.get_by_label("Try again").click()
        done(page)
        (tmp_path / "a.txt").write_text("text")
        page.locator("#choose-files").set_input_files(tmp_path / "a.txt")
        expect(page.locator("#files li")).to_have_count(1)
        expect_clean(page, axe)
        if size == "narrow":
            page.get_by_role("button", name="Conversations").click()
        page.locator("#chats-list li").hover()
        page.get_by_role("button", name="Rename").click()
        expect_clean(page, axe)
        page.keyboard.press("Escape")
        page.get_by_role("button", name="Delete").click()
        expect_clean(page, axe)


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.nightly)])
def test_the_other_views(open_page: Open, axe: str, scheme: str) -> None:
    with open_page(SEEDS["markdown"]) as page:
        page.emulate_media(color_scheme="dark" if scheme == "dark" else "light")
        ask(page, "Markdown, please")
        done(page)
        page.locator("details.thoughts summary").click()
        expect_clean(page, axe)
        page.get_by_role("button", name="Settings").click()
        page.get_by_label("Temperature", exact=True).fill("3")
        expect_clean(page, axe)
        page.keyboard.press("Escape")
        page.get_by_role("link", name="What is running").click()
        page.locator(".layer-row summary.layer").nth(4).click()
        expect_clean(page, axe)


def test_a_call_and_the_key(open_page: Open, axe: str) -> None:
    with open_page(PLAIN["call"], tools='[{"function": {"name": "get_weather"}, "type": "function"}]') as page:
        ask(page, "What is the weather in Paris?")
        done(page)
        expect_clean(page, axe)
    with open_page(key=False) as page:
        expect(page.locator("#key")).to_be_focused()
        expect_clean(page, axe)

"""Takes the picture of the web page in README: a conversation with the embedded model, in the system's Chromium.

``make docs-picture``. Figures in it are those of the machine that took it, and change with every run.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from playwright.sync_api import Page, expect

from support.browser import chromium
from support.doc_commands import blocks
from support.run_commands import Reader
from tools.docs.links import ROOT

TARGET = ROOT / "docs/pictures/chat.png"
PATIENCE_MS = 120_000
# Each list is one conversation; the last one is in the picture.
QUESTIONS = (
    ["What is the weather in Oslo?"],
    ["Tell me a short story about a fox."],
    ["What is 247 + 385?", "What is the capital of Peru?"],
)
SERVE = "```console\n$ microscale serve\n```\n"


def converse(page: Page, questions: list[str]) -> None:
    for count, question in enumerate(questions, 1):
        page.get_by_label("Your message").fill(question)
        page.keyboard.press("Enter")
        expect(page.locator(".turn.model:not([aria-busy])")).to_have_count(count)


def main() -> None:
    expect.set_options(timeout=PATIENCE_MS)
    settings = json.dumps(json.dumps({"temperature": "0"}))
    TARGET.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, Reader(Path(folder)) as reader, chromium() as browser:
        reader.run(blocks("screenshot", SERVE)[0])
        page = browser.new_page(viewport={"width": 1200, "height": 700}, reduced_motion="reduce")
        page.add_init_script(f"localStorage.setItem('microscale.settings', {settings})")
        page.goto(str(reader.address))
        for questions in QUESTIONS:
            if page.locator(".turn").count():
                page.get_by_role("button", name="New chat").click()
            converse(page, questions)
        page.locator(".thoughts summary").first.click()
        page.mouse.move(0, 0)
        page.screenshot(path=TARGET, animations="disabled")


if __name__ == "__main__":
    main()

"""What goes with a message: text files, the settings and their bounds, and how much of the context is used."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from playwright.sync_api import Route, expect

from support.live_server import SEEDS as PLAIN
from support.web_page import Open, ask, done, keep_looks, sent_body

pytest_plugins = ["support.web_fixtures"]
CHAT = "**/v1/chat/completions"


def test_text_files_are_sent_in_fences(open_page: Open, tmp_path: Path) -> None:
    (tmp_path / "notes.md").write_text("# Notes\n\n```py\nprint()\n```\n")
    (tmp_path / "a b.txt").write_text("text")
    with open_page(PLAIN["answer"]) as page:
        page.locator("#choose-files").set_input_files([tmp_path / "notes.md", tmp_path / "a b.txt"])
        chips = page.locator("#files li")
        expect(chips).to_have_count(2)
        expect(chips.first).to_contain_text("notes.md27 bytes")
        keep_looks(page, "files")
        page.get_by_role("button", name="Remove a b.txt").click()
        expect(chips).to_have_count(1)
        expect(page.get_by_label("Your message")).to_be_focused()
        with page.expect_request(CHAT) as sent:
            ask(page, "Summarise")
        content = "notes.md:\n\n````md\n# Notes\n\n```py\nprint()\n```\n````\n\nSummarise"
        assert sent_body(sent.value)["messages"] == [{"role": "user", "content": content}]
        expect(chips).to_have_count(0)
        done(page)
        page.reload()
        done(page)
        file = page.locator(".sent-file")
        file.locator("summary").click()
        expect(file.locator("pre")).to_contain_text("# Notes")
        expect(page.locator(".said")).to_have_text("Summarise")
        page.locator(".turn.user").hover()
        page.get_by_label("Edit this message").click()
        expect(chips).to_have_count(1)


def test_files_have_limits(open_page: Open, tmp_path: Path) -> None:
    files = {"picture.png": b"\x89PNG\xff", "zero.bin": b"a\0b", "long.txt": b"a" * 600_000, "fine.txt": b"fine"}
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    for number in range(10):
        (tmp_path / f"{number}.txt").write_text("a")
    with open_page(PLAIN["answer"]) as page:
        page.locator("#choose-files").set_input_files([tmp_path / name for name in files])
        expect(page.locator("#files li")).to_have_count(1)
        banner = page.locator("#banner")
        for name in ("picture.png", "zero.bin"):
            expect(banner).to_contain_text(f"{name} was not attached: it is not a text file.")
        expect(banner).to_contain_text("long.txt was not attached: the files of a message can have 512 KB together.")
        page.locator("#choose-files").set_input_files([tmp_path / f"{number}.txt" for number in range(10)])
        expect(page.locator("#files li")).to_have_count(10)
        expect(banner).to_contain_text("9.txt was not attached: a message can have 10 files.")


def test_files_return_with_a_question_that_fails(open_page: Open, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    with open_page(PLAIN["answer"]) as page:
        page.locator("#choose-files").set_input_files(tmp_path / "a.txt")
        expect(page.locator("#files li")).to_have_count(1)
        page.context.set_offline(True)
        page.get_by_role("button", name="Send").click()
        expect(page.locator("#banner")).to_contain_text("cannot be reached")
        expect(page.locator("#files li")).to_have_count(1)


@pytest.mark.parametrize(
    ("label", "wrong", "right", "sentence"),
    [
        ("Temperature", ["2.1", "-1"], "2", "Temperature must be a number from 0 to 2."),
        ("Top p", ["0", "1.5"], "0.5", "Top p must be a number above 0, up to 1."),
        ("Maximum tokens", ["0", "1.5"], "7", "Maximum tokens must be a whole number from 1."),
        ("Seed", ["-1", "0.5"], "0", "The seed must be a whole number from 0."),
    ],
)
def test_settings_have_bounds(open_page: Open, label: str, wrong: list[str], right: str, sentence: str) -> None:
    name = {"Temperature": "temperature", "Top p": "top_p", "Maximum tokens": "max_tokens", "Seed": "seed"}[label]
    with open_page(PLAIN["answer"]) as page:
        page.get_by_role("button", name="Settings").click()
        field = page.get_by_label(label, exact=True)
        for text in wrong:
            field.fill(text)
            expect(page.locator(f"#error-{name}")).to_have_text(sentence)
            expect(field).to_have_attribute("aria-invalid", "true")
        page.get_by_role("button", name="Done").click()
        ask(page, "Hello")
        expect(page.locator("#banner")).to_contain_text(f"{sentence} Correct it in the settings.")
        page.get_by_role("button", name="Settings").click()
        field.fill(right)
        expect(page.locator(f"#error-{name}")).to_be_hidden()
        page.get_by_role("button", name="Done").click()
        with page.expect_request(CHAT) as sent:
            page.get_by_role("button", name="Send").click()
        assert sent_body(sent.value)[name] == float(right)


def test_stored_settings_outside_of_the_bounds_are_not_used(open_page: Open) -> None:
    with open_page(PLAIN["answer"], temperature=7, top_p="x", max_tokens="many", effort="huge") as page:
        with page.expect_request(CHAT) as sent:
            ask(page, "Hello")
        body = sent_body(sent.value)
        assert body["reasoning_effort"] == "medium"
        assert not {"temperature", "top_p", "max_tokens"} & body.keys()  # the model's own
        done(page)


def test_the_context_used_is_shown(open_page: Open) -> None:
    with open_page(PLAIN["answer"]) as page:
        replies: list[str] = []

        def keep(route: Route) -> None:
            reply = route.fetch()
            replies.append(reply.text())
            route.fulfill(response=reply)

        page.route(CHAT, keep)
        context = page.locator("#context")
        expect(context).to_be_hidden()
        ask(page, "Hello")
        done(page)
        usage = next(json.loads(line[6:])["usage"] for line in replies[0].splitlines() if '"total_tokens"' in line)
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"] > 0
        expect(context).to_have_text(f"Context: {usage['total_tokens']} of 4,096 tokens")
        page.get_by_role("button", name="New chat").click()
        expect(context).to_be_hidden()

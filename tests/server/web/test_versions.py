"""Edited questions and repeated answers: every version is kept, and the reader can switch between them."""

from __future__ import annotations

from playwright.sync_api import Page, expect

from support.live_server import SEEDS as PLAIN
from support.web_page import Open, ask, done, keep_looks, sent_body
from support.web_turns import SEEDS

pytest_plugins = ["support.web_fixtures"]
CHAT = "**/v1/chat/completions"


def version(at: int, of: int) -> str:
    return f"\N{SINGLE LEFT-POINTING ANGLE QUOTATION MARK}{at}/{of}\N{SINGLE RIGHT-POINTING ANGLE QUOTATION MARK}"


def edit(page: Page, question: int, text: str) -> None:
    page.locator(".turn.user").nth(question).hover()
    page.get_by_label("Edit this message").nth(question).click()
    page.get_by_label("Your message").fill(text)
    page.keyboard.press("Enter")


def test_an_edit_keeps_the_old_version(open_page: Open) -> None:
    with open_page(PLAIN["answer"]) as page:
        ask(page, "One")
        done(page)
        ask(page, "Two")
        done(page, 2)
        with page.expect_request(CHAT) as sent:
            edit(page, 0, "Other")
        assert [message["content"] for message in sent_body(sent.value)["messages"]] == ["Other"]
        done(page, 1)
        expect(page.locator(".said")).to_have_text(["Other"])
        versions = page.get_by_role("group", name="Versions of this message")
        expect(versions).to_have_text(version(2, 2))
        keep_looks(page, "versions")
        page.get_by_label("Previous version").click()
        expect(page.locator(".said")).to_have_text(["One", "Two"])
        expect(versions).to_have_text(version(1, 2))
        expect(page.get_by_label("Previous version")).to_be_focused()
        expect(page.locator("#context")).to_contain_text("of 4,096 tokens")
        page.reload()
        done(page, 2)
        page.get_by_label("Next version").click()
        expect(page.locator(".said")).to_have_text(["Other"])


def test_an_edit_can_be_cancelled(open_page: Open) -> None:
    with open_page(PLAIN["answer"]) as page:
        ask(page, "One")
        done(page)
        box = page.get_by_label("Your message")
        box.fill("Half typed")
        page.locator(".turn.user").hover()
        page.get_by_label("Edit this message").click()
        expect(box).to_have_value("One")
        expect(box).to_be_focused()
        expect(page.locator("#editing")).to_contain_text("You are editing an earlier message")
        box.fill("One, changed")
        page.keyboard.press("Escape")
        expect(box).to_have_value("Half typed")
        expect(page.locator("#editing")).to_be_hidden()
        expect(page.locator(".said")).to_have_text(["One"])
        expect(page.locator(".left-out")).to_have_count(0)
        page.get_by_label("Edit this message").click()
        page.get_by_role("button", name="Cancel").click()
        expect(box).to_have_value("Half typed")


def test_an_edit_that_fails_can_be_sent_again(open_page: Open) -> None:
    with open_page(PLAIN["answer"]) as page:
        ask(page, "One")
        done(page)
        page.context.set_offline(True)
        edit(page, 0, "Other")
        expect(page.locator("#banner")).to_contain_text("cannot be reached")
        expect(page.get_by_label("Your message")).to_have_value("Other")
        expect(page.locator(".said")).to_have_text(["One"])
        page.context.set_offline(False)
        page.locator("#banner").get_by_role("button", name="Try again").click()
        expect(page.locator(".said")).to_have_text(["Other"])
        done(page)
        expect(page.get_by_role("group", name="Versions of this message")).to_have_text(version(2, 2))


def test_a_repeated_answer_is_a_version_too(open_page: Open) -> None:
    with open_page(PLAIN["answer"]) as page:
        ask(page, "One")
        done(page)
        page.get_by_label("Try again").click()
        versions = page.get_by_role("group", name="Versions of this message")
        expect(versions).to_have_text(version(2, 2))
        page.context.set_offline(True)
        page.get_by_label("Try again").click()
        expect(page.locator("#banner")).to_contain_text("cannot be reached")
        expect(versions).to_have_text(version(2, 2))
        expect(page.locator(".answer")).to_contain_text("The answer is 4.")
        page.context.set_offline(False)
        page.locator("#banner").get_by_role("button", name="Try again").click()
        expect(versions).to_have_text(version(3, 3))


def test_another_conversation_stops_the_answer_and_keeps_it(open_page: Open) -> None:
    with open_page(SEEDS["endless"]) as page:
        ask(page, "Count for ever")
        expect(page.locator(".answer")).to_contain_text("and on and on")
        page.get_by_role("button", name="New chat").click()
        expect(page.locator("#empty")).to_be_visible()
        expect(page.get_by_role("button", name="Send")).to_be_visible()
        page.locator("#chats-list .open").click()
        done(page)
        expect(page.locator(".note")).to_have_text("Stopped.")
        expect(page.locator(".answer")).to_contain_text("and on and on")


def test_a_page_that_is_closed_during_an_answer_loses_little(open_page: Open) -> None:
    with open_page(SEEDS["endless"]) as page:
        ask(page, "Count for ever")
        expect(page.locator(".answer")).to_contain_text("and on and on")
        expect(page.locator("#chats-list .open")).to_have_text("Count for ever")
        page.reload()
        done(page)
        expect(page.locator(".said")).to_have_text("Count for ever")
        expect(page.locator(".note")).to_have_text("Stopped.")

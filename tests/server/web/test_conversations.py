"""The list of conversations: storing, renaming, deleting, exporting and importing, and what happens without storage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from support.browser import SCREENS
from support.live_server import SEEDS as PLAIN
from support.web_page import NARROW, Open, ask, done, keep_looks, sent_body

pytest_plugins = ["support.web_fixtures"]
NO_DATABASE = {
    "missing": "Object.defineProperty(window, 'indexedDB', { value: undefined })",
    "forbidden": "IDBFactory.prototype.open = () => { throw new DOMException('no', 'SecurityError'); }",
}


def titles(page: Page) -> Any:
    return page.locator("#chats-list .open")


def converse(page: Page, *questions: str) -> None:
    """One conversation for each question; the last one stays open."""
    for number, question in enumerate(questions):
        if number:
            page.get_by_role("button", name="New chat").click()
        ask(page, question)
        done(page)
        expect(titles(page).first).to_have_text(question)


def test_conversations_are_listed_and_survive_a_reload(open_page: Open) -> None:
    with open_page(PLAIN["answer"]) as page:
        converse(page, "The first one", "The second one")
        page.reload()
        done(page)
        expect(page.locator(".said")).to_have_text("The second one")
        expect(titles(page)).to_have_text(["The second one", "The first one"])
        expect(titles(page).first).to_have_attribute("aria-current", "true")
        titles(page).last.click()
        expect(page.locator(".said")).to_have_text("The first one")
        expect(page.locator(".answer")).to_contain_text("The answer is 4.")
        with page.expect_request("**/v1/chat/completions") as sent:
            ask(page, "Go on")
        assert [message["content"] for message in sent_body(sent.value)["messages"]][::2] == ["The first one", "Go on"]
        done(page, 2)
        expect(titles(page)).to_have_text(["The first one", "The second one"])
        other = page.context.new_page()
        other.goto(page.url)
        expect(titles(other)).to_have_count(2)
        expect(other.locator("#empty")).to_be_visible()
        titles(other).last.click()
        expect(other.locator(".said")).to_have_text("The second one")
        keep_looks(page, "list")


def test_rename_delete_and_undo(open_page: Open) -> None:
    with open_page(PLAIN["answer"]) as page:
        converse(page, "The first one", "The second one")
        row = page.locator("#chats-list li").last
        row.hover()
        page.get_by_role("button", name="Rename “The first one”").click()
        field = page.get_by_label("New title")
        expect(field).to_be_focused()
        field.fill("Thrown away")
        page.keyboard.press("Escape")
        expect(titles(page).last).to_have_text("The first one")
        expect(titles(page).last).to_be_focused()
        page.get_by_role("button", name="Rename “The first one”").click()
        field.fill("<b>Sums</b>")
        page.keyboard.press("Enter")
        expect(titles(page).last).to_have_text("<b>Sums</b>")
        page.locator("#chats-list li").first.hover()
        page.get_by_role("button", name="Delete “The second one”").click()
        expect(titles(page)).to_have_text(["<b>Sums</b>"])
        expect(page.locator("#empty")).to_be_visible()
        expect(page.get_by_role("button", name="Undo")).to_be_focused()
        page.keyboard.press("Enter")
        expect(titles(page)).to_have_text(["The second one", "<b>Sums</b>"])
        expect(page.locator(".said")).to_have_text("The second one")
        page.get_by_role("button", name="Delete “The second one”").click()
        expect(titles(page)).to_have_count(1)
        page.reload()
        expect(titles(page)).to_have_text(["<b>Sums</b>"])


def test_export_and_import(open_page: Open, tmp_path: Path) -> None:
    with open_page(PLAIN["answer"]) as page:
        converse(page, "The first one", "The second one")
        with page.expect_download() as download:
            page.get_by_role("button", name="Export all").click()
        file = tmp_path / "all.json"
        download.value.save_as(file)
        data = json.loads(file.read_text())
        assert (data["format"], data["version"], len(data["conversations"])) == ("microscale-conversations", 1, 2)
    with open_page(PLAIN["answer"]) as page:
        page.locator("#choose-import").set_input_files(file)
        expect(page.locator("#chats-note-text")).to_have_text("2 conversations were imported.")
        page.locator("#choose-import").set_input_files(file)
        expect(page.locator("#chats-note-text")).to_contain_text("0 conversations were imported; 2 were here already.")
        titles(page).first.click()
        expect(page.locator(".answer")).to_contain_text("The answer is 4.")
        message = data["conversations"][0]["messages"][1]
        for key, wrong in (("parent", 7), ("content", None), ("calls", [{}]), ("role", "system")):
            broken = json.loads(json.dumps(data))
            broken["conversations"][0]["messages"][1] = {**message, key: wrong}
            file.write_text(json.dumps(broken))
            page.locator("#choose-import").set_input_files(file)
            expect(page.locator("#chats-note-text")).to_contain_text(
                "all.json was not imported. This is not a conversation"
            )
        file.write_text("no JSON")
        page.locator("#choose-import").set_input_files(file)
        expect(page.locator("#chats-note-text")).to_have_text("all.json was not imported. It is not JSON.")
        expect(titles(page)).to_have_count(2)


@pytest.mark.parametrize("trouble", NO_DATABASE)
def test_without_a_database_the_tab_keeps_them_and_says_so(open_page: Open, trouble: str) -> None:
    with open_page(PLAIN["answer"]) as page:
        page.context.add_init_script(NO_DATABASE[trouble])
        page.reload()
        expect(page.locator("#chats-about")).to_contain_text("This browser does not store conversations")
        converse(page, "The first one", "The second one")
        page.reload()
        done(page)
        expect(page.locator(".said")).to_have_text("The second one")
        titles(page).last.click()
        expect(page.locator(".said")).to_have_text("The first one")


def test_the_oldest_conversations_make_room(open_page: Open) -> None:
    with open_page() as page:
        surplus = """async ([list, kept, most, characters]) =>
            (await import("/web/store.js")).surplus(list, kept, most, characters)"""
        entries = [{"id": str(n), "changed": n, "size": 10} for n in range(5)]
        assert page.evaluate(surplus, [entries, "4", 3, 1000]) == ["1", "0"]
        assert page.evaluate(surplus, [entries, "0", 3, 1000]) == ["2", "1"]
        assert page.evaluate(surplus, [entries, "4", 9, 25]) == ["2", "1", "0"]
        assert page.evaluate(surplus, [entries, "4", 9, 5]) == ["3", "2", "1", "0"]


def test_on_a_phone_the_list_is_a_drawer(open_page: Open) -> None:
    with open_page(PLAIN["answer"]) as page:
        page.set_viewport_size(NARROW)
        ask(page, "The first one")
        done(page)
        expect(titles(page)).to_be_hidden()
        page.get_by_role("button", name="New chat").click()
        page.get_by_role("button", name="Conversations").click()
        expect(page.locator("#chats-drawer")).to_be_visible()
        page.screenshot(path=SCREENS / "drawer-narrow.png", animations="disabled")
        titles(page).click()
        expect(page.locator("#chats-drawer")).to_be_hidden()
        expect(page.locator(".said")).to_have_text("The first one")
        page.get_by_role("button", name="Conversations").click()
        page.keyboard.press("Escape")
        expect(page.locator("#chats-drawer")).to_be_hidden()
        expect(page.get_by_role("button", name="Conversations")).to_be_focused()
        expect(page.get_by_role("button", name="Conversations")).to_have_attribute("aria-expanded", "false")
        expect(page.locator("#model")).to_be_visible()


def test_the_key_and_the_settings_are_not_in_the_database(open_page: Open) -> None:
    with open_page(PLAIN["answer"], system="Be brief.") as page:
        converse(page, "The first one")
        stored = page.evaluate(
            """() => new Promise((resolve) => (indexedDB.open("microscale").onsuccess = (event) => {
                 event.target.result.transaction("conversations").objectStore("conversations").getAll().onsuccess =
                   (all) => resolve(JSON.stringify(all.target.result)); }))"""
        )
        assert "The first one" in stored
        assert "sk-test" not in stored
        assert "Be brief" not in stored


def test_two_tabs_do_not_overwrite_each_other(open_page: Open) -> None:
    with open_page(PLAIN["answer"]) as page:
        converse(page, "The first one")
        other = page.context.new_page()
        other.goto(page.url)
        titles(other).click()
        done(other)
        ask(page, "And then?")
        done(page, 2)
        done(other, 2)
        ask(other, "And after that?")
        done(other, 3)
        done(page, 3)
        page.reload()
        expect(page.locator(".said")).to_have_text(["The first one", "And then?", "And after that?"])


def test_every_action_is_reached_by_keyboard(open_page: Open) -> None:
    with open_page(PLAIN["answer"]) as page:
        converse(page, "The first one")
        titles(page).focus()
        for verb in ("Rename", "Export", "Delete"):
            page.keyboard.press("Tab")
            expect(page.get_by_role("button", name=f"{verb} “The first one”")).to_be_focused()
        page.keyboard.press("Enter")
        expect(page.get_by_role("button", name="Undo")).to_be_focused()

"""How the web page looks: on a phone, in one type, and with colours that everybody can tell apart."""

from __future__ import annotations

from itertools import combinations, pairwise
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from support.browser import SCREENS
from support.colour_vision import contrast, distance
from support.live_server import SEEDS as PLAIN
from support.web_page import NARROW, Open, ask, done, keep_looks
from support.web_turns import SEEDS

pytest_plugins = ["support.web_fixtures"]
FINGER = 40
# Radio buttons are touched by their labels; links within a text are as high as its lines.
SMALL = """(least) => [...document.querySelectorAll(
    "button, summary, nav a, .brand, textarea, input:not([type=radio]), .effort label")]
  .filter((e) => e.checkVisibility({ visibilityProperty: true }))
  .map((e) => [e.outerHTML.slice(0, 120), e.getBoundingClientRect()])
  .filter(([, { width, height }]) => Math.min(width, height) < least - 0.5)
  .map(([html, { width, height }]) => `${width} x ${height}: ${html}`)"""
HEADER = """() => {
  const bar = document.querySelector(".bar").getBoundingClientRect();
  const parts = [...document.querySelectorAll(".bar > *, .bar a, .bar button")].filter((e) => e.checkVisibility());
  const boxes = parts.map((e) => e.getBoundingClientRect());
  return {
    height: bar.height,
    middles: boxes.map((box) => Math.round(box.top + box.height / 2)),
    right: Math.max(...boxes.map((box) => box.right)),
    lines: Math.max(...[...document.querySelectorAll(".bar a")].map((e) => e.getClientRects().length)),
  };
}"""
CONTROLS = """() => {
  const boxes = ["#attach", "#effort", "#send"].map((each) => document.querySelector(each).getBoundingClientRect());
  return [boxes.map((box) => box.top + box.height / 2), Math.max(...boxes.map((box) => box.right))];
}"""
COLOURS = """() => ({
  card: getComputedStyle(document.querySelector("#memory-card")).backgroundColor,
  bar: [...document.querySelectorAll(".memory-bar span:not(.free)")].map((e) => getComputedStyle(e).backgroundColor),
  legend: [...document.querySelectorAll(".memory-list dt")].map((e) => getComputedStyle(e, "::before").backgroundColor),
})"""
FAMILIES = """() => {
  const box = document.querySelector(".prose.answer");
  for (const level of [3, 4, 5, 6]) box.append(document.createElement(`h${level}`));
  const all = document.querySelectorAll("h1, h2, h3, h4, h5, h6, .tiles strong");
  return [...new Set([document.body, ...all].map((e) => getComputedStyle(e).fontFamily))];
}"""


def fits_a_finger(page: Page) -> None:
    assert page.evaluate(SMALL, FINGER) == []


@pytest.mark.parametrize("width", [320, 390, 600])
def test_on_a_phone_the_header_is_one_row(open_page: Open, width: int) -> None:
    with open_page(PLAIN["answer"]) as page:
        page.set_viewport_size({"width": width, "height": NARROW["height"]})
        ask(page, "Hello")  # after which there is also "New chat"
        done(page)
        expect(page.get_by_role("button", name="New chat")).to_be_visible()
        header: dict[str, Any] = page.evaluate(HEADER)
        assert max(header["middles"]) - min(header["middles"]) <= 1, header
        assert header["height"] <= 60
        assert header["right"] <= width
        assert header["lines"] == 1
        page.screenshot(path=SCREENS / f"header-{width}.png")
        page.get_by_role("link", name="What is running").click()
        expect(page.locator("#running-title")).to_be_visible()


@pytest.mark.parametrize("width", [320, 390])
def test_on_a_phone_the_controls_of_the_message_box_are_one_row(open_page: Open, width: int) -> None:
    """Also while an answer comes, when the speed is there too."""
    tools = '[{"function": {"name": "get_weather"}, "type": "function"}]'
    with open_page(SEEDS["endless"], tools=tools, system="Be brief.") as page:
        page.set_viewport_size({"width": width, "height": NARROW["height"]})
        expect(page.locator("#model")).to_be_visible()
        expect(page.locator("#badges span")).to_have_text(["system prompt", "1 tool"])
        expect(page.locator("#badges span").first).to_be_visible()
        if width == NARROW["width"]:
            expect(page.locator("#effort legend")).to_be_visible()
        ask(page, "Count for ever")
        expect(page.locator(".answer")).to_contain_text("and on and on")
        page.locator("#speed").evaluate("(element) => { element.textContent = '123456 tok/s'; }")
        middles, right = page.evaluate(CONTROLS)
        assert max(middles) - min(middles) <= 1
        assert right <= width
        page.screenshot(path=SCREENS / f"controls-{width}.png")


def test_on_a_phone_everything_fits_a_finger(open_page: Open) -> None:
    with open_page(SEEDS["markdown"]) as page:
        page.set_viewport_size(NARROW)
        fits_a_finger(page)
        ask(page, "How do formats work?")
        done(page)
        fits_a_finger(page)
        page.context.set_offline(True)
        ask(page, "And again?")
        expect(page.get_by_role("button", name="Try again").first).to_be_visible()
        fits_a_finger(page)
        page.context.set_offline(False)
        page.get_by_role("button", name="Settings").click()
        fits_a_finger(page)
        page.screenshot(path=SCREENS / "settings-narrow.png")
        page.keyboard.press("Escape")
        page.get_by_role("link", name="What is running").click()
        expect(page.locator(".layer-row").first).to_be_visible()
        fits_a_finger(page)
    with open_page(PLAIN["call"], tools='[{"function": {"name": "get_weather"}, "type": "function"}]') as page:
        page.set_viewport_size(NARROW)
        ask(page, "What is the weather in Paris?")
        done(page)
        fits_a_finger(page)
        page.screenshot(path=SCREENS / "call-narrow.png")


def test_one_type_for_all_headings(open_page: Open) -> None:
    with open_page(PLAIN["answer"]) as page:
        ask(page, "Hello")
        done(page)
        assert len(page.evaluate(FAMILIES)) == 1


def test_parts_of_memory_can_be_told_apart(open_page: Open) -> None:
    """Every two by everybody, neighbours at a glance, on light and on dark."""
    with open_page() as page:
        page.get_by_role("link", name="What is running").click()
        expect(page.locator("#memory-card")).to_be_visible()
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            seen = page.evaluate(COLOURS)
            assert len(seen["bar"]) == 11
            assert seen["legend"] == seen["bar"]
            assert min(distance(*pair) for pair in combinations(seen["bar"], 2)) >= 0.09, scheme
            assert min(distance(*pair) for pair in pairwise(seen["bar"])) >= 0.15, scheme
            assert min(contrast(colour, seen["card"]) for colour in seen["bar"]) >= 3, scheme
        keep_looks(page, "memory", at="#memory-card")

"""The web page when things end or fail: examples' tools, sends that fail, figures of a server that is gone."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from playwright.sync_api import Page, Route, expect

from support.live_server import SEEDS as PLAIN
from support.scripted_service import REFUSE
from support.web_page import PATIENCE_MS, Open, ask, done, keep_looks, sent_body
from support.web_turns import SEEDS

pytest_plugins = ["support.web_fixtures"]
CHAT = "**/v1/chat/completions"
OWN = [{"type": "function", "function": {"name": "own_tool", "parameters": {"type": "object", "properties": {}}}}]


def sent_tools(page: Page, act: Any) -> list[str]:
    with page.expect_request(CHAT) as sent:
        act()
    return [tool["function"]["name"] for tool in sent_body(sent.value).get("tools", [])]


def as_the_demo(route: Route) -> None:
    """The server's own reply, under the embedded model's name: the page then offers that model's examples."""
    reply = route.fetch()
    models = reply.json()
    models["data"][0]["id"] = "microscale-demo"
    route.fulfill(response=reply, json=models)


def test_tools_of_an_example_end_with_its_chat(open_page: Open) -> None:
    with open_page(PLAIN["answer"], tools=json.dumps(OWN)) as page:
        page.route("**/v1/models", as_the_demo)
        page.reload()
        card = page.get_by_role("button", name="offers get_weather")
        assert sent_tools(page, card.click) == ["own_tool", "get_weather"]
        expect(page.locator("#badges")).to_have_text("1 toolget_weather, in this chat")
        done(page)
        assert sent_tools(page, lambda: ask(page, "And in Rome?")) == ["own_tool", "get_weather"]
        done(page, 2)
        page.reload()
        assert sent_tools(page, lambda: ask(page, "And in Oslo?")) == ["own_tool", "get_weather"]
        done(page, 3)
        page.get_by_role("button", name="New chat").click()
        expect(page.locator("#badges")).to_have_text("1 tool")
        assert sent_tools(page, lambda: ask(page, "Who are you?")) == ["own_tool"]
        done(page)
        page.get_by_role("button", name="New chat").click()
        assert sent_tools(page, page.get_by_role("button", name="247 + 385").click) == ["own_tool"]


def expect_unsent(page: Page, text: str, reason: str) -> None:
    expect(page.locator("#banner")).to_contain_text(reason)
    expect(page.get_by_label("Your message")).to_have_value(text)
    expect(page.locator("#banner").get_by_role("button", name="Try again")).to_be_visible()
    expect(page.locator(".turn")).to_have_count(0)
    expect(page.locator("#empty")).to_be_visible()


def test_a_send_that_fails_keeps_its_text(open_page: Open) -> None:
    with open_page(PLAIN["answer"]) as page:
        page.context.set_offline(True)
        ask(page, "Keep me,\nboth lines.")
        expect_unsent(page, "Keep me,\nboth lines.", "cannot be reached")
        keep_looks(page, "unsent")
        page.get_by_role("button", name="Try again").click()
        expect_unsent(page, "Keep me,\nboth lines.", "cannot be reached")
        page.context.set_offline(False)
        page.get_by_role("button", name="Try again").click()
        done(page)
        expect(page.locator(".turn.user .said")).to_have_text("Keep me,\nboth lines.")
        expect(page.get_by_label("Your message")).to_have_value("")
        expect(page.locator("#banner")).to_be_hidden()
    with open_page(REFUSE) as page:
        ask(page, "Too many.")
        expect_unsent(page, "Too many.", "the queue holds 1")


def test_a_key_that_is_wanted_later_loses_nothing(open_page: Open) -> None:
    with open_page(PLAIN["answer"]) as page:
        page.evaluate("sessionStorage.setItem('microscale.key', 'old')")
        ask(page, "Hello")
        expect(page.locator("#ask-key")).to_be_visible()
        page.locator("#key").fill("sk-test")
        page.keyboard.press("Enter")
        expect_unsent(page, "Hello", "Your message was not sent yet")
        page.get_by_role("button", name="Try again").click()
        done(page)


@pytest.mark.parametrize("late", ["while it is typed", "after it was given"])
def test_a_late_refusal_of_the_old_key_asks_for_nothing(open_page: Open, late: str) -> None:
    """The figures were asked for with the old key; their refusal neither empties the dialog nor opens it again."""
    with open_page(PLAIN["answer"]) as page:
        held: list[Route] = []
        page.route("**/metrics", lambda route: route.continue_() if held else held.append(route))
        page.evaluate("sessionStorage.setItem('microscale.key', 'old')")
        ask(page, "Hello")
        expect(page.locator("#ask-key")).to_be_visible()
        page.locator("#key").fill("sk-test")
        if late == "while it is typed":
            held[0].continue_()
            expect(page.locator("#running-banner")).to_have_text(re.compile("key"))
        page.keyboard.press("Enter")
        expect_unsent(page, "Hello", "Your message was not sent yet")
        if late == "after it was given":
            with page.expect_response(lambda reply: reply.url.endswith("/metrics") and reply.ok):
                held[0].continue_()
        expect(page.locator("#ask-key")).to_be_hidden()
        page.get_by_role("button", name="Try again").click()
        done(page)


def test_what_is_typed_meanwhile_is_not_lost_either(open_page: Open) -> None:
    """The box is taken: the question stays where it is, with a labelled retry below it."""
    with open_page(PLAIN["answer"]) as page:
        held: list[Route] = []
        page.route(CHAT, lambda route: held.append(route))  # noqa: PLW0108 (it takes no built-in)
        with page.expect_request(CHAT):
            ask(page, "First")
        page.get_by_label("Your message").fill("Second, half typed")
        held[0].abort()
        expect(page.locator(".note.bad")).to_contain_text("cannot be reached")
        expect(page.get_by_label("Your message")).to_have_value("Second, half typed")
        page.unroute(CHAT)
        retry = page.locator(".foot").get_by_role("button", name="Try again")
        expect(retry).to_have_text("Try again")
        retry.click()
        done(page)
        expect(page.locator(".answer")).to_contain_text("The answer is 4.")
        expect(page.get_by_label("Your message")).to_have_value("Second, half typed")


# ---- figures ---------------------------------------------------------------------------------------------------------

NONE = "\N{EN DASH}"
PATH = """((e) => e.getAttribute("d").slice(1).split("L").map((p) => p.split(",").map(Number)))"""
LINES = """(title) => {
  const plot = [...document.querySelectorAll(".plot")].find((e) => e.querySelector("h2").textContent === title);
  return {
    now: plot.querySelector(".now strong").textContent,
    said: plot.querySelector("svg").getAttribute("aria-label"),
    floor: Number(plot.querySelector(".axis").getAttribute("y1")),
    lines: [...plot.querySelectorAll("path.line.c1")].map(PATH),
  };
}""".replace("PATH", PATH)
DRAWN = """async (points) => {
  const { Plot } = await import("/web/plot.js");
  const series = [{ name: "n", class: "c1", area: true }];
  const plot = new Plot({ title: "t", unit: "u", least: 10, series, format: String });
  document.getElementById("plots").append(plot.element);
  for (const [from, at, value] of points) plot.add(from, at, [value]);
  const lines = [...plot.svg.querySelectorAll(".line")].map(PATH);
  const found = { circles: plot.svg.querySelectorAll("circle").length, lines };
  plot.element.remove();
  return found;
}""".replace("PATH", PATH)


def test_a_value_holds_while_it_was_measured_and_nothing_is_drawn_in_gaps(open_page: Open) -> None:
    with open_page() as page:
        page.get_by_role("link", name="What is running").click()
        # 0 s: 5, then 8; 2 s: nothing known; 3 s: 2; then a pause; 10 s: 6 alone.
        points = [[0, 1000, 5], [1000, 2000, 8], [2000, 3000, None], [3000, 4000, 2], [10_000, 11_000, 6]]
        drawn = page.evaluate(DRAWN, points)
        assert drawn["circles"] == 0
        runs = drawn["lines"]
        assert [len(run) for run in runs] == [4, 2, 2]
        second = runs[1][1][0] - runs[1][0][0]
        assert second > 0
        for run in runs:
            for (start, left), (end, right) in zip(run[::2], run[1::2], strict=True):
                assert left == right, "level while it holds"
                assert end - start == pytest.approx(second, abs=0.2)
        assert runs[2][0][0] - runs[1][1][0] == pytest.approx(6 * second, abs=0.5), "six seconds of nothing"


def test_figures_agree_with_the_chat(open_page: Open) -> None:
    """An answer that nobody watched from the running view is in its plots, however short it was."""
    with open_page(SEEDS["markdown"]) as page:
        ask(page, "How do formats work?")
        done(page)
        page.get_by_role("link", name="What is running").click()
        expect(page.locator(".legend span").get_by_text("p95")).to_have_count(2)
        assert "95 of 100" not in page.locator("#running").inner_text()
        for title in ("Throughput", "Requests"):
            page.wait_for_function(f"(title) => ({LINES})(title).lines.length > 0", arg=title)
            seen = page.evaluate(LINES, title)
            assert min(height for line in seen["lines"] for _, height in line) < seen["floor"] - 5, title
        assert page.locator(".plot circle").count() == 0


def expect_no_figures(page: Page) -> None:
    expect(page.locator("#running-banner")).to_contain_text("cannot be reached", timeout=PATIENCE_MS)
    assert page.locator(".tiles strong").filter(visible=True).all_inner_texts() == [NONE] * 5
    for title in ("Throughput", "Between tokens", "First token", "Requests"):
        seen = page.evaluate(LINES, title)
        assert seen["now"] in ("", NONE), title
        assert "Now: unknown" in seen["said"]


def test_a_server_that_is_gone_has_no_figures(open_page: Open) -> None:
    with open_page(PLAIN["answer"]) as page:
        page.get_by_role("link", name="What is running").click()
        page.wait_for_function(f"() => ({LINES})('Requests').lines.length === 1")
        expect(page.locator(".tiles strong").nth(1)).to_have_text("0")
        page.context.set_offline(True)
        expect_no_figures(page)
        keep_looks(page, "gone")
        page.context.set_offline(False)
        expect(page.locator("#running-banner")).to_be_hidden(timeout=PATIENCE_MS)
        expect(page.locator(".tiles strong").nth(1)).to_have_text("0")
        # What lies between is a gap, not a line.
        page.wait_for_function(f"() => ({LINES})('Requests').lines.length === 2")
        expect(page.locator("#running-lead")).to_contain_text(re.compile("on NVIDIA GeForce RTX 5090"))


@pytest.mark.nightly
def test_a_server_that_hangs_has_no_figures(open_page: Open) -> None:
    with open_page(PLAIN["answer"]) as page:
        page.get_by_role("link", name="What is running").click()
        expect(page.locator(".tiles strong").nth(1)).to_have_text("0")
        page.route("**/metrics", lambda route: None)
        expect_no_figures(page)
        page.unroute_all(behavior="ignoreErrors")

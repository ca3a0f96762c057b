"""Formulas: typeset while the answer comes, loaded with the first one, and never more than elements of the page."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from support.live_server import SEEDS as PLAIN
from support.web_page import Open, ask, done, keep_looks
from support.web_turns import SEEDS

pytest_plugins = ["support.web_fixtures"]
STREAM = r"""async ([first, second]) => {
  const { Markdown } = await import("/web/markdown.js");
  const box = document.createElement("div");
  box.className = "prose";
  document.getElementById("log").append(box);
  const drawn = new Markdown(box);
  const typeset = (count) => new Promise((resolve) => {
    const look = () => (box.querySelectorAll(".typeset").length === count ? resolve() : setTimeout(look, 5));
    look();
  });
  drawn.update(first);
  await typeset(1);
  drawn.update(first + second);
  const seen = [box.querySelectorAll(".typeset").length, box.textContent.includes("\\(b")];
  drawn.update(first + second + "_2\\)");
  await typeset(2);
  return seen;
}"""
COST = """async (piece) => {
  const { Markdown } = await import("/web/markdown.js");
  const started = performance.now();
  new Markdown(document.createElement("div")).update(piece.repeat(2_000));
  return performance.now() - started;
}"""


def test_formulas_are_typeset(open_page: Open) -> None:
    with open_page(SEEDS["formulas"]) as page:
        ask(page, "Formulas, please")
        done(page)
        answer = page.locator(".answer")
        expect(answer.locator(".typeset")).to_have_count(5)
        expect(answer.locator("div.math .katex-display")).to_have_count(3)
        expect(answer.locator("math")).to_have_count(5)
        expect(answer.locator("code")).to_have_text([r"\(\frac{a}{\)"])  # not LaTeX: shown as it was written
        expect(answer).to_contain_text("It costs $5, or $6 with")
        expect(answer.locator("a")).to_have_count(0)
        assert page.evaluate("document.fonts.check('16px KaTeX_Math')")
        boxes = page.evaluate("[...document.querySelectorAll('.katex .vlist > span')].map((e) => e.style.top)")
        assert any(boxes), "positions were set although the policy forbids style attributes"
        keep_looks(page, "formulas")
        page.reload()
        expect(answer.locator(".typeset")).to_have_count(5)


def test_a_formula_is_typeset_when_it_is_complete(open_page: Open) -> None:
    with open_page() as page:
        # A box has a style attribute in KaTeX's MathML, which the policy would refuse.
        assert page.evaluate(STREAM, [r"First \(\fcolorbox{red}{white}{a}\)", r", then \(b"]) == [1, True]


def test_katex_is_loaded_with_the_first_formula(open_page: Open) -> None:
    with open_page(PLAIN["answer"]) as page:
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url) if "katex" in request.url else None)
        ask(page, "No formulas")
        done(page)
        assert not asked
        page.evaluate(STREAM, [r"First \(a\)", r", then \(b"])
        assert {url.rsplit("/", 1)[1] for url in asked} >= {"katex.min.js", "katex.min.css"}


@pytest.mark.nightly
def test_many_formulas_take_no_longer_than_their_number(open_page: Open) -> None:
    with open_page() as page:
        page.evaluate(STREAM, [r"First \(a\)", r", then \(b"])  # loads KaTeX
        for piece in (r"\(x^2\) ", r"\(\def\a{\a\a}\a\) ", r"\(" + "{" * 500 + r"\) ", r"\(\rule{900em}{900em}\) "):
            assert page.evaluate(COST, piece) < 5_000, piece

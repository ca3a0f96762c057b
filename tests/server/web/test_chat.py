"""The web page in a real browser, against a real server that says what it is told to."""

from __future__ import annotations

import json
import re
import time

from playwright.sync_api import Page, expect

from support.browser import SCREENS
from support.live_server import KEY, MODEL, Live
from support.live_server import SEEDS as PLAIN
from support.scripted_service import REFUSE
from support.web_page import PATIENCE_MS, Open, ask, done, keep_looks, sent_body
from support.web_turns import SEEDS

pytest_plugins = ["support.web_fixtures"]
WEATHER = json.dumps(
    [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {}}}}]
)


def test_the_key_is_asked_for_and_stays_in_the_tab(open_page: Open) -> None:
    with open_page(key=False) as page:
        field = page.locator("#key")
        expect(field).to_be_focused()
        field.fill("wrong")
        page.keyboard.press("Enter")
        expect(page.locator("#key-error")).to_contain_text("does not accept this key")
        field.fill(KEY)
        page.keyboard.press("Enter")
        expect(page.locator("#model")).to_have_text(MODEL)
        expect(page.locator("#ask-key")).to_be_hidden()
        assert page.evaluate("sessionStorage.getItem('microscale.key')") == KEY
        assert KEY not in page.evaluate("JSON.stringify(localStorage)")


def expect_copied(page: Page, text: str) -> None:
    """The page writes to the clipboard after the click has returned."""
    page.wait_for_function("async text => (await navigator.clipboard.readText()).includes(text)", arg=text)


def test_a_conversation(open_page: Open) -> None:
    with open_page(SEEDS["markdown"]) as page:
        keep_looks(page, "empty")
        expect(page.get_by_label("Your message")).to_be_focused()
        ask(page, "How do block-scaled formats work?")
        done(page)
        keep_looks(page, "answer")
        thoughts = page.locator("details.thoughts")
        assert thoughts.get_attribute("open") is None, "reasoning is folded"
        thoughts.locator("summary").click()
        expect(thoughts.locator(".prose strong")).to_have_text("32 numbers")
        answer = page.locator(".answer")
        expect(answer.locator("h5")).to_have_text("The arithmetic")
        expect(answer.locator("pre code")).to_contain_text("def scale_of(block: list[float]) -> float:")
        assert answer.locator("td").all_inner_texts() == ["MXFP4", "4", "4.25", "6", "MXFP8", "8", "8.25", "448"]
        assert answer.locator("ol > li").count() == 3
        # What is no link, and no script, is text.
        expect(answer).to_contain_text('<script>alert("no")</script> stays text, so does this')
        assert [a.get_attribute("href") for a in answer.locator("a").all()] == ["https://example.org/mx"]
        figures = r"974 tokens · \d+ tok/s · first token after \S+ m?s"
        assert re.fullmatch(figures, page.locator(".figures").inner_text())
        expect(page.locator("#status")).to_contain_text("Answer: A block-scaled format")
        page.get_by_label("Copy the answer").click()
        expect_copied(page, "### The arithmetic")
        page.evaluate("navigator.clipboard.writeText = null")  # as on a page of another machine
        page.get_by_label("Copy the code").click()
        expect(page.locator("#status")).to_have_text("Copied.")
        expect_copied(page, "def scale_of")
        _go_on(page)


def _go_on(page: Page) -> None:
    """A second question carries the first; a retry gives another answer; a reload keeps all of it."""
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, "And MXFP8?")
    body = sent_body(sent.value)
    assert [message["role"] for message in body["messages"]] == ["user", "assistant", "user"]
    assert "reasoning" not in body["messages"][1]
    done(page, 2)
    with page.expect_request("**/v1/chat/completions") as again:
        page.get_by_label("Try again").click()
    assert sent_body(again.value)["messages"] == body["messages"]
    done(page, 2)
    page.reload()
    done(page, 2)
    page.get_by_role("button", name="New chat").click()
    expect(page.locator("#empty")).to_be_visible()
    expect(page.locator(".turn")).to_have_count(0)


def test_stop_and_retry(open_page: Open, web_server: Live) -> None:
    with open_page(SEEDS["endless"]) as page:
        ask(page, "Go on for ever.")
        expect(page.locator(".answer")).to_contain_text("and on and on")
        expect(page.locator("#speed")).to_contain_text("tok/s")
        page.get_by_role("button", name="Stop").click()
        done(page)
        expect(page.locator(".note")).to_have_text("Stopped.")
        page.get_by_label("Try again").click()
        expect(page.locator(".answer")).to_contain_text("and on and on")
        page.keyboard.press("Escape")
        done(page)
        expect(page.get_by_role("button", name="Send")).to_be_visible()
    deadline = time.monotonic() + PATIENCE_MS / 1000
    while web_server.log.read_text().count("status=499") < 2:
        assert time.monotonic() < deadline, "the server was not told"
        time.sleep(0.05)


def test_a_tool_call(open_page: Open) -> None:
    with open_page(PLAIN["call"], tools=WEATHER, system="Be brief.") as page:
        expect(page.locator("#badges")).to_have_text("system prompt1 tool")
        ask(page, "What is the weather in Paris?")
        done(page)
        card = page.locator(".call")
        expect(card.locator("header code")).to_have_text("get_weather")
        assert json.loads(card.locator("pre").inner_text()) == {"city": "Paris"}
        page.screenshot(path=SCREENS / "call.png")
        page.get_by_role("button", name="Settings").click()
        page.get_by_label("Seed").fill(str(SEEDS["after a call"]))
        page.get_by_role("button", name="Done").click()
        page.get_by_label("Result").fill('{"degrees": 21}')
        with page.expect_request("**/v1/chat/completions") as sent:
            page.get_by_role("button", name="Return it").click()
        messages = sent_body(sent.value)["messages"]
        assert [message["role"] for message in messages] == ["system", "user", "assistant", "tool"]
        assert messages[2]["tool_calls"][0]["id"] == messages[3]["tool_call_id"]
        assert messages[2]["reasoning"] == "I need the weather."
        assert messages[3]["content"] == '{"degrees": 21}'
        expect(page.locator(".answer").last).to_have_text("In Paris it is 21 degrees and sunny.")


def test_what_is_running(open_page: Open) -> None:
    with open_page(SEEDS["markdown"]) as page:
        ask(page, "How do block-scaled formats work?")
        page.get_by_role("link", name="What is running").click()
        expect(page.locator("#running-title")).to_be_focused()
        expect(page.locator("#running-lead")).to_contain_text("on NVIDIA GeForce RTX 5090, precision exact")
        expect(page.locator("#precisions-line")).to_contain_text("tokens per second; cost in quality not measured")
        expect(page.locator("#memory-lead")).to_contain_text("of 28.8 GiB that may be used")
        expect(page.locator(".memory-list")).to_contain_text("Runtime1 GiB")
        rows = page.locator(".layer-row")
        names = ["Queries, keys, values", "Attention, sliding", "Attention, full", "Attention output", "Experts"]
        assert rows.locator(".name").all_inner_texts()[:5] == names
        experts = rows.nth(4)
        expect(experts.locator(".kernel").first).to_have_text("triton_w4a16")
        experts.locator("summary.layer").click()
        expect(experts).to_contain_text("reads mxfp8 experts, not mxfp4")
        spans = experts.locator("table.paths tr")
        expect(spans).to_have_count(8)  # and as many with the sum left to the next norm
        expect(spans.nth(1)).to_contain_text("3 to 8")
        expect(spans.nth(1)).to_contain_text("small batch, own list")
        expect(spans.nth(2)).to_contain_text("9 to 64")
        expect(spans.nth(2)).to_contain_text("small batch, list")
        expect(spans.nth(3)).to_contain_text("65 and more")
        spans.nth(3).locator("summary").click()
        expect(spans.nth(3)).to_contain_text("wgmma: needs wgmma, which NVIDIA GeForce RTX 5090 does not have")
        spans.nth(3).locator("summary").click()
        plot = page.locator(".plot").first
        expect(plot.locator("path.line.c1")).to_have_count(1, timeout=PATIENCE_MS)
        expect(plot.locator("svg")).to_have_attribute("aria-label", re.compile(r"Throughput in tok/s.*generated \d"))
        page.evaluate("document.querySelector('#running .scroll').scrollTop = 0")
        keep_looks(page, "running")
        keep_looks(page, "plan", at="#memory-card")


def test_errors_are_told_where_they_happen(open_page: Open) -> None:
    with open_page(REFUSE) as page:
        ask(page, "Hello")
        expect(page.locator("#banner")).to_contain_text("the queue holds 1")
        page.get_by_role("button", name="Settings").click()
        page.get_by_label("Tools").fill("[{]")
        expect(page.locator("#error-tools")).to_contain_text("not JSON")
        page.keyboard.press("Escape")
        ask(page, "Hello again")
        expect(page.locator("#banner")).to_contain_text("Tools are not JSON")
        page.get_by_role("button", name="Settings").click()
        page.get_by_role("button", name="Back to defaults").click()
        page.keyboard.press("Escape")
        page.context.set_offline(True)
        ask(page, "Hello again")
        expect(page.locator("#banner")).to_contain_text("cannot be reached")


APART = ' target="_blank" rel="noopener noreferrer nofollow"'
TABLE = '<div class="table" tabindex="0" role="region" aria-label="Table"><table><thead>'
TO_DO = '<li class="task"><input type="checkbox" disabled="" aria-label="To do">'
DONE = '<li class="task"><input type="checkbox" disabled="" checked="" aria-label="Done">'
MARKDOWN = [
    ("plain\ntext", "<p>plain\ntext</p>"),
    ("**bold** _it_ ~~no~~ `a*b`", "<p><strong>bold</strong> <em>it</em> <del>no</del> <code>a*b</code></p>"),
    ("***both*** snake_case_name 2*3*4", "<p><em><strong>both</strong></em> snake_case_name 2<em>3</em>4</p>"),
    ("**open and *closed*", "<p>**open and <em>closed</em></p>"),
    ("a\\*b\\* \\(x^2", "<p>a*b* \\(x^2</p>"),
    ("H<sub>2</sub>O x<sup>*2*</sup><br>y<br/>z", "<p>H<sub>2</sub>O x<sup><em>2</em></sup><br>y<br>z</p>"),
    ("<sub>a <sup onclick=x>b <br onclick=x>", "<p>&lt;sub&gt;a &lt;sup onclick=x&gt;b &lt;br onclick=x&gt;</p>"),
    ("|a|\n|-|\n|b<br>c|", f"{TABLE}<tr><th>a</th></tr></thead><tbody><tr><td>b<br>c</td></tr></tbody></table></div>"),
    ("- [ ] a\n- [x] b\n- [y] c", f"<ul>{TO_DO}a</li>{DONE}b</li><li>[y] c</li></ul>"),
    (
        "<b>no</b> &amp; <img src=x onerror=alert(1)>",
        "<p>&lt;b&gt;no&lt;/b&gt; &amp;amp; &lt;img src=x onerror=alert(1)&gt;</p>",
    ),
    ("[x](javascript:alert(1)) [y](data:text/html,z)", "<p><span>x</span> <span>y</span></p>"),
    ("# One\n###### Six", "<h3>One</h3><h6>Six</h6>"),
    ("- a\n- b\n  1. c\n\ntext", "<ul><li>a</li><li>b<ol><li>c</li></ol></li></ul><p>text</p>"),
    ("2. two\n3. three", '<ol start="2"><li>two</li><li>three</li></ol>'),
    ("> quoted\n> more\n\nnot", "<blockquote><p>quoted\nmore</p></blockquote><p>not</p>"),
    ("a\n\n---\n\nb", "<p>a</p><hr><p>b</p>"),
    ("![alt](https://x.org/a.png)", f'<p><a href="https://x.org/a.png"{APART}>alt</a></p>'),
    ("see https://x.org/a_b.", f'<p>see <a href="https://x.org/a_b"{APART}>https://x.org/a_b</a>.</p>'),
    ("\\[\nx\n", '<pre class="math">\\[\nx</pre>'),
    ("$5 and $6", "<p>$5 and $6</p>"),
]
DRAW = """async (text) => {
  const { Markdown } = await import("/web/markdown.js");
  const box = document.createElement("div");
  const drawn = new Markdown(box);
  // As it comes, in pieces: the end must be what it would be at once.
  for (let i = 1; i < text.length; i += Math.ceil(text.length / 7)) drawn.update(text.slice(0, i));
  drawn.update(text);
  return box.innerHTML;
}"""
HARD = """async ([head, piece, tail]) => {
  const { Markdown } = await import("/web/markdown.js");
  const started = performance.now();
  new Markdown(document.createElement("div")).update(head + piece.repeat(20_000) + tail);
  return performance.now() - started;
}"""


def test_markdown(open_page: Open) -> None:
    with open_page() as page:
        for text, wanted in MARKDOWN:
            assert page.evaluate(DRAW, text) == wanted, text
        code = page.evaluate(DRAW, "```js\nlet a = '<b>'; // c\n```")
        assert "<figcaption><span>js</span>" in code
        assert (
            '<span class="kw">let</span> a = <span class="str">\'&lt;b&gt;\'</span>; <span class="com">// c</span>'
            in code
        )
        # No text takes more than its length: each of these would, in a careless parser.
        for piece in (
            "*",
            "*a_b ",
            "[",
            "[a](",
            "`",
            "``a`",
            "> ",
            "- ",
            "\\(",
            "<http://",
            "|a",
            "a\n|",
            "**a* ",
            "<sub>",
            "<br>",
            "<sub>a</sub>",
            "$$",
            "$$x$$ y\n",
            "\\[ a\n",
        ):
            assert page.evaluate(HARD, ["", piece, ""]) < 5_000, piece
        for around in (
            ("- a\n", "\n", "  b"),
            ("# a", " ", "b"),
            ("a|b\n---", " ", "x"),
            ("```", " ", "`"),
            ("***", " ", "x"),
            ("", "\\[ a\n", "\\] b"),
        ):
            assert page.evaluate(HARD, list(around)) < 500, around


def test_everything_has_a_name(open_page: Open) -> None:
    with open_page(PLAIN["answer"]) as page:
        ask(page, "Hello")
        done(page)
        page.get_by_role("button", name="Settings").click()
        nameless = page.evaluate(
            """() => [...document.querySelectorAll("button, input, textarea, summary, dialog, nav, svg[role=img]")]
                 .filter((e) => !(e.getAttribute("aria-label") || e.getAttribute("aria-labelledby") ||
                                  e.labels?.length || e.textContent.trim())).map((e) => e.outerHTML)"""
        )
        assert nameless == []
        ids = page.evaluate("[...document.querySelectorAll('[id]')].map((e) => e.id)")
        assert len(ids) == len(set(ids))

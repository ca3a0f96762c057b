"""Gemma's outputs to thoughts, content and calls: as the format says, cut anywhere, and malformed."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from microscale.text.chat_template import ChatTemplate
from microscale.text.conversation import Message, RenderOptions, Role, ToolCall
from microscale.text.events import Flaw
from microscale.text.gemma import tokens as names
from microscale.text.gemma.call import QUOTE, BadCall, arguments_json, split_call
from microscale.text.gemma.parser import GemmaParser
from microscale.text.gemma.render import GemmaRenderer
from microscale.text.gemma.tokens import GemmaTokens
from microscale.text.output import ChatOutput, Delta
from support.tiny_gemma_text import TEMPLATE, tiny_gemma

TOKENS = GemmaTokens.of(tiny_gemma())
LONG = "It must be the one after 3, hence"


def parse(
    text: str, tools: tuple[str, ...] | None = None, stops: tuple[str, ...] = ()
) -> tuple[ChatOutput, list[Delta]]:
    """The deltas of an output, one token at a time; names of control tokens in ``text`` are these."""
    output = ChatOutput(GemmaParser(TOKENS, tools), stops=stops)
    ids = tiny_gemma().encode_with_control(text)
    deltas = [delta for token in ids if (delta := output.feed([token])) is not None] + [output.finish()]
    assert [token for delta in deltas for token in delta.token_ids] == ids
    return output, deltas


def fields(deltas: list[Delta]) -> tuple[str, str, list[tuple[str, str]]]:
    calls: list[tuple[str, str]] = []
    for call in (call for delta in deltas for call in delta.calls):
        if call.function is not None:
            calls.append((call.function, call.arguments))
        else:
            calls[-1] = (calls[-1][0], calls[-1][1] + call.arguments)
    return "".join(d.reasoning for d in deltas), "".join(d.content for d in deltas), calls


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "calls"),
    [
        ("Hello.<turn|>", "", "Hello.", []),
        ("<|channel>thought\nA\n\nB\n<channel|>Yes, 日本.<turn|>", "A\n\nB", "Yes, 日本.", []),
        ("<|channel>thought\n<channel|>Yes<eos>", "", "Yes", []),
        (
            '<|channel>thought\nhm\n<channel|><|tool_call>call:f{a:<|"|>x{y}, "z"\n<|"|>,b:[1,-2.50e3],'
            "c:{d:true,e:null}}<tool_call|><|tool_response>",
            "hm",
            "",
            [("f", '{"a": "x{y}, \\"z\\"\\n", "b": [1, -2.50e3], "c": {"d": true, "e": null}}')],
        ),
        (
            "One moment.<|tool_call>call:f{}<tool_call|><|tool_call>call:g.h-1{k: <|\"|><|\"|>}<tool_call|><turn|>",
            "",
            "One moment.",
            [("f", "{}"), ("g.h-1", '{"k": ""}')],
        ),
    ],
)  # fmt: skip
def test_what_the_format_says(text: str, reasoning: str, content: str, calls: list[tuple[str, str]]) -> None:
    output, deltas = parse(text)
    assert fields(deltas) == (reasoning, content, calls)
    assert list(output.flaws) == []
    assert output.num_calls == len(calls)
    assert all(json.loads(arguments) is not None for _, arguments in calls)


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "calls", "flaws"),
    [
        # Nothing but thoughts, and thoughts that nothing closes.
        ("<|channel>thought\nhm\n<channel|><turn|>", "hm", "", [], [Flaw.NO_CONTENT]),
        ("<|channel>thought\nhm<turn|>", "hm", "", [], [Flaw.HEADER_IN_TEXT, Flaw.NO_CONTENT]),
        ("<|channel>thought\nhm<|tool_call>call:f{}<tool_call|>", "hm", "", [("f", "{}")], [Flaw.HEADER_IN_TEXT]),
        # Channels that are none: the text is kept.
        ("<|channel>final\nYes<channel|>", "", "Yes", [], [Flaw.WRONG_CHANNEL, Flaw.STRAY_TOKEN]),
        ("<|channel>It must be the one after 3, hence<channel|>4", LONG, "4", [], [Flaw.NO_CHANNEL]),
        # Calls of no one, of a stranger, without arguments that can be read.
        ("<|tool_call>f{a:1}<tool_call|>", "", "f{a:1}", [], [Flaw.CALL_WITHOUT_RECIPIENT]),
        ('<|tool_call>call:g{a:<|"|>1<|"|>}<tool_call|>', "", 'call:g{a:"1"}', [], [Flaw.UNKNOWN_TOOL]),
        ('<|tool_call>call:f{a:<|"|>1}<tool_call|>', "", "", [("f", '{a:"1}')], [Flaw.BAD_ARGUMENTS]),
        ("<|tool_call>call:f{a:1<turn|>", "", "", [("f", "{a:1")], [Flaw.HEADER_IN_TEXT, Flaw.BAD_ARGUMENTS]),
        # Control tokens where they mean nothing.
        ('Yes<|"|>, <|turn>no<|image|><tool_call|>', "", "Yes, no", [], [Flaw.STRAY_TOKEN]),
        # Cut.
        ("", "", "", [], [Flaw.NO_CONTENT]),
        ("<|channel>thou", "", "", [], [Flaw.CUT, Flaw.WRONG_CHANNEL, Flaw.NO_CONTENT]),
        ("<|channel>thought\nhm\n", "hm", "", [], [Flaw.CUT, Flaw.NO_CONTENT]),
        ('<|tool_call>call:f{a:<|"|>x', "", "", [("f", '{a:"x')], [Flaw.CUT]),
    ],
)  # fmt: skip
def test_malformed_outputs_lose_no_text(
    text: str, reasoning: str, content: str, calls: list[tuple[str, str]], flaws: list[Flaw]
) -> None:
    output, deltas = parse(text, tools=("f",))
    assert fields(deltas) == (reasoning, content, calls)
    assert list(output.flaws) == flaws


def test_stop_strings_are_looked_for_in_the_content() -> None:
    output, deltas = parse("<|channel>thought\nthe END\n<channel|>Yes END no<turn|>", stops=("END",))
    assert fields(deltas) == ("the END", "Yes ", [])
    assert output.stopped == "END"


CONTROL = [*names.NAMES, names.EOS, "<|image|>"]
WORDS = ["thought\n", "call:f{", "a:1}", "x", " ", "\n", "日", '"', ",", "[", "]", "}"]


@given(st.lists(st.sampled_from([*CONTROL, *WORDS]), max_size=24))
def test_any_tokens_are_parsed(parts: list[str]) -> None:
    """No output raises, ids are all given out once, and one with text or calls says so."""
    output, deltas = parse("".join(parts), tools=("f",))
    _, content, calls = fields(deltas)
    assert (Flaw.NO_CONTENT in output.flaws) == (not content.strip() and not calls)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.from_regex(r"[a-z_]{1,6}", fullmatch=True), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(st.dictionaries(st.from_regex(r"[a-z_]{1,6}", fullmatch=True), JSON, max_size=4))
@example({"_": "\uffff"})
def test_a_call_comes_back_as_the_template_writes_it(arguments: dict[str, object]) -> None:
    renderer = GemmaRenderer(tiny_gemma(), ChatTemplate(TEMPLATE, "test"))
    call = ToolCall("c", "f", json.dumps(arguments))
    ids = renderer.render([Message(Role.USER, "x"), Message(Role.ASSISTANT, "", "", (call,))], RenderOptions())
    begin = ids.index(TOKENS.call)
    output = ChatOutput(GemmaParser(TOKENS, ("f",)))
    delta = output.feed(ids[begin:])
    assert delta is not None
    assert [call.function for call in delta.calls] == ["f"]
    assert json.loads(delta.calls[0].arguments) == arguments
    assert not output.flaws


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ('{"a": "b\\n", c: plain words, d: True,}', {"a": "b\n", "c": "plain words", "d": True}),
        ("{n:123456789012345678901234567890}", {"n": 123456789012345678901234567890}),
        (f"{{{QUOTE}odd key:{QUOTE}:None}}", {"odd key:": None}),
        ("{ a : [ ] , b : { } }", {"a": [], "b": {}}),
        (f'{{a:"x{QUOTE}y"}}', {"a": 'x"y'}),
        ('{"a\\udc00": "\\ud800", b: "\\ud83d\\ude00"}', {"a\udc00": "\ud800", "b": "\U0001f600"}),
    ],
)
def test_arguments_that_are_nearly_right(text: str, wanted: dict[str, object]) -> None:
    found = arguments_json(text)
    assert json.loads(found) == wanted
    assert found.encode(), "UTF-8 can carry it"


@pytest.mark.parametrize(
    "text", ["{", "{a}", "{a:}", "{a:1}}", "{:1}", "{a:1 b:2", "[" * 100, f"{{a:{QUOTE}x}}", '{a:"x}']
)
def test_arguments_that_are_none(text: str) -> None:
    with pytest.raises(BadCall):
        arguments_json(text)
    with pytest.raises(BadCall):
        split_call("call:bad name{")

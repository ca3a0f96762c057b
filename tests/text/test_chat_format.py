"""The contract that every chat format keeps: a turn that it writes is the turn that it parses and that its grammar
allows."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from microscale.engine.grammar import Grammars, Vocabulary
from microscale.text.chat_format import ChatFormat
from microscale.text.chat_template import ChatTemplate
from microscale.text.chatml.format import ChatmlFormat
from microscale.text.conversation import Message, RenderOptions, Role, ToolCall
from microscale.text.formats import FORMATS
from microscale.text.gemma.format import GemmaFormat
from microscale.text.grammar import ANY_OBJECT, Schema, Turn
from microscale.text.harmony.format import HarmonyFormat
from microscale.text.output import ChatOutput
from support import tiny_chatml_text, tiny_gemma_text
from support.tiny_chatml_text import tiny_chatml
from support.tiny_gemma_text import tiny_gemma
from support.tiny_tokenizers import tiny

F = ToolCall(
    "1", "f", '{"city": "Zürich, \\"old\\" {town}", "days": 3, "exact": 1.50, "tags": ["a", true, null], "x:y": {}}'
)
G = ToolCall("2", "g", "{}")


MAKE: dict[str, Callable[[], ChatFormat]] = {
    "harmony": lambda: HarmonyFormat(tiny()),
    "gemma": lambda: GemmaFormat(tiny_gemma(), ChatTemplate(tiny_gemma_text.TEMPLATE, "test")),
    "chatml": lambda: ChatmlFormat(tiny_chatml(), ChatTemplate(tiny_chatml_text.TEMPLATE, "test")),
}


@cache
def made(name: str) -> ChatFormat:
    return MAKE[name]()


@pytest.fixture(params=MAKE)
def chat_format(request: pytest.FixtureRequest) -> ChatFormat:
    return made(request.param)


def test_every_format_is_tested_here() -> None:
    assert {type(made(name)) for name in MAKE} == set(FORMATS)


def read(
    chat_format: ChatFormat, ids: list[int], *, one_call: bool = False
) -> tuple[str, str, list[tuple[str, object]]]:
    """Reasoning, content and calls of an output, one token at a time; its form must be right."""
    output = ChatOutput(chat_format.parser(("f", "g")), one_call=one_call)
    deltas = [delta for token in ids if (delta := output.feed([token]))] + [output.finish()]
    assert not output.flaws
    assert [token for delta in deltas for token in delta.token_ids] == ids
    calls: list[tuple[str, str]] = []
    for call in (call for delta in deltas for call in delta.calls):
        if call.function is not None:
            calls.append((call.function, ""))
        calls[-1] = (calls[-1][0], calls[-1][1] + call.arguments)
    loaded = [(name, json.loads(arguments)) for name, arguments in calls]
    return "".join(delta.reasoning for delta in deltas), "".join(delta.content for delta in deltas), loaded


@pytest.mark.parametrize(
    "message",
    [
        Message(Role.ASSISTANT, "Just an answer."),
        Message(Role.ASSISTANT, "2 + 2 = 4 — 日本.", "Größe, 👩‍👧: 4."),
        Message(Role.ASSISTANT, reasoning="The weather.", tool_calls=(F,)),
        Message(Role.ASSISTANT, tool_calls=(G,)),
        Message(Role.ASSISTANT, "I look.", "Hm.", (F,)),
    ],
)
def test_what_is_written_is_read(chat_format: ChatFormat, message: Message) -> None:
    ids = chat_format.turn(message)
    reasoning, content, calls = read(chat_format, ids)
    assert (reasoning, content) == (message.reasoning, message.content)
    assert calls == [(call.name, json.loads(call.arguments)) for call in message.tool_calls]
    # Generation ends with the turn, and nowhere before.
    assert [token in chat_format.stops for token in ids] == [False] * (len(ids) - 1) + [True]
    # ChatML ends a turn in one way, whatever it holds; the others have a token of their own after calls.
    ends_alike = isinstance(chat_format, ChatmlFormat)
    assert (ids[-1] == chat_format.answer_end) is (ends_alike or not message.tool_calls)
    assert (chat_format.call_end in ids) is bool(message.tool_calls)


@pytest.mark.parametrize(
    ("turn", "message", "allowed"),
    [
        (Turn(), Message(Role.ASSISTANT, "Any text.", "Hm."), True),
        (Turn(Schema({"type": "integer"})), Message(Role.ASSISTANT, "17", "Hm."), True),
        (Turn(Schema({"type": "integer"})), Message(Role.ASSISTANT, "Any text.", "Hm."), False),
        (Turn(calls={"f": ANY_OBJECT}), Message(Role.ASSISTANT, tool_calls=(F,)), True),
        (Turn(calls={"f": ANY_OBJECT}, one_call=True), Message(Role.ASSISTANT, tool_calls=(F,)), True),
        (Turn(calls={"f": ANY_OBJECT}, one_call=True), Message(Role.ASSISTANT, tool_calls=(F, F)), False),
        (Turn(calls={"f": ANY_OBJECT}), Message(Role.ASSISTANT, tool_calls=(G,)), False),
        (Turn(calls={"f": ANY_OBJECT}, must_call=True), Message(Role.ASSISTANT, "No."), False),
    ],
)
def test_the_grammar_allows_what_is_written(
    chat_format: ChatFormat, turn: Turn, message: Message, allowed: bool
) -> None:
    call = ToolCall("1", "f", '{"a": [1, -2.5, {"b": null}], "c": "x"}')
    plain = Message(
        message.role,
        message.content,
        message.reasoning,
        tuple(call if made is F else made for made in message.tool_calls),
    )
    assert follows(chat_format, chat_format.turn_grammar(turn), chat_format.turn(plain)) is allowed


def follows(chat_format: ChatFormat, grammar: str, ids: list[int]) -> bool:
    tokenizer = chat_format.tokenizer
    words = tokenizer.vocabulary()
    vocabulary = Vocabulary(words, sorted(tokenizer.control.values()), tokenizer.split_pattern)
    matcher = Grammars(vocabulary, len(words)).matcher(grammar)
    return all(map(matcher.inner.consume_token, ids)) and matcher.ended


def test_forms_alone_end_as_the_format_does(chat_format: ChatFormat) -> None:
    number, encode = Schema({"type": "integer"}), chat_format.tokenizer.encode
    assert follows(chat_format, chat_format.answer_grammar(number), [*encode("17"), chat_format.answer_end])
    assert not follows(chat_format, chat_format.answer_grammar(number), [*encode("x"), chat_format.answer_end])
    assert follows(chat_format, chat_format.arguments_grammar(ANY_OBJECT), [*encode("{}"), chat_format.call_end])
    ends = [
        end for end in chat_format.stops if follows(chat_format, chat_format.text_grammar(number), [*encode("17"), end])
    ]
    assert ends


def test_no_text_is_a_control_token(chat_format: ChatFormat) -> None:
    text = "".join(chat_format.CONTROL)
    plain, forged = (
        chat_format.render([Message(Role.USER, words)], RenderOptions(date="2026-11-15")) for words in ("x", text)
    )
    control = chat_format.tokenizer.is_control
    assert list(filter(control, plain)) == list(filter(control, forged))
    assert text in chat_format.tokenizer.decode(forged, show_control=True)


@pytest.mark.parametrize("joined", [True, False])
def test_one_call_is_all_that_comes(chat_format: ChatFormat, joined: bool) -> None:
    """Also where the model goes on after it: what it wrote then shows nothing."""
    ids = chat_format.turn(Message(Role.ASSISTANT, reasoning="Hm.", tool_calls=(F, G)))
    assert [name for name, _ in read(chat_format, ids)[2]] == ["f", "g"]
    assert read(chat_format, ids, one_call=True)[2] == [("f", json.loads(F.arguments))]
    output = ChatOutput(chat_format.parser(("f", "g")), one_call=True)
    deltas = [output.feed(ids)] if joined else [output.feed([token]) for token in ids]
    assert output.ended
    assert output.stopped is None
    assert (output.num_calls, {call.call_idx for delta in deltas if delta for call in delta.calls}) == (1, {0})
    assert not output.finish().shows


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("gemma", "<|tool_call>call:f{}<|tool_call>call:g{}<tool_call|><turn|>"),
        ("chatml", '<tool_call>{"name": "f", "arguments": {}}<tool_call>{"name": "g", "arguments": {}}</tool_call>'),
    ],
)
def test_a_call_that_nothing_closed_is_the_only_one_too(name: str, text: str) -> None:
    chat_format = made(name)
    ids = chat_format.tokenizer.encode_with_control(text)
    both, one = (ChatOutput(chat_format.parser(("f", "g")), one_call=limit) for limit in (False, True))
    assert [output.feed(ids) is not None and output.num_calls for output in (both, one)] == [2, 1]


def test_what_stands_before_a_raw_prompt() -> None:
    harmony, gemma, chatml = (made(name) for name in ("harmony", "gemma", "chatml"))
    bos = gemma.tokenizer.control["<bos>"]
    for text in ("the world", "<|turn>user\n", ""):
        plain = gemma.tokenizer.encode_with_control(text)
        assert gemma.encode_text(text) == [bos, *plain]
        assert gemma.encode_text(text, add_special_tokens=False) == plain
        assert gemma.encode_text(f"<bos>{text}") == [bos, *plain]
        assert harmony.encode_text(text) == harmony.tokenizer.encode_with_control(text)
        assert chatml.encode_text(text) == chatml.tokenizer.encode_with_control(text)


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text('aé"{}[]:,<|\n '),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text('aé"{}:, ', max_size=4), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text('ab:{ "', max_size=4), values, max_size=3))
def test_any_arguments_come_back(arguments: dict[str, object]) -> None:
    text = json.dumps(arguments, ensure_ascii=False)
    for name in MAKE:
        ids = made(name).turn(Message(Role.ASSISTANT, tool_calls=(ToolCall("1", "f", text),)))
        assert read(made(name), ids)[2] == [("f", arguments)]

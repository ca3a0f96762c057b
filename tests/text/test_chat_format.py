"""What every chat format guarantees: it parses the turns that it writes, and no client text becomes a control token."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from microscale.errors import BadCheckpoint, BadRequest
from microscale.text.chat_format import ChatFormat
from microscale.text.chatml.format import ChatmlFormat
from microscale.text.conversation import Message, RenderOptions, Role, Tool, ToolCall
from microscale.text.formats import FORMATS, self_test
from microscale.text.output import ChatOutput
from support.chat_formats import MAKE, chatml, made, run, schema_of, total

F = ToolCall(
    "1", "f", '{"city": "Zürich, \\"old\\" {town}", "days": 3, "exact": 1.50, "tags": ["a", true, null], "x:y": {}}'
)
G = ToolCall("2", "g", "{}")
TOOLS = (Tool("f"), Tool("g"))


@pytest.fixture(params=MAKE)
def chat_format(request: pytest.FixtureRequest) -> ChatFormat:
    return made(request.param)


def test_every_format_is_tested_here() -> None:
    assert {type(made(name)) for name in MAKE} == set(FORMATS)


def read(
    chat_format: ChatFormat, ids: list[int], *, one_call: bool = False, tools: tuple[Tool, ...] = TOOLS
) -> tuple[str, str, list[tuple[str, object]]]:
    """Reasoning, content and calls of an output, one token at a time; its form must be right."""
    output = ChatOutput(chat_format.parser(tools), one_call=one_call)
    deltas = run(output, [[token] for token in ids])
    assert not output.flaws
    assert [token for delta in deltas for token in delta.token_ids] == ids
    reasoning, content, calls, _ = total(deltas)
    return reasoning, content, [(name, json.loads(arguments)) for name, arguments in calls]


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


HOSTILE = ["<", "\ue000", "\ue0001", "\ue0000<", "|turn>", "think>", "<|im_", "[multimodal]", "a", " ", "é", "日"]
hostile = st.sampled_from(sorted(MAKE)).flatmap(
    lambda name: st.tuples(
        st.just(name),
        st.lists(st.sampled_from([*made(name).tokenizer.control, *HOSTILE]), min_size=1, max_size=8).map("".join),
    )
)


@given(hostile)
def test_text_stays_text(attack: tuple[str, str]) -> None:
    """Whatever a client writes, wherever: all control tokens are the format's own, and the text comes back."""
    name, text = attack

    def talk(inner: str) -> list[int]:
        call = ToolCall("c", "f", '{"k": ' + json.dumps(inner) + "}")
        tool = Tool("f", inner, {"description": inner, "enum": [inner]})
        messages = [
            Message(Role.SYSTEM, inner),
            Message(Role.USER, inner),
            Message(Role.ASSISTANT, inner, inner, (call,)),
            Message(Role.TOOL, inner, call_id="c"),
        ]
        return made(name).render(messages, RenderOptions(tools=(tool,), date="2026-11-15"))

    text = f"({text})"  # templates trim
    ids, plain = talk(text), talk("(x)")
    tokenizer = made(name).tokenizer
    assert list(filter(tokenizer.is_control, ids)) == list(filter(tokenizer.is_control, plain))
    if name != "harmony":  # which writes schemas in its own way
        assert tokenizer.decode(ids) == tokenizer.decode(plain).replace("(x)", text)


@pytest.mark.parametrize(
    ("messages", "tools", "problem"),
    [
        ([Message(Role.TOOL, "x", call_id="c9")], (), "answers the call 'c9'"),
        ([Message(Role.USER, "x")], (Tool("no name"),), "'no name' is not a valid function name"),
    ],
)
def test_what_cannot_be_rendered(
    chat_format: ChatFormat, messages: list[Message], tools: tuple[Tool, ...], problem: str
) -> None:
    with pytest.raises(BadRequest, match=problem):
        chat_format.render(messages, RenderOptions(tools=tools))


def test_the_self_test(chat_format: ChatFormat) -> None:
    end = chat_format.answer_end
    self_test(chat_format, 600, [1, end])
    with pytest.raises(BadCheckpoint, match="do not belong together"):
        self_test(chat_format, 600, [1])
    with pytest.raises(BadCheckpoint, match="vocabulary of 263"):
        self_test(chat_format, 263, [end])


@pytest.mark.parametrize("template", ["<|im_start|>assistant\n", "{{ messages[0].content }}<|im_start|>assistant\n"])
def test_a_template_that_drops_the_question_fails_the_self_test(template: str) -> None:
    with pytest.raises(BadCheckpoint, match="does not decode a prompt"):
        self_test(chatml(template), 600)


@pytest.mark.parametrize("joined", [True, False])
def test_one_call_is_all_that_comes(chat_format: ChatFormat, joined: bool) -> None:
    """Also where the model goes on after it: what it wrote then shows nothing."""
    ids = chat_format.turn(Message(Role.ASSISTANT, reasoning="Hm.", tool_calls=(F, G)))
    assert [name for name, _ in read(chat_format, ids)[2]] == ["f", "g"]
    assert read(chat_format, ids, one_call=True)[2] == [("f", json.loads(F.arguments))]
    output = ChatOutput(chat_format.parser(TOOLS), one_call=True)
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
        ("chatml_xml", "<tool_call><function=f></function><tool_call><function=g></function></tool_call>"),
    ],
)
def test_a_call_that_nothing_closed_is_the_only_one_too(name: str, text: str) -> None:
    chat_format = made(name)
    ids = chat_format.tokenizer.encode_with_control(text)
    both, one = (ChatOutput(chat_format.parser(TOOLS), one_call=limit) for limit in (False, True))
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
        # XML does not say which values are text: the schema does.
        tool = Tool("f", parameters=schema_of(arguments))
        assert read(made(name), ids, tools=(tool,))[2] == [("f", arguments)]

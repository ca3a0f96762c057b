"""Prompts that a checkpoint's template renders: Gemma's and ChatML's."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from microscale.text.chatml import tokens as chatml_names
from microscale.text.chatml.xml_call import XML
from microscale.text.conversation import Effort, Message, PromptEnd, RenderOptions, ResponseFormat, Role, Tool, ToolCall
from microscale.text.output import ChatOutput
from microscale.text.template_format import lay_out
from support.chat_formats import chatml, gemma, made
from support.tiny_chatml_text import ALWAYS_THINKS, TEMPLATE, XML_CALLS, inner_chatml, tiny_chatml
from support.tiny_gemma_text import tiny_gemma

WEATHER = Tool(
    "get_weather", "The weather", {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
)
INSTRUCTIONS = [Message(Role.SYSTEM, "Be brief."), Message(Role.DEVELOPER, "Be kind.")]
QUESTION = [Message(Role.USER, "Hello world")]


def shown(name: str, ids: list[int] | tuple[int, ...]) -> str:
    return made(name).tokenizer.decode(ids, show_control=True)


def test_a_conversation_with_tools_in_gemma() -> None:
    call = ToolCall("c1", "get_weather", '{"city": "Paris", "days": [1, 2.50]}')
    talk = [
        *INSTRUCTIONS,
        Message(Role.USER, "  Weather in Paris?\n"),
        Message(Role.ASSISTANT, "", "I must ask.", (call,)),
        Message(Role.TOOL, "18 °C", call_id="c1"),
    ]
    text = (
        "<bos><|turn>system\n<|think|>\nBe brief.\n\nBe kind."
        '<|tool>declaration:get_weather{properties:{city:{type:<|"|>string<|"|>}},required:[<|"|>city<|"|>],'
        'type:<|"|>object<|"|>}<tool|><turn|>\n'
        "<|turn>user\nWeather in Paris?<turn|>\n"
        '<|turn>model\n<|channel>thought\nI must ask.\n<channel|><|tool_call>call:get_weather{city:<|"|>Paris<|"|>,'
        'days:[1,2.5]}<tool_call|><|tool_response>response:get_weather{value:<|"|>18 °C<|"|>}<tool_response|>'
    )
    ids = made("gemma").render(talk, RenderOptions(tools=(WEATHER,)))
    assert shown("gemma", ids) == text
    # Every control name of the template is one token, and none is spelled out.
    assert sum(tiny_gemma().is_control(token) for token in ids) == text.count("<")


CHATML_TALK = [
    *INSTRUCTIONS,
    Message(Role.USER, "Hello?"),
    Message(Role.ASSISTANT, "Hi.", "They greet."),
    Message(Role.USER, "  Weather in Paris and Rome?\n"),
    Message(
        Role.ASSISTANT,
        "I look.",
        "I must ask.",
        (ToolCall("c1", "get_weather", '{"city": "Paris"}'), ToolCall("c2", "get_weather", '{"city": "Rome"}')),
    ),
    Message(Role.TOOL, "18 °C", call_id="c1"),
    Message(Role.TOOL, "21 °C", call_id="c2"),
]


@pytest.mark.parametrize("name", ["chatml", "chatml_xml"])
def test_a_conversation_with_tools_in_chatml(name: str) -> None:
    """Equal to transformers: the same template over the same messages, in the tokenizer as it is published."""
    options = RenderOptions(tools=(WEATHER,))
    ids = made(name).render(CHATML_TALK, options)
    function = {"name": WEATHER.name, "description": WEATHER.description, "parameters": WEATHER.parameters}
    theirs, _ = render_jinja_template(
        [lay_out(CHATML_TALK, options)],
        chat_template=XML_CALLS if name == "chatml_xml" else TEMPLATE,
        tools=[{"type": "function", "function": function}],
        add_generation_prompt=True,
        enable_thinking=True,
    )
    assert ids == inner_chatml().encode(theirs[0], add_special_tokens=False).ids
    if name == "chatml":
        check_prompt(shown("chatml", ids), ids)


def test_xml_calls_of_earlier_turns() -> None:
    """The reasoning before the last question goes, unless it is to be kept."""
    call = ToolCall("c1", "get_weather", '{"city": "Paris", "days": [1, 2.5], "note": "</parameter>\\n<think>"}')
    talk = [*QUESTION, Message(Role.ASSISTANT, "Hi.", "They greet."), Message(Role.USER, "Well?")]
    talk += [Message(Role.ASSISTANT, "", "I must ask.", (call,)), Message(Role.TOOL, "18 °C", call_id="c1")]
    for keep, kept in ((None, ""), (False, ""), (True, "<think>\nThey greet.\n</think>\n\n")):
        ids = made("chatml_xml").render(talk, RenderOptions(preserve_thinking=keep))
        assert shown("chatml_xml", ids) == (
            f"{ASKED}{kept}Hi.<|im_end|>\n{ASKED.replace('Hello world', 'Well?')}"
            "<think>\nI must ask.\n</think>\n\n<tool_call>\n"
            "<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n[1, 2.5]\n</parameter>\n"
            "<parameter=note>\n</parameter>\n<think>\n</parameter>\n</function>\n</tool_call><|im_end|>\n"
            "<|im_start|>user\n<tool_response>\n18 °C\n</tool_response><|im_end|>\n<|im_start|>assistant\n<think>\n"
        )
        assert ids.count(tiny_chatml().control["<think>"]) == 2 + bool(kept)


@pytest.mark.parametrize("arguments", ["{city: Paris}", "[1]", '"Paris"', '{"city": "Par', "[" * 5000])
def test_arguments_that_are_no_object_become_one_parameter(arguments: str) -> None:
    """A call that was cut, which the client sends back: the conversation can go on."""
    call = ToolCall("c1", "f", arguments)
    ids = made("chatml_xml").render([*QUESTION, Message(Role.ASSISTANT, tool_calls=(call,))], RenderOptions())
    written = f"<function=f>\n<parameter=arguments>\n{arguments}\n</parameter>\n</function>"
    assert written in shown("chatml_xml", ids)
    assert XML.text(call) == written


def check_prompt(text: str, ids: list[int]) -> None:
    assert text.startswith("<|im_start|>system\nBe brief.\n\nBe kind.\n\nFunctions, as JSON:\n<tools>\n{")
    assert text.endswith(
        "<|im_start|>user\nHello?<|im_end|>\n<|im_start|>assistant\nHi.<|im_end|>\n"
        "<|im_start|>user\n  Weather in Paris and Rome?\n<|im_end|>\n"
        "<|im_start|>assistant\n<think>\nI must ask.\n</think>\n\nI look.\n"
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n18 °C\n</tool_response>\n<tool_response>\n21 °C\n</tool_response>"
        "<|im_end|>\n<|im_start|>assistant\n"
    )
    # Every control name of the template is one token; <tools> is text.
    assert sum(map(tiny_chatml().is_control, ids)) == text.count("<") - 2


ASKED = "<|im_start|>user\nHello world<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("template", "effort", "begun"),
    [
        (TEMPLATE, Effort.HIGH, ""),
        (TEMPLATE, Effort.MEDIUM, ""),
        (TEMPLATE, Effort.LOW, "<think>\n\n</think>\n\n"),
        (ALWAYS_THINKS, Effort.HIGH, "<think>\n"),
        (ALWAYS_THINKS, Effort.LOW, "<think>\n"),
        (XML_CALLS, Effort.HIGH, "<think>\n"),
        (XML_CALLS, Effort.LOW, "<think>\n\n</think>\n\n"),
    ],
)
def test_chatml_reasoning_is_on_or_off_or_begun(template: str, effort: Effort, begun: str) -> None:
    prompt = chatml(template).rendered(QUESTION, RenderOptions(effort=effort))
    assert (shown("chatml", prompt.tokens), shown("chatml", prompt.begun)) == (ASKED + begun, begun)


def test_gemma_reasoning_is_on_or_off() -> None:
    off, on = (
        shown("gemma", gemma().render(QUESTION, RenderOptions(effort=effort))) for effort in (Effort.LOW, Effort.HIGH)
    )
    assert off == "<bos><|turn>user\nHello world<turn|>\n<|turn>model\n<|channel>thought\n<channel|>"
    assert on == "<bos><|turn>system\n<|think|>\n<turn|>\n<|turn>user\nHello world<turn|>\n<|turn>model\n"


HALF, EMPTY = "<think>\nTwo", "<think>\n\n</think>\n\n"


@pytest.mark.parametrize(
    ("template", "effort", "last", "end", "read"),
    [
        (TEMPLATE, Effort.HIGH, Message(Role.ASSISTANT, "It is "), "It is ", "It is "),
        (TEMPLATE, Effort.HIGH, Message(Role.ASSISTANT, "It is:\n\n"), "It is:\n\n", "It is:"),
        (TEMPLATE, Effort.LOW, Message(Role.ASSISTANT, "It"), f"{EMPTY}It", f"{EMPTY}It"),
        (TEMPLATE, Effort.HIGH, Message(Role.ASSISTANT, "It", "Hm."), "<think>\nHm.\n</think>\n\nIt", None),
        (TEMPLATE, Effort.HIGH, Message(Role.ASSISTANT, "", "Two"), HALF, HALF),
        # Reasoning that the template begins is not begun twice, and an answer is not inside it.
        (ALWAYS_THINKS, Effort.HIGH, Message(Role.ASSISTANT, "", "Two"), HALF, HALF),
        (ALWAYS_THINKS, Effort.HIGH, Message(Role.ASSISTANT, "It"), f"{EMPTY}It", None),
    ],
)
def test_a_message_is_continued(template: str, effort: Effort, last: Message, end: str, read: str | None) -> None:
    prompt = chatml(template).rendered([*QUESTION, last], RenderOptions(effort=effort, end=PromptEnd.OPEN))
    assert shown("chatml", prompt.tokens) == ASKED + end
    assert shown("chatml", prompt.begun) == (end if read is None else read)
    output = ChatOutput(made("chatml").parser(()), begun=prompt.begun)
    delta = output.feed(tiny_chatml().encode("four"))
    assert delta is not None
    assert (delta.reasoning, delta.content) == (("four", "") if not last.content else ("", "four"))


def test_a_prompt_that_ends_after_the_last_message() -> None:
    talk = [*QUESTION, Message(Role.ASSISTANT, "Yes.", "Hm.")]
    prompt = made("chatml").rendered(talk, RenderOptions(end=PromptEnd.CLOSED))
    assert shown("chatml", prompt.tokens) == ASKED + "<think>\nHm.\n</think>\n\nYes.<|im_end|>\n"
    assert prompt.begun == ()


@pytest.mark.parametrize("name", ["gemma", "chatml"])
def test_the_prompt_describes_the_output_format(name: str) -> None:
    form = ResponseFormat("answer", "", {"type": "object"})
    text = shown(name, made(name).render(QUESTION, RenderOptions(effort=None, response_format=form)))
    assert 'system\nAnswer with JSON of this schema and with nothing else:\n{"type": "object"}' in text


def test_marks_are_text_in_a_text_and_tokens_in_a_raw_prompt() -> None:
    """They are not special in the file: on its own, the library finds them in any text."""
    for name in chatml_names.NAMES:
        assert inner_chatml().encode(name, add_special_tokens=False).ids == [tiny_chatml().control[name]]
        assert not any(map(tiny_chatml().is_control, tiny_chatml().encode(f"a {name} b")))
        assert made("chatml").encode_text(name) == [tiny_chatml().control[name]]


@pytest.mark.parametrize(("arguments", "quotes"), [('{"a": "\\ud800"}', 2), ('{"\\ud800": 1}', 2), ("{a:\ud800", 0)])
def test_no_text_of_a_gemma_call_becomes_a_quote_token(arguments: str, quotes: int) -> None:
    ids = made("gemma").turn(Message(Role.ASSISTANT, "", tool_calls=(ToolCall("c", "f", arguments),)))
    assert ids.count(tiny_gemma().control['<|"|>']) == quotes


@given(st.text())
def test_pieces_and_bytes_give_the_text_back(text: str) -> None:
    ids = tiny_gemma().encode(text)
    assert tiny_gemma().decode(ids) == text
    assert not any(map(tiny_gemma().is_control, ids))

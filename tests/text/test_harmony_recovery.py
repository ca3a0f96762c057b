"""What malformed output becomes: one case for each way in which models go wrong."""

from __future__ import annotations

import pytest

from microscale.text.events import Flaw
from microscale.text.harmony.parser import HarmonyParser
from microscale.text.harmony.tokens import HarmonyTokens
from microscale.text.output import ChatOutput
from support.tiny_tokenizers import tiny

Calls = list[tuple[str, str]]


def read(output: str, tools: list[str] | None = None) -> tuple[str, str, Calls, set[Flaw]]:
    """Reasoning, content, calls and flaws of an output."""
    chat = ChatOutput(HarmonyParser(HarmonyTokens.of(tiny()), tools))
    deltas = [delta for token in tiny().encode_with_control(output) if (delta := chat.feed([token]))]
    deltas.append(chat.finish())
    calls: Calls = []
    for call in (call for delta in deltas for call in delta.calls):
        if call.function is not None:
            calls.append((call.function, ""))
        name, arguments = calls[call.call_idx]
        calls[call.call_idx] = name, arguments + call.arguments
    reasoning = "".join(delta.reasoning for delta in deltas)
    return reasoning, "".join(delta.content for delta in deltas), calls, set(chat.flaws)


A = "<|channel|>analysis<|message|>think<|end|>"
S = "<|start|>assistant"
F = "<|channel|>final<|message|>"


@pytest.mark.parametrize(
    ("output", "reasoning", "content", "flaws"),
    [
        # As the format says.
        (f"{A}{S}{F}hello<|return|>", "think", "hello", set()),
        (
            f"{A}{S}<|channel|>commentary<|message|>I will look.<|end|>{S}{F}hello<|return|>",
            "think",
            "I will look.\nhello",
            set(),
        ),
        (f"{F}hello<|endoftext|>", "", "hello", set()),
        # Models write this when JSON was asked for. The library takes the type for a recipient, which makes it a call.
        ("<|channel|>final json<|message|>{}<|return|>", "", "{}", set()),
        ("<|channel|>final <|constrain|>json<|message|>{}<|return|>", "", "{}", set()),
        # No header, or not all of it.
        ("hello there<|return|>", "", "hello there", {Flaw.NO_HEADER, Flaw.NO_CHANNEL}),
        ("user stories<|return|>", "", "user stories", {Flaw.NO_HEADER, Flaw.NO_CHANNEL}),
        ("<|message|>hello<|return|>", "", "hello", {Flaw.NO_CHANNEL}),
        (f"{A}{S}<|message|>hello<|return|>", "think", "hello", {Flaw.NO_CHANNEL}),
        (f"{A}hello<|return|>", "think", "hello", {Flaw.MISSING_START, Flaw.NO_HEADER, Flaw.NO_CHANNEL}),
        (f"{A}assistant{F}hello<|return|>", "think", "hello", {Flaw.MISSING_START}),
        (f"{A}{F}hello<|return|>", "think", "hello", {Flaw.MISSING_START}),
        (f"{A}{S}hello there<|return|>", "think", "hello there", {Flaw.TEXT_IN_HEADER, Flaw.NO_CHANNEL}),
        # The message token is missing.
        ("<|channel|>final hello there<|return|>", "", "hello there", {Flaw.TEXT_IN_HEADER}),
        ("<|channel|>finalHello<|return|>", "", "Hello", {Flaw.TEXT_IN_HEADER}),
        (f"<|channel|>analysisWe think<|end|>{S}{F}hello<|return|>", "We think", "hello", {Flaw.TEXT_IN_HEADER}),
        ("<|channel|>hello there<|return|>", "", "hello there", {Flaw.TEXT_IN_HEADER, Flaw.NO_CHANNEL}),
        ("<|channel|>hello<|return|>", "", "hello", {Flaw.TEXT_IN_HEADER, Flaw.NO_CHANNEL}),
        # Wrong words in the header.
        ("<|channel|>thoughts<|message|>hello<|return|>", "", "hello", {Flaw.WRONG_CHANNEL}),
        ("<|channel|>comment<|message|>hello<|return|>", "", "hello", {Flaw.WRONG_CHANNEL}),
        (f"{A}<|start|>user{F}hello<|end|>", "think", "hello", {Flaw.WRONG_ROLE}),
        ("<|channel|>final to=user<|message|>hello<|return|>", "", "hello", {Flaw.WRONG_RECIPIENT}),
        (
            "<|channel|>final no header<|message|> it is<|return|>",
            "",
            "no header it is",
            {Flaw.TEXT_IN_HEADER, Flaw.STRAY_TOKEN},
        ),
        # Headers where none belongs.
        (f"<|channel|>analysis<|message|>think{S}{F}hello<|return|>", "think", "hello", {Flaw.HEADER_IN_TEXT}),
        (f"<|channel|>analysis<|message|>think{F}hello<|return|>", "think", "hello", {Flaw.HEADER_IN_TEXT}),
        (f"{S}{F}hello<|return|>", "", "hello", {Flaw.REPEATED_HEADER}),
        (f"{A}{S}{S}{S}{F}hello<|return|>", "think", "hello", {Flaw.REPEATED_HEADER}),
        (f"<|channel|>analysis{F}hello<|return|>", "", "hello", {Flaw.REPEATED_HEADER}),
        (f"<|channel|>analysis{S}{F}hello<|return|>", "", "hello", {Flaw.REPEATED_HEADER}),
        # Control tokens where they mean nothing.
        (f"{F}hel<|message|>lo<|return|>", "", "hello", {Flaw.STRAY_TOKEN}),
        (f"{F}hel<|constrain|>lo<|return|>", "", "hello", {Flaw.STRAY_TOKEN}),
        (f"{F}hel<|startoftext|>lo<|return|>", "", "hello", {Flaw.STRAY_TOKEN}),
        (f"<|end|>{S}{F}hello<|return|>", "", "hello", {Flaw.NO_MESSAGE}),
        (f"{A}<|end|>{S}{F}hello<|return|>", "think", "hello", {Flaw.STRAY_TOKEN}),
        (f"<|channel|>final<|end|>{S}{F}hello<|return|>", "", "hello", {Flaw.NO_MESSAGE}),
        (f"{F}hello<|call|>", "", "hello", {Flaw.CALL_WITHOUT_RECIPIENT}),
        # Nothing for the user: content is an empty string, and it is said.
        (f"{A}", "think", "", {Flaw.NO_CONTENT}),
        (f"{A}<|return|>", "think", "", {Flaw.STRAY_TOKEN, Flaw.NO_CONTENT}),
        (f"{F}<|return|>", "", "", {Flaw.NO_CONTENT}),
        ("<|return|>", "", "", {Flaw.NO_MESSAGE, Flaw.NO_CONTENT}),
        ("", "", "", {Flaw.CUT, Flaw.NO_CONTENT}),
    ],
)
def test_text(output: str, reasoning: str, content: str, flaws: set[Flaw]) -> None:
    assert read(output) == (reasoning, content, [], flaws)


C = '<|message|>{"a": 1}<|call|>'
NOT_JSON = {Flaw.BAD_ARGUMENTS}


@pytest.mark.parametrize(
    ("output", "flaws"),
    [
        (f"<|channel|>commentary to=functions.f <|constrain|>json{C}", set()),
        (f"<|channel|>commentary to=functions.f<|constrain|>json{C}", set()),
        (f"<|channel|>commentary to=functions.f json{C}", set()),
        (f"<|channel|>commentary to=functions.f{C}", set()),
        (f"<|channel|>commentary to=functions.f json<|constrain|>json{C}", set()),
        (f"<|channel|>analysis to=functions.f{C}", set()),
        (f" to=functions.f<|channel|>commentary{C}", set()),
        (f"{S} to=functions.f<|channel|>commentary <|constrain|>json{C}", {Flaw.REPEATED_HEADER}),
        (f" to=functions.f <|constrain|>json<|channel|>commentary{C}", set()),
        (f"<|channel|>commentary <|constrain|>json to=functions.f{C}", {Flaw.WRONG_RECIPIENT}),
        (f"<|channel|>commentaryto=functions.f{C}", {Flaw.WRONG_RECIPIENT}),
        (f"<|channel|>commentary functions.f json{C}", {Flaw.WRONG_RECIPIENT}),
        (f"<|channel|>commentary to=functions.f to=functions.g{C}", {Flaw.WRONG_RECIPIENT}),
        (f"<|channel|>to=functions.f{C}", {Flaw.NO_CHANNEL}),
        (f" to=functions.f{C}", {Flaw.NO_CHANNEL}),
        (f"<|channel|>commentary to=f{C}", set()),
        (f"<|channel|>final to=functions.f{C}", {Flaw.WRONG_CHANNEL}),
        (f"<|channel|>tool to=functions.f{C}", {Flaw.WRONG_CHANNEL}),
        ('<|channel|>commentary to=functions.f <|constrain|>json{"a": 1}<|call|>', {Flaw.TEXT_IN_HEADER}),
        ('<|channel|>commentary to=functions.f {"a": 1}<|call|>', {Flaw.TEXT_IN_HEADER}),
        ('<|channel|>commentary to=functions.f<|message|>{"a": 1}<|end|>', set()),
        ('<|channel|>commentary to=functions.f<|message|>{"a": 1}', {Flaw.CUT}),
    ],
)
def test_calls(output: str, flaws: set[Flaw]) -> None:
    assert read(output) == ("", "", [("f", '{"a": 1}')], flaws)


@pytest.mark.parametrize("arguments", ["", "Paris", '{"a": NaN}', '{"a": 1', "[" * 5000])
def test_arguments_that_are_not_json_are_handed_on(arguments: str) -> None:
    output = f"<|channel|>commentary to=functions.f <|constrain|>json<|message|>{arguments}<|call|>"
    assert read(output) == ("", "", [("f", arguments)], NOT_JSON)


def test_huge_numbers_are_json() -> None:
    digits = "9" * 5000
    assert read(f"<|channel|>commentary to=functions.f<|message|>{digits}<|call|>")[2:] == ([("f", digits)], set())


def test_parallel_calls_keep_their_order() -> None:
    one = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>1<|call|>"
    two = "<|channel|>commentary to=functions.g <|constrain|>json<|message|>2<|call|>"
    assert read(f"{A}{S}{one}{S}{two}{S}{one}") == ("think", "", [("f", "1"), ("g", "2"), ("f", "1")], set())


def test_a_call_of_a_tool_that_was_not_offered_is_text() -> None:
    call = "<|channel|>commentary to=functions.f<|message|>{}<|call|>"
    assert read(call, ["f"])[2] == [("f", "{}")]
    flaws = {Flaw.UNKNOWN_TOOL, Flaw.CALL_WITHOUT_RECIPIENT}
    assert read(call, ["g"]) == ("", "{}", [], flaws)
    python = "<|channel|>analysis to=python code<|message|>print(1)<|call|>"
    assert read(python, []) == ("print(1)", "", [], flaws | {Flaw.NO_CONTENT})


def test_a_cut_anywhere_shows_a_beginning_of_the_whole() -> None:
    call = '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris"}<|call|>'
    whole = (
        f"<|channel|>analysis<|message|>Größe 👩‍👩‍👧<|end|>{S}<|channel|>commentary<|message|>I look.<|end|>{S}{call}"
    )
    ids = tiny().encode_with_control(whole)
    for cut in range(len(ids) + 1):
        chat = ChatOutput(HarmonyParser(HarmonyTokens.of(tiny())))
        delta = chat.feed(ids[:cut])
        last = chat.finish()
        shown = [delta, last] if delta else [last]
        assert "Größe 👩‍👩‍👧".startswith("".join(d.reasoning for d in shown).rstrip("\ufffd"))
        assert "I look.".startswith("".join(d.content for d in shown))
        assert all(call.function in ("get_weather", None) for d in shown for call in d.calls)
        assert '{"city": "Paris"}'.startswith("".join(call.arguments for d in shown for call in d.calls))


@pytest.mark.parametrize(
    ("output", "content"),
    [
        ("<|channel|>", ""),
        ("<|channel|>comm", ""),
        ("<|channel|>commentary to", ""),
        ("<|channel|>commentary to=functions.get_w", ""),
        ("<|channel|>commentary to=functions.f <|constrain|>js", ""),
        (" to=functions.f", ""),
        ("<|end|><|start|>assis", ""),
        ("<|channel|>Hel", "Hel"),
        ("Hel", "Hel"),
        ("assistant", "assistant"),
        ("t", "t"),
    ],
)
def test_a_cut_header_shows_only_what_is_no_header(output: str, content: str) -> None:
    reasoning, found, calls, flaws = read(output)
    assert (reasoning, found, calls) == ("", content, [])
    assert Flaw.CUT in flaws
    assert (Flaw.NO_CONTENT in flaws) == (not content)

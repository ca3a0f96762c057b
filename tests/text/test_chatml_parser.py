"""ChatML's outputs to thoughts, content and calls: as the format says, cut anywhere, and malformed."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from microscale.text.chatml import tokens as names
from microscale.text.chatml.call import MAX_HEAD_CHARS, BadCall, CallReader, whole_call
from microscale.text.chatml.parser import ChatmlParser
from microscale.text.chatml.tokens import ChatmlTokens
from microscale.text.events import Begin, Event, Flaw, Flawed, Kind, Text
from microscale.text.output import ChatOutput, Delta
from support.tiny_chatml_text import tiny_chatml

TOKENS = ChatmlTokens.of(tiny_chatml())
F = '{"name": "f", "arguments": {"a": 1}}'
G = '{"name": "g.h-1", "arguments": {}}'
THINK = "<think>\nhm\n</think>\n\n"

Fields = tuple[str, str, list[tuple[str, str]]]


def parse(
    text: str, tools: tuple[str, ...] | None = None, stops: tuple[str, ...] = (), begun: str = ""
) -> tuple[ChatOutput, list[Delta]]:
    """The deltas of an output, one token at a time; names of control tokens in ``text`` are these."""
    ids = tiny_chatml().encode_with_control(text)
    output = ChatOutput(ChatmlParser(TOKENS, tools), stops=stops, begun=tiny_chatml().encode_with_control(begun))
    deltas = [delta for token in ids if (delta := output.feed([token])) is not None] + [output.finish()]
    assert [token for delta in deltas for token in delta.token_ids] == ids
    return output, deltas


def fields(deltas: list[Delta]) -> Fields:
    calls: list[tuple[str, str]] = []
    for call in (call for delta in deltas for call in delta.calls):
        if call.function is not None:
            calls.append((call.function, call.arguments))
        else:
            calls[-1] = (calls[-1][0], calls[-1][1] + call.arguments)
    return "".join(d.reasoning for d in deltas), "".join(d.content for d in deltas), calls


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("Hello.<|im_end|>", ("", "Hello.", [])),
        ("Hello.\n\nYou.\n<|im_end|>", ("", "Hello.\n\nYou.\n", [])),
        ("<think>\nA\n\n\nB\n</think>\n\nYes, 日本.<|im_end|>", ("A\n\n\nB", "Yes, 日本.", [])),
        ("<think>\n\n</think>\n\nYes<|endoftext|>", ("", "Yes", [])),
        ("<think></think>Yes<|im_end|>", ("", "Yes", [])),
        (f"{THINK}<tool_call>\n{F}\n</tool_call><|im_end|>", ("hm", "", [("f", '{"a": 1}')])),
        (
            f"{THINK}I look.\n<tool_call>\n{F}\n</tool_call>\n<tool_call>\n{G}\n</tool_call>\n<|im_end|>",
            ("hm", "I look.", [("f", '{"a": 1}'), ("g.h-1", "{}")]),
        ),
        # Text after calls, and a header that the prompt did not have.
        (f"<tool_call>\n{F}\n</tool_call>\n\nDone.<|im_end|>", ("", "Done.", [("f", '{"a": 1}')])),
        ("<|im_start|>assistant\nHello.<|im_end|>", ("", "Hello.", [])),
        (f"<|im_start|>assistant\n{THINK}Hello.<|im_end|>", ("hm", "Hello.", [])),
        # Spelling of arguments is the model's own.
        (
            '<tool_call>{ "name" :"f","arguments":{"s": "}\\"{[\\\\", "n": -2.50e3, "u": "\\u00e9日"} }</tool_call>',
            ("", "", [("f", '{"s": "}\\"{[\\\\", "n": -2.50e3, "u": "\\u00e9日"}')]),
        ),
        # Calls that are known when they are whole.
        (
            '<tool_call>{"arguments": {"n": 1.50}, "id": [1, {}], "name": "f"}</tool_call>',
            ("", "", [("f", '{"n": 1.50}')]),
        ),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', ("", "", [("f", '{"a": 1}')])),
        ('<tool_call>{"name": "f"}</tool_call>', ("", "", [("f", "{}")])),
        ('<tool_call>{"name": "f", "arguments": null}</tool_call>', ("", "", [("f", "{}")])),
        ('<tool_call>{"name": "f", "arguments": {}, "id": "x"}</tool_call>', ("", "", [("f", "{}")])),
    ],
)
def test_what_the_format_says(text: str, wanted: Fields) -> None:
    output, deltas = parse(text)
    assert fields(deltas) == wanted
    assert list(output.flaws) == []
    assert output.num_calls == len(wanted[2])
    assert all(json.loads(arguments) is not None for _, arguments in wanted[2])


@pytest.mark.parametrize(
    ("begun", "text", "wanted"),
    [
        # Models that always think: the prompt begins the thoughts.
        ("<think>\n", "hm\n</think>\n\nYes.<|im_end|>", ("hm", "Yes.", [])),
        ("<think>\n", f"hm\n</think>\n\n<tool_call>\n{F}\n</tool_call><|im_end|>", ("hm", "", [("f", '{"a": 1}')])),
        ("<think>\n\n</think>\n\n", "Yes.<|im_end|>", ("", "Yes.", [])),
        ("<think>\nhm", ", so\n</think>\n\nYes.<|im_end|>", (", so", "Yes.", [])),
        (f"{THINK}It is", " 4.<|im_end|>", ("", " 4.", [])),
    ],
)
def test_an_output_goes_on_where_the_prompt_ended(begun: str, text: str, wanted: Fields) -> None:
    output, deltas = parse(text, begun=begun)
    assert fields(deltas) == wanted
    assert list(output.flaws) == []


BAD, CUT = Flaw.BAD_ARGUMENTS, Flaw.CUT
NOBODY, UNCLOSED = Flaw.CALL_WITHOUT_RECIPIENT, Flaw.HEADER_IN_TEXT


@pytest.mark.parametrize(
    ("text", "wanted", "flaws"),
    [
        # Nothing but thoughts, and thoughts that nothing closes.
        (f"{THINK}<|im_end|>", ("hm", "", []), [Flaw.NO_CONTENT]),
        ("<think>\nhm<|im_end|>", ("hm", "", []), [UNCLOSED, Flaw.NO_CONTENT]),
        (f"<think>\nhm\n<tool_call>{F}</tool_call><|im_end|>", ("hm", "", [("f", '{"a": 1}')]), [UNCLOSED]),
        (f"<think>a<tool_call>{F}</tool_call>b</think>c", ("a\nb", "c", [("f", '{"a": 1}')]), [UNCLOSED]),
        ("<think>a <tool_call> is b</think>c", ("a  is b", "c", []), [UNCLOSED, NOBODY]),
        # Calls of no one, of a stranger, without arguments that can be read.
        ("<tool_call>\nf(1)\n</tool_call>", ("", "f(1)", []), [NOBODY]),
        ('So:\n<tool_call>\n{"arguments": {}}\n</tool_call>\n.', ("", 'So:\n{"arguments": {}}\n.', []), [NOBODY]),
        ('<tool_call>["f"]</tool_call>', ("", '["f"]', []), [NOBODY]),
        ("<tool_call></tool_call>", ("", "", []), [NOBODY, Flaw.NO_CONTENT]),
        (f"<tool_call>\n{G}\n</tool_call>", ("", G, []), [Flaw.UNKNOWN_TOOL]),
        ('<tool_call>{"name": "g"}</tool_call>', ("", '{"name": "g"}', []), [Flaw.UNKNOWN_TOOL]),
        ('<tool_call>{"name": "f", "arguments": {a: 1}}</tool_call>', ("", "", [("f", "{a: 1}")]), [BAD]),
        ('<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>', ("", "", [("f", '{"a": NaN}')]), [BAD]),
        ('<tool_call>{"name": "f", "arguments": "a: 1"}</tool_call>', ("", "", [("f", "a: 1")]), [BAD]),
        ('<tool_call>{"name": "f", "arguments": {"a": 1</tool_call>', ("", "", [("f", '{"a": 1')]), [BAD]),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>', ("", "", [("f", '{"a": 1}')]), [BAD]),
        (f"<tool_call>{F}}}\nmore</tool_call>", ("", "}\nmore", [("f", '{"a": 1}')]), [BAD]),
        # Calls that nothing closed.
        (f"<tool_call>{F}<|im_end|>", ("", "", [("f", '{"a": 1}')]), [UNCLOSED]),
        (f"<tool_call>{F}<think>hm</think>x", ("hm", "x", [("f", '{"a": 1}')]), [UNCLOSED]),
        (f"<tool_call>x<tool_call>{F}</tool_call>", ("", "x", [("f", '{"a": 1}')]), [UNCLOSED, NOBODY]),
        # Control tokens where they mean nothing.
        ("a</think>b</tool_call>c<tool_response>d<|vision_start|>e", ("", "abcde", []), [Flaw.STRAY_TOKEN]),
        ("<think>a<think>b</think>c", ("ab", "c", []), [Flaw.STRAY_TOKEN]),
        # Headers that are none of the model's.
        ("A<|im_end|>\n<|im_start|>user\nB<|im_end|>", ("", "A\nB", []), [Flaw.WRONG_ROLE]),
        ("A<|im_start|>assistant\nB", ("", "A\nB", []), [UNCLOSED]),
        ("<|im_start|>assistant<think>hm</think>A", ("hm", "A", []), []),
        (f"<|im_start|>{'word ' * 9}", ("", "word " * 9, []), [Flaw.TEXT_IN_HEADER]),
        # Cut.
        ("", ("", "", []), [Flaw.NO_CONTENT]),
        ("\n\n\n", ("", "\n\n\n", []), [Flaw.NO_CONTENT]),
        ("<|im_start|>assis", ("", "", []), [CUT, Flaw.WRONG_ROLE, Flaw.NO_CONTENT]),
        ("<think>\nhm\n", ("hm\n", "", []), [CUT, Flaw.NO_CONTENT]),
        ('<tool_call>\n{"name": "f", "arg', ("", '{"name": "f", "arg', []), [CUT]),
        ('<tool_call>\n{"name": "f", "arguments": {"a": "x', ("", "", [("f", '{"a": "x')]), [CUT]),
        (f"<tool_call>\n{F}", ("", "", [("f", '{"a": 1}')]), [CUT]),
    ],
)  # fmt: skip
def test_malformed_outputs_lose_no_text(text: str, wanted: Fields, flaws: list[Flaw]) -> None:
    output, deltas = parse(text, tools=("f",))
    assert fields(deltas) == wanted
    assert list(output.flaws) == flaws


def test_arguments_come_while_they_are_written() -> None:
    text = '<tool_call>\n{"name": "f", "arguments": {"code": "one two three four"}}\n</tool_call>'
    _, deltas = parse(text, tools=("f",))
    pieces = [call.arguments for delta in deltas for call in delta.calls]
    assert len(pieces) > 6
    assert "".join(pieces) == '{"code": "one two three four"}'


def test_an_answer_without_tools_is_not_held_back() -> None:
    """Its line breaks come at once; with tools they wait for what follows, since a call may."""
    ids = tiny_chatml().encode("One.\nTwo.\n")
    for tools, whole in (((), True), (("f",), False)):
        output = ChatOutput(ChatmlParser(TOKENS, tools))
        shown = "".join(delta.content for token in ids if (delta := output.feed([token])))
        assert (shown == "One.\nTwo.\n") is whole
        assert shown + output.finish().content == "One.\nTwo.\n"


def test_stop_strings_are_looked_for_in_the_content() -> None:
    output, deltas = parse("<think>\nthe END\n</think>\n\nYes END no<|im_end|>", stops=("END",))
    assert fields(deltas) == ("the END", "Yes ", [])
    assert output.stopped == "END"
    output, deltas = parse("Yes\n\nno<|im_end|>", stops=("\n\n",), tools=("f",))
    assert (fields(deltas)[1], output.stopped) == ("Yes", "\n\n")


CONTROL = [*names.NAMES, names.END_OF_TEXT, "<|vision_start|>"]
WORDS = [F, '{"name": "f", ', '"arguments": ', '{"a": ', "1}", "assistant\n", "x", " ", "\n", "日", '"', "\\", "]", "}"]
outputs = st.lists(st.sampled_from([*CONTROL, *WORDS]), max_size=24).map("".join)


def events_of(text: str, tools: tuple[str, ...] | None) -> list[Event]:
    parser = ChatmlParser(TOKENS, tools)
    ids = tiny_chatml().encode_with_control(text)
    return [event for token in ids for event in parser.feed(token)] + parser.finish()


@settings(max_examples=300)
@given(outputs)
def test_any_tokens_are_parsed(text: str) -> None:
    """No output raises, ids are all given out once, messages begin and end in turn, and what is missing is said."""
    output, deltas = parse(text, tools=("f",))
    _, content, calls = fields(deltas)
    assert (Flaw.NO_CONTENT in output.flaws) == (not content.strip() and not calls)
    open_kind: Kind | None = None
    for event in events_of(text, ("f",)):
        if isinstance(event, Begin):
            assert open_kind is None
            open_kind = event.kind
        elif not isinstance(event, Flawed):
            assert event.kind is open_kind
            open_kind = open_kind if isinstance(event, Text) else None
    assert open_kind is None


@settings(max_examples=300)
@given(outputs)
def test_no_text_is_lost(text: str) -> None:
    """Without tools all of it is shown, in order: headers apart, and up to two line breaks on each side of a mark."""
    text = text.replace("<|im_start|>", "")
    shown = "".join(event.text for event in events_of(text, ()) if isinstance(event, Text))
    plain = tiny_chatml().decode(tiny_chatml().encode_with_control(text))
    assert shown.replace("\n", "") == plain.replace("\n", "")
    marks = sum(map(tiny_chatml().is_control, tiny_chatml().encode_with_control(text)))
    assert plain.count("\n") - 4 * marks <= shown.count("\n") <= plain.count("\n")


@settings(max_examples=300)
@given(outputs, st.integers(1, 5), st.sampled_from([None, (), ("f",)]))
def test_the_fast_path_and_groups_change_nothing(text: str, size: int, tools: tuple[str, ...] | None) -> None:
    ids = tiny_chatml().encode_with_control(text)
    singly, grouped, fast = (ChatOutput(ChatmlParser(TOKENS, tools)) for _ in range(3))
    truth = [delta for token in ids if (delta := singly.feed([token]))] + [singly.finish()]
    groups = [ids[at : at + size] for at in range(0, len(ids), size)]
    joined = [delta for group in groups if (delta := grouped.feed(group))] + [grouped.finish()]
    assert fields(joined) == fields(truth)
    deltas: list[Delta] = []
    for token in ids:
        plain = fast.feed_plain(token)
        if plain is not None:
            kind, shown = plain
            is_thought = kind is Kind.REASONING
            deltas.append(Delta((token,), shown if is_thought else "", "" if is_thought else shown))
        elif delta := fast.feed([token]):
            deltas.append(delta)
    assert [*deltas, fast.finish()] == truth
    assert singly.flaws == grouped.flaws == fast.flaws


def test_text_goes_the_fast_path() -> None:
    parser = ChatmlParser(TOKENS, ())
    ids = tiny_chatml().encode_with_control("<think>\none two three\n</think>\n\nfour five six.\nseven<|im_end|>")
    slow = [token for token in ids if parser.feed_plain(token) is None and parser.feed(token) is not None]
    # Marks and the line breaks beside them, the first token of each message, and two tokens after held line breaks.
    assert len(slow) <= 10
    assert len(slow) < len(ids) / 2


# ---- calls alone -----------------------------------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text('a"\\{}[]:,\n日', max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text('a"\\}: ', max_size=4), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=300)
@given(st.dictionaries(st.text('a"{', max_size=3), JSON, max_size=3), st.booleans(), st.data())
def test_a_call_in_any_pieces(arguments: dict[str, object], in_order: bool, data: st.DataObject) -> None:
    spelt = json.dumps(arguments, ensure_ascii=data.draw(st.booleans()), indent=data.draw(st.sampled_from([None, 1])))
    call = {"name": "f", "arguments": 0} if in_order else {"x": [1, "}"], "arguments": 0, "name": "f"}
    text = json.dumps(call).replace('"arguments": 0', f'"arguments": {spelt}')
    if not json_safe(spelt):
        return
    assert whole_call(text) == ("f", spelt)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    reader = CallReader(("f",))
    found = "".join(
        reader.feed(text[begin:end]) for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True) if begin < end
    )
    if in_order:
        assert (reader.function, found, reader.is_whole, reader.ends_well) == ("f", spelt, True, True)
    else:
        assert (reader.function, found, reader.rest) == (None, "", text)


def json_safe(text: str) -> bool:
    """Python writes infinities, which JSON has not."""
    return "Infinity" not in text


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '"f"', "{}", '{"name": 3}', '{"name": ""}', '{"name": "f"} {}', "[" * 9999]
)
def test_what_is_no_call(text: str) -> None:
    with pytest.raises(BadCall):
        whole_call(text)


def test_numbers_keep_their_digits() -> None:
    digits = "1" * 5000
    assert whole_call(f'{{"arguments": {{"n": {digits}}}, "name": "f"}}') == ("f", f'{{"n": {digits}}}')


def test_a_text_that_is_no_call_costs_little() -> None:
    """It is looked at once for each token only while a call could still begin."""
    reader = CallReader(None)
    for _ in range(200_000):
        assert reader.feed(" ") == ""
    assert reader.function is None
    assert reader.rest == " " * 200_000
    assert reader.feed(F) == ""
    assert MAX_HEAD_CHARS < 200_000

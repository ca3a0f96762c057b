"""The parsers of all chat formats: what the format says, malformed outputs, and properties that hold for any tokens."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from microscale.text.conversation import Tool
from microscale.text.events import Begin, End, Flaw, Flawed, Text, TextKind
from microscale.text.output import ChatOutput, Delta, PlainOutput
from support.chat_formats import MAKE, made, parse, run, total, xml

S, A, H = "<|start|>assistant", "<|channel|>analysis<|message|>think<|end|>", "<|channel|>final<|message|>"
TO = "<|channel|>commentary to=functions.f"
Q = '<|"|>'
F = '{"name": "f", "arguments": {"a": 1}}'
G = '{"name": "g.h-1", "arguments": {}}'
THINK = "<think>\nhm\n</think>\n\n"
ONE = [("f", '{"a": 1}')]
TOOL = Tool(
    "f", parameters={"type": "object", "properties": {"s": {"type": "string"}, "n": {"type": ["integer", "null"]}}}
)

# format → (output, reasoning, content, calls), as the format says.
WELL_FORMED: dict[str, list[tuple[str, str, str, list[tuple[str, str]]]]] = {
    "harmony": [
        (f"{A}{S}{H}hello<|return|>", "think", "hello", []),
        (f"{A}{S}<|channel|>commentary<|message|>I look.<|end|>{S}{H}hi<|return|>", "think", "I look.\nhi", []),
        (f"{H}hello<|endoftext|>", "", "hello", []),
        # Models write this when JSON is requested. The library takes the type for a recipient, and so for a call.
        ("<|channel|>final json<|message|>{}<|return|>", "", "{}", []),
        ("<|channel|>final <|constrain|>json<|message|>{}<|return|>", "", "{}", []),
        (f'{TO} <|constrain|>json<|message|>{{"a": 1}}<|call|>', "", "", ONE),
        (f'{TO}<|constrain|>json<|message|>{{"a": 1}}<|call|>', "", "", ONE),
        (f'{TO} json<|message|>{{"a": 1}}<|call|>', "", "", ONE),
        (f'{TO}<|message|>{{"a": 1}}<|call|>', "", "", ONE),
        (f'{TO} json<|constrain|>json<|message|>{{"a": 1}}<|call|>', "", "", ONE),
        ('<|channel|>analysis to=functions.f<|message|>{"a": 1}<|call|>', "", "", ONE),
        (' to=functions.f<|channel|>commentary<|message|>{"a": 1}<|call|>', "", "", ONE),
        (' to=functions.f <|constrain|>json<|channel|>commentary<|message|>{"a": 1}<|call|>', "", "", ONE),
        ('<|channel|>commentary to=f<|message|>{"a": 1}<|end|>', "", "", ONE),
        (f"{A}{S}{TO}<|message|>1<|call|>{S}{TO}<|message|>2<|call|>", "think", "", [("f", "1"), ("f", "2")]),
        (f"{TO}<|message|>{'9' * 5000}<|call|>", "", "", [("f", "9" * 5000)]),
    ],
    "gemma": [
        ("Hello.<turn|>", "", "Hello.", []),
        ("<|channel>thought\nA\n\nB\n<channel|>Yes, 日本.<turn|>", "A\n\nB", "Yes, 日本.", []),
        ("<|channel>thought\n<channel|>Yes<eos>", "", "Yes", []),
        (f'<|channel>thought\nhm\n<channel|><|tool_call>call:f{{a:{Q}x{{y}}, "z"\n{Q},b:[1,-2.50e3],'
         "c:{d:true,e:null}}<tool_call|><|tool_response>", "hm", "",
         [("f", '{"a": "x{y}, \\"z\\"\\n", "b": [1, -2.50e3], "c": {"d": true, "e": null}}')]),
        (f"Wait.<|tool_call>call:f{{}}<tool_call|><|tool_call>call:g.h-1{{k: {Q}{Q}}}<tool_call|><turn|>", "", "Wait.",
         [("f", "{}"), ("g.h-1", '{"k": ""}')]),
    ],
    "chatml": [
        ("Hello.<|im_end|>", "", "Hello.", []),
        ("Hello.\n\nYou.\n<|im_end|>", "", "Hello.\n\nYou.\n", []),
        ("<think>\nA\n\n\nB\n</think>\n\nYes, 日本.<|im_end|>", "A\n\n\nB", "Yes, 日本.", []),
        ("<think>\n\n</think>\n\nYes<|endoftext|>", "", "Yes", []),
        ("<think></think>Yes<|im_end|>", "", "Yes", []),
        (f"{THINK}<tool_call>\n{F}\n</tool_call><|im_end|>", "hm", "", ONE),
        (f"{THINK}I look.\n<tool_call>\n{F}\n</tool_call>\n<tool_call>\n{G}\n</tool_call>\n<|im_end|>", "hm", "I look.",
         [*ONE, ("g.h-1", "{}")]),
        # Text after calls, and a header that was not in the prompt.
        (f"<tool_call>\n{F}\n</tool_call>\n\nDone.<|im_end|>", "", "Done.", ONE),
        ("<|im_start|>assistant\nHello.<|im_end|>", "", "Hello.", []),
        (f"<|im_start|>assistant\n{THINK}Hello.<|im_end|>", "hm", "Hello.", []),
        # Arguments keep the model's own spelling.
        ('<tool_call>{ "name" :"f","arguments":{"s": "}\\"{[\\\\", "n": -2.50e3, "u": "\\u00e9日"} }</tool_call>', "",
         "",
         [("f", '{"s": "}\\"{[\\\\", "n": -2.50e3, "u": "\\u00e9日"}')]),
        # Calls that are recognised only when they are complete.
        ('<tool_call>{"arguments": {"n": 1.50}, "id": [1, {}], "name": "f"}</tool_call>', "", "",
         [("f", '{"n": 1.50}')]),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", "", ONE),
        ('<tool_call>{"name": "f"}</tool_call>', "", "", [("f", "{}")]),
        ('<tool_call>{"name": "f", "arguments": null}</tool_call>', "", "", [("f", "{}")]),
        ('<tool_call>{"name": "f", "arguments": {}, "id": "x"}</tool_call>', "", "", [("f", "{}")]),
    ],
}  # fmt: skip


WELL_FORMED["chatml_xml"] = [
    ("Hello.\n\nYou.\n<|im_end|>", "", "Hello.\n\nYou.\n", []),
    (f"{THINK}{xml('f', ('a', '1'))}<|im_end|>", "hm", "", ONE),
    (f"{THINK}I look.\n\n{xml('f', ('a', '1'))}\n{xml('g.h-1')}\n<|im_end|>", "hm", "I look.", [*ONE, ("g.h-1", "{}")]),
    # Values are literal, and JSON only if they can be nothing else.
    (xml("f", ("s", 'a "b"\n\\ </function> <tool>\n'), ("日", "")), "", "",
     [("f", '{"s": "a \\"b\\"\\n\\\\ </function> <tool>\\n", "日": ""}')]),
    (xml("f", ("n", "-2.50e3"), ("v", "[1, {}]"), ("o", " null "), ("t", '"x"'), ("x", "1 2"), ("w", "True")), "", "",
     [("f", '{"n": -2.50e3, "v": [1, {}], "o": null, "t": "\\"x\\"", "x": "1 2", "w": "True"}')]),
    # On one line, without a line break in an empty value, and with other spaces.
    ("<tool_call><function=f><parameter=a>1</parameter><parameter=b>\n</parameter></function></tool_call>", "", "",
     [("f", '{"a": 1, "b": ""}')]),
    ("<tool_call>\n\n <function=f>  <parameter=a>\n1\n</parameter>\n\n\n</function>\n </tool_call>", "", "", ONE),
    # Marks in a text are words.
    (xml("f", ("s", "a <think> b</think> <tool_response>")), "", "",
     [("f", '{"s": "a <think> b</think> <tool_response>"}')]),
    # The other style.
    (f"<tool_call>\n{F}\n</tool_call>", "", "", ONE),
]  # fmt: skip


@pytest.mark.parametrize(("name", "case"), [(name, case) for name in MAKE for case in WELL_FORMED[name]])
def test_what_the_format_says(name: str, case: tuple[str, str, str, list[tuple[str, str]]]) -> None:
    text, *wanted = case
    assert parse(name, text) == (*wanted, [])
    assert all(json.loads(arguments, parse_int=str) is not None for _, arguments in case[3])


@pytest.mark.parametrize(
    ("begun", "text", "wanted"),
    [
        # Models that always think: the prompt begins the reasoning.
        ("<think>\n", "hm\n</think>\n\nYes.<|im_end|>", ("hm", "Yes.", [])),
        ("<think>\n", f"hm\n</think>\n\n<tool_call>\n{F}\n</tool_call><|im_end|>", ("hm", "", ONE)),
        ("<think>\n\n</think>\n\n", "Yes.<|im_end|>", ("", "Yes.", [])),
        ("<think>\nhm", ", so\n</think>\n\nYes.<|im_end|>", (", so", "Yes.", [])),
        (f"{THINK}It is", " 4.<|im_end|>", ("", " 4.", [])),
    ],
)
def test_an_output_continues_where_the_prompt_ended(begun: str, text: str, wanted: tuple[object, ...]) -> None:
    assert parse("chatml", text, begun=begun) == (*wanted, [])


LONG = "It must be the one after 3, hence"
NO_HEADER, NO_CHANNEL, MISSING, IN_HEADER = Flaw.NO_HEADER, Flaw.NO_CHANNEL, Flaw.MISSING_START, Flaw.TEXT_IN_HEADER
UNCLOSED, REPEATED, STRAY, EMPTY, CUT = (
    Flaw.HEADER_IN_TEXT, Flaw.REPEATED_HEADER, Flaw.STRAY_TOKEN, Flaw.NO_CONTENT, Flaw.CUT,
)  # fmt: skip
NOBODY, UNKNOWN, BAD, RECIPIENT = (
    Flaw.CALL_WITHOUT_RECIPIENT,
    Flaw.UNKNOWN_TOOL,
    Flaw.BAD_ARGUMENTS,
    Flaw.WRONG_RECIPIENT,
)
C = '<|message|>{"a": 1}<|call|>'

# format → (output, reasoning, content, calls, flaws); the only tool is f.
MALFORMED: dict[str, list[tuple[str, str, str, list[tuple[str, str]], set[Flaw]]]] = {
    "harmony": [
        # No header, or only part of it.
        ("hello there<|return|>", "", "hello there", [], {NO_HEADER, NO_CHANNEL}),
        ("user stories<|return|>", "", "user stories", [], {NO_HEADER, NO_CHANNEL}),
        ("<|message|>hello<|return|>", "", "hello", [], {NO_CHANNEL}),
        (f"{A}{S}<|message|>hello<|return|>", "think", "hello", [], {NO_CHANNEL}),
        (f"{A}hello<|return|>", "think", "hello", [], {MISSING, NO_HEADER, NO_CHANNEL}),
        (f"{A}assistant{H}hello<|return|>", "think", "hello", [], {MISSING}),
        (f"{A}{H}hello<|return|>", "think", "hello", [], {MISSING}),
        (f"{A}{S}hello there<|return|>", "think", "hello there", [], {IN_HEADER, NO_CHANNEL}),
        # The message token is missing.
        ("<|channel|>final hello there<|return|>", "", "hello there", [], {IN_HEADER}),
        ("<|channel|>finalHello<|return|>", "", "Hello", [], {IN_HEADER}),
        (f"<|channel|>analysisWe think<|end|>{S}{H}hello<|return|>", "We think", "hello", [], {IN_HEADER}),
        ("<|channel|>hello there<|return|>", "", "hello there", [], {IN_HEADER, NO_CHANNEL}),
        ("<|channel|>hello<|return|>", "", "hello", [], {IN_HEADER, NO_CHANNEL}),
        # Wrong words in the header.
        ("<|channel|>thoughts<|message|>hello<|return|>", "", "hello", [], {Flaw.WRONG_CHANNEL}),
        ("<|channel|>comment<|message|>hello<|return|>", "", "hello", [], {Flaw.WRONG_CHANNEL}),
        (f"{A}<|start|>user{H}hello<|end|>", "think", "hello", [], {Flaw.WRONG_ROLE}),
        ("<|channel|>final to=user<|message|>hello<|return|>", "", "hello", [], {RECIPIENT}),
        ("<|channel|>final no header<|message|> it is<|return|>", "", "no header it is", [], {IN_HEADER, STRAY}),
        # Headers in the wrong place.
        (f"<|channel|>analysis<|message|>think{S}{H}hello<|return|>", "think", "hello", [], {UNCLOSED}),
        (f"<|channel|>analysis<|message|>think{H}hello<|return|>", "think", "hello", [], {UNCLOSED}),
        (f"{S}{H}hello<|return|>", "", "hello", [], {REPEATED}),
        (f"{A}{S}{S}{S}{H}hello<|return|>", "think", "hello", [], {REPEATED}),
        (f"<|channel|>analysis{H}hello<|return|>", "", "hello", [], {REPEATED}),
        (f"<|channel|>analysis{S}{H}hello<|return|>", "", "hello", [], {REPEATED}),
        # Control tokens in places where they have no meaning.
        (f"{H}hel<|message|>lo<|return|>", "", "hello", [], {STRAY}),
        (f"{H}hel<|constrain|>lo<|return|>", "", "hello", [], {STRAY}),
        (f"{H}hel<|startoftext|>lo<|return|>", "", "hello", [], {STRAY}),
        (f"<|end|>{S}{H}hello<|return|>", "", "hello", [], {Flaw.NO_MESSAGE}),
        (f"{A}<|end|>{S}{H}hello<|return|>", "think", "hello", [], {STRAY}),
        (f"<|channel|>final<|end|>{S}{H}hello<|return|>", "", "hello", [], {Flaw.NO_MESSAGE}),
        (f"{H}hello<|call|>", "", "hello", [], {NOBODY}),
        # Nothing for the user.
        (A, "think", "", [], {EMPTY}),
        (f"{A}<|return|>", "think", "", [], {STRAY, EMPTY}),
        (f"{H}<|return|>", "", "", [], {EMPTY}),
        ("<|return|>", "", "", [], {Flaw.NO_MESSAGE, EMPTY}),
        ("", "", "", [], {CUT, EMPTY}),
        # Calls.
        (f"{S} to=functions.f<|channel|>commentary <|constrain|>json{C}", "", "", ONE, {REPEATED}),
        (f"<|channel|>commentary <|constrain|>json to=functions.f{C}", "", "", ONE, {RECIPIENT}),
        (f"<|channel|>commentaryto=functions.f{C}", "", "", ONE, {RECIPIENT}),
        (f"<|channel|>commentary functions.f json{C}", "", "", ONE, {RECIPIENT}),
        (f"{TO} to=functions.g{C}", "", "", ONE, {RECIPIENT}),
        (f"<|channel|>to=functions.f{C}", "", "", ONE, {NO_CHANNEL}),
        (f" to=functions.f{C}", "", "", ONE, {NO_CHANNEL}),
        (f"<|channel|>final to=functions.f{C}", "", "", ONE, {Flaw.WRONG_CHANNEL}),
        (f"<|channel|>tool to=functions.f{C}", "", "", ONE, {Flaw.WRONG_CHANNEL}),
        (f'{TO} <|constrain|>json{{"a": 1}}<|call|>', "", "", ONE, {IN_HEADER}),
        (f'{TO} {{"a": 1}}<|call|>', "", "", ONE, {IN_HEADER}),
        (f'{TO}<|message|>{{"a": 1}}', "", "", ONE, {CUT}),
        *((f"{TO} <|constrain|>json<|message|>{bad}<|call|>", "", "", [("f", bad)], {BAD})
          for bad in ("", "Paris", '{"a": NaN}', '{"a": 1', "[" * 5000)),
        ("<|channel|>commentary to=functions.g<|message|>{}<|call|>", "", "{}", [], {UNKNOWN, NOBODY}),
        ("<|channel|>analysis to=python code<|message|>print(1)<|call|>", "print(1)", "", [], {UNKNOWN, NOBODY, EMPTY}),
        # A header that is cut shows only what is not a header.
        *((header, "", "", [], {CUT, EMPTY}) for header in (
            "<|channel|>", "<|channel|>comm", "<|channel|>commentary to", f"{TO}_and", f"{TO} <|constrain|>js",
            " to=functions.f")),
        ("<|end|><|start|>assis", "", "", [], {CUT, EMPTY, Flaw.NO_MESSAGE}),
        ("<|channel|>Hel", "", "Hel", [], {CUT, IN_HEADER, NO_CHANNEL}),
        *((text, "", text, [], {CUT, NO_HEADER, NO_CHANNEL}) for text in ("Hel", "assistant", "t")),
    ],
    "gemma": [
        ("<|channel>thought\nhm\n<channel|><turn|>", "hm", "", [], {EMPTY}),
        ("<|channel>thought\nhm<turn|>", "hm", "", [], {UNCLOSED, EMPTY}),
        ("<|channel>thought\nhm<|tool_call>call:f{}<tool_call|>", "hm", "", [("f", "{}")], {UNCLOSED}),
        # Unknown channels keep their text.
        ("<|channel>final\nYes<channel|>", "", "Yes", [], {Flaw.WRONG_CHANNEL, STRAY}),
        (f"<|channel>{LONG}<channel|>4", LONG, "4", [], {NO_CHANNEL}),
        # Calls without a name, of an unknown tool, with unreadable arguments.
        ("<|tool_call>f{a:1}<tool_call|>", "", "f{a:1}", [], {NOBODY}),
        (f"<|tool_call>call:g{{a:{Q}1{Q}}}<tool_call|>", "", 'call:g{a:"1"}', [], {UNKNOWN}),
        (f"<|tool_call>call:f{{a:{Q}1}}<tool_call|>", "", "", [("f", '{a:"1}')], {BAD}),
        ("<|tool_call>call:f{a:1<turn|>", "", "", [("f", "{a:1")], {UNCLOSED, BAD}),
        (f"Yes{Q}, <|turn>no<|image|><tool_call|>", "", "Yes, no", [], {STRAY}),
        ("", "", "", [], {EMPTY}),
        ("<|channel>thou", "", "", [], {CUT, Flaw.WRONG_CHANNEL, EMPTY}),
        ("<|channel>thought\nhm\n", "hm", "", [], {CUT, EMPTY}),
        (f"<|tool_call>call:f{{a:{Q}x", "", "", [("f", '{a:"x')], {CUT}),
    ],
    "chatml": [
        (f"{THINK}<|im_end|>", "hm", "", [], {EMPTY}),
        ("<think>\nhm<|im_end|>", "hm", "", [], {UNCLOSED, EMPTY}),
        (f"<think>\nhm\n<tool_call>{F}</tool_call><|im_end|>", "hm", "", ONE, {UNCLOSED}),
        (f"<think>a<tool_call>{F}</tool_call>b</think>c", "a\nb", "c", ONE, {UNCLOSED}),
        ("<think>a <tool_call> is b</think>c", "a  is b", "c", [], {UNCLOSED, NOBODY}),
        # Calls without a name, of an unknown tool, with unreadable arguments.
        ("<tool_call>\nf(1)\n</tool_call>", "", "f(1)", [], {NOBODY}),
        ('So:\n<tool_call>\n{"arguments": {}}\n</tool_call>\n.', "", 'So:\n{"arguments": {}}\n.', [], {NOBODY}),
        ('<tool_call>["f"]</tool_call>', "", '["f"]', [], {NOBODY}),
        ("<tool_call></tool_call>", "", "", [], {NOBODY, EMPTY}),
        (f"<tool_call>\n{G}\n</tool_call>", "", G, [], {UNKNOWN}),
        ('<tool_call>{"name": "g"}</tool_call>', "", '{"name": "g"}', [], {UNKNOWN}),
        ('<tool_call>{"name": "f", "arguments": {a: 1}}</tool_call>', "", "", [("f", "{a: 1}")], {BAD}),
        ('<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>', "", "", [("f", '{"a": NaN}')], {BAD}),
        ('<tool_call>{"name": "f", "arguments": "a: 1"}</tool_call>', "", "", [("f", "a: 1")], {BAD}),
        ('<tool_call>{"name": "f", "arguments": {"a": 1</tool_call>', "", "", [("f", '{"a": 1')], {BAD}),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>', "", "", ONE, {BAD}),
        (f"<tool_call>{F}}}\nmore</tool_call>", "", "}\nmore", ONE, {BAD}),
        # Calls that are not closed.
        (f"<tool_call>{F}<|im_end|>", "", "", ONE, {UNCLOSED}),
        (f"<tool_call>{F}<think>hm</think>x", "hm", "x", ONE, {UNCLOSED}),
        (f"<tool_call>x<tool_call>{F}</tool_call>", "", "x", ONE, {UNCLOSED, NOBODY}),
        # Control tokens in places where they have no meaning, and headers of others.
        ("a</think>b</tool_call>c<tool_response>d<|vision_start|>e", "", "abcde", [], {STRAY}),
        ("<think>a<think>b</think>c", "ab", "c", [], {STRAY}),
        ("A<|im_end|>\n<|im_start|>user\nB<|im_end|>", "", "A\nB", [], {Flaw.WRONG_ROLE}),
        ("A<|im_start|>assistant\nB", "", "A\nB", [], {UNCLOSED}),
        ("<|im_start|>assistant<think>hm</think>A", "hm", "A", [], set()),
        (f"<|im_start|>{'word ' * 9}", "", "word " * 9, [], {IN_HEADER}),
        ("", "", "", [], {EMPTY}),
        ("\n\n\n", "", "\n\n\n", [], {EMPTY}),
        ("<|im_start|>assis", "", "", [], {CUT, Flaw.WRONG_ROLE, EMPTY}),
        ("<think>\nhm\n", "hm\n", "", [], {CUT, EMPTY}),
        ('<tool_call>\n{"name": "f", "arg', "", '{"name": "f", "arg', [], {CUT}),
        ('<tool_call>\n{"name": "f", "arguments": {"a": "x', "", "", [("f", '{"a": "x')], {CUT}),
        (f"<tool_call>\n{F}", "", "", ONE, {CUT}),
    ],
}  # fmt: skip


S1 = [("f", '{"s": "1"}')]
MALFORMED["chatml_xml"] = [
    # In reasoning, as quantised models write it.
    (f"<think>\nhm\n{xml('f', ('s', '1'))}\n<|im_end|>", "hm", "", S1, {UNCLOSED}),
    (f"<think>a{xml('f', ('s', '1'))}b</think>c", "a\nb", "c", S1, {UNCLOSED}),
    (f"<think>a{xml('g', ('s', '1'))}b</think>c", "a<function=g>\n<parameter=s>\n1\n</parameter>\n</function>b", "c",
     [], {UNKNOWN}),
    # The schema decides about types; what does not fit remains text, and so does an unknown parameter.
    (xml("f", ("n", "1"), ("n", "null"), ("n", "{}"), ("n", " one\n")), "", "",
     [("f", '{"n": 1, "n": null, "n": {}, "n": " one\\n"}')], set()),
    (xml("f", ("n", "None"), ("x", "1"), ("x", "[")), "", "", [("f", '{"n": null, "x": 1, "x": "["}')], set()),
    # Calls without a name, of an unknown tool, and with other text in them.
    ("<tool_call>\nf(1)\n</tool_call>", "", "f(1)", [], {NOBODY}),
    ("<tool_call></tool_call>", "", "", [], {NOBODY, EMPTY}),
    ("<tool_call>\n<function=g>\n</function>\n</tool_call>", "", "<function=g>\n</function>", [], {UNKNOWN}),
    (f"<tool_call>{G}</tool_call>", "", G, [], {UNKNOWN}),
    ("<tool_call><function=f>so: <b><parameter=s>\n1\n</parameter></function>more</tool_call>", "", "so: <b>more", S1,
     {BAD}),
    # Tags that are missing.
    ("<tool_call><function=f><parameter=s>\n1\n</parameter>\n</tool_call>", "", "", S1, {BAD}),
    ("<tool_call><function=f><parameter=s>\n1\n</tool_call>", "", "", S1, {BAD}),
    ("<tool_call><function=f><parameter=n>\n1\n</tool_call>", "", "", [("f", '{"n": 1}')], {BAD}),
    ("<tool_call><function=f><para</tool_call>", "", "<para", [("f", "{}")], {BAD}),
    (f"{xml('f', ('s', '1')).removesuffix('</tool_call>')}<|im_end|>", "", "", S1, {UNCLOSED}),
    # An output that is cut.
    ("<tool_call>\n<function=f", "", "<function=f", [], {CUT}),
    ("<tool_call>\n<function=f>\n", "", "", [("f", "")], {CUT}),
    ("<tool_call>\n<function=f>\n<parameter=s>\n1\n</par", "", "", [("f", '{"s": "1\\n</par')], {CUT}),
    ("<tool_call>\n<function=f>\n<parameter=n>\n12", "", "", [("f", '{"n": 12')], {CUT}),
    ("", "", "", [], {EMPTY}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "case"), [(name, case) for name in MAKE for case in MALFORMED[name]])
def test_malformed_outputs_lose_no_text(
    name: str, case: tuple[str, str, str, list[tuple[str, str]], set[Flaw]]
) -> None:
    text, *wanted, flaws = case
    parsed = parse(name, text, tools=(TOOL,))
    assert list(parsed[:3]) == wanted
    assert set(parsed.flaws) == flaws


# ---- any tokens ------------------------------------------------------------------------------------------------------

WORDS = {
    "harmony": ["assistant", "user", " to=functions.f", " to=", "analysis", "final", "commentary", "json", "functions.",
                "finalHello", "x" * 200, " " * 40, "{}"],
    "gemma": ["thought\n", "call:f{", "a:1}", '"', ",", "[", "]", "}"],
    "chatml_xml": ["<function=f>", "<function=g>", "<parameter=s>", "<parameter=n>\n", "\n</parameter>", "</function>",
                   "<", F],
    "chatml": [F, '{"name": "f", ', '"arguments": ', '{"a": ', "1}", "assistant\n", '"', "\\", "]", "}"],
}  # fmt: skip
COMMON = ["x", " ", "\n", "é", "日", "👩‍👧", "END"]
outputs = st.sampled_from(sorted(MAKE)).flatmap(
    lambda name: st.tuples(
        st.just(name),
        st.lists(
            st.sampled_from([*made(name).tokenizer.control, *WORDS[name], *COMMON]).map(
                made(name).tokenizer.encode_with_control
            )
            | st.integers(-1, 520).map(lambda token: [token]),
            max_size=24,
        ).map(lambda parts: [token for part in parts for token in part]),
    )
)
offered = st.sampled_from([None, (TOOL,), ()])


@settings(max_examples=600)
@given(outputs, offered)
def test_events_are_in_order(output: tuple[str, list[int]], tools: tuple[Tool, ...] | None) -> None:
    """Nothing raises. Begin, texts of its kind, End; calls are numbered; a missing answer is reported."""
    name, ids = output
    parser = made(name).parser(tools)
    events = [event for token in ids for event in parser.feed(token)] + parser.finish()
    kind: TextKind | None = None
    num_calls, is_shown = 0, False
    for event in events:
        if isinstance(event, Begin):
            assert kind is None
            kind = event.kind
            assert (event.function is not None) == (kind is TextKind.CALL)
            assert event.call_idx == (num_calls if kind is TextKind.CALL else None)
            num_calls += kind is TextKind.CALL
        elif isinstance(event, Text | End):
            assert event.kind is kind
            kind = kind if isinstance(event, Text) else None
            is_shown |= isinstance(event, Text) and event.kind is TextKind.CONTENT and not event.text.isspace()
    assert kind is None
    assert parser.flaws == list(dict.fromkeys(event.flaw for event in events if isinstance(event, Flawed)))
    assert (Flaw.NO_CONTENT in parser.flaws) == (not is_shown and not num_calls)


@settings(max_examples=600)
@given(outputs, offered, st.integers(1, 5), st.sampled_from([(), ("END",), ("x\n", "é")]), st.booleans())
def test_groups_and_the_fast_path_change_nothing(
    output: tuple[str, list[int]], tools: tuple[Tool, ...] | None, size: int, stops: tuple[str, ...], plain: bool
) -> None:
    name, ids = output

    def new() -> ChatOutput | PlainOutput:
        if plain:
            return PlainOutput(made(name).tokenizer, stops=stops)
        return ChatOutput(made(name).parser(tools), stops=stops)

    singly, grouped, fast = new(), new(), new()
    truth = run(singly, [[token] for token in ids])
    assert [token for delta in truth for token in delta.token_ids] == ids
    assert all(delta.shows and delta.token_ids for delta in truth[:-1])
    assert total(run(grouped, [ids[at : at + size] for at in range(0, len(ids), size)])) == total(truth)
    assert run_plain(fast, ids)[0] == truth
    assert singly.stopped == grouped.stopped == fast.stopped
    flaws = [list(each.flaws) for each in (singly, grouped, fast) if isinstance(each, ChatOutput)]
    assert all(found == flaws[0] for found in flaws)


def run_plain(output: ChatOutput | PlainOutput, ids: list[int]) -> tuple[list[Delta], int]:
    """Each token by the fast path if possible, and how many took it."""
    deltas: list[Delta] = []
    num_plain = 0
    for token in ids:
        plain = output.feed_plain(token)
        if plain is None:
            deltas += [delta] if (delta := output.feed([token])) else []
        else:
            num_plain += 1
            kind, text = plain
            is_thought = kind is TextKind.REASONING
            deltas.append(Delta((token,), reasoning=text) if is_thought else Delta((token,), content=text))
    return [*deltas, output.finish()], num_plain


@pytest.mark.parametrize(
    ("name", "text", "most_slow"),
    [
        ("harmony", f"<|channel|>analysis<|message|>one two é<|end|>{S}{H}three four<|return|>", 18),
        ("chatml", "<think>\none two three\n</think>\n\nfour five six.\nseven<|im_end|>", 10),
    ],
)
def test_text_takes_the_fast_path(name: str, text: str, most_slow: int) -> None:
    """All but control tokens, headers, line breaks, the first token of a message, and half characters."""
    ids = made(name).tokenizer.encode_with_control(text)
    _, num_plain = run_plain(ChatOutput(made(name).parser(())), ids)
    assert num_plain >= 6
    assert len(ids) - num_plain <= most_slow
    assert run_plain(ChatOutput(made(name).parser(()), stops=["x"]), ids)[1] == 0


@settings(max_examples=300)
@given(st.lists(st.sampled_from([*WORDS["chatml"], *COMMON, "<think>", "</think>", "<tool_call>", "<|im_end|>"])))
def test_chatml_without_tools_shows_all_text(parts: list[str]) -> None:
    """In order, except up to two line breaks on each side of a mark."""
    tokenizer = made("chatml").tokenizer
    ids = tokenizer.encode_with_control("".join(parts))
    parser = made("chatml").parser(())
    events = [event for token in ids for event in parser.feed(token)] + parser.finish()
    shown = "".join(event.text for event in events if isinstance(event, Text))
    plain = tokenizer.decode(ids)
    assert shown.replace("\n", "") == plain.replace("\n", "")
    num_marks = sum(map(tokenizer.is_control, ids))
    assert plain.count("\n") - 4 * num_marks <= shown.count("\n") <= plain.count("\n")


def test_chatml_holds_back_little() -> None:
    """Arguments arrive while they are written. Line breaks wait for what follows only if a call may follow."""
    text = '<tool_call>\n{"name": "f", "arguments": {"code": "one two three four"}}\n</tool_call>'
    chatml = made("chatml")
    ids = chatml.tokenizer.encode_with_control(text)
    deltas = run(ChatOutput(chatml.parser((TOOL,))), [[token] for token in ids])
    assert sum(bool(call.arguments) for delta in deltas for call in delta.calls) > 6
    ids = chatml.tokenizer.encode("One.\nTwo.\n")
    for tools, whole in (((), True), ((TOOL,), False)):
        output = ChatOutput(chatml.parser(tools))
        shown = "".join(delta.content for token in ids if (delta := output.feed([token])))
        assert (shown == "One.\nTwo.\n") is whole
        assert shown + output.finish().content == "One.\nTwo.\n"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("harmony", f"<|channel|>analysis<|message|>the END<|end|>{S}{H}Yes END no<|return|>"),
        ("gemma", "<|channel>thought\nthe END\n<channel|>Yes END no<turn|>"),
        ("chatml", "<think>\nthe END\n</think>\n\nYes END no<|im_end|>"),
    ],
)
def test_stop_strings_apply_to_the_content(name: str, text: str) -> None:
    assert parse(name, text, stops=("END",)) == ("the END", "Yes ", [], [])

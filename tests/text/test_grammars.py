"""Turns under a grammar, in every chat format: forms constrain answers and arguments, reasoning stays free."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace

import openai_harmony as lib
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from microscale.engine.grammar import Grammars, Vocabulary
from microscale.text.conversation import Effort, Message, RenderOptions, Role, Tool, ToolCall
from microscale.text.grammar import ANY_OBJECT, Form, Lark, Schema, Turn, alone, choice, regex
from microscale.text.output import ChatOutput
from support.chat_formats import MAKE, chatml, follows, made, run, schema_of, total, xml
from support.tiny_chatml_text import ALWAYS_THINKS, TEMPLATE, tiny_chatml
from support.tiny_tokenizers import library, tiny

ANSWER = Schema({"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]})
STRICT = Schema({**ANSWER.schema, "additionalProperties": False})
BOTH = {"f": STRICT, "g": ANY_OBJECT}
FREE, MUST, ONE = Turn(None, BOTH), Turn(None, BOTH, must_call=True), Turn(None, BOTH, one_call=True)
NAMED = Turn(None, {"g": ANY_OBJECT}, must_call=True)

CALL = '<tool_call>\n{"name": "f", "arguments": {"n": 3}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "g", "arguments": {"x": ["}\\n", null, {}]}}\n</tool_call>'
THINK, END = '<think>\nhm: }{ "\n</think>\n\n', "<|im_end|>"
GEMMA_CALL = '<|tool_call>call:f{a:<|"|>x}, "<|"|>,b:[1,-2.5,{c:null}]}<tool_call|>'
HM, RESPONSE = "<|channel>thought\nhm<channel|>", "<|tool_response>"

TURNS: dict[str, list[tuple[Turn, str, bool]]] = {
    "gemma": [
        (Turn(ANSWER), '<|channel>thought\nhm: }{ "\n<channel|>{"n": 3}<turn|>', True),
        (Turn(ANSWER), '{"n": 3}<turn|>', True),
        (Turn(ANSWER), '{"n": "3"}<turn|>', False),
        (Turn(ANSWER), "3<turn|>", False),
        (Turn(ANSWER, BOTH), f"{GEMMA_CALL}{RESPONSE}", True),
        (MUST, f"{HM}{GEMMA_CALL}{GEMMA_CALL}{RESPONSE}", True),
        (MUST, "No.<turn|>", False),
        (ONE, f"{HM}{GEMMA_CALL}{RESPONSE}", True),
        (ONE, f"{GEMMA_CALL}{GEMMA_CALL}{RESPONSE}", False),
        (replace(MUST, one_call=True), f"{GEMMA_CALL}{GEMMA_CALL}{RESPONSE}", False),
        (ONE, "No.<turn|>", True),
        (NAMED, f"<|tool_call>call:f{{}}<tool_call|>{RESPONSE}", False),
        (FREE, "Any text.<turn|>", True),
        (FREE, f"<|tool_call>call:f{{a:1<tool_call|>{RESPONSE}", False),
    ],
    "chatml": [
        (Turn(ANSWER), f'{THINK}{{"n": 3}}{END}', True),
        (Turn(ANSWER), f'<think>\n\n</think>\n\n{{"n": 3}}{END}', True),
        (Turn(ANSWER), f'{{"n": 3}}{END}', True),
        (Turn(ANSWER), f'{{"n": "3"}}{END}', False),
        (Turn(ANSWER), f"{THINK}So: 3{END}", False),
        (Turn(ANSWER), f'So.</think>{{"n": 3}}{END}', False),
        (Turn(ANSWER), f'{THINK}{THINK}{{"n": 3}}{END}', False),
        # With tools: an answer of its form, or calls, and no text before them.
        (Turn(ANSWER, BOTH), f"{THINK}{CALL}{END}", True),
        (Turn(ANSWER, BOTH), f'{{"n": 3}}{END}', True),
        (Turn(ANSWER, BOTH), f"I look.\n{CALL}{END}", False),
        # Optional calls.
        (FREE, f"Any text.{END}", True),
        (FREE, f"{THINK}Any text, even a {{ or two.\n\n{CALL}\n{OTHER}{END}", True),
        (FREE, f"{CALL}{END}", True),
        (FREE, f"{CALL}More.{END}", False),
        (FREE, END, False),
        # Arguments are constrained, and so is the call around them.
        (FREE, CALL.replace("3", '"3"') + END, False),
        (FREE, CALL.replace('"n": 3', '"n": 3, "m": 4') + END, False),
        (FREE, CALL.replace("3}}", "3}") + END, False),
        (FREE, CALL.replace('"f"', '"h"') + END, False),
        (FREE, OTHER.replace('"g"', '"f"') + END, False),
        # Required calls, of any function or of one.
        (MUST, f"{THINK}{CALL}\n{OTHER}\n{CALL}{END}", True),
        (MUST, f"{OTHER}{END}", True),
        (MUST, f"No.{END}", False),
        (MUST, f"I look.\n{CALL}{END}", False),
        (MUST, f"{THINK}{END}", False),
        (NAMED, f"{THINK}{OTHER}{END}", True),
        (NAMED, f"{CALL}{END}", False),
        # At most one call.
        (ONE, f"{THINK}{CALL}{END}", True),
        (ONE, f"I look.\n{OTHER}{END}", True),
        (ONE, f"{CALL}\n{OTHER}{END}", False),
        (ONE, f"No.{END}", True),
        (replace(MUST, one_call=True), f"{CALL}\n{CALL}{END}", False),
        (replace(MUST, one_call=True), f"{CALL}{END}", True),
        # Function names are literal text.
        (Turn(None, {"a.b": ANY_OBJECT}), CALL.replace('"f"', '"a.b"') + END, True),
        (Turn(None, {"a.b": ANY_OBJECT}), CALL.replace('"f"', '"axb"') + END, False),
    ],
}  # fmt: skip

WEATHER = Schema({
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "unit": {"enum": ["C", "F", 0]},
        "where": {"anyOf": [{"$ref": "#/$defs/Place"}, {"type": "null"}]},
        "code": {"type": "string", "pattern": "^[a-z]+/$", "maxLength": 4},
        "note": {"type": ["string", "null"]},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
    "$defs": {"Place": {
        "type": "object", "properties": {"zone": {"type": "string"}}, "required": ["zone"],
        "additionalProperties": False,
    }},
})  # fmt: skip
XML = {"f": WEATHER, "g": ANY_OBJECT}
FREE_XML, MUST_XML = Turn(None, XML), Turn(None, XML, must_call=True)
CITY_XML, UNIT_XML = ("city", "Paris\n\n</parameter\n<x>"), ("unit", "C")
CALL_XML = xml("f", CITY_XML, UNIT_XML)
OTHER_XML = xml("g", ("x", "{"), ("y", ""))
TURNS["chatml_xml"] = [
    (FREE_XML, f"{THINK}Any text.\n\n{CALL_XML}\n{OTHER_XML}{END}", True),
    (FREE_XML, f"Any text, <function=.{END}", True),
    (FREE_XML, f"{CALL_XML}More.{END}", False),
    (FREE_XML, f"{xml('h')}{END}", False),
    (FREE_XML, f"{xml('g')}{END}", True),
    (FREE_XML, f"{CALL}{END}", False),
    (MUST_XML, f"{THINK}{CALL_XML}{END}", True),
    (MUST_XML, f"No.{END}", False),
    (Turn(None, {"g": ANY_OBJECT}, must_call=True), f"{CALL_XML}{END}", False),
    (Turn(None, XML, one_call=True), f"{CALL_XML}{END}", True),
    (Turn(None, XML, one_call=True), f"{CALL_XML}\n{CALL_XML}{END}", False),
    (Turn(ANSWER, XML), f'{THINK}{{"n": 3}}{END}', True),
    (Turn(ANSWER, XML), f"{THINK}{CALL_XML}{END}", True),
    (Turn(ANSWER, XML), f"I look.\n{CALL_XML}{END}", False),
    # Required parameters come, in the schema's order, and no others.
    (MUST_XML, f"{xml('f', CITY_XML)}{END}", False),
    (MUST_XML, f"{xml('f', UNIT_XML, CITY_XML)}{END}", False),
    (MUST_XML, f"{xml('f', CITY_XML, ('days', '3'), UNIT_XML)}{END}", True),
    (MUST_XML, f"{xml('f', CITY_XML, UNIT_XML, ('x', '3'))}{END}", False),
    (MUST_XML, f"{xml('f', CITY_XML, CITY_XML, UNIT_XML)}{END}", False),
    (MUST_XML, f"{xml('f', ('city', ''), UNIT_XML)}{END}", True),
    (MUST_XML, f"{xml('f', ('city', ''), UNIT_XML)}{END}".replace("\n\n", "\n"), True),
    (MUST_XML, f"{xml('f', ('city', '</parameter> Rome'), UNIT_XML)}{END}", False),
    # Values.
    (MUST_XML, f"{xml('f', CITY_XML, ('days', 'three'), UNIT_XML)}{END}", False),
    (MUST_XML, f"{xml('f', CITY_XML, ('days', ''), UNIT_XML)}{END}", False),
    (MUST_XML, f"{xml('f', CITY_XML, ('unit', '0'))}{END}", True),
    (MUST_XML, f"{xml('f', CITY_XML, ('unit', 'K'))}{END}", False),
    *((MUST_XML, f"{xml('f', CITY_XML, UNIT_XML, (name, value))}{END}", allowed) for name, value, allowed in (
        ("where", '{"zone": "a\\n"}', True), ("where", "null", True), ("where", '{"zone": 1}', False),
        ("where", "Rome", False), ("code", "abc/", True), ("code", "abcd/", False), ("code", "ab", False),
        ("note", "null or more", True))),
    # Of other parameters, any that is not listed.
    (Turn(None, {"f": ANSWER}), f"{xml('f', ('n', '3'), ('x', 'a'), ('y', 'b'))}{END}", True),
    (Turn(None, {"f": ANSWER}), f"{xml('f', ('n', '3'), ('n', 'a'))}{END}", False),
    (Turn(None, {"f": ANSWER}), f"{xml('f', ('x', 'a'))}{END}", False),
    (Turn(None, {"f": Schema({"additionalProperties": {"type": "null"}})}), f"{xml('f', ('x', 'null'))}{END}", True),
    (Turn(None, {"f": Schema({"additionalProperties": {"type": "null"}})}), f"{xml('f', ('x', 'a'))}{END}", False),
    (Turn(None, {"f": Schema({"type": "object", "required": ["x"]})}), f"{xml('f', ('x', 'a'))}{END}", True),
    (Turn(None, {"f": Schema({"type": "object", "required": ["x"]})}), f"{xml('f')}{END}", False),
]  # fmt: skip


@pytest.mark.parametrize(("name", "turn", "text", "allowed"), [(name, *case) for name in TURNS for case in TURNS[name]])
def test_turns(name: str, turn: Turn, text: str, allowed: bool) -> None:
    assert follows(made(name), made(name).turn_grammar(turn), text) is allowed


@pytest.mark.parametrize(
    ("template", "effort", "text", "allowed"),
    [
        # Inside reasoning that the prompt has begun, everything is free until it ends; then the form applies.
        (ALWAYS_THINKS, Effort.HIGH, f'hm: }}{{ "\n</think>\n\n{{"n": 3}}{END}', True),
        (ALWAYS_THINKS, Effort.LOW, f'hm</think>{{"n": 3}}{END}', True),
        (ALWAYS_THINKS, Effort.HIGH, f"hm\n</think>\n\nSo: 3{END}", False),
        (ALWAYS_THINKS, Effort.HIGH, f'{{"n": 3}}{END}', False),
        (ALWAYS_THINKS, Effort.HIGH, f'<think>hm</think>{{"n": 3}}{END}', False),
        (ALWAYS_THINKS, Effort.HIGH, f"hm\n</think>\n\n{CALL}{END}", True),
        # After empty reasoning there is no other.
        (TEMPLATE, Effort.LOW, f'{{"n": 3}}{END}', True),
        (TEMPLATE, Effort.LOW, f'{THINK}{{"n": 3}}{END}', False),
        (TEMPLATE, Effort.HIGH, f'{THINK}{{"n": 3}}{END}', True),
    ],
)
def test_the_grammar_begins_where_the_prompt_ended(template: str, effort: Effort, text: str, allowed: bool) -> None:
    chat_format = chatml(template)
    prompt = chat_format.rendered([Message(Role.USER, "n?")], RenderOptions(effort=effort))
    assert follows(chat_format, chat_format.turn_grammar(Turn(ANSWER, BOTH, begun=prompt.begun)), text) is allowed


def test_tokens_may_span_a_form_and_what_is_around_it() -> None:
    """Models write the end of the arguments and of the call in one token. Marks that are spelled out are text."""
    chat_format = made("chatml")
    for name, arguments in (("f", '{"n": 3}'), ("g", '{"x": "}\\n</tool_call><|im_end|>"}')):
        ids = chat_format.turn(Message(Role.ASSISTANT, tool_calls=(ToolCall("1", name, arguments),)))
        assert b"}}\n" in map(tiny_chatml().token_bytes, ids)
        assert follows(chat_format, chat_format.turn_grammar(FREE), ids)


# ---- XML -------------------------------------------------------------------------------------------------------------

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.sampled_from([0.5, -2e300]) | st.text('aé"{</>\n ', max_size=6),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text('aé"', max_size=2), inner, max_size=2),
    max_leaves=5,
)


@settings(max_examples=20)
@given(st.dictionaries(st.text('ab:{ "', max_size=4), values, max_size=3))
def test_the_grammar_allows_any_xml_call_of_its_schema(arguments: dict[str, object]) -> None:
    chat_format, form = made("chatml_xml"), Schema(schema_of(arguments))
    ids = chat_format.turn(
        Message(Role.ASSISTANT, tool_calls=(ToolCall("1", "f", json.dumps(arguments, ensure_ascii=False)),))
    )
    assert chat_format.why_not_strict(form) is None
    grammar = chat_format.turn_grammar(Turn(calls={"f": form}, must_call=True))
    assert follows(chat_format, grammar, ids)
    if arguments:
        lacks = Schema({**form.schema, "properties": {}, "required": []})
        assert not follows(chat_format, chat_format.turn_grammar(Turn(calls={"f": lacks})), ids)


def test_references_into_the_whole_schema_in_xml() -> None:
    tree = {"type": "object", "properties": {"l": {"$ref": "#/properties/tree"}}, "additionalProperties": False}
    more = {"type": "array", "items": {"$ref": "#/$defs/n"}}
    form = Schema({"properties": {"tree": tree, "more": more}, "$defs": {"n": {"type": "integer"}}})
    chat_format = made("chatml_xml")
    grammar = chat_format.turn_grammar(Turn(calls={"f": form}))
    for value, items, allowed in (
        ('{"l": {"l": {}}}', "[1, 2]", True),
        ('{"l": {"m": {}}}', "[1]", False),
        ("{}", '["1"]', False),
    ):
        assert follows(chat_format, grammar, xml("f", ("tree", value), ("more", items)) + END) is allowed


@pytest.mark.parametrize(
    ("limits", "good", "bad"),
    [
        ({"minLength": 2, "maxLength": 3}, ["ab", "é日\n"], ["a", "abcd", "a\nb"]),
        ({"maxLength": 3}, ["", "ab", "é\n日"], ["abcd"]),
        ({"maxLength": 10_000}, ["", "ab" * 500], []),
        ({"minLength": 100, "maxLength": 500, "pattern": "b"}, ["ab" * 200], ["b", "a" * 200, "b" * 600]),
        ({"pattern": "b+"}, ["b", "abb a"], ["a", "a\nb"]),
        ({"pattern": "^a/b|c$"}, ["a/b", "c"], ["a/c", "ab"]),
        ({"pattern": r"^\$"}, ["$", "$a"], ["a$"]),
        (
            {"format": "date-time"},
            ["2026-11-19T04:50:00Z", "2026-01-02T03:04:05.5+01:00"],
            ["2026-13-19T04:50:00Z", "x"],
        ),
        ({"format": "uuid"}, ["123e4567-e89b-12d3-a456-426614174000"], ["123e4567"]),
    ],
)
def test_limits_of_texts_in_xml(limits: dict[str, object], good: list[str], bad: list[str]) -> None:
    chat_format = made("chatml_xml")
    form = Schema({"type": "object", "properties": {"s": {"type": "string", **limits}}})
    grammar = chat_format.turn_grammar(Turn(calls={"f": form}))
    for text in (*good, *bad):
        assert follows(chat_format, grammar, xml("f", ("s", text)) + END) is (text in good), text


BIG = {"big": {"enum": [f"{n:100}" for n in range(99)]}}


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"anyOf": [{"required": ["a"]}]}, "'anyOf'"),
        ({"properties": {"a>": {}}}, "'a>' cannot be written"),
        ({"properties": {"a": {"type": "string", "format": "email"}}}, "'email' of a text cannot be enforced"),
        ({"properties": {"a": {"type": "string", "minLength": "1", "pattern": 3}}}, "cannot be enforced"),
        ({"properties": {str(n): {"$ref": "#/$defs/big"} for n in range(200)}, "$defs": BIG}, "too large"),
    ],
)
def test_what_xml_cannot_enforce(schema: dict[str, object], reason: str) -> None:
    """It is passed over, and a strict function is refused."""
    chat_format, form = made("chatml_xml"), Schema({"type": "object", **schema}, strict=False)
    assert reason in (chat_format.why_not_strict(form) or "")
    grammar = chat_format.turn_grammar(Turn(calls={"f": form}))
    assert follows(chat_format, grammar, xml("f", ("b", "x")) + END)


@settings(max_examples=10)
@given(st.randoms(use_true_random=False))
def test_what_the_xml_grammar_allows_fits_the_schema(chance: random.Random) -> None:
    """A model that writes any allowed token, and now and then the end of a value."""
    chat_format = made("chatml_xml")
    tokenizer = chat_format.tokenizer
    words = tokenizer.vocabulary()
    vocabulary = Vocabulary(words, sorted(tokenizer.control.values()), tokenizer.split_pattern)
    turn = Turn(calls={"f": WEATHER}, must_call=True, one_call=True, begun=[tokenizer.control["</think>"]])
    matcher = Grammars(vocabulary, len(words)).matcher(chat_format.turn_grammar(turn))
    ids: list[int] = []
    wanted: list[int] = []
    while not matcher.ended:
        mask = matcher.inner.compute_bitmask()
        allowed = [token for token in range(len(words)) if mask[token // 8] >> token % 8 & 1]
        if not wanted and chance.random() < 0.2:
            wanted = tokenizer.encode(chance.choice(["\n</parameter>\n", "</parameter>", '"}\n']))
        token = wanted.pop(0) if wanted else chance.choice(allowed)
        if token not in allowed:
            token, wanted = chance.choice(allowed), []
        matcher.accept(token)
        ids.append(token)
        assert len(ids) < 2000
    output = ChatOutput(chat_format.parser((Tool("f", parameters=WEATHER.schema),)))
    parsed = total(run(output, [ids]), output.flaws)
    assert (parsed.content, parsed.flaws, [name for name, _ in parsed.calls]) == ("", [], ["f"])
    arguments = json.loads(parsed.calls[0][1])
    names = list(WEATHER.schema["properties"])
    assert list(arguments) == sorted(arguments, key=names.index)
    assert isinstance(arguments.pop("city"), str)
    assert arguments.pop("unit") in ("C", "F", 0)
    assert isinstance(arguments.get("days", 0), int)
    assert isinstance(arguments.get("note") or "", str)
    assert re.fullmatch("[a-z]+/", arguments.get("code", "a/"))
    assert [*(arguments.get("where") or {"zone": ""})] == ["zone"]


# ---- Harmony ---------------------------------------------------------------------------------------------------------

CITY = Schema({"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]})
VOCABULARY = Vocabulary(tiny().vocabulary(), sorted(tiny().control.values()), tiny().split_pattern)
GRAMMARS = Grammars(VOCABULARY, len(VOCABULARY.tokens))
THOUGHT = '<|channel|>analysis<|message|>Hm: naïve\n"日本"<|end|><|start|>assistant'
PREAMBLE = "<|channel|>commentary<|message|>I look it up.<|end|><|start|>assistant"
FINAL, GET = "<|channel|>final<|message|>", "<|channel|>commentary to=functions.get"
ANSWERS, CALLS = Turn(answer=CITY), Turn(calls={"get": CITY, "get_all": ANY_OBJECT})
FORCED, EITHER = Turn(calls={"get": CITY}, must_call=True), Turn(answer=CITY, calls={"get": CITY})


def accepted(grammar: str, text: str) -> str:
    """The part of ``text`` that the grammar allows; all of it only if the grammar is complete there."""
    matcher = GRAMMARS.matcher(grammar)
    ids = tiny().encode_with_control(text)
    count = matcher.inner.try_consume_tokens(ids)
    passed = tiny().decode(ids[:count], show_control=True)
    return passed if count < len(ids) or matcher.ended else passed + "…"


@pytest.mark.parametrize(
    ("turn", "text"),
    [
        (ANSWERS, f'{THOUGHT}{FINAL}{{"city": "Paris"}}<|return|>'),
        (ANSWERS, f'{THOUGHT}{THOUGHT}{FINAL}{{\n  "city":"Paris"\n}}<|return|>'),
        (ANSWERS, '<|channel|>final <|constrain|>json<|message|>{"city": ""}<|return|>'),
        (CALLS, f"{THOUGHT}{PREAMBLE}{FINAL}Anything at all.<|return|>"),
        (CALLS, f'{THOUGHT}{GET} <|constrain|>json<|message|>{{"city": "a"}}<|call|>'),
        (CALLS, f'{GET}<|message|>{{"city": "a", "more": [1, 2.5e3, null]}}<|call|>'),
        (CALLS, f"{PREAMBLE}{GET}_all json<|message|>{{}}<|call|>"),
        (FORCED, f'{THOUGHT}{PREAMBLE}{GET} <|constrain|>json<|message|>{{"city": "a"}}<|call|>'),
        (EITHER, f'{THOUGHT}{FINAL}{{"city": "a"}}<|return|>'),
        (EITHER, f'{THOUGHT}{GET} json<|message|>{{"city": "a"}}<|call|>'),
    ],
)
def test_good_harmony_turns_pass(turn: Turn, text: str) -> None:
    assert accepted(made("harmony").turn_grammar(turn), text) == text


@pytest.mark.parametrize(
    ("turn", "text", "passes"),
    [
        (ANSWERS, f"{THOUGHT}{FINAL}Paris", f"{THOUGHT}{FINAL}"),
        (ANSWERS, f'{FINAL}{{"city": "Paris"}} ', f'{FINAL}{{"city": "Paris"}}'),
        (ANSWERS, f'{FINAL}{{\n\n"city"', f"{FINAL}{{\n"),
        (ANSWERS, PREAMBLE, "<|channel|>"),
        (ANSWERS, "Paris", ""),
        (ANSWERS, f"{THOUGHT}<|return|>", THOUGHT),
        (CALLS, f"{FINAL}<|return|>", FINAL),
        (CALLS, f"{GET} <|constrain|>json<|message|>{{}}", f"{GET} <|constrain|>json<|message|>{{"),
        (CALLS, f"{GET}_none", f"{GET}_"),
        (FORCED, f"{THOUGHT}{FINAL}", f"{THOUGHT}<|channel|>"),
        (EITHER, PREAMBLE + FINAL, "<|channel|>commentary"),
    ],
)
def test_other_harmony_turns_end_where_they_go_wrong(turn: Turn, text: str, passes: str) -> None:
    passed = accepted(made("harmony").turn_grammar(turn), text)
    assert text.startswith(passed)
    assert passes.startswith(passed.removesuffix("…"))


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (regex(r"a/b\/c[/]\d+"), "a/b/c/12"),
        (regex("x\ny"), "x\ny"),
        (choice(["a", '日\n"']), '日\n"'),
        (Lark('start: "x" y\ny: /[0-9]+/'), "x12"),
    ],
)
def test_other_forms(form: Form, text: str) -> None:
    assert accepted(alone(form, ["<|return|>", "<|endoftext|>"]), f"{text}<|return|>") == f"{text}<|return|>"
    whole = f"{FINAL}{text}<|return|>"
    assert accepted(made("harmony").turn_grammar(Turn(form)), whole) == whole


def test_a_schema_cannot_set_its_own_options() -> None:
    form = Schema({"type": "object", "not": {}, "x-guidance": {"lenient": True}})
    assert form.grammar()["json_schema"]["x-guidance"]["lenient"] is False


def test_the_librarys_own_turns_pass() -> None:
    call = lib.Message.from_role_and_content(lib.Role.ASSISTANT, '{"city": "a"}').with_channel("commentary")
    call.with_recipient("functions.get").with_content_type("<|constrain|>json")
    text = (
        library().decode_utf8(library().render(call)).removeprefix("<|start|>assistant").replace("<|end|>", "<|call|>")
    )
    assert accepted(made("harmony").turn_grammar(CALLS), text) == text


# ---- every format ----------------------------------------------------------------------------------------------------

F = ToolCall("1", "f", '{"a": [1, -2.5, {"b": null}], "c": "x"}')
G = ToolCall("2", "g", "{}")


@pytest.mark.parametrize("name", MAKE)
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
def test_the_grammar_allows_what_the_format_writes(name: str, turn: Turn, message: Message, allowed: bool) -> None:
    assert follows(made(name), made(name).turn_grammar(turn), made(name).turn(message)) is allowed


@pytest.mark.parametrize("name", MAKE)
def test_forms_alone_end_as_the_format_does(name: str) -> None:
    chat_format = made(name)
    number, encode = Schema({"type": "integer"}), chat_format.tokenizer.encode
    assert follows(chat_format, chat_format.answer_grammar(number), [*encode("17"), chat_format.answer_end])
    assert not follows(chat_format, chat_format.answer_grammar(number), [*encode("x"), chat_format.answer_end])
    assert follows(chat_format, chat_format.arguments_grammar(ANY_OBJECT), [*encode("{}"), chat_format.call_end])
    text_grammar = chat_format.text_grammar(number)
    assert any(follows(chat_format, text_grammar, [*encode("17"), end]) for end in chat_format.stops)

"""The text of calls alone: Gemma's own spelling, and ChatML's JSON and XML read while the model writes it."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from microscale.text.chatml.call import MAX_HEAD_CHARS
from microscale.text.chatml.json_call import JsonCallReader, whole_call
from microscale.text.chatml.xml_call import XmlCallReader, call_text
from microscale.text.chatml.xml_schema import as_json, value_types
from microscale.text.conversation import ToolCall
from microscale.text.gemma.call import QUOTE, arguments_json, split_call
from microscale.text.json_text import BadCall
from support.chat_formats import schema_of


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
def test_gemma_arguments_that_are_nearly_right(text: str, wanted: dict[str, object]) -> None:
    found = arguments_json(text)
    assert json.loads(found) == wanted
    assert found.encode(), "it must be valid UTF-8"


@pytest.mark.parametrize(
    "text", ["{", "{a}", "{a:}", "{a:1}}", "{:1}", "{a:1 b:2", "[" * 100, f"{{a:{QUOTE}x}}", '{a:"x}']
)
def test_gemma_arguments_that_are_wrong(text: str) -> None:
    with pytest.raises(BadCall):
        arguments_json(text)
    with pytest.raises(BadCall):
        split_call("call:bad name{")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text('a"\\{}[]:,\n日', max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text('a"\\}: ', max_size=4), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


@settings(max_examples=300)
@given(st.dictionaries(st.text('a"{', max_size=3), JSON, max_size=3), st.booleans(), st.data())
def test_a_chatml_call_in_any_pieces(arguments: dict[str, object], in_order: bool, data: st.DataObject) -> None:
    spelt = json.dumps(arguments, ensure_ascii=data.draw(st.booleans()), indent=data.draw(st.sampled_from([None, 1])))
    call = {"name": "f", "arguments": 0} if in_order else {"x": [1, "}"], "arguments": 0, "name": "f"}
    text = json.dumps(call).replace('"arguments": 0', f'"arguments": {spelt}')
    assert whole_call(text) == ("f", spelt)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    reader = JsonCallReader({"f": None})
    found = "".join(
        reader.feed(text[begin:end]) for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True) if begin < end
    )
    if in_order:
        assert (reader.function, found, reader.is_whole, reader.ends_well) == ("f", spelt, True, True)
    else:
        assert (reader.function, found, reader.rest) == (None, "", text)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '"f"', "{}", '{"name": 3}', '{"name": ""}', '{"name": "f"} {}', "[" * 9999]
)
def test_what_is_not_a_chatml_call(text: str) -> None:
    with pytest.raises(BadCall):
        whole_call(text)


def test_numbers_keep_their_digits() -> None:
    digits = "1" * 5000
    assert whole_call(f'{{"arguments": {{"n": {digits}}}, "name": "f"}}') == ("f", f'{{"n": {digits}}}')


def test_text_that_is_not_a_call_costs_little() -> None:
    """It is searched for a head only while one could still come."""
    reader = JsonCallReader(None)
    for _ in range(20 * MAX_HEAD_CHARS):
        assert reader.feed(" ") == ""
    assert reader.feed('{"name": "f", "arguments": {}}') == ""
    assert reader.function is None


# ---- XML -------------------------------------------------------------------------------------------------------------

TAGS = [
    "<function=f>", "<parameter=a>", "<parameter=b>\n", "</parameter>", "\n</parameter>", "</function>", "<", ">", "\n",
    " ", "1", "null", "é", '"',
]  # fmt: skip
# What no XML tag can follow: the value itself ends there.
strings = st.lists(st.sampled_from(TAGS), max_size=6).map("".join)
literal = strings.filter(lambda text: "\n</parameter>" not in f"\n{text}")
SCHEMA = {"properties": {"a": {"type": "string"}, "b": {"type": "array"}}}


def pieces(text: str, cuts: list[int]) -> list[str]:
    places = sorted({0, *(cut % (len(text) + 1) for cut in cuts), len(text)})
    return [text[begin:end] for begin, end in itertools.pairwise(places)]


cuts = st.lists(st.integers(0, 10_000), max_size=8)


@settings(max_examples=200)
@given(st.dictionaries(st.text('a"{ ', max_size=3), JSON | literal, max_size=3), cuts)
def test_an_xml_call_in_any_pieces(arguments: dict[str, object], cuts: list[int]) -> None:
    text = call_text(ToolCall("1", "f", json.dumps(arguments)))
    reader = XmlCallReader({"f": schema_of(arguments)})
    found = "".join(map(reader.feed, pieces(text, cuts)))
    assert (reader.function, json.loads(found), reader.ends_well) == ("f", arguments, True)


@settings(max_examples=200)
@given(st.lists(st.sampled_from(TAGS)).map("".join), cuts, st.booleans())
def test_any_xml_in_any_pieces(text: str, cuts: list[int], complete: bool) -> None:
    def read(parts: list[str]) -> tuple[str | None, str, str]:
        reader = XmlCallReader({"f": SCHEMA})
        added = [*map(reader.feed, parts), reader.finish(complete=complete) if reader.function else ""]
        return reader.function, "".join(added), reader.rest

    text = f"<function=f>{text}"
    function, arguments, rest = read(pieces(text, cuts))
    assert (function, arguments, rest) == read([text])
    if complete:
        assert isinstance(json.loads(arguments), dict)


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "3", '"3"'),
        ({"type": "integer"}, " 3\n", "3"),
        ({"type": "integer"}, "three ", '"three "'),
        ({"type": "number"}, "1" * 5000, "1" * 5000),
        ({"type": "number"}, "NaN", '"NaN"'),
        ({"type": "boolean"}, "True", "true"),
        ({"type": "object"}, '{"a": [1]}', '{"a": [1]}'),
        ({"type": ["string", "null"]}, "null", "null"),
        ({"type": ["string", "null"]}, "3", '"3"'),
        ({"type": ["string", "number"]}, "3", "3"),
        ({"type": ["string", "integer"]}, "3.5", '"3.5"'),
        ({"anyOf": [{"$ref": "#/$defs/t"}, {"type": "boolean"}]}, "true", "true"),
        ({"anyOf": [{"$ref": "#/$defs/t"}, {"type": "boolean"}]}, "1", '"1"'),
        ({"allOf": [{"$ref": "#/$defs/t"}]}, "1", '"1"'),
        ({"enum": ["1", "2"]}, "1", '"1"'),
        ({"const": 1}, "1", "1"),
        ({"properties": {}}, "{}", "{}"),
        # The type is not known: JSON, unless it would be a text in quotes.
        ({}, "{}", "{}"),
        ({}, '"a"', '"\\"a\\""'),
        (True, "3", "3"),
        ({"$ref": "#/$defs/loop"}, "3", "3"),
        ({"$ref": "#/nowhere/at all"}, "x", '"x"'),
    ],
)
def test_the_schema_decides_what_a_text_is(schema: object, text: str, value: str) -> None:
    root = {"$defs": {"t": {"type": "string"}, "loop": {"$ref": "#/$defs/loop"}}}
    assert as_json(text, value_types(schema, root)) == value


def test_a_schema_that_refers_to_itself_ends() -> None:
    members = [{"$ref": "#/$defs/u"}, {"type": "string"}, {"$ref": "#/$defs/u"}]
    root: dict[str, object] = {"$defs": {"u": {"anyOf": members}}}
    assert value_types({"anyOf": members * 3}, root) == {"string"}
    odds: list[object] = [
        None,
        3,
        [],
        "x",
        {"anyOf": 3},
        {"type": [3, {}]},
        {"type": 3},
        {"enum": 3},
        {"enum": []},
        {"$ref": 3},
    ]
    for odd in odds:
        assert value_types(odd, root) == frozenset()


def test_a_schema_may_be_a_reference_and_text_between_tags_long() -> None:
    reader = XmlCallReader({"f": {"$ref": "#/$defs/p", "$defs": {"p": SCHEMA}}})
    found = reader.feed(f"<function=f>{'<' * 5000}<parameter=a>\n1\n</parameter></function>")
    assert (found, reader.rest, reader.ends_well) == ('{"a": "1"}', "<" * 5000, False)


def test_xml_that_is_not_a_call_costs_little() -> None:
    reader = XmlCallReader(None)
    for _ in range(20 * MAX_HEAD_CHARS):
        assert reader.feed(" ") == ""
    assert reader.feed("<function=f></function>") == ""
    assert reader.function is None
    assert len(reader.rest) == 20 * MAX_HEAD_CHARS + 23

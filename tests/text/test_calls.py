"""The text of calls alone: Gemma's own spelling, and ChatML's JSON read while the model writes it."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from microscale.text.chatml.call import MAX_HEAD_CHARS, CallReader, whole_call
from microscale.text.gemma.call import QUOTE, arguments_json, split_call
from microscale.text.json_text import BadCall


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
    reader = CallReader(("f",))
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
    reader = CallReader(None)
    for _ in range(20 * MAX_HEAD_CHARS):
        assert reader.feed(" ") == ""
    assert reader.feed('{"name": "f", "arguments": {}}') == ""
    assert reader.function is None

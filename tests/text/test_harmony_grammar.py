"""Which turns the grammar of a turn takes, as llguidance reads it."""

from __future__ import annotations

import openai_harmony as lib
import pytest

from microscale.engine.grammar import Grammars, Vocabulary
from microscale.text.grammar import ANY_OBJECT, Form, Lark, Schema, Turn, alone, choice, regex
from microscale.text.harmony.format import of_turn
from support.tiny_tokenizers import library, tiny

CITY = Schema({"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]})
VOCABULARY = Vocabulary(tiny().vocabulary(), sorted(tiny().control.values()), tiny().split_pattern)
GRAMMARS = Grammars(VOCABULARY, len(VOCABULARY.tokens))

THOUGHT = '<|channel|>analysis<|message|>Hm: naïve\n"日本"<|end|><|start|>assistant'
PREAMBLE = "<|channel|>commentary<|message|>I look it up.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
GET = "<|channel|>commentary to=functions.get"
ANSWERS = Turn(answer=CITY)
CALLS = Turn(calls={"get": CITY, "get_all": ANY_OBJECT})
FORCED = Turn(calls={"get": CITY}, must_call=True)
BOTH = Turn(answer=CITY, calls={"get": CITY})


def taken(grammar: str, text: str) -> str:
    """What of ``text`` the grammar lets pass; all of it, only if it ends there."""
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
        (BOTH, f'{THOUGHT}{FINAL}{{"city": "a"}}<|return|>'),
        (BOTH, f'{THOUGHT}{GET} json<|message|>{{"city": "a"}}<|call|>'),
    ],
)
def test_good_turns_pass(turn: Turn, text: str) -> None:
    assert taken(of_turn(turn), text) == text


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
        (BOTH, PREAMBLE + FINAL, "<|channel|>commentary"),
    ],
)
def test_other_turns_end_where_they_go_wrong(turn: Turn, text: str, passes: str) -> None:
    passed = taken(of_turn(turn), text)
    assert text.startswith(passed)
    assert len(passed) <= len(passes)
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
    assert taken(alone(form, ["<|return|>", "<|endoftext|>"]), f"{text}<|return|>") == f"{text}<|return|>"
    assert taken(of_turn(Turn(form)), f"{FINAL}{text}<|return|>") == f"{FINAL}{text}<|return|>"


def test_a_schema_brings_no_options_of_its_own() -> None:
    form = Schema({"type": "object", "not": {}, "x-guidance": {"lenient": True}})
    assert form.grammar()["json_schema"]["x-guidance"]["lenient"] is False


def test_the_librarys_own_turns_pass() -> None:
    call = lib.Message.from_role_and_content(lib.Role.ASSISTANT, '{"city": "a"}').with_channel("commentary")
    call.with_recipient("functions.get").with_content_type("<|constrain|>json")
    text = library().decode_utf8(library().render(call)).removeprefix("<|start|>assistant")
    assert taken(of_turn(CALLS), text.replace("<|end|>", "<|call|>")) == text.replace("<|end|>", "<|call|>")

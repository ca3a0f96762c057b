"""Harmony's parser: equal to the library's on well-formed output, and no text is lost on any other."""

from __future__ import annotations

import random

import openai_harmony as lib
from hypothesis import given, settings
from hypothesis import strategies as st

from microscale.text.conversation import Tool
from microscale.text.detokenize import Detokenizer
from microscale.text.events import Begin, End, Event, Flaw, Flawed, Text, TextKind
from microscale.text.harmony.parser import HarmonyParser
from microscale.text.harmony.tokens import HarmonyTokens
from support.tiny_tokenizers import library, o200k, tiny

TEXTS = [
    "",
    "Hello",
    " to=functions.f",
    "assistant",
    "Größe 日本語 👩‍👩‍👧 e\u0301",
    '{"city": "Paris"}',
    "a\n\n b  ",
    "json",
]
HEADERS = [
    "<|channel|>analysis",
    "<|channel|>final",
    "<|channel|>commentary",
    "<|channel|>commentary to=functions.get_weather <|constrain|>json",
    "<|channel|>commentary to=functions.get_weather<|constrain|>json",
    "<|channel|>commentary to=functions.mcp.list-files json",
    "<|channel|>analysis to=functions.f code",
    "<|channel|>commentary to=functions.f",
    " to=functions.f<|channel|>commentary",
    " to=functions.f<|channel|>commentary <|constrain|>json",
]
ENDS = ["<|end|>", "<|call|>", "<|return|>"]


def well_formed(draw: random.Random, num_ordinary: int) -> list[int]:
    """An output that the format allows: messages with text of any kind, or of any tokens at all."""
    ids: list[int] = []
    encode = o200k().encode_with_control
    for n in range(draw.randint(1, 4)):
        ids += encode(("<|start|>assistant" if n else "") + draw.choice(HEADERS) + "<|message|>")
        if draw.random() < 0.8:
            ids += o200k().encode("".join(draw.choices(TEXTS, k=draw.randint(0, 4))))
        else:
            ids += [draw.randrange(num_ordinary) for _ in range(draw.randint(1, 12))]
        ids += encode(draw.choice(ENDS))
    return ids


def plain_type(content_type: str | None) -> str | None:
    return content_type and content_type.removeprefix("<|constrain|>")


def test_equals_the_library_token_for_token() -> None:
    """The state after every token, the text of every message, and only flaws of what is inside a message."""
    tokens = HarmonyTokens.of(o200k())
    draw = random.Random(11)
    num_ordinary = min(o200k().control.values())
    for _ in range(200):
        ids = well_formed(draw, num_ordinary)
        ours, theirs = HarmonyParser(tokens), lib.StreamableParser(library(), lib.Role.ASSISTANT)
        events: list[Event] = []
        torn = False
        for token in ids:
            new = ours.feed(token)
            events += new
            theirs.process(token)
            header = ours.header
            found = (None, None, None) if header is None else (header.channel, header.recipient, header.content_type)
            assert found == (theirs.current_channel, theirs.current_recipient, plain_type(theirs.current_content_type))
            text = "".join(event.text for event in new if isinstance(event, Text))
            over = any(isinstance(event, End) for event in new)
            # Of several errors in one token the library reports the first now and the others with later tokens: after
            # an error, only the message's whole text is comparable.
            torn = torn or "\ufffd" in text + (theirs.last_content_delta or "")
            if not torn and not over:
                assert text == (theirs.last_content_delta or "")
            torn = torn and not over
        events += ours.finish()
        assert messages(events) == [
            (m.channel, m.recipient, plain_type(m.content_type), m.content[0].text) for m in theirs.messages
        ]
        assert set(ours.flaws) <= {Flaw.BAD_ARGUMENTS, Flaw.CALL_WITHOUT_RECIPIENT, Flaw.NO_CONTENT}


def messages(events: list[Event]) -> list[tuple[str | None, str | None, str | None, str]]:
    found: list[tuple[str | None, str | None, str | None, str]] = []
    for event in events:
        if isinstance(event, Begin):
            found.append((event.header.channel, event.header.recipient, event.header.content_type, ""))
        elif isinstance(event, Text):
            *head, text = found[-1]
            found[-1] = (*head, text + event.text)  # type: ignore[assignment]
    return found


# Control tokens, the words of headers, and any other token, an id outside the vocabulary among them.
WORDS = [
    "assistant",
    "user",
    " to=functions.f",
    " to=",
    "to",
    "analysis",
    "final",
    "commentary",
    "json",
    "code",
    " ",
    "\n",
]
pieces = st.one_of(
    st.sampled_from(sorted(tiny().control)).map(lambda name: [tiny().control[name]]),
    st.sampled_from([*WORDS, "functions.", "finalHello", "x" * 200, " " * 40, "{}", "é"]).map(tiny().encode),
    st.integers(-1, 520).map(lambda token: [token]),
)
outputs = st.lists(pieces, max_size=30).map(lambda parts: [token for part in parts for token in part])
offered = st.sampled_from([None, (Tool("f"),), ()])


def parse(ids: list[int], tools: tuple[Tool, ...] | None = None) -> tuple[list[Event], HarmonyParser]:
    parser = HarmonyParser(HarmonyTokens.of(tiny()), tools)
    events = [event for token in ids for event in parser.feed(token)]
    return events + parser.finish(), parser


@settings(max_examples=500)
@given(outputs, offered)
def test_any_tokens_lose_no_text_and_raise_nothing(ids: list[int], tools: tuple[Tool, ...] | None) -> None:
    events, parser = parse(ids, tools)
    kept = ""
    for event in events:
        if isinstance(event, Begin):
            kept += event.header.raw
        elif isinstance(event, Text | Flawed):
            kept += event.text
    assert kept == text_of(ids)
    assert parser.flaws == list(dict.fromkeys(event.flaw for event in events if isinstance(event, Flawed)))


def text_of(ids: list[int]) -> str:
    """All text, each stretch between control tokens decoded by itself."""
    detokenizer = Detokenizer(tiny())
    parts = [detokenizer.flush() if tiny().is_control(token) else detokenizer.feed(token) for token in ids]
    return "".join(parts) + detokenizer.flush()


@given(st.text(min_size=1))
def test_an_answer_without_a_header_is_content(text: str) -> None:
    events, _ = parse(tiny().encode(text))
    assert "".join(event.text for event in events if isinstance(event, Text) and event.kind is TextKind.CONTENT) == text


def test_a_header_hides_little() -> None:
    """However long the text in a header, all but its first words is shown immediately."""
    final = "<|channel|>final"
    for lead in ("", "<|start|>assistant", "<|channel|>", final, f"{final} to=functions.f <|constrain|>"):
        for filler in ("word ", "x", " ", "to=", " to=a", " to=", "json ", " functions.f"):
            parser = HarmonyParser(HarmonyTokens.of(tiny()))
            ids = tiny().encode_with_control(lead + filler * 300)
            events = [event for token in ids for event in parser.feed(token)]
            shown = sum(len(event.text) for event in events if isinstance(event, Text))
            assert shown >= len(filler) * 300 - 250, (lead, filler)

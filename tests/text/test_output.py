"""Deltas: every token id on exactly one of them, the same text however tokens come, stop strings in the content."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from microscale.text.events import Kind
from microscale.text.gemma.parser import GemmaParser
from microscale.text.gemma.tokens import GemmaTokens
from microscale.text.harmony.parser import HarmonyParser
from microscale.text.harmony.tokens import HarmonyTokens
from microscale.text.output import ChatOutput, Delta, PlainOutput
from support.tiny_gemma_text import tiny_gemma
from support.tiny_tokenizers import tiny

A = "<|channel|>analysis<|message|>"
F = "<|channel|>final<|message|>"
S = "<|start|>assistant"
C = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
pieces = st.sampled_from([A, F, S, C, "<|end|>", "<|call|>", "assistant", "ab", "a", "b", "é", "👩‍👩‍👧", "final"])
outputs = st.lists(pieces, max_size=20).map(lambda parts: tiny().encode_with_control("".join(parts)))
stop_lists = st.lists(st.text("ab\n", min_size=1, max_size=3), max_size=2)


def chat(stops: list[str]) -> ChatOutput:
    return ChatOutput(HarmonyParser(HarmonyTokens.of(tiny())), stops=stops)


def run(output: ChatOutput | PlainOutput, groups: list[list[int]]) -> list[Delta]:
    return [*(delta for group in groups if (delta := output.feed(group))), output.finish()]


def total(deltas: list[Delta]) -> tuple[str, str, list[str], str]:
    calls = [call for delta in deltas for call in delta.calls]
    functions = [call.function for call in calls if call.function is not None]
    arguments = "".join(f"{call.call_idx}{char}" for call in calls for char in call.arguments)
    return "".join(d.reasoning for d in deltas), "".join(d.content for d in deltas), functions, arguments


@settings(max_examples=300)
@given(outputs, stop_lists, st.integers(1, 5))
def test_one_token_at_a_time_equals_all_at_once(ids: list[int], stops: list[str], size: int) -> None:
    singly, in_groups, at_once = chat(stops), chat(stops), chat(stops)
    truth = total(run(singly, [[token] for token in ids]))
    assert truth == total(run(in_groups, [ids[at : at + size] for at in range(0, len(ids), size)]))
    assert truth == total(run(at_once, [ids]))
    assert singly.stopped == in_groups.stopped == at_once.stopped
    assert singly.flaws == in_groups.flaws == at_once.flaws


@settings(max_examples=200)
@given(outputs, stop_lists)
def test_every_token_id_is_on_one_delta(ids: list[int], stops: list[str]) -> None:
    for output in (chat(stops), PlainOutput(tiny(), stops=stops)):
        deltas = run(output, [[token] for token in ids])
        assert [token for delta in deltas for token in delta.token_ids] == ids
        assert all(delta.shows and delta.token_ids for delta in deltas[:-1])


def run_plain(output: ChatOutput | PlainOutput, ids: list[int]) -> tuple[list[Delta], int]:
    """Each token by the fast path, where it can take it; how many could."""
    deltas: list[Delta] = []
    num_plain = 0
    for token in ids:
        plain = output.feed_plain(token)
        if plain is None:
            deltas += [delta] if (delta := output.feed([token])) else []
        else:
            num_plain += 1
            kind, text = plain
            thought = kind is Kind.REASONING
            deltas.append(Delta((token,), reasoning=text) if thought else Delta((token,), content=text))
    return [*deltas, output.finish()], num_plain


@settings(max_examples=300)
@given(outputs, stop_lists)
def test_the_fast_path_changes_no_delta(ids: list[int], stops: list[str]) -> None:
    for usual, short in (
        (chat(stops), chat(stops)),
        (PlainOutput(tiny(), stops=stops), PlainOutput(tiny(), stops=stops)),
    ):
        assert run(usual, [[token] for token in ids]) == run_plain(short, ids)[0]
        assert usual.stopped == short.stopped
        if isinstance(usual, ChatOutput) and isinstance(short, ChatOutput):
            assert usual.flaws == short.flaws


GEMMA = [
    "<|channel>",
    "thought\n",
    "<channel|>",
    "<|tool_call>",
    "call:f{}",
    "<tool_call|>",
    "<turn|>",
    "\n",
    "a",
    "é日",
]


@settings(max_examples=200)
@given(st.lists(st.sampled_from(GEMMA), max_size=20).map("".join))
def test_the_fast_path_changes_no_delta_of_gemmas(text: str) -> None:
    ids = tiny_gemma().encode_with_control(text)
    usual, short = (ChatOutput(GemmaParser(GemmaTokens.of(tiny_gemma()))) for _ in range(2))
    assert run(usual, [[token] for token in ids]) == run_plain(short, ids)[0]
    assert usual.flaws == short.flaws


def test_text_takes_the_fast_path() -> None:
    ids = tiny().encode_with_control(f"{A}one two é<|end|>{S}{F}three<|return|>")
    deltas, num_plain = run_plain(chat([]), ids)
    # Not the first tokens of the messages, which bring their headers along, and not the parts of a character.
    assert 0 < len(deltas) - num_plain <= 4
    assert num_plain >= 6
    assert run_plain(chat(["x"]), ids)[1] == 0


def test_header_tokens_travel_with_the_text_after_them() -> None:
    ids = tiny().encode_with_control(f"{A}a<|end|>{S}{F}b<|return|>")
    first, second, last = run(chat([]), [[token] for token in ids])
    assert (first.reasoning, second.content, last.shows) == ("a", "b", False)
    assert tiny().decode(first.token_ids, show_control=True) == f"{A}a"
    assert tiny().decode(second.token_ids, show_control=True) == f"<|end|>{S}{F}b"
    assert tiny().decode(last.token_ids, show_control=True) == "<|return|>"


def test_stops_are_looked_for_in_the_content_only() -> None:
    ids = tiny().encode_with_control(f'{A}aXb<|end|>{S}{C}"X"<|call|>{S}{F}cdXef<|return|>')
    output = chat(["X"])
    assert total(run(output, [[token] for token in ids])) == ("aXb", "cd", ["f"], '0"0X0"')
    assert output.stopped == "X"
    # The server ended it: nothing is wrong with the output.
    assert not output.flaws


def test_a_stop_does_not_reach_into_the_next_message() -> None:
    ids = tiny().encode_with_control(f"{F}a<|end|>{S}{F}b<|return|>")
    for stop in ("ab", "a\nb", "\n"):
        output = chat([stop])
        assert total(run(output, [ids]))[1] == "a\nb"
        assert output.stopped is None


def test_plain_output_shows_the_text_without_control_tokens() -> None:
    ids = tiny().encode_with_control(f"{A}one<|end|>{S}{F}two")
    assert total(run(PlainOutput(tiny()), [ids]))[1] == "analysisoneassistantfinaltwo"
    stopped = PlainOutput(tiny(), stops=["neas"])
    assert total(run(stopped, [[token] for token in ids]))[1] == "analysiso"
    assert stopped.stopped == "neas"

"""Deltas: header tokens go with the text after them, stop strings match only within one message."""

from __future__ import annotations

from microscale.text.output import ChatOutput, PlainOutput
from support.chat_formats import made, run, total
from support.tiny_tokenizers import tiny

A, F, S = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>", "<|start|>assistant"
C = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"


def chat(stops: list[str]) -> ChatOutput:
    return ChatOutput(made("harmony").parser(), stops=stops)


def test_header_tokens_go_with_the_text_after_them() -> None:
    ids = tiny().encode_with_control(f"{A}a<|end|>{S}{F}b<|return|>")
    first, second, last = run(chat([]), [[token] for token in ids])
    assert (first.reasoning, second.content, last.shows) == ("a", "b", False)
    assert tiny().decode(first.token_ids, show_control=True) == f"{A}a"
    assert tiny().decode(second.token_ids, show_control=True) == f"<|end|>{S}{F}b"
    assert tiny().decode(last.token_ids, show_control=True) == "<|return|>"


def test_stop_strings_apply_to_the_content_only() -> None:
    ids = tiny().encode_with_control(f'{A}aXb<|end|>{S}{C}"X"<|call|>{S}{F}cdXef<|return|>')
    output = chat(["X"])
    assert total(run(output, [[token] for token in ids])) == ("aXb", "cd", [("f", '"X"')], [])
    # The server ended the output, so nothing is wrong with it.
    assert (output.stopped, list(output.flaws)) == ("X", [])


def test_a_stop_string_does_not_match_across_messages() -> None:
    ids = tiny().encode_with_control(f"{F}a<|end|>{S}{F}b<|return|>")
    for stop in ("ab", "a\nb", "\n"):
        output = chat([stop])
        assert total(run(output, [ids])).content == "a\nb"
        assert output.stopped is None


def test_plain_output_shows_the_text_without_control_tokens() -> None:
    ids = tiny().encode_with_control(f"{A}one<|end|>{S}{F}two")
    assert total(run(PlainOutput(tiny()), [ids])).content == "analysisoneassistantfinaltwo"
    stopped = PlainOutput(tiny(), stops=["neas"])
    assert total(run(stopped, [[token] for token in ids])).content == "analysiso"
    assert stopped.stopped == "neas"

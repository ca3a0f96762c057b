"""The tokenizer of random weights: every id that such a model may choose is text of its own, at once."""

from __future__ import annotations

from microscale.models.families import PRESETS
from microscale.text.byte_tokenizer import MAX_ID, byte_tokenizer
from microscale.text.formats import chat_format_for
from microscale.text.output import ChatOutput, PlainOutput

NUM_BYTES = 256
LARGEST = max(config.vocab_size for config in PRESETS.values())


def test_every_id_of_every_vocabulary_has_text_of_its_own() -> None:
    tokenizer = byte_tokenizer()
    control = set(tokenizer.control.values())
    words = [tokenizer.token_bytes(token) for token in range(LARGEST) if token not in control]
    assert all(words)
    assert len(set(words)) == len(words)
    assert [tokenizer.token_bytes(token) for token in control] == [b""] * len(control)
    # Words are whole characters: each can go out alone.
    assert all(word.decode().startswith(" ") for word in words[NUM_BYTES:])


def test_words_are_the_same_every_time_and_bounded() -> None:
    assert [byte_tokenizer().token_bytes(token) for token in (264, 265, 201087)] == [b" ba", b" be", b" nomuri"]
    tokenizer = byte_tokenizer()
    assert tokenizer.token_bytes(MAX_ID - 1)
    for token in (-1, MAX_ID, 2**31 - 1, 2**40):
        assert tokenizer.token_bytes(token) == b""


def test_text_becomes_bytes_as_before() -> None:
    tokenizer = byte_tokenizer()
    text = "Naïve ba be nomuri <|end|> 日本"
    ids = tokenizer.encode(text)
    assert [tokenizer.token_bytes(token) for token in ids] == [bytes([byte]) for byte in text.encode()]
    assert len(tokenizer.vocabulary()) == NUM_BYTES + len(tokenizer.control)


def test_each_word_is_a_delta_of_chat_and_of_completions() -> None:
    """From the first token on: no word can begin a header of the chat format, and none waits for the next."""
    tokenizer = byte_tokenizer()
    chat_format = chat_format_for(tokenizer)
    for token in range(264, LARGEST, 101):
        for output in (PlainOutput(tokenizer), ChatOutput(chat_format.parser(()))):
            for _ in range(2):
                delta = output.feed([token])
                assert delta is not None
                assert delta.content.encode() == tokenizer.token_bytes(token)


def test_control_tokens_take_no_text_with_them() -> None:
    """Random weights choose them too; the words after them still show."""
    tokenizer = byte_tokenizer()
    chat_format = chat_format_for(tokenizer)
    ends = [tokenizer.control[name] for name in ("<|end|>", "<|call|>", "<|return|>", "<|endoftext|>")]
    for end in ends:
        for output in (PlainOutput(tokenizer), ChatOutput(chat_format.parser(()))):
            deltas = [output.feed([token]) for token in (300, end, 301, 302)]
            shown = "".join(delta.content for delta in deltas if delta is not None)
            assert shown.replace("\n", "").encode() == b"".join(map(tokenizer.token_bytes, (300, 301, 302)))
            assert not output.ended

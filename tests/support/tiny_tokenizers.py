"""Tokenizers made on the spot, with nothing downloaded: a tiny one with Harmony's control tokens at ids of its own, and
``o200k_harmony`` itself as a ``tokenizer.json``, built from the vocabulary inside ``oss-harmony``."""

from __future__ import annotations

import functools

import openai_harmony
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers

from microscale.text.harmony import tokens as names
from microscale.text.tokenizer import BYTE_OF, Tokenizer

# The split that o200k is defined with.
O200K_SPLIT = "|".join(
    [
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)

SENTENCES = [
    "The assistant thinks in the analysis channel and answers in the final channel.",
    'A call goes to=functions.get_weather in the commentary channel, its arguments are json: {"city": "Paris"}.',
    "Knowledge cutoff: 2024-06. Current date: 2026-11-15. Reasoning: low, medium, high. You are a language model.",
    "Größe, naïve café, 日本語の文章, привет, 👩‍👩‍👧 and é as two code points.",
]


def inner_tiny(*, special: bool = True) -> tokenizers.Tokenizer:
    """About 500 tokens. Control tokens lie at both ends of the ids, in no order of the format."""
    inner = bare(models.BPE())
    first = [names.MESSAGE, "<|reserved_7|>", names.CALL]
    last = [names.END, names.START, "<|startoftext|>", names.CONSTRAIN, names.RETURN, names.CHANNEL, names.END_OF_TEXT]
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[AddedToken(name, special=special, normalized=False) for name in first],
        show_progress=False,
    )
    inner.train_from_iterator(SENTENCES, trainer)
    inner.add_tokens([AddedToken(name, special=special, normalized=False) for name in last])
    return inner


@functools.cache
def tiny() -> Tokenizer:
    return Tokenizer(inner_tiny(), "tiny tokenizer.json")


@functools.cache
def library() -> openai_harmony.HarmonyEncoding:
    return openai_harmony.load_harmony_encoding("HarmonyGptOss")


@functools.cache
def o200k() -> Tokenizer:
    """The real vocabulary. Takes four seconds, once in a process."""
    encoding = library()
    spell = {byte: char for char, byte in BYTE_OF.items()}
    specials = {name: encoding.encode(name, allowed_special="all")[0] for name in encoding.special_tokens_set}
    num_ordinary = min(specials.values())
    spelt = ["".join(spell[byte] for byte in encoding._inner.decode_bytes([n])) for n in range(num_ordinary)]
    rank = {token: n for n, token in enumerate(spelt)}
    merges: list[tuple[str, str]] = []
    for token in spelt:
        splits = [(token[:at], token[at:]) for at in range(1, len(token))]
        merges += sorted(
            ((a, b) for a, b in splits if a in rank and b in rank), key=lambda pair: (rank[pair[0]], rank[pair[1]])
        )
    inner = bare(models.BPE(vocab=rank, merges=merges))
    # Added tokens take the next free id, so they must come in order and without a hole.
    inner.add_special_tokens([name for name, _ in sorted(specials.items(), key=lambda item: item[1])])
    return Tokenizer(inner, "o200k_harmony")


def bare(model: models.BPE) -> tokenizers.Tokenizer:
    inner = tokenizers.Tokenizer(model)
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(O200K_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    inner.decoder = decoders.ByteLevel()
    return inner

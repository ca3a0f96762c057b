"""Trains the tokenizer: byte-level BPE, Harmony's control tokens first, single digits, spaces apart from names.

A space is a token of its own, except before the commonest words and signs, which are never copied. So a name has the
same tokens after a space, a quote or a full stop, and copying it from a request into a call is copying tokens.

    python -m demo.tokenizer OUT
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers

from demo.chat import PHRASES, render
from demo.data.mixture import training
from demo.shape import SPECIAL_TOKENS, VOCAB_SIZE

NUM_SAMPLES = 60_000
COMMON = (
    "a", "after", "again", "am", "an", "and", "any", "are", "as", "at", "be", "because", "but", "by", "can", "does",
    "for", "from", "has", "have", "how", "I", "if", "in", "is", "it", "its", "many", "me", "my", "no", "of", "or",
    "same", "she", "so", "than", "that", "the", "their", "them", "then", "they", "this", "to", "was", "we", "what",
    "which", "who", "will", "with", "would", "you", "your", "he", "had", "his", "into",
)  # fmt: skip
"""Words that are no name of anything in the data."""
SPLIT = "|".join((
    rf" (?:{'|'.join(COMMON)})(?!\p{{L}})",
    r" (?:=>|\(_:|[-=|{+*/>])(?!\S)",
    r"\p{Lu}?\p{Ll}+",
    r"\p{Lu}+(?!\p{Ll})",
    r"[\p{L}\p{M}]",
    r"\p{N}",
    r"\n+",
    r"\s",
    r"[^\s\p{L}\p{N}]+",
))  # fmt: skip


def texts(num_samples: int) -> Iterator[str]:
    for sample in itertools.islice(training(seed=0, shard=-1), num_samples):
        yield from (piece.text for piece in render(sample) if not piece.control)


def train(num_samples: int = NUM_SAMPLES) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(PHRASES),
        special_tokens=[AddedToken(name, special=True, normalized=False) for name in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # Phrases would fill the vocabulary with their beginnings: they are added whole, and not shown to the trainer.
    phrases = sorted(PHRASES, key=len, reverse=True)

    def without() -> Iterator[str]:
        for text in texts(num_samples):
            for phrase in phrases:
                text = text.replace(phrase, "\n")  # noqa: PLW2901
            yield text

    tokenizer.train_from_iterator(without(), trainer)
    tokenizer.add_tokens([AddedToken(phrase, special=False, normalized=False) for phrase in PHRASES])
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise SystemExit(
            f"The tokenizer has {tokenizer.get_vocab_size()} tokens and not {VOCAB_SIZE}: give more samples."
        )
    return tokenizer


def save(tokenizer: tokenizers.Tokenizer, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|startoftext|>",
        "eos_token": "<|return|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--samples", type=int, default=NUM_SAMPLES)
    asked = parser.parse_args()
    save(train(asked.samples), asked.out)

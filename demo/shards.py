"""Training data as files: rows of tokens with whole documents packed into them. A seed's shard is always the same.

    python -m demo.shards OUT --tokenizer DIR --shards 250 --workers 16

Each shard is an ``.npz`` with ``tokens`` u16, ``weights`` u8 (loss weight times 100) and ``documents`` u8 (number of
the document within its row; 255 is padding), all ``[rows, ROW]``.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import tokenizers

from demo.chat import Piece, render
from demo.data.mixture import training

ROW = 1024
"""Tokens in a row, and most in a document."""
ROWS_PER_SHARD = 1024
"""A million tokens: 4 s of one core."""
OPEN_ROWS = 32
PADDING = 255
END_OF_TEXT = "<|endoftext|>"


@dataclass(frozen=True)
class Recipe:
    """All that the content of a shard follows from, beside its number."""

    tokenizer: Path
    seed: int = 0
    num_rows: int = ROWS_PER_SHARD
    length: int = ROW
    only: tuple[str, ...] = ()
    """Tasks, for a trial; everything without."""


@dataclass(frozen=True)
class Document:
    tokens: list[int]
    weights: list[int]


class Encoder:
    """Pieces to ids. Short texts come again and again: headers, roles, phrases."""

    def __init__(self, path: Path) -> None:
        self._inner = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
        self._inner.encode_special_tokens = True
        self._control = {
            token.content: at for at, token in self._inner.get_added_tokens_decoder().items() if token.special
        }
        self._short = cache(self._encode)

    def _encode(self, text: str) -> list[int]:
        return list(self._inner.encode(text, add_special_tokens=False).ids)

    def ids(self, piece: Piece) -> list[int]:
        if piece.control:
            return [self._control[piece.text]]
        return self._short(piece.text) if len(piece.text) < 16 else self._encode(piece.text)

    def control(self, name: str) -> int:
        return self._control[name]

    def document(self, pieces: Sequence[Piece]) -> Document:
        tokens: list[int] = []
        weights: list[int] = []
        for piece in pieces:
            ids = self.ids(piece)
            tokens += ids
            weights += [round(100 * piece.weight)] * len(ids)
        return Document(tokens, weights)


def pack(documents: Iterator[Document], recipe: Recipe, padding_id: int) -> dict[str, npt.NDArray[np.generic]]:
    """Rows of whole documents: each goes to the fullest of a few open rows that has room for it."""
    num_rows, length = recipe.num_rows, recipe.length
    tokens = np.full((num_rows, length), padding_id, np.uint16)
    weights = np.zeros((num_rows, length), np.uint8)
    numbers = np.full((num_rows, length), PADDING, np.uint8)
    opened = list(range(min(OPEN_ROWS, num_rows)))
    used, counts = [0] * num_rows, [0] * num_rows
    fresh = iter(range(len(opened), num_rows))
    while opened:
        document = next(documents)
        size = len(document.tokens)
        if size > length:
            continue
        fitting = [row for row in opened if used[row] + size <= length and counts[row] < PADDING]
        if fitting:
            row = max(fitting, key=lambda row: used[row])
        else:
            # The fullest row is done, and the document begins the next one.
            opened.remove(max(opened, key=lambda row: used[row]))
            begun = next(fresh, None)
            if begun is None:
                continue
            row = begun
            opened.append(row)
        place = slice(used[row], used[row] + size)
        tokens[row, place], weights[row, place], numbers[row, place] = document.tokens, document.weights, counts[row]
        used[row] += size
        counts[row] += 1
    return {"tokens": tokens, "weights": weights, "documents": numbers}


def make(recipe: Recipe, shard: int) -> dict[str, npt.NDArray[np.generic]]:
    encoder = Encoder(recipe.tokenizer)
    documents = (encoder.document(render(sample)) for sample in training(recipe.seed, shard, recipe.only))
    arrays = pack(documents, recipe, encoder.control(END_OF_TEXT))
    # Rows close in the order in which they fill; training must not see the longest documents last.
    order = list(range(recipe.num_rows))
    random.Random(f"rows {recipe.seed} {shard}").shuffle(order)
    return {name: array[order] for name, array in arrays.items()}


def write(folder: Path, recipe: Recipe, shard: int) -> Path:
    """The shard's file, made unless it is there. It appears whole or not at all."""
    path = folder / f"shard-{recipe.seed}-{shard:05d}.npz"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f"{path.stem}.{os.getpid()}.part.npz")
        np.savez(unfinished, **make(recipe, shard))  # type: ignore[arg-type]
        unfinished.rename(path)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shards", type=int, default=1)
    parser.add_argument("--workers", type=int, default=1)
    asked = parser.parse_args()
    recipe = Recipe(asked.tokenizer, asked.seed)
    with multiprocessing.get_context("spawn").Pool(asked.workers) as pool:
        results = [pool.apply_async(write, (asked.out, recipe, shard)) for shard in range(asked.shards)]
        for number, result in enumerate(results, 1):
            print(f"{number}/{len(results)} {result.get()}", flush=True)


if __name__ == "__main__":
    main()

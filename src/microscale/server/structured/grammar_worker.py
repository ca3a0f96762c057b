"""Compiles grammars in a process of its own: ``python -m microscale.server.structured.grammar_worker``.

A schema of 60 bytes can keep llguidance busy for ten seconds (``multipleOf: 999983``), and a thread cannot be stopped.
So the server asks this process first, which it can kill, and the engine gets only grammars that compiled in time.
Frames go in and out: the vocabulary once, then lists of grammars, each answered with the first error.
"""

from __future__ import annotations

import resource
import sys
from typing import BinaryIO

import msgspec

from microscale.engine.grammar import Grammars, Vocabulary
from microscale.engine.process.connection import end_with_owner
from microscale.engine.protocol.frames import HEADER, frame
from microscale.errors import MicroscaleError

MEMORY_BYTES = 4 * 2**30
"""Limit on address space, not on memory in use: threads reserve some."""


class WorkerVocabulary(msgspec.Struct, frozen=True):
    tokens: tuple[bytes, ...]
    control: tuple[int, ...]
    split: str


class GrammarError(msgspec.Struct, frozen=True):
    """The error of one grammar of the list; ``kind`` is a class of ``microscale.errors``."""

    index: int
    kind: str
    text: str


def main() -> int:
    end_with_owner()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    vocabulary = msgspec.msgpack.decode(read(source), type=WorkerVocabulary)
    grammars = Grammars(Vocabulary(vocabulary.tokens, vocabulary.control, vocabulary.split), len(vocabulary.tokens))
    try:
        grammars.warm_up()
        answer: GrammarError | None = None
    except MicroscaleError as error:
        answer = GrammarError(0, type(error).__name__, str(error))
    write(sink, answer)
    while data := read(source):
        write(sink, first_error(grammars, msgspec.msgpack.decode(data, type=list[str])))
    return 0


def first_error(grammars: Grammars, texts: list[str]) -> GrammarError | None:
    for index, text in enumerate(texts):
        try:
            grammars.matcher(text)
        except MicroscaleError as error:
            return GrammarError(index, type(error).__name__, str(error))
    return None


def read(source: BinaryIO) -> bytes:
    """The next frame; empty at the end of the input."""
    size = int.from_bytes(source.read(HEADER), "big")
    return source.read(size)


def write(sink: BinaryIO, answer: GrammarError | None) -> None:
    sink.write(frame(msgspec.msgpack.encode(answer)))
    sink.flush()


if __name__ == "__main__":
    sys.exit(main())

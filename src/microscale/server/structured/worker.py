"""Tries grammars in a process of its own: ``python -m microscale.server.structured.worker``.

A schema of 60 bytes can keep llguidance busy for ten seconds (``multipleOf: 999983``), and nothing stops a thread. So
the server asks a process first, which it can kill, and the engine sees only what was compiled here in time. Frames go
in and out: the vocabulary once, then lists of grammars, each answered by the first that is wrong.
"""

from __future__ import annotations

import resource
import sys
from typing import BinaryIO

import msgspec

from microscale.engine.grammar import Grammars, Vocabulary
from microscale.engine.protocol.frames import HEADER, frame
from microscale.errors import MicroscaleError

MEMORY_BYTES = 4 * 2**30
"""Of addresses, not of memory in use: threads reserve some."""


class Words(msgspec.Struct, frozen=True):
    tokens: tuple[bytes, ...]
    control: tuple[int, ...]
    split: str


class Fault(msgspec.Struct, frozen=True):
    """What is wrong with which grammar of the list; ``kind`` is a class of ``microscale.errors``."""

    index: int
    kind: str
    text: str


def main() -> int:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    words = msgspec.msgpack.decode(read(source), type=Words)
    grammars = Grammars(Vocabulary(words.tokens, words.control, words.split), len(words.tokens))
    try:
        grammars.warm_up()
        answer: Fault | None = None
    except MicroscaleError as error:
        answer = Fault(0, type(error).__name__, str(error))
    write(sink, answer)
    while data := read(source):
        write(sink, first_fault(grammars, msgspec.msgpack.decode(data, type=list[str])))
    return 0


def first_fault(grammars: Grammars, texts: list[str]) -> Fault | None:
    for index, text in enumerate(texts):
        try:
            grammars.matcher(text)
        except MicroscaleError as error:
            return Fault(index, type(error).__name__, str(error))
    return None


def read(source: BinaryIO) -> bytes:
    """The next frame; empty at the end."""
    size = int.from_bytes(source.read(HEADER), "big")
    return source.read(size)


def write(sink: BinaryIO, answer: Fault | None) -> None:
    sink.write(frame(msgspec.msgpack.encode(answer)))
    sink.flush()


if __name__ == "__main__":
    sys.exit(main())

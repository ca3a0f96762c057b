"""The checkpoint's own tokenizer: text to ids, ids to bytes.

Text stays text: ``encode`` never yields a control token, whatever the text says. Ids become *bytes* and not strings,
since one character may be spread over several tokens; ``detokenize`` puts characters together.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import tokenizers

from microscale.errors import BadCheckpoint, BadRequest

FILE_NAME = "tokenizer.json"
# gpt-oss has 28 MB and Gemma 33 MB.
MAX_FILE_BYTES = 256 << 20


class Tokenizer:
    """A ``tokenizer.json`` whose tokens are bytes (``ByteLevel``), as those of gpt-oss are."""

    def __init__(self, inner: tokenizers.Tokenizer, source: str) -> None:
        self._inner = inner
        self.source = source
        """The file, as errors name it."""
        # A file may ask for cut or padded prompts; a server that did so would answer another question.
        inner.no_truncation()
        inner.no_padding()
        inner.encode_special_tokens = True
        _require_byte_level(inner, source)
        added = inner.get_added_tokens_decoder()
        self._literal = {token_id: token.content.encode() for token_id, token in added.items() if not token.special}
        self._set_control({token.content: token_id for token_id, token in added.items() if token.special})

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """The tokenizer of a checkpoint's folder."""
        path = folder / FILE_NAME
        try:
            if path.stat().st_size > MAX_FILE_BYTES:
                raise BadCheckpoint(f"{path} is larger than {MAX_FILE_BYTES} bytes, which no tokenizer is.")
            text = path.read_bytes().decode()
        except OSError as exc:
            raise BadCheckpoint(f"{path} cannot be read: {exc.strerror}.") from exc
        except UnicodeDecodeError as exc:
            raise BadCheckpoint(f"{path} is not UTF-8.") from exc
        try:
            inner = tokenizers.Tokenizer.from_str(text)
        except Exception as exc:  # the library raises nothing narrower
            raise BadCheckpoint(f"{path} is not a tokenizer: {exc}.") from exc
        return cls(inner, str(path))

    @property
    def control(self) -> Mapping[str, int]:
        """Control tokens by name: ids that no text encodes to and that have no bytes of their own."""
        return self._control

    def is_control(self, token: int) -> bool:
        return token in self._control_names

    def control_name(self, token: int) -> str | None:
        return self._control_names.get(token)

    def protect(self, names: Sequence[str]) -> None:
        """Make these tokens control tokens, for a file that has them without the mark ``special``.

        A name that the file lacks, or that text can still spell, is an error: a prompt could then forge a turn.
        """
        control = dict(self._control)
        for name in names:
            token = self._inner.token_to_id(name)
            if token is None:
                raise BadCheckpoint(f"{self.source} has no token {name!r}, which this model's chat format needs.")
            control[name] = token
        self._inner.add_special_tokens(list(names))
        self._set_control(control)
        for name in names:
            if not self._control_names.keys().isdisjoint(self.encode(f"a {name} b{name}")):
                raise BadCheckpoint(f"{self.source} turns the text {name!r} into a control token.")

    def encode(self, text: str) -> list[int]:
        """The ids of ``text``; names of control tokens in it are text like any other."""
        try:
            # A batch of one: unlike ``encode`` it lets other threads run meanwhile (1 MB takes 0.7 s).
            return list(self._inner.encode_batch_fast([text], add_special_tokens=False)[0].ids)
        except TypeError:
            raise BadRequest("The text holds a lone surrogate, which is no character; send valid Unicode.") from None

    def encode_with_control(self, text: str) -> list[int]:
        """As ``encode``, but names of control tokens become these: for raw prompts, whose format is the caller's."""
        ids: list[int] = []
        for piece in self._control_pattern.split(text):
            if piece in self._control:
                ids.append(self._control[piece])
            elif piece:
                ids += self.encode(piece)
        return ids

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token stands for; none for a control token and for an id that the vocabulary lacks."""
        known = self._bytes.get(token)
        return self._spell(token) if known is None else known

    def decode(self, ids: Sequence[int], *, show_control: bool = False) -> str:
        """The text of ``ids``, with U+FFFD for what is not UTF-8; ``show_control`` writes control tokens by name."""
        parts = [
            self._control_names[token].encode() if show_control and self.is_control(token) else self.token_bytes(token)
            for token in ids
        ]
        return b"".join(parts).decode("utf-8", "replace")

    def _set_control(self, control: Mapping[str, int]) -> None:
        self._control: Mapping[str, int] = MappingProxyType(dict(control))
        self._control_names = {token: name for name, token in control.items()}
        self._literal = {token: text for token, text in self._literal.items() if token not in self._control_names}
        # Grows to the vocabulary's size at most: an id that is not in it is never entered.
        self._bytes: dict[int, bytes] = dict.fromkeys(self._control_names, b"") | self._literal
        # Longest first, so that a name that begins another one does not hide it.
        names = sorted(control, key=len, reverse=True)
        self._control_pattern = re.compile("(" + "|".join(map(re.escape, names)) + ")" if names else r"(?!)")

    def _spell(self, token: int) -> bytes:
        text = self._inner.id_to_token(token) if 0 <= token < 1 << 32 else None
        if text is None:
            return b""
        try:
            spelt = bytes(BYTE_OF[char] for char in text)
        except KeyError:
            # Not spelt in the byte alphabet: the library's decoder hands such a token on as it stands.
            spelt = text.encode()
        self._bytes[token] = spelt
        return spelt


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable spelling of the 256 bytes: printable Latin-1 as itself, the rest from U+0100 on, in order."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


BYTE_OF = _byte_alphabet()
"""The byte that a character of a token's spelling stands for."""


def _require_byte_level(inner: tokenizers.Tokenizer, source: str) -> None:
    kind = "no decoder" if inner.decoder is None else json.loads(inner.decoder.__getstate__())["type"]
    if kind != "ByteLevel":
        raise BadCheckpoint(f"{source} has the decoder {kind}; only ByteLevel is supported.")

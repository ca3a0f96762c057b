"""The checkpoint's own tokenizer: text to ids, ids to bytes.

``encode`` never produces a control token, whatever the text says. Ids become *bytes* and not strings, since one
character may be spread over several tokens; ``detokenize`` assembles characters.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import tokenizers

from microscale.errors import BadCheckpoint, BadRequest

FILE_NAME = "tokenizer.json"
# gpt-oss has 28 MB and Gemma 33 MB.
MAX_FILE_BYTES = 256 << 20
# How ``ByteLevel`` itself splits text.
GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


class Tokenizer:
    """A ``tokenizer.json`` whose tokens are bytes (``ByteLevel``), like gpt-oss's, or pieces of text with bytes as a
    fallback (``ByteFallback``), like Gemma's."""

    def __init__(self, inner: tokenizers.Tokenizer, source: str) -> None:
        self._inner = inner
        self.source = source
        """The file, for errors."""
        # A file may ask for truncated or padded prompts, which would change the question.
        inner.no_truncation()
        inner.no_padding()
        inner.encode_special_tokens = True
        self._is_pieces = _has_pieces(inner, source)
        added = inner.get_added_tokens_decoder()
        self._plain_names = {token_id: token.content for token_id, token in added.items() if not token.special}
        self._literal = {
            token_id: _piece_bytes(token.content) if self._is_pieces else token.content.encode()
            for token_id, token in added.items()
            if not token.special
        }
        self._set_control({token.content: token_id for token_id, token in added.items() if token.special})

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """The tokenizer of a checkpoint's folder."""
        path = folder / FILE_NAME
        try:
            if path.stat().st_size > MAX_FILE_BYTES:
                raise BadCheckpoint(
                    f"{path} is larger than {MAX_FILE_BYTES} bytes, which is too large for a tokenizer."
                )
            text = path.read_bytes().decode()
        except FileNotFoundError:
            raise BadCheckpoint(
                f"{folder} has no {FILE_NAME}, which turns text into tokens; --tokenizer takes it from another folder."
            ) from None
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
        """Control tokens by name. No text encodes to these ids, and they have no bytes."""
        return self._control

    def is_control(self, token: int) -> bool:
        return token in self._control_names

    def control_name(self, token: int) -> str | None:
        return self._control_names.get(token)

    def plain_name(self, token: int) -> str | None:
        """The name of a control token that is not ``special`` in the file, so that raw text shows it."""
        return self._plain_names.get(token) if token in self._control_names else None

    def protect(self, names: Sequence[str]) -> None:
        """Make these tokens control tokens, even if the file does not mark them as ``special``.

        Raises if a name is missing or if text can still spell it: a prompt could then forge a turn.
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
        """The ids of ``text``. Names of control tokens in it are ordinary text."""
        try:
            # A batch of one: unlike ``encode``, it releases the GIL (1 MB takes 0.7 s).
            return list(self._inner.encode_batch_fast([text], add_special_tokens=False)[0].ids)
        except TypeError:
            raise BadRequest(
                "The text contains a lone surrogate, which is not a character; send valid Unicode."
            ) from None

    def encode_with_control(self, text: str) -> list[int]:
        """Like ``encode``, but names of control tokens become these tokens: for raw prompts."""
        ids: list[int] = []
        for piece in self._control_pattern.split(text):
            if piece in self._control:
                ids.append(self._control[piece])
            elif piece:
                ids += self.encode(piece)
        return ids

    def token_bytes(self, token: int) -> bytes:
        """The bytes of a token; none for control tokens and for ids outside the vocabulary."""
        known = self._bytes.get(token)
        return self._spell(token) if known is None else known

    def vocabulary(self) -> list[bytes]:
        """The bytes of each id from 0 on: control tokens by name, empty for unused ids."""
        added = self._inner.get_added_tokens_decoder()
        count = max(self._inner.get_vocab_size(), *(token + 1 for token in added), 0)
        names = {token: name.encode() for token, name in self._control_names.items()}
        words = [names.get(token) or self.token_bytes(token) for token in range(count)]
        if self._is_pieces:
            # If a byte is also a piece, text uses the piece, so the byte's token counts as unused.
            is_byte = [
                _BYTE_PIECE.fullmatch(self._inner.id_to_token(token) or "") is not None for token in range(count)
            ]
            pieces = {word for word, byte in zip(words, is_byte, strict=True) if len(word) == 1 and not byte}
            words = [b"" if byte and word in pieces else word for word, byte in zip(words, is_byte, strict=True)]
        return words

    @property
    def split_pattern(self) -> str:
        """The regular expression that splits text into words before merging; matches any text if there is none."""
        state = {} if self._inner.pre_tokenizer is None else json.loads(self._inner.pre_tokenizer.__getstate__())
        for part in state.get("pretokenizers", [state]):
            if part.get("type") == "Split" and "Regex" in part.get("pattern", {}):
                return str(part["pattern"]["Regex"])
            if part.get("type") == "ByteLevel" and part.get("use_regex"):
                return GPT2_SPLIT
        return r"[\s\S]+"

    def decode(self, ids: Sequence[int], *, show_control: bool = False) -> str:
        """The text of ``ids``, with U+FFFD for invalid UTF-8. ``show_control`` includes control tokens by name."""
        parts = [
            self._control_names[token].encode() if show_control and self.is_control(token) else self.token_bytes(token)
            for token in ids
        ]
        return b"".join(parts).decode("utf-8", "replace")

    def _set_control(self, control: Mapping[str, int]) -> None:
        self._control: Mapping[str, int] = MappingProxyType(dict(control))
        self._control_names = {token: name for name, token in control.items()}
        self._literal = {token: text for token, text in self._literal.items() if token not in self._control_names}
        # Grows to the size of the vocabulary at most: other ids are never added.
        self._bytes: dict[int, bytes] = dict.fromkeys(self._control_names, b"") | self._literal
        # Longest first, so that a name that is a prefix of another does not hide it.
        names = sorted(control, key=len, reverse=True)
        self._control_pattern = re.compile("(" + "|".join(map(re.escape, names)) + ")" if names else r"(?!)")

    def _spell(self, token: int) -> bytes:
        text = self._inner.id_to_token(token) if 0 <= token < 1 << 32 else None
        if text is None:
            return b""
        try:
            spelt = _piece_bytes(text) if self._is_pieces else bytes(BYTE_OF[char] for char in text)
        except KeyError:
            # Not in the byte alphabet: the library's decoder returns such a token unchanged.
            spelt = text.encode()
        self._bytes[token] = spelt
        return spelt


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable characters for the 256 bytes: printable Latin-1 as itself, the rest from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


BYTE_OF = _byte_alphabet()
"""Character in a token's spelling → byte."""


SPACE = "\u2581"
"""A space in vocabularies of pieces."""
_BYTE_PIECE = re.compile("<0x([0-9A-F]{2})>")


def _piece_bytes(text: str) -> bytes:
    """The bytes of a piece: ``<0xE2>`` is one byte, everything else is text."""
    byte = _BYTE_PIECE.fullmatch(text)
    return text.replace(SPACE, " ").encode() if byte is None else bytes([int(byte[1], 16)])


def _has_pieces(inner: tokenizers.Tokenizer, source: str) -> bool:
    """Whether tokens are pieces of text rather than bytes; raises for other decoders."""
    decoder = inner.decoder
    state: dict[str, Any] = {"type": "no decoder"} if decoder is None else json.loads(decoder.__getstate__())
    if state["type"] == "ByteLevel":
        return False
    parts = state.get("decoders", [])
    spaces = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    if [part["type"] for part in parts] != ["Replace", "ByteFallback", "Fuse"] or parts[0] != spaces:
        kind = "+".join(part["type"] for part in parts) or state["type"]
        raise BadCheckpoint(
            f"{source} has the decoder {kind}; supported are ByteLevel, and Replace+ByteFallback+Fuse for pieces."
        )
    return True

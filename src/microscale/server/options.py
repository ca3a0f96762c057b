"""The options of a server: limits, API keys and origins, and the engine's own configuration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from microscale.engine.client.launch import Launch
from microscale.engine.config import EngineConfig
from microscale.engine.protocol.messages import Ready
from microscale.errors import BadSetting

if TYPE_CHECKING:
    from microscale.text.tokenizer import Tokenizer

MIB = 2**20


@dataclass(frozen=True)
class Limits:
    """Beyond these a request is refused, with the number."""

    max_body_bytes: int = 4 * MIB
    """A prompt of 131072 token ids has 1 MiB."""
    max_header_bytes: int = 32 * 1024
    max_n: int = 16
    max_choices: int = 64
    """Prompts of one request times ``n``."""
    max_stop_strings: int = 16
    max_logit_bias: int = 512
    max_messages: int = 2048
    max_tools: int = 128
    max_schema_depth: int = 32
    max_schema_bytes: int = 64 * 1024
    """Of one tool's parameters or one answer's form, as JSON."""
    compile_timeout_s: float = 2.0
    """How long the forms of one request may take to compile."""
    max_stored_responses: int = 1024
    max_stored_bytes: int = 64 * MIB
    """Of all responses that are kept for ``previous_response_id``, with their conversations."""
    read_timeout_s: float = 30.0
    """How long a request's head, and then its body, may take to arrive."""
    write_timeout_s: float = 30.0
    """How long a reader may leave a full socket unread before its request is aborted."""
    max_unread_tokens: int = 8192
    """How far a reader may fall behind the engine before its request is aborted."""

    def __post_init__(self) -> None:
        for limit in fields(self):
            if getattr(self, limit.name) <= 0:
                raise BadSetting(f"--{limit.name.replace('_', '-')} must be above 0.")


def read_keys(keys: list[str], file: Path | None) -> tuple[bytes, ...]:
    """The API keys of both options. A file without one would leave the server open, so it is refused."""
    found = list(keys)
    if file is not None:
        try:
            lines = [line.strip() for line in file.read_text().splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            raise BadSetting(f"--api-key-file {file} cannot be read: {error}.") from None
        found += [line for line in lines if line]
        if not any(lines):
            raise BadSetting(f"--api-key-file {file} holds no key; give one a line.")
    if not all(key.strip() and key.isascii() and key.isprintable() for key in found):
        raise BadSetting("An API key is empty or holds characters that no header can carry; use printable ASCII.")
    return tuple(key.strip().encode() for key in found)


def read_origins(origins: list[str], *, has_keys: bool) -> tuple[str, ...]:
    """The origins of ``--allowed-origin``. Without a key ``*`` would let every page of the web use the server."""
    for origin in origins:
        if origin == "*":
            if not has_keys:
                raise BadSetting("--allowed-origin '*' lets every web page call this server: set --api-key-file too.")
            continue
        parts = urlsplit(origin)
        if not parts.scheme or not parts.hostname or parts.path.strip("/") or parts.query or parts.fragment:
            raise BadSetting(f"--allowed-origin {origin!r} is no origin; give it as https://chat.example:8080.")
    return tuple(origins)


@dataclass(frozen=True)
class ServeOptions:
    """What decides how a model is served."""

    engine: EngineConfig
    tokenizer: Tokenizer
    names: tuple[str, ...]
    host: str = "127.0.0.1"
    port: int = 8000
    keys: tuple[bytes, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    strict_requests: bool = False
    limits: Limits = field(default_factory=Limits)
    metrics_prefix: str = "microscale"
    drain_s: float = 30.0
    strict_eos: bool = True
    """Whether the model's end tokens must be the tokenizer's; random weights have another's."""
    launch: Launch = field(default_factory=Launch)
    on_ready: Callable[[Ready, str], None] = lambda ready, address: None
    """Hears what was loaded and where it is served."""

"""The options of a server. Imports none of the server's packages: the command line makes these before loading them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from microscale.engine.client.launch import EngineProcess
from microscale.engine.config import EngineConfig
from microscale.engine.protocol.messages import Ready
from microscale.errors import BadSetting

if TYPE_CHECKING:
    from microscale.text.tokenizer import Tokenizer

MIB = 2**20


@dataclass(frozen=True)
class RequestLimits:
    """What one client may ask of the server. A request beyond a limit is refused with an error that names the limit.

    The command line has an option of the same name for each.
    """

    max_body_bytes: int = 4 * MIB
    """A prompt of 131072 token ids takes 1 MiB."""
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
    """Per tool or output format, as JSON."""
    compile_timeout_s: float = 2.0
    """For all grammars of one request."""
    max_stored_responses: int = 1024
    max_stored_bytes: int = 64 * MIB
    """For all responses that are stored for ``previous_response_id``, including their conversations."""
    read_timeout_s: float = 30.0
    """For a request's head, and again for its body."""
    write_timeout_s: float = 30.0
    """How long a client may leave a full socket unread before its request is aborted."""
    max_unread_tokens: int = 8192
    """How far a client may fall behind the engine before its request is aborted."""
    max_requests_per_client: int | None = None
    """That may be open at once, by API key, or by address without keys."""

    def __post_init__(self) -> None:
        for limit in fields(self):
            value = getattr(self, limit.name)
            if value is not None and value <= 0:
                raise BadSetting(f"--{limit.name.replace('_', '-')} must be greater than 0.")


def read_keys(keys: list[str], file: Path | None) -> tuple[bytes, ...]:
    """The keys of ``--api-key`` and ``--api-key-file``. An empty file is an error: it would leave the server open."""
    all_keys = list(keys)
    if file is not None:
        try:
            lines = [line.strip() for line in file.read_text().splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            raise BadSetting(f"--api-key-file {file} cannot be read: {error}.") from None
        all_keys += [line for line in lines if line]
        if not any(lines):
            raise BadSetting(f"--api-key-file {file} contains no key; write one per line.")
    if not all(key.strip() and key.isascii() and key.isprintable() for key in all_keys):
        raise BadSetting("An API key is empty or cannot be sent in a header; use printable ASCII.")
    return tuple(key.strip().encode() for key in all_keys)


def read_origins(origins: list[str], *, has_keys: bool) -> tuple[str, ...]:
    """The origins of ``--allowed-origin``. Without a key, ``*`` would let every page on the web use the server."""
    for origin in origins:
        if origin == "*":
            if not has_keys:
                raise BadSetting("--allowed-origin '*' lets every web page call this server; set --api-key-file too.")
            continue
        parts = urlsplit(origin)
        if not parts.scheme or not parts.hostname or parts.path.strip("/") or parts.query or parts.fragment:
            raise BadSetting(f"--allowed-origin {origin!r} is not an origin; write it as https://chat.example:8080.")
    return tuple(origins)


@dataclass(frozen=True)
class SamplingDefaults:
    """What requests get that do not choose it themselves. Without a ``generation_config.json``, OpenAI's defaults."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def changed(self) -> dict[str, float]:
        """What differs from OpenAI's defaults."""
        return {each.name: value for each in fields(self) if (value := getattr(self, each.name)) != each.default}


@dataclass(frozen=True)
class ServeOptions:
    """How a model is served."""

    engine: EngineConfig
    tokenizer: Tokenizer
    names: tuple[str, ...]
    host: str = "127.0.0.1"
    port: int = 8000
    keys: tuple[bytes, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    strict_requests: bool = False
    chat_template: Path | None = None
    """A template instead of the checkpoint's."""
    sampling: SamplingDefaults = field(default_factory=SamplingDefaults)
    limits: RequestLimits = field(default_factory=RequestLimits)
    metrics_prefix: str = "microscale"
    drain_s: float = 30.0
    restart_engine: int = 0
    """How many times an engine that ended is started again."""
    strict_eos: bool = True
    """Whether the model's end tokens must be the tokenizer's. False for random weights, which use another tokenizer."""
    launch: EngineProcess = field(default_factory=EngineProcess)
    on_ready: Callable[[Ready, str], None] = lambda ready, address: None
    """Called with the engine's description and the server's address once the server is ready."""

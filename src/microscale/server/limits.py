"""What one client may ask of the server. Every bound stands here, under the command line's name."""

from __future__ import annotations

from dataclasses import dataclass, fields

from microscale.errors import BadSetting

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

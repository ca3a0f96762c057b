"""What decides how a model is served. Needs none of the server's packages: the command line makes it before them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from microscale.engine.client.launch import Launch
from microscale.engine.config import EngineConfig
from microscale.engine.protocol.messages import Ready
from microscale.server.limits import Limits

if TYPE_CHECKING:
    from microscale.text.tokenizer import Tokenizer


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

"""What every request needs: the engine, the tokenizer, the bounds, the counters. Made once, passed, never global."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from microscale.engine.client.client import EngineClient
from microscale.errors import MicroscaleError
from microscale.server.http.error_replies import NoSuchModel
from microscale.server.monitoring.metrics import Metrics
from microscale.server.openai.responses.store import ResponseStore
from microscale.server.options import Limits
from microscale.server.requests.body import IgnoredLog
from microscale.server.structured.check import GrammarChecker
from microscale.text.chat_format import ChatFormat
from microscale.text.tokenizer import Tokenizer

T = TypeVar("T")
INLINE_BYTES = 4096
"""Work on so little text takes about 2 ms, rendering included (2 cores), and a thread costs its own time."""


@dataclass
class Host:
    engine: EngineClient
    tokenizer: Tokenizer
    chat_format: ChatFormat
    limits: Limits
    metrics: Metrics
    names: tuple[str, ...]
    """Under which the model is served; the first is the one that replies carry."""
    grammars: GrammarChecker
    keys: tuple[bytes, ...] = ()
    """API keys; without any, every request is let in."""
    allowed_hosts: tuple[str, ...] = ()
    """Names beside localhost under which requests may come to the loopback address where there are no keys."""
    allowed_origins: tuple[str, ...] = ()
    """Of web pages that may call from a browser."""
    num_open: int = 0
    """Requests that are being answered."""
    strict_requests: bool = False
    """Refuse keys that are not known, instead of passing them over."""
    drafts: bool = False
    """The engine has a drafter."""
    start_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds that the parts of the engine's start took."""
    ignored: IgnoredLog = field(default_factory=IgnoredLog)
    created: int = field(default_factory=lambda: int(time.time()))
    stored: ResponseStore = field(default_factory=ResponseStore)
    threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(2, "text"))
    closing: MicroscaleError | None = None
    """Why nothing new is taken any more."""

    @property
    def max_model_len(self) -> int:
        return self.engine.ready.max_model_len

    def check_open(self) -> None:
        if self.closing is not None:
            # A new one each time: an error that is raised twice gathers the tracebacks of both.
            raise type(self.closing)(str(self.closing))

    def check_model(self, name: str | None) -> str:
        """The name that replies carry; a request that names none means this model."""
        if name is None:
            return self.names[0]
        if name not in self.names:
            raise NoSuchModel(f"The model {name[:200]!r} is not served here; {' or '.join(self.names)} is.")
        return name

    async def off_loop(self, num_bytes: int, work: Callable[[], T]) -> T:
        """Do work whose time grows with ``num_bytes`` of text without holding the event loop up."""
        if num_bytes <= INLINE_BYTES:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self.threads, work)

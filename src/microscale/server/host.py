"""What every request needs: the engine, the tokenizer, the limits, the metrics. Made once and passed, never global."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from microscale.engine.client.client import EngineClient
from microscale.errors import MicroscaleError
from microscale.server import error_texts
from microscale.server.http.exchange import Exchange, Record
from microscale.server.monitoring.metrics import Metrics
from microscale.server.openai.responses.store import ResponseStore
from microscale.server.options import RequestLimits, SamplingDefaults
from microscale.server.requests.base import IGNORED_HEADER, Body, Ignored, IgnoredLog, ignored_header
from microscale.server.requests.parsing import parse
from microscale.server.structured.grammar_checker import GrammarChecker
from microscale.text.chat_format import ChatFormat
from microscale.text.tokenizer import Tokenizer

T = TypeVar("T")
B = TypeVar("B", bound=Body)
INLINE_BYTES = 4096
"""Work on this much text takes about 2 ms, including rendering (2 cores); handing it to a thread would cost more."""


@dataclass
class Host:
    engine: EngineClient
    """It may end and be replaced by another: see ``running_engine``."""
    tokenizer: Tokenizer
    chat_format: ChatFormat
    limits: RequestLimits
    metrics: Metrics
    names: tuple[str, ...]
    """Names under which the model is served; replies to requests without a model carry the first."""
    grammars: GrammarChecker
    keys: tuple[bytes, ...] = ()
    """API keys; without any, no request needs one."""
    allowed_hosts: tuple[str, ...] = ()
    """Host names other than localhost that the loopback address answers to, if there are no keys."""
    allowed_origins: tuple[str, ...] = ()
    """Origins of web pages that may call the server from a browser."""
    num_open: int = 0
    """Requests in progress."""
    sampling: SamplingDefaults = field(default_factory=SamplingDefaults)
    strict_requests: bool = False
    """Refuse unknown fields instead of ignoring them."""
    drafts: bool = False
    """The engine has a drafter."""
    start_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds per part of the engine's start."""
    ignored: IgnoredLog = field(default_factory=IgnoredLog)
    created: int = field(default_factory=lambda: int(time.time()))
    stored: ResponseStore = field(default_factory=ResponseStore)
    threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(2, "text"))
    closing: MicroscaleError | None = None
    """Why no new requests are accepted; ``None`` while they are."""
    restarts_left: int = 0
    """How many times an engine that ended is replaced."""
    replaced: asyncio.Event = field(default_factory=asyncio.Event)
    """Set, and replaced itself, when another engine has started or failed to."""
    max_waiting: int = 1024
    """Requests that may wait for another engine."""
    num_waiting: int = 0
    open_by_client: Counter[str] = field(default_factory=Counter)
    """Requests in progress by key or address; counted only if they are limited."""

    @property
    def max_model_len(self) -> int:
        return self.engine.ready.max_model_len

    def finished(self, record: Record, reason: str) -> None:
        """Note why a choice ended, for the log and the metrics."""
        record.finishes.append(reason)
        self.metrics.finished(reason)

    def check_open(self) -> None:
        if self.closing is not None:
            # A new error each time: one that is raised twice would collect both tracebacks.
            raise type(self.closing)(str(self.closing))

    def why_unavailable(self) -> MicroscaleError | None:
        """Why a request cannot be computed now."""
        return self.closing or self.engine.why_ended

    async def running_engine(self) -> EngineClient:
        """The engine. While it is being replaced, requests wait here."""
        if self.engine.why_ended is not None and self.num_waiting >= self.max_waiting:
            raise error_texts.too_many_waiting(self.max_waiting)
        self.num_waiting += 1
        try:
            while self.closing is None and self.restarts_left and self.engine.why_ended is not None:
                await self.replaced.wait()
        finally:
            self.num_waiting -= 1
        self.check_open()
        return self.engine

    def replace_engine(self, engine: EngineClient | None) -> None:
        """Use another engine. ``None``: it did not start, which counts too."""
        self.restarts_left -= 1
        self.engine = engine or self.engine
        self.wake_waiting()

    def wake_waiting(self) -> None:
        self.replaced.set()
        self.replaced = asyncio.Event()

    @contextmanager
    def admit(self, client: str) -> Iterator[None]:
        """Count a request of a client, given by its key or address; raise if it has too many open."""
        limit = self.limits.max_requests_per_client
        if limit is None:
            yield
            return
        if self.open_by_client[client] >= limit:
            raise error_texts.too_many_of_client(limit)
        self.open_by_client[client] += 1
        try:
            yield
        finally:
            self.open_by_client[client] -= 1
            if not self.open_by_client[client]:
                del self.open_by_client[client]

    def check_model(self, name: str | None) -> str:
        """The model's name in replies. A request without a name means this model."""
        if name is None:
            return self.names[0]
        if name not in self.names:
            raise error_texts.model_not_found(name, self.names)
        return name

    async def read_request(self, kind: type[B], body: bytes, exchange: Exchange) -> B:
        """Parse a request. Ignored keys are logged, and named in the reply."""
        request, ignored = await self.off_loop(len(body), lambda: parse(kind, body, strict=self.strict_requests))
        exchange.headers |= self.ignored_headers(ignored)
        return request

    def ignored_headers(self, ignored: Sequence[Ignored]) -> dict[str, str]:
        """The header that names ignored keys. Each is logged once."""
        self.ignored.log(ignored)
        return {IGNORED_HEADER: ignored_header(ignored)} if ignored else {}

    async def off_loop(self, num_bytes: int, work: Callable[[], T]) -> T:
        """Do work that takes time in proportion to ``num_bytes`` of text, without blocking the event loop."""
        if num_bytes <= INLINE_BYTES:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self.threads, work)

"""The life of a server: bind, load, self-test, serve, drain.

    bind ── engine loads ── self-test ── serve ──┬─ SIGTERM, Ctrl-C ── drain: open requests finish, new get 503 ── 0
                                                 └─ engine ends ─┬──── every request gets 503 for 2 s ──────────── 1
                                                                 └──── --restart-engine: another loads, requests wait
A second signal stops the server immediately.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import replace
from typing import TypeVar

import msgspec
import uvicorn

from microscale import settings
from microscale.engine.client.client import EngineClient
from microscale.engine.client.launch import EngineProcess
from microscale.engine.config import EngineConfig
from microscale.engine.grammar import Vocabulary
from microscale.errors import BadSetting, EngineDied, MicroscaleError
from microscale.server import error_texts
from microscale.server.app import make_app
from microscale.server.host import Host
from microscale.server.http.connection import bounded_protocol
from microscale.server.monitoring.metrics import Metrics
from microscale.server.options import ServeOptions
from microscale.server.structured.grammar_checker import GrammarChecker
from microscale.text.formats import chat_format_for, self_test

T = TypeVar("T")
log = logging.getLogger(__name__)
ENGINE_ENDED_S = 2.0
"""How long clients still get an error reply after the engine has ended."""
SHUTDOWN_S = 2.0
"""How long connections get to end when nothing more is computed."""
CLOSING_S = 5.0
"""The part of a drain's time in which the engine has to end, be killed if it does not, and the connections close."""
SIGNALS = (signal.SIGTERM, signal.SIGINT)
SEND_BUFFER_BYTES = 32 * 1024
"""The kernel's send buffer per connection; Linux grants twice that, some 300 events. By default it grows to 4 MB, for
each of a thousand connections that are not read."""


class StartClock:
    """Times the parts of a start, as the server's process sees them.

    engine: process, imports, plan │ load: while progress is reported, weights and kernels │ rest: graphs and the like
    """

    def __init__(self, on_progress: Callable[[int, int], None]) -> None:
        self._on_progress = on_progress
        self._began = time.perf_counter()
        self._loading: tuple[float, float] | None = None
        """The times of the first and of the last progress report."""

    def progress(self, done: int, total: int) -> None:
        now = time.perf_counter()
        self._loading = (now if self._loading is None else self._loading[0], now)
        self._on_progress(done, total)

    def parts(self) -> dict[str, float]:
        """Seconds per part. Call it when the engine is ready."""
        now = time.perf_counter()
        first, last = self._loading or (now, now)
        return {"engine": first - self._began, "load": last - first, "rest": now - last}


class UvicornServer(uvicorn.Server):
    """Leaves signals to us: uvicorn would raise them again after the drain and end the process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def bind(host: str, port: int) -> socket.socket:
    """Bind the address before anything is loaded, so that an address in use is reported immediately."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError, OverflowError) as error:
        raise BadSetting(f"--host {host} --port {port} is not an address: {error}.") from None
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise BadSetting(f"{host}:{port} is not available ({error.strerror}); choose another --port.") from None
    return bound


def address_of(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def serve(options: ServeOptions) -> int:
    """Serve until a signal arrives or the engine ends; return the exit status."""
    settings.allow_connections()
    with bind(options.host, options.port) as bound:
        async with open_host(options) as host:
            return await _serve(host, options, bound)


@contextlib.asynccontextmanager
async def open_host(options: ServeOptions) -> AsyncIterator[Host]:
    """Load the model and self-test it; yield what every request needs."""
    chat_format = chat_format_for(options.tokenizer, options.chat_template)
    metrics = Metrics(options.names[0], options.metrics_prefix)
    vocabulary = _vocabulary(options)
    clock = StartClock(options.launch.on_progress)
    launch = replace(options.launch, on_progress=clock.progress)
    async with await EngineClient.start(_engine_config(options, vocabulary), launch) as engine:
        ready, start_s = engine.ready, clock.parts()
        eos = ready.eos_token_ids if options.strict_eos else ()
        self_test(chat_format, ready.vocab_size, eos)
        grammars = GrammarChecker(vocabulary, options.limits.compile_timeout_s)
        host = Host(
            engine,
            options.tokenizer,
            chat_format,
            options.limits,
            metrics,
            options.names,
            grammars,
            options.keys,
            options.allowed_hosts,
            allowed_origins=options.allowed_origins,
            sampling=options.sampling,
            strict_requests=options.strict_requests,
            drafts=options.engine.speculative is not None,
            start_s=start_s,
            restarts_left=options.restart_engine,
            max_waiting=options.engine.max_queue,
        )
        try:
            yield host
        finally:
            await host.engine.close()
            await grammars.close()
            host.threads.shutdown(wait=False, cancel_futures=True)


def _vocabulary(options: ServeOptions) -> Vocabulary:
    tokenizer = options.tokenizer
    return Vocabulary(tokenizer.vocabulary(), sorted(tokenizer.control.values()), tokenizer.split_pattern)


def _engine_config(options: ServeOptions, vocabulary: Vocabulary) -> EngineConfig:
    return msgspec.structs.replace(
        options.engine,
        vocabulary=tuple(vocabulary.tokens),
        control_tokens=tuple(vocabulary.control),
        split_pattern=vocabulary.split,
    )


async def _serve(host: Host, options: ServeOptions, bound: socket.socket) -> int:
    config = uvicorn.Config(
        make_app(host),
        http=bounded_protocol(options.limits),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=int(SHUTDOWN_S),
    )
    server = UvicornServer(config)
    # What is loaded now stays loaded, so the garbage collector need not scan it again and again.
    gc.collect()
    gc.freeze()
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in SIGNALS:
        loop.add_signal_handler(number, stop.set)
    serving = asyncio.create_task(server.serve([bound]))
    serving.add_done_callback(lambda task: stop.set())
    while not server.started and not stop.is_set():
        await asyncio.sleep(0.01)
    options.on_ready(host.engine.ready, address_of(bound))
    stopped = asyncio.create_task(stop.wait())
    try:
        end = await _run_engines(host, options, stopped)
        status = await (_drain(host, options.drain_s, stop) if end is None else _engine_ended(host, end))
    finally:
        for number in SIGNALS:
            loop.remove_signal_handler(number)
        stopped.cancel()
        server.should_exit = True
        await serving
    return status


async def _run_engines(host: Host, options: ServeOptions, stopped: asyncio.Task[object]) -> EngineDied | None:
    """Replace an engine that ends while ``--restart-engine`` allows it. Why the last one ended; ``None``: a signal
    came."""
    while True:
        end = await _unless(stopped, host.engine.wait_ended())
        if end is None or not host.restarts_left:
            return end
        number = options.restart_engine - host.restarts_left + 1
        log.error("The engine has ended and is started again (%d of %d): %s", number, options.restart_engine, end)
        host.metrics.restarted()
        # The first engine's progress was shown above a terminal's prompt that is in use now.
        launch = EngineProcess(options.launch.command, options.launch.load_timeout_s)
        config = _engine_config(options, _vocabulary(options))
        try:
            engine = await _unless(stopped, EngineClient.start(config, launch))
        except MicroscaleError as error:
            log.error("The engine did not start again: %s", error)
            host.replace_engine(None)
            continue
        if engine is None:
            return None
        host.replace_engine(engine)
        log.info("The engine is ready again.")


async def _unless(stopped: asyncio.Task[object], work: Coroutine[object, object, T]) -> T | None:
    """The result of ``work``; ``None``, and the work is cancelled, if ``stopped`` comes first."""
    task = asyncio.create_task(work)
    await asyncio.wait((task, stopped), return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        return task.result()
    task.cancel()
    await asyncio.wait((task,))
    return None


async def _engine_ended(host: Host, end: EngineDied) -> int:
    host.closing = end
    host.wake_waiting()
    log.error("The engine has ended, so the server stops: %s", end)
    await asyncio.sleep(ENGINE_ENDED_S)
    return 1


async def _drain(host: Host, within_s: float, stop: asyncio.Event) -> int:
    """Let open requests finish, and end the engine within this time whatever it does. A second signal aborts them."""
    stop.clear()
    host.closing = error_texts.shutting_down()
    host.wake_waiting()
    if host.engine.why_ended is not None:
        log.info("Stopped while the engine was being started again.")
        return 0
    requests_s = max(within_s / 2, within_s - CLOSING_S)
    log.info("Shutting down: open requests have %g s to finish. A second signal stops immediately.", requests_s)
    draining = asyncio.create_task(host.engine.drain(requests_s))
    again = asyncio.create_task(stop.wait())
    await asyncio.wait((draining, again), return_when=asyncio.FIRST_COMPLETED)
    again.cancel()
    if not draining.done():
        draining.cancel()
        await asyncio.wait((draining,))
        await host.engine.close()
        log.info("Stopped immediately.")
        return 1
    try:
        num_aborted = draining.result()
    except EngineDied as error:
        log.error("The engine did not drain: %s", error)
        return 1
    log.info("Stopped; %d requests were aborted.", num_aborted)
    return 0

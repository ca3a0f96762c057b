"""An engine that speaks messages: what the engine process serves.

``load`` makes the real one from an ``EngineConfig``. A request with a grammar goes to the engine when a thread has
compiled the grammar, so that no step of the others waits for that.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from msgspec.structs import replace

from microscale.engine.config import EngineConfig
from microscale.engine.engine import Engine
from microscale.engine.grammar import Matcher, Vocabulary
from microscale.engine.loading.build import Laps, Queueing, build_engine
from microscale.engine.loading.prepare import prepare
from microscale.engine.loading.warming import kernels_ready
from microscale.engine.output import Output, Stats
from microscale.engine.predictions import CPU_STEP_S
from microscale.engine.protocol.messages import Ready, Submit
from microscale.engine.request import Finish, Request
from microscale.errors import MicroscaleError, QueueFull, Unsupported
from microscale.kernels.compiling.warming import LateKernels

if TYPE_CHECKING:
    from microscale.engine.ranks.leader import RankTeam

log = logging.getLogger(__name__)
MAX_COMPILING = 32
"""Requests whose grammars wait to be compiled; fewer than compiled grammars are kept."""
WAIT_S = 0.01
"""How long a step without other work waits for a grammar."""


class Service:
    """An engine, and the requests whose grammars are being compiled."""

    def __init__(
        self,
        engine: Engine,
        ready: Ready,
        late: LateKernels | None = None,
        team: RankTeam | None = None,
        step_limit_s: float = CPU_STEP_S,
    ) -> None:
        """``late``: counts what is compiled or loaded from now on. ``team``: the ranks that run the model together.
        ``step_limit_s``: how long a step may take before the engine counts as hung."""
        self.ready = ready
        self.team = team
        self.step_limit_s = step_limit_s
        self._engine = engine
        self._late = late or LateKernels()
        self._open: set[str] = set()
        self._compiler = ThreadPoolExecutor(1, "grammar")
        self._compiling: dict[str, tuple[Request, Future[Matcher]]] = {}

    @property
    def has_work(self) -> bool:
        return self._engine.has_work or bool(self._compiling)

    def before_compiling(self, report: Callable[[], None]) -> None:
        """Call ``report`` before a step compiles or loads a kernel."""
        self._late.announce(report)

    def submit(self, message: Submit) -> None:
        """Queue a request, or raise why not."""
        request_id, grammar = message.request_id, message.params.grammar
        request = Request(request_id, message.prompt, message.params, message.priority, message.cache_salt)
        if grammar is not None and self._engine.grammars is not None:
            if len(self._compiling) >= MAX_COMPILING:
                raise QueueFull(f"{MAX_COMPILING} grammars wait to be compiled already; try again later.")
            self._compiling[request_id] = request, self._compiler.submit(self._engine.grammars.matcher, grammar)
        else:
            self._engine.submit(request)
        self._open.add(request_id)

    def abort(self, request_id: str) -> None:
        self._open.discard(request_id)
        waiting = self._compiling.pop(request_id, None)
        if waiting is not None:
            waiting[1].cancel()
        else:
            self._engine.abort(request_id)

    def step(self) -> list[Output]:
        outputs = self._admit() if self._compiling else []
        outputs += self._engine.step()
        self._open.difference_update(output.request_id for output in outputs if output.finish is not None)
        return outputs

    def idle(self) -> bool:
        return self._engine.idle()

    def _admit(self) -> list[Output]:
        """Submit the requests whose grammars are compiled; the outputs of those that are refused."""
        if not self._engine.has_work:
            wait([compiled for _, compiled in self._compiling.values()], WAIT_S, FIRST_COMPLETED)
        refused = []
        for request_id, (request, compiled) in list(self._compiling.items()):
            if not compiled.done():
                continue
            del self._compiling[request_id]
            try:
                self._engine.submit(request, compiled.result())
            except MicroscaleError as error:
                refused.append(Output(request_id, None, finish=Finish.ERROR, error=error))
        return refused

    def abort_all(self) -> list[Output]:
        """End the requests that are left, each with a last output."""
        aborted = sorted(self._open)
        for request_id in aborted:
            self.abort(request_id)
        return [Output(request_id, None, finish=Finish.ABORT) for request_id in aborted]

    def stats(self) -> Stats:
        late = self._late
        return replace(self._engine.stats(), kernels_compiled_late=late.compiled, kernels_loaded_late=late.loaded)


def load(config: EngineConfig, on_progress: Callable[..., None]) -> Service:
    """The real engine. ``on_progress`` gets the bytes that are loaded and their total; with ``kernels``, kernels."""
    try:
        return _load(config, on_progress)
    except torch.OutOfMemoryError as error:
        raise Unsupported(
            f"The GPU ran out of memory while {config.model} was loaded ({str(error).partition('. ')[0]}); another "
            "program may have taken memory since it was measured: end that, or lower --gpu-memory-utilization."
        ) from error


def _load(config: EngineConfig, on_progress: Callable[..., None]) -> Service:
    laps = Laps()
    queueing = Queueing(config.max_queue, config.prefix_caching)
    vocabulary = None
    if config.vocabulary:
        vocabulary = Vocabulary(config.vocabulary, config.control_tokens, config.split_pattern)
    prepared = prepare(config)
    laps("device and plan")
    cache = None if config.kernel_cache is None else Path(config.kernel_cache)
    with kernels_ready(prepared, cache, lambda done, total: on_progress(done, total, kernels=True)):
        built = build_engine(
            prepared, queueing, on_progress, enforce_eager=config.enforce_eager, vocabulary=vocabulary, laps=laps
        )
    laps("waiting for kernels")
    # Captures graphs, in which nothing may be loaded: after the kernels are.
    built.engine.prepare(stand_ins=True)
    laps("graphs")
    log.info("The engine is ready: %s.", laps)
    model = built.config
    ready = Ready(model.vocab_size, built.max_model_len, model.eos_token_ids, built.plan)
    late = LateKernels()
    late.watch()
    return Service(built.engine, ready, late, prepared.team, built.step_limit_s)

"""An engine that speaks messages: what the engine process serves.

``load`` makes the real one of an ``EngineConfig``. Requests are known by number outside and by id inside. One with a
grammar is handed to the engine when a thread has compiled that, so that no step of the others waits for it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path

from microscale.compiling.loading import LateKernels
from microscale.engine.engine import Engine
from microscale.engine.grammar import Matcher, Vocabulary
from microscale.engine.loading.build import Queueing, build_engine
from microscale.engine.loading.laps import Laps
from microscale.engine.loading.prepare import prepare
from microscale.engine.loading.team import Team
from microscale.engine.loading.warming import kernels_ready
from microscale.engine.output import Output
from microscale.engine.process.config import load_options
from microscale.engine.process.convert import request_of, stats_reply, to_wire
from microscale.engine.process.messages import EngineConfig, Ready, RequestOutput, StatsReply, Submit
from microscale.engine.request import Finish, Request
from microscale.errors import MicroscaleError, QueueFull

log = logging.getLogger(__name__)
MAX_COMPILING = 32
"""Requests whose grammars wait to be compiled; fewer than compiled grammars are kept."""
WAIT_S = 0.01
"""How long a step without other work waits for a grammar."""


class Service:
    """An engine and the numbers of its requests."""

    def __init__(self, engine: Engine, ready: Ready, late: LateKernels | None = None, team: Team | None = None) -> None:
        """``late``: counts what is compiled or loaded from now on. ``team``: the ranks that run the model together."""
        self.ready = ready
        self.team = team
        self._engine = engine
        self._late = late or LateKernels()
        self._ids: dict[int, str] = {}
        self._numbers: dict[str, int] = {}
        self._compiler = ThreadPoolExecutor(1, "grammar")
        self._compiling: dict[int, tuple[Request, Future[Matcher]]] = {}

    @property
    def has_work(self) -> bool:
        return self._engine.has_work or bool(self._compiling)

    def submit(self, message: Submit) -> None:
        """Queue a request, or raise why not."""
        request = request_of(message)
        if request.params.grammar is not None and self._engine.grammars is not None:
            if len(self._compiling) >= MAX_COMPILING:
                raise QueueFull(f"{MAX_COMPILING} grammars wait to be compiled already; try again later.")
            compiled = self._compiler.submit(self._engine.grammars.matcher, request.params.grammar)
            self._compiling[message.number] = request, compiled
        else:
            self._engine.submit(request)
        self._ids[message.number] = message.request_id
        self._numbers[message.request_id] = message.number

    def abort(self, number: int) -> None:
        request_id = self._ids.pop(number, None)
        if request_id is not None:
            del self._numbers[request_id]
            waiting = self._compiling.pop(number, None)
            if waiting is not None:
                waiting[1].cancel()
            else:
                self._engine.abort(request_id)

    def step(self) -> list[RequestOutput]:
        refused = self._admit() if self._compiling else []
        return refused + [self._told(output) for output in self._engine.step()]

    def idle(self) -> bool:
        return self._engine.idle()

    def _admit(self) -> list[RequestOutput]:
        """Hand on what is compiled; the last words to those that are refused."""
        if not self._engine.has_work:
            wait([compiled for _, compiled in self._compiling.values()], WAIT_S, FIRST_COMPLETED)
        refused = []
        for number, (request, compiled) in list(self._compiling.items()):
            if not compiled.done():
                continue
            del self._compiling[number]
            try:
                self._engine.submit(request, compiled.result())
            except MicroscaleError as error:
                refused.append(Output(request.request_id, None, finish=Finish.ERROR, error=error))
        return [self._told(output) for output in refused]

    def abort_all(self) -> list[RequestOutput]:
        """End what is left, each with a last word."""
        numbers = list(self._ids)
        for number in numbers:
            self.abort(number)
        return [RequestOutput(number, None, finish=Finish.ABORT.value) for number in numbers]

    def stats(self) -> StatsReply:
        late = self._late
        return stats_reply(
            replace(self._engine.stats(), kernels_compiled_late=late.compiled, kernels_loaded_late=late.loaded)
        )

    def _told(self, output: Output) -> RequestOutput:
        number = self._numbers[output.request_id]
        if output.finish is not None:
            del self._ids[number], self._numbers[output.request_id]
        return to_wire(number, output)


def load(config: EngineConfig, on_progress: Callable[..., None]) -> Service:
    """The real engine. ``on_progress`` hears how many bytes of all are there; with ``kernels``, how many kernels."""
    laps = Laps()
    queueing = Queueing(config.max_queue, config.prefix_caching)
    vocabulary = None
    if config.vocabulary:
        vocabulary = Vocabulary(config.vocabulary, config.control_tokens, config.split_pattern)
    prepared = prepare(load_options(config))
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
    return Service(built.engine, ready, late, prepared.team)

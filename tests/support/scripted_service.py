"""An engine process without torch that says what it is told to: for tests of the server, from HTTP to the last byte.

``EngineConfig.hf_overrides`` holds the scripts, lists of token ids; a request's seed chooses one, without a seed the
prompt is said again. The seeds below ask for trouble.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

from microscale.engine.process.messages import EngineConfig, Ready, RequestOutput, Sampling, StatsReply, Submit
from microscale.errors import BadRequest, QueueFull

CRASH = 900
REFUSE = 901
NOT_FINITE = 902
VOCAB = 600


class Scripted:
    def __init__(self, scripts: list[list[int]], step_s: float, max_model_len: int, plan: str) -> None:
        self.ready = Ready(VOCAB, max_model_len, (), plan)
        self._scripts = scripts
        self._step_s = step_s
        self._open: dict[int, tuple[Iterator[int], Sampling, Iterator[int], int]] = {}
        self._graphs = 0
        """Captured so far: one for each request, and for every second one it waited."""

    def idle(self) -> bool:
        return False

    @property
    def has_work(self) -> bool:
        return bool(self._open)

    def submit(self, message: Submit) -> None:
        seed = message.params.seed
        if seed == REFUSE:
            raise QueueFull("1 request waits, and the queue holds 1.")
        if not message.prompt:
            raise BadRequest("The prompt is empty; give at least one token id.")
        self._graphs += 1
        tokens = itertools.cycle(self.script(message))
        self._open[message.number] = (tokens, message.params, itertools.count(1), len(message.prompt) // 2)

    def script(self, message: Submit) -> list[int]:
        seed = message.params.seed
        return list(message.prompt) if seed is None or seed >= len(self._scripts) else self._scripts[seed]

    def abort(self, number: int) -> None:
        self._open.pop(number, None)

    def step(self) -> list[RequestOutput]:
        time.sleep(self._step_s)
        return [self._advance(number) for number in list(self._open)]

    def _advance(self, number: int) -> RequestOutput:
        tokens, params, count, cached = self._open[number]
        if params.seed == CRASH:
            raise ZeroDivisionError("it was asked for")
        if params.seed == NOT_FINITE:
            del self._open[number]
            return RequestOutput(
                number, None, finish="error", error=("BadLogits", "The model's logits are not finite.")
            )
        if not params.max_tokens:  # the prompt alone was asked for
            del self._open[number]
            return RequestOutput(number, None, finish="length", num_cached=cached)
        token = next(tokens)
        finish = "length" if next(count) == params.max_tokens else None
        if token in params.stop_token_ids:
            finish = "stop"
        if finish is not None:
            del self._open[number]
        top = tuple((other, -0.5 - other / VOCAB) for other in range(params.logprobs or 0))
        return RequestOutput(number, token, -0.5, top, finish, num_cached=cached)  # type: ignore[arg-type]

    def abort_all(self) -> list[RequestOutput]:
        outputs = [RequestOutput(number, None, finish="abort") for number in self._open]
        self._open.clear()
        return outputs

    def stats(self) -> StatsReply:
        graphs = self._graphs
        return StatsReply(
            0, len(self._open), 0, 10, 5, {"full": (1, 4)},
            graphs=graphs, graphs_waited_for=graphs // 2, graph_stand_ins=3 * graphs,
        )  # fmt: skip


def load(config: EngineConfig, on_progress: Callable[[int, int], None]) -> Scripted:
    on_progress(1, 1)
    told: dict[str, Any] = config.hf_overrides
    return Scripted(told["scripts"], told["step_s"], config.max_model_len or 4096, told.get("plan", "scripted"))

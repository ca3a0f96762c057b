"""An engine process without torch that says what it is told to: for tests of the server, from HTTP to the last byte.

``EngineConfig.hf_overrides`` holds the scripts, lists of token ids; a request's seed chooses one, without a seed the
prompt is said again. The seeds below ask for trouble.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

from microscale.engine.config import EngineConfig
from microscale.engine.output import Output, Stats
from microscale.engine.protocol.messages import Ready, Submit
from microscale.engine.request import Finish
from microscale.engine.sampling_params import SamplingParams
from microscale.errors import BadLogits, BadRequest, QueueFull

CRASH = 900
REFUSE = 901
NOT_FINITE = 902
VOCAB = 600


class Scripted:
    def __init__(self, scripts: list[list[int]], step_s: float, max_model_len: int, plan: str) -> None:
        self.ready = Ready(VOCAB, max_model_len, (), plan)
        self._scripts = scripts
        self._step_s = step_s
        self._open: dict[str, tuple[Iterator[int], SamplingParams, Iterator[int], int]] = {}
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
        self._open[message.request_id] = (tokens, message.params, itertools.count(1), len(message.prompt) // 2)

    def script(self, message: Submit) -> list[int]:
        seed = message.params.seed
        return list(message.prompt) if seed is None or seed >= len(self._scripts) else self._scripts[seed]

    def abort(self, request_id: str) -> None:
        self._open.pop(request_id, None)

    def step(self) -> list[Output]:
        time.sleep(self._step_s)
        return [self._advance(request_id) for request_id in list(self._open)]

    def _advance(self, request_id: str) -> Output:
        tokens, params, count, cached = self._open[request_id]
        if params.seed == CRASH:
            raise ZeroDivisionError("it was asked for")
        if params.seed == NOT_FINITE:
            del self._open[request_id]
            return Output(request_id, None, finish=Finish.ERROR, error=BadLogits("The model's logits are not finite."))
        if not params.max_tokens:  # the prompt alone was asked for
            del self._open[request_id]
            return Output(request_id, None, finish=Finish.LENGTH, num_cached=cached)
        token = next(tokens)
        finish = Finish.LENGTH if next(count) == params.max_tokens else None
        if token in params.stop_token_ids:
            finish = Finish.STOP
        if finish is not None:
            del self._open[request_id]
        top = tuple((other, -0.5 - other / VOCAB) for other in range(params.logprobs or 0))
        return Output(request_id, token, -0.5, top, finish, num_cached=cached)

    def abort_all(self) -> list[Output]:
        outputs = [Output(request_id, None, finish=Finish.ABORT) for request_id in self._open]
        self._open.clear()
        return outputs

    def stats(self) -> Stats:
        graphs = self._graphs
        return Stats(
            0, len(self._open), 0, 10, 5, {"full": (1, 4)},
            graphs=graphs, graphs_waited_for=graphs // 2, graph_stand_ins=3 * graphs,
        )  # fmt: skip


def load(config: EngineConfig, on_progress: Callable[[int, int], None]) -> Scripted:
    on_progress(1, 1)
    told: dict[str, Any] = config.hf_overrides
    return Scripted(told["scripts"], told["step_s"], config.max_model_len or 4096, told.get("plan", "scripted"))

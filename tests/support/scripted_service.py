"""An engine process without torch that follows a script: for tests of the server, from HTTP to the last byte.

``EngineConfig.hf_overrides`` has the scripts, lists of token ids, and a request's seed chooses one. Without a seed the
prompt is repeated. The seeds below cause errors. A request's priority is its number of milliseconds per token.

With ``rules``, pairs of a regular expression and a turn, the first rule that matches the prompt's text decides: for
clients whose prompts are longer, or whose questions are harder, than the embedded model can handle.
"""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

from microscale.engine.config import EngineConfig
from microscale.engine.output import Output, Stats
from microscale.engine.protocol.messages import Ready, Submit
from microscale.engine.request import Finish
from microscale.engine.sampling_params import SamplingParams
from microscale.errors import BadLogits, BadRequest, QueueFull
from microscale.text.harmony import tokens as names
from support.tiny_tokenizers import tiny

CRASH = 900
REFUSE = 901
NOT_FINITE = 902
VOCAB = 600
OTHERWISE = "<|channel|>final<|message|>No rule fits this prompt.<|return|>"


class Scripted:
    team = None
    step_limit_s = 300.0

    def __init__(self, scripts: list[list[int]], step_s: float, max_model_len: int, plan: str) -> None:
        self.ready = Ready(VOCAB, max_model_len, (), plan)
        self._scripts = scripts
        self._step_s = step_s
        self._open: dict[str, tuple[Iterator[int], SamplingParams, Iterator[int], int]] = {}
        self._pauses_ms: dict[str, int] = {}
        self._graphs = 0
        """One per request; every second request waited for its graph."""

    def before_compiling(self, report: Callable[[], None]) -> None: ...

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
        self._pauses_ms[message.request_id] = message.priority

    def script(self, message: Submit) -> list[int]:
        seed = message.params.seed
        return list(message.prompt) if seed is None or seed >= len(self._scripts) else self._scripts[seed]

    def abort(self, request_id: str) -> None:
        self._open.pop(request_id, None)

    def step(self) -> list[Output]:
        time.sleep(max([self._step_s, *(self._pauses_ms[request_id] / 1000 for request_id in self._open)]))
        return [self._advance(request_id) for request_id in list(self._open)]

    def _advance(self, request_id: str) -> Output:
        tokens, params, count, cached = self._open[request_id]
        if params.seed == CRASH:
            raise ZeroDivisionError("the seed requests it")
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


class Ruled(Scripted):
    """Answers by the first rule that matches the prompt."""

    def __init__(self, rules: list[tuple[str, str]], *rest: Any) -> None:
        super().__init__([], *rest)
        self._tokenizer = tiny()
        self._tokenizer.protect(names.NAMES)
        self._rules = [(re.compile(pattern, re.DOTALL), turn) for pattern, turn in [*rules, (r"\A", OTHERWISE)]]

    def script(self, message: Submit) -> list[int]:
        prompt = self._tokenizer.decode(message.prompt, show_control=True)
        turn = next(turn for pattern, turn in self._rules if pattern.search(prompt))
        return self._tokenizer.encode_with_control(turn)


def load(config: EngineConfig, on_progress: Callable[[int, int], None]) -> Scripted:
    on_progress(1, 1)
    given: dict[str, Any] = config.hf_overrides
    common = (given["step_s"], config.max_model_len or 4096, given.get("plan", "scripted"))
    rules = given.get("rules")
    return Ruled(rules, *common) if rules else Scripted(given["scripts"], *common)

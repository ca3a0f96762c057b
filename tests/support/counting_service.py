"""An engine process without torch, which starts in a fifth of a second: for tests of how such a process lives and dies.

Each request is answered by its last prompt token counted up. ``EngineConfig.model`` says what goes wrong.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from microscale.engine.config import EngineConfig
from microscale.engine.output import Output, Stats
from microscale.engine.protocol.messages import Ready, Submit
from microscale.engine.request import Finish
from microscale.errors import BadCheckpoint

STEP_S = 0.005


class Counting:
    team = None
    step_limit_s = 300.0

    def __init__(self, fault: str) -> None:
        self.ready = Ready(1000, 1000, (), "counting")
        self._fault = fault
        if fault == "hangs in a step":
            self.step_limit_s = 0.5
        self._open: dict[str, tuple[int, int]] = {}
        """Request → next token, tokens left."""

    def before_compiling(self, report: Callable[[], None]) -> None: ...

    def idle(self) -> bool:
        if self._fault == "works ahead":
            time.sleep(STEP_S)
        return self._fault == "works ahead"

    @property
    def has_work(self) -> bool:
        return bool(self._open)

    def submit(self, message: Submit) -> None:
        self._open[message.request_id] = (message.prompt[-1] + 1, message.params.max_tokens)

    def abort(self, request_id: str) -> None:
        self._open.pop(request_id, None)

    def step(self) -> list[Output]:
        if self._fault != "hurries":
            time.sleep(3600 if self._fault == "hangs in a step" else STEP_S)
        outputs = []
        for request_id, (token, left) in list(self._open.items()):
            if self._fault == "fails in a step" and token == 5:
                raise ZeroDivisionError("five is too much")
            top = ((token, -0.5),) * 64 if self._fault == "hurries" else ()
            outputs.append(Output(request_id, token, -0.5, top, Finish.LENGTH if left == 1 else None))
            self._open[request_id] = (token + 1, left - 1)
            if left == 1:
                del self._open[request_id]
        return outputs

    def abort_all(self) -> list[Output]:
        outputs = [Output(request_id, None, finish=Finish.ABORT) for request_id in self._open]
        self._open.clear()
        return outputs

    def stats(self) -> Stats:
        return Stats(0, len(self._open), 0, 0, 0, {})


def load(config: EngineConfig, on_progress: Callable[[int, int], None]) -> Counting:
    on_progress(1, 2)
    match config.model:
        case "crashes at load":
            raise ZeroDivisionError("no such thing")
        case "is damaged":
            raise BadCheckpoint("model.safetensors is cut off; download it again.")
        case "hangs at load":
            time.sleep(3600)
    on_progress(2, 2)
    return Counting(config.model)

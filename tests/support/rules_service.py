"""An engine process that answers by rules: the first whose pattern is found in the prompt's text says its turn. For
clients whose prompts are longer, or whose questions are harder, than the embedded model can take.

``EngineConfig.hf_overrides`` holds the rules, pairs of a regular expression and a turn with its control tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from microscale.engine.config import EngineConfig
from microscale.engine.protocol.messages import Submit
from microscale.text.harmony import tokens as names
from support.scripted_service import Scripted
from support.tiny_tokenizers import tiny

OTHERWISE = "<|channel|>final<|message|>No rule fits this prompt.<|return|>"


class Ruled(Scripted):
    def __init__(self, rules: list[tuple[str, str]], *rest: Any) -> None:
        super().__init__([], *rest)
        self._tokenizer = tiny()
        self._tokenizer.protect(names.NAMES)
        self._rules = [(re.compile(pattern, re.DOTALL), turn) for pattern, turn in [*rules, (r"\A", OTHERWISE)]]

    def script(self, message: Submit) -> list[int]:
        prompt = self._tokenizer.decode(message.prompt, show_control=True)
        turn = next(turn for pattern, turn in self._rules if pattern.search(prompt))
        return self._tokenizer.encode_with_control(turn)


def load(config: EngineConfig, on_progress: Callable[[int, int], None]) -> Ruled:
    on_progress(1, 1)
    told: dict[str, Any] = config.hf_overrides
    return Ruled(told["rules"], told["step_s"], config.max_model_len or 4096, told.get("plan", "scripted"))

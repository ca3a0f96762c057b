"""What a step costs by the number of tokens in it, for choosing the length of drafts.

A step that verifies K drafts for each of S sequences costs about as much as decoding S * (K + 1) sequences. How that
grows depends mostly on how many experts the tokens read, so one curve per measured model is enough: a model that was
not measured uses the curve of the model whose tokens read the most similar share of their experts. All times are in
milliseconds on the H200 that was measured. Only ratios between them are used, and on other GPUs they are similar as
long as decoding is limited by memory. ``draft_costs.json`` holds the numbers and their source.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from microscale.hardware.cards import Gpu
from microscale.hardware.gpu import known

FILE = Path(__file__).parent / "draft_costs.json"


@dataclass(frozen=True)
class StepCurve:
    """The time of a step by its number of tokens."""

    model: str
    tokens: tuple[int, ...]
    ms: tuple[float, ...]

    def at(self, tokens: int) -> float:
        """Interpolated in log(tokens) between measured points, and linear beyond the last one."""
        right = bisect_left(self.tokens, tokens)
        if right == 0:
            return self.ms[0]
        if right == len(self.tokens):
            slope = (self.ms[-1] - self.ms[-2]) / (self.tokens[-1] - self.tokens[-2])
            return self.ms[-1] + slope * (tokens - self.tokens[-1])
        low, high = self.tokens[right - 1], self.tokens[right]
        part = math.log(tokens / low) / math.log(high / low)
        return self.ms[right - 1] + part * (self.ms[right] - self.ms[right - 1])


@cache
def _data() -> dict[str, Any]:
    data: dict[str, Any] = json.loads(FILE.read_text())
    return data


def step_curve(num_experts: int, experts_per_token: int) -> StepCurve:
    """The measured curve for the most similar number of experts per token."""

    def distance(row: dict[str, Any]) -> float:
        return abs(math.log(num_experts / experts_per_token * row["experts_per_token"] / row["experts"]))

    row = min(_data()["rows"], key=distance)
    return StepCurve(row["model"], tuple(_data()["tokens"]), tuple(row["ms"]))


def head_us(read_bytes: float, gpu: Gpu) -> float:
    """How long a pass of a draft head that reads so many bytes takes."""
    gbs: float = _data()["head_gbs"]
    return read_bytes / gbs / 1e3 * known(_data()["gpu"]).bandwidth_gbs / gpu.bandwidth_gbs


def host_ms(sequences: int, drafts: int, gpu: Gpu) -> float:
    """How long the GPU waits for the host where a step with ``drafts`` drafts must be read before the next one is
    launched. It takes as long on any GPU, so in units of the H200's steps it is shorter on a GPU with slower memory."""
    if gpu.is_cpu:
        return 0.0
    times = _data()["host_ms"]
    ms: float = times["step"] + times["sequence"] * sequences + times["draft"] * drafts
    return ms * gpu.bandwidth_gbs / known(_data()["gpu"]).bandwidth_gbs

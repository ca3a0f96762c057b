"""Counts the Python calls within Microscale of one decoding step, outside of the model's ``forward``.

PYTHONPATH=src python tests/support/step_calls.py [--list]
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

from microscale.engine.config import EngineConfig
from microscale.engine.engine import Engine
from microscale.engine.limits import Limits
from microscale.engine.loading.build import assemble
from microscale.engine.request import Request
from microscale.engine.sampling_params import SamplingParams
from microscale.models.config import LayerKind
from support.loading import load_model

WARM_STEPS, COUNTED_STEPS = 20, 32
"""Steps before the count, and steps counted: two pages of 16 tokens begin among these."""


class Calls:
    """A profile function that counts calls, except those inside the model's forward pass."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()
        self._inside: FrameType | None = None

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        if self._inside is not None:
            if event == "return" and frame is self._inside:
                self._inside = None
        elif event == "call":
            code = frame.f_code
            if "/microscale/" in code.co_filename:
                self.counts[code.co_filename, code.co_qualname] += 1
            if code.co_name == "forward" and "/models/" in code.co_filename:
                self._inside = frame


def make_engine() -> Engine:
    model = load_model(EngineConfig("gpt-oss-tiny", load_format="dummy", device="cpu"))
    limits = Limits(model.page_size, model.config.sliding_window)
    return assemble(model, limits, dict.fromkeys(LayerKind, 64))


def count_calls() -> Counter[tuple[str, str]]:
    """Calls of ``COUNTED_STEPS`` decoding steps of one greedy request, by file and function."""
    engine = make_engine()
    engine.submit(Request("one", list(range(5, 12)), SamplingParams(max_tokens=200, ignore_eos=True)))
    for _ in range(WARM_STEPS):
        engine.step()
    calls = Calls()
    for _ in range(COUNTED_STEPS):
        sys.setprofile(calls)
        engine.step()
        sys.setprofile(None)
    return calls.counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list", action="store_true", help="list the functions")
    counts = count_calls()
    files = {name for name, _ in counts}
    print(f"{sum(counts.values()) / COUNTED_STEPS:.1f} calls in {len(files)} files for each decoding step")
    if parser.parse_args().list:
        for (name, function), count in counts.most_common():
            print(f"{count / COUNTED_STEPS:6.2f}  {Path(name).name}: {function}")


if __name__ == "__main__":
    main()

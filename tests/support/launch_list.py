"""Prints every launch of a set of steps, in order: kernel, grid, arguments, constants, options. No GPU is needed.

It listens to ``launch``, which every kernel starts through, so two lists can be compared:

    PYTHONPATH=<one tree>/src python tests/support/launch_list.py > one
    PYTHONPATH=<another>/src python tests/support/launch_list.py > another
    diff one another
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from microscale.hardware import known
from microscale.kernels import layouts
from microscale.kernels.launch import Launch, taken_by
from microscale.models import dummy_weights
from microscale.models.batch import ForwardBatch, LogitRows
from microscale.models.config import LayerKind
from microscale.models.families import build_model, open_weights
from microscale.planning import ops as backend
from microscale.planning.ops import Activations, AttentionBatch, Bias, History, Ops, SamplingBatch
from microscale.planning.precision import make_precision

PREFERENCE: Any = vars(backend).get("Preference") or vars(backend)["Wish"]
LAYERS = {"gpt-oss-20b": 4, "gpt-oss-120b": 2, "gemma-4-26b-a4b": 6, "qwen3-30b-a3b": 2, "demo": 2}
PRECISIONS = {
    "exact": {},
    "balanced": {"name": "balanced"},
    "fast": {"name": "fast"},
    "fp8": {"layer_formats": ["qkv=fp8", "o=fp8", "lm_head=fp8"], "kv_cache_dtype": "fp8"},
}
# tokens, sequences, the most new tokens of a sequence, pages of a table, rows of logits
STEPS = [
    *((n, n, 1, 64, None) for n in (1, 2, 3, 8, 9, 16, 17, 32, 33, 48, 64, 65, 100, 128, 256, 300)),
    *((1, 1, 1, pages, None) for pages in (1, 8, 128, 129, 8192)),
    (2, 1, 2, 128, None),
    (40, 1, 40, 128, 1),
    (300, 3, 200, 256, 3),
    (2048, 1, 2048, 128, 1),
    (2048, 1, 2048, 128, None),
    (8192, 4, 8000, 512, 4),
]


def meta(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def make_batch(tokens: int, sequences: int, longest: int, pages: int, rows: int | None) -> ForwardBatch:
    def queries(count: int, longest: int) -> dict[LayerKind, AttentionBatch]:
        return dict.fromkeys(LayerKind, AttentionBatch(meta(count + 1), meta(count), meta(count, pages), longest))

    wide = meta(2, tokens, dtype=torch.int64)
    logits = None if rows is None else LogitRows(meta(rows, dtype=torch.int64), queries(rows, 1))
    return ForwardBatch(wide[0], wide[1], queries(sequences, longest), dict.fromkeys(LayerKind, wide[1]), logits)


def sampling_batches(rows: int, vocab: int) -> Iterator[SamplingBatch]:
    numbers, wide = meta(6, rows, dtype=torch.float32), meta(2, rows, dtype=torch.int64)
    # By name ``Any``: how many numbers there are, mypy cannot count.
    make: Any = partial(SamplingBatch, numbers[0], meta(rows), *numbers[1:], *wide)
    yield make(draws=False, filters=False)
    yield make(draws=True, filters=False)
    yield make(draws=True, filters=True, top_logprobs=3)
    history = History(meta(rows), meta(8, vocab))
    bias = Bias(meta(rows, 16), meta(rows, 16, dtype=torch.float32))
    yield make(draws=True, filters=True, history=history, bias=bias, allowed=meta(rows, -(-vocab // 32)))


def describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{tuple(value.shape)}{value.stride()}+{value.storage_offset()}"
    return repr(value)


def print_launch(started: Launch) -> bool:
    named = sorted({**started.constants, **started.options}.items())
    keywords = " ".join(f"{name}={describe(value)}" for name, value in named)
    arguments = " ".join(map(describe, started.arguments))
    print(f"    {started.fn.__module__}.{started.fn.__name__} {started.grid} [{arguments}] {keywords}")
    return False


def shapes_alone() -> None:
    """Let any commit of the package bind a model on ``meta``: nothing is drawn, and no number is looked at."""
    dummy_weights.RandomTensors._generator = lambda *_: None  # type: ignore[method-assign, assignment]
    if hasattr(layouts, "_check_numbers"):
        layouts._check_numbers = lambda *_: None
    isnan = Tensor.isnan
    Tensor.isnan = lambda x: torch.zeros(1, dtype=torch.bool) if x.is_meta else isnan(x)  # type: ignore[method-assign, assignment]


def print_steps(gpus: list[str], models: list[str]) -> None:
    for gpu in gpus:
        for name in models:
            for label, options in PRECISIONS.items():
                weights = open_weights(name, load_format="dummy", overrides={"num_hidden_layers": LAYERS[name]})
                ops = Ops(known(gpu), Activations.BF16, PREFERENCE(), make_precision(**options))  # type: ignore[arg-type]
                model = build_model(weights, ops, torch.device("meta"), 16, lambda: None)
                kv = model.new_cache(dict.fromkeys(LayerKind, 4))
                for step in STEPS:
                    print(gpu, name, label, *step)
                    logits = model.forward(make_batch(*step), kv)
                    for batch in sampling_batches(logits.values.shape[0], model.config.vocab_size):
                        model.sampling(logits.values, batch, logits)
                model.sampling.score(meta(3, model.config.vocab_size, dtype=torch.float32), meta(3), 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpu", nargs="*", default=["h200", "b200", "gb10", "rtx3090"])
    parser.add_argument("--model", nargs="*", default=list(LAYERS))
    chosen = parser.parse_args()
    shapes_alone()
    with taken_by(print_launch):
        print_steps(chosen.gpu, chosen.model)


if __name__ == "__main__":
    main()

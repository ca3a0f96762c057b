"""vLLM's own engine on a CPU, with the plug-in and without: the tokens are those of transformers.

Triton is off in vLLM's CPU build, so the experts run as plain torch: this shows the wiring and the arithmetic, in
vLLM's own processes, and not the kernels.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from microscale_lab.cases.errors import step
from support.cpu_flags import NEEDS_AMX
from support.tiny_checkpoints import tiny_config, write_hf
from support.tiny_gemma4 import (
    EXPERTS,
    FULL,
    SLIDING,
    random_gemma4,
    rounded,
    routers,
    tiny_gemma4,
    to_modelopt,
    transformers_gemma4,
    write_gemma4,
)
from support.truth import load_transformers

NUM_TOKENS = 12
MOST_DRAWN = 2000


@dataclass(frozen=True)
class Model:
    folder: Path
    prompts: list[list[int]]
    tokens: list[list[int]]


@contextmanager
def leads_of_routers(model: Any) -> Iterator[list[float]]:
    """Of each call, for its closest token: by how many steps of bf16 the last chosen expert leads the first that is
    not."""
    leads: list[float] = []

    def look(module: Any, given: Any, found: tuple[Tensor, Tensor, Tensor]) -> None:
        scores, chosen = found[0], found[2].shape[-1]
        best = scores.topk(chosen + 1).values
        lead = (best[..., chosen - 1] - best[..., chosen]) / scores.abs().amax(-1)
        leads.append(float(lead.min()) / step("bf16"))

    hooks = [part.register_forward_hook(look) for name, part in model.named_modules() if name.endswith("router")]
    assert hooks
    try:
        yield leads
    finally:
        for hook in hooks:
            hook.remove()


def follow(model: Any, prompt: list[int]) -> list[int] | None:
    """transformers' greedy tokens in float32, if each of them leads by more than bf16 can lose: a few roundings of the
    largest logit, and no token's experts change by a rounding or two. Else ``None``: others are right too."""
    ids = list(prompt)
    with leads_of_routers(model) as leads:
        for _ in range(NUM_TOKENS):
            with torch.no_grad():
                logits = model(torch.tensor([ids])).logits[0, -1]
            best = logits.topk(2)
            if best.values[0] - best.values[1] < 4 * step("bf16") * logits.abs().max() or min(leads) < 2:
                return None
            ids.append(int(best.indices[0]))
    return ids[len(prompt) :]


def with_truth(folder: Path, model: Any, vocab: int, lengths: Sequence[int]) -> Model:
    """Prompts of these lengths whose continuation is clear, and the continuations."""
    generator = torch.Generator().manual_seed(0)
    found = Model(folder, [], [])
    for length in lengths:
        drawn = (torch.randint(1, vocab, (length,), generator=generator).tolist() for _ in range(MOST_DRAWN))
        clear = ((prompt, tokens) for prompt in drawn if (tokens := follow(model, prompt)) is not None)
        prompt, tokens = next(clear)
        found.prompts.append(prompt)
        found.tokens.append(tokens)
    assert len({tuple(tokens) for tokens in found.tokens}) == len(lengths)
    return found


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> Model:
    # An intermediate of 96: two ranks have 48 each, which vLLM cuts into 64 and 32.
    config = tiny_config(
        layers=3, hidden=128, intermediate=96, heads=(4, 2), head_dim=64, experts=(6, 2), window=16,
        original_context=32, factor=8.0, vocab=400,
    )  # fmt: skip
    folder = write_hf(tmp_path_factory.mktemp("gpt_oss"), config, seed=3)
    return with_truth(folder, load_transformers(folder), config.vocab_size, (5, 6, 9, 14, 20, 26))


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Model:
    config = tiny_gemma4(
        kinds=(SLIDING, SLIDING, FULL), hidden=96, widths=(64, 96), sliding=(6, 3, 32), full=(6, 3, 64), shared=False,
        experts=(5, 2), window=8, softcap=None, fraction=0.5, tied=False, vocab=320,
    )  # fmt: skip
    tensors = random_gemma4(config, seed=5)
    # Dense layers stay bf16: vLLM has no MXFP8 for them on a CPU.
    dense = ["self_attn", "mlp"]
    ignore = routers(config) + [f"model.layers.{i}.{name}*" for i in range(config.num_layers) for name in dense]
    stored = to_modelopt(tensors, left_out=re.compile(rf"layers\.\d+\.({'|'.join(dense)})\."))
    folder = write_gemma4(tmp_path_factory.mktemp("gemma"), config, stored, ignore=ignore)
    truth = transformers_gemma4(config, rounded(tensors, "mxfp8", EXPERTS))
    return with_truth(folder, truth, config.vocab_size, (5, 6, 7, 8, 10, 12))


@dataclass(frozen=True)
class Run:
    tokens: list[list[int]]
    log: str


def run(model: Model, tmp_path: Path, environment: dict[str, str] | None = None, **options: object) -> Run:
    """The prompts through an engine of its own."""
    job, out = tmp_path / "job.json", tmp_path / "out.json"
    options = {"enforce_eager": True} | options
    job.write_text(
        json.dumps({"folder": str(model.folder), "prompts": model.prompts, "tokens": NUM_TOKENS, "options": options})
    )
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("generate.py")), str(job), str(out)],
        env={**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", **(environment or {})},
        cwd=tmp_path,
        text=True,
        capture_output=True,
        timeout=280,
        check=False,
    )
    log = done.stdout + done.stderr
    assert done.returncode == 0, log[-20000:]
    return Run(json.loads(out.read_text()), log)


OURS = "Microscale runs the experts"


def test_gpt_oss(gpt_oss: Model, tmp_path: Path) -> None:
    done = run(gpt_oss, tmp_path)
    assert done.tokens == gpt_oss.tokens
    assert done.log.count(OURS) == 1


@NEEDS_AMX
def test_gpt_oss_without_the_plugin(gpt_oss: Model, tmp_path: Path) -> None:
    """The same engine, untouched."""
    done = run(gpt_oss, tmp_path, {"MICROSCALE_VLLM": "off"})
    assert done.tokens == gpt_oss.tokens
    assert OURS not in done.log


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="a worker of vLLM takes a core")
@pytest.mark.parametrize("apart", [False, True], ids=["tensor parallel", "expert parallel"])
def test_two_workers(apart: bool, gpt_oss: Model, tmp_path: Path) -> None:
    environment = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    done = run(gpt_oss, tmp_path, environment, tensor_parallel_size=2, enable_expert_parallel=apart)
    assert done.tokens == gpt_oss.tokens
    assert done.log.count(OURS) == 2


def test_gemma_in_modelopt_mxfp8(gemma: Model, tmp_path: Path) -> None:
    """vLLM 0.32 alone has nothing to compare with here: its MXFP8 experts on a CPU want Triton."""
    done = run(gemma, tmp_path)
    assert done.tokens == gemma.tokens
    assert done.log.count(OURS) == 1

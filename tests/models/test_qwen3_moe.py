"""Qwen3-MoE against transformers in float32, on checkpoints written to disk in the published layout.

Experts are quantised as they load, so transformers has them after a turn through the format; all else stays BF16.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import Qwen3MoeForCausalLM

from microscale.backends.ops import Preference
from microscale.backends.precision import make_precision
from microscale.engine.generate import Generation
from microscale.engine.loading.memory import Workload
from microscale.engine.loading.options import LoadOptions
from microscale.engine.sampling_params import SamplingParams
from microscale.models.families import AnyModel
from microscale_lab.cases.errors import assert_close
from support.forward import all_logits, last_logits
from support.loading import load_model
from support.model_noise import model_noise
from support.tiny_qwen3_moe import (
    CASES,
    published,
    random_qwen3_moe,
    rounded,
    transformers_qwen3_moe,
    write_qwen3_moe,
)

NEW_TOKENS = 32
LENGTHS = (1, 23, 60)
NAMES = list(CASES)


@cache
def tensors_of(name: str) -> Mapping[str, Tensor]:
    return random_qwen3_moe(CASES[name], seed=NAMES.index(name))


@cache
def truth_of(name: str, fmt: str = "mxfp8") -> Qwen3MoeForCausalLM:
    return transformers_qwen3_moe(CASES[name], rounded(tensors_of(name), fmt))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("qwen3_moe")
    return {name: write_qwen3_moe(base / name, config, published(tensors_of(name))) for name, config in CASES.items()}


def prompts_for(name: str) -> list[list[int]]:
    generator = torch.Generator().manual_seed(len(name))
    return [torch.randint(0, CASES[name].vocab_size, (n,), generator=generator).tolist() for n in LENGTHS]


def logits_of(model: Qwen3MoeForCausalLM, sequences: list[list[int]]) -> list[Tensor]:
    """At every position of each sequence, one sequence at a time and without a KV cache."""
    with torch.inference_mode():
        return [model(torch.tensor([tokens]), use_cache=False).logits[0] for tokens in sequences]


def options_of(folder: Path, fmt: str = "mxfp8", page_size: int = 16) -> LoadOptions:
    precision = make_precision(layer_formats=(f"experts={fmt}",))
    workload = Workload(page_size=page_size)
    return LoadOptions(str(folder), device="cpu", dtype="float32", workload=workload, precision=precision)


def largest_difference(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """Over all prompts, relative to the range of the logits."""
    return max(float((a - b).abs().max() / (b.max() - b.min())) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("backend", "fmt", "page_size", "chunk"),
    [(None, "mxfp8", 16, 1000), (None, "mxfp4", 1, 7), ("reference", "mxfp8", 5, 33)],
)
def test_logits_are_those_of_the_quantised_experts(
    folders: dict[str, Path], name: str, backend: str | None, fmt: str, page_size: int, chunk: int
) -> None:
    prompts = prompts_for(name)
    model = load_model(replace(options_of(folders[name], fmt, page_size), preference=Preference(backend)))
    ours = all_logits(model, prompts, chunk)
    assert largest_difference(ours, logits_of(truth_of(name, fmt), prompts)) <= 2e-4


@pytest.mark.parametrize("chunk", [7, 1000])
def test_the_last_layer_runs_for_tokens_with_logits_only(folders: dict[str, Path], chunk: int) -> None:
    name = "as_published"
    prompts = prompts_for(name)
    model = load_model(options_of(folders[name]))
    whole = all_logits(model, prompts, 1000)
    found = last_logits(model, prompts, chunk, wanted=1)
    assert largest_difference(found, [logits[-1:] for logits in whole]) <= 2e-5


@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens_equal_transformers(folders: dict[str, Path], name: str) -> None:
    """By induction: over prompt and our tokens, transformers' largest logit is our next token at every position."""
    prompts = prompts_for(name)
    params = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
    completions = Generation(load_model(options_of(folders[name], page_size=3)), prompts, params, 20).run()
    sequences = [prompt + c.token_ids for prompt, c in zip(prompts, completions, strict=True)]
    for prompt, completion, logits in zip(prompts, completions, logits_of(truth_of(name), sequences), strict=True):
        wanted = logits[len(prompt) - 1 : -1]
        assert len(completion.token_ids) == NEW_TOKENS
        assert completion.token_ids == wanted.argmax(-1).tolist()
        logprobs = torch.log_softmax(wanted, -1).gather(1, torch.tensor(completion.token_ids)[:, None])
        torch.testing.assert_close(torch.tensor(completion.logprobs), logprobs[:, 0], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("key", "value"), [("rope_theta", 2e4), ("rms_norm_eps", 1e-2), ("num_experts_per_tok", 7)])
def test_a_wrong_constant_would_be_seen(folders: dict[str, Path], key: str, value: object) -> None:
    """The comparison has teeth: each of them moves the logits beyond the bound."""
    name = "as_published"
    prompts = prompts_for(name)
    ours = all_logits(load_model(replace(options_of(folders[name]), overrides={key: value})), prompts, 1000)
    assert largest_difference(ours, logits_of(truth_of(name), prompts)) > 2e-3


def test_bfloat16_is_near_float32(folders: dict[str, Path]) -> None:
    """Activations rounded to bfloat16 (step 2**-8) at every op of a few layers.

    With all experts used: a routing that a rounding turns is another answer, not a less exact one.
    """
    options = options_of(folders["yarn_all_experts"])
    prompts = prompts_for("yarn_all_experts")
    exact = all_logits(load_model(options), prompts, 1000)
    model = load_model(replace(options, dtype="bfloat16"))
    rough = all_logits(model, prompts, 1000)
    assert_close(torch.cat(rough), torch.cat(exact), worst=math.inf, rms=1.73 * model_noise(len(model.layers)))


def test_random_weights_run_on_every_backend() -> None:
    """What ``--load-format dummy`` makes of the tiny preset."""
    options = LoadOptions("qwen3-moe-tiny", load_format="dummy", device="cpu", dtype="float32")
    prompts = [list(range(1, 40)), [7]]

    def run(**changes: object) -> list[Tensor]:
        model: AnyModel = load_model(replace(options, **changes))  # type: ignore[arg-type]
        return all_logits(model, prompts, 16)

    assert largest_difference(run(), run(preference=Preference("reference"))) <= 2e-4

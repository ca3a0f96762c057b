"""Gemma 4 against transformers in float32, on checkpoints written to disk in the real layouts.

The prompts are longer than every window; batches hold unequal lengths. MXFP8 checkpoints are compared with
transformers' model of their own decoded numbers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import Gemma4ForCausalLM

from microscale.backends.ops import Preference
from microscale.backends.precision import make_precision
from microscale.engine.generate import Generation
from microscale.engine.loading.memory import Workload
from microscale.engine.loading.options import LoadOptions
from microscale.engine.sampling_params import SamplingParams
from microscale.models.families import AnyModel
from microscale.models.gemma4.config import PartialRope
from microscale.models.gemma4.model import partial_table
from microscale_lab.cases.errors import assert_close
from support.forward import all_logits, last_logits
from support.loading import load_model
from support.model_noise import model_noise
from support.tiny_gemma4 import (
    CASES,
    EXPERTS,
    MATRICES,
    random_gemma4,
    rounded,
    routers,
    to_modelopt,
    transformers_gemma4,
    write_gemma4,
)

NEW_TOKENS = 32
LENGTHS = (1, 23, 60)
NAMES = list(CASES)


@cache
def tensors_of(name: str) -> Mapping[str, Tensor]:
    return random_gemma4(CASES[name], seed=NAMES.index(name))


@cache
def truth_of(name: str) -> Gemma4ForCausalLM:
    return transformers_gemma4(CASES[name], rounded(tensors_of(name), "mxfp8", MATRICES))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """MXFP8 checkpoints, as modelopt writes them."""
    base = tmp_path_factory.mktemp("gemma4")
    return {
        name: write_gemma4(base / name, config, to_modelopt(tensors_of(name)), ignore=routers(config))
        for name, config in CASES.items()
    }


def prompts_for(name: str) -> list[list[int]]:
    generator = torch.Generator().manual_seed(len(name))
    return [torch.randint(0, CASES[name].vocab_size, (n,), generator=generator).tolist() for n in LENGTHS]


def logits_of(model: Gemma4ForCausalLM, sequences: list[list[int]]) -> list[Tensor]:
    """At every position of each sequence, one sequence at a time and without a KV cache."""
    with torch.inference_mode():
        return [model(torch.tensor([tokens]), use_cache=False).logits[0] for tokens in sequences]


def load(folder: Path, backend: str | None = None, page_size: int = 16, *formats: str) -> AnyModel:
    return load_model(
        LoadOptions(
            str(folder),
            device="cpu",
            dtype="float32",
            preference=Preference(backend),
            workload=Workload(page_size=page_size),
            precision=make_precision(layer_formats=formats),
        )
    )


def largest_difference(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """Over all prompts, relative to the range of the logits."""
    return max(float((a - b).abs().max() / (b.max() - b.min())) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("backend", "page_size", "chunk"), [(None, 16, 1000), (None, 1, 7), ("reference", 5, 33)])
def test_mxfp8_checkpoints_give_the_logits_of_their_decoded_weights(
    folders: dict[str, Path], name: str, backend: str | None, page_size: int, chunk: int
) -> None:
    prompts = prompts_for(name)
    ours = all_logits(load(folders[name], backend, page_size), prompts, chunk)
    assert largest_difference(ours, logits_of(truth_of(name), prompts)) <= 2e-4


@pytest.mark.parametrize("chunk", [7, 1000])
def test_the_last_layer_runs_for_tokens_with_logits_only(folders: dict[str, Path], chunk: int) -> None:
    prompts = prompts_for("shared_kv")
    model = load(folders["shared_kv"], None, 16)
    whole = all_logits(model, prompts, 1000)
    found = last_logits(model, prompts, chunk, wanted=1)
    assert largest_difference(found, [logits[-1:] for logits in whole]) <= 2e-5


@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens_equal_transformers(folders: dict[str, Path], name: str) -> None:
    """By induction: over prompt and our tokens, transformers' largest logit is our next token at every position."""
    prompts = prompts_for(name)
    params = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
    completions = Generation(load(folders[name], page_size=3), prompts, params, 20).run()
    sequences = [prompt + c.token_ids for prompt, c in zip(prompts, completions, strict=True)]
    for prompt, completion, logits in zip(prompts, completions, logits_of(truth_of(name), sequences), strict=True):
        wanted = logits[len(prompt) - 1 : -1]
        assert len(completion.token_ids) == NEW_TOKENS
        assert completion.token_ids == wanted.argmax(-1).tolist()
        logprobs = torch.log_softmax(wanted, -1).gather(1, torch.tensor(completion.token_ids)[:, None])
        torch.testing.assert_close(torch.tensor(completion.logprobs), logprobs[:, 0], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("fmt", ["mxfp8", "mxfp4"])
def test_experts_of_a_bf16_checkpoint_are_quantised_at_load(tmp_path: Path, fmt: str) -> None:
    """All else stays as it is; the truth has the experts after a turn through the format."""
    config, tensors = CASES["shared_kv"], tensors_of("shared_kv")
    folder = write_gemma4(tmp_path, config, tensors)
    prompts = prompts_for("shared_kv")
    ours = all_logits(load(folder, None, 16, f"experts={fmt}"), prompts, 1000)
    truth = transformers_gemma4(config, rounded(tensors, fmt, EXPERTS))
    assert largest_difference(ours, logits_of(truth, prompts)) <= 2e-4


def test_layers_that_were_left_out_stay_in_bf16(tmp_path: Path) -> None:
    """Attention of the first layer and the dense MLP of all: plans have names of their own for them."""
    config, tensors = CASES["shared_kv"], tensors_of("shared_kv")
    left_out = re.compile(r"layers\.(0\.self_attn|\d\.mlp)\.")
    ignore = [*routers(config), "model.layers.0.self_attn*", "*.mlp.*"]
    folder = write_gemma4(tmp_path, config, to_modelopt(tensors, left_out), ignore=ignore)
    model = load(folder)
    plan = model.ops.plan
    formats = {layer: plan.of(op, layer)[0].spec.weight_format for op, layer in plan.layers() if op == "dense"}
    assert formats == {
        "qkv.sliding": "bf16",
        "qkv.sliding-mxfp8": "mxfp8",
        "o.sliding": "bf16",
        "o.sliding-mxfp8": "mxfp8",
        "qkv.full": "mxfp8",
        "o.full": "mxfp8",
        "mlp.gate_up": "bf16",
        "mlp.down": "bf16",
        "lm_head": "bf16",
    }
    quantised = re.compile(f"(?!{left_out.pattern}){MATRICES.pattern}")
    truth = transformers_gemma4(config, rounded(tensors, "mxfp8", quantised))
    prompts = prompts_for("shared_kv")
    assert largest_difference(all_logits(model, prompts, 1000), logits_of(truth, prompts)) <= 2e-4


def test_a_wrong_window_would_be_seen(folders: dict[str, Path]) -> None:
    """The comparison has teeth: one position more in the window moves the logits beyond the bound."""
    name = "shared_kv"
    prompts = prompts_for(name)
    overrides = {"sliding_window": CASES[name].sliding_window + 1}
    options = LoadOptions(str(folders[name]), device="cpu", dtype="float32", overrides=overrides)
    ours = all_logits(load_model(options), prompts, 1000)
    assert largest_difference(ours, logits_of(truth_of(name), prompts)) > 2e-3


def test_bfloat16_is_near_float32(folders: dict[str, Path]) -> None:
    """Activations rounded to bfloat16 (step 2**-8) at every op of a few layers.

    With all experts used: a routing that a rounding turns is another answer, not a less exact one.
    """
    name = "all_experts"
    prompts = prompts_for(name)
    exact = all_logits(load(folders[name]), prompts, 1000)
    model = load_model(LoadOptions(str(folders[name]), device="cpu", dtype="bfloat16"))
    rough = all_logits(model, prompts, 1000)
    assert_close(torch.cat(rough), torch.cat(exact), worst=math.inf, rms=1.73 * model_noise(len(model.layers)))


def test_random_weights_run_on_every_backend() -> None:
    """What ``--load-format dummy`` makes of the tiny preset."""
    options = LoadOptions("gemma-4-tiny", load_format="dummy", device="cpu", dtype="float32")
    prompts = [list(range(1, 40)), [7]]
    usual = all_logits(load_model(options), prompts, 16)
    reference = all_logits(load_model(replace(options, preference=Preference("reference"))), prompts, 1000)
    assert largest_difference(usual, reference) <= 2e-4


def test_part_of_a_head_turns() -> None:
    table = partial_table(PartialRope(1e6, 0.25), 16, torch.device("cpu"))
    turning = 1.0 / 1e6 ** (torch.tensor([0.0, 2.0]) / 16)
    torch.testing.assert_close(table.inverse_frequencies, torch.cat((turning, torch.zeros(6))))

"""Every family against transformers in float32, on checkpoints written to disk in the published layouts.

The prompts are longer than every window and reach beyond the original YaRN length; batches hold unequal lengths.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from microscale.engine.config import EngineConfig
from microscale.engine.generate import Generation
from microscale.engine.sampling_params import SamplingParams
from microscale.models.families import AnyModel
from microscale.models.gemma4.config import PartialRope
from microscale.models.gemma4.model import partial_table
from microscale.models.rope import YarnRope, yarn_table
from microscale_lab.cases.errors import assert_close
from support import tiny_gemma4
from support.family_cases import CASES, ONE_OF_EACH, FamilyCase, logits_of, random_prompts
from support.forced_routing import forced_run, reference_run
from support.forward import all_logits, last_logits
from support.loading import load_model
from support.model_noise import model_noise

NEW_TOKENS = 64
LENGTHS = (1, 37, 90)
CPU = torch.device("cpu")


@dataclass
class Checkpoint:
    """A case on disk, with transformers' logits of its prompts."""

    case: FamilyCase
    folder: Path

    @cached_property
    def truth(self) -> Any:
        return self.case.truth(self.folder)

    @cached_property
    def prompts(self) -> list[list[int]]:
        return random_prompts(self.case.config, LENGTHS)

    @cached_property
    def wanted(self) -> list[Tensor]:
        return logits_of(self.truth, self.prompts)

    def load(self, backend: str | None = None, page_size: int = 16, **changes: Any) -> AnyModel:
        return load_model(self.case.options(self.folder, backend=backend, block_size=page_size, **changes))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoint]:
    base = tmp_path_factory.mktemp("checkpoints")
    return {name: Checkpoint(case, case.write(base / name)) for name, case in CASES.items()}


def largest_difference(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """The maximum over all prompts, relative to the range of the logits."""
    return max(float((a - b).abs().max() / (b.max() - b.min())) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("backend", "page_size", "chunk"), [(None, 16, 1000), (None, 1, 7), ("reference", 5, 33)])
def test_logits_equal_transformers(
    checkpoints: dict[str, Checkpoint], name: str, backend: str | None, page_size: int, chunk: int
) -> None:
    checkpoint = checkpoints[name]
    ours = all_logits(checkpoint.load(backend, page_size), checkpoint.prompts, chunk)
    assert largest_difference(ours, checkpoint.wanted) <= 2e-4


@pytest.mark.parametrize("name", CASES)
def test_greedy_tokens_equal_transformers(checkpoints: dict[str, Checkpoint], name: str) -> None:
    """By induction: over prompt and our tokens, transformers' largest logit is our next token at every position."""
    checkpoint = checkpoints[name]
    prompts, params = checkpoint.prompts[:2], SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
    completions = Generation(checkpoint.load(page_size=3), prompts, params, 20).run()
    truth = logits_of(checkpoint.truth, [p + c.token_ids for p, c in zip(prompts, completions, strict=True)])
    for prompt, completion, logits in zip(prompts, completions, truth, strict=True):
        wanted = logits[len(prompt) - 1 : -1]
        assert len(completion.token_ids) == NEW_TOKENS
        assert completion.token_ids == wanted.argmax(-1).tolist()
        assert completion.finish_reason == "length"
        logprobs = torch.log_softmax(wanted, -1).gather(1, torch.tensor(completion.token_ids)[:, None])
        torch.testing.assert_close(torch.tensor(completion.logprobs), logprobs[:, 0], rtol=1e-3, atol=1e-3)


# The last layers are full, sliding, full and full.
@pytest.mark.parametrize("name", [*ONE_OF_EACH, "gpt_oss-odd_constants"])
@pytest.mark.parametrize(("chunk", "num_logits"), [(7, 1), (7, 3), (1000, 1)])
def test_the_last_layer_runs_for_tokens_with_logits_only(
    checkpoints: dict[str, Checkpoint], name: str, chunk: int, num_logits: int
) -> None:
    """Prompts end in different steps: some chunks want no logits, and later steps need their keys and values."""
    model, prompts = checkpoints[name].load(), checkpoints[name].prompts
    whole = all_logits(model, prompts, 1000)
    last = last_logits(model, prompts, chunk, num_logits)
    sizes = [min(num_logits, (len(prompt) - 1) % chunk + 1) for prompt in prompts]
    assert [len(part) for part in last] == sizes
    assert largest_difference(last, [logits[-n:] for logits, n in zip(whole, sizes, strict=True)]) <= 2e-5


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("gpt_oss-heads_4_2", "sliding_window", 5),
        ("gemma4-shared_kv", "sliding_window", 6),
        ("qwen3_moe-as_published", "rope_theta", 2e4),
        ("qwen3_moe-as_published", "rms_norm_eps", 1e-2),
        ("qwen3_moe-as_published", "num_experts_per_tok", 7),
    ],
)
def test_a_wrong_constant_is_detected(checkpoints: dict[str, Checkpoint], name: str, key: str, value: object) -> None:
    """Each moves the logits far beyond the bound of the comparison, a window by one position too."""
    checkpoint = checkpoints[name]
    ours = all_logits(checkpoint.load(hf_overrides={key: value}), checkpoint.prompts, 1000)
    assert largest_difference(ours, checkpoint.wanted) > 2e-3


@pytest.mark.parametrize("name", ["gemma4-all_experts", "qwen3_moe-yarn_all_experts"])
def test_bfloat16_is_near_float32(checkpoints: dict[str, Checkpoint], name: str) -> None:
    """Activations rounded to bfloat16 (step 2**-8) at every op of a few layers.

    All experts are used: a routing that a rounding changes gives another answer, not a less exact one.
    """
    checkpoint = checkpoints[name]
    exact = all_logits(checkpoint.load(), checkpoint.prompts, 1000)
    model = checkpoint.load(dtype="bfloat16")
    rough = all_logits(model, checkpoint.prompts, 1000)
    assert_close(torch.cat(rough), torch.cat(exact), worst=math.inf, rms=1.73 * model_noise(len(model.layers)))


def test_bfloat16_is_near_float32_with_the_same_experts(checkpoints: dict[str, Checkpoint]) -> None:
    checkpoint = checkpoints["gpt_oss-heads_4_2"]
    exact = reference_run(checkpoint.load(), checkpoint.prompts, 1000)
    model = checkpoint.load(dtype="bfloat16")
    rounded = forced_run(model, checkpoint.prompts, 1000, exact)
    assert_close(rounded.logits, exact.logits, worst=math.inf, rms=1.73 * model_noise(len(model.layers)))


@pytest.mark.parametrize("preset", ["gpt-oss-tiny", "gemma-4-tiny", "qwen3-moe-tiny"])
def test_dummy_weights_give_the_same_logits_on_every_backend(preset: str) -> None:
    options = EngineConfig(preset, load_format="dummy", device="cpu", dtype="float32")
    prompts = [list(range(1, 40)), [7]]
    usual = all_logits(load_model(options), prompts, 16)
    reference = all_logits(load_model(replace(options, backend="reference")), prompts, 1000)
    assert largest_difference(usual, reference) <= 2e-4


# -- formats of Gemma 4's checkpoints


def gemma4_logits(folder: Path, *formats: str) -> tuple[AnyModel, list[Tensor]]:
    model = load_model(EngineConfig(str(folder), device="cpu", dtype="float32", layer_format=tuple(formats)))
    return model, all_logits(model, random_prompts(model.config, LENGTHS), 1000)


@pytest.mark.parametrize("fmt", ["mxfp8", "mxfp4"])
def test_experts_of_a_bf16_checkpoint_are_quantised_at_load(tmp_path: Path, fmt: str) -> None:
    """Everything else stays as it is; transformers has the experts after a turn through the format."""
    config = tiny_gemma4.CASES["shared_kv"]
    tensors = tiny_gemma4.random_gemma4(config)
    _, ours = gemma4_logits(tiny_gemma4.write_gemma4(tmp_path, config, tensors), f"experts={fmt}")
    truth = tiny_gemma4.transformers_gemma4(config, tiny_gemma4.rounded(tensors, fmt, tiny_gemma4.EXPERTS))
    assert largest_difference(ours, logits_of(truth, random_prompts(config, LENGTHS))) <= 2e-4


def test_layers_that_were_left_out_stay_in_bf16(tmp_path: Path) -> None:
    """Attention of the first layer and the dense MLP of all: plans have names of their own for them."""
    config = tiny_gemma4.CASES["shared_kv"]
    tensors = tiny_gemma4.random_gemma4(config)
    left_out = re.compile(r"layers\.(0\.self_attn|\d\.mlp)\.")
    ignore = [*tiny_gemma4.routers(config), "model.layers.0.self_attn*", "*.mlp.*"]
    modelopt = tiny_gemma4.to_modelopt(tensors, left_out)
    model, ours = gemma4_logits(tiny_gemma4.write_gemma4(tmp_path, config, modelopt, ignore=ignore))
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
    quantised = re.compile(f"(?!{left_out.pattern}){tiny_gemma4.MATRICES.pattern}")
    truth = tiny_gemma4.transformers_gemma4(config, tiny_gemma4.rounded(tensors, "mxfp8", quantised))
    assert largest_difference(ours, logits_of(truth, random_prompts(config, LENGTHS))) <= 2e-4


# -- rope tables


def test_yarn_without_stretch_is_plain_rope() -> None:
    table = yarn_table(YarnRope(10000.0, 1.0, 32.0, 1.0, 4096, truncate=False), 64, CPU)
    torch.testing.assert_close(table.inverse_frequencies, 1.0 / 10000.0 ** (torch.arange(0, 64, 2) / 64))
    assert table.scale == 1.0


def test_part_of_a_head_is_rotated() -> None:
    table = partial_table(PartialRope(1e6, 0.25), 16, CPU)
    rotated = 1.0 / 1e6 ** (torch.tensor([0.0, 2.0]) / 16)
    torch.testing.assert_close(table.inverse_frequencies, torch.cat((rotated, torch.zeros(6))))

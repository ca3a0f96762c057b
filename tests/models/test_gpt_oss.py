"""gpt-oss against transformers in float32, on checkpoints written to disk in the real layouts.

The prompts are longer than every window and reach beyond the original YaRN length; batches hold unequal lengths.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import GptOssForCausalLM

from microscale.backends.ops import Preference
from microscale.engine.generate import Generation
from microscale.engine.loading.memory import Workload
from microscale.engine.loading.options import LoadOptions
from microscale.engine.sampling_params import SamplingParams
from microscale.models.gpt_oss.model import GptOss
from microscale.models.rope import YarnRope, yarn_table
from microscale_lab.cases.errors import assert_close
from support.families import load_gpt_oss
from support.forced_routing import forced_run, reference_run
from support.forward import all_logits, last_logits
from support.loading import load_model
from support.model_noise import model_noise
from support.tiny_checkpoints import CASES, has_original_form, write_hf, write_original
from support.truth import load_transformers

pytestmark = pytest.mark.slow

NEW_TOKENS = 64
LENGTHS = (1, 37, 90)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("checkpoints")
    return {name: write_hf(base / name, config, seed=i) for i, (name, config) in enumerate(CASES.items())}


def prompts_for(name: str, lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    generator = torch.Generator().manual_seed(len(name))
    return [torch.randint(0, CASES[name].vocab_size, (n,), generator=generator).tolist() for n in lengths]


@cache
def transformers_model(folder: Path) -> GptOssForCausalLM:
    return load_transformers(folder)


def truth(folder: Path, sequences: list[list[int]]) -> list[Tensor]:
    """transformers' logits at every position of each sequence, one sequence at a time and without its KV cache."""
    model = transformers_model(folder)
    with torch.inference_mode():
        return [model(torch.tensor([tokens]), use_cache=False).logits[0] for tokens in sequences]


def load(folder: Path, backend: str | None = None, page_size: int = 16) -> GptOss:
    options = LoadOptions(
        str(folder),
        device="cpu",
        dtype="float32",
        preference=Preference(backend),
        workload=Workload(page_size=page_size),
    )
    return load_gpt_oss(options)


def largest_difference(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """Over all prompts, relative to the range of the logits."""
    return max(float((a - b).abs().max() / (b.max() - b.min())) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    ("backend", "page_size", "chunk"),
    [(None, 16, 1000), ("reference", 16, 1000), (None, 1, 7), (None, 5, 16), ("reference", 64, 33)],
)
def test_logits_equal_transformers(
    folders: dict[str, Path], name: str, backend: str | None, page_size: int, chunk: int
) -> None:
    prompts = prompts_for(name)
    ours = all_logits(load(folders[name], backend, page_size), prompts, chunk)
    assert largest_difference(ours, truth(folders[name], prompts)) <= 2e-4


@pytest.mark.parametrize("name", ["heads_4_2", "odd_constants"])  # last layers: full, sliding
@pytest.mark.parametrize("wanted", [1, 3])
@pytest.mark.parametrize("chunk", [7, 1000])
def test_the_last_layer_runs_for_tokens_with_logits_only(
    folders: dict[str, Path], chunk: int, wanted: int, name: str
) -> None:
    """Prompts end in different steps: some chunks want no logits, and their keys and values must be there later."""
    prompts = prompts_for(name)
    model = load(folders[name])
    everything = all_logits(model, prompts, 1000)
    found = last_logits(model, prompts, chunk, wanted)
    sizes = [min(wanted, (len(prompt) - 1) % chunk + 1) for prompt in prompts]
    assert [len(part) for part in found] == sizes
    assert largest_difference(found, [whole[-n:] for whole, n in zip(everything, sizes, strict=True)]) <= 2e-5


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("page_size", "budget"), [(16, 2048), (3, 20)])
def test_greedy_tokens_equal_transformers(folders: dict[str, Path], name: str, page_size: int, budget: int) -> None:
    """By induction: over prompt and our tokens, transformers' largest logit is our next token at every position."""
    prompts = prompts_for(name)
    model = load(folders[name], page_size=page_size)
    params = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
    completions = Generation(model, prompts, params, budget).run()
    sequences = [prompt + c.token_ids for prompt, c in zip(prompts, completions, strict=True)]
    for prompt, completion, logits in zip(prompts, completions, truth(folders[name], sequences), strict=True):
        assert len(completion.token_ids) == NEW_TOKENS
        assert completion.token_ids == logits[len(prompt) - 1 : -1].argmax(-1).tolist()
        assert completion.finish_reason == "length"
        logprobs = torch.log_softmax(logits[len(prompt) - 1 : -1], -1).gather(
            1, torch.tensor(completion.token_ids)[:, None]
        )
        torch.testing.assert_close(torch.tensor(completion.logprobs), logprobs[:, 0], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", [name for name, config in CASES.items() if has_original_form(config)])
def test_both_layouts_give_identical_logits(folders: dict[str, Path], tmp_path: Path, name: str) -> None:
    seed = list(CASES).index(name)
    original = write_original(tmp_path / "original", CASES[name], seed=seed, shards=3)
    prompts = prompts_for(name)
    ours, theirs = (all_logits(load(folder), prompts, 1000) for folder in (folders[name], original))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_a_wrong_window_would_be_seen(folders: dict[str, Path]) -> None:
    """The comparison has teeth: one position more in the window moves the logits beyond the bound."""
    name = "heads_4_2"
    prompts = prompts_for(name)
    options = LoadOptions(
        str(folders[name]),
        device="cpu",
        dtype="float32",
        overrides={"sliding_window": CASES[name].sliding_window + 1},
    )
    assert largest_difference(all_logits(load_model(options), prompts, 1000), truth(folders[name], prompts)) > 2e-3


def test_bfloat16_is_near_float32(folders: dict[str, Path]) -> None:
    """Activations rounded to bfloat16 at every op of a few layers, with the experts that float32 chooses: a routing
    that a rounding turns is another answer, not a less exact one."""
    name = "heads_4_2"
    prompts = prompts_for(name)
    exact = reference_run(load(folders[name]), prompts, 1000)
    model = load_model(LoadOptions(str(folders[name]), device="cpu", dtype="bfloat16"))
    rounded = forced_run(model, prompts, 1000, exact)
    assert_close(rounded.logits, exact.logits, worst=math.inf, rms=1.73 * model_noise(len(model.layers)))


def test_yarn_without_stretch_is_plain_rope() -> None:
    table = yarn_table(YarnRope(10000.0, 1.0, 32.0, 1.0, 4096, truncate=False), 64, torch.device("cpu"))
    plain = 1.0 / 10000.0 ** (torch.arange(0, 64, 2) / 64)
    torch.testing.assert_close(table.inverse_frequencies, plain)
    assert table.scale == 1.0

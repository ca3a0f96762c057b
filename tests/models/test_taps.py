"""Taps against transformers' hidden states, of every family, on checkpoints in the published layouts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from microscale.backends.precision import make_precision
from microscale.engine.loading.options import LoadOptions
from microscale.models.batch import Chunk, build_batch
from microscale.models.config import LayerKind
from microscale.models.families import AnyModel
from microscale.models.taps import Taps
from support import tiny_checkpoints, tiny_gemma4, tiny_qwen3_moe
from support.forward import poison
from support.loading import load_model
from support.truth import load_transformers

LENGTHS = (1, 23, 41)
PAGE_SIZE = 16


@dataclass
class Pair:
    """One checkpoint, as ours and as transformers' model."""

    ours: AnyModel
    theirs: Any


def gpt_oss(folder: Path) -> Pair:
    tiny_checkpoints.write_hf(folder, tiny_checkpoints.CASES["heads_8_1"], seed=3)
    return Pair(load(folder), load_transformers(folder))


def gemma4(folder: Path) -> Pair:
    config = tiny_gemma4.CASES["shared_kv"]
    tensors = tiny_gemma4.random_gemma4(config, seed=3)
    tiny_gemma4.write_gemma4(folder, config, tiny_gemma4.to_modelopt(tensors), ignore=tiny_gemma4.routers(config))
    rounded = tiny_gemma4.rounded(tensors, "mxfp8", tiny_gemma4.MATRICES)
    return Pair(load(folder), tiny_gemma4.transformers_gemma4(config, rounded))


def qwen3_moe(folder: Path) -> Pair:
    config = tiny_qwen3_moe.CASES["as_published"]
    tensors = tiny_qwen3_moe.random_qwen3_moe(config, seed=3)
    tiny_qwen3_moe.write_qwen3_moe(folder, config, tiny_qwen3_moe.published(tensors))
    theirs = tiny_qwen3_moe.transformers_qwen3_moe(config, tiny_qwen3_moe.rounded(tensors, "mxfp8"))
    return Pair(load(folder, "experts=mxfp8"), theirs)


def load(folder: Path, *formats: str) -> AnyModel:
    precision = make_precision(layer_formats=formats)
    return load_model(LoadOptions(str(folder), device="cpu", dtype="float32", precision=precision))


@pytest.fixture(scope="module", params=[gpt_oss, gemma4, qwen3_moe], ids=lambda make: make.__name__)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    make: Callable[[Path], Pair] = request.param
    return make(tmp_path_factory.mktemp(make.__name__) / "checkpoint")


def prompts_for(model: AnyModel) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, model.config.vocab_size, (n,), generator=generator).tolist() for n in LENGTHS]


def run(
    model: AnyModel, prompts: list[list[int]], chunk: int, num_logits: int | None, places: tuple[int, ...] | None
) -> tuple[list[Tensor], list[Tensor]]:
    """Logits and taps of each prompt. ``num_logits``: of a chunk's last tokens; ``None``: of all of them."""
    counts = [-(-len(p) // PAGE_SIZE) for p in prompts]
    kv = poison(model.new_cache(dict.fromkeys(LayerKind, sum(counts))))
    free = iter(range(sum(counts)))
    pages = [[next(free) for _ in range(count)] for count in counts]
    logits: list[list[Tensor]] = [[] for _ in prompts]
    tapped: list[list[Tensor]] = [[] for _ in prompts]
    for start in range(0, max(map(len, prompts)), chunk):
        live = [i for i, prompt in enumerate(prompts) if len(prompt) > start]
        chunks = []
        for i in live:
            tokens = prompts[i][start : start + chunk]
            count = len(tokens) if num_logits is None else min(num_logits, len(tokens))
            chunks.append(Chunk(tokens, start, dict.fromkeys(LayerKind, pages[i]), count))
        batch = build_batch(chunks, PAGE_SIZE, model.device)
        sizes = [len(c.token_ids) for c in chunks]
        taps = None
        if places is not None:
            taps = Taps.empty(places, sum(sizes), model.config.hidden, model.ops.dtype, model.device)
            taps.rows.fill_(torch.nan)
        found = model.forward(batch, kv, taps).values
        for i, part in zip(live, found.split([c.num_logits for c in chunks]), strict=True):
            logits[i].append(part)
        if taps is not None:
            for i, part in zip(live, taps.rows.split(sizes), strict=True):
                tapped[i].append(part)
    return [torch.cat(parts) for parts in logits], [torch.cat(parts) for parts in tapped if parts]


@torch.inference_mode()
def streams(model: Any, tokens: list[int]) -> list[Tensor]:
    """transformers' residual stream at every tap. Its last hidden state is normed, so the last tap is taken from the
    last layer itself."""
    last: list[Tensor] = []

    def keep(module: nn.Module, inputs: object, output: Tensor | tuple[Tensor, ...]) -> None:
        last.append(output[0] if isinstance(output, tuple) else output)

    handle = model.model.layers[-1].register_forward_hook(keep)
    found = model(torch.tensor([tokens]), use_cache=False, output_hidden_states=True).hidden_states
    handle.remove()
    return [state[0] for state in (*found[:-1], last[0].view_as(found[-1]))]


@pytest.mark.parametrize("num_logits", [None, 1, 0])
@pytest.mark.parametrize("chunk", [1000, 7])
def test_taps_are_the_hidden_states_of_transformers(pair: Pair, chunk: int, num_logits: int | None) -> None:
    """At every place there is, for all tokens, whichever of them give logits."""
    prompts = prompts_for(pair.ours)
    places = tuple(range(pair.ours.config.num_layers + 1))
    _, tapped = run(pair.ours, prompts, chunk, num_logits, places)
    for prompt, rows in zip(prompts, tapped, strict=True):
        for place, ours, theirs in zip(places, rows.chunk(len(places), 1), streams(pair.theirs, prompt), strict=True):
            away = float((ours - theirs).abs().max() / theirs.abs().max())
            assert away <= 1e-4, f"tap {place} is {away} from transformers'"


def test_taps_stand_in_the_order_asked_for(pair: Pair) -> None:
    prompts, last = prompts_for(pair.ours), pair.ours.config.num_layers
    _, tapped = run(pair.ours, prompts, 1000, 1, (last, 1))
    for prompt, rows in zip(prompts, tapped, strict=True):
        theirs = streams(pair.theirs, prompt)
        wanted = torch.cat([theirs[last], theirs[1]], 1)
        assert float((rows - wanted).abs().max() / wanted.abs().max()) <= 1e-4


@pytest.mark.parametrize("num_logits", [None, 1])
def test_taps_change_no_bit_of_the_logits(pair: Pair, num_logits: int | None) -> None:
    prompts, last = prompts_for(pair.ours), pair.ours.config.num_layers
    plain, nothing = run(pair.ours, prompts, 7, num_logits, None)
    tapped, _ = run(pair.ours, prompts, 7, num_logits, (1, last))
    assert not nothing
    assert all(torch.equal(a, b) for a, b in zip(plain, tapped, strict=True))

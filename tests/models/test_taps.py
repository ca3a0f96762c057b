"""Taps against transformers' hidden states, of every family, on checkpoints in the published layouts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from microscale.models.config import LayerKind
from microscale.models.families import AnyModel
from microscale.models.taps import Taps
from microscale_lab.batches import SequenceChunk, build_batch
from support.family_cases import CASES, ONE_OF_EACH, random_prompts
from support.forward import poison
from support.loading import load_model

LENGTHS = (1, 23, 41)
PAGE_SIZE = 16


@dataclass
class Pair:
    """One checkpoint, as ours and as transformers' model."""

    ours: AnyModel
    theirs: Any


@pytest.fixture(scope="module", params=ONE_OF_EACH)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    case = CASES[request.param]
    folder = case.write(tmp_path_factory.mktemp("checkpoint") / "folder")
    return Pair(load_model(case.options(folder)), case.truth(folder))


def prompts_for(model: AnyModel) -> list[list[int]]:
    return random_prompts(model.config, LENGTHS)


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
            chunks.append(SequenceChunk(tokens, start, dict.fromkeys(LayerKind, pages[i]), count))
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

"""The MTP layer of Qwen3.6 against transformers' own layer and norms: read from every layout, chained, with paged KV."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from microscale import hardware
from microscale.engine.config import EngineConfig
from microscale.engine.loading.drafting import load_head, open_head, prepare_head
from microscale.engine.speculation.config import parse_config
from microscale.errors import BadCheckpoint, BadSetting, MicroscaleError, Unsupported
from microscale.formats import decode
from microscale.hardware import known
from microscale.models.config import LayerKind, LoadFormat
from microscale.models.draft_heads.drafting import Verified
from microscale.models.draft_heads.heads import bind_head_shapes, outline_head, record_head
from microscale.models.draft_heads.layer import FULL, Steps
from microscale.models.draft_heads.mtp import Mtp
from microscale.models.draft_heads.mtp_weights import LAYER, CheckpointMtp, DummyMtp, mtp_config, open_mtp
from microscale.models.families import PRESETS, AnyModel, read_model_config
from microscale.models.taps import Taps
from microscale.parallel.sharding import Shard
from microscale.planning.ops import Activations, Ops, Preference
from microscale.planning.plan import Setup
from microscale.planning.precision import make_precision
from microscale_lab.batches import SequenceChunk, build_batch
from support.forward import poison
from support.loading import load_model
from support.tiny_qwen3_5 import (
    CASES,
    PlainMtp,
    random_mtp,
    random_qwen3_5,
    rounded,
    transformers_qwen3_5,
    write_qwen3_5,
)

CPU = torch.device("cpu")
SETUP = Setup(hardware.cpu(), Activations.FLOAT32)
LENGTHS = (1, 11, 26)
DRAFTS = 3
OPTION = parse_config('{"method": "mtp", "num_speculative_tokens": 3}')
assert OPTION is not None


@cache
def sequences(vocab: int) -> list[list[int]]:
    """Prompts, and the token after each."""
    draws = torch.Generator().manual_seed(3)
    return [torch.randint(0, vocab, (n + 1,), generator=draws).tolist() for n in LENGTHS]


def tapped_of(model: AnyModel, tokens: list[int]) -> Tensor:
    """The residual stream after the last layer."""
    pages = {kind: [0] if kind is LayerKind.LINEAR else list(range(4)) for kind in LayerKind}
    taps = Taps.empty((model.config.num_layers,), len(tokens), model.config.hidden, torch.float32, CPU)
    kv = model.new_cache(dict.fromkeys(LayerKind, 4))
    model.forward(build_batch([SequenceChunk(tokens, 0, pages, 0)], model.page_size, CPU), kv, taps)
    return taps.rows


def away(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).abs().max() / (theirs.max() - theirs.min()))


def head_of(folder: Path, model: AnyModel, quantization: str | None = None) -> Mtp:
    assert OPTION is not None
    weights = open_head(OPTION, str(folder), model.config, offline=True)
    head = load_head(prepare_head(weights, SETUP, model.page_size), model)
    assert isinstance(head, Mtp)
    return head


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("chunk", [100, 7])
def test_logits_and_states_are_those_of_transformers(name: str, chunk: int, tmp_path: Path) -> None:
    """Prompts of unequal lengths, whole or in chunks, then a chain of drafts."""
    config, tensors, mtp = CASES[name], random_qwen3_5(CASES[name]), random_mtp(CASES[name])
    folder = write_qwen3_5(tmp_path, config, tensors, mtp)
    model = load_model(EngineConfig(str(folder), device="cpu", dtype="float32", layer_format=("experts=mxfp8",)))
    theirs = transformers_qwen3_5(config, rounded(tensors, "mxfp8"))
    plain, head = PlainMtp(config, theirs, rounded(mtp, "mxfp8")), head_of(folder, model)
    prompts = sequences(config.vocab_size)
    tapped = [tapped_of(model, tokens[:-1]) for tokens in prompts]
    with torch.inference_mode():
        hidden = [theirs.model(torch.tensor([tokens[:-1]]), use_cache=False).last_hidden_state[0] for tokens in prompts]
    known_tokens = [torch.tensor(tokens[1:]) for tokens in prompts]

    kv, pages = poison(head.new_cache(13)), [[3 * page + i for page in range(4)] for i in range(3)]
    for first in range(0, max(LENGTHS), chunk):
        # A prompt that is through has its last row again, which changes nothing.
        spans = [(min(first, n - 1), min(first + chunk, n)) for n in LENGTHS]
        chunks = [
            SequenceChunk(tokens[begin + 1 : end + 1], begin, dict.fromkeys(LayerKind, own), 1)
            for tokens, own, (begin, end) in zip(prompts, pages, spans, strict=True)
        ]
        rows = torch.cat([each[begin:end] for each, (begin, end) in zip(tapped, spans, strict=True)])
        verified = Verified(build_batch(chunks, head.page_size, CPU), rows)
        if first + chunk < max(LENGTHS):
            assert head.draft(verified, kv, 0).shape == (3, 0)
    drafts = head.draft(verified, kv, DRAFTS)
    steps = Steps(verified.last.attention[FULL], DRAFTS - 1, head.page_size)
    logits, states = head.forward(verified.batch, kv, head.combine(verified.tapped))
    for step in range(DRAFTS):
        for i in range(3):
            their_logits, their_states = plain.rows(known_tokens[i], hidden[i])
            assert away(logits.values[i], their_logits[-1]) <= 1e-5
            assert away(states[i], their_states[-1]) <= 1e-5
            hidden[i] = torch.cat((hidden[i], their_states[-1:]))
            known_tokens[i] = torch.cat((known_tokens[i], their_logits[-1:].argmax(-1)))
        guessed = torch.stack([tokens[-1] for tokens in known_tokens])
        assert torch.equal(drafts[:, step], guessed)
        if step + 1 < DRAFTS:
            logits, states = head.forward(steps.batch(step, guessed), kv, states)

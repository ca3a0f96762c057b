"""The MTP layer of Qwen3.6 against transformers' own layer and norms, from every layout, chained, with paged KV."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Self

import pytest
import torch
from msgspec import structs
from torch import Tensor
from transformers import Qwen3_5MoeForCausalLM

from microscale import hardware
from microscale.engine.config import EngineConfig
from microscale.engine.loading.drafting import load_head, open_head, prepare_head
from microscale.engine.speculation.config import SpeculativeConfig, parse_config
from microscale.errors import BadSetting, MicroscaleError, Unsupported
from microscale.formats import FORMATS, MXFP8, decode, encode
from microscale.hardware import known
from microscale.models.config import LayerKind, LoadFormat
from microscale.models.draft_heads.drafting import TargetEnds, Verified
from microscale.models.draft_heads.heads import bind_head, bind_head_shapes, outline_head, record_head
from microscale.models.draft_heads.layer import FULL, Steps
from microscale.models.families import PRESETS, AnyModel
from microscale.models.pre_norm import PreNormModel
from microscale.models.qwen3_5.config import Qwen35Config
from microscale.models.qwen3_5.mtp import Mtp
from microscale.models.qwen3_5.mtp_weights import LAYER, open_mtp
from microscale.models.qwen3_5.weights import Qwen35Layer
from microscale.models.taps import Taps
from microscale.parallel.sharding import WHOLE, Shard, split_vocabulary
from microscale.planning.ops import Activations, Logits, Ops, Preference
from microscale.planning.plan import Setup
from microscale.planning.precision import make_precision
from microscale.planning.ranks import summarise
from microscale_lab.batches import SequenceChunk, build_batch
from microscale_lab.heads import ops_for_head
from support.containers import Container, fp8_squares, matrices, quantise
from support.forward import poison
from support.loading import load_model
from support.thread_ranks import ThreadRank, run_ranks
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


def option_of(more: str = "") -> SpeculativeConfig:
    config = parse_config(f'{{"method": "mtp", "num_speculative_tokens": {DRAFTS}{more}}}')
    assert config is not None
    return config


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


@dataclass
class Case:
    """A tiny target and its head: ours, and made of transformers' parts with the numbers that the head holds."""

    model: AnyModel
    theirs: Qwen3_5MoeForCausalLM
    head: Mtp
    plain: PlainMtp

    @classmethod
    def write(
        cls, folder: Path, name: str, stored: Mapping[str, Tensor], numbers: Mapping[str, Tensor], option: str = ""
    ) -> Self:
        config, tensors = CASES[name], random_qwen3_5(CASES[name])
        write_qwen3_5(folder, config, tensors, stored)
        model = load_model(EngineConfig(str(folder), device="cpu", dtype="float32", layer_format=("experts=mxfp8",)))
        theirs = transformers_qwen3_5(config, rounded(tensors, "mxfp8"))
        asked = option_of(option)
        weights = open_head(asked, str(folder), model.config, offline=True)
        head = load_head(prepare_head(weights, SETUP, model.page_size, asked.head_formats), model)
        assert isinstance(head, Mtp)
        return cls(model, theirs, head, PlainMtp(config, theirs, numbers))

    def check(self, chunk: int) -> None:
        """Prompts of unequal lengths, then a chain of drafts."""
        head, prompts = self.head, sequences(self.model.config.vocab_size)
        tapped = [tapped_of(self.model, tokens[:-1]) for tokens in prompts]
        follow = [torch.tensor(tokens[1:]) for tokens in prompts]
        with torch.inference_mode():
            hidden = [self.theirs.model(torch.tensor([p[:-1]]), use_cache=False).last_hidden_state[0] for p in prompts]
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
                their_logits, their_states = self.plain.rows(follow[i], hidden[i])
                assert away(logits.values[i], their_logits[-1]) <= 1e-5
                assert away(states[i], their_states[-1]) <= 1e-5
                hidden[i] = torch.cat((hidden[i], their_states[-1:]))
                follow[i] = torch.cat((follow[i], their_logits[-1:].argmax(-1)))
            guessed = torch.stack([tokens[-1] for tokens in follow])
            assert torch.equal(drafts[:, step], guessed)
            if step + 1 < DRAFTS:
                logits, states = head.forward(steps.batch(step, guessed), kv, states)


@pytest.mark.parametrize(("name", "chunk"), [("as_published", 100), ("as_published", 7), ("one_group", 7)])
def test_logits_and_states_are_those_of_transformers(name: str, chunk: int, tmp_path: Path) -> None:
    mtp = random_mtp(CASES[name])
    Case.write(tmp_path, name, mtp, rounded(mtp, "mxfp8")).check(chunk)


@pytest.mark.parametrize("modules", [r".*_proj", r".*_proj|mtp\.fc"])
def test_fp8_blocks_next_to_a_target_in_bf16(modules: str, tmp_path: Path) -> None:
    container = Container({modules: fp8_squares(".weight_scale_inv", torch.bfloat16)})
    stored, numbers = quantise(random_mtp(CASES["as_published"]), container)
    Case.write(tmp_path, "as_published", stored, numbers).check(100)


def test_all_dense_weights_may_be_mxfp8(tmp_path: Path) -> None:
    mtp = random_mtp(CASES["as_published"])
    dense = [name for name in mtp if name.endswith("_proj.weight") or name == "mtp.fc.weight"]
    numbers = rounded(mtp, "mxfp8")
    numbers |= {name: decode(encode(mtp[name].float(), MXFP8)) for name in dense}
    case = Case.write(tmp_path, "as_published", mtp, numbers, ', "quantization": "mxfp8"')
    case.check(100)
    assert {d.spec.weight_format for d in case.head.ops.plan.decisions.values() if d.op in ("dense", "moe")} == {
        "mxfp8"
    }


# ---- what is read ----------------------------------------------------------------------------------------------------


def apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Each matrix of each expert is a module."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        found |= {f"{m}.weight": part for m, part in matrices(name, tensor)} if tensor.dim() == 3 else {name: tensor}
    return found


def published(folder: Path, mtp: Mapping[str, Tensor]) -> Path:
    return write_qwen3_5(folder, CASES["as_published"], random_qwen3_5(CASES["as_published"]), mtp)


def test_experts_in_both_forms_are_the_same(tmp_path: Path) -> None:
    mtp, config = random_mtp(CASES["as_published"]), CASES["as_published"]
    layers = [open_mtp(published(tmp_path / str(i), m), config).layer(0, CPU) for i, m in enumerate((mtp, apart(mtp)))]
    for field in fields(Qwen35Layer):
        one, other = (getattr(layer, field.name) for layer in layers)
        assert one is other is None or torch.equal(one, other)


def test_a_checkpoint_that_does_not_have_the_layer_is_refused(tmp_path: Path) -> None:
    mtp, config = random_mtp(CASES["as_published"]), CASES["as_published"]

    def refused(changes: Mapping[str, Tensor | None]) -> str:
        found = {name: tensor for name, tensor in {**mtp, **changes}.items() if tensor is not None}
        with pytest.raises(MicroscaleError) as caught:
            open_mtp(published(tmp_path, found), config)
        return str(caught.value)

    assert "has no MTP layer (mtp.*); start it without" in refused(dict.fromkeys(mtp))
    assert "lacks tensor 'mtp.fc.weight'" in refused({"mtp.fc.weight": None})
    gate = f"{LAYER}mlp.shared_expert_gate.weight"
    assert f"lacks tensor {gate!r}" in refused({gate: None})
    assert "has shape [64, 64], but the config asks for [64, 128]" in refused({"mtp.fc.weight": torch.zeros(64, 64)})
    assert "is no part of the model" in refused({"mtp.layers.1.input_layernorm.weight": torch.ones(64)})
    codes = torch.zeros(64, 128, dtype=torch.float8_e4m3fn)
    assert "has type F8_E4M3, not BF16 or F16" in refused({"mtp.fc.weight": codes})


def test_other_models_and_options_are_refused() -> None:
    with pytest.raises(Unsupported, match="model_type is one of qwen3_5_moe, qwen3_5_moe_text; use"):
        open_head(option_of(), "gpt-oss-tiny", PRESETS["gpt-oss-tiny"], offline=True, load_format=LoadFormat.DUMMY)
    with pytest.raises(BadSetting, match=r"method mtp takes no model.*leave 'x' out"):
        option_of(', "model": "x"')
    with pytest.raises(BadSetting, match="method mtp has no lm_head of its own"):
        option_of(', "draft_lm_head": "mxfp8"')


# ---- ranks, dummy weights and shapes ---------------------------------------------------------------------------------


def test_ranks_draft_what_one_rank_drafts(tmp_path: Path) -> None:
    mtp, config = random_mtp(CASES["as_published"]), CASES["as_published"]
    case = Case.write(tmp_path, "as_published", mtp, rounded(mtp, "mxfp8"))
    model, tokens = case.model, sequences(config.vocab_size)[2]
    pages = dict.fromkeys(LayerKind, range(4))
    batch = build_batch([SequenceChunk(tokens[1:], 0, pages, 1)], model.page_size, CPU)
    verified = Verified(batch, tapped_of(model, tokens[:-1]))
    assert isinstance(model, PreNormModel)

    def work(ranks: ThreadRank, rank: int) -> tuple[list[list[int]], str]:
        shard = Shard(rank, ranks.world)
        own = split_vocabulary(config.vocab_size, shard)

        class Rows:
            """The rank's rows of the target's lm_head."""

            def logits(self, x: Tensor) -> Logits:
                return summarise(model.lm_head.logits(x).values[:, own.start : own.stop].contiguous())

        weights = open_mtp(tmp_path, config, shard)
        o = weights.layer(0, CPU).o
        assert o is not None
        assert o.shape[1] == config.num_heads * config.head_dim // 2
        ops = ops_for_head(Ops(model.ops.gpu, model.ops.activations, model.ops.preference, ranks=ranks))
        ends = TargetEnds(model.embed, Rows(), model.norm)  # type: ignore[arg-type]
        head = bind_head(weights, ops, CPU, model.page_size, ends)
        return head.draft(verified, head.new_cache(4), DRAFTS).tolist(), repr(replace(weights.config, shard=WHOLE))

    wanted = case.head.draft(verified, case.head.new_cache(4), DRAFTS).tolist()
    drafts, configs = zip(*run_ranks(2, work), strict=True)
    assert list(drafts) == [wanted] * 2
    assert configs[0] == configs[1]  # as ``fingerprint`` compares them


@pytest.mark.parametrize(("preset", "fmt"), [("qwen3.6-35b-a3b-nvfp4", "mxfp8"), ("qwen3.6-35b-a3b-fp8", "fp8_block")])
def test_dummy_weights(preset: str, fmt: str) -> None:
    """They are planned, counted and recorded as shapes."""
    weights = open_head(option_of(), preset, PRESETS[preset], offline=True, load_format=LoadFormat.DUMMY)
    prepared = prepare_head(weights, Setup(known("h200"), Activations.BF16), 16)
    assert prepared.plan.of("moe", "experts")[0].spec.weight_format == fmt
    c = prepared.config.layer
    assert isinstance(c, Qwen35Config)
    shape = outline_head(prepared.config, Activations.BF16, 16)
    experts = 3 * c.num_experts * c.intermediate * c.hidden
    attention = c.hidden * c.head_dim * (3 * c.num_heads + 2 * c.num_kv_heads)
    numbers = experts + attention + 2 * c.hidden**2 + c.num_experts * c.hidden + 2 * c.head_dim + 5 * c.hidden
    if fmt == "mxfp8":
        assert shape.weight_bytes == 2 * numbers
        assert shape.other_bytes == 2 * (c.num_experts * c.hidden + 2 * c.head_dim + 5 * c.hidden)
    assert shape.cached_numbers == 2 * c.num_kv_heads * c.head_dim
    unread = experts * (1 - c.top_k / c.num_experts) * FORMATS[fmt].bits_per_value / 8
    assert prepared.need.weights - prepared.read_bytes == pytest.approx(unread, rel=0.1)
    ops = Ops(known("h200"), Activations.BF16, Preference(), make_precision().of_draft_head())
    listed = record_head(bind_head_shapes(prepared.config, ops), 1 << 10, 64)
    assert {"norm_pair", "gate_heads", "likeliest"} <= {kernel.fn.__name__ for kernel in listed}


def test_a_random_head_drafts_behind_a_random_target() -> None:
    options = EngineConfig("qwen3.6-tiny", load_format="dummy", device="cpu", dtype="float32")
    model = load_model(structs.replace(options, layer_format=("experts=mxfp8",)))
    weights = open_head(option_of(), options.model, model.config, offline=True, load_format=LoadFormat.DUMMY)
    head = load_head(prepare_head(weights, SETUP, model.page_size), model)
    batch = build_batch([SequenceChunk([1, 2, 3], 0, dict.fromkeys(LayerKind, range(1)), 1)], model.page_size, CPU)
    assert head.draft(Verified(batch, tapped_of(model, [4, 1, 2])), head.new_cache(1), DRAFTS).shape == (1, DRAFTS)

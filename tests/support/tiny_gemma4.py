"""Random Gemma 4 checkpoints of a few hundred kB, written to disk in the published layouts, and transformers' own model
of the numbers in them.

The numbers are chosen to be unkind: norms and scales far from 1, a router that decides, windows shorter than a prompt,
logits that reach the cap.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import Gemma4ForCausalLM, Gemma4TextConfig

from microscale.formats import BlockFormat, block_format, decode, encode
from microscale.models.config import LayerKind
from microscale.models.gemma4.config import AttentionHeads, Gemma4Config, LayerFormats, PartialRope
from microscale.models.gemma4.config_file import to_text_config

FULL, SLIDING = LayerKind.FULL, LayerKind.SLIDING


def tiny_gemma4(
    *,
    kinds: tuple[LayerKind, ...],
    hidden: int,
    widths: tuple[int, int],
    sliding: tuple[int, int, int],
    full: tuple[int, int, int],
    shared: bool,
    experts: tuple[int, int],
    window: int,
    softcap: float | None,
    fraction: float = 0.25,
    tied: bool = True,
    vocab: int = 256,
) -> Gemma4Config:
    """``widths``: of the dense MLP and of an expert; ``sliding`` and ``full``: heads, KV heads, size of a head."""
    return Gemma4Config(
        hidden=hidden,
        mlp=widths[0],
        intermediate=widths[1],
        num_experts=experts[0],
        top_k=experts[1],
        vocab_size=vocab,
        sliding_window=window,
        layer_kinds=kinds,
        heads={SLIDING: AttentionHeads(*sliding, shared_kv=False), FULL: AttentionHeads(*full, shared_kv=shared)},
        rope={SLIDING: PartialRope(1e4), FULL: PartialRope(1e6, fraction)},
        rms_epsilon=1e-6,
        softcap=softcap,
        max_context=512,
        eos_token_ids=(),
        formats=(LayerFormats.all("bf16"),) * len(kinds),
        tied=tied,
    )


CASES: dict[str, Gemma4Config] = {
    "shared_kv": tiny_gemma4(
        kinds=(SLIDING, SLIDING, FULL), hidden=64, widths=(96, 32), sliding=(4, 2, 32), full=(4, 1, 64), shared=True,
        experts=(4, 2), window=5, softcap=5.0,
    ),
    "own_values": tiny_gemma4(
        kinds=(FULL, SLIDING, FULL, FULL), hidden=96, widths=(64, 96), sliding=(6, 3, 16), full=(6, 3, 32),
        shared=False, experts=(5, 1), window=8, softcap=None, fraction=0.5, tied=False, vocab=320,
    ),
    "all_experts": tiny_gemma4(
        kinds=(*(SLIDING,) * 5, FULL), hidden=160, widths=(32, 64), sliding=(8, 4, 16), full=(8, 2, 64), shared=True,
        experts=(3, 3), window=17, softcap=30.0, fraction=1.0, vocab=200,
    ),
}  # fmt: skip


def random_gemma4(c: Gemma4Config, seed: int = 0) -> dict[str, Tensor]:
    """Every tensor of the text model, in BF16, without the prefix."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, std: float, mean: float = 0.0) -> Tensor:
        return (torch.randn(*shape, generator=generator) * std + mean).to(torch.bfloat16)

    def linear(rows: int, columns: int, gain: float = 1.0) -> Tensor:
        return normal(rows, columns, std=gain * columns**-0.5)

    tensors = {"embed_tokens.weight": normal(c.vocab_size, c.hidden, std=0.5)}
    for layer_idx, kind in enumerate(c.layer_kinds):
        heads, prefix = c.heads[kind], f"layers.{layer_idx}."
        kv_rows = heads.num_kv_heads * heads.head_dim
        layer = {"self_attn.q_proj.weight": linear(heads.num_heads * heads.head_dim, c.hidden)}
        for part in "k" if heads.shared_kv else "kv":
            layer[f"self_attn.{part}_proj.weight"] = linear(kv_rows, c.hidden)
        layer["self_attn.o_proj.weight"] = linear(c.hidden, heads.num_heads * heads.head_dim)
        layer |= {f"self_attn.{part}_norm.weight": normal(heads.head_dim, std=0.2, mean=0.7) for part in "qk"}
        for name in (
            "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm",
            "post_feedforward_layernorm_1", "post_feedforward_layernorm_2", "pre_feedforward_layernorm_2",
        ):  # fmt: skip
            layer[f"{name}.weight"] = normal(c.hidden, std=0.3, mean=1.0)
        layer |= {
            "layer_scalar": normal(1, std=0.1, mean=0.8),
            "mlp.gate_proj.weight": linear(c.mlp, c.hidden, gain=2.0),
            "mlp.up_proj.weight": linear(c.mlp, c.hidden),
            "mlp.down_proj.weight": linear(c.hidden, c.mlp),
            "router.proj.weight": normal(c.num_experts, c.hidden, std=1.5),
            "router.scale": normal(c.hidden, std=0.3, mean=1.0),
            "router.per_expert_scale": normal(c.num_experts, std=0.3, mean=1.0),
            "experts.gate_up_proj": normal(c.num_experts, 2 * c.intermediate, c.hidden, std=2 * c.hidden**-0.5),
            "experts.down_proj": normal(c.num_experts, c.hidden, c.intermediate, std=c.intermediate**-0.5),
        }
        tensors |= {prefix + name: tensor for name, tensor in layer.items()}
    tensors["norm.weight"] = normal(c.hidden, std=0.3, mean=1.0)
    if not c.tied:
        tensors["lm_head.weight"] = normal(c.vocab_size, c.hidden, std=2 * c.hidden**-0.5)
    return tensors


EXPERTS = re.compile(r"layers\.\d+\.experts\.")
MATRICES = re.compile(r"layers\.\d+\.(self_attn\.[qkvo]_proj|mlp\.\w+_proj|experts)\..*")


def rounded(tensors: Mapping[str, Tensor], fmt: str, which: re.Pattern[str]) -> dict[str, Tensor]:
    """``tensors`` in float32, those whose name ``which`` matches after a turn through ``fmt``."""
    block: BlockFormat = block_format(fmt)
    return {name: decode(encode(t.float(), block)) if which.match(name) else t.float() for name, t in tensors.items()}


def to_modelopt(tensors: Mapping[str, Tensor], left_out: re.Pattern[str] | None = None) -> dict[str, Tensor]:
    """The tensors as nvidia-modelopt exports them: matrices in MXFP8, experts apart."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if not MATRICES.match(name) or (left_out is not None and left_out.match(name)):
            found[name] = tensor
            continue
        for part, matrix in _parts(name, tensor):
            coded = encode(matrix.float(), block_format("mxfp8"))
            found[f"{part}.weight"] = coded.values.view(torch.float8_e4m3fn)
            found[f"{part}.weight_scale"] = coded.scales
    return found


def _parts(name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
    if not EXPERTS.match(name):
        return [(name.removesuffix(".weight"), tensor)]
    layer, _, kind = name.rpartition(".")
    if kind == "down_proj":
        return [(f"{layer}.{e}.down_proj", matrix) for e, matrix in enumerate(tensor)]
    halves = [(f"{layer}.{e}.{part}_proj", half) for e, m in enumerate(tensor) for part, half in _halves(m)]
    return [(part, half.contiguous()) for part, half in halves]


def _halves(matrix: Tensor) -> list[tuple[str, Tensor]]:
    gate, up = matrix.chunk(2)
    return [("gate", gate), ("up", up)]


def write_gemma4(
    folder: Path,
    config: Gemma4Config,
    tensors: Mapping[str, Tensor],
    *,
    prefix: str = "model.",
    ignore: list[str] | None = None,
    others: Mapping[str, Tensor] | None = None,
) -> Path:
    """A checkpoint in ``folder``. ``ignore``: it is modelopt's, these modules left out; ``others``: tensors beside."""
    folder.mkdir(parents=True, exist_ok=True)
    text = to_text_config(config)
    data = text if prefix == "model." else {"model_type": "gemma4", "text_config": text, "eos_token_id": None}
    if ignore is not None:
        data["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "MXFP8", "ignore": ignore}
    (folder / "config.json").write_text(json.dumps(data))
    named = {name if name.startswith("lm_head") else prefix + name: t.contiguous() for name, t in tensors.items()}
    save_file(named | dict(others or {}), folder / "model.safetensors")
    return folder


def routers(config: Gemma4Config, prefix: str = "model.") -> list[str]:
    """What modelopt leaves out by itself."""
    return ["lm_head", *(f"{prefix}layers.{layer}.router*" for layer in range(config.num_layers))]


def transformers_gemma4(config: Gemma4Config, tensors: Mapping[str, Tensor]) -> Gemma4ForCausalLM:
    """transformers' own model of these tensors (without prefix), in pure float32."""
    model = Gemma4ForCausalLM(Gemma4TextConfig(**to_text_config(config), attn_implementation="eager")).float().eval()
    state = {name if name.startswith("lm_head") else f"model.{name}": t.float() for name, t in tensors.items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected
    assert set(missing) <= ({"lm_head.weight"} if config.tied else set())
    model.tie_weights()
    return model

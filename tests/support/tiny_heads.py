"""Random draft heads of a few hundred kB in each published layout, and what they compute, in plain float32 torch.

The plain heads read the published config and tensors themselves; nothing of the program is used. They have no pages
and no cache: every guess computes the whole sequence anew.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from microscale.models.gpt_oss.config import GptOssConfig
from support.tiny_checkpoints import CASES

TARGET: GptOssConfig = CASES["heads_6_3"]
"""Four layers of 160 columns, 500 tokens."""
MASK = 499
BLOCK = 6


@dataclass(frozen=True)
class TinyHead:
    """One head as it is published."""

    config: dict[str, Any]
    tensors: Mapping[str, Tensor]
    taps: tuple[int, ...]
    """Layers run before each, as the publisher's own program would take them."""
    prefix: str = "midlayer."

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        save_file({name: tensor.contiguous() for name, tensor in self.tensors.items()}, folder / "model.safetensors")
        return folder

    @property
    def layer_config(self) -> dict[str, Any]:
        inner: dict[str, Any] = self.config.get("transformer_layer_config", self.config)
        return inner


def layer_keys(**others: Any) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": TARGET.hidden,
        "intermediate_size": 224,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-3,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "vocab_size": TARGET.vocab_size,
        **others,
    }


class Maker:
    """Numbers far from 0 and 1, as BF16 holds them."""

    def __init__(self, seed: int) -> None:
        self._draws = torch.Generator().manual_seed(seed)

    def matrix(self, rows: int, columns: int, gain: float = 1.0) -> Tensor:
        scale: float = gain * columns**-0.5
        return (torch.randn(rows, columns, generator=self._draws) * scale).bfloat16()

    def norm(self, size: int) -> Tensor:
        return (1 + 0.3 * torch.randn(size, generator=self._draws)).bfloat16()

    def bias(self, size: int) -> Tensor:
        return torch.randn(size, generator=self._draws).bfloat16()

    def layer(self, keys: Mapping[str, Any], prefix: str, columns: int) -> dict[str, Tensor]:
        hidden, inner, dim = keys["hidden_size"], keys["intermediate_size"], keys["head_dim"]
        rows = {"q": keys["num_attention_heads"] * dim, **dict.fromkeys("kv", keys["num_key_value_heads"] * dim)}
        made = {f"self_attn.{part}_proj.weight": self.matrix(count, columns, 2.0) for part, count in rows.items()}
        made["self_attn.o_proj.weight"] = self.matrix(hidden, rows["q"])
        if keys.get("attention_bias"):
            made |= {f"self_attn.{part}_proj.bias": self.bias(count) for part, count in rows.items()}
            made["self_attn.o_proj.bias"] = self.bias(hidden)
        if keys["model_type"] == "qwen3":
            made |= {f"self_attn.{part}_norm.weight": self.norm(dim) for part in "qk"}
        made |= {f"mlp.{part}_proj.weight": self.matrix(inner, hidden, 2.0) for part in ("gate", "up")}
        made["mlp.down_proj.weight"] = self.matrix(hidden, inner, 2.0)
        made |= {f"{part}_layernorm.weight": self.norm(hidden) for part in ("input", "post_attention")}
        return {prefix + name: tensor for name, tensor in made.items()}

    def eagle3(self, keys: Mapping[str, Any], prefix: str, taps: int, draft_vocab: int | None) -> dict[str, Tensor]:
        """Without norms before ``fc``; ``draft_vocab``: a vocabulary of its own, the target's tokens in odd steps."""
        hidden, vocab = keys["hidden_size"], keys["vocab_size"]
        made = self.layer(keys, prefix, 2 * hidden)
        made[f"{prefix}hidden_norm.weight"] = self.norm(hidden)
        made["fc.weight"] = self.matrix(hidden, taps * TARGET.hidden)
        made["norm.weight"] = self.norm(hidden)
        made["lm_head.weight"] = self.matrix(draft_vocab or vocab, hidden, 4.0)
        if draft_vocab is not None:
            ids = torch.randperm(vocab, generator=self._draws)[:draft_vocab].sort().values
            made["d2t"] = ids - torch.arange(draft_vocab)
            made["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill(0, ids, True)
        return made


def specforge() -> TinyHead:
    """Layers counted from 0, a vocabulary of its own, no rope_theta, no embedding."""
    keys = layer_keys(architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=96)
    keys["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
    return TinyHead(keys, Maker(1).eagle3(keys, "midlayer.", 3, 96), (1, 2, 3))


def nvidia_v3() -> TinyHead:
    """The last tap is behind the last layer, so none is counted from 0; one norm before fc; the whole vocabulary."""
    keys = layer_keys(architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=TARGET.vocab_size, rope_theta=5e5)
    keys["rope_scaling"] = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    }
    keys["eagle_config"] = {
        "eagle_aux_hidden_state_layer_ids": [1, 3, TARGET.num_layers],
        "use_aux_hidden_state": True,
        "use_input_layernorm_in_first_layer": True,
        "use_last_layernorm": True,
        "use_mtp_layernorm": False,
        "norm_before_fc": True,
    }
    maker = Maker(2)
    tensors = maker.eagle3(keys, "midlayer.", 3, None)
    tensors["input_norm.weight"] = maker.norm(3 * TARGET.hidden)
    return TinyHead(keys, tensors, (1, 3, 4))


def speculators() -> TinyHead:
    """Layers run before, norm before fc and before the sum, an embedding of its own, names of its own."""
    layer = layer_keys(rope_theta=1e4)
    keys = {
        "speculators_model_type": "eagle3",
        "architectures": ["Eagle3Speculator"],
        "transformer_layer_config": layer,
        "draft_vocab_size": 128,
        "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
        "norm_before_residual": True,
        "norm_before_fc": True,
        "target_hidden_size": None,
    }
    maker = Maker(3)
    tensors = maker.eagle3(layer, "layers.0.", 3, 128)
    tensors["input_norm.weight"] = maker.norm(3 * TARGET.hidden)
    tensors["embed_tokens.weight"] = maker.matrix(TARGET.vocab_size, TARGET.hidden, 8.0)
    return TinyHead(keys, tensors, (1, 2, 3), "layers.0.")


def speculators_qwen3() -> TinyHead:
    """A Qwen3 layer with biases, and four taps with a norm each; the state goes on after the last norm."""
    layer = layer_keys(rope_theta=1e6, model_type="qwen3", attention_bias=True)
    keys = {
        "speculators_model_type": "eagle3",
        "transformer_layer_config": layer,
        "draft_vocab_size": 100,
        "eagle_aux_hidden_state_layer_ids": [0, 1, 3, 4],
        "norm_before_residual": False,
        "fc_norm": True,
        "norm_output": True,
    }
    maker = Maker(4)
    tensors = maker.eagle3(layer, "layers.0.", 4, 100)
    tensors |= {f"fc_norm.{i}.weight": maker.norm(TARGET.hidden) for i in range(4)}
    return TinyHead(keys, tensors, (0, 1, 3, 4), "layers.0.")


def dflash() -> TinyHead:
    keys = layer_keys(
        architectures=["DFlashDraftModel"], model_type="qwen3", num_hidden_layers=3, rope_theta=1e6, block_size=BLOCK
    )
    keys["layer_types"] = ["full_attention"] * 3
    keys["dflash_config"] = {"mask_token_id": MASK, "target_layer_ids": [0, 2]}
    maker = Maker(5)
    tensors: dict[str, Tensor] = {}
    for layer in range(3):
        tensors |= maker.layer(keys, f"layers.{layer}.", TARGET.hidden)
    tensors["fc.weight"] = maker.matrix(TARGET.hidden, 2 * TARGET.hidden)
    tensors |= {name: maker.norm(TARGET.hidden) for name in ("hidden_norm.weight", "norm.weight")}
    return TinyHead(keys, tensors, (1, 3), "layers.{}.")


EAGLE3 = {made.__name__: made() for made in (specforge, nvidia_v3, speculators, speculators_qwen3)}
HEADS = {**EAGLE3, "dflash": dflash()}


class PlainHead:
    """What both kinds share: a decoder layer over whole sequences."""

    def __init__(self, head: TinyHead, tensors: Mapping[str, Tensor], embed: Tensor, lm_head: Tensor) -> None:
        """``tensors``: the head's, or what another format left of them; ``embed`` and ``lm_head`` are the target's."""
        self.keys = head.layer_config
        self.tensors = {name: t.float() if t.is_floating_point() else t for name, t in tensors.items()}
        self.config = head.config
        self.prefix = head.prefix
        self.embed = self.tensors.get("embed_tokens.weight", embed.float())
        self.lm_head = self.tensors.get("lm_head.weight", lm_head.float())
        names = {key: self.keys[key] for key in ("rope_theta", "rope_scaling") if key in self.keys}
        sizes = {key: self.keys[key] for key in ("hidden_size", "num_attention_heads", "head_dim")}
        self.epsilon: float = self.keys["rms_norm_eps"]
        self.head_dim: int = self.keys["head_dim"]
        self.rotary = LlamaRotaryEmbedding(LlamaConfig(max_position_embeddings=4096, **sizes, **names))

    def norm(self, x: Tensor, name: str) -> Tensor:
        return self.normed(x, self.tensors[name])

    def normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.epsilon) * weight

    def linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))

    def heads(self, x: Tensor, prefix: str, part: str, positions: Tensor | None) -> Tensor:
        """``[heads, rows, head_dim]``, turned if there are positions."""
        found = self.linear(x, f"{prefix}self_attn.{part}_proj").view(len(x), -1, self.head_dim)
        if f"{prefix}self_attn.{part}_norm.weight" in self.tensors:
            found = self.norm(found, f"{prefix}self_attn.{part}_norm.weight")
        found = found.transpose(0, 1)
        if positions is None:
            return found
        cos, sin = self.rotary(found, positions[None])
        first, second = found.chunk(2, -1)
        turned: Tensor = found * cos[0] + torch.cat((-second, first), -1) * sin[0]
        return turned

    def attention(self, prefix: str, queries: Tensor, keys: Tensor, at: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        """``mask``: which keys each query sees; ``at``: positions of queries and of keys."""
        q = self.heads(queries, prefix, "q", at[0])
        k, v = self.heads(keys, prefix, "k", at[1]), self.heads(keys, prefix, "v", None)
        k, v = (t.repeat_interleave(q.shape[0] // t.shape[0], 0) for t in (k, v))
        scores = (q @ k.transpose(1, 2) * self.head_dim**-0.5).masked_fill(~mask, -torch.inf)
        return self.linear((scores.softmax(-1) @ v).transpose(0, 1).flatten(1), f"{prefix}self_attn.o_proj")

    def mlp(self, x: Tensor, prefix: str) -> Tensor:
        x = self.norm(x, f"{prefix}post_attention_layernorm.weight")
        gate, up = (self.linear(x, f"{prefix}mlp.{part}_proj") for part in ("gate", "up"))
        return self.linear(F.silu(gate) * up, f"{prefix}mlp.down_proj")


class PlainEagle3(PlainHead):
    def combine(self, tapped: Tensor) -> Tensor:
        if "input_norm.weight" in self.tensors:
            tapped = self.norm(tapped, "input_norm.weight")
        elif "fc_norm.0.weight" in self.tensors:
            parts = tapped.split(TARGET.hidden, -1)
            tapped = torch.cat([self.norm(part, f"fc_norm.{i}.weight") for i, part in enumerate(parts)], -1)
        return self.linear(tapped, "fc")

    def rows(self, next_tokens: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Logits and states of every row of a sequence, from the tokens after them and the states before them."""
        prefix = self.prefix
        normed = self.norm(hidden, f"{prefix}hidden_norm.weight")
        x = normed if self.config.get("norm_before_residual") else hidden
        both = torch.cat((self.norm(self.embed[next_tokens], f"{prefix}input_layernorm.weight"), normed), -1)
        positions = torch.arange(len(next_tokens))
        x = x + self.attention(prefix, both, both, (positions, positions), positions[:, None] >= positions)
        x = x + self.mlp(x, prefix)
        normed = self.norm(x, "norm.weight")
        return F.linear(normed, self.lm_head), normed if self.config.get("norm_output") else x

    def guess(self, next_tokens: list[int], tapped: Tensor, count: int) -> tuple[list[int], Tensor]:
        """The tokens guessed after a sequence, and the logits ``[count, draft vocabulary]`` of each guess."""
        tokens, hidden = list(next_tokens), self.combine(tapped.float())
        drafts, found = [], []
        for _ in range(count):
            logits, states = self.rows(torch.tensor(tokens), hidden)
            best = int(logits[-1].argmax())
            drafts.append(best + int(self.tensors["d2t"][best]) if "d2t" in self.tensors else best)
            found.append(logits[-1])
            tokens.append(drafts[-1])
            hidden = torch.cat((hidden, states[-1:]))
        return drafts, torch.stack(found)


class PlainDFlash(PlainHead):
    def guess(self, next_tokens: list[int], tapped: Tensor, count: int) -> tuple[list[int], Tensor]:
        context = self.norm(self.linear(tapped.float(), "fc"), "hidden_norm.weight")
        rows = len(next_tokens)
        x = self.embed[torch.tensor([next_tokens[-1], *[MASK] * count])]
        block = torch.arange(rows, rows + count + 1)
        for layer in range(self.keys["num_hidden_layers"]):
            prefix = self.prefix.format(layer)
            normed = self.norm(x, f"{prefix}input_layernorm.weight")
            everything = torch.ones(count + 1, rows + count + 1, dtype=torch.bool)
            at = block, torch.arange(rows + count + 1)
            x = x + self.attention(prefix, normed, torch.cat((context, normed)), at, everything)
            x = x + self.mlp(x, prefix)
        logits = F.linear(self.norm(x, "norm.weight"), self.lm_head)[1:]
        return logits.argmax(-1).tolist(), logits


def plain_head(name: str, tensors: Mapping[str, Tensor], embed: Tensor, lm_head: Tensor) -> PlainEagle3 | PlainDFlash:
    kind = PlainDFlash if name == "dflash" else PlainEagle3
    return kind(HEADS[name], tensors, embed, lm_head)

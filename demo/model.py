"""gpt-oss for training: batched, differentiable, with the number formats of the checkpoint in the loop.

The experts' weights are rounded to MXFP4 in every forward pass, with the code and the block orientation of the
checkpoint; everything else is rounded to BF16. Gradients pass through the rounding. So what is exported is what was
trained. Matrix products run in ``dtype``, the residual stream and all sums in float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from demo import attention, experts
from microscale.formats import MXFP4, decode, encode
from microscale.models.config import LayerKind
from microscale.models.gpt_oss.config import GptOssConfig
from microscale.models.rope import yarn_table


class Rounded(torch.autograd.Function):
    """The weights as the checkpoint will hold them; gradients go straight through."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, mxfp4: bool, dtype: torch.dtype) -> Tensor:
        # E2M1 under a power of two is exact in BF16.
        return decode(encode(weight, MXFP4), dtype) if mxfp4 else weight.bfloat16().to(dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.float(), None, None


def rounded(weight: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    result: Tensor = Rounded.apply(weight, False, dtype)  # type: ignore[no-untyped-call]
    return result


def in_mxfp4(weight: Tensor, dtype: torch.dtype) -> Tensor:
    result: Tensor = Rounded.apply(weight, True, dtype)  # type: ignore[no-untyped-call]
    return result


@dataclass(frozen=True)
class Options:
    """How the arithmetic is done; the numbers are the same within rounding."""

    dtype: torch.dtype = torch.float32
    attention: str = "plain"
    """``plain``, or ``flex`` (compiled, for a GPU)."""
    experts: str = "loop"
    """``loop``, or ``grouped`` (torch's grouped GEMM, for a GPU)."""
    gate: str = "plain"
    """``plain``, or ``compiled``."""
    frozen: bool = False
    """The experts' weights come from a checkpoint and stay: they are rounded already."""


def normal(*shape: int, std: float) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape) * std)


def zeros(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(*shape))


class Attention(nn.Module):
    def __init__(self, config: GptOssConfig) -> None:
        super().__init__()
        self.config = config
        hidden, heads, kv = config.hidden, config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q, self.k, self.v = (normal(rows, hidden, std=hidden**-0.5) for rows in (heads, kv, kv))
        self.q_bias, self.k_bias, self.v_bias = zeros(heads), zeros(kv), zeros(kv)
        self.o, self.o_bias = normal(hidden, heads, std=0.5 * (heads * config.num_layers) ** -0.5), zeros(hidden)
        self.sinks = zeros(config.num_heads)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], mask: attention.Mask, options: Options) -> Tensor:
        c = self.config
        rows, length, _ = x.shape
        weight = torch.cat([rounded(w, options.dtype) for w in (self.q, self.k, self.v)])
        bias = torch.cat([rounded(b, options.dtype) for b in (self.q_bias, self.k_bias, self.v_bias)])
        qkv = F.linear(x, weight, bias).view(rows, length, -1, c.head_dim).transpose(1, 2)
        q, k, v = qkv.split([c.num_heads, c.num_kv_heads, c.num_kv_heads], dim=1)
        q, k = attention.rotate(q, *rope), attention.rotate(k, *rope)
        attend = attention.flex if options.attention == "flex" else attention.plain
        y = attend(q, k, v, mask, rounded(self.sinks))
        y = y.transpose(1, 2).reshape(rows, length, -1)
        return F.linear(y.to(options.dtype), rounded(self.o, options.dtype), rounded(self.o_bias, options.dtype))


class Experts(nn.Module):
    def __init__(self, config: GptOssConfig) -> None:
        super().__init__()
        self.config = config
        hidden, inner, num = config.hidden, config.intermediate, config.num_experts
        self.router, self.router_bias = normal(num, hidden, std=hidden**-0.5), zeros(num)
        self.gate_up, self.gate_up_bias = normal(num, 2 * inner, hidden, std=hidden**-0.5), zeros(num, 2 * inner)
        self.down = normal(num, hidden, inner, std=0.5 * (inner * config.num_layers) ** -0.5)
        self.down_bias = zeros(num, hidden)

    def forward(self, x: Tensor, options: Options) -> tuple[Tensor, Tensor]:
        """``x [tokens, hidden]``; gives what the experts add, and how unevenly they were used (1 is evenly)."""
        c = self.config
        scores = F.linear(x.float(), rounded(self.router), rounded(self.router_bias))
        top, chosen = scores.topk(c.top_k, dim=-1)
        weights = torch.softmax(top, dim=-1)
        share = torch.zeros(c.num_experts, device=x.device).scatter_add_(
            0, chosen.flatten(), torch.ones(chosen.numel(), device=x.device)
        )
        balance = (share / chosen.numel() * scores.softmax(-1).mean(0)).sum() * c.num_experts
        gate_up, down = (
            weight.to(options.dtype) if options.frozen else in_mxfp4(weight, options.dtype)
            for weight in (self.gate_up, self.down)
        )
        parts = experts.Weights(
            gate_up,
            rounded(self.gate_up_bias, options.dtype),
            down,
            rounded(self.down_bias, options.dtype),
        )
        how = experts.Arithmetic(
            c.swiglu_alpha,
            c.swiglu_limit,
            experts.grouped if options.experts == "grouped" else experts.loop,
            experts.compiled_gated() if options.gate == "compiled" else experts.gated,
        )
        return experts.mixture(x, chosen, weights, parts, how), balance


class Layer(nn.Module):
    def __init__(self, config: GptOssConfig, kind: LayerKind) -> None:
        super().__init__()
        self.kind = kind
        self.attention_norm = nn.Parameter(torch.ones(config.hidden))
        self.attention = Attention(config)
        self.experts_norm = nn.Parameter(torch.ones(config.hidden))
        self.experts = Experts(config)


class Model(nn.Module):
    """Tokens ``[rows, length]`` to logits; ``documents`` says which tokens may see each other."""

    def __init__(self, config: GptOssConfig, options: Options | None = None) -> None:
        super().__init__()
        self.config = config
        self.options = options or Options()
        self.embed = normal(config.vocab_size, config.hidden, std=0.1)
        self.layers = nn.ModuleList(Layer(config, kind) for kind in config.layer_kinds)
        self.norm = nn.Parameter(torch.ones(config.hidden))
        self.lm_head = normal(config.vocab_size, config.hidden, std=0.5 * config.hidden**-0.5)

    def hidden(self, tokens: Tensor, documents: Tensor, streams: list[Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """The last layer's output, normed, in the products' type; and the mean balance of the experts.

        ``streams`` gets the residual stream before the first layer and behind each."""
        c, dtype = self.config, self.options.dtype
        rope = attention.rope_of(yarn_table(c.rope, c.head_dim, tokens.device), attention.positions(documents))
        flexible = self.options.attention == "flex"
        masks = {
            kind: attention.make_mask(documents, c.sliding_window if kind is LayerKind.SLIDING else None, flexible)
            for kind in set(c.layer_kinds)
        }
        x = F.embedding(tokens, rounded(self.embed))
        balances = []
        for layer in self.layers:
            assert isinstance(layer, Layer)
            if streams is not None:
                streams.append(x)
            normed = self._norm(x, layer.attention_norm).to(dtype)
            x = x + layer.attention(normed, rope, masks[layer.kind], self.options).float()
            normed = self._norm(x, layer.experts_norm).to(dtype)
            added, balance = layer.experts(normed.flatten(0, 1), self.options)
            x = x + added.view(x.shape)
            balances.append(balance)
        if streams is not None:
            streams.append(x)
        return self._norm(x, self.norm).to(dtype), torch.stack(balances).mean()

    def forward(self, tokens: Tensor, documents: Tensor) -> tuple[Tensor, Tensor]:
        hidden, balance = self.hidden(tokens, documents)
        return F.linear(hidden, rounded(self.lm_head, self.options.dtype)).float(), balance

    def loss(self, tokens: Tensor, documents: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """The weighted mean loss of each next token, and the balance of the experts."""
        logits, balance = self(tokens, documents)
        losses = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
        wanted = weights[:, 1:].flatten()
        return (losses * wanted).sum() / wanted.sum().clamp(min=1e-6), balance

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], None, self.config.rms_epsilon) * rounded(weight)

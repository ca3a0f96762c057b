"""The mixture of experts over sorted tokens: no capacity, no token dropped.

Rows are sorted by expert, and each expert's begin at a multiple of ``ALIGN``: torch's grouped product reads them in the
backward pass as columns, 16 bytes at a time, and takes no expert without rows. The rows between are zeros, and their
output is not looked at.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

ALIGN = 16
GROUPED: Callable[..., Tensor] = getattr(F, "grouped_mm", torch._grouped_mm)
"""Public since torch 2.10, under another name before."""


@dataclass(frozen=True)
class Weights:
    """As the products take them. E experts, H hidden, I intermediate; gate rows even, up rows odd."""

    gate_up: Tensor  # [E, 2I, H]
    gate_up_bias: Tensor  # [E, 2I]
    down: Tensor  # [E, H, I]
    down_bias: Tensor  # [E, H]


@dataclass(frozen=True)
class Layout:
    """Where the pairs of a token and an expert stand."""

    place: Tensor
    """``[pairs]``: the row of each pair."""
    source: Tensor
    """``[rows]``: the pair of each row; one beyond the last where there is none."""
    owner: Tensor
    """``[rows, E]``: 1 for the row's expert. A product with it looks biases up, and its gradient is a product too and
    not 100,000 additions to 16 rows."""
    ends: Tensor
    """``[E]``: where each expert's rows end; the last one's with the last row."""


def lay_out(chosen: Tensor, num_experts: int, dtype: torch.dtype) -> Layout:
    """For ``chosen [tokens, k]``. The number of rows does not depend on the choice: nothing waits for the GPU."""
    flat = chosen.flatten()
    pairs = torch.arange(len(flat), device=flat.device)
    order = flat.argsort(stable=True)
    counts = torch.zeros(num_experts, dtype=torch.int64, device=flat.device)
    counts = counts.scatter_add_(0, flat, torch.ones_like(flat))
    padded = ((counts + ALIGN - 1) // ALIGN * ALIGN).clamp(min=ALIGN)
    shift = (padded.cumsum(0) - padded) - (counts.cumsum(0) - counts)
    place = torch.empty_like(flat).scatter_(0, order, pairs + shift[flat[order]])
    num_rows = -(-(len(flat) + ALIGN * num_experts) // ALIGN) * ALIGN
    source = torch.full((num_rows,), len(flat), device=flat.device).scatter_(0, place, pairs)
    expert = torch.cat((flat, flat.new_full((1,), num_experts)))[source]
    ends = padded.cumsum(0).int()
    ends[-1] = num_rows
    return Layout(place, source, F.one_hot(expert, num_experts + 1)[:, :-1].to(dtype), ends)


class Gather(torch.autograd.Function):
    """Rows of ``x`` by ``index``, zeros where that is one beyond the last; ``back`` is the index of the way back, so
    that the gradient is a look-up as well and not a scatter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(index, back)
        return _rows(x, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        _, back = ctx.saved_tensors
        return _rows(grad, back), None, None


def _rows(x: Tensor, index: Tensor) -> Tensor:
    return torch.cat((x, x.new_zeros(1, x.shape[1])))[index]


def gather(x: Tensor, index: Tensor, back: Tensor) -> Tensor:
    result: Tensor = Gather.apply(x, index, back)  # type: ignore[no-untyped-call]
    return result


Multiply = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Rows ``[rows, K]``, weights ``[E, N, K]``, ends ``[E]`` to ``[rows, N]``."""


def loop(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    parts = x.tensor_split(ends[:-1].tolist())
    return torch.cat([part @ weight[at].T for at, part in enumerate(parts)])


def grouped(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """One launch for all experts, and no wait for the counts."""
    product: Tensor = GROUPED(x, weight.transpose(1, 2), offs=ends)
    return product


def gated(x: Tensor, alpha: float, limit: float) -> Tensor:
    """gpt-oss's clamped SwiGLU of ``x [rows, 2I]``."""
    gate, up = x.unflatten(-1, (-1, 2)).float().unbind(-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    result: Tensor = (up + 1) * gate * torch.sigmoid(alpha * gate)
    return result.to(x.dtype)


@cache
def compiled_gated() -> Callable[[Tensor, float, float], Tensor]:
    """In one kernel: ten in a row over 270 MB each would take longer than the products."""
    return torch.compile(gated, dynamic=True)


@dataclass(frozen=True)
class Arithmetic:
    """How it is computed."""

    alpha: float
    limit: float
    multiply: Multiply = loop
    gate: Callable[[Tensor, float, float], Tensor] = gated


def mixture(x: Tensor, chosen: Tensor, shares: Tensor, weights: Weights, how: Arithmetic) -> Tensor:
    """``x [tokens, H]``, ``chosen`` and ``shares [tokens, k]``; the weighted sum of the chosen experts in float32."""
    tokens, k = chosen.shape
    at = lay_out(chosen, weights.gate_up.shape[0], x.dtype)
    pairs = x[:, None].expand(tokens, k, -1).reshape(tokens * k, -1)
    rows = gather(pairs, at.source, at.place)
    inner = torch.addmm(how.multiply(rows, weights.gate_up, at.ends), at.owner, weights.gate_up_bias)
    inner = how.gate(inner, how.alpha, how.limit)
    out = torch.addmm(how.multiply(inner, weights.down, at.ends), at.owner, weights.down_bias)
    out = gather(out, at.place, at.source).view(tokens, k, -1)
    return (out.float() * shares[..., None]).sum(1)

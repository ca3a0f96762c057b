"""``attention`` as plain float32 arithmetic on any device, one sequence at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from microscale.hardware import Gpu
from microscale.kernels.attention.cost import attention_flops, kv_bytes
from microscale.kernels.attention.op import AttentionOp, AttentionPath
from microscale.kernels.attention.spec import AttentionBatch, AttentionSpec, PagedKv
from microscale.kernels.op import Cost, Reason, always

if TYPE_CHECKING:
    from torch import Tensor


def gather(cache: Tensor, scale: Tensor | None, pages: Tensor, first: int, last: int) -> Tensor:
    """Positions ``first`` to ``last`` (exclusive) of one sequence: ``[kv_heads, positions, head_dim]`` in float32."""
    page_size = cache.shape[2]
    first_page = first // page_size
    wanted = cache[pages[first_page : -(-last // page_size)].long()]
    if wanted.dtype == torch.uint8:
        wanted = wanted.view(torch.float8_e4m3fn)
    rows = wanted.float().transpose(0, 1).flatten(1, 2)  # [kv_heads, pages * page_size, head_dim]
    rows = rows[:, first - first_page * page_size : last - first_page * page_size]
    return rows if scale is None else rows * scale[:, None, None]


def attend(
    q: Tensor, k: Tensor, v: Tensor, first_query: int, first_key: int, spec: AttentionSpec, sinks: Tensor | None
) -> Tensor:
    """``q [queries, heads, head_dim]`` over ``k, v [kv_heads, keys, head_dim]`` of one sequence."""
    queries, heads, head_dim = q.shape
    group = heads // spec.num_kv_heads
    q = q.float().view(queries, spec.num_kv_heads, group, head_dim)
    scores = torch.einsum("qhgd,hkd->hgqk", q, k) * spec.softmax_scale
    query_pos = first_query + torch.arange(queries, device=q.device)[:, None]
    key_pos = first_key + torch.arange(k.shape[1], device=q.device)[None, :]
    hidden = key_pos > query_pos
    if spec.window is not None:
        hidden |= key_pos <= query_pos - spec.window
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        column = sinks.float().view(spec.num_kv_heads, group, 1, 1).expand(-1, -1, queries, 1)
        scores = torch.cat((scores, column), dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : k.shape[1]]
    return torch.einsum("hgqk,hkd->qhgd", weights, v).reshape(queries, heads, head_dim)


def attention(q: Tensor, kv: PagedKv, batch: AttentionBatch, spec: AttentionSpec, sinks: Tensor | None) -> Tensor:
    """``q [tokens, heads, head_dim]`` → the same shape in float32."""
    out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    starts, lens = batch.query_start.tolist(), batch.context_lens.tolist()
    for seq, context_len in enumerate(lens):
        start, end = starts[seq], starts[seq + 1]
        if start == end:
            continue
        first_query = context_len - (end - start)
        first_key = 0 if spec.window is None else max(0, first_query - spec.window + 1)
        k = gather(kv.k, kv.k_scale, batch.page_table[seq], first_key, context_len)
        v = gather(kv.v, kv.v_scale, batch.page_table[seq], first_key, context_len)
        out[start:end] = attend(q[start:end], k, v, first_query, first_key, spec, sinks)
    return out


def _run(spec: AttentionSpec, gpu: Gpu, q: Tensor, kv: PagedKv, batch: AttentionBatch, sinks: Tensor | None) -> Tensor:
    # On ``meta`` there are no lengths to go by, and no kernel of ours would run.
    return q.new_empty(q.shape) if q.is_meta else attention(q, kv, batch, spec, sinks).to(q.dtype)


class ReferenceAttention(AttentionOp):
    """Float32, sequence by sequence, scores in full."""

    name = "reference"
    paths = (AttentionPath("sequence by sequence", "it is the only one", always, _run),)
    uncapturable = "reads the sequences' lengths on the host"

    def supports(self, spec: AttentionSpec, gpu: Gpu) -> Reason | None:
        if spec.num_heads % spec.num_kv_heads:
            return f"needs query heads that divide among KV heads, not {spec.num_heads} over {spec.num_kv_heads}"
        if spec.activations.narrow:
            return f"computes in float32, not with {spec.activations} activations"
        return None

    def cost(self, spec: AttentionSpec, gpu: Gpu) -> Cost:
        return Cost(kv_bytes(spec), attention_flops(spec), efficiency=0.05)

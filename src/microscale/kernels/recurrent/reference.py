"""``recurrent`` as plain float32 arithmetic on any device, one sequence and one token at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import silu, softplus

from microscale.hardware import Gpu
from microscale.kernels.op import Cost, Reason, always
from microscale.kernels.recurrent.cost import recurrent_bytes, recurrent_flops
from microscale.kernels.recurrent.spec import (
    RING,
    RecurrentOp,
    RecurrentPath,
    RecurrentSpec,
    RecurrentWeights,
    StateBatch,
    StateCache,
    why_malformed,
)

if TYPE_CHECKING:
    from torch import Tensor


def _convolve(x: Tensor, before: Tensor, weight: Tensor) -> Tensor:
    """``x [tokens, channels]`` behind ``before [taps - 1, channels]``: each channel's convolution and SiLU."""
    taps = weight.shape[1]
    rows = torch.cat((before, x)).unfold(0, taps, 1)  # [tokens, channels, taps]
    return silu((rows * weight).sum(-1))


def _normalised(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def _delta_rule(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, rate: Tensor, state: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """``q, k [tokens, heads, key_dim]``, ``v [tokens, heads, value_dim]``, ``log_decay, rate [tokens, heads]`` and the
    state ``[heads, key_dim, value_dim]``: what each token recalls ``[heads, value_dim]``, and the state after it."""
    for token in range(v.shape[0]):
        state = state * log_decay[token].exp()[:, None, None]
        error = v[token] - torch.einsum("hk,hkv->hv", k[token], state)
        state = state + torch.einsum("hk,hv->hkv", k[token], rate[token][:, None] * error)
        yield torch.einsum("hk,hkv->hv", q[token], state), state


def recurrent(
    projected: Tensor, x: Tensor, weights: RecurrentWeights, cache: StateCache, batch: StateBatch,
    spec: RecurrentSpec,
) -> Tensor:  # fmt: skip
    """The op, in float32."""
    out = torch.zeros(projected.shape[0], spec.width, dtype=torch.float32, device=projected.device)
    gates = x.float() @ weights.gates.float().T
    starts, lens = batch.query_start.tolist(), batch.context_lens.tolist()
    for seq, context_len in enumerate(lens):
        start, end = starts[seq], starts[seq + 1]
        if start == end:
            continue
        first, slot = context_len - (end - start), int(batch.read[seq])
        state = cache.state[slot] if first else torch.zeros_like(cache.state[0])
        before = [cache.columns[slot, :, p % RING] for p in range(max(0, first - spec.taps + 1), first)]
        zeros = [torch.zeros_like(cache.columns[0, :, 0])] * (spec.taps - 1 - len(before))
        history = torch.stack([*zeros, *before])
        qkv, z = projected[start:end].split((spec.channels, spec.width), dim=1)
        b, a = gates[start:end].chunk(2, dim=1)
        heads, key_heads = spec.num_heads, spec.num_key_heads
        mixed = _convolve(qkv.float(), history.float(), weights.conv.float())
        q, k, v = mixed.split((key_heads * spec.key_dim, key_heads * spec.key_dim, spec.width), dim=1)
        q, k = (
            _normalised(x.reshape(-1, key_heads, spec.key_dim)).repeat_interleave(spec.group, dim=1) for x in (q, k)
        )
        log_decay = weights.decay * softplus(a + weights.dt_bias)
        v, columns = v.reshape(-1, heads, spec.value_dim), torch.cat((history, qkv.to(history.dtype)))
        recalled = torch.empty_like(v)
        steps = _delta_rule(q * spec.key_dim**-0.5, k, v, log_decay, torch.sigmoid(b), state)
        for token, (recalled[token], state) in enumerate(steps):
            if batch.verify or token == end - start - 1:
                to = int(batch.write[seq, token if batch.verify else 0])
                cache.state[to] = state
                for back in range(min(spec.taps - 1, first + token + 1)):
                    cache.columns[to, :, (first + token - back) % RING] = columns[spec.taps - 1 + token - back]
        scale = torch.rsqrt(recalled.square().mean(-1, keepdim=True) + weights.epsilon)
        gate = silu(z.float()).reshape(-1, heads, spec.value_dim)
        out[start:end] = (recalled * scale * weights.norm.float() * gate).flatten(1)
    return out


def _run(
    spec: RecurrentSpec, gpu: Gpu, projected: Tensor, x: Tensor, weights: RecurrentWeights, cache: StateCache,
    batch: StateBatch,
) -> Tensor:  # fmt: skip
    # On ``meta`` there are no lengths to go by, and no kernel of ours would run.
    if projected.is_meta:
        return projected.new_empty(projected.shape[0], spec.width)
    return recurrent(projected, x, weights, cache, batch, spec).to(projected.dtype)


class ReferenceRecurrent(RecurrentOp):
    """Float32, sequence by sequence, token by token."""

    name = "reference"
    paths = (RecurrentPath("token by token", "it is the only one", always, _run),)
    uncapturable = "reads the sequences' lengths on the host"

    def supports(self, spec: RecurrentSpec, gpu: Gpu) -> Reason | None:
        return why_malformed(spec)

    def cost(self, spec: RecurrentSpec, gpu: Gpu) -> Cost:
        return Cost(recurrent_bytes(spec), recurrent_flops(spec), efficiency=0.02)

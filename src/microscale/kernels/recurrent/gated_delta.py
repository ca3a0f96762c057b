"""``triton``: Gated DeltaNet on any GPU with bf16 matrix units. Owns the launches.

Sequences with few new tokens run them one after the other, in one launch (``gated_delta_jit``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from microscale.hardware import Feature, Gpu
from microscale.kernels import binding
from microscale.kernels.launch import launch
from microscale.kernels.op import Activations, Cost, Reason
from microscale.kernels.recurrent import gated_delta_jit
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

HEAD_DIMS = (32, 64, 128)
TOKEN_WARPS = 8
"""64 numbers of a state of 128 x 128 a thread. Two programs run on an SM, and one writes while the other reads."""


def short_len(spec: RecurrentSpec) -> int:
    """New tokens of a sequence up to which they run one after the other: those of a step with drafts, and as many as
    may write their columns in place while others read the ones before."""
    return RING - (spec.taps - 1)


def uses_pdl(gpu: Gpu) -> bool:
    return gpu.has(Feature.PDL) and not binding.PLAIN


def _layer(spec: RecurrentSpec) -> dict[str, Any]:
    return {
        "KEY_HEADS": spec.num_key_heads, "GROUP": spec.group, "DIM": spec.key_dim, "TAPS": spec.taps, "RING": RING,
    }  # fmt: skip


def _empty(spec: RecurrentSpec, projected: Tensor) -> Tensor:
    return torch.empty((projected.shape[0], spec.width), dtype=projected.dtype, device=projected.device)


def _launch_tokens(
    spec: RecurrentSpec, gpu: Gpu, projected: Tensor, gates: Tensor, weights: RecurrentWeights, cache: StateCache,
    batch: StateBatch, out: Tensor,
) -> None:  # fmt: skip
    pdl = uses_pdl(gpu)
    arguments = (
        projected, gates, weights.conv, weights.decay, weights.dt_bias, weights.norm, cache.state, cache.columns, out,
        batch.query_start, batch.context_lens, batch.read, batch.write,
        weights.epsilon, short_len(spec), projected.stride(0), gates.stride(0), cache.state.stride(0),
        cache.columns.stride(0), batch.write.stride(0),
    )  # fmt: skip
    constants = _layer(spec) | {"ONE": batch.shape.longest == 1, "VERIFY": batch.verify, "PDL": pdl, "PLAIN": binding.PLAIN}
    options: dict[str, Any] = {"num_warps": 8 if batch.shape.longest == 1 else 16, "maxnreg": 128}
    if pdl:
        options["launch_pdl"] = True
    launch(gated_delta_jit.run_tokens, (spec.num_heads, batch.shape.sequences), arguments, constants, options)


def _run_tokens(
    spec: RecurrentSpec, gpu: Gpu, projected: Tensor, gates: Tensor, weights: RecurrentWeights, cache: StateCache,
    batch: StateBatch,
) -> Tensor:  # fmt: skip
    out = _empty(spec, projected)
    if projected.shape[0]:
        _launch_tokens(spec, gpu, projected, gates, weights, cache, batch, out)
    return out


def _all_short(spec: RecurrentSpec, gpu: Gpu) -> Reason | None:
    if spec.shape.longest > short_len(spec):
        return f"is for up to {short_len(spec)} new tokens of a sequence, not {spec.shape.longest}"
    return None


TOKEN_BY_TOKEN = RecurrentPath("token by token", "a state is read once and stays in registers", _all_short, _run_tokens)


class TritonRecurrent(RecurrentOp):
    """The state in float32; convolution, norms and gates next to it in the same launch."""

    name = "triton"
    paths = (TOKEN_BY_TOKEN,)
    uncapturable = None

    def supports(self, spec: RecurrentSpec, gpu: Gpu) -> Reason | None:
        if not gpu.has(Feature.MMA_BF16):
            return f"runs on GPUs, and this is a {gpu.name}"
        if spec.key_dim not in HEAD_DIMS or spec.value_dim != spec.key_dim:
            sizes = ", ".join(map(str, HEAD_DIMS))
            return f"has keys and values of one size, {sizes}, not {spec.key_dim} and {spec.value_dim}"
        if 2 * (spec.taps - 1) > RING:
            return f"convolves up to {RING // 2 + 1} tokens, not {spec.taps}"
        return why_malformed(spec)

    def cost(self, spec: RecurrentSpec, gpu: Gpu) -> Cost:
        return Cost(recurrent_bytes(spec), recurrent_flops(spec), efficiency=0.6)

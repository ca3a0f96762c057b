"""``triton``: Gated DeltaNet on any GPU with bf16 matrix units. Owns the launches.

Sequences with few new tokens run them one after the other (``gated_delta_jit``), the others in chunks (``chunks_jit``).
Both leave the other's sequences alone, so a step that mixes them takes both ways, and a sequence that decodes gets the
same numbers next to a prompt as without one. Grids follow from sizes that the host knows; lengths are read on the
device.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from microscale.hardware import Feature, Gpu
from microscale.hardware.triton_faults import USED_BY
from microscale.kernels import binding
from microscale.kernels.launch import launch
from microscale.kernels.numbers import cdiv
from microscale.kernels.op import Cost, Reason, always
from microscale.kernels.recurrent import chunks_jit, gated_delta_jit
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
CHUNK = 64
BLOCK_V = 32
"""Columns of the state in a program of ``advance``. Fewer than 64 also means ``mma.sync`` on every card. On SM 10.0,
``tcgen05`` would take a sum that its loop carries as an operand, which Triton compiles wrong
(``TritonForm.RECURRENT_DOT``)."""
MMA = r"mma\.sync\S*f16|wgmma\S*f16|tcgen05\.mma"
ADVANCE_MMA = r"mma\.sync\S*f16"


def short_len(spec: RecurrentSpec) -> int:
    """New tokens of a sequence up to which they run one after the other: those of a step with drafts, and as many as
    may write their columns in place while others read the ones before."""
    return RING - (spec.taps - 1)


@dataclass(frozen=True)
class _Call:
    """One call, as all kernels see it."""

    spec: RecurrentSpec
    gpu: Gpu
    projected: Tensor
    x: Tensor
    weights: RecurrentWeights
    cache: StateCache
    batch: StateBatch

    def layer(self) -> dict[str, Any]:
        spec = self.spec
        return {"KEY_HEADS": spec.num_key_heads, "GROUP": spec.group, "DIM": spec.key_dim}

    def convolution(self) -> dict[str, Any]:
        return {"TAPS": self.spec.taps, "RING": RING}

    def run_tokens(self, out: Tensor) -> None:
        """Sequences of up to ``short_len`` new tokens."""
        batch, weights, cache = self.batch, self.weights, self.cache
        one, pdl = batch.shape.longest == 1, self.gpu.has(Feature.PDL) and not binding.PLAIN
        arguments = (
            self.projected, self.x, weights.gates, weights.conv, weights.decay, weights.dt_bias, weights.norm,
            cache.state, cache.columns, out, batch.query_start, batch.context_lens, batch.read, batch.write,
            weights.epsilon, short_len(self.spec), self.projected.stride(0), self.x.stride(0),
            cache.state.stride(0), cache.columns.stride(0), batch.write.stride(0),
        )  # fmt: skip
        constants = self.layer() | self.convolution()
        constants |= {
            "HIDDEN": self.spec.hidden,
            "ONE": one,
            "VERIFY": batch.verify,
            "PDL": pdl,
            "PLAIN": binding.PLAIN,
        }
        # 64 numbers of the state a thread, which are 8 warps for 128 x 128. With 128 registers two programs run on an
        # SM, and one reads while the other writes. A loop over tokens needs 200: with half the state a thread it has
        # room. A thread has several rows of the state however small it is. With one, a product and the sum over threads
        # would become one instruction, which rounds otherwise in each thread.
        warps = max(1, self.spec.key_dim * self.spec.value_dim // 2048)
        options: dict[str, Any] = {"num_warps": warps if one else 2 * warps, "maxnreg": 128}
        if pdl:
            options["launch_pdl"] = True
        grid = (self.spec.num_heads, batch.shape.sequences)
        launch(gated_delta_jit.run_tokens, grid, arguments, constants, options)

    def run_chunks(self, out: Tensor) -> None:
        """Sequences of more than ``short_len`` new tokens."""
        spec, batch, weights, cache = self.spec, self.batch, self.weights, self.cache
        tokens, sequences, device = self.projected.shape[0], batch.shape.sequences, self.projected.device

        def scratch(heads: int, width: int, dtype: torch.dtype = torch.float16) -> Tensor:
            return torch.empty((heads, tokens, width), dtype=dtype, device=device)

        q, k = (scratch(spec.num_key_heads, spec.key_dim) for _ in range(2))
        v = scratch(spec.num_heads, spec.value_dim)
        inverse, scores = (scratch(spec.num_heads, CHUNK) for _ in range(2))
        decays, rates = (scratch(spec.num_heads, 1, torch.float32) for _ in range(2))
        made = q, k, v, inverse, scores, decays, rates
        gates = _project(self.x, weights.gates)
        blocks, short, row = tokens // CHUNK + sequences, short_len(spec), self.projected.stride(0)

        arguments: tuple[Any, ...] = (
            self.projected, gates, weights.conv, weights.decay, weights.dt_bias, cache.columns, *made,
            batch.query_start, batch.context_lens, batch.read,
            tokens, sequences, short, row, gates.stride(0), cache.columns.stride(0),
        )  # fmt: skip
        constants = self.layer() | self.convolution() | {"CHUNK": CHUNK}
        launch(chunks_jit.prepare, (blocks, spec.num_heads), arguments, constants, {"num_warps": 8}, MMA)

        arguments = (
            self.projected, *made, cache.state, cache.columns,
            batch.query_start, batch.context_lens, batch.read, batch.write,
            tokens, short, row, cache.state.stride(0), cache.columns.stride(0), batch.write.stride(0),
        )  # fmt: skip
        grid = (spec.num_heads * cdiv(spec.value_dim, BLOCK_V), sequences)
        options = {"num_warps": 4, "num_stages": 2}
        reason = "heads of 32 numbers are those of the tiny preset" if spec.key_dim == min(HEAD_DIMS) else None
        constants = {**constants, "BLOCK_V": BLOCK_V}  # a dict of its own: the first launch keeps what it was given
        launch(chunks_jit.advance, grid, arguments, constants, options, ADVANCE_MMA, reason)

        arguments = (
            self.projected, v, weights.norm, out, batch.query_start, weights.epsilon, tokens, sequences, short, row,
        )  # fmt: skip
        constants = self.layer() | {"CHUNK": CHUNK, "PLAIN": binding.PLAIN}
        launch(chunks_jit.finish, (blocks, spec.num_heads), arguments, constants, {"num_warps": 8})


def _project(x: Tensor, weight: Tensor) -> Tensor:
    """``x @ weight.T`` in float32, with sums in float32."""
    if x.is_meta:  # a shape alone: see ``kernels/linear.py``
        return x.new_empty((x.shape[0], weight.shape[0]), dtype=torch.float32)
    if x.is_cuda and x.dtype is torch.bfloat16:
        return torch.mm(x, weight.T, out_dtype=torch.float32)
    return x.float() @ weight.float().T


def _run(
    short: bool, long: bool, spec: RecurrentSpec, gpu: Gpu, projected: Tensor, x: Tensor, weights: RecurrentWeights,
    cache: StateCache, batch: StateBatch,
) -> Tensor:  # fmt: skip
    """``short``, ``long``: whether some sequences may be."""
    call = _Call(spec, gpu, projected, x, weights, cache, batch)
    out = torch.empty((projected.shape[0], spec.width), dtype=projected.dtype, device=projected.device)
    if not projected.shape[0]:
        return out
    if short:
        call.run_tokens(out)
    if long:
        call.run_chunks(out)
    return out


def _all_are_short(spec: RecurrentSpec, gpu: Gpu) -> Reason | None:
    if spec.shape.longest > short_len(spec):
        return f"is for up to {short_len(spec)} new tokens of a sequence, not {spec.shape.longest}"
    return None


def _is_one(spec: RecurrentSpec, gpu: Gpu) -> Reason | None:
    return None if spec.shape.sequences == 1 else f"is for one sequence, not {spec.shape.sequences}"


USES = USED_BY["gated delta rule"]
PATHS = (
    RecurrentPath(
        "token by token", "a state is read once and stays in registers", _all_are_short, partial(_run, True, False)
    ),
    RecurrentPath("chunks", "no sequence decodes", _is_one, partial(_run, False, True), uses=USES),
    RecurrentPath("chunks, others token by token", "some may decode", always, partial(_run, True, True), uses=USES),
)


class TritonRecurrent(RecurrentOp):
    """The state in float32 from token to token, or from chunk to chunk."""

    name = "triton"
    paths = PATHS
    uncapturable = None

    def supports(self, spec: RecurrentSpec, gpu: Gpu) -> Reason | None:
        if not gpu.has(Feature.MMA_BF16):
            return f"needs {Feature.MMA_BF16}, which {gpu.name} does not have"
        if spec.key_dim not in HEAD_DIMS or spec.value_dim != spec.key_dim:
            sizes = ", ".join(map(str, HEAD_DIMS))
            return f"has keys and values of one size, {sizes}, not {spec.key_dim} and {spec.value_dim}"
        if 2 * (spec.taps - 1) > RING:
            return f"convolves up to {RING // 2 + 1} tokens, not {spec.taps}"
        return why_malformed(spec)

    def cost(self, spec: RecurrentSpec, gpu: Gpu) -> Cost:
        counted = recurrent_bytes(spec), recurrent_flops(spec)
        if spec.shape.longest <= short_len(spec):
            return Cost(*counted, efficiency=0.6)
        # Three times the bytes: q, k, v and two matrices of each chunk go through memory between the launches.
        return Cost(*counted, efficiency=0.2, launches=4 if spec.shape.sequences == 1 else 5)

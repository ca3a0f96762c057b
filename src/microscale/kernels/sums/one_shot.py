"""Launches of sums over ranks: one, and every rank has the sum."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from microscale.errors import Unsupported
from microscale.hardware.sums import PEER_ROW_BYTES, PEER_ROWS, PEER_WORLDS
from microscale.kernels import binding
from microscale.kernels.launch import launch
from microscale.kernels.numbers import next_power_of_2
from microscale.kernels.op import Reason
from microscale.kernels.small.norms import warps
from microscale.kernels.sums import sum_jit
from microscale.kernels.sums.spec import DATA_AT, SENDERS, PeerBuffers, SumSpec

if TYPE_CHECKING:
    from torch import Tensor

LEAST_BLOCK = 256


def refuses(spec: SumSpec) -> Reason | None:
    """Why there is no kernel for this sum."""
    if spec.world not in PEER_WORLDS:
        return f"adds up {', '.join(map(str, PEER_WORLDS))} ranks, not {spec.world}"
    if spec.rows > PEER_ROWS:
        return f"has {PEER_ROWS} channels, not {spec.rows}"
    if spec.row_bytes > PEER_ROW_BYTES:
        return f"takes rows of up to {PEER_ROW_BYTES} bytes, not of {spec.row_bytes}"
    if spec.dtype not in (torch.bfloat16, torch.float32):
        return f"adds up bf16 and float32, not {spec.dtype}"
    return None


def sum_rows(peers: PeerBuffers, part: Tensor) -> Tensor:
    """``part [rows, width]`` → the sum of all ranks' parts."""
    total = part.new_empty(part.shape)
    _launch(peers, part.contiguous(), total, total, total, total, 0.0, norm=False)
    return total


def sum_add_norm(
    peers: PeerBuffers, part: Tensor, residual: Tensor, weight: Tensor, epsilon: float
) -> tuple[Tensor, Tensor]:
    """The sum of all ranks' parts, added to the residual stream: its norm times ``weight``, and the stream."""
    total = part.new_empty(part.shape)
    out = part.new_empty(part.shape)
    _launch(peers, part.contiguous(), residual.contiguous(), weight, total, out, epsilon, norm=True)
    return out, total


def _launch(
    peers: PeerBuffers,
    part: Tensor,
    residual: Tensor,
    weight: Tensor,
    total: Tensor,
    out: Tensor,
    epsilon: float,
    *,
    norm: bool,
) -> None:
    rows, width = part.shape
    reason = refuses(SumSpec(rows, width, part.dtype, peers.world))
    if reason is not None:
        raise Unsupported(f"No sum through peer-mapped memory: it {reason}.")
    if not rows:
        return
    own, block = peers.buffers[peers.rank], max(LEAST_BLOCK, next_power_of_2(width))
    every = (*peers.buffers, *[own] * (SENDERS - peers.world))
    arguments = (part, residual, weight, total, out, own, *every, peers.epochs, epsilon, peers.rank, width)
    constants: dict[str, Any] = {
        "WORLD": peers.world, "SENDERS": SENDERS, "DATA_AT": DATA_AT, "ROW_BYTES": PEER_ROW_BYTES, "BLOCK": block,
        "NORM": norm, "PLAIN": binding.PLAIN,
    }  # fmt: skip
    # Registers: as ``small.norms.launch_small``.
    launch(sum_jit.sum_rows, (rows,), arguments, constants, {"num_warps": warps(block), "maxnreg": 255})

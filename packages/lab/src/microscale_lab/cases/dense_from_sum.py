"""Cases of a dense layer behind the residual stream: sum, norm and product of one token in one launch.

It must give the bits of the three ops apart, which run next to it here. A sum of squares that is off in its last bit
hardly ever shows in a norm of bf16. So further tokens have an epsilon of their own: the mean of their squares less one
part in 2**18, negated. What is left under the root are some dozens of the sum's last bits. Several of them, for sums in
another order often agree.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from microscale.hardware import Gpu
from microscale.hardware.tiles.dense import possible
from microscale.kernels.dense import small_batch
from microscale.kernels.dense.packed import PackedDense, pack, row_major, to_row_major
from microscale.kernels.dense.reference import dense
from microscale.kernels.dense.spec import FORMATS, DenseOp, DenseSpec, DenseWeights, Summed
from microscale.kernels.op import Activations
from microscale.kernels.small import norms
from microscale.kernels.small.reference import add_rms_norm
from microscale.planning import registry
from microscale.planning.paths import PathList
from microscale_lab.calls import run_dense, run_from_sum
from microscale_lab.cases.case import Compared, Finish, KernelCase, OracleCase, compare, just_written, same
from microscale_lab.cases.dense import make_weights
from microscale_lab.cases.small import norm_of_sum_bound, normal

if TYPE_CHECKING:
    from torch import Tensor

EPSILON = 1e-5
CANCELLED = 6
"""Tokens with an epsilon of their own."""
Answer = tuple["Tensor", "Tensor"]
"""The layer of the norm, and the sum."""


def make_summed(columns: int, device: str, seed: int = 0, octaves: float = 0.0) -> Summed:
    """``octaves``: how far the columns' sizes spread. Squares of bf16 numbers of one size add up almost exactly, in any
    order."""
    x, residual, weight, size = (normal(1, columns, device=device, seed=4 * seed + i) for i in range(4))
    residual = (4 * residual.float() * (octaves * size.float()).exp2()).bfloat16()
    return Summed(x, residual, (1 + weight[0] / 5).bfloat16(), EPSILON)


def make_tokens(columns: int, device: str) -> list[Summed]:
    """An ordinary token, and those under an epsilon that leaves the last bits of their sum of squares."""
    others = [make_summed(columns, device, seed, octaves=4.0) for seed in range(1, 1 + CANCELLED)]
    return [
        make_summed(columns, device),
        *(replace(each, epsilon=-_mean_square(each) * (1 - 2.0**-18)) for each in others),
    ]


def _mean_square(summed: Summed) -> float:
    total = (summed.x.float() + summed.residual.float()).bfloat16()
    return float(total.double().square().mean())


def packed_of(weights: DenseWeights) -> PackedDense:
    return row_major(to_row_major(weights, torch.bfloat16)) if weights.format == "bf16" else pack(weights)


@dataclass(frozen=True)
class FromSumCase(OracleCase):
    entry: DenseOp[Any]
    spec: DenseSpec

    op: ClassVar[str] = "dense"

    form: ClassVar[PathList] = PathList.FROM_SUM

    def weights(self, device: str) -> DenseWeights:
        return make_weights(self.spec.weight_format, self.spec.rows, self.spec.columns, device, self.spec.bias)

    def start(self, gpu: Gpu, device: str) -> Finish:
        weights = self.weights(device)
        packed = self.entry.pack(weights, self.spec)

        def apart(summed: Summed) -> Answer:
            normed, total = norms.norm(summed.x, summed.residual, summed.weight, summed.epsilon, pdl=True)
            return run_dense(self.entry, packed, self.spec, gpu, normed), total

        tokens = make_tokens(self.spec.columns, device)
        just_written(*(x for each in tokens for x in (each.x, each.residual)))
        found = [(run_from_sum(self.entry, packed, self.spec, gpu, each), apart(each)) for each in tokens]
        return lambda: hold_from_sum(tokens[0], weights, found)


@dataclass(frozen=True)
class FromSumTileCase(FromSumCase):
    """By every tile that the card may have for a token: other numbers of warps, and of slices of K."""

    def variant(self, gpu: Gpu) -> str:
        return f"{super().variant(gpu)}, every tile"

    def start(self, gpu: Gpu, device: str) -> Finish:
        weights = self.weights(device)
        packed, tokens = packed_of(weights), make_tokens(self.spec.columns, device)
        just_written(*(x for each in tokens for x in (each.x, each.residual)))
        found = []
        for tile in sorted(possible(self.spec.weight_format, 8, gpu), key=repr):
            for each in tokens:
                normed, total = norms.norm(each.x, each.residual, each.weight, each.epsilon, pdl=True)
                want = small_batch.run(packed, gpu, normed, None, tile), total
                found.append((small_batch.run_from_sum(packed, gpu, each, tile), want))
        return lambda: hold_from_sum(tokens[0], weights, found)


def hold_from_sum(summed: Summed, weights: DenseWeights, found: list[tuple[Answer, Answer]]) -> Iterator[Compared]:
    """Each answer has the bits of the ops apart; the first is of ``summed`` and is what the reference says."""
    normed, total = add_rms_norm(summed.x, summed.residual, summed.weight, summed.epsilon)
    want = dense(normed, weights)
    yield compare("y", found[0][0][0], want, norm_of_sum_bound(want))
    yield same("the sum, by the reference", found[0][0][1], total)
    for (y, ours), (apart, theirs) in found:
        yield same("numbers", y.isfinite().int(), torch.ones_like(y, dtype=torch.int32))
        yield same("y, against the ops apart", y, apart)
        yield same("the sum, against the ops apart", ours, theirs)


# rows, columns. Norms of one warp, of two, and of eight with 8 and with 16 columns a thread; half a tile of K, slices
# of unequal length, a last chunk that is full; rows of one tile, of no whole block.
SHAPES = [(16, 32), (144, 352), (48, 1056), (32, 2048), (80, 2880), (16, 4096)]
TILES = (80, 2880)


def cases() -> Iterator[KernelCase]:
    for fmt in FORMATS:
        entry = registry.dense(f"triton_{fmt}")
        for rows, columns in SHAPES:
            spec = DenseSpec(rows, columns, fmt, Activations.BF16, columns != 1056, 1, behind_sum=True)
            yield FromSumCase(f"1 x {columns} by {rows}, from a sum", entry, spec)
        rows, columns = TILES
        spec = DenseSpec(rows, columns, fmt, Activations.BF16, True, 1, behind_sum=True)
        yield FromSumTileCase(f"1 x {columns} by {rows}, from a sum, every tile", entry, spec)

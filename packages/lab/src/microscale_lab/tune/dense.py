"""What ``microscale tune`` runs of dense layers for small batches: every format, at sizes that fill the card to
different degrees, weights rotating so that none are read from L2."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from microscale.hardware import Gpu
from microscale.hardware.tiles import dense
from microscale.hardware.tiles.dense import DenseCase, DenseFormat, Size
from microscale.kernels.dense import small_batch
from microscale.kernels.dense.packed import PackedDense, pack, row_major, to_row_major
from microscale.kernels.dense.reference import dense as reference
from microscale.kernels.dense.spec import DenseWeights
from microscale_lab.kernel_bench.dense import CHECKED_ROWS, RMS_TOLERANCE, ROTATED_BYTES, DenseShape, random_weights
from microscale_lab.tune import candidates
from microscale_lab.tune.job import TileSearch, TuningProblem

COLUMNS = 2880
# Of ``MANY`` as many as an lm_head has; of the others some of their range, for each SM. With 28 two blocks of 16 tokens
# are more than a wave, so that 32 tokens are one block.
MANY_ROWS = 201088
ROWS_PER_SM = {Size.ONE_PROGRAM: 16, Size.TWO_PROGRAMS: 28, Size.ONE_WAVE: 40, Size.CROWDED: 64}


def jobs(gpu: Gpu, quick: bool) -> Iterator[TileSearch]:
    if quick:
        yield job_of(DenseCase(DenseFormat.BF16, 8, Size.ONE_WAVE), gpu)
        yield job_of(DenseCase(DenseFormat.MXFP8, 8, Size.TWO_PROGRAMS), gpu)
        return
    for fmt in DenseFormat:
        for columns in dense.columns_of(fmt):
            for size in dense.sizes_of(columns):
                yield job_of(DenseCase(fmt, columns, size), gpu)


def rows_of(size: Size, gpu: Gpu) -> int:
    rows = MANY_ROWS if size is Size.MANY else ROWS_PER_SM[size] * gpu.num_sms
    assert dense.size_of(rows, gpu) is size
    return rows


def job_of(case: DenseCase, gpu: Gpu) -> TileSearch:
    rows, tokens = rows_of(case.size, gpu), 1 if case.columns == dense.COLUMNS[0] else case.columns
    about = f"{case.format}, {rows} x {COLUMNS}, {tokens} tokens"
    tiles = list(candidates.of_dense(case, gpu))
    return TileSearch(dense.SECTION, case, about, tiles, _prepared(case, rows, tokens, gpu))


@dataclass(frozen=True)
class DenseLayers:
    """Dense layers with weights of their own, and a batch."""

    packed: list[PackedDense]
    x: Tensor
    expected: Tensor
    """The reference's answer of the first, in its first rows."""

    @classmethod
    def of(cls, weight_format: str, rows: int, columns: int, tokens: int, device: str) -> DenseLayers:
        generator = torch.Generator(device).manual_seed(rows)
        shape = DenseShape("tune", rows, columns)
        first = random_weights(shape, weight_format, generator)
        packed = [_packed(first)]
        count = max(1, -(-ROTATED_BYTES // packed[0].nbytes))
        packed += [_packed(random_weights(shape, weight_format, generator)) for _ in range(count - 1)]
        x = torch.randn(tokens, columns, device=device, generator=generator, dtype=torch.bfloat16)
        head = DenseWeights(first.weight[:CHECKED_ROWS], None if first.bias is None else first.bias[:CHECKED_ROWS])
        return cls(packed, x, reference(x, head))

    def problem(self, run: Callable[[PackedDense, Tensor], Tensor], roundings: int = 1) -> TuningProblem:
        """``roundings`` to bf16 on the way to an answer."""

        def error() -> float:
            ours = run(self.packed[0], self.x)[:, :CHECKED_ROWS].float()
            return float((ours - self.expected).norm() / self.expected.norm())

        tolerance = RMS_TOLERANCE * roundings**0.5
        return TuningProblem(lambda: [run(each, self.x) for each in self.packed], error, tolerance, len(self.packed))


def _prepared(case: DenseCase, rows: int, tokens: int, gpu: Gpu) -> Callable[[str], TuningProblem]:
    def prepare(device: str) -> TuningProblem:
        layers = DenseLayers.of(case.format, rows, COLUMNS, tokens, device)
        return layers.problem(lambda packed, x: small_batch.run(packed, gpu, x, None))

    return prepare


def _packed(weights: DenseWeights) -> PackedDense:
    if isinstance(weights.weight, Tensor):
        return row_major(to_row_major(weights, torch.bfloat16))
    return pack(weights)

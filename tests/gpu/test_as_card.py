"""Another card's kernels on this GPU: what stays the card's, and that nothing of it is left afterwards.

The kernels themselves: ``pytest tests/gpu --as CARD``.
"""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import OutOfResources

from microscale.hardware import detect, known, present
from microscale.kernels.moe import grouped
from microscale_lab.cases.errors import check_rounded
from microscale_lab.cases.experts import ExpertsInput, ExpertsProblem
from microscale_lab.prove.bridge import as_card

pytestmark = [pytest.mark.odd_shapes, pytest.mark.own("goes from the GPU as it is to cards and back")]
GB10 = known("gb10")


@triton.jit  # type: ignore[untyped-decorator]
def product(x_ptr, y_ptr, M: tl.constexpr, K: tl.constexpr):  # type: ignore[no-untyped-def]
    rows, columns = tl.arange(0, M), tl.arange(0, K)
    x = tl.load(x_ptr + rows[:, None] * K + columns[None, :])
    y = tl.load(x_ptr + columns[:, None] * M + rows[None, :])
    tl.store(y_ptr + rows[:, None] * M + rows[None, :], tl.dot(x, y))


def test_the_gpus_own_kernels_are_there_again() -> None:
    """The same functions before, as GB10 and after: the same bits before and after, right ones as GB10."""
    case = ExpertsInput("there and back", 70, hidden=352, intermediate=160)
    problem = ExpertsProblem.of(case, "mxfp4", "cuda")

    def run(block_scaled: bool = False) -> torch.Tensor:
        given = (problem.packed, case.gate, problem.x, problem.routing, detect())
        return grouped.run(*given, block_scaled=block_scaled)

    before = run()
    with as_card(GB10) as executed:
        assert detect() is GB10
        assert present().name != GB10.name
        check_rounded(run(), problem.expected(), "bf16", 3)
        check_rounded(run(block_scaled=True), problem.expected_quantised(), "bf16", 3)
    print(executed.summary())
    assert executed.spelled["block-scaled mma"] > 0
    assert detect().name == present().name
    assert torch.equal(run(), before)


def test_shared_memory_is_the_cards() -> None:
    x, y = torch.ones(128 * 256, device="cuda", dtype=torch.bfloat16), torch.zeros(128 * 128, device="cuda")
    with pytest.raises(OutOfResources) as raised, as_card(GB10):
        product[(1,)](x, y, M=128, K=256)
    assert raised.value.limit == GB10.shared_per_block
    if present().shared_per_block > 128 * 1024:
        product[(1,)](x, y, M=128, K=256)
        assert (y == 256).all()

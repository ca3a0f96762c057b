"""Sums over ranks against their formulas, and which of them there is a kernel for."""

from __future__ import annotations

import itertools
import re

import pytest
import torch

from microscale.errors import Unsupported
from microscale.hardware import known
from microscale.hardware.sums import PEER_ROW_BYTES, PEER_ROWS
from microscale.kernels.launch import recording
from microscale.kernels.small.reference import add_rms_norm
from microscale.kernels.sums import cost, one_shot
from microscale.kernels.sums.reference import sum_add_norm, sum_rows
from microscale.kernels.sums.spec import DATA_AT, PeerBuffers, SumSpec, buffer_bytes
from microscale_lab.cases.case import hold
from microscale_lab.cases.sums import SumCase, cases
from ptxproof import Kernel
from support.interpreted import interpreted
from support.interpreter import first_and_all, run_cases

BF16 = torch.bfloat16


@first_and_all
def test_under_the_interpreter(which: str) -> None:
    run_cases("cases_sums.py", which, beside=__file__)


def test_the_sum_is_rounded_once_and_in_order() -> None:
    # In bf16, 256 + 1 is 256: added up pair by pair the ones would be lost.
    parts = [torch.full((1, 4), value, dtype=BF16) for value in (256.0, 1.0, 1.0, 2.0)]
    assert sum_rows(parts).tolist() == [[260.0] * 4]
    large = [torch.tensor([[value]]) for value in (2.0**24, 1.0, 1.0)]
    assert sum_rows(large).item() == 2.0**24  # float32: one after the other


def test_the_norm_is_of_the_rounded_stream() -> None:
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn((3, 64), generator=generator).to(BF16) for _ in range(2)]
    residual, weight = (torch.randn(shape, generator=generator).to(BF16) for shape in ((3, 64), (64,)))
    normed, total = sum_add_norm(parts, residual, weight, 1e-5)
    want, want_total = add_rms_norm((parts[0].float() + parts[1].float()).to(BF16), residual, weight, 1e-5)
    assert torch.equal(normed, want)
    assert torch.equal(total, want_total)


def shapes(world: int, rank: int = 0) -> PeerBuffers:
    buffers = tuple(torch.empty(buffer_bytes(world), dtype=torch.uint8, device="meta") for _ in range(world))
    return PeerBuffers(rank, buffers, torch.empty(PEER_ROWS, dtype=torch.int32, device="meta"))


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (SumSpec(1, 64, BF16, 3), "2, 4, 8 ranks, not 3"),
        (SumSpec(PEER_ROWS + 1, 64, BF16, 2), "64 channels, not 65"),
        (SumSpec(1, PEER_ROW_BYTES, BF16, 2), "not of 65536"),
        (SumSpec(1, 64, torch.float16, 2), "not torch.float16"),
    ],
)
def test_what_there_is_no_kernel_for(spec: SumSpec, said: str) -> None:
    assert said in str(one_shot.refuses(spec))
    if spec.world == 2:
        part = torch.empty((spec.rows, spec.width), dtype=spec.dtype, device="meta")
        with pytest.raises(Unsupported, match=said):
            one_shot.sum_rows(shapes(2), part)


def test_batches_and_ranks_share_their_kernels() -> None:
    with recording() as found:
        for rank in range(2):
            for rows in (1, 2, 17, PEER_ROWS):
                part = torch.empty((rows, 2880), dtype=BF16, device="meta")
                one_shot.sum_rows(shapes(2, rank), part)
                one_shot.sum_add_norm(shapes(2, rank), part, part, torch.empty(2880, dtype=BF16, device="meta"), 1e-5)
    assert sorted(kernel.constants["NORM"] for kernel in found) == [False, True]


@pytest.mark.parametrize("norm", [False, True])
def test_machine_code_keeps_the_order_of_the_protocol(norm: bool) -> None:
    """Rows, barrier, fence, flags, the wait for all flags, barrier, slots. And interpreted, it does what it should."""
    case = next(each for each in cases() if isinstance(each, SumCase) and each.norm == norm and each.spec.width == 161)
    seen: list[str] = []

    def keep(kernel: Kernel, ptx: str) -> str:
        seen.append(ptx)
        return ptx

    with interpreted(90, keep):
        finish = case.start(known("h200"), "cpu")
    hold(finish())
    (ptx,) = seen
    order = re.findall(
        r"\b(st\.global|bar\.sync|fence\.acq_rel\.sys|st\.relaxed\.sys|ld\.acquire\.sys|ld\.global)", ptx
    )
    steps = [name for name, _ in itertools.groupby(order)]
    begin = steps.index("st.global")
    wanted = ["st.global", "bar.sync", "fence.acq_rel.sys", "st.relaxed.sys", "ld.acquire.sys", "bar.sync"]
    if norm:  # the residual stream and the weight are fetched before the barrier
        assert steps[begin + 1] == "ld.global"
        del steps[begin + 1]
    assert steps[begin : begin + len(wanted)] == wanted
    assert steps[begin + len(wanted) : begin + len(wanted) + 2] == ["st.global", "ld.global"]  # the epoch, then slots
    assert order.count("fence.acq_rel.sys") == 1


def test_channels_do_not_overlap() -> None:
    """The last byte of the last slot is the buffer's last."""
    for world in (2, 4, 8):
        last = DATA_AT + ((PEER_ROWS * 2 - 1) * world + world - 1) * PEER_ROW_BYTES
        assert last + PEER_ROW_BYTES == buffer_bytes(world)
        assert DATA_AT % 16 == PEER_ROW_BYTES % 16 == 0


def test_cost() -> None:
    spec = SumSpec(2, 100, BF16, 4)
    assert cost.sent_bytes(spec) == 3 * 2 * 200
    assert cost.sum_rows(spec) == 10 * 400
    assert cost.sum_add_norm(spec) == 10 * 400 + 5 * 200

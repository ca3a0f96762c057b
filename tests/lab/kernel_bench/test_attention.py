"""The attention benchmark without a GPU: what it counts, and that its inputs and its check are right."""

from __future__ import annotations

import pytest
import torch

from microscale import hardware
from microscale.errors import Unsupported
from microscale.kernels.attention.paged import PagedAttention
from microscale.kernels.attention.reference import attention
from microscale_lab.kernel_bench import attention as bench
from microscale_lab.kernel_bench import timing
from microscale_lab.kernel_bench.attention import (
    CASES,
    SINKS_FULL,
    SINKS_SLIDING,
    AttentionInput,
    count,
    make_batch,
    make_kv,
    rms_error,
    visible_pairs,
)


def test_what_is_counted() -> None:
    decode = AttentionInput(SINKS_FULL, 8, 8192)
    assert count(decode) == (2 * 8 * 8192 * 8 * 64 * 2 + 2 * 8 * 64 * 64 * 2, 4 * 8 * 8192 * 64 * 64)
    assert visible_pairs(AttentionInput(SINKS_FULL, 1, 8, new=8)) == 36
    assert visible_pairs(AttentionInput(SINKS_SLIDING, 2, 300, new=2)) == 2 * 2 * 128
    short, long = (AttentionInput(SINKS_SLIDING, 8, context) for context in (4096, 131072))
    assert count(short) == count(long)
    assert count(AttentionInput(SINKS_FULL, 8, 8192, fp8=True))[0] < count(decode)[0]


def test_every_case_is_one_that_the_kernel_takes() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
    for case in CASES:
        assert PagedAttention().supports(case.spec, hardware.known("h200")) is None


@pytest.mark.parametrize(
    "case", [AttentionInput(SINKS_SLIDING, 2, 150), AttentionInput(SINKS_FULL, 1, 40, new=40, fp8=True)]
)
def test_the_check_sees_a_wrong_answer(case: AttentionInput) -> None:
    generator = torch.Generator().manual_seed(0)
    spec, kv, batch = case.spec, make_kv(case, generator, "cpu"), make_batch(case, generator, "cpu")
    q, sinks = torch.randn(spec.tokens, 64, 64).bfloat16(), torch.zeros(64)
    right = attention(q, kv, batch, spec, sinks)
    assert rms_error(right.bfloat16(), q, kv, batch, spec, sinks) < bench.RMS_TOLERANCE
    assert rms_error(right * 1.01, q, kv, batch, spec, sinks) > bench.RMS_TOLERANCE


def test_a_machine_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "detect", hardware.cpu)
    with pytest.raises(Unsupported, match="need a GPU"):
        next(bench.run())

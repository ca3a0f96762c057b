"""SM 9.0's own instructions: ``wgmma`` and its descriptors, branches by number."""

from __future__ import annotations

import numpy as np
import pytest

from ptx_kernels import block_kernel, run_block
from ptxproof.errors import InterpretError, Race
from ptxproof.interpreter.numbers import Array, from_bf16
from ptxproof.matrix_units import MmaUnit, summation


def jumping(number: str) -> str:
    """Each thread branches by a number to one of three places, which write 10, 11 and 12."""
    places = " ".join(f"$place{at}: mov.b32 %o0, {10 + at}; bra.uni $end;" for at in range(3))
    table = "$table: .branchtargets $place0, $place1, $place2;"
    return block_kernel(f"{number} {table} brx.idx %t0, $table; {places} $end: mov.b32 %t1, 0;", 1, 1, "sm_90a", 32)


def test_a_branch_by_number() -> None:
    words = np.arange(32, dtype=np.uint32)[:, None]
    got = run_block(jumping("rem.u32 %t0, %i0, 3;"), words, 1)
    assert got[:, 0].tolist() == [10 + lane % 3 for lane in range(32)]
    with pytest.raises(InterpretError, match="it has 3 targets, and no 31"):
        run_block(jumping("mov.b32 %t0, %i0;"), words, 1)


N, K = 64, 16


def place_of(row: int, k: int, swizzle: int, turned: bool) -> int:
    """The byte of one number, from the manual's figures: rows of ``swizzle`` bytes in groups of eight, whose 16-byte
    chunks change places by exclusive or with the row's number in 128 bytes."""
    line, byte = (k, 2 * row) if turned else (row, 2 * k)
    width = max(swizzle, 16)
    if swizzle:
        block = byte // width * (1024 if turned else 0) * 2
        chunk, in_chunk = byte % width // 16, byte % 16
        row_in_eight = line % 8
        chunk ^= row_in_eight * width // 128 % (width // 16)
        return block + line // 8 * 8 * width + row_in_eight * width + chunk * 16 + in_chunk
    far, near = (line // 8, byte // 16) if turned else (byte // 16, line // 8)
    return far * 1024 + near * 128 + line % 8 * 16 + byte % 16


def strides(swizzle: int, turned: bool) -> tuple[int, int]:
    """Leading and stride offsets, in bytes, for ``place_of``."""
    return (2048, 8 * swizzle) if swizzle else (1024, 128)


MODES = {0: 0, 128: 1, 64: 2, 32: 3}


BARRIER = "fence.proxy.async.shared::cta; bar.sync 0; "


WAIT = "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0; "


def product_kernel(swizzle: int, turned: bool, before: str = BARRIER, after: str = WAIT, fence: bool = True) -> str:
    """64 x 64 x 16: A from registers ``%i0 .. %i3``, B from shared memory, where the threads store 16 words each."""
    leading, stride = strides(swizzle, turned)
    high = MODES[swizzle] << 30 | stride >> 4
    stores = " ".join(f"st.shared.b32 [%at + {4 * word}], %i{4 + word};" for word in range(16))
    targets = ", ".join(f"%o{at}" for at in range(N // 2))
    zeros = " ".join(f"mov.b32 %o{at}, 0;" for at in range(N // 2))
    body = f"""
    shl.b32 %at, %lane, 6; add.u32 %at, %at, %smem; {stores} {zeros} {before}
    mov.b32 %t0, {leading >> 4 << 16}; mov.b32 %t1, {high}; mov.b64 %d0, {{%t0, %t1}};
    {"wgmma.fence.sync.aligned;" if fence else ""}
    wgmma.mma_async.sync.aligned.m64n{N}k{K}.f32.bf16.bf16 {{{targets}}}, {{%i0, %i1, %i2, %i3}}, %d0, 1, 1, 1,
    {int(turned)};
    {after}
    """
    return block_kernel(body, 20, N // 2, "sm_90a", threads=128)


def operands(swizzle: int, turned: bool) -> tuple[Array, Array, Array]:
    """Words of all threads, and both matrices: bf16 numbers of few bits, whose sums are exact."""
    generator = np.random.default_rng(swizzle + turned)
    codes = (generator.integers(-8, 9, (64 + N, K)).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    a, b = codes[:64], codes[64:]
    words = np.zeros((128, 20), np.uint32)
    for lane in range(128):
        row, column = lane // 32 * 16 + lane % 32 // 4, lane % 4 * 2
        for register, (down, right) in enumerate([(0, 0), (8, 0), (0, 8), (8, 8)]):
            low, high = a[row + down, column + right], a[row + down, column + right + 1]
            words[lane, register] = int(low) | int(high) << 16
    memory = np.zeros(8192, np.uint8).view(np.uint16)
    for row in range(N):
        for k in range(K):
            memory[place_of(row, k, swizzle, turned) // 2] = b[row, k]
    words[:, 4:] = memory.view(np.uint32)[: 128 * 16].reshape(128, 16)
    return words, from_bf16(a).astype(np.float64), from_bf16(b).astype(np.float64)


@pytest.mark.parametrize("turned", [False, True], ids=["", "turned"])
@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
def test_where_a_descriptor_says_the_numbers_are(swizzle: int, turned: bool) -> None:
    words, a, b = operands(swizzle, turned)
    got = run_block(product_kernel(swizzle, turned), words, N // 2).view(np.float32)
    wanted = a @ b.T
    for lane in range(128):
        for at in range(N // 2):
            row = lane // 32 * 16 + lane % 32 // 4 + at % 4 // 2 * 8
            assert got[lane, at] == wanted[row, at // 4 * 8 + lane % 4 * 2 + at % 2]


def test_what_a_product_needs_before_and_after_it() -> None:
    words, _, _ = operands(128, False)

    def run(**changed: str | bool) -> None:
        run_block(product_kernel(128, False, **changed), words, N // 2)  # type: ignore[arg-type]

    with pytest.raises(Race, match="with no barrier between"):
        run(before="fence.proxy.async.shared::cta;")
    with pytest.raises(Race, match=r"no fence\.proxy\.async since"):
        run(before="bar.sync 0;")
    with pytest.raises(InterpretError, match=r"no wgmma\.fence since"):
        run(fence=False)
    some = "setp.ge.u32 %p0, %lane, 64; @%p0 bra $fenced; wgmma.fence.sync.aligned; $fenced:"
    with pytest.raises(InterpretError, match=r"no wgmma\.fence since"):
        run(before=f"{BARRIER} {some}", fence=False)
    with pytest.raises(InterpretError, match="reads a register before the wgmma that writes it was waited for"):
        run(after="wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 1;")
    with pytest.raises(InterpretError, match="overwrites a register of a wgmma"):
        run(after=f"mov.b32 %i0, 0; {WAIT}")
    with pytest.raises(Race, match="overwrites what another thread reads"):
        run(after=f"st.shared.b32 [%at], %i5; {WAIT}")
    run(after=f"{WAIT} bar.sync 0; st.shared.b32 [%at], %i5;")


def test_fp8_sums_keep_as_many_bits_as_measured() -> None:
    how = summation(90, MmaUnit.WGMMA_8)
    assert (how.products, how.fraction_bits, how.result_bits) == (32, 13, 13)

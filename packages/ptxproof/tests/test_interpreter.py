"""What the interpreter refuses: undefined numbers, accesses out of bounds, barriers that are not met, races."""

from __future__ import annotations

import numpy as np
import pytest

from ptx_kernels import block_kernel, run_block, run_warp, warp_kernel
from ptxproof.errors import InterpretError, Race
from ptxproof.interpreter.memory import GlobalMemory
from ptxproof.interpreter.run import InterpretedKernel


def test_reads_of_what_nobody_wrote() -> None:
    """An undefined number may be computed with and thrown away, as compilers do; it may not be stored or decide."""
    zeros = np.zeros((32, 1), np.uint32)
    with pytest.raises(InterpretError, match="stores a number or to an address that was never written"):
        run_warp(warp_kernel("add.u32 %o0, %i0, %t3;", 1, 1), zeros, 1)
    with pytest.raises(InterpretError, match="depends on a predicate that was never written, in thread 0 of block 0"):
        run_warp(warp_kernel("mov.b32 %o0, %i0; setp.eq.u32 %p0, %t3, 0; @%p0 mov.b32 %o0, 1;", 1, 1), zeros, 1)
    some = "setp.lt.u32 %p0, %lane, 8; @%p0 mov.b32 %t3, %lane; shfl.sync.bfly.b32 %t4, %t3, 1, 31, -1;"
    kept = run_warp(warp_kernel(f"{some} selp.b32 %o0, %t4, 99, %p0;", 1, 1), zeros, 1)[:, 0]
    assert (kept == [lane ^ 1 if lane < 8 else 99 for lane in range(32)]).all()
    with pytest.raises(InterpretError, match="never written, in thread 8 of block 0"):
        run_warp(warp_kernel(f"{some} mov.b32 %o0, %t4;", 1, 1), zeros, 1)
    # LLVM leaves undefined the word of which a selector picks no byte.
    for picked in ("%i0, %t3, 0x3120U", "%t3, %i0, 0x7564U"):
        assert not run_warp(warp_kernel(f"prmt.b32 %o0, {picked};", 1, 1), zeros, 1).any()
    with pytest.raises(InterpretError, match="never written"):
        run_warp(warp_kernel("prmt.b32 %o0, %i0, %t3, 0x3124U;", 1, 1), zeros, 1)
    with pytest.raises(Race, match="reads shared memory that was never written"):
        run_warp(warp_kernel("ld.shared.b32 %o0, [%smem];", 1, 1), np.zeros((32, 1), np.uint32), 1)


def test_addresses_outside_of_their_tensor_and_misaligned_vectors() -> None:
    zeros = np.zeros((32, 1), np.uint32)
    with pytest.raises(InterpretError, match="outside of its tensor"):
        run_warp(warp_kernel("ld.global.b32 %o0, [%out + 128];", 1, 1), zeros, 1)
    with pytest.raises(InterpretError, match="misaligned"):
        run_warp(warp_kernel("ld.global.v2.b32 {%o0, %t0}, [%in + 4];", 3, 1), np.zeros((32, 3), np.uint32), 1)
    with pytest.raises(InterpretError, match="shared memory or misaligned"):
        run_warp(warp_kernel("st.shared.b32 [%smem + 8192], %i0; mov.b32 %o0, %i0;", 1, 1), zeros, 1)


def test_a_barrier_that_some_threads_pass_by() -> None:
    body = (
        "setp.lt.u32 %p0, %lane, 8; @%p0 bra $L1; bar.sync 0; mov.b32 %t1, 1; bra $L2; $L1: bar.sync 0; "
        "$L2: mov.b32 %o0, %i0;"
    )
    with pytest.raises(InterpretError, match="wait at different barriers"):
        run_warp(warp_kernel(body, 1, 1), np.zeros((32, 1), np.uint32), 1)


def test_a_barrier_that_a_whole_warp_passes_by() -> None:
    """Warp 1 waits at barrier 1 and warp 0 at barrier 0; or warp 1 has ended."""
    zeros = np.zeros((64, 1), np.uint32)
    apart = "setp.ge.u32 %p0, %lane, 32; @%p0 bra $L1; bar.sync 0; bra $L2; $L1: bar.sync 1; $L2: mov.b32 %o0, %i0;"
    with pytest.raises(InterpretError, match="wait at different barriers"):
        run_block(block_kernel(apart, 1, 1, "sm_121a", 64), zeros, 1)
    ended = "setp.ge.u32 %p0, %lane, 32; @%p0 bra $L1; bar.sync 0; bra $L2; $L1: ret; $L2: mov.b32 %o0, %i0;"
    with pytest.raises(
        InterpretError, match="a barrier for all threads of a block, of which 32 have ended, in block 0"
    ):
        run_block(block_kernel(ended, 1, 1, "sm_121a", 64), zeros, 1)


def test_a_barrier_of_some_warps_orders_only_those() -> None:
    """Warps 0 and 1 meet at barrier 1. Warp 2 passes it by, and its store is not ordered before warp 0's load."""
    words = np.arange(96, dtype=np.uint32).reshape(96, 1)
    store = "shl.b32 %t0, %lane, 2; add.u32 %t0, %t0, %smem; st.shared.b32 [%t0], %i0; setp.ge.u32 %p0, %lane, 64;"
    meet = "mov.b32 %o0, 0; @%p0 bra $L1; bar.sync 1, 64; xor.b32 %t1, %lane, 32; shl.b32 %t1, %t1, 2;"
    load = "add.u32 %t1, %t1, %smem; ld.shared.b32 %o0, [%t1];"
    got = run_block(block_kernel(f"{store} {meet} {load} $L1:", 1, 1, "sm_121a", 96), words, 1)[:, 0]
    assert (got[:64] == np.arange(64) ^ 32).all()
    with pytest.raises(Race, match="reads what another thread wrote, with no barrier between"):
        run_block(block_kernel(f"{store} {meet} add.u32 %t1, %t1, 128; {load} $L1:", 1, 1, "sm_121a", 96), words, 1)


def test_atomics_race_with_stores_and_not_with_each_other() -> None:
    """All lanes count in one word, which lane 0 sets to zero before."""
    ones = np.ones((32, 1), np.uint32)
    body = (
        "setp.eq.u32 %p0, %lane, 0; @%p0 st.shared.b32 [%smem], 0; bar.warp.sync -1; "
        "atom.shared.add.u32 %t0, [%smem], %i0; bar.warp.sync -1; ld.shared.b32 %o0, [%smem];"
    )
    assert (run_warp(warp_kernel(body, 1, 1), ones, 1) == 32).all()
    with pytest.raises(Race, match="changes what another thread wrote, with no barrier between"):
        run_warp(warp_kernel(body.replace("bar.warp.sync -1; ", "", 1), 1, 1), ones, 1)
    with pytest.raises(Race, match="reads what another thread wrote, with no barrier between"):
        run_warp(warp_kernel(body.replace("%i0; bar.warp.sync -1;", "%i0;"), 1, 1), ones, 1)


@pytest.mark.parametrize("place", ["shared", "global"])
def test_different_numbers_at_one_address(place: str) -> None:
    """Lanes may store replicas of one number to one address, but no other number."""
    address = "[%smem]" if place == "shared" else "[%d0]"
    same = f"mov.b64 %d0, %in; shfl.sync.idx.b32 %t0, %i0, 0, 31, -1; st.{place}.b32 {address}, %t0; mov.b32 %o0, %t0;"
    every = "mul.wide.u32 %offset, %lane, 4; sub.s64 %d0, %in, %offset;"
    words = np.arange(32, dtype=np.uint32).reshape(32, 1)
    same = same.replace("mov.b64 %d0, %in;", every)
    assert (run_warp(warp_kernel(same, 1, 1), words, 1) == 0).all()
    different = same.replace(f"st.{place}.b32 {address}, %t0", f"st.{place}.b32 {address}, %i0")
    with pytest.raises(Race, match=f"store different numbers to one {place} address"):
        run_warp(warp_kernel(different, 1, 1), words, 1)


def test_a_tensor_ends_where_its_view_ends() -> None:
    """Two views of one storage: an address that leaves the one does not reach the other."""
    memory, storage = GlobalMemory(), np.zeros(256, np.uint8)
    ptx = warp_kernel("ld.global.b32 %o0, [%in + 124];", 0, 1)
    for first in (0, 128):
        memory = GlobalMemory()
        addresses = [memory.add(storage, first, first + 128), memory.add(np.zeros(128, np.uint8))]
        InterpretedKernel(ptx, 0).run((1,), addresses, memory)
        memory = GlobalMemory()
        addresses = [memory.add(storage, first, first + 124), memory.add(np.zeros(128, np.uint8))]
        with pytest.raises(InterpretError, match="outside of its tensor"):
            InterpretedKernel(ptx, 0).run((1,), addresses, memory)


def test_threads_that_branch_apart_meet_again() -> None:
    """A loop of ``lane`` turns: each lane leaves it on its own."""
    body = (
        "mov.b32 %t0, 0; mov.b32 %o0, 0; $L1: setp.ge.u32 %p0, %t0, %lane; @%p0 bra $L2; add.u32 %o0, %o0, %i0; "
        "add.u32 %t0, %t0, 1; bra $L1; $L2: shfl.sync.bfly.b32 %t2, %o0, 1, 31, -1; add.u32 %o0, %o0, %t2;"
    )
    got = run_warp(warp_kernel(body, 1, 1), np.full((32, 1), 3, np.uint32), 1)[:, 0]
    lanes = np.arange(32)
    assert (got == 3 * (lanes + (lanes ^ 1))).all()


@pytest.mark.parametrize("space", ["local", "shared"])
def test_a_generic_address_tells_which_memory_it_is_in(space: str) -> None:
    """What one lane keeps in local memory no other lane sees; shared memory is the block's."""
    kept = ".local .align 4 .b8 kept[8]; mov.b64 %d0, kept;" if space == "local" else "cvt.u64.u32 %d0, %smem;"
    body = (
        f"{kept} cvta.{space}.u64 %d0, %d0; setp.eq.u32 %p0, %lane, 0; mov.b32 %t0, %lane; "
        "shfl.sync.idx.b32 %t1, %lane, 0, 31, -1; "
        + ("" if space == "local" else "mov.b32 %t0, %t1; ")
        + "st.b8 [%d0+1], %t0; st.b8 [%d0], 7; st.b16 [%d0+2], 0; "
        + ("" if space == "local" else "bar.warp.sync -1; ")
        + f"ld.b32 %o0, [%d0]; cvta.to.{space}.u64 %d1, %d0; cvt.u32.u64 %t2, %d1; ld.{space}.b8 %t3, [%t2+1]; "
        "setp.ne.u32 %p1, %t3, %t0; @%p1 mov.b32 %o0, 99;"
    )
    got = run_warp(warp_kernel(body, 1, 1), np.zeros((32, 1), np.uint32), 1)[:, 0]
    assert (got == 7 + 256 * (np.arange(32) if space == "local" else 0)).all()


def test_generic_addresses_of_two_memories_in_one_instruction() -> None:
    """Even lanes store to global memory, odd lanes to their own local memory, and each reads its own."""
    body = (
        ".local .align 4 .b8 kept[8]; mov.b64 %d0, kept; cvta.local.u64 %d0, %d0; and.b32 %t0, %lane, 1; "
        "setp.eq.u32 %p0, %t0, 0; selp.b64 %d0, %out, %d0, %p0; st.b32 [%d0], %lane; ld.b32 %o0, [%d0];"
    )
    got = run_warp(warp_kernel(body, 1, 1), np.zeros((32, 1), np.uint32), 1)[:, 0]
    assert (got == np.arange(32)).all()


def test_a_wide_register_is_converted_by_its_lowest_bits() -> None:
    words = np.array([[0x8000_0001, 5]] * 32, np.uint32)
    wide = "mov.b64 %d0, {%i0, %i1}; "
    got = run_warp(warp_kernel(f"{wide} cvt.s64.s32 %d1, %d0; mov.b64 {{%o0, %o1}}, %d1;", 2, 2), words, 2)
    assert (got == [0x8000_0001, 0xFFFF_FFFF]).all()
    assert (run_warp(warp_kernel("cvt.s32.s8 %o0, %i0;", 2, 1), words | np.uint32(0x80), 1) == 0xFFFF_FF81).all()

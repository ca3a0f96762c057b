"""Kernels of a few instructions for one block, mostly of one warp: each thread reads its words, runs the instructions
and writes its words."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ptxproof.interpreter.memory import GlobalMemory
from ptxproof.interpreter.run import InterpretedKernel

Words = npt.NDArray[np.uint32]
SHARED = 8192


def warp_kernel(body: str, num_in: int, num_out: int, sm: str = "sm_121a") -> str:
    """A block of one warp."""
    return block_kernel(body, num_in, num_out, sm, 32)


def block_kernel(body: str, num_in: int, num_out: int, sm: str, threads: int) -> str:
    """``body`` finds the thread's words in ``%i0 ..`` and leaves its own in ``%o0 ..``; ``%smem`` is shared memory."""
    loads = "\n".join(f"ld.global.b32 %i{at}, [%in + {4 * at}];" for at in range(num_in))
    stores = "\n".join(f"st.global.b32 [%out + {4 * at}], %o{at};" for at in range(num_out))
    return f"""
.version 8.7
.target {sm}
.address_size 64
.extern .shared .align 16 .b8 smem[];
.visible .entry kernel(
    .param .u64 .ptr .global .align 16 kernel_param_0,
    .param .u64 .ptr .global .align 16 kernel_param_1
)
.reqntid {threads}
{{
    .reg .b32 %i<{max(num_in, 1)}>, %o<{num_out}>, %lane, %smem, %at;
    .reg .b64 %in, %out, %offset;
    .reg .b32 %t<16>;
    .reg .b64 %d<8>;
    .reg .b16 %h<8>;
    .reg .pred %p<4>;
    ld.param.b64 %in, [kernel_param_0];
    ld.param.b64 %out, [kernel_param_1];
    mov.u32 %lane, %tid.x;
    mov.b32 %smem, smem;
    mul.wide.u32 %offset, %lane, {4 * num_in};
    add.s64 %in, %in, %offset;
    mul.wide.u32 %offset, %lane, {4 * num_out};
    add.s64 %out, %out, %offset;
    {loads}
    {body}
    {stores}
    ret;
}}
"""


def scaled_mma(opcode: str, byte_a: int = 0, thread_a: int = 0, byte_b: int = 0, thread_b: int = 0) -> str:
    """A block-scaled product: A is ``%i0 .. %i3``, B ``%i4`` and ``%i5``, C ``%i6 .. %i9``, the scales ``%i10`` and
    ``%i11``."""
    return (
        f"{opcode} {{%o0, %o1, %o2, %o3}}, {{%i0, %i1, %i2, %i3}}, {{%i4, %i5}}, {{%i6, %i7, %i8, %i9}}, "
        f"%i10, {{{byte_a}, {thread_a}}}, %i11, {{{byte_b}, {thread_b}}};"
    )


def run_warp(ptx: str, words: Words, num_out: int) -> Words:
    """``words [32, inputs]`` → ``[32, outputs]``, in the interpreter."""
    return run_block(ptx, words, num_out)


def run_block(ptx: str, words: Words, num_out: int) -> Words:
    """``words [threads, inputs]`` → ``[threads, outputs]``."""
    memory = GlobalMemory()
    given = np.ascontiguousarray(words, np.uint32).reshape(-1).view(np.uint8)
    result = np.zeros(len(words) * num_out * 4, np.uint8)
    addresses = [memory.add(given), memory.add(result)]
    InterpretedKernel(ptx, SHARED).run((1,), addresses, memory)
    return result.view(np.uint32).reshape(len(words), num_out)

"""Kernels that the gate must refuse, each for one reason, and a good one that it must let pass."""

# mypy: ignore-errors
# (Triton's language and not Python: arguments are tensors, pointers or constants by call.)
from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@triton.jit
def matmul(a_ptr, b_ptr, c_ptr, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """A plain tile of BF16: good with small tiles, too large or spilling with big ones."""
    m = tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        a = tl.load(a_ptr + m[:, None] * K + (start + k)[None, :])
        b = tl.load(b_ptr + n[None, :] * K + (start + k)[:, None])
        acc = tl.dot(a, b, acc)
    tl.store(c_ptr + m[:, None] * BLOCK_N + n[None, :], acc.to(tl.bfloat16))


@triton.jit
def descriptor_scatter(x_ptr, rows_ptr, out_ptr, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Stores rows where ``rows`` says, through a tensor descriptor: ``tile::scatter4``."""
    m = tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    x = tl.load(x_ptr + m[:, None] * BLOCK_N + n[None, :])
    out = tl.make_tensor_descriptor(out_ptr, [M, N], [N, 1], [1, BLOCK_N])
    out.scatter(x, tl.load(rows_ptr + m), 0)


@triton.jit
def block_scaled(a_ptr, as_ptr, b_ptr, bs_ptr, c_ptr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
                 B_FORMAT: tl.constexpr):  # fmt: skip
    """One block-scaled tile: native on SM 12.x for e4m3 × e4m3, BF16 without a word for e4m3 × e2m1."""
    m = tl.arange(0, M)
    n = tl.arange(0, N)
    k = tl.arange(0, K)
    s = tl.arange(0, K // 32)
    a = tl.load(a_ptr + m[:, None] * K + k[None, :]).to(tl.float8e4nv, bitcast=True)
    a_scale = tl.load(as_ptr + m[:, None] * (K // 32) + s[None, :])
    b_scale = tl.load(bs_ptr + n[:, None] * (K // 32) + s[None, :])
    if B_FORMAT == "e2m1":
        packed = tl.arange(0, K // 2)
        b = tl.load(b_ptr + n[None, :] * (K // 2) + packed[:, None])
    else:
        b = tl.load(b_ptr + n[None, :] * K + k[:, None]).to(tl.float8e4nv, bitcast=True)
    acc = tl.dot_scaled(a, a_scale, "e4m3", b, b_scale, B_FORMAT)
    tl.store(c_ptr + m[:, None] * N + n[None, :], acc)


@triton.jit
def not_even_triton(x_ptr, BLOCK: tl.constexpr):
    """Adds tensors of shapes that do not fit: refused by Triton's front end."""
    x = tl.load(x_ptr + tl.arange(0, BLOCK))
    tl.store(x_ptr + tl.arange(0, BLOCK), x + tl.arange(0, 2 * BLOCK))


@gluon.jit
def gluon_copy(x_ptr, out_ptr, LAYOUT: gl.constexpr, BLOCK: gl.constexpr):
    """A Gluon kernel: it compiles only through Gluon's own source class."""
    i = gl.arange(0, BLOCK, layout=LAYOUT)
    gl.store(out_ptr + i, gl.load(x_ptr + i))

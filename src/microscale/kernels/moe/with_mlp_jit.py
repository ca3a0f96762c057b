"""Jit code of an expert layer with a dense MLP in its launches: one or two tokens of a model that has both (Gemma 4).

The MLP has the experts' gate and its own input and output; its programs are the first of each launch. Those of
``gate_up`` know their weights before the router has chosen: they fetch the first of them while it does.
``gate_up`` of the MLP has runs of 8 gate rows and 8 up rows, so that its row tiles are those of an expert.

The walk along K and the rest of the arithmetic are ``small_batch_jit``'s.
"""

# mypy: ignore-errors
# (Triton's language and not Python: arguments are tensors, pointers or constants by call.)
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from microscale.kernels.fragments_jit import X_SCALE
from microscale.kernels.gate_jit import gated
from microscale.kernels.moe.small_batch_jit import walk
from microscale.kernels.small_batch_core_jit import sum_slices, unscaled


@gluon.jit
def _store_gated(
    acc, h_ptr, row_tile, first, count,
    ROW_TILES: gl.constexpr, BITS: gl.constexpr, GATE: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr,
):  # fmt: skip
    """The units of one row tile to rows ``first`` .. ``first + count`` of ``h [rows, 8 * ROW_TILES]``."""
    r = sum_slices(acc, BITS, False)
    g, up = gl.split(r.reshape([2, 8, 8]).permute([1, 2, 0]))
    h = gated(g, up, GATE, ALPHA, LIMIT) * X_SCALE
    LH: gl.constexpr = h.type.layout
    unit = row_tile * 8 + gl.arange(0, 8, gl.SliceLayout(1, LH))[:, None]
    n = gl.arange(0, 8, gl.SliceLayout(0, LH))[None, :]
    at = (first + n) * (ROW_TILES * 8) + unit
    gl.store(h_ptr + at, h.to(gl.bfloat16), mask=(n < count) & (unit < ROW_TILES * 8))


# Not specialised: one token would be another kernel than the one that was proved.
@gluon.jit(do_not_specialize=["tokens"])
def gate_up_with_mlp(
    x_ptr,  # bf16 [2, tokens, K]: for the MLP and for the experts
    w_ptr,
    s_ptr,
    mlp_w_ptr,
    mlp_s_ptr,
    h_ptr,  # bf16 [tokens * TOP_K, 8 * ROW_TILES], times 2**64
    mlp_h_ptr,  # bf16 [tokens, 8 * MLP_TILES], likewise
    ids_ptr,  # [tokens, TOP_K]
    tokens,
    K: gl.constexpr,
    ROW_TILES: gl.constexpr,
    MLP_TILES: gl.constexpr,
    TOP_K: gl.constexpr,
    BITS: gl.constexpr,
    GATE: gl.constexpr,
    ALPHA: gl.constexpr,
    LIMIT: gl.constexpr,
    SLICES: gl.constexpr,
    AHEAD: gl.constexpr,
    PDL: gl.constexpr,
):
    """Grid: (row tiles of the MLP, which serve all tokens, then those of each expert of each token)."""
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [SLICES, 1, 1], [1, 16, 8])
    L1: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, mma))
    LE: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, mma))
    program = gl.program_id(0)
    n = gl.arange(0, 8, L1)
    if program < MLP_TILES:
        # ``down`` reads the router's choice before it waits. It begins when every program has let it, and the experts'
        # do so only after the router.
        if PDL:
            gdc_launch_dependents()
        acc = walk(
            x_ptr, gl.minimum(n, tokens - 1), mlp_w_ptr, mlp_s_ptr, gl.zeros([SLICES], gl.int32, LE), program, K, 0,
            K, MLP_TILES, 1, 1, 1, SLICES, AHEAD, BITS, False, True, PDL, False, mma,
        )  # fmt: skip
        _store_gated(acc, mlp_h_ptr, program, 0, tokens, MLP_TILES, BITS, GATE, ALPHA, LIMIT)
    else:
        if PDL:
            gdc_wait()
            gdc_launch_dependents()
        pair = (program - MLP_TILES) // ROW_TILES
        row_tile = (program - MLP_TILES) % ROW_TILES
        expert = gl.load(ids_ptr + pair)
        acc = walk(
            x_ptr, n * 0 + (tokens + pair // TOP_K), w_ptr, s_ptr, gl.zeros([SLICES], gl.int32, LE) + expert,
            row_tile, K, 0, K, ROW_TILES, 1, 1, 1, SLICES, AHEAD, BITS, False, True, False, False, mma,
        )  # fmt: skip
        _store_gated(acc, h_ptr, row_tile, pair, 1, ROW_TILES, BITS, GATE, ALPHA, LIMIT)


@gluon.jit
def _down_mlp(
    h_ptr, w_ptr, s_ptr, y_ptr, row_tile, tokens,
    K: gl.constexpr, ROW_TILES: gl.constexpr, SLICES: gl.constexpr, AHEAD: gl.constexpr, BITS: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """Two row tiles of the MLP for all tokens, to ``y [tokens, 16 * ROW_TILES]``."""
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [SLICES, 2, 1], [1, 16, 8])
    L2: gl.constexpr = gl.SliceLayout(0, mma)
    token = gl.minimum(gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, mma))), tokens - 1)
    only = gl.zeros([SLICES], gl.int32, gl.SliceLayout(1, gl.SliceLayout(2, mma)))
    acc = walk(
        h_ptr, token, w_ptr, s_ptr, only, row_tile, K, 0,
        K, ROW_TILES, 2, 2, 1, SLICES, AHEAD, BITS, False, False, PDL, False, mma,
    )  # fmt: skip
    r = sum_slices(acc, BITS, False)
    row = row_tile * 16 + gl.arange(0, 32, gl.SliceLayout(1, L2))
    n = gl.arange(0, 8, gl.SliceLayout(0, L2))
    at = n[None, :] * (ROW_TILES * 16) + row[:, None]
    gl.store(y_ptr + at, r.to(gl.bfloat16), mask=(n < tokens)[None, :] & (row < ROW_TILES * 16)[:, None])


@gluon.jit
def _down_experts(
    h_ptr, w_ptr, s_ptr, y_ptr, ids_ptr, weights_ptr, row_tile, token,
    K: gl.constexpr, ROW_TILES: gl.constexpr, TOP_K: gl.constexpr, EXPERTS: gl.constexpr, AHEAD: gl.constexpr,
    BITS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """One row tile of all experts of one token, times their weights, to row ``token`` of ``y``."""
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [EXPERTS, 1, 1], [1, 16, 8])
    L2: gl.constexpr = gl.SliceLayout(0, mma)
    # Slots past TOP_K repeat the last expert, and read rows of ``h`` that nobody wrote: they count for nothing.
    slot = gl.arange(0, EXPERTS, gl.SliceLayout(1, gl.SliceLayout(2, mma)))
    pair = token * TOP_K + gl.minimum(slot, TOP_K - 1)
    expert = gl.load(ids_ptr + pair)
    weight = gl.load(weights_ptr + pair)
    first = gl.zeros([8], gl.int32, gl.SliceLayout(0, gl.SliceLayout(1, mma))) + token * TOP_K
    acc = walk(
        h_ptr, first, w_ptr, s_ptr, expert, row_tile, K, 1,
        K, ROW_TILES, 1, 1, EXPERTS, 1, AHEAD, BITS, False, False, PDL, False, mma,
    )  # fmt: skip
    acc = unscaled(acc, BITS, False) * weight[:, None, None]
    if EXPERTS != TOP_K:
        acc = gl.where((slot < TOP_K)[:, None, None], acc, 0.0)
    r = gl.sum(acc, axis=0)
    row = row_tile * 16 + gl.arange(0, 16, gl.SliceLayout(1, L2))
    n = gl.arange(0, 8, gl.SliceLayout(0, L2))
    at = token * (ROW_TILES * 16) + row[:, None] + n[None, :] * 0
    gl.store(y_ptr + at, r.to(gl.bfloat16), mask=(n == 0)[None, :] & (row >= 0)[:, None])


@gluon.jit(do_not_specialize=["tokens"])
def down_with_mlp(
    h_ptr,  # bf16 [tokens * TOP_K + EXPERTS - TOP_K, K], times 2**64
    mlp_h_ptr,  # bf16 [tokens, MLP_K], likewise
    w_ptr,
    s_ptr,
    mlp_w_ptr,
    mlp_s_ptr,
    y_ptr,  # bf16 [2, tokens, 16 * ROW_TILES]: of the MLP and of the experts
    ids_ptr,
    weights_ptr,
    tokens,
    K: gl.constexpr,
    MLP_K: gl.constexpr,
    ROW_TILES: gl.constexpr,
    TOP_K: gl.constexpr,
    EXPERTS: gl.constexpr,  # the power of two from TOP_K on
    BITS: gl.constexpr,
    AHEAD: gl.constexpr,
    MLP_AHEAD: gl.constexpr,
    PDL: gl.constexpr,
):
    """Grid: (pairs of row tiles of the MLP, which serve all tokens, then the experts' row tiles of each token).

    A program's warps are the token's experts, as in ``down_direct``; for the MLP they are two row tiles times slices of
    K, for about as long a walk: with 2112 columns 9 tiles of 64, and 11 of an expert's 704.
    """
    MLP_BLOCKS: gl.constexpr = (ROW_TILES + 1) // 2
    # The router's choice is older than ``gate_up``, which waited for it: it may be read before this kernel waits.
    if PDL:
        gdc_launch_dependents()
    program = gl.program_id(0)
    if program < MLP_BLOCKS:
        _down_mlp(
            mlp_h_ptr, mlp_w_ptr, mlp_s_ptr, y_ptr, program * 2, tokens,
            MLP_K, ROW_TILES, EXPERTS // 2, MLP_AHEAD, BITS, PDL,
        )  # fmt: skip
    else:
        _down_experts(
            h_ptr, w_ptr, s_ptr, y_ptr + tokens * (ROW_TILES * 16), ids_ptr, weights_ptr,
            (program - MLP_BLOCKS) % ROW_TILES, (program - MLP_BLOCKS) // ROW_TILES,
            K, ROW_TILES, TOP_K, EXPERTS, AHEAD, BITS, PDL,
        )  # fmt: skip

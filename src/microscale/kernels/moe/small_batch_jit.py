"""Jit code of the small-batch expert layer: 1 to 64 tokens, limited by reading the weights.

Weights are the left operand of ``mma.sync`` m16n8k16 and up to 8 tokens the right one. A warp walks along K over one
or more row tiles at once; each lane reads its own fragments from memory in 16-byte loads, a batch of ``AHEAD`` tiles
while it computes the batch before, and applies the group scales in float32 after every 32 columns (NVFP4: to the
weights); the float32 scales of rows, where there are any, apply to the sums. No shared memory,
except to add up slices of K where they are spread over warps; no atomics, so results are the same in every run.

Three ways to name the work. *Direct*, for very few tokens: a program per (token, expert, rows) for gate and up, and for
down a program per (token, rows) whose warps are the token's experts, so that the weighted sum over experts happens in
the program. *List*: a program per (tile of the work list, rows), and ``pairs_jit.combine`` adds up a token's experts.
*Own list*, for so few tokens that an expert has one tile: the same, but each program finds its tile (``own_tile_jit``).

Activations between the two GEMMs are stored times 2**64 (``fragments_jit``). With programmatic dependent launch
``down`` fetches its first weights before it waits for ``gate_up`` to end: a batch, or two where tokens are very few.
"""

# mypy: ignore-errors
# (Triton's language and not Python: arguments are tensors, pointers or constants by call.)
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from microscale.kernels.fragments_jit import X_SCALE, scale_activations, token_fragments
from microscale.kernels.gate_jit import gated
from microscale.kernels.moe.own_tile_jit import opaque, own_pairs, own_tile, tokens_to_read
from microscale.kernels.small_batch_core_jit import (
    add_tile,
    issue_loads_here,
    lane_scales,
    pair_layout,
    row_scales,
    scale_layout,
    sum_slices,
    token_layout,
    unscaled,
    word_pairs,
)


@gluon.jit
def _load_tile(w_ptrs, s_ptrs, t, w_ok, s_ok, BITS: gl.constexpr, ROW_SCALES: gl.constexpr, MASKED: gl.constexpr):
    """Weights of groups 0 and 1 (4-bit weights hold both in one load) and scale words of tile ``t`` of the walk."""
    w_ptrs += t * (32 * BITS)
    s_ptrs += t * (16 if ROW_SCALES and BITS == 4 else 8)
    if MASKED:
        q0 = gl.load(w_ptrs, mask=w_ok, other=0, eviction_policy="evict_first")
        s = gl.load(s_ptrs, mask=s_ok, other=0)
        q1 = gl.load(w_ptrs + 128, mask=w_ok, other=0, eviction_policy="evict_first") if BITS == 8 else q0
    else:
        q0 = gl.load(w_ptrs, eviction_policy="evict_first")
        s = gl.load(s_ptrs)
        q1 = gl.load(w_ptrs + 128, eviction_policy="evict_first") if BITS == 8 else q0
    return q0, q1, s


@gluon.jit
def _load_batch(
    walk, t, N: gl.constexpr, KT: gl.constexpr, BITS: gl.constexpr, ROW_SCALES: gl.constexpr, MASKED: gl.constexpr
):  # fmt: skip
    """Tiles t .. t + N of the walk, all in flight when this returns."""
    w_ptrs, s_ptrs, first_w, first_s = walk
    batch = ()
    for u in gl.static_range(N):
        tile = _load_tile(
            w_ptrs, s_ptrs, t + u, first_w + (t + u) < KT, first_s + (t + u) < KT, BITS, ROW_SCALES, MASKED
        )
        batch = batch + (tile,)
    if N > 0:
        issue_loads_here()
    return batch


@gluon.jit
def _load_tokens(x_ptrs, ok, LB: gl.constexpr, SCALE_X: gl.constexpr, MASKED: gl.constexpr):
    x = gl.load(x_ptrs, mask=ok, other=0.0) if MASKED else gl.load(x_ptrs)
    if SCALE_X:
        x = scale_activations(x)
    return token_fragments(x, LB)


@gluon.jit
def walk(
    x_ptr,
    x_rows,  # [8] row of x for each column
    w_ptr,
    s_ptr,
    expert,  # [S] expert of each slice
    row_tile,  # first row tile of this program
    stride_x,
    x_row_step,  # distance in rows of x between the slices of different experts
    K: gl.constexpr,
    ROW_TILES: gl.constexpr,
    B: gl.constexpr,
    WARPS_N: gl.constexpr,
    EXPERTS: gl.constexpr,
    SLICES: gl.constexpr,
    AHEAD: gl.constexpr,
    BITS: gl.constexpr,
    ROW_SCALES: gl.constexpr,
    SCALE_X: gl.constexpr,
    WAIT: gl.constexpr,
    TWO: gl.constexpr,  # batches on their way before the wait, not one
    mma: gl.constexpr,
):
    """Partial sums [EXPERTS * SLICES, 16 B, 8]: each expert's rows times the tokens over each slice of K."""
    S: gl.constexpr = EXPERTS * SLICES
    KT: gl.constexpr = (K + 63) // 64
    STEPS: gl.constexpr = (KT + SLICES - 1) // SLICES
    MASK_W: gl.constexpr = STEPS * SLICES != KT
    MASK_X: gl.constexpr = STEPS * SLICES * 64 != K
    LB: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    LX: gl.constexpr = token_layout(S, WARPS_N)
    LP: gl.constexpr = pair_layout(S, WARPS_N)
    LH: gl.constexpr = scale_layout(S, WARPS_N)
    LW: gl.constexpr = gl.SliceLayout(4, LP)
    LS: gl.constexpr = gl.SliceLayout(4, LH)
    LW3: gl.constexpr = gl.SliceLayout(3, LW)
    LS3: gl.constexpr = gl.SliceLayout(3, LS)

    # Slice s of the walk is expert s // SLICES, K tiles from STEPS * (s % SLICES).
    slice_w = gl.arange(0, S, gl.SliceLayout(1, gl.SliceLayout(2, LW3)))
    slice_s = gl.arange(0, S, gl.SliceLayout(1, gl.SliceLayout(2, LS3)))
    slice_x = gl.arange(0, S, gl.SliceLayout(1, gl.SliceLayout(2, LX)))[:, None, None]
    first_w = (slice_w % SLICES * STEPS)[:, None, None, None]
    first_s = (slice_s % SLICES * STEPS)[:, None, None, None]
    # Row tiles past the end repeat the last one: every address is valid, and the result is not stored.
    tile_w = row_tile + gl.arange(0, B, gl.SliceLayout(0, gl.SliceLayout(2, LW3)))[None, :, None, None]
    tile_s = row_tile + gl.arange(0, B, gl.SliceLayout(0, gl.SliceLayout(2, LS3)))[None, :, None, None]
    if ROW_TILES % B:
        tile_w = gl.minimum(tile_w, ROW_TILES - 1)
        tile_s = gl.minimum(tile_s, ROW_TILES - 1)
    lane = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(1, LW3)))[None, None, :, None]
    pair = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, LW))))[None, None, None, :]
    g = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, LS))))[None, None, None, :]
    h = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, LS3)))[None, None, :, None]
    column = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(1, LX)))[None, None, :] + slice_x % SLICES * (64 * STEPS)
    expert_w = gl.convert_layout(expert, gl.SliceLayout(1, gl.SliceLayout(2, LW3)))[:, None, None, None].to(gl.int64)
    expert_s = gl.convert_layout(expert, gl.SliceLayout(1, gl.SliceLayout(2, LS3)))[:, None, None, None].to(gl.int64)
    w_ptrs = w_ptr + expert_w * (ROW_TILES * KT * 32 * BITS) + ((tile_w * KT + first_w) * (32 * BITS) + lane * 4 + pair)
    if ROW_SCALES and BITS == 4:
        first_s = first_w
        at_s = (tile_w * (KT + 1) + first_w) * 16 + lane_scales(lane)
        s_ptrs = s_ptr + expert_w * (ROW_TILES * (KT + 1) * 16) + at_s
    else:
        KS: gl.constexpr = KT + ROW_SCALES
        if ROW_SCALES:
            s_ptr = word_pairs(s_ptr)
        s_ptrs = s_ptr + expert_s * (ROW_TILES * KS * 8) + ((tile_s * KS + first_s) * 8 + g)
    z = gl.zeros([S, B, 32, 4, 2], gl.int32, LP)
    rows = gl.convert_layout(x_rows, gl.SliceLayout(0, gl.SliceLayout(2, LX)))[None, :, None]
    x_ptrs = x_ptr + (rows + slice_x // SLICES * x_row_step) * stride_x + column

    # A batch of AHEAD tiles is computed while the next is in flight. Batches, and not a ring of single tiles, because a
    # warp has six scoreboards: waiting for one load of many waits for younger ones too (ring of 9: 130 us, H200). Two
    # batches a turn: with one, handing the younger batch over costs a move for every register of it.
    BATCHES: gl.constexpr = STEPS // AHEAD
    TAIL: gl.constexpr = STEPS % AHEAD
    EARLY: gl.constexpr = TWO and BATCHES > 1
    LAST: gl.constexpr = (BATCHES - 2) // 2 * 2 if EARLY else (BATCHES - 1) // 2 * 2  # batches behind the turns
    tokens = (x_ptrs, column)
    walk = (w_ptrs, s_ptrs, first_w, first_s)
    batch = _load_batch(walk, 0, AHEAD, KT, BITS, ROW_SCALES, MASK_W)
    if EARLY:
        later = _load_batch(walk, AHEAD, AHEAD, KT, BITS, ROW_SCALES, MASK_W)
    if WAIT:
        gdc_wait()
    acc = gl.zeros([S, B * 16, 8], gl.float32, mma)
    for i in range(LAST // 2):
        n = i * 2 * AHEAD
        if not EARLY:
            later = _load_batch(walk, n + AHEAD, AHEAD, KT, BITS, ROW_SCALES, MASK_W)
        acc = _steps(acc, batch, z, h, tokens, n, AHEAD, K, BITS, ROW_SCALES, SCALE_X, MASK_X, LB, mma)
        batch = _load_batch(walk, n + 2 * AHEAD, AHEAD, KT, BITS, ROW_SCALES, MASK_W)
        acc = _steps(acc, later, z, h, tokens, n + AHEAD, AHEAD, K, BITS, ROW_SCALES, SCALE_X, MASK_X, LB, mma)
        if EARLY:
            later = _load_batch(walk, n + 3 * AHEAD, AHEAD, KT, BITS, ROW_SCALES, MASK_W)
    # One to three batches are left, and the tail; each is computed when what follows is on its way.
    n: gl.constexpr = LAST * AHEAD
    if BATCHES - LAST > 1:
        if not EARLY:
            later = _load_batch(walk, n + AHEAD, AHEAD, KT, BITS, ROW_SCALES, MASK_W)
        acc = _steps(acc, batch, z, h, tokens, n, AHEAD, K, BITS, ROW_SCALES, SCALE_X, MASK_X, LB, mma)
        if BATCHES - LAST == 3:
            batch = _load_batch(walk, n + 2 * AHEAD, AHEAD, KT, BITS, ROW_SCALES, MASK_W)
            acc = _steps(acc, later, z, h, tokens, n + AHEAD, AHEAD, K, BITS, ROW_SCALES, SCALE_X, MASK_X, LB, mma)
        else:
            batch = later
    last = _load_batch(walk, BATCHES * AHEAD, TAIL, KT, BITS, ROW_SCALES, MASK_W)
    acc = _steps(acc, batch, z, h, tokens, (BATCHES - 1) * AHEAD, AHEAD, K, BITS, ROW_SCALES, SCALE_X, MASK_X, LB, mma)
    return _steps(acc, last, z, h, tokens, BATCHES * AHEAD, TAIL, K, BITS, ROW_SCALES, SCALE_X, MASK_X, LB, mma)


@gluon.jit
def _steps(
    acc, tiles, z, h, tokens, t,
    N: gl.constexpr, K: gl.constexpr, BITS: gl.constexpr, ROW_SCALES: gl.constexpr, SCALE_X: gl.constexpr,
    MASK_X: gl.constexpr, LB: gl.constexpr, mma: gl.constexpr,
):  # fmt: skip
    """``acc`` plus the tiles t .. t + N of the walk."""
    x_ptrs, column = tokens
    for u in gl.static_range(N):
        acc = _step(acc, tiles[u], z, h, x_ptrs, column, t + u, K, BITS, ROW_SCALES, SCALE_X, MASK_X, LB, mma)
    return acc


@gluon.jit
def _step(
    acc, words, z, h, x_ptrs, column, t,
    K: gl.constexpr, BITS: gl.constexpr, ROW_SCALES: gl.constexpr, SCALE_X: gl.constexpr,
    MASK_X: gl.constexpr, LB: gl.constexpr, mma: gl.constexpr,
):  # fmt: skip
    """``acc`` plus one tile of 64 columns."""
    b00, b01 = _load_tokens(x_ptrs + t * 64, column + t * 64 < K, LB, SCALE_X, MASK_X)
    b10, b11 = _load_tokens(x_ptrs + (t * 64 + 32), column + (t * 64 + 32) < K, LB, SCALE_X, MASK_X)
    return add_tile(acc, words[0], words[1], (b00, b01, b10, b11), words[2], z, h, BITS, ROW_SCALES, mma)


@gluon.jit
def _expert_row_scales(s_ptr, expert, row, K: gl.constexpr, ROW_TILES: gl.constexpr):
    """The float32 scales of an expert's packed rows; 0 past the end."""
    KT: gl.constexpr = (K + 63) // 64
    return row_scales(s_ptr + expert.to(gl.int64) * (ROW_TILES * (KT + 1) * 16), row, ROW_TILES * 16, KT)


@gluon.jit(do_not_specialize=["tokens"])
def gate_up_small(
    x_ptr,  # bf16 [tokens, K]; list: times 2**64
    w_ptr,
    s_ptr,
    bias_ptr,  # bf16 [experts, 16 * ROW_TILES], packed row order
    h_ptr,  # bf16 [pairs, 8 * ROW_TILES], times 2**64; by place with a list, else by pair
    work_ptr,  # list: tiles [bound, 4]; else expert ids [tokens, TOP_K]
    order_ptr,  # list: place → pair
    stride_x,
    tokens,
    K: gl.constexpr,
    ROW_TILES: gl.constexpr,
    TOP_K: gl.constexpr,
    BITS: gl.constexpr,
    ROW_SCALES: gl.constexpr,
    DIRECT: gl.constexpr,
    EXPERT_WORDS: gl.constexpr,  # own list: words of 32 bits with a bit for each expert; else 0
    HAS_BIAS: gl.constexpr,
    GATE: gl.constexpr,
    ALPHA: gl.constexpr,
    LIMIT: gl.constexpr,
    B: gl.constexpr,
    WARPS_N: gl.constexpr,
    SLICES: gl.constexpr,
    AHEAD: gl.constexpr,
    PDL: gl.constexpr,
):
    """``h[place] = gate(x[token] @ gate_up.T + bias)`` for up to 8 pairs of one expert and 16 B rows."""
    BLOCKS: gl.constexpr = (ROW_TILES + B - 1) // B
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [SLICES, WARPS_N, 1], [1, 16, 8])
    L1: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, mma))
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    entry = gl.program_id(0) // BLOCKS
    row_tile = gl.program_id(0) % BLOCKS * B
    n = gl.arange(0, 8, L1)
    if DIRECT:
        expert = gl.load(work_ptr + entry)
        first = entry
        count = 1
        token = n * 0 + entry // TOP_K
    elif EXPERT_WORDS:
        expert, slots = own_tile(work_ptr, entry, tokens, TOP_K, EXPERT_WORDS, SLICES * WARPS_N)
        LX: gl.constexpr = token_layout(SLICES, WARPS_N)
        m = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, LX)))
        token = opaque(tokens_to_read(m, slots))
    else:
        expert = gl.load(work_ptr + entry * 4)
        first = gl.load(work_ptr + entry * 4 + 1)
        count = gl.load(work_ptr + entry * 4 + 2)
        # Columns past the end repeat the last pair: every address is valid, and the result is not stored. Past the end
        # of the list nobody wrote where an entry begins.
        token = gl.load(order_ptr + gl.where(expert >= 0, first + gl.minimum(n, count - 1), 0)) // TOP_K
    if expert >= 0:
        LE: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, mma))
        experts = gl.zeros([SLICES], gl.int32, LE) + expert
        acc = walk(
            x_ptr, token, w_ptr, s_ptr, experts, row_tile, stride_x, 0,
            K, ROW_TILES, B, WARPS_N, 1, SLICES, AHEAD, BITS, ROW_SCALES, DIRECT or EXPERT_WORDS > 0, False, False, mma,
        )  # fmt: skip
        if EXPERT_WORDS:
            row_tile = opaque(row_tile)
        r = sum_slices(acc, BITS, ROW_SCALES)
        L2: gl.constexpr = gl.SliceLayout(0, mma)
        if ROW_SCALES:
            row = row_tile * 16 + gl.arange(0, B * 16, gl.SliceLayout(1, L2))
            r *= _expert_row_scales(s_ptr, expert, row, K, ROW_TILES)[:, None]
        if HAS_BIAS:
            row = row_tile * 16 + gl.arange(0, B * 16, gl.SliceLayout(1, L2))
            bias = gl.load(bias_ptr + expert * (ROW_TILES * 16) + row, mask=row < ROW_TILES * 16, other=0.0)
            r += bias.to(gl.float32)[:, None]
        g, up = gl.split(r.reshape([B, 2, 8, 8]).permute([0, 2, 3, 1]))
        h = gated(g, up, GATE, ALPHA, LIMIT) * X_SCALE
        LH: gl.constexpr = h.type.layout
        tile = row_tile + gl.arange(0, B, gl.SliceLayout(1, gl.SliceLayout(2, LH)))[:, None, None]
        unit = tile * 8 + gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, LH)))[None, :, None]
        column = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, LH)))[None, None, :]
        if EXPERT_WORDS:
            place, mine = own_pairs(column, slots, TOP_K)
        else:
            place = first + column
            mine = column < count
        at = place * (ROW_TILES * 8) + unit
        gl.store(h_ptr + at, h.to(gl.bfloat16), mask=mine & (tile < ROW_TILES))


@gluon.jit(do_not_specialize=["tokens"])
def down_small(
    h_ptr,  # bf16 [pairs, K], times 2**64; by place with a list, else by pair
    w_ptr,
    s_ptr,
    bias_ptr,  # bf16 [experts, 16 * ROW_TILES]
    y_ptr,  # float32 [pairs, 16 * ROW_TILES] by pair
    work_ptr,  # as for gate_up_small
    order_ptr,
    weights_ptr,  # float32 [pairs]
    tokens,
    K: gl.constexpr,
    ROW_TILES: gl.constexpr,
    TOP_K: gl.constexpr,
    BITS: gl.constexpr,
    ROW_SCALES: gl.constexpr,
    EXPERT_WORDS: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    B: gl.constexpr,
    WARPS_N: gl.constexpr,
    SLICES: gl.constexpr,
    AHEAD: gl.constexpr,
    PDL: gl.constexpr,
):
    """``y[pair] = weight * (h[place] @ down.T + bias)`` for up to 8 pairs of one expert and 16 B rows."""
    BLOCKS: gl.constexpr = (ROW_TILES + B - 1) // B
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [SLICES, WARPS_N, 1], [1, 16, 8])
    L1: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, mma))
    if PDL:
        gdc_launch_dependents()
    # The list and the ids are older than gate_up, which waited for them: they may be read before this kernel waits.
    entry = gl.program_id(0) // BLOCKS
    row_tile = gl.program_id(0) % BLOCKS * B
    if EXPERT_WORDS:
        expert, slots = own_tile(work_ptr, entry, tokens, TOP_K, EXPERT_WORDS, SLICES * WARPS_N)
    else:
        expert = gl.load(work_ptr + entry * 4)
        first = gl.load(work_ptr + entry * 4 + 1)
        count = gl.load(work_ptr + entry * 4 + 2)
    if expert >= 0:
        LE: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, mma))
        experts = gl.zeros([SLICES], gl.int32, LE) + expert
        if EXPERT_WORDS:
            LX: gl.constexpr = token_layout(SLICES, WARPS_N)
            m = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, LX)))
            place = opaque(own_pairs(tokens_to_read(m, slots), slots, TOP_K)[0])
        else:
            place = first + gl.minimum(gl.arange(0, 8, L1), count - 1)
        acc = walk(
            h_ptr, place, w_ptr, s_ptr, experts, row_tile, K, 0,
            K, ROW_TILES, B, WARPS_N, 1, SLICES, AHEAD, BITS, ROW_SCALES, False, PDL, False, mma,
        )  # fmt: skip
        if EXPERT_WORDS:
            row_tile = opaque(row_tile)
        r = sum_slices(acc, BITS, ROW_SCALES)
        L2: gl.constexpr = gl.SliceLayout(0, mma)
        row = row_tile * 16 + gl.arange(0, B * 16, gl.SliceLayout(1, L2))
        if ROW_SCALES:
            r *= _expert_row_scales(s_ptr, expert, row, K, ROW_TILES)[:, None]
        if HAS_BIAS:
            bias = gl.load(bias_ptr + expert * (ROW_TILES * 16) + row, mask=row < ROW_TILES * 16, other=0.0)
            r += bias.to(gl.float32)[:, None]
        n = gl.arange(0, 8, gl.SliceLayout(0, L2))
        if EXPERT_WORDS:
            pair, mine = own_pairs(n, slots, TOP_K)
            weight = gl.load(weights_ptr + pair, mask=mine, other=0.0)
        else:
            pair = gl.load(order_ptr + first + gl.minimum(n, count - 1))
            mine = n < count
            weight = gl.load(weights_ptr + pair)
        r *= weight[None, :]
        at = pair[None, :] * (ROW_TILES * 16) + row[:, None]
        gl.store(y_ptr + at, r, mask=mine[None, :] & (row < ROW_TILES * 16)[:, None])


@gluon.jit
def down_direct(
    h_ptr,  # bf16 [pairs + EXPERTS - TOP_K, K] by pair, times 2**64
    w_ptr,
    s_ptr,
    bias_ptr,  # bf16 [experts, 16 * ROW_TILES]
    y_ptr,  # bf16 [tokens, 16 * ROW_TILES]
    ids_ptr,
    weights_ptr,
    K: gl.constexpr,
    ROW_TILES: gl.constexpr,
    TOP_K: gl.constexpr,
    EXPERTS: gl.constexpr,  # the power of two from TOP_K on
    BITS: gl.constexpr,
    ROW_SCALES: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    B: gl.constexpr,
    WARPS_N: gl.constexpr,
    SLICES: gl.constexpr,
    AHEAD: gl.constexpr,
    PDL: gl.constexpr,
):
    """``y[token] = sum of weight * (h[pair] @ down.T + bias)`` over the token's experts, for 16 B rows."""
    S: gl.constexpr = EXPERTS * SLICES
    BLOCKS: gl.constexpr = (ROW_TILES + B - 1) // B
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [S, WARPS_N, 1], [1, 16, 8])
    LE: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, mma))
    L1: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, mma))
    if PDL:
        gdc_launch_dependents()
    token = gl.program_id(0) // BLOCKS
    row_tile = gl.program_id(0) % BLOCKS * B
    # Slots past TOP_K repeat the last expert, and read rows of ``h`` that nobody wrote: they count for nothing.
    s = gl.arange(0, S, LE)
    pair = token * TOP_K + gl.minimum(s // SLICES, TOP_K - 1)
    expert = gl.load(ids_ptr + pair)
    weight = gl.load(weights_ptr + pair)
    acc = walk(
        h_ptr, gl.zeros([8], gl.int32, L1) + token * TOP_K, w_ptr, s_ptr, expert, row_tile, K, 1,
        K, ROW_TILES, B, WARPS_N, EXPERTS, SLICES, AHEAD, BITS, ROW_SCALES, False, PDL, PDL, mma,
    )  # fmt: skip
    acc = unscaled(acc, BITS, ROW_SCALES)
    L2: gl.constexpr = gl.SliceLayout(0, mma)
    if ROW_SCALES:
        row3 = row_tile * 16 + gl.arange(0, B * 16, gl.SliceLayout(0, gl.SliceLayout(2, mma)))
        acc *= _expert_row_scales(s_ptr, expert[:, None], row3[None, :], K, ROW_TILES)[:, :, None]
    if HAS_BIAS:
        row3 = row_tile * 16 + gl.arange(0, B * 16, gl.SliceLayout(0, gl.SliceLayout(2, mma)))
        at = expert[:, None] * (ROW_TILES * 16) + row3[None, :]
        once = (s % SLICES == 0)[:, None] & (row3 < ROW_TILES * 16)[None, :]
        acc += gl.load(bias_ptr + at, mask=once, other=0.0).to(gl.float32)[:, :, None]
    acc *= weight[:, None, None]
    if EXPERTS != TOP_K:
        acc = gl.where((s // SLICES < TOP_K)[:, None, None], acc, 0.0)
    r = gl.sum(acc, axis=0)
    row = row_tile * 16 + gl.arange(0, B * 16, gl.SliceLayout(1, L2))
    n = gl.arange(0, 8, gl.SliceLayout(0, L2))
    at = token * (ROW_TILES * 16) + row[:, None] + n[None, :] * 0
    gl.store(y_ptr + at, r.to(gl.bfloat16), mask=(n == 0)[None, :] & (row < ROW_TILES * 16)[:, None])

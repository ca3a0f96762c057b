"""The jit code that copies an FP8 cache's keys and values to bf16 for the queries of a prompt.

Each block of query rows reads all keys before it, and a matrix unit that takes its operands from shared memory wants
them there in bf16: a kernel that reads codes converts every key again for each 64 rows. Here each is converted once.
The copy holds the numbers of the codes, exactly. The scales of heads stay where they were: on scores and on sums.
"""

# mypy: ignore-errors
# (Triton's language and not Python: arguments are tensors, pointers or constants by call.)
from __future__ import annotations

import triton
import triton.language as tl

from microscale.kernels.plain_jit import to_bf16

_E4M3: tl.constexpr = tl.constexpr(2.0**120)


@triton.jit
def _copy(codes_ptr, out_ptr, at, to, valid, HEAD_DIM: tl.constexpr, PLAIN: tl.constexpr):
    dims = tl.arange(0, HEAD_DIM)[None, :]
    codes = tl.load(codes_ptr + at[:, None] + dims, mask=valid[:, None], other=0).to(tl.uint32)
    numbers = (((codes & 0x7F) << 20) | ((codes & 0x80) << 24)).to(tl.float32, bitcast=True) * _E4M3
    tl.store(out_ptr + to[:, None] + dims, to_bf16(numbers, PLAIN), mask=valid[:, None])


@triton.jit(do_not_specialize=["window", "page_shift", "short_len", "pages", "stride_table"])
def widen(
    k_ptr, v_ptr,  # uint8 [pages of the cache, KV heads, page size, HEAD_DIM]
    wide_k_ptr, wide_v_ptr,  # bf16 [sequences * pages, KV heads, page size, HEAD_DIM]
    wide_table_ptr,  # int32 [sequences, stride_table]: where in the copy a position's page is
    query_start_ptr, context_lens_ptr, page_table_ptr,
    window, page_shift, short_len, pages, stride_page, stride_kv_head, stride_wide_page, stride_table,
    HEAD_DIM: tl.constexpr, POSITIONS: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """Grid: (programs that share a sequence's blocks of POSITIONS, KV heads, sequences). What some new token of a
    sequence sees, from the page of the first such position on: ``pages`` pages for each sequence. Those of up to
    ``short_len`` new tokens are left out."""
    seq = tl.program_id(2)
    kv_head = tl.program_id(1)
    query_len = tl.load(query_start_ptr + seq + 1) - tl.load(query_start_ptr + seq)
    context_len = tl.load(context_lens_ptr + seq)
    first_page = tl.maximum(context_len - query_len - window + 1, 0) >> page_shift
    first = first_page << page_shift
    length = tl.where(query_len > short_len, context_len - first, 0)
    for start in tl.range(tl.program_id(0) * POSITIONS, length, tl.num_programs(0) * POSITIONS):
        place = start + tl.arange(0, POSITIONS)
        valid = place < length
        inside = place & ((1 << page_shift) - 1)
        entry = seq * stride_table + first_page + (place >> page_shift)
        page = tl.load(page_table_ptr + entry, mask=valid, other=0).to(tl.int64)
        wide_page = seq * pages + (place >> page_shift)
        tl.store(wide_table_ptr + entry, wide_page, mask=valid & (inside == 0) & (kv_head == 0))
        at = page * stride_page + kv_head * stride_kv_head + inside * HEAD_DIM
        to = wide_page.to(tl.int64) * stride_wide_page + ((kv_head << page_shift) + inside) * HEAD_DIM
        _copy(k_ptr, wide_k_ptr, at, to, valid, HEAD_DIM, PLAIN)
        _copy(v_ptr, wide_v_ptr, at, to, valid, HEAD_DIM, PLAIN)

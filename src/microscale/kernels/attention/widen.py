"""A bf16 copy of an FP8 cache's keys and values, for the queries of a prompt. ``widen_jit`` makes it.

The copy lasts for the call. Its size follows from what the host knows: sequences, the width of the page table, and the
window with the longest query.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from microscale.hardware import Gpu
from microscale.hardware.tiles.attention import WIDEN_BYTES
from microscale.hardware.tiles.thresholds import ThresholdName, threshold
from microscale.kernels import binding
from microscale.kernels.attention import widen_jit
from microscale.kernels.attention.spec import AttentionBatch, AttentionSpec, PagedKv
from microscale.kernels.launch import launch
from microscale.kernels.numbers import cdiv
from microscale.kernels.op import Reason

COPY = "bf16 copy"
"""The last part of the names of paths that make one."""
NUMBERS = 4096
"""Of keys, and of values, in a program."""
WARPS = 4
PROGRAMS_PER_SM = 8


def pages_of_sequence(spec: AttentionSpec, sizes: tuple[int, int, int]) -> int:
    """Pages of the copy for each sequence: what its new tokens may see."""
    _, longest_query, table_pages = sizes
    if spec.window is None:
        return table_pages
    return min(table_pages, cdiv(spec.window + longest_query, spec.page_size) + 1)


def bytes_of(spec: AttentionSpec, sizes: tuple[int, int, int]) -> int:
    """Of the copy: keys and values, two bytes each."""
    positions = sizes[0] * pages_of_sequence(spec, sizes) * spec.page_size
    return 2 * 2 * positions * spec.num_kv_heads * spec.head_dim


def refuses(spec: AttentionSpec, gpu: Gpu) -> Reason | None:
    """Why the keys of a batch are read as they are."""
    shape, least = spec.shape, threshold(ThresholdName.WIDEN_ROWS, gpu)
    if not shape.kv_fp8:
        return "is for keys and values in FP8"
    rows = shape.longest_query * (spec.num_heads // spec.num_kv_heads)
    if rows < least:
        return f"pays from {least} query rows of a KV head on, not {rows}"
    needed = bytes_of(spec, (shape.sequences, shape.longest_query, shape.table_pages))
    if needed > WIDEN_BYTES:
        return f"would need {needed >> 20} MiB for the copy; it has up to {WIDEN_BYTES >> 20}"
    return None


def widen(
    spec: AttentionSpec, gpu: Gpu, kv: PagedKv, batch: AttentionBatch, window: int, short_len: int
) -> tuple[PagedKv, AttentionBatch]:
    """Keys and values in bf16, without their scales, and the batch with a table of the copy's pages: for sequences of
    more than ``short_len`` new tokens."""
    pages, sequences, device = pages_of_sequence(spec, batch.sizes), batch.sizes[0], kv.k.device
    shape = (sequences * pages, spec.num_kv_heads, spec.page_size, spec.head_dim)
    k, v = (torch.empty(shape, dtype=torch.bfloat16, device=device) for _ in range(2))
    table = torch.empty_strided(batch.page_table.shape, batch.page_table.stride(), dtype=torch.int32, device=device)
    positions = NUMBERS // spec.head_dim
    # As many programs as run at once, and not one for each block of the widest table: most would find nothing.
    programs = max(1, PROGRAMS_PER_SM * gpu.num_sms // (spec.num_kv_heads * sequences))
    grid = (min(cdiv(pages * spec.page_size, positions), programs), spec.num_kv_heads, sequences)
    arguments = (
        kv.k, kv.v, k, v, table, batch.query_start, batch.context_lens, batch.page_table,
        window, spec.page_size.bit_length() - 1, short_len, pages,
        kv.k.stride(0), kv.k.stride(1), k.stride(0), batch.page_table.stride(0),
    )  # fmt: skip
    constants = {"HEAD_DIM": spec.head_dim, "POSITIONS": positions, "PLAIN": binding.PLAIN}
    launch(widen_jit.widen, grid, arguments, constants, {"num_warps": WARPS})
    return PagedKv(k, v), replace(batch, page_table=table)

"""Which batches each path of ``triton_paged`` is meant for. ``paged`` starts them.

A sequence with one new token, or two, is *short*: its queries fit one block of rows. Short sequences cut their keys
into splits for the whole machine (``Split``); long ones take blocks of query rows; a batch may have both.

Where drafts are verified the block has as many rows as the longest sequence needs, up to 64: eight tokens of gpt-oss.
Straight from the projection, blocks of 16 rows share them.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

from microscale.hardware import Gpu
from microscale.hardware.tiles.attention import (
    VERIFY_ROWS,
    VERIFY_SEQUENCES,
    AttentionCase,
    AttentionTile,
    AttentionWork,
    Kv,
    SplitKv,
    choose,
    decode_work,
    drafted_work,
    no_kernel,
    split_kv,
)
from microscale.kernels.attention import fused_decode, widen
from microscale.kernels.attention.spec import AttentionSpec
from microscale.kernels.numbers import cdiv
from microscale.kernels.op import Reason

Supports = Callable[[AttentionSpec, Gpu], Reason | None]


class Split(StrEnum):
    """How the keys of a short sequence are shared among programs."""

    ONE_PASS = "one pass"
    LAST_PROGRAM = "split-KV in one launch"
    """The program that ends last adds the splits up."""
    MERGE = "split-KV and merge"
    """A kernel of its own adds them up."""

    @property
    def because(self) -> Reason:
        return {
            Split.ONE_PASS: "the keys are too few to split",
            Split.LAST_PROGRAM: "the splits are so few that the last program adds them up",
            Split.MERGE: "the splits are many",
        }[self]


def tile_of(spec: AttentionSpec, gpu: Gpu, fp8: bool, *, decode: bool, fused: bool = False) -> AttentionTile:
    """The tile of a launch; ``fused``: from the projection."""
    if decode:
        work = _decode_work(spec, gpu, fused=fused)
    else:
        work = AttentionWork.PREFILL if spec.window is None else AttentionWork.PREFILL_WINDOW
    return choose(AttentionCase(work, spec.head_dim, Kv.of(fp8)), gpu)


def _decode_work(spec: AttentionSpec, gpu: Gpu, *, fused: bool) -> AttentionWork:
    """By the rows of a block: those of the longest sequence where drafts are verified, else the fewest."""
    several = spec.shape.longest_query > 1
    if fused:
        return AttentionWork.FUSED_VERIFY if several else AttentionWork.FUSED_DECODE
    if spec.shape.verify:
        return drafted_work(_rows(spec), spec.head_dim)
    if several:  # a step with prompts is padded with sequences, so their number says little
        return AttentionWork.DECODE
    return decode_work(spec.shape.sequences * spec.num_kv_heads, gpu)


def _rows(spec: AttentionSpec) -> int:
    """Query rows of the longest sequence, of one KV head."""
    return spec.shape.longest_query * (spec.num_heads // spec.num_kv_heads)


def short_len(spec: AttentionSpec, tile: AttentionTile) -> int:
    """New tokens up to which a sequence is short: its rows fit one block of the decoding tile."""
    return tile.block_m // (spec.num_heads // spec.num_kv_heads)


def parts_of(spec: AttentionSpec, tile: AttentionTile) -> int:
    """Programs of each KV head that share the new tokens of a sequence, where drafts come from the projection."""
    return cdiv(_rows(spec), tile.block_m)


def split_of(spec: AttentionSpec, gpu: Gpu) -> SplitKv:
    return split_kv(spec.head_dim, gpu, Kv.of(spec.shape.kv_fp8))


def most_splits(spec: AttentionSpec, table_pages: int, tile: AttentionTile, gpu: Gpu, *, fused: bool) -> int:
    """Splits of a sequence, at most: the page table or the window bounds its keys."""
    return _most_splits(spec, table_pages, tile, split_of(spec, gpu), fused)


def _most_splits(spec: AttentionSpec, table_pages: int, tile: AttentionTile, rule: SplitKv, fused: bool) -> int:
    keys = table_pages * spec.page_size
    if spec.window is not None:
        keys = min(keys, spec.window + (1 if fused else short_len(spec, tile)) - 1)
    return cdiv(keys, tile.block_n) // rule.least_blocks(tile)


def _short_tile(spec: AttentionSpec, gpu: Gpu, *, fused: bool = False) -> AttentionTile:
    """That of the batch's short sequences."""
    return tile_of(spec, gpu, spec.shape.kv_fp8, decode=True, fused=fused)


def _split(way: Split, spec: AttentionSpec, gpu: Gpu, tile: AttentionTile, *, fused: bool = False) -> Reason | None:
    """Why short sequences of the batch are not shared among programs in this way."""
    rule = split_of(spec, gpu)
    splits, inside = _most_splits(spec, spec.shape.table_pages, tile, rule, fused), rule.merged_inside
    if way is Split.ONE_PASS:
        return None if splits <= 1 else f"is for keys of one split, and a sequence may have {splits}"
    if splits <= 1:
        return "needs more keys than one split has"
    if way is Split.LAST_PROGRAM:
        most = f"up to {inside} splits" if inside else "no splits"
        return None if splits <= inside else f"adds up {most} of {spec.head_dim} wide heads, not {splits}"
    return None if splits > inside else f"is for more than {inside} splits, and a sequence has at most {splits}"


def _long(spec: AttentionSpec, tile: AttentionTile) -> Reason | None:
    """Why the batch is not one with a long sequence."""
    most = short_len(spec, tile)
    longest = spec.shape.longest_query
    return None if longest > most else f"is for sequences of more than {most} new tokens, not {longest}"


def decodes(way: Split) -> Supports:
    def supports(spec: AttentionSpec, gpu: Gpu) -> Reason | None:
        tile = _short_tile(spec, gpu)
        if _long(spec, tile) is None:
            most = short_len(spec, tile)
            return f"takes sequences of up to {most} new tokens, and one has {spec.shape.longest_query}"
        return _split(way, spec, gpu, tile)

    return supports


def prefills(spec: AttentionSpec, gpu: Gpu) -> Reason | None:
    if reason := _long(spec, _short_tile(spec, gpu)):
        return reason
    count = spec.shape.sequences
    return None if count == 1 else f"is for one sequence; of {count} some may decode"


def mixes(way: Split) -> Supports:
    def supports(spec: AttentionSpec, gpu: Gpu) -> Reason | None:
        tile = _short_tile(spec, gpu)
        if reason := _long(spec, tile):
            return reason
        return _split(way, spec, gpu, tile) if spec.shape.sequences > 1 else "is for several sequences, not one"

    return supports


def widens(long: Supports) -> Supports:
    """What ``long`` takes, with keys and values copied from FP8 to bf16 first."""

    def supports(spec: AttentionSpec, gpu: Gpu) -> Reason | None:
        return long(spec, gpu) or widen.refuses(spec, gpu)

    return supports


def fuses(way: Split) -> Supports:
    def supports(spec: AttentionSpec, gpu: Gpu) -> Reason | None:
        """Norms, rotation and KV write in the same launch."""
        shape, group = spec.shape, spec.num_heads // spec.num_kv_heads
        if reason := no_kernel(AttentionCase(AttentionWork.FUSED_DECODE, spec.head_dim, Kv.of(shape.kv_fp8)), gpu):
            return reason
        if shape.longest_query != 1:
            return f"takes one new token of each sequence, not {shape.longest_query}"
        if shape.heads is not None and shape.heads not in fused_decode.kinds(spec.head_dim):
            return (
                f"norms queries, keys and values of heads that are {spec.head_dim} wide, and these are not all normed"
            )
        if group > fused_decode.MAX_HEADS:
            return f"takes up to {fused_decode.MAX_HEADS} query heads per KV head, not {group}"
        few = _few(spec, split_of(spec, gpu).fused_sequences)
        return few or _split(way, spec, gpu, _short_tile(spec, gpu, fused=True), fused=True)

    return supports


def verifies(way: Split) -> Supports:
    def supports(spec: AttentionSpec, gpu: Gpu) -> Reason | None:
        """The same without norms, for a sequence's next token and the drafts after it."""
        shape, group = spec.shape, spec.num_heads // spec.num_kv_heads
        if not shape.verify or shape.longest_query == 1:
            return "is for sequences with drafts"
        if reason := no_kernel(
            AttentionCase(_decode_work(spec, gpu, fused=True), spec.head_dim, Kv.of(shape.kv_fp8)), gpu
        ):
            return reason
        if shape.heads is not None and any(shape.heads):
            return "pays with heads without norms that have values of their own"
        if group & (group - 1):
            return f"takes a power of two of query heads per KV head, not {group}"
        tile = _short_tile(spec, gpu, fused=True)
        if _rows(spec) > VERIFY_ROWS:
            return f"pays up to {VERIFY_ROWS // group} new tokens of a sequence, not {shape.longest_query}"
        few = _few(spec, min(split_of(spec, gpu).fused_sequences, VERIFY_SEQUENCES))
        return few or _split(way, spec, gpu, tile, fused=True)

    return supports


def _few(spec: AttentionSpec, most: int) -> Reason | None:
    """Why the sequences are too many to take their heads straight from the projection."""
    count = spec.shape.sequences
    return None if count <= most else f"pays up to {most} sequences, not {count}"

"""How the ranks of a tensor-parallel group share the tensors of a checkpoint: what each reads of one.

The arithmetic is in ``parallel/sharding``; ``reading/parts`` turns a part into ranges of a file.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from microscale.errors import Unsupported
from microscale.formats import BLOCK
from microscale.models.reading.parts import AxisPiece, RankPart
from microscale.parallel.sharding import Shard, WidthShare, split_heads, split_vocabulary, split_width


@dataclass(frozen=True)
class RankSplit:
    """How the ranks share one axis of a tensor. The axis counts values, whatever blocks they are stored in."""

    axis: int
    pieces: Callable[[Shard], tuple[AxisPiece, ...] | None]
    """The pieces of one rank; ``None``: it has all of the tensor."""

    def part(self, shard: Shard, block: int = 1) -> RankPart | None:
        """What one rank reads of a tensor that has one entry for each ``block`` values of the axis."""
        pieces = self.pieces(shard)
        return None if pieces is None else RankPart(self.axis, tuple(_in_blocks(piece, block) for piece in pieces))


def q_heads(num_heads: int, num_kv_heads: int, head_dim: int, axis: int = 0) -> RankSplit:
    """Each rank has the values of its query heads."""
    return RankSplit(axis, lambda shard: _heads(split_heads(num_heads, num_kv_heads, shard).heads, head_dim))


def kv_heads(num_heads: int, num_kv_heads: int, head_dim: int) -> RankSplit:
    """Each rank has the rows of the KV heads that its query heads read."""
    return RankSplit(0, lambda shard: _heads(split_heads(num_heads, num_kv_heads, shard).kv_heads, head_dim))


def qkv_heads(num_heads: int, num_kv_heads: int, head_dim: int) -> RankSplit:
    """One tensor with all rows of q, then of k, then of v."""

    def pieces(shard: Shard) -> tuple[AxisPiece, ...]:
        share = split_heads(num_heads, num_kv_heads, shard)
        k_first, v_first = num_heads * head_dim, (num_heads + num_kv_heads) * head_dim
        return (
            *_heads(share.heads, head_dim),
            *_heads(share.kv_heads, head_dim, k_first),
            *_heads(share.kv_heads, head_dim, v_first),
        )

    return RankSplit(0, pieces)


def width(size: int, axis: int, *, each: int = 1) -> RankSplit:
    """Each rank has its share of a width in whole blocks. ``each``: entries of the axis per unit of the width."""
    return RankSplit(axis, lambda shard: (_width(split_width(size, BLOCK, shard), each),))


def gate_then_up(size: int, axis: int) -> RankSplit:
    """All gate rows, then all up rows, of this width each."""

    def pieces(shard: Shard) -> tuple[AxisPiece, ...]:
        share = split_width(size, BLOCK, shard)
        return _width(share), _width(share, first=size)

    return RankSplit(axis, pieces)


def vocabulary(size: int) -> RankSplit:
    """Each rank has its rows of lm_head."""

    def pieces(shard: Shard) -> tuple[AxisPiece, ...]:
        rows = split_vocabulary(size, shard)
        return (AxisPiece(rows.start, rows.stop, len(rows)),)

    return RankSplit(0, pieces)


def first_rank_only(size: int, axis: int = 0) -> RankSplit:
    """The first rank has all of it and the others zeros: a bias of something that is summed over the ranks."""
    return RankSplit(axis, lambda shard: None if shard.is_first else (AxisPiece(0, 0, size),))


def _heads(numbers: range, head_dim: int, first: int = 0) -> tuple[AxisPiece, ...]:
    begin, end = (first + place * head_dim for place in (numbers.start, numbers.stop))
    return (AxisPiece(begin, end, end - begin),)


def _width(share: WidthShare, each: int = 1, first: int = 0) -> AxisPiece:
    return AxisPiece(first + share.begin * each, first + share.end * each, share.size * each)


def _in_blocks(piece: AxisPiece, block: int) -> AxisPiece:
    if piece.begin % block or piece.end % block:
        raise Unsupported(
            f"A rank's share of columns {piece.begin} to {piece.end} cuts a block of {block}; use fewer ranks."
        )
    return AxisPiece(piece.begin // block, piece.end // block, piece.size // block)

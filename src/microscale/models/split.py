"""Parts of tensors for one rank, from the arithmetic of ``parallel/sharding``: what families say of theirs."""

from __future__ import annotations

from microscale.errors import Unsupported
from microscale.formats import BLOCK
from microscale.models.reading.parts import Part, Piece
from microscale.parallel.sharding import Shard, WidthShare, split_vocabulary, split_width


def heads(numbers: range, head_dim: int, axis: int = 0, first: int = 0) -> Part:
    """The numbers of some heads. ``first``: where heads begin on the axis."""
    begin, end = (first + place * head_dim for place in (numbers.start, numbers.stop))
    return Part(axis, (Piece(begin, end, end - begin),))


def joined(*parts: Part) -> Part:
    """Parts of one axis, one behind the other."""
    return Part(parts[0].axis, tuple(piece for part in parts for piece in part.pieces))


def width(share: WidthShare, axis: int, *, each: int = 1, per: int = 1, first: int = 0) -> Part:
    """A share of a width on an axis that has ``each`` entries for ``per`` units, and begins at ``first``."""
    begin, end, size = (number * each // per for number in (share.begin, share.end, share.size))
    return Part(axis, (Piece(first + begin, first + end, size),))


def gate_and_up(whole: int, shard: Shard, axis: int) -> Part:
    """All gate rows, then all up rows, of an MLP or of experts of this width."""
    share = split_width(whole, BLOCK, shard)
    return joined(width(share, axis), width(share, axis, first=whole))


def vocabulary(vocab: int, shard: Shard) -> Part:
    rows = split_vocabulary(vocab, shard)
    return Part(0, (Piece(rows.start, rows.stop, len(rows)),))


def in_blocks(part: Part) -> Part:
    """The scales of what a part holds: one for each block."""
    for piece in part.pieces:
        if piece.begin % BLOCK or piece.end % BLOCK:
            raise Unsupported(
                f"A rank's share of columns {piece.begin} to {piece.end} cuts a block of {BLOCK}; use fewer ranks."
            )
    return Part(part.axis, tuple(Piece(p.begin // BLOCK, p.end // BLOCK, p.size // BLOCK) for p in part.pieces))

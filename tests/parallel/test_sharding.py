"""Every head, block and row is on exactly one rank, and a rank's KV heads are those that its heads read."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from microscale.errors import BadSetting, Unsupported
from microscale.parallel.sharding import WHOLE, Shard, split_heads, split_vocabulary, split_width

WORLDS = st.sampled_from([1, 2, 3, 4, 6, 8, 16])


def ranks(world: int) -> list[Shard]:
    return [Shard(rank, world) for rank in range(world)]


@given(WORLDS, st.integers(1, 8), st.integers(1, 8), st.integers(1, 8))
def test_every_head_once_with_its_kv_head(world: int, each: int, kv_each: int, sharing: int) -> None:
    # Either each rank has some KV heads, or some ranks share each.
    for num_kv in {kv_each * world, max(1, world // kv_each) if world % kv_each == 0 else world}:
        num_heads = num_kv * sharing * (each if num_kv % world == 0 else world)
        shares = [split_heads(num_heads, num_kv, shard) for shard in ranks(world)]
        assert [head for share in shares for head in share.heads] == list(range(num_heads))
        assert {kv for share in shares for kv in share.kv_heads} == set(range(num_kv))
        for share in shares:
            assert {head // (num_heads // num_kv) for head in share.heads} == set(share.kv_heads)
            assert len(share.kv_heads) == len(shares[0].kv_heads)
            assert len(share.heads) % len(share.kv_heads) == 0
            # The rank's own arithmetic, head number over heads per KV head, finds the same KV head.
            local = len(share.heads) // len(share.kv_heads)
            for place, head in enumerate(share.heads):
                assert share.kv_heads[place // local] == head // (num_heads // num_kv)


@given(WORLDS, st.integers(1, 300), st.sampled_from([1, 16, 32]))
def test_every_block_once_and_whole(world: int, blocks: int, block: int) -> None:
    shares = [split_width(blocks * block, block, shard) for shard in ranks(world)]
    covered = [place for share in shares for place in range(share.begin, share.end)]
    assert covered == list(range(blocks * block))
    for share in shares:
        assert share.size == shares[0].size >= share.end - share.begin
        assert share.begin % block == share.end % block == share.size % block == 0
    assert world * shares[0].size < blocks * block + world * block


@given(WORLDS, st.integers(1, 300_000))
def test_every_row_of_the_vocabulary_once(world: int, vocab: int) -> None:
    if vocab < world:
        with pytest.raises(Unsupported, match="vocabulary"):
            split_vocabulary(vocab, Shard(0, world))
        return
    shares = [split_vocabulary(vocab, shard) for shard in ranks(world)]
    assert [row for share in shares for row in share] == list(range(vocab))
    assert all(shares)
    if vocab >= 1024 * world:
        assert all(share.start % 1024 == 0 for share in shares)
        assert max(map(len, shares)) - min(map(len, shares[:-1] or shares)) <= 1024


def test_figures_of_known_models() -> None:
    assert split_width(2880, 32, Shard(0, 4)).size == 736
    last = split_width(2880, 32, Shard(3, 4))
    assert (last.begin, last.end, last.size) == (2208, 2880, 736)
    assert split_width(2880, 32, Shard(1, 2)).size == 1440
    # gpt-oss-120b: 64 heads, 8 KV heads; Gemma's full layers: 2 KV heads.
    assert split_heads(64, 8, Shard(1, 2)).kv_heads == range(4, 8)
    assert split_heads(16, 2, Shard(2, 4)) == split_heads(16, 2, Shard(2, 4))
    assert [split_heads(16, 2, shard).kv_heads for shard in ranks(4)] == [range(1), range(1), range(1, 2), range(1, 2)]
    assert split_vocabulary(201088, Shard(1, 2)) == range(99 * 1024, 201088)


def test_what_cannot_be_split_is_refused() -> None:
    with pytest.raises(Unsupported, match=r"6 attention heads cannot be split over 4 ranks; .* 3 divides them"):
        split_heads(6, 3, Shard(0, 4))
    with pytest.raises(Unsupported, match="3 KV heads"):
        split_heads(12, 3, Shard(0, 4))
    with pytest.raises(Unsupported, match="blocks of 32"):
        split_width(48, 32, Shard(0, 2))
    with pytest.raises(BadSetting, match="between 1 and 64"):
        Shard(0, 65)
    with pytest.raises(BadSetting, match="Rank 2"):
        Shard(2, 2)


def test_one_rank_has_everything() -> None:
    assert split_heads(64, 8, WHOLE).kv_heads == range(8)
    assert split_width(2880, 32, WHOLE).size == 2880
    assert split_vocabulary(201088, WHOLE) == range(201088)

"""The read bandwidth that kernels reach: below the data sheet's, with a source."""

from __future__ import annotations

from microscale.hardware import KNOWN
from microscale.hardware.reachable_bandwidth import CARDS, MEMORY_TYPES, reach


def test_every_card_has_a_reachable_bandwidth_below_its_sheet_with_a_source() -> None:
    for name, card in KNOWN.items():
        found = reach(card)
        assert 0.8 * card.bandwidth_gbs < found.low <= found.gbs <= found.high <= card.bandwidth_gbs
        assert found.source
        assert found.date >= "2023"
        assert name in CARDS or card.memory_type in MEMORY_TYPES
    assert (reach(KNOWN["gb10"]).low, reach(KNOWN["gb10"]).high) == (231, 251)
    assert not reach(KNOWN["a100"]).of_card
    assert all(0.8 < share.low < share.high < 1 for share in MEMORY_TYPES.values())
    assert set(CARDS) <= set(KNOWN)

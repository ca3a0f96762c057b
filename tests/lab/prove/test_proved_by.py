"""Cards that are not proved by themselves start no kernel that the cards which stand for them do not start."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from microscale.hardware import PROVED_BY, known
from microscale.kernels.launch import Kernel
from microscale_lab.prove import command, run
from microscale_lab.prove.inventory import SETTINGS, recorded


@cache
def kernels(card: str, models: tuple[str, ...] | None, num_settings: int) -> frozenset[Kernel]:
    return frozenset(recorded(known(card), models, SETTINGS[:num_settings]))


@pytest.mark.nightly  # half a minute per card
@pytest.mark.parametrize("card", PROVED_BY)
def test_every_kernel_of_a_card_is_proved_for_another(card: str) -> None:
    started, *others = (kernels(name, None, len(SETTINGS)) for name in (card, *PROVED_BY[card]))
    assert started <= frozenset().union(*others)


@pytest.mark.parametrize("card", ["a10", "l4", "rtx5070ti"])
def test_the_same_for_one_model(card: str) -> None:
    started, *others = (kernels(name, ("demo",), 1) for name in (card, *PROVED_BY[card]))
    assert started <= frozenset().union(*others)


def test_all_leaves_those_cards_out_and_says_which_cards_cover_them() -> None:
    asked = []

    def source(gpu: Any) -> list[Kernel]:
        asked.append(gpu)
        return []

    run.prove(source, "all")
    assert not {known(name) for name in PROVED_BY} & set(asked)
    assert {known(other) for others in PROVED_BY.values() for other in others} <= set(asked)
    text = "\n".join(command.proved_by_lines())
    assert all(known(name).name in text for name in PROVED_BY)

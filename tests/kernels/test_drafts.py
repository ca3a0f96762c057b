"""What stands between two steps with drafts: its reference by hand, and its kernels, of which there are few."""

from __future__ import annotations

import pytest
import torch

from microscale.hardware import known
from microscale.kernels.drafts.reference import count_accepted
from microscale.kernels.drafts.spec import NO_TOKEN
from microscale.kernels.launch import Launch, recording
from microscale.planning.following import follow, record_following
from microscale_lab.cases.drafts import FollowCase, MoveCase, cases, layout_of
from support.interpreter import first_and_all, run_cases


@first_and_all
def test_under_the_interpreter(which: str) -> None:
    run_cases("cases_drafts.py", which, beside=__file__)


def test_by_hand() -> None:
    last, layout = layout_of([2, 1], "cpu"), layout_of([1, 2], "cpu")
    drawn = torch.tensor([5, 9, 7, 3, 4], dtype=torch.int32)
    verified = torch.tensor([[5, 6], [8, NO_TOKEN]])
    assert count_accepted(drawn, verified, last).tolist() == [1, 0]
    found = follow(drawn, last, verified, layout, torch.tensor([[1, 2], [3, 4]]))
    assert found.accepted.tolist() == [1, 0]
    assert found.own.tolist() == [9, 3]
    assert found.drafts.tolist() == [[1, NO_TOKEN], [3, 4]]
    assert found.moved.tolist() == [1, 1, 0, 0, 0]
    assert found.tokens().tolist() == [9, 1, 3, 3, 4]


def test_a_step_is_moved_on_by_two_launches_and_a_head_by_one() -> None:
    started: list[Launch] = []
    for case in (FollowCase("a", (3, 2), (1, 4)), MoveCase("b", (1, 4)), MoveCase("c", (1, 4), head=True)):
        with recording() as found:
            case.start(known("h200"), "cpu")
        started += found.values()
    assert [launch.fn.__name__ for launch in started] == ["follow", "move_on", "move_on"]
    assert [launch.grid for launch in started] == [(2,)] * 3


@pytest.mark.parametrize("gpu", ["h200", "a100", "gb10"])
def test_what_every_size_starts_is_recorded(gpu: str) -> None:
    """So it is compiled before the first request."""
    with recording() as found:
        for case in cases():
            case.start(known(gpu), "cpu")
    assert set(found) == set(record_following(2))

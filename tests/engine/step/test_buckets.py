"""Buckets of tokens: hardly any padding, and never another kernel than the step would run by itself."""

from __future__ import annotations

from itertools import pairwise

import pytest

from microscale.backends.ops import Activations, Ops, Preference
from microscale.engine.step.buckets import EVERY_SIZE_TO, bucket, buckets, sizes
from microscale.hardware import known
from microscale.models.families import PRESETS
from microscale.models.recorded import kernels_by_tokens


def test_at_most_12_percent_are_padding() -> None:
    ends = sizes(1024)
    for tokens in range(1, 1025):
        end = bucket(ends, tokens)
        assert end is not None
        assert tokens <= end <= 1.12 * tokens
        assert end == tokens or tokens > EVERY_SIZE_TO
    assert bucket(ends, 1025) is None
    assert len(ends) < 64
    assert all(end % 8 == 0 for end in ends if end > 64)


@pytest.mark.parametrize("most", [1, 7, 16, 17, 100, 2048])
def test_the_last_bucket_is_the_most(most: int) -> None:
    assert sizes(most)[-1] == most


def test_buckets_end_where_kernels_change() -> None:
    changes = (1, 17, 20, 63, 64, 100, 101, 700)
    ends = buckets(1024, lambda tokens: sum(tokens > change for change in changes))
    assert set(changes) | set(sizes(1024)) == set(ends)


@pytest.mark.parametrize(("name", "card"), [("gpt-oss-20b", "h200"), ("gemma-4-26b-a4b", "gb10")])
def test_a_step_runs_the_kernels_that_it_would_run_unfilled(name: str, card: str) -> None:
    ops = Ops(known(card), Activations.BF16, Preference())
    kernels = kernels_by_tokens(PRESETS[name], ops)
    ends = buckets(256, kernels)
    # Sizes that nobody has asked about: just after a bucket, and within.
    for low, high in pairwise(ends):
        for tokens in {low + 1, (low + high) // 2 + 1} - {high}:
            if low < tokens:
                assert kernels(tokens) == kernels(high), (tokens, high)

"""The sampling kernels' cases on a real GPU: more draws, larger batches, and a graph that replays."""

from __future__ import annotations

import pytest
import torch

from kernels.cases_sampling import (  # noqa: F401
    GPU,
    make_batch,
    random_logits,
    test_a_row_gets_the_same_token_in_every_batch,
    test_bias,
    test_broken_rows_end_alone,
    test_cases,
    test_equal_logits_are_cut_by_id,
    test_given_tokens_are_scored,
    test_greedy_from_the_lm_heads_blocks_reads_no_logits_but_one,
    test_greedy_takes_the_lowest_id_among_equals,
    test_many_ties_at_the_cut,
    test_masks,
    test_penalties,
    test_tokens_follow_their_distribution,
    test_top_logprobs,
)
from microscale.kernels.sampling.blocked import TritonSampling
from microscale_lab.calls import run_sampling

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"), pytest.mark.odd_shapes]


def test_a_graph_replays_with_new_logits_and_positions() -> None:
    """Nothing waits for the host: the captured step gives what the same step gives when launched afresh."""
    rows, vocab = 8, 201088
    batch = make_batch(rows, temperature=[0.0, 0.5, 1.0, 1.0] * 2, top_k=[0, 0, 40, 0] * 2, top_p=[1, 1, 0.9, 0.8] * 2)
    logits = random_logits(rows, vocab).contiguous()
    run_sampling(TritonSampling(), GPU, logits, batch)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run_sampling(TritonSampling(), GPU, logits, batch)
    for turn in range(3):
        logits.copy_(random_logits(rows, vocab, seed=turn + 5))
        batch.position.add_(1)
        graph.replay()
        afresh = run_sampling(TritonSampling(), GPU, logits, batch)
        assert torch.equal(captured.tokens, afresh.tokens)
        assert torch.equal(captured.logprobs, afresh.logprobs)

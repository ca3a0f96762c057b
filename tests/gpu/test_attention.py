"""The paged attention kernel's cases on a real GPU, with contexts that the interpreter has no time for."""

from __future__ import annotations

import pytest

from kernels.cases_attention import (  # noqa: F401
    test_a_graph_of_drafts_in_one_launch,
    test_a_graph_of_one_launch,
    test_a_graph_reads_lengths_and_tables_on_the_device,
    test_drafts_are_the_reference,
    test_drafts_are_verified_in_one_launch,
    test_drafts_are_what_decode_gives_token_by_token,
    test_drafts_in_one_launch_with_rows_of_no_one,
    test_drafts_in_one_launch_with_sinks,
    test_drafts_run_by_split_kv_and_prompts_do_not,
    test_e4m3_at_its_ends,
    test_every_tile_fits_every_card,
    test_heads_to_attention_in_one_launch,
    test_one_launch_and_a_sequence_without_a_token,
    test_one_launch_with_rows_of_no_one,
    test_one_launch_with_sinks,
    test_pages_in_every_order,
    test_splits_add_up_in_order,
    test_splits_fill_the_machine,
    test_the_copy_is_exact,
    test_the_scale_of_the_scores,
    test_triton_is_the_reference,
    test_what_is_not_one_launch,
    test_which_drafts_are_one_launch,
    test_which_drafts_run_apart,
    test_who_copies_keys,
)
from microscale.hardware import Feature, detect

pytestmark = pytest.mark.odd_shapes
ONE_LAUNCH = {
    "test_a_graph_of_drafts_in_one_launch",
    "test_a_graph_of_one_launch",
    "test_drafts_are_verified_in_one_launch",
    "test_drafts_are_what_decode_gives_token_by_token",
    "test_drafts_in_one_launch_with_rows_of_no_one",
    "test_drafts_in_one_launch_with_sinks",
    "test_heads_to_attention_in_one_launch",
    "test_one_launch_and_a_sequence_without_a_token",
    "test_one_launch_with_rows_of_no_one",
    "test_one_launch_with_sinks",
    "test_what_is_not_one_launch",
}


@pytest.fixture(autouse=True)
def only_what_the_card_starts(request: pytest.FixtureRequest) -> None:
    if request.function.__name__ in ONE_LAUNCH and not detect().has(Feature.PDL):
        pytest.skip(f"{detect().name} never decodes in one launch: it has no programmatic dependent launch")

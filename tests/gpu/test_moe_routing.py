"""The routing kernels' cases on a real GPU."""

from __future__ import annotations

import pytest
import torch

from kernels.cases_moe_routing import (  # noqa: F401
    test_all_tokens_on_the_same_experts,
    test_broken_logits_stay_in_range,
    test_dispatch_is_the_twin,
    test_equal_logits_go_to_the_lowest_index,
    test_no_tokens,
    test_route_is_the_twin,
    test_rows_of_a_wider_matrix,
)

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"), pytest.mark.odd_shapes]

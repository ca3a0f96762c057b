"""The recurrent kernels' cases on a real GPU, those of real widths among them."""

from __future__ import annotations

import pytest
import torch

from kernels.cases_recurrent import (  # noqa: F401
    test_decode,
    test_drafts,
    test_few_tokens,
    test_prompts,
    test_prompts_next_to_others,
)

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"), pytest.mark.odd_shapes]

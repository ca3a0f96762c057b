"""The paged attention kernel's cases on a real GPU, with contexts that the interpreter has no time for."""

from __future__ import annotations

from kernels.cases_attention import (  # noqa: F401
    test_every_tile_fits_every_card,
    test_splits_fill_the_machine_and_never_starve,
    test_triton_is_the_reference,
)

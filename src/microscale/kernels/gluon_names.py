"""Two Gluon functions by names of our own: Triton 3.6 to 3.9 do not agree on theirs."""

from __future__ import annotations

from triton.experimental.gluon.language import shared_memory_descriptor
from triton.experimental.gluon.language.nvidia.ampere import async_copy

reinterpret = getattr(shared_memory_descriptor, "reinterpret", None) or shared_memory_descriptor._reinterpret
"""``reinterpret(memory, dtype, shape, layout)``: the same shared memory, read as something else."""
async_load = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
"""``async_load(to, pointers)``: ``cp.async``. The older name still exists in 3.9, and raises."""

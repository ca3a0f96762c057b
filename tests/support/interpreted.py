"""``interpreted`` of the product with PTX from the cache that ``prove`` keeps: each kernel is compiled once, whichever
test asks first and in whichever process."""

from __future__ import annotations

from contextlib import AbstractContextManager

from microscale import settings
from microscale.kernels.launch import Kernel
from microscale_lab.prove import bridge
from ptxproof import Edit
from ptxproof.cache import PtxCache

__all__ = ["Edit", "interpreted"]


def interpreted(sm: int, edit: Edit | None = None) -> AbstractContextManager[dict[Kernel, int]]:
    return bridge.interpreted(sm, edit, PtxCache(settings.load().cache_dir).compiled)

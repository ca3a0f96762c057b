"""Whether a call can stand in a CUDA graph: on a GPU it is captured. Elsewhere kernels are not launched, and what a
capture refuses of the host's code around them raises: that code must not depend on what they would have computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from microscale.kernels.launch import recording

REFUSED = {
    "aten::_local_scalar_dense": "a value is read on the host",
    "aten::equal": "a comparison is read on the host",
    "aten::is_nonzero": "a value is read on the host",
    "aten::nonzero": "the result's size is read on the host",
    "aten::masked_select": "the result's size is read on the host",
    "aten::_unique": "the result's size is read on the host",
    "aten::_unique2": "the result's size is read on the host",
    "aten::unique_dim": "the result's size is read on the host",
    "aten::unique_consecutive": "the result's size is read on the host",
    "aten::bincount": "the result's size is read on the host",
    "aten::repeat_interleave": "the result's size is read on the host",
    "aten::lift_fresh": "numbers of the host become a tensor, which copies them from pageable memory",
}
"""What makes the host wait for the device, or copies from memory that a graph cannot hold."""


class HostRead(AssertionError):
    """Something that no graph can hold."""


class NoHostReads(TorchDispatchMode):
    """Raises ``HostRead`` where a device's value would come to the host. ``Tensor.tolist`` goes past the dispatcher,
    so it is replaced meanwhile."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __enter__(self) -> NoHostReads:
        self._kept = {name: getattr(torch.Tensor, name) for name in ("tolist", "numpy", "cpu")}
        for name in self._kept:
            setattr(torch.Tensor, name, _refuse(name))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *details: Any) -> None:
        super().__exit__(*details)  # type: ignore[no-untyped-call]
        for name, kept in self._kept.items():
            setattr(torch.Tensor, name, kept)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        reason = REFUSED.get(func._schema.name)
        # An index by a mask is one by its places, whose number is not known.
        indexes = func._schema.name in ("aten::index", "aten::index_put", "aten::index_put_")
        if indexes and any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]):
            reason = "a mask as an index: the result's size is read on the host"
        if reason is not None:
            raise HostRead(f"{func._schema.name}: {reason}")
        return func(*args, **(kwargs or {}))


def _refuse(name: str) -> Callable[..., Any]:
    def refused(*args: Any, **kwargs: Any) -> Any:
        raise HostRead(f"Tensor.{name}: values are read on the host")

    return refused


_mm = torch.mm


def _mm_on_cpu(a: torch.Tensor, b: torch.Tensor, *, out_dtype: torch.dtype) -> torch.Tensor:
    """cuBLAS alone widens what it gives."""
    return _mm(a, b).to(out_dtype)


def check_capturable(call: Callable[[], object]) -> None:
    """``call`` twice: once as it is, which may compile and fill caches, and once captured."""
    if not torch.cuda.is_available():
        with recording(), patch.object(torch, "mm", _mm_on_cpu):
            call()
            with NoHostReads():
                call()
        return
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    graph.replay()
    torch.cuda.synchronize()

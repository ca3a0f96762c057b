"""Memory of the host that processes map, in the place of a GPU's: what torch's symmetric memory does, where there is no
GPU to do it with. Names, numbers and waits are as torch has them; who resolves the name is torch's own registry."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, ProcessGroup, Store, _resolve_process_group
from torch.distributed.distributed_c10d import GroupName


def mapped_file(path: Path, size: int) -> Tensor:
    return torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)


@dataclass(frozen=True)
class Handle:
    buffers: tuple[Tensor, ...]

    def get_buffer(self, rank: int, sizes: tuple[int, ...], dtype: torch.dtype, offset: int) -> Tensor:
        assert (sizes, dtype, offset) == (tuple(self.buffers[rank].shape), torch.uint8, 0)
        return self.buffers[rank]


class HostMemory:
    """Has the methods of ``_SymmetricMemory`` that are called."""

    def __init__(self, folder: Path, fails: Mapping[int, str] | None = None) -> None:
        """``folder``: of the memory. ``fails``: ranks that fail, at ``alloc``, ``export`` (before they tell the others
        anything) or ``import`` (when they have)."""
        self._folder = folder
        self._fails = fails or {}
        # The process of the first rank has had other teams before.
        self._exchanges = {0: count(5)}
        self._paths: dict[int, Path] = {}
        self.found: list[tuple[int, int]] = []
        """Rank and number of ranks, as they were found under the names."""

    def _may_fail(self, name: GroupName, at: str) -> None:
        if self._fails.get(_resolve_process_group(name).rank()) == at:
            # Not all that torch raises is a RuntimeError.
            kind = ValueError if at == "export" else RuntimeError
            raise kind(f"CUDA driver error: {at} is not supported.\nException raised from {at}")

    def empty_strided_p2p(
        self, size: tuple[int], stride: tuple[int], dtype: torch.dtype, device: torch.device, name: GroupName
    ) -> Tensor:
        self._may_fail(name, "alloc")
        path = self._folder / name
        path.write_bytes(b"\xff" * size[0])  # whoever needs zeros writes them
        made = mapped_file(path, size[0])
        self._paths[made.data_ptr()] = path
        return made

    def rendezvous(self, own: Tensor, name: GroupName) -> Handle:
        group = _resolve_process_group(name)
        self.found.append((group.rank(), group.size()))
        # As C++ calls it, and not as one Python object another.
        store = PrefixStore("", group.get_group_store())
        self._may_fail(name, "export")
        paths = self._all_gather(store, group, str(self._paths[own.data_ptr()]))
        self._may_fail(name, "import")
        size = own.numel()
        handle = Handle(tuple(mapped_file(Path(path), size) for path in paths))
        self._all_gather(store, group, "there")
        return handle

    def _all_gather(self, store: Store, group: ProcessGroup, text: str) -> list[str]:
        number = next(self._exchanges.setdefault(group.rank(), count()))
        keys = [f"HostMemory/{number}/{rank}" for rank in range(group.size())]
        store.set(keys[group.rank()], text)
        return [each.decode() for each in store.multi_get(keys)]

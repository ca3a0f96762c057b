"""What fits beside the system where it shares the GPU's memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from microscale.engine.loading.memory import Memory
from microscale.engine.loading.usable import usable_memory
from microscale.hardware.unified import PAGE_CACHE, System, systems


@dataclass(frozen=True)
class Beside:
    """One system, and what is left beside it."""

    system: System
    usable: int
    max_context: int
    """Of one sequence; 0 where the model does not fit."""
    max_sequences: int

    def to_json(self) -> dict[str, Any]:
        figures = {"usable": self.usable, "max_context": self.max_context, "max_sequences": self.max_sequences}
        return {**asdict(self.system), "page_cache": PAGE_CACHE, **figures}


def beside(memory: Memory) -> Iterator[Beside]:
    """For each way to run the machine; nothing where the machine itself said what is free."""
    if memory.available is not None:
        return
    work = memory.workload
    for system in systems(memory.gpu):
        free = memory.gpu.memory_bytes - system.takes - PAGE_CACHE
        usable, _ = usable_memory(memory.gpu, work.utilization, free, work.reserve)
        there = replace(memory, usable=usable, available=free)
        yield Beside(system, usable, there.max_context, there.max_sequences)

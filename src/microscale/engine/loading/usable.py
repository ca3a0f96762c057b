"""How much memory a model may use, and what stays with the system where both share it.

A machine whose GPU shares the system's memory (GB10) does not fail when that is full: it hangs. So a start is
refused before it could leave less than a reserve, and a load ends when others take so much that it would.
"""

from __future__ import annotations

from microscale.errors import BadSetting, Unsupported
from microscale.hardware import GIB, Gpu

UNIFIED_RESERVE = 8 * GIB
"""Left to the system by a GPU that shares its memory, or an eighth if that is less."""
CPU_RESERVE = 4 * GIB
"""Left to other programs on a CPU, or a sixteenth if that is less."""


def reserve_bytes(gpu: Gpu, requested: int | None) -> int:
    """What stays with the system; ``requested``: the user's ``--reserve-memory``."""
    if not gpu.unified:
        if requested is not None:
            raise BadSetting(
                f"--reserve-memory is for memory that a GPU shares with the system, and {gpu.name} has its own; "
                f"use --gpu-memory-utilization."
            )
        return 0
    if requested is None:
        return min(CPU_RESERVE, gpu.memory_bytes // 16) if gpu.is_cpu else min(UNIFIED_RESERVE, gpu.memory_bytes // 8)
    if not 0 <= requested < gpu.memory_bytes:
        raise BadSetting(
            f"--reserve-memory {requested / GIB:g} is not between 0 and the {gpu.memory_bytes / GIB:.1f} GiB of "
            f"{gpu.name}."
        )
    return requested


def usable_memory(gpu: Gpu, utilization: float, available: int | None, reserve: int | None = None) -> tuple[int, str]:
    """Bytes that may be used, and how they came about. ``available``: what is free; ``None``: all of it."""
    share = int(utilization * gpu.memory_bytes)
    free = gpu.memory_bytes if available is None else available
    room = reserve_bytes(gpu, reserve)
    if gpu.unified:
        # A CPU's programs share all of its memory; the option speaks of GPUs.
        if gpu.is_cpu or free - room < share:
            return max(free - room, 0), f"{free / GIB:.1f} GiB free, {room / GIB:.1f} of them left to the system"
    elif free < share:
        return free, f"{free / GIB:.1f} GiB free"
    return share, f"{utilization:.2f} of {gpu.memory_bytes / GIB:.1f} GiB"


def check_left(gpu: Gpu, reserve: int | None, available: int) -> None:
    """Ends a load during which the system is left with less than its reserve: another program takes memory too."""
    room = reserve_bytes(gpu, reserve)
    if gpu.unified and not gpu.is_cpu and available < room:
        raise Unsupported(
            f"While the model was loaded, the free memory of {gpu.name} fell to {available / GIB:.1f} GiB, and "
            f"{room / GIB:.1f} stay with the system: end other programs, choose a smaller model or precision, or lower "
            f"--reserve-memory."
        )

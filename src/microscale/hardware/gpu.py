"""Which GPU is here, and how much memory it has free.

``detect()`` looks at the machine, ``known(name)`` at the table, ``cpu()`` stands for a machine without a GPU. This is
the only module that asks the driver for a compute capability.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import torch

from microscale.errors import Unsupported
from microscale.hardware.families import CPU_FAMILY, FAMILY_OF_SM, GENERIC, KNOWN, Gpu, Peak

MEMINFO = Path("/proc/meminfo")


class UnknownGpu(UserWarning):
    """The card is not in the table; Microscale uses only what every GPU from Ampere on has."""


def known(name: str) -> Gpu:
    """The card that ``--gpu NAME`` means."""
    try:
        return KNOWN[name]
    except KeyError:
        raise Unsupported(f"Unknown GPU {name!r}; known are {', '.join(KNOWN)}.") from None


def cpu() -> Gpu:
    """A machine without a GPU. Its rates only rank implementations against each other; they promise no speed."""
    cores = os.cpu_count() or 1
    return Gpu("CPU", CPU_FAMILY, 0, cores, 20.0, Peak(bf16=0.05 * cores), system_memory()[0], unified=True)


def system_memory(meminfo: Path = MEMINFO) -> tuple[int, int]:
    """Total and available bytes of system memory, as the kernel reports them."""
    fields: dict[str, int] = {}
    try:
        for line in meminfo.read_text().splitlines():
            key, _, rest = line.partition(":")
            fields[key] = int(rest.split()[0]) * 1024
        return fields["MemTotal"], fields["MemAvailable"]
    except (OSError, KeyError, ValueError, IndexError):
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return total, total


def _match(name: str, sm: int, memory_bytes: int) -> Gpu | None:
    """The table's row for a card of this name: the longest known name that the driver's name starts with."""
    rows = [card for card in KNOWN.values() if card.sm == sm and name.startswith(_stem(card.name))]
    return max(rows, key=lambda card: (len(_stem(card.name)), -abs(card.memory_bytes - memory_bytes)), default=None)


def _stem(name: str) -> str:
    # The driver says "NVIDIA H200", "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB".
    return name.removesuffix(" 80GB").removesuffix(" Blackwell")


def describe(name: str, sm: int, num_sms: int, memory_bytes: int, integrated: bool = False) -> Gpu:
    """The record of a card with these properties; what the table does not know is estimated, and said."""
    row = _match(name, sm, memory_bytes)
    if row is not None:
        return Gpu(name, row.family, sm, num_sms, row.bandwidth_gbs, row.peak, memory_bytes, row.unified or integrated)
    family = FAMILY_OF_SM.get(sm, GENERIC)
    siblings = [card for card in KNOWN.values() if card.family is family] or list(KNOWN.values())
    # The slowest sibling, per SM: an estimate that never promises too much.
    nearest = min(siblings, key=lambda card: card.bandwidth_gbs / card.num_sms)
    share = num_sms / nearest.num_sms
    peak = Peak(
        nearest.peak.bf16 * share,
        nearest.peak.fp8 * share if nearest.peak.fp8 else None,
        nearest.peak.fp4 * share if nearest.peak.fp4 else None,
    )
    warnings.warn(
        f"{name} (SM {sm // 10}.{sm % 10}) is not in Microscale's table: using the features of family "
        f"{family.name!r} and rates estimated from {nearest.name}. Speeds that `explain` predicts are rough.",
        UnknownGpu,
        stacklevel=3,
    )
    return Gpu(name, family, sm, num_sms, nearest.bandwidth_gbs * share, peak, memory_bytes, integrated)


def detect(index: int = 0) -> Gpu:
    """The GPU with this index, or ``cpu()`` where there is none."""
    if not torch.cuda.is_available():
        return cpu()
    props = torch.cuda.get_device_properties(index)
    integrated = bool(getattr(props, "is_integrated", False))
    return describe(
        props.name, props.major * 10 + props.minor, props.multi_processor_count, props.total_memory, integrated
    )


def available_memory(gpu: Gpu, index: int = 0) -> int:
    """Bytes that can still be allocated. On unified memory the driver's figure misleads; the system's bounds it."""
    if gpu.is_cpu:
        return system_memory()[1]
    free, _ = torch.cuda.mem_get_info(index)
    return min(free, system_memory()[1]) if gpu.unified else free

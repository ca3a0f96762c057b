"""Which GPU is here, and how much memory it has free.

``detect()`` looks at the machine, ``known(name)`` at the table, ``cpu()`` is a machine without a GPU. Inside
``played(gpu)`` the machine passes for another one, and ``present()`` still says what is really there. This is the only
module that asks the driver for a compute capability.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from microscale.errors import BadSetting, Unsupported
from microscale.hardware.cards import (
    BEFORE_AMPERE,
    CPU_FAMILY,
    FAMILY_OF_SM,
    GENERIC,
    GIB,
    KNOWN,
    Family,
    Feature,
    Gpu,
    Peak,
    capability_text,
)

MEMINFO = Path("/proc/meminfo")


class UnknownGpu(UserWarning):
    """The card is not in the table; Microscale uses only what every GPU from Ampere on has."""


ALIASES = {"spark": "gb10", "rtxa6000": "a6000", "6000ada": "rtx6000ada", "rtxa10": "a10"}
MAKERS_WORDS = re.compile(
    r"nvidia|geforce|dgx|quadro|generation|blackwell|workstation|server|edition|sxm\d?|hbm\d?e?|[^a-z0-9]"
)
SPECIFIED = "the specified GPU"
"""Name of a card that ``--gpu-spec`` describes."""
SPEC_KEYS = ("sms", "gbs", "gib", "capability")
SPEC_EXAMPLE = "--gpu-spec sms=84,gbs=960,gib=16,capability=12.0"


def known(name: str) -> Gpu:
    """The card that ``--gpu NAME`` means: ``rtx5090``, ``5090``, ``"RTX 5090"`` and the driver's name are all one. A
    size of the memory may follow, if it is the card's."""
    size = re.search(r"(?<!\d)(\d{1,3}) ?gb\b", name.lower())
    card = _named(_plain(name if size is None else name.lower().replace(size.group(), "")))
    if card is None:
        raise Unsupported(
            f"Unknown GPU {name!r}; known are {', '.join(KNOWN)}. Or describe yours to `explain`: {SPEC_EXAMPLE}."
        )
    if size is not None and not _near(int(size.group(1)) * GIB, card.memory_bytes):
        raise Unsupported(
            f"{card.name} with {size.group(1)} GB is not in the table, only the one with "
            f"{card.memory_bytes / GIB:.0f} GiB. Describe yours to `explain`: {SPEC_EXAMPLE}."
        )
    return card


def _named(plain: str) -> Gpu | None:
    for key, card in KNOWN.items():
        if plain in (key, key.removeprefix("rtx"), _plain(_stem(card.name))):
            return card
    return KNOWN.get(ALIASES.get(plain, ""))


def _plain(name: str) -> str:
    """Letters and digits alone, without the makers' words."""
    return MAKERS_WORDS.sub("", name.lower())


def from_spec(text: str) -> Gpu:
    """The card that ``--gpu-spec`` describes. Its matrix rates are estimated from known cards of its family."""
    values: dict[str, float] = {}
    for part in text.split(","):
        key, _, value = part.partition("=")
        try:
            values[key.strip()] = float(value)
        except ValueError:
            raise BadSetting(f"--gpu-spec: {part.strip()!r} is not KEY=NUMBER. Write {SPEC_EXAMPLE}.") from None
    if set(values) != set(SPEC_KEYS) or len(values) != len(text.split(",")):
        raise BadSetting(f"--gpu-spec {text!r} must give {', '.join(SPEC_KEYS)}, each once. Write {SPEC_EXAMPLE}.")
    sms, gbs, gib, capability = (values[key] for key in SPEC_KEYS)
    if not (1 <= sms <= 1000 and sms == int(sms) and 1 <= gbs <= 100_000 and 1 <= gib <= 10_000):
        raise BadSetting(
            f"--gpu-spec {text!r}: sms is a whole number from 1 to 1000, gbs from 1 to 100000, gib from 1 to 10000."
        )
    sm = next((each for each in FAMILY_OF_SM if each / 10 == capability), None)
    if sm is None:
        listed = ", ".join(capability_text(each) for each in FAMILY_OF_SM)
        raise BadSetting(f"--gpu-spec: capability {capability:g} is not one of {listed}.")
    family = FAMILY_OF_SM[sm]
    _, peak = _estimate(family, int(sms))
    return Gpu(f"{SPECIFIED} ({text})", family, sm, int(sms), gbs, peak, int(gib * GIB))


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


# How far a card may be from a row of the table in SMs and memory and still be that card. Laptop, PCIe, 40 GB and MIG
# versions carry the same name and differ by more.
SAME_CARD = 0.1


def _match(name: str, sm: int, num_sms: int, memory_bytes: int) -> Gpu | None:
    """The table's row for this card: its name begins like the row's, and it has the row's SMs and memory."""
    rows = [
        card
        for card in KNOWN.values()
        if card.sm == sm
        and name.startswith(_stem(card.name))
        and _near(num_sms, card.num_sms)
        and _near(memory_bytes, card.memory_bytes)
    ]
    return max(rows, key=lambda card: len(_stem(card.name)), default=None)


def _near(value: int, of_row: int) -> bool:
    return abs(value - of_row) <= SAME_CARD * of_row


def card_name(gpu: Gpu) -> str | None:
    """What ``--gpu`` calls this card; ``None`` where it is not in the table."""
    row = _match(gpu.name, gpu.sm, gpu.num_sms, gpu.memory_bytes)
    return next((name for name, card in KNOWN.items() if card is row), None)


def _stem(name: str) -> str:
    # The driver says "NVIDIA H200", "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB".
    return name.removesuffix(" 80GB").removesuffix(" Blackwell")


def _estimate(family: Family, num_sms: int) -> tuple[float, Peak]:
    """Bandwidth and rates of an unknown card: the least per SM among the family's cards, for what the family has."""
    siblings = [card for card in KNOWN.values() if card.family is family] or list(KNOWN.values())
    bandwidth = min(card.bandwidth_gbs / card.num_sms for card in siblings)
    bf16 = min(card.peak.bf16 / card.num_sms for card in siblings)
    fp8 = min((card.peak.fp8 / card.num_sms for card in siblings if card.peak.fp8), default=0.0)
    fp4 = min((card.peak.fp4 / card.num_sms for card in siblings if card.peak.fp4), default=0.0)
    has_fp8 = Feature.MMA_FP8 in family.features
    has_fp4 = family.features & {Feature.MX_MMA, Feature.TCGEN05}
    peak = Peak(bf16 * num_sms, fp8 * num_sms if has_fp8 else None, fp4 * num_sms if has_fp4 else None)
    return bandwidth * num_sms, peak


def describe(name: str, sm: int, num_sms: int, memory_bytes: int, integrated: bool = False) -> Gpu:
    """The record of a card with these properties; what is not in the table is estimated, with a warning."""
    if sm in BEFORE_AMPERE:
        raise Unsupported(
            f"{name} (SM {capability_text(sm)}) is older than Ampere, the first that Microscale's kernels run on; "
            f"use --device cpu, or an RTX 30-series, A100 or newer GPU."
        )
    row = _match(name, sm, num_sms, memory_bytes)
    if row is not None:
        unified = row.unified or integrated
        return replace(row, name=name, sm=sm, num_sms=num_sms, memory_bytes=memory_bytes, unified=unified)
    family = FAMILY_OF_SM.get(sm, GENERIC)
    bandwidth, peak = _estimate(family, num_sms)
    warnings.warn(
        f"{name} (SM {capability_text(sm)}, {num_sms} SMs, {memory_bytes / GIB:.0f} GiB) is not in Microscale's table: "
        f"using the features of family {family.name!r} and rates estimated from its known cards. "
        f"Speeds that are predicted for it are rough.",
        UnknownGpu,
        stacklevel=3,
    )
    return Gpu(name, family, sm, num_sms, bandwidth, peak, memory_bytes, integrated)


_played: Gpu | None = None


@contextmanager
def played(gpu: Gpu) -> Iterator[None]:
    """Inside, ``detect()`` gives ``gpu``, whatever is there: the whole process decides as it would on that card."""
    global _played
    before, _played = _played, gpu
    try:
        yield
    finally:
        _played = before


def is_played() -> bool:
    """Whether the process passes for another card than it has."""
    return _played is not None


def detect(index: int = 0) -> Gpu:
    """The GPU with this index, or ``cpu()`` where there is none; inside ``played``, the card that it passes for."""
    return present(index) if _played is None else _played


def present(index: int = 0) -> Gpu:
    """The GPU that is really there, or ``cpu()``."""
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
    if gpu is _played:
        free = max(min(free, gpu.memory_bytes - torch.cuda.memory_reserved(index)), 0)  # as if it were alone there
    return min(free, system_memory()[1]) if gpu.unified else free

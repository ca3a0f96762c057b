"""The place for GPU knowledge: what cards there are and what they can do."""

from microscale.hardware.families import (
    CPU_FAMILY,
    FAMILY_OF_SM,
    GENERIC,
    GIB,
    KNOWN,
    LAUNCH_US,
    Family,
    Feature,
    Gpu,
    Peak,
)
from microscale.hardware.gpu import (
    UnknownGpu,
    available_memory,
    card_name,
    cpu,
    describe,
    detect,
    known,
    played,
    present,
    system_memory,
)

__all__ = [
    "CPU_FAMILY",
    "FAMILY_OF_SM",
    "GENERIC",
    "GIB",
    "KNOWN",
    "LAUNCH_US",
    "Family",
    "Feature",
    "Gpu",
    "Peak",
    "UnknownGpu",
    "available_memory",
    "card_name",
    "cpu",
    "describe",
    "detect",
    "known",
    "played",
    "present",
    "system_memory",
]

"""The energy counter of a GPU (NVML's, in millijoules; Volta and later), for ``bench --energy``.

The counter moves about ten times a second, so a measurement should take seconds.
"""

from __future__ import annotations

import ctypes

from microscale.errors import Unsupported

LIBNVML = "libnvidia-ml.so.1"
HINT = "leave out --energy."


class EnergyMeter:
    """The counter of one GPU."""

    def __init__(self, uuid: str, library: str = LIBNVML) -> None:
        """``uuid`` has the form ``GPU-…``, as in NVIDIA's tools, which do not agree on the numbers of GPUs."""
        try:
            self._nvml = ctypes.CDLL(library)
        except OSError:
            raise Unsupported(
                f"{library}, which reads the energy, is missing; it comes with the driver. Install that, or {HINT}"
            ) from None
        self._gpu = ctypes.c_void_p()
        self._call("nvmlInit_v2")
        self._call("nvmlDeviceGetHandleByUUID", uuid.encode(), ctypes.byref(self._gpu))
        self.joules()  # some GPUs have no counter: fail before anything is measured

    def joules(self) -> float:
        """Joules since the driver was loaded."""
        spent = ctypes.c_ulonglong()
        self._call("nvmlDeviceGetTotalEnergyConsumption", self._gpu, ctypes.byref(spent))
        return spent.value / 1e3

    def _call(self, name: str, *arguments: object) -> None:
        failed = getattr(self._nvml, name)(*arguments)
        if failed:
            self._nvml.nvmlErrorString.restype = ctypes.c_char_p
            reason = self._nvml.nvmlErrorString(failed).decode()
            raise Unsupported(f"This GPU's energy cannot be read ({name}: {reason}); {HINT}")

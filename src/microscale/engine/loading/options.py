"""What the user asked of a model that is to be loaded, and the machine that it is to run on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from microscale import hardware
from microscale.backends.ops import Activations, Preference
from microscale.backends.precision import EXACT, Precision
from microscale.engine.loading.memory import Workload
from microscale.engine.speculation.config import SpeculativeConfig
from microscale.engine.step.threads import check_threads
from microscale.errors import BadSetting
from microscale.hardware import Gpu
from microscale.models.families import LoadFormat
from microscale.parallel.handshake import Nodes
from microscale.parallel.sharding import WHOLE, Shard

DTYPES = {"float32": Activations.FLOAT32, "bfloat16": Activations.BF16}


@dataclass(frozen=True)
class LoadOptions:
    """What decides how a model is loaded. Names follow the command line's flags."""

    model: str
    load_format: LoadFormat | str = LoadFormat.AUTO
    device: str = "auto"
    """``auto`` (the first GPU, else the CPU), ``cpu``, ``cuda`` or ``cuda:1``."""
    dtype: str = "auto"
    """Type of the activations: ``auto`` is bfloat16 on a GPU and float32 on a CPU."""
    preference: Preference = field(default_factory=Preference)
    precision: Precision = EXACT
    workload: Workload = field(default_factory=Workload)
    """What must fit beside the weights."""
    overrides: Mapping[str, object] = field(default_factory=dict)
    offline: bool = False
    seed: int = 0
    speculative: SpeculativeConfig | None = None
    """How tokens are drafted; ``None``: not at all."""
    threads: int | None = None
    """CPU threads of every step; ``None``: by its size."""
    tensor_parallel_size: int = 1
    """Ranks that share the model."""
    shard: Shard = WHOLE
    """Which of them this process is; those that are not the first are told."""
    sharing: int = 1
    """Ranks that share this one's device."""
    nodes: Nodes | None = None
    """``None``: all ranks are on this machine."""

    def check(self) -> None:
        """Refuse what is wrong whatever the model is, before that is looked for."""
        self.workload.check_page_size()
        check_threads(self.threads)
        self.preference.check()
        Shard(0, self.tensor_parallel_size)
        if self.nodes is not None and self.tensor_parallel_size % self.nodes.count:
            raise BadSetting(
                f"--tensor-parallel-size {self.tensor_parallel_size} ranks cannot be spread evenly over --nnodes "
                f"{self.nodes.count}."
            )

    def uses_nccl(self, device: torch.device) -> bool:
        """Whether ranks add up by NCCL, which needs a GPU for each of them, and not by gloo."""
        return device.type == "cuda" and self.sharing == 1


def choose_device(name: str) -> torch.device:
    """The device that ``--device`` means, checked to be there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise BadSetting(f"Unknown device {name!r}; use auto, cpu, cuda or cuda:N.") from None
    if device.type not in ("cpu", "cuda"):
        raise BadSetting(f"Device {name!r} is not supported; use auto, cpu, cuda or cuda:N.")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.type == "cuda" and (device.index or 0) >= count:
        raise BadSetting(f"Device {name!r} is not there: torch sees {count} CUDA GPUs; `microscale doctor` says why.")
    return device


def gpu_of(device: torch.device) -> Gpu:
    """What is known of the card behind a device."""
    return hardware.cpu() if device.type == "cpu" else hardware.detect(device.index or 0)


def choose_activations(dtype: str, device: torch.device) -> Activations:
    """The activations' type that ``--dtype`` means on this device."""
    if dtype == "auto":
        return Activations.BF16 if device.type == "cuda" else Activations.FLOAT32
    if dtype not in DTYPES:
        raise BadSetting(f"Unknown dtype {dtype!r}; use auto, {' or '.join(DTYPES)}.")
    return DTYPES[dtype]

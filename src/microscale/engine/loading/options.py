"""``EngineConfig`` resolved: the device and card that it names, and the records that planning and memory go by."""

from __future__ import annotations

import torch

from microscale import hardware
from microscale.engine.config import EngineConfig
from microscale.engine.loading.memory import Workload
from microscale.errors import BadSetting
from microscale.hardware import Gpu
from microscale.parallel.sharding import Shard
from microscale.planning.ops import Activations, Preference
from microscale.planning.precision import Precision, make_precision
from microscale.planning.threads import check_threads

DTYPES = {"float32": Activations.FLOAT32, "bfloat16": Activations.BF16}


def check_options(options: EngineConfig) -> None:
    """Refuse what is wrong for every model, before the model is looked for."""
    workload_of(options).check_page_size()
    check_threads(options.threads)
    preference_of(options).check()
    Shard(0, options.tensor_parallel_size)
    if options.nodes is not None and options.tensor_parallel_size % options.nodes.count:
        raise BadSetting(
            f"--tensor-parallel-size {options.tensor_parallel_size} ranks cannot be spread evenly over --nnodes "
            f"{options.nodes.count}."
        )


def workload_of(options: EngineConfig) -> Workload:
    """What must fit in memory with the weights, but for what drafts and ranks add."""
    return Workload(
        context=options.max_model_len,
        sequences=options.max_num_seqs,
        step_tokens=options.max_num_batched_tokens,
        page_size=options.block_size,
        utilization=options.gpu_memory_utilization,
        reserve=options.reserve_memory,
    )


def preference_of(options: EngineConfig) -> Preference:
    return Preference(options.backend, options.moe_backend)


def precision_of(options: EngineConfig) -> Precision:
    return make_precision(options.precision, options.layer_format, options.moe_activations, options.kv_cache_dtype)


def uses_nccl(options: EngineConfig, device: torch.device) -> bool:
    """Whether ranks add up by NCCL, which needs a GPU for each of them, and not by gloo."""
    return device.type == "cuda" and options.sharing == 1


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

"""Records a matrix as nvidia-modelopt and compressed-tensors store it, with the numbers that they read back.

Neither is a dependency, so what they wrote is in ``containers.safetensors``. In an environment with both:

    pip install torch nvidia-modelopt==0.47.0 compressed-tensors==0.20.0 omegaconf psutil scipy
    python tests/models/recorded/record_containers.py
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

ROWS, COLUMNS = 16, 64


def modelopt(w: Tensor) -> dict[str, dict[str, Tensor]]:
    qtensor: Any = import_module("modelopt.torch.quantization.qtensor")
    coded, scales, whole = qtensor.NVFP4QTensor.quantize(w, 16)
    options = {"dtype": torch.float32, "scale": scales, "double_scale": whole, "block_sizes": {-1: 16}}
    nvfp4 = {".weight": coded._quantized_data, ".weight_scale": scales, ".weight_scale_2": whole}
    coded_8, exponents = qtensor.MXFP8QTensor.quantize(w)
    mxfp8 = {".weight": coded_8._quantized_data, ".weight_scale": exponents}
    read_8 = coded_8.dequantize(dtype=torch.float32, scale=exponents)
    return {
        "modelopt nvfp4": {**nvfp4, "numbers": coded.dequantize(**options)},
        "modelopt mxfp8": {**mxfp8, "numbers": read_8},
    }


def compressed(w: Tensor) -> dict[str, dict[str, Tensor]]:
    quantization: Any = import_module("compressed_tensors.quantization")
    utils: Any = import_module("compressed_tensors.quantization.utils")
    compressors: Any = import_module("compressed_tensors.compressors")
    schemes = {
        "nvfp4": ("nvfp4-pack-quantized", {"num_bits": 4, "group_size": 16, "strategy": "tensor_group"}),
        "mxfp4": (
            "mxfp4-pack-quantized",
            {"num_bits": 4, "group_size": 32, "strategy": "group", "scale_dtype": torch.uint8},
        ),
        "fp8 rows": ("float-quantized", {"num_bits": 8, "strategy": "channel"}),
        "fp8": ("float-quantized", {"num_bits": 8, "strategy": "tensor"}),
    }
    found = {}
    for name, (written, options) in schemes.items():
        args = quantization.QuantizationArgs(type="float", symmetric=True, **options)
        scheme = quantization.QuantizationScheme(targets=["Linear"], weights=args, format=written)
        low, high = w.min(), w.max()
        state: dict[str, Tensor] = {"weight": w}
        size = options.get("group_size")
        if size is not None:
            low, high = (end(w.unflatten(1, (-1, size)), -1) for end in (torch.amin, torch.amax))
        elif options["strategy"] == "channel":
            low, high = (end(w, 1, keepdim=True) for end in (torch.amin, torch.amax))
        more = {}
        if name == "nvfp4":
            state["weight_global_scale"] = utils.generate_gparam(w.min().reshape(1), w.max().reshape(1))
            more = {"global_scale": state["weight_global_scale"]}
        state["weight_scale"], _ = utils.calculate_qparams(low, high, args, **more)
        compressor = compressors.BaseCompressor.get_value_from_registry(written)
        stored = compressor.compress(state, scheme)
        numbers = compressor.decompress(stored, scheme)["weight"].float()
        kept = {f".{key}": tensor.detach() for key, tensor in stored.items()}
        found[f"compressed-tensors {name}"] = {**kept, "numbers": numbers}
    return found


def main() -> None:
    w = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0)) * 0.02
    everything = {"w": w}
    for name, tensors in (modelopt(w) | compressed(w)).items():
        everything |= {f"{name}/{suffix}": tensor.contiguous() for suffix, tensor in tensors.items()}
    for name, tensor in everything.items():
        print(name, tensor.dtype, tuple(tensor.shape))
    save_file(everything, Path(__file__).parent / "containers.safetensors")


if __name__ == "__main__":
    main()

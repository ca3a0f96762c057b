"""Quantised checkpoints of tiny models in every container, and the numbers in them, by the formats' definitions alone.

Nothing of the package's own formats is used here: what is written and what it stands for come from the same few lines.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
E4M3 = torch.float8_e4m3fn

Stored = dict[str, Tensor]
"""Suffix of a module's tensor → the tensor."""
Scheme = Callable[[Tensor], tuple[Stored, Tensor]]
"""A matrix → how it is stored, and the numbers that this stands for."""


def _nibbles(x: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest E2M1 numbers as bytes, the even element in the low nibble, and as numbers."""
    places = (x.abs()[..., None] - E2M1).abs().argmin(-1)
    codes = (places + 8 * (x < 0)).to(torch.uint8)
    return codes[:, 0::2] + 16 * codes[:, 1::2], E2M1[places] * x.sign()


def _nvfp4(w: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    whole = w.abs().max() / 2688
    blocks = w.unflatten(1, (-1, 16))
    scales = (blocks.abs().amax(-1) / 6 / whole).clamp(min=2**-9).to(E4M3)
    codes, numbers = _nibbles((blocks / (scales.float() * whole)[..., None]).flatten(1))
    return codes, scales, whole, (numbers.unflatten(1, (-1, 16)) * scales.float()[..., None]).flatten(1) * whole


def modelopt_nvfp4(w: Tensor) -> tuple[Stored, Tensor]:
    codes, scales, whole, numbers = _nvfp4(w)
    return {".weight": codes, ".weight_scale": scales, ".weight_scale_2": whole}, numbers


def modelopt_w4a4(w: Tensor) -> tuple[Stored, Tensor]:
    stored, numbers = modelopt_nvfp4(w)
    return stored | {".input_scale": torch.tensor(0.01)}, numbers


def compressed_nvfp4(w: Tensor) -> tuple[Stored, Tensor]:
    """The global scale is the number to divide by, and its inverse is not exact."""
    codes, scales, whole, numbers = _nvfp4(w)
    return {".weight_packed": codes, ".weight_scale": scales, ".weight_global_scale": (1 / whole)[None]}, numbers


def mxfp4(codes_suffix: str) -> Scheme:
    def scheme(w: Tensor) -> tuple[Stored, Tensor]:
        blocks = w.unflatten(1, (-1, 32))
        exponents = blocks.abs().amax(-1).log2().floor() - 2
        codes, numbers = _nibbles((blocks / exponents.exp2()[..., None]).flatten(1))
        numbers = (numbers.unflatten(1, (-1, 32)) * exponents.exp2()[..., None]).flatten(1)
        return {codes_suffix: codes, ".weight_scale": (exponents + 127).to(torch.uint8)}, numbers

    return scheme


def mxfp8(w: Tensor) -> tuple[Stored, Tensor]:
    blocks = w.unflatten(1, (-1, 32))
    exponents = blocks.abs().amax(-1).log2().floor() - 7
    codes = (blocks / exponents.exp2()[..., None]).to(E4M3)
    numbers = (codes.float() * exponents.exp2()[..., None]).flatten(1)
    return {".weight": codes.flatten(1), ".weight_scale": (exponents + 127).to(torch.uint8)}, numbers


def fp8(shape: str) -> Scheme:
    """``shape`` of the scale: ``[]``, ``[1]``, ``[N]`` or ``[N, 1]``."""

    def scheme(w: Tensor) -> tuple[Stored, Tensor]:
        scale = w.abs().amax(1, keepdim=True) / 448 if "N" in shape else (w.abs().max() / 448).reshape(1, 1)
        codes = (w / scale).to(E4M3)
        sizes = {"[]": (), "[1]": (1,), "[N]": (-1,), "[N, 1]": (-1, 1)}[shape]
        return {".weight": codes, ".weight_scale": scale.reshape(sizes)}, codes.float() * scale

    return scheme


def fp8_squares(suffix: str, dtype: torch.dtype) -> Scheme:
    """128 x 128 values under one scale; at the ends fewer."""

    def scheme(w: Tensor) -> tuple[Stored, Tensor]:
        rows, columns = w.shape
        scales = torch.empty(-(-rows // 128), -(-columns // 128))
        codes, numbers = torch.empty_like(w, dtype=E4M3), torch.empty_like(w)
        for n in range(scales.shape[0]):
            for k in range(scales.shape[1]):
                square = (slice(128 * n, 128 * n + 128), slice(128 * k, 128 * k + 128))
                scales[n, k] = (w[square].abs().max() / 448).to(dtype)
                codes[square] = (w[square] / scales[n, k]).clamp(-448, 448).to(E4M3)
                numbers[square] = codes[square].float() * scales[n, k]
        return {".weight": codes, suffix: scales.to(dtype)}, numbers

    return scheme


EXPERTS = re.compile(r".*\.experts\.(gate_up|down)_proj")


@dataclass(frozen=True)
class Container:
    """One way to quantise a model."""

    schemes: Mapping[str, Scheme]
    """Expression → scheme of the modules that it matches. The others stay BF16."""
    config: Mapping[str, object] | None = None
    """``quantization_config``."""
    own_file: Mapping[str, object] | None = None
    """hf_quant_config.json."""
    others: tuple[str, ...] = ()
    """Suffixes of scalars that follow each quantised ``k_proj``, such as scales of the KV cache."""

    def scheme_of(self, module: str) -> Scheme | None:
        return next((scheme for pattern, scheme in self.schemes.items() if re.fullmatch(pattern, module)), None)


def matrices(name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
    """The modules of a tensor: itself, or each matrix of each expert."""
    if EXPERTS.fullmatch(name) is None:
        return [(name.removesuffix(".weight"), tensor)]
    stem, _, kind = name.rpartition(".")
    parts = ("down",) if kind == "down_proj" else ("gate", "up")
    halves = [half for matrix in tensor for half in matrix.chunk(len(parts))]
    names = [f"{stem}.{expert}.{part}_proj" for expert in range(len(tensor)) for part in parts]
    return list(zip(names, halves, strict=True))


def quantise(tensors: Mapping[str, Tensor], container: Container) -> tuple[Stored, Stored]:
    """What the files have, and the float32 numbers under the names of ``tensors``."""
    stored: Stored = {}
    numbers: Stored = {}
    for name, tensor in tensors.items():
        modules = matrices(name, tensor)
        schemes = [container.scheme_of(module) for module, _ in modules]
        if tensor.dim() < 2 or not any(schemes):
            stored[name], numbers[name] = tensor, tensor.float()
            continue
        made = []
        for (module, matrix), scheme in zip(modules, schemes, strict=True):
            assert scheme is not None
            parts, exact = scheme(matrix.float())
            stored |= {module + suffix: part for suffix, part in parts.items()}
            made.append(exact)
            if module.endswith(("k_proj", "v_proj")):
                stored |= {module + suffix: torch.tensor(0.5) for suffix in container.others if suffix[1] == module[-6]}
        numbers[name] = (
            torch.stack(
                [
                    torch.cat(made[i : i + len(made) // len(tensor)])
                    for i in range(0, len(made), len(made) // len(tensor))
                ]
            )
            if tensor.dim() == 3
            else made[0]
        )
    return stored, numbers


def write(folder: Path, config: Mapping[str, object], stored: Mapping[str, Tensor], container: Container) -> Path:
    """A checkpoint in ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    extra = {} if container.config is None else {"quantization_config": container.config}
    (folder / "config.json").write_text(json.dumps({**config, **extra}))
    if container.own_file is not None:
        (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": container.own_file}))
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, folder / "model.safetensors")
    return folder


# ---- the containers, with configs as published -----------------------------------------------------------------------

ATTENTION = r".*self_attn\.[qkvo]_proj"
EACH_EXPERT = r".*experts\.\d+\..*"
LINEAR = rf"{ATTENTION}|{EACH_EXPERT}|.*\.mlp\.(gate|up|down)_proj"


def group(targets: list[str], fmt: str | None, **weights: object) -> dict[str, object]:
    """One of compressed-tensors' groups."""
    scheme = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, "group_size": None, **weights}
    return {"targets": targets, "format": fmt, "weights": scheme, "input_activations": None}


def compressed(fmt: str, ignore: list[str], **groups: object) -> dict[str, object]:
    return {
        "quant_method": "compressed-tensors", "format": fmt, "quantization_status": "compressed", "ignore": ignore,
        "kv_cache_scheme": None, "config_groups": groups,
    }  # fmt: skip


IGNORED = ["lm_head", "re:.*mlp.gate$", "re:.*router.proj$", "re:.*embed.*"]
NVFP4_GROUP = {"num_bits": 4, "group_size": 16, "strategy": "tensor_group", "scale_dtype": "torch.float8_e4m3fn"}
KV_FP8 = {"dynamic": False, "num_bits": 8, "type": "float"}
QUARK_WEIGHT = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0", "is_dynamic": False}

CONTAINERS: dict[str, Container] = {
    # As nvidia/Qwen3-235B-A22B-NVFP4: everything W4A4, with calibrated scales of the KV cache.
    "modelopt-nvfp4": Container(
        {LINEAR: modelopt_w4a4},
        {
            "quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_scheme": KV_FP8,
            "ignore": ["lm_head", "model.layers.*.mlp.gate", "model.layers.*.router*"],
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 16}}},
        },
        {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16, "exclude_modules": ["lm_head"]},
        (".k_scale", ".v_scale"),
    ),
    # As nvidia/Gemma-4-26B-A4B-NVFP4: only the experts.
    "modelopt-nvfp4-experts": Container(
        {EACH_EXPERT: modelopt_w4a4},
        None,
        {
            "quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16,
            "exclude_modules": [
                "lm_head", "model.embed_vision*", "model.layers.*.mlp.gate*", "model.layers.*.router*",
                "model.layers.*.self_attn*", *(f"model.layers.*.mlp.{part}_proj" for part in ("gate", "up", "down")),
            ],
        },
    ),
    # As nvidia/Qwen3.6-35B-A3B-NVFP4: experts W4A16, attention FP8 with a scale for each matrix, lm_head NVFP4.
    "modelopt-mixed": Container(
        {EACH_EXPERT: modelopt_nvfp4, "lm_head": modelopt_nvfp4, ATTENTION: fp8("[]")},
        {
            "quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "ignore": ["mtp.layers.0*", "mtp*"],
            "quantized_layers": {
                "lm_head": {"quant_algo": "W4A16_NVFP4", "group_size": 16},
                **{
                    f"model.layers.{layer}.mlp.experts": {"quant_algo": "W4A16_NVFP4", "group_size": 16}
                    for layer in range(8)
                },
                **{
                    f"model.layers.{layer}.self_attn.{part}_proj": {"quant_algo": "FP8"}
                    for layer in range(8)
                    for part in "qkvo"
                },
            },
        },
    ),
    "modelopt-fp8": Container(
        {LINEAR: fp8("[]")},
        {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head", "mlp.gate", "router"]},
    ),
    "modelopt-fp8-rows": Container(
        {LINEAR: fp8("[N]")},
        {
            "quant_method": "modelopt", "quant_algo": "fp8_per_channel_per_token",
            "ignore": ["lm_head", "mlp.gate", "router"],
        },
    ),
    "modelopt-mxfp8": Container(
        {LINEAR: mxfp8},
        {"quant_method": "modelopt", "quant_algo": "MXFP8", "ignore": ["lm_head", "mlp.gate", "router"]},
    ),
    # As llm-compressor's recipes of RedHatAI.
    "compressed-nvfp4": Container(
        {LINEAR: compressed_nvfp4},
        compressed("nvfp4-pack-quantized", IGNORED, group_0=group(["Linear"], None, **NVFP4_GROUP)),
    ),
    "compressed-mxfp4": Container(
        {LINEAR: mxfp4(".weight_packed")},
        compressed(
            "mxfp4-pack-quantized", IGNORED,
            group_0=group(["Linear"], None, num_bits=4, group_size=32, strategy="group", scale_dtype="torch.uint8"),
        ),
    ),
    "compressed-fp8": Container(
        {LINEAR: fp8("[1]")},
        compressed("float-quantized", IGNORED, group_0=group(["Linear"], None, strategy="tensor")),
    ),
    "compressed-fp8-rows": Container(
        {LINEAR: fp8("[N, 1]")},
        compressed("float-quantized", IGNORED, group_0=group(["Linear"], None, strategy="channel")),
    ),
    "compressed-fp8-blocks": Container(
        {LINEAR: fp8_squares(".weight_scale", torch.float32)},
        compressed(
            "float-quantized", IGNORED,
            group_0=group(["Linear"], None, strategy="block", block_structure=[128, 128]),
        ),
    ),
    "compressed-mixed": Container(
        {EACH_EXPERT: compressed_nvfp4, ATTENTION: fp8("[N, 1]")},
        compressed(
            "mixed-precision", IGNORED,
            group_0=group([r"re:.*experts\.\d+\..*"], "nvfp4-pack-quantized", **NVFP4_GROUP),
            group_1=group(["re:.*self_attn.*"], "float-quantized", strategy="channel"),
        ),
    ),
    "quark-mxfp4": Container(
        {EACH_EXPERT: mxfp4(".weight")},
        {
            "quant_method": "quark", "exclude": ["lm_head", "re:.*self_attn.*", "*.mlp.gate"],
            "global_quant_config": {"weight": QUARK_WEIGHT, "input_tensors": None}, "layer_quant_config": {},
            "export": {"weight_format": "real_quantized", "pack_method": "reorder"},
        },
    ),
    # As Qwen/Qwen3-30B-A3B-FP8, whose scales are BF16.
    "fp8-blocks": Container(
        {LINEAR: fp8_squares(".weight_scale_inv", torch.bfloat16)},
        {
            "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
            "modules_to_not_convert": ["lm_head", *(f"model.layers.{n}.mlp.gate" for n in range(8)), "router"],
        },
    ),
    "fp8": Container(
        {LINEAR: fp8("[1]")},
        {"quant_method": "fp8", "activation_scheme": "static", "modules_to_not_convert": ["mlp.gate", "router"]},
    ),
}  # fmt: skip

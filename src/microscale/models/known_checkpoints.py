"""The checkpoints that run, by the names that people type, and one sentence about those that do not.

``config.json`` and the names of the files are enough to tell, so nothing large is read or downloaded for it.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from microscale.errors import BadCheckpoint, MicroscaleError, Unsupported

PUBLISHED = {
    "gpt-oss-20b": "openai/gpt-oss-20b",
    "gpt-oss-120b": "openai/gpt-oss-120b",
    "gemma-4-26b-a4b": "google/gemma-4-26B-A4B-it",
    "qwen3-30b-a3b": "Qwen/Qwen3-30B-A3B",
    "qwen3-30b-a3b-nvfp4": "nvidia/Qwen3-30B-A3B-NVFP4",
    "qwen3-30b-a3b-fp8": "Qwen/Qwen3-30B-A3B-FP8",
    "gemma-4-26b-a4b-nvfp4": "nvidia/Gemma-4-26B-A4B-NVFP4",
    "gemma-4-26b-a4b-it-nvfp4": "RedHatAI/gemma-4-26B-A4B-it-NVFP4",
    "gpt-oss-20b-bf16": "unsloth/gpt-oss-20b-BF16",
    "qwen3.6-35b-a3b": "Qwen/Qwen3.6-35B-A3B",
    "qwen3.6-35b-a3b-nvfp4": "nvidia/Qwen3.6-35B-A3B-NVFP4",
    "qwen3.6-35b-a3b-fp8": "Qwen/Qwen3.6-35B-A3B-FP8",
}
"""Preset → the hub id of its checkpoint."""
_PUBLISHED_IN_BF16 = {"gemma-4-26b-a4b", "qwen3-30b-a3b", "qwen3.6-35b-a3b"}
"""Presets in MXFP8, which only quantisation gives."""
GGUF = ".gguf"
RUNS = "Microscale runs gpt-oss, Gemma 4 26B-A4B, Qwen3-MoE and Qwen3.6-35B-A3B"
_ALIKE = {
    "gpt-oss-20b": re.compile(r"gpt-?oss.*(?<!1)20b"),
    "gpt-oss-120b": re.compile(r"gpt-?oss.*120b"),
    "gemma-4-26b-a4b": re.compile(r"gemma-?4.*26b"),
    "qwen3-30b-a3b": re.compile(r"qwen3-?30b"),
    "qwen3.6-35b-a3b": re.compile(r"qwen3\.[56]-?35b"),
}
_PRESET_OF = {hub_id.lower(): preset for preset, hub_id in PUBLISHED.items()}
READ_FORMATS = "BF16, FP8, MXFP8, MXFP4 and NVFP4"
_METHODS = {
    "awq": "AWQ",
    "gptq": "GPTQ",
    "bitsandbytes": "bitsandbytes",
    "fp8": "FP8",
    "fbgemm_fp8": "FP8",
    "quark": "Quark",
    "compressed-tensors": "compressed-tensors",
}


def preset_of(name: str) -> str | None:
    """The preset that somebody means by ``gpt-oss-20b``, ``gpt-oss:20b`` or ``openai/gpt-oss-20b``, if it is one."""
    lower = name.strip().lower().replace(":", "-")
    return lower if lower in PUBLISHED else _PRESET_OF.get(lower)


def hub_id(name: str) -> str:
    """What to fetch for ``name``: a preset's published checkpoint, or the name itself."""
    return PUBLISHED[preset] if "/" not in name and (preset := preset_of(name)) else name


def unlike_published(name: str) -> str | None:
    """What is different about the checkpoint of a preset, if anything is."""
    preset = preset_of(name)
    if preset not in _PUBLISHED_IN_BF16:
        return None
    return f"these figures are for MXFP8; {PUBLISHED[preset]} is in BF16 and runs with --layer-format experts=mxfp8"


def similar(name: str) -> str:
    """The question whether a name that is spelt a little like it was meant."""
    near = difflib.get_close_matches(name.strip().lower().replace(":", "-"), PUBLISHED, n=2, cutoff=0.5)
    return f" Did you mean {' or '.join(near)}?" if near else ""


def refuse_files(model: str, names: Sequence[str]) -> None:
    """Raise what a folder or repository without config.json is. ``names``: of its files."""
    raise _without_config(model, names)


def _without_config(model: str, names: Sequence[str]) -> MicroscaleError:
    seen = " ".join((model, *names))
    if any(name.lower().endswith(GGUF) for name in names):
        return Unsupported(f"{model} is in GGUF, llama.cpp's format; Microscale reads safetensors. {_instead(seen)}")
    if not names:
        return BadCheckpoint(f"{model} is empty; a model is a folder with config.json and *.safetensors in it.")
    return BadCheckpoint(f"{model} has no config.json, so it is not a model. {_instead(seen)}")


def refuse_architecture(source: str, config: Mapping[str, Any]) -> None:
    """Raise that no family runs this ``model_type``."""
    names = config.get("architectures")
    what = f" ({names[0]})" if isinstance(names, list) and names else ""
    kind = f"'model_type' {config.get('model_type')!r}{what}"
    raise Unsupported(f"{source}: {kind} is not supported. {RUNS}, for example {_example()}.")


def refuse_format(
    source: str, config: Mapping[str, Any], method: str, detail: str = "", reads: str = READ_FORMATS
) -> NoReturn:
    """Raise that weights which are quantised in this way are not read. ``config``: the whole config.json."""
    name = _METHODS.get(method, method)
    detail = "NVFP4" if detail == "nvfp4-pack-quantized" else detail
    if detail and (method == "modelopt" or detail == "NVFP4"):
        name, detail = detail, name
    shown = f"{name} ({detail})" if detail else name
    raise Unsupported(
        f"{source}: the weights are in {shown}, which Microscale does not read; it reads {reads}. "
        f"{_instead(source + ' ' + str(config.get('_name_or_path', '')))}"
    )


def _instead(text: str) -> str:
    """The nearest checkpoint that runs, by what a name or a path contains."""
    lower = text.lower()
    for preset, pattern in _ALIKE.items():
        if pattern.search(lower):
            return f"{PUBLISHED[preset]} runs."
    return f"{RUNS}, for example {_example()}."


def _example() -> str:
    return PUBLISHED["gpt-oss-20b"]

"""Tiny checkpoints of every family in their published layouts, each with transformers' model of the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from microscale.engine.config import EngineConfig
from microscale.models.config import ModelConfig
from microscale.models.gemma4.config import LayerFormats
from support import tiny_checkpoints, tiny_gemma4, tiny_qwen3_5, tiny_qwen3_moe
from support.truth import load_transformers


@dataclass(frozen=True)
class FamilyCase:
    """One checkpoint."""

    family: str
    config: ModelConfig
    """As it is read from the checkpoint."""
    write: Callable[[Path], Path]
    truth: Callable[[Path], Any]
    """transformers' model in float32, from the folder that was written."""
    layer_formats: tuple[str, ...] = ()
    """For experts that are quantised as they load."""

    def options(self, folder: Path, **changes: Any) -> EngineConfig:
        return EngineConfig(
            str(folder), device="cpu", layer_format=self.layer_formats, **{"dtype": "float32", **changes}
        )


def gpt_oss(name: str, seed: int) -> FamilyCase:
    config = tiny_checkpoints.CASES[name]
    return FamilyCase(
        "gpt_oss", config, lambda folder: tiny_checkpoints.write_hf(folder, config, seed=seed), load_transformers
    )


def gemma4(name: str, seed: int) -> FamilyCase:
    """MXFP8 as modelopt writes it."""
    config = tiny_gemma4.CASES[name]
    tensors = tiny_gemma4.random_gemma4(config, seed=seed)
    formats = (LayerFormats.all("mxfp8"),) * config.num_layers

    def write(folder: Path) -> Path:
        modelopt = tiny_gemma4.to_modelopt(tensors)
        return tiny_gemma4.write_gemma4(folder, config, modelopt, ignore=tiny_gemma4.routers(config))

    def truth(folder: Path) -> Any:
        return tiny_gemma4.transformers_gemma4(config, tiny_gemma4.rounded(tensors, "mxfp8", tiny_gemma4.MATRICES))

    return FamilyCase("gemma4", replace(config, formats=formats), write, truth)


def qwen3_moe(name: str, seed: int, fmt: str = "mxfp8") -> FamilyCase:
    """BF16, with experts that are quantised as they load: transformers has them after a turn through the format."""
    config = tiny_qwen3_moe.CASES[name]
    tensors = tiny_qwen3_moe.random_qwen3_moe(config, seed=seed)

    def write(folder: Path) -> Path:
        return tiny_qwen3_moe.write_qwen3_moe(folder, config, tiny_qwen3_moe.published(tensors))

    def truth(folder: Path) -> Any:
        return tiny_qwen3_moe.transformers_qwen3_moe(config, tiny_qwen3_moe.rounded(tensors, fmt))

    return FamilyCase("qwen3_moe", config, write, truth, (f"experts={fmt}",))


def qwen3_5(name: str, seed: int, fmt: str = "mxfp8") -> FamilyCase:
    """BF16, with experts that are quantised as they load, as above."""
    config = tiny_qwen3_5.CASES[name]
    tensors = tiny_qwen3_5.random_qwen3_5(config, seed=seed)

    def write(folder: Path) -> Path:
        return tiny_qwen3_5.write_qwen3_5(folder, config, tensors)

    def truth(folder: Path) -> Any:
        return tiny_qwen3_5.transformers_qwen3_5(config, tiny_qwen3_5.rounded(tensors, fmt))

    return FamilyCase("qwen3_5", config, write, truth, (f"experts={fmt}",))


CASES: dict[str, FamilyCase] = {
    **{f"gpt_oss-{name}": gpt_oss(name, seed) for seed, name in enumerate(tiny_checkpoints.CASES)},
    **{f"gemma4-{name}": gemma4(name, seed) for seed, name in enumerate(tiny_gemma4.CASES)},
    **{f"qwen3_moe-{name}": qwen3_moe(name, seed) for seed, name in enumerate(tiny_qwen3_moe.CASES)},
    "qwen3_moe-mxfp4": qwen3_moe("as_published", 0, "mxfp4"),
    "qwen3_5-as_published": qwen3_5("as_published", 0),
    "qwen3_5-one_group": qwen3_5("one_group", 1),
}
ONE_OF_EACH = ("gpt_oss-heads_8_1", "gemma4-shared_kv", "qwen3_moe-as_published", "qwen3_5-as_published")


def logits_of(model: Any, sequences: list[list[int]]) -> list[Tensor]:
    """transformers' logits at every position of each sequence, one sequence at a time and without a KV cache."""
    with torch.inference_mode():
        return [model(torch.tensor([tokens]), use_cache=False).logits[0] for tokens in sequences]


def random_prompts(config: ModelConfig, lengths: tuple[int, ...], seed: int = 5) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, config.vocab_size, (n,), generator=generator).tolist() for n in lengths]

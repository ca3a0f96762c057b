"""Random weights of the right shapes, for speed and memory tests without a checkpoint.

A tensor depends on the seed, its name and the kind of device, not on the order of calls; on ``meta`` it has a shape and
no numbers, which is all that recording a model's kernels needs. Experts are made as MXFP4
bytes on the device: no BF16 copy of them ever exists, so that those of two layers of gpt-oss-120b need 3.4 GB and not
12.7.
"""

from __future__ import annotations

import hashlib
import math
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from microscale.formats import BLOCK, MXFP4, MXFP8, BlockScaled
from microscale.models.config import GptOssConfig
from microscale.models.gpt_oss_tensors import LayerTensors

# Uniform E2M1 codes have an RMS of 2.9; under 2**-9 .. 2**-5 the weights have one of 0.047. At gpt-oss's width a layer
# then adds about 8 to the residual stream, whose RMS is 47 and largest value 193 after 36 layers: far from BF16's end.
MXFP4_SCALES = range(118, 123)
# Those E4M3 codes have an RMS of 0.85; under 2**-7 .. 2**-4 the weights have one of 0.03.
MXFP8_SCALES = range(120, 124)


class RandomTensors:
    """Tensors of random numbers by name."""

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed

    def normal(
        self, name: str, shape: tuple[int, ...], device: torch.device | str, std: float = 0.02, mean: float = 0.0
    ) -> Tensor:
        tensor = torch.empty(shape, dtype=torch.bfloat16, device=device)
        return tensor.normal_(mean, std, generator=self._generator(name, device))

    def mxfp4(self, name: str, shape: tuple[int, ...], device: torch.device | str) -> BlockScaled:
        generator = self._generator(name, device)
        codes = _random_bytes((*shape[:-1], shape[-1] // 2), device, generator)
        return BlockScaled(codes, _random_scales(shape, MXFP4_SCALES, device, generator), MXFP4)

    def mxfp8(self, name: str, shape: tuple[int, ...], device: torch.device | str) -> BlockScaled:
        generator = self._generator(name, device)
        # Signs and magnitudes from 2**-3 to 1.875: far from NaN, in four binades.
        codes = _random_bytes(shape, device, generator).bitwise_and_(0x9F).bitwise_or_(0x20)
        return BlockScaled(codes, _random_scales(shape, MXFP8_SCALES, device, generator), MXFP8)

    def _generator(self, name: str, device: torch.device | str) -> torch.Generator | None:
        if torch.device(device).type == "meta":
            return None  # shapes and types alone: there are no numbers to draw
        digest = hashlib.blake2b(f"{self._seed}/{name}".encode(), digest_size=8).digest()
        return torch.Generator(device=device).manual_seed(int.from_bytes(digest, "little") >> 1)


def _random_bytes(shape: tuple[int, ...], device: torch.device | str, generator: torch.Generator | None) -> Tensor:
    # 64 bits a draw: eight bytes. K is a multiple of 32, so the bytes are one of 8.
    draws = torch.empty(math.prod(shape) // 8, dtype=torch.int64, device=device)
    return draws.random_(-(1 << 63), None, generator=generator).view(torch.uint8).view(shape)


def _random_scales(
    shape: tuple[int, ...], values: range, device: torch.device | str, generator: torch.Generator | None
) -> Tensor:
    scales = (*shape[:-1], shape[-1] // BLOCK)
    return torch.randint(values.start, values.stop, scales, dtype=torch.uint8, device=device, generator=generator)


class _Sizes(Protocol):
    @property
    def vocab_size(self) -> int: ...

    @property
    def hidden(self) -> int: ...


ConfigT = TypeVar("ConfigT", bound=_Sizes)


class DummyEnds(Generic[ConfigT]):
    """What stands before and after the layers of any model, in random numbers."""

    def __init__(self, config: ConfigT, seed: int = 0) -> None:
        self._config = config
        self._random = RandomTensors(seed)

    @property
    def config(self) -> ConfigT:
        return self._config

    def embed(self, device: torch.device | str) -> Tensor:
        return self._random.normal("embed", (self.config.vocab_size, self.config.hidden), device)

    def norm(self, device: torch.device | str) -> Tensor:
        return self._random.normal("norm", (self.config.hidden,), device, std=0.05, mean=1.0)

    def lm_head(self, device: torch.device | str) -> Tensor:
        return self._random.normal("lm_head", (self.config.vocab_size, self.config.hidden), device)


class DummyWeights(DummyEnds[GptOssConfig]):
    """A ``GptOssWeights`` made of random numbers: weights near N(0, 0.02), biases and sinks off zero, norms near 1."""

    def layer(self, layer_idx: int, device: torch.device | str) -> LayerTensors:
        c = self.config
        hidden, experts = c.hidden, c.num_experts

        def normal(name: str, *shape: int, std: float = 0.02, mean: float = 0.0) -> Tensor:
            return self._random.normal(f"layers.{layer_idx}.{name}", shape, device, std, mean)

        def mxfp4(name: str, *shape: int) -> BlockScaled:
            return self._random.mxfp4(f"layers.{layer_idx}.{name}", shape, device)

        return LayerTensors(
            attn_norm=normal("attn_norm", hidden, std=0.05, mean=1.0),
            qkv_weight=normal("qkv_weight", c.qkv_rows, hidden),
            qkv_bias=normal("qkv_bias", c.qkv_rows, std=0.1),
            sinks=normal("sinks", c.num_heads, std=1.0),
            o_weight=normal("o_weight", hidden, c.num_heads * c.head_dim),
            o_bias=normal("o_bias", hidden, std=0.1),
            mlp_norm=normal("mlp_norm", hidden, std=0.05, mean=1.0),
            router_weight=normal("router_weight", experts, hidden),
            router_bias=normal("router_bias", experts, std=0.1),
            gate_up=mxfp4("gate_up", experts, 2 * c.intermediate, hidden),
            gate_up_bias=normal("gate_up_bias", experts, 2 * c.intermediate, std=0.1),
            down=mxfp4("down", experts, hidden, c.intermediate),
            down_bias=normal("down_bias", experts, hidden, std=0.1),
        )

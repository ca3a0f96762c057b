"""From where on another path pays: measured for the family, or else the rule's figure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from microscale.hardware.cards import Gpu
from microscale.hardware.tiles.tuned import Kernels, Section, measured

NEVER = 1 << 20
"""More tokens, and more pairs an expert, than any batch has: a path that paid at no size that was measured."""


class ThresholdName(StrEnum):
    WGMMA_PAIRS = "wgmma_pairs"
    """Pairs an expert from which ``wgmma`` beats the small-batch kernels, which serve 8 a program and then read weights
    twice; and, with it:"""
    WGMMA_TOKENS = "wgmma_tokens"
    FP8_PAIRS = "fp8_pairs"
    """Pairs an expert up to which bf16 beats FP8 activations on ``wgmma``."""
    MXFP8_RESIDENT_PAIRS = "mxfp8_resident_pairs"
    """Pairs an expert from which MXFP8 experts leave the portable grouped kernel for the resident one on ``wgmma``."""
    UNPACK_TOKENS = "unpack_tokens"
    """Tokens from which a dense layer's weights are unpacked to bf16 for cuBLAS."""
    FEW_ROWS_TOKENS = "few_rows_tokens"
    """Tokens up to which a dense layer of few rows takes the small-batch kernel, where its programs are at most:"""
    FEW_ROWS_PROGRAMS = "few_rows_programs"
    """Programs on an SM, of 32 tokens and one row tile. Further blocks of tokens read the weights from L2."""
    WIDEN_ROWS = "widen_rows"
    """Query rows of a KV head (new tokens times the query heads that share it) from which the FP8 keys and values of a
    prompt are copied to bf16 first."""
    SUM_IN_NORM_TOKENS = "sum_in_norm_tokens"
    """Tokens up to which the norm behind an expert layer adds up a token's experts, without a launch of its own for
    that."""


@dataclass(frozen=True)
class Key:
    name: ThresholdName


@dataclass(frozen=True)
class Value:
    value: int


def _misfit(key: Key, tile: Value, family: object) -> str | None:
    return None if tile.value > 0 else f"is {tile.value}, and must be positive"


SECTION = Section(Kernels.THRESHOLDS, Key, Value, _misfit)

# The rule: the figures of SM90, on which alone they were measured. Where ``wgmma`` was not measured against the
# small-batch kernels, it does not take their place. ``UNPACK_TOKENS`` is 65 on SM90; with slow memory the copy is dear,
# and 256 stays (docs/lab/dense.md).
# ``WIDEN_ROWS`` is by arithmetic: the copy moves 6 bytes for each number of a head, and a row is 4 operations on it, at
# half the speed where codes are converted on the way. On an H200 (2.7 TB/s, 375 TFLOP/s) that is even at 210 rows.
# ``SUM_IN_NORM_TOKENS`` is by arithmetic (docs/lab/experts.md): a launch is 2 us, and one program reads a token's parts
# (gpt-oss 46 KB, Qwen3 66 KB) from L2 in 0.4 to 0.8 us at 64 to 48 bytes a cycle, where two or three programs share
# that. So about three programs on an SM are even: a whole small batch pays on every card with 22 SMs.
_RULE = {
    ThresholdName.FP8_PAIRS: 20,
    ThresholdName.MXFP8_RESIDENT_PAIRS: 32,
    ThresholdName.UNPACK_TOKENS: 256,
    ThresholdName.FEW_ROWS_TOKENS: 64,
    ThresholdName.FEW_ROWS_PROGRAMS: 5,
    ThresholdName.WIDEN_ROWS: 512,
    ThresholdName.SUM_IN_NORM_TOKENS: 64,
}


def threshold(name: ThresholdName, gpu: Gpu) -> int:
    row = measured(SECTION, gpu.family).get(Key(name))
    return _RULE[name] if row is None else row.tile.value


@dataclass(frozen=True)
class Crowd:
    """From where on a small batch is better off on ``wgmma``: both are needed."""

    tokens: int
    pairs: int
    """For each expert."""


def crowd(gpu: Gpu) -> Crowd | None:
    """``None`` where ``wgmma`` was not measured against the small-batch kernels."""
    found = measured(SECTION, gpu.family)
    pairs, tokens = (found.get(Key(name)) for name in (ThresholdName.WGMMA_PAIRS, ThresholdName.WGMMA_TOKENS))
    return None if pairs is None or tokens is None else Crowd(tokens.tile.value, pairs.tile.value)

"""How the matrix units of each SM sum products: no manual says it, but measurements do.

The model that fits is the same for all: a unit takes the addend and a number of products, aligns all of them to the
largest exponent among them, cuts each off (towards zero) at some fraction bits below that, adds them exactly, and cuts
the result off. Products are not normalised before they are aligned, subnormal numbers count, and more columns of K
than one such sum takes are summed one group after the other.

The unit of FP4 has one more step: it sums each group of 16 products exactly and multiplies the sum by both scales. It
aligns these sums and the addend, and the exponents of the scales alone are the exponent of a sum.

The figures are those of MMA-Sim (Xie, Wang, Yang and Yang, arXiv 2511.10909, and its published code), which was
compared bit for bit with Ampere, Ada, Hopper, Blackwell and RTX Blackwell cards. That FP8 sums on Hopper keep about 14
bits was found before (DeepSeek-V3 Technical Report, arXiv 2412.19437).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from ptxproof.errors import Unsupported

_MMA_SIM = "MMA-Sim"


class MmaUnit(Enum):
    """Which instruction, and how wide its operands are: they may differ on one SM."""

    MMA_16 = "mma.sync of f16 and bf16"
    MMA_8 = "mma.sync of FP8"
    MMA_BLOCK_SCALED = "block-scaled mma.sync of FP8"
    MMA_BLOCK_SCALED_4 = "block-scaled mma.sync of FP4"
    WGMMA_16 = "wgmma of f16 and bf16"
    WGMMA_8 = "wgmma of FP8"


@dataclass(frozen=True)
class Summation:
    """How one unit adds up a row of A times a column of B, and the addend."""

    products: int
    """That are summed at once, with the addend."""
    fraction_bits: int
    """That are kept below the largest exponent."""
    result_bits: int = 23
    """Fraction bits of the float32 that comes out."""
    source: str = _MMA_SIM
    """Where the figures come from. Where none are published, the SM whose figures are used instead."""


_AMPERE_16 = Summation(8, 24)
_HOPPER_16 = Summation(16, 25)
_AS_SM_120 = f"{_MMA_SIM} for SM 12.0; nothing is published for SM 12.1, which has the same instructions"

_UNITS: dict[MmaUnit, dict[int, Summation]] = {
    MmaUnit.MMA_16: {
        80: _AMPERE_16,
        86: Summation(8, 24, source=f"{_MMA_SIM} for SM 8.0 and 8.9, which agree; nothing is published for SM 8.6"),
        89: _AMPERE_16,
        90: _HOPPER_16,
        100: _HOPPER_16,
        103: Summation(16, 25, source=f"{_MMA_SIM} for SM 10.0; nothing is published for SM 10.3"),
        120: Summation(16, 25),
        121: Summation(16, 25, source=_AS_SM_120),
    },
    MmaUnit.MMA_8: {
        89: Summation(16, 13, 13),
        90: Summation(16, 25, source=f"{_MMA_SIM} for f16: nothing is published for FP8, and ptxas widens it to f16"),
        120: Summation(32, 25),
        121: Summation(32, 25, source=_AS_SM_120),
    },
    MmaUnit.MMA_BLOCK_SCALED: {120: Summation(32, 25), 121: Summation(32, 25, source=_AS_SM_120)},
    MmaUnit.MMA_BLOCK_SCALED_4: {120: Summation(64, 35), 121: Summation(64, 35, source=_AS_SM_120)},
    MmaUnit.WGMMA_16: {90: _HOPPER_16},
    MmaUnit.WGMMA_8: {90: Summation(32, 13, 13)},
}


def summation(sm: int, unit: MmaUnit) -> Summation:
    """How this unit sums on ``sm``."""
    found = _UNITS[unit].get(sm)
    if found is None:
        raise Unsupported(f"It is not published how SM {sm // 10}.{sm % 10} sums the products of a {unit.value}.")
    return found

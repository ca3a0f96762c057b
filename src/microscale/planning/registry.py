"""Every implementation of every op, in one table. Adding a kernel means adding it here."""

from __future__ import annotations

from typing import Any, cast

from microscale.errors import Unsupported
from microscale.kernels.attention.op import AttentionOp
from microscale.kernels.attention.paged import PagedAttention
from microscale.kernels.attention.reference import ReferenceAttention
from microscale.kernels.dense.dequantized import DequantizedDense
from microscale.kernels.dense.fragments import (
    TritonFp8,
    TritonFp8Block,
    TritonMxfp4,
    TritonMxfp4A8,
    TritonMxfp8,
    TritonMxfp8A8,
    TritonNvfp4,
    TritonNvfp4A4,
)
from microscale.kernels.dense.reference import ReferenceDense
from microscale.kernels.dense.spec import DenseOp
from microscale.kernels.dense.triton_bf16 import TritonBf16
from microscale.kernels.moe.bf16_activations import TritonFp8BlockA16, TritonNvfp4A16, TritonW4A16, TritonW8A16
from microscale.kernels.moe.dequantized import DequantizedMoe
from microscale.kernels.moe.narrow_activations import TritonW4A4, TritonW4A8, TritonW8A8
from microscale.kernels.moe.reference import ReferenceMoe
from microscale.kernels.moe.spec import MoeOp
from microscale.kernels.op import Implementation
from microscale.kernels.recurrent.gated_delta import TritonRecurrent
from microscale.kernels.recurrent.reference import ReferenceRecurrent
from microscale.kernels.recurrent.spec import RecurrentOp
from microscale.kernels.sampling.blocked import TritonSampling
from microscale.kernels.sampling.reference import ReferenceSampling
from microscale.kernels.sampling.spec import SamplingOp
from microscale.kernels.small.fused import TritonSmall
from microscale.kernels.small.reference import ReferenceSmall
from microscale.kernels.small.spec import SmallOps

IMPLEMENTATIONS: tuple[Implementation[Any], ...] = (
    ReferenceMoe(),
    DequantizedMoe(),
    TritonW4A16(),
    TritonW8A16(),
    TritonNvfp4A16(),
    TritonFp8BlockA16(),
    TritonW4A8(),
    TritonW8A8(),
    TritonW4A4(),
    ReferenceDense(),
    DequantizedDense(),
    TritonBf16(),
    TritonFp8(),
    TritonMxfp8(),
    TritonMxfp4(),
    TritonNvfp4(),
    TritonFp8Block(),
    TritonMxfp8A8(),
    TritonMxfp4A8(),
    TritonNvfp4A4(),
    ReferenceAttention(),
    PagedAttention(),
    ReferenceRecurrent(),
    TritonRecurrent(),
    ReferenceSmall(),
    TritonSmall(),
    ReferenceSampling(),
    TritonSampling(),
)


def of_op(op: str) -> tuple[Implementation[Any], ...]:
    """The implementations of one op, in the table's order."""
    return tuple(entry for entry in IMPLEMENTATIONS if entry.op == op)


def names() -> tuple[str, ...]:
    """Every name that some op has an implementation under."""
    return tuple(dict.fromkeys(entry.name for entry in IMPLEMENTATIONS))


def find(op: str, name: str) -> Implementation[Any]:
    """The implementation of this name, or an error that lists what there is."""
    for entry in of_op(op):
        if entry.name == name:
            return entry
    raise Unsupported(f"{op} has no implementation {name!r}; it has {', '.join(e.name for e in of_op(op))}.")


# The table has each under its op.
def moe(name: str) -> MoeOp[Any]:
    return cast("MoeOp[Any]", find("moe", name))


def dense(name: str) -> DenseOp[Any]:
    return cast("DenseOp[Any]", find("dense", name))


def attention(name: str) -> AttentionOp:
    return cast("AttentionOp", find("attention", name))


def recurrent(name: str) -> RecurrentOp:
    return cast("RecurrentOp", find("recurrent", name))


def small(name: str) -> SmallOps:
    return cast("SmallOps", find("small", name))


def sampling(name: str) -> SamplingOp:
    return cast("SamplingOp", find("sampling", name))

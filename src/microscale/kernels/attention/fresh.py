"""What ``attend_fresh`` takes beyond ``attend_short``: the heads' norms and rotation. ``paged`` launches it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from microscale.kernels.attention import fresh_jit
from microscale.kernels.op import Variant
from microscale.kernels.small.spec import HeadNorms, RopeTable

MAX_HEADS = 14
"""Query heads in a group, at most: key and value stand behind them in a tile of 16 rows."""


def kinds(head_dim: int) -> tuple[tuple[bool, bool], ...]:
    """NORM and SHARED, as there are kernels for. Wide heads without norms spill, and no model has such."""
    normed = ((True, False), (True, True))
    return normed if head_dim > 128 else ((False, False), *normed)


@dataclass(frozen=True)
class Fresh:
    """How the heads of a new token become queries, key and value."""

    rope: RopeTable
    norms: HeadNorms | None
    shared: bool
    """Whether keys stand for values too (K = V)."""

    def arguments(self, like: Tensor) -> tuple[Any, ...]:
        weights = (like, like) if self.norms is None else (self.norms.q_weight, self.norms.k_weight)
        epsilon = 0.0 if self.norms is None else self.norms.epsilon
        return self.rope.inverse_frequencies, *weights, self.rope.scale, epsilon

    @property
    def kind(self) -> tuple[bool, bool]:
        return self.norms is not None, self.shared


def make_variant(short: Variant, early: int, norm: bool, shared: bool) -> Variant:
    """The variant of ``attend_fresh`` beside one of ``attend_short``."""
    pointers = {"frequencies_ptr": "*fp32", "q_weight_ptr": "*bf16", "k_weight_ptr": "*bf16"}
    names = {"q_ptr": "qkv_ptr", "stride_q_token": "stride_qkv_token"}
    signature = {names.get(name, name): kind for name, kind in short.signature.items()}
    return replace(
        short,
        name=short.name.replace("short", f"fresh{'_norm' if norm else ''}{'_shared' if shared else ''}"),
        fn=fresh_jit.attend_fresh,
        signature=signature | pointers | {"rope_scale": "fp32", "epsilon": "fp32"},
        constants={**short.constants, "EARLY": early, "NORM": norm, "SHARED": shared},
        divisible=(*(names.get(name, name) for name in short.divisible), *pointers),
    )

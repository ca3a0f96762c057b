"""Cases of routing, which belongs to ``moe``: which experts each token goes to, and the pairs sorted by expert."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from microscale.hardware import Feature, Gpu
from microscale.kernels.moe import routing
from microscale.kernels.moe.routing import Dispatch
from microscale.kernels.op import Reason
from microscale_lab.cases.case import Compared, Finish, KernelCase, compare, just_written, same
from microscale_lab.cases.errors import Errors, spread, step
from microscale_lab.cases.routing_twins import RouterKind, reference_dispatch, reference_route

if TYPE_CHECKING:
    from torch import Tensor

# tokens, experts, top_k. One program routes up to 64 tokens (64 experts), 32 (128 experts) or 8 (512 experts).
SIZES = [
    (1, 4, 1),
    (1, 128, 4),
    (3, 5, 5),
    (7, 33, 4),
    (16, 512, 16),
    (17, 512, 16),
    (64, 128, 8),
    (65, 128, 4),
    (200, 24, 3),
]
WEIGHT_STEPS = 32
"""exp, sum and division in float32: a few roundings each."""


def make_logits(tokens: int, num_experts: int, device: str, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(tokens * 1000 + num_experts)
    return torch.randn(tokens, num_experts, generator=generator).to(dtype).to(device)


def hold_dispatch(actual: Dispatch, expected: Dispatch) -> Iterator[Compared]:
    """No other order is right."""
    for name in ("offsets", "order", "tiles"):
        yield same(name, getattr(actual, name), getattr(expected, name))


@dataclass(frozen=True)
class _RoutingCase(KernelCase):
    tokens: int
    num_experts: int
    top_k: int

    op: ClassVar[str] = "moe"

    def refuses(self, gpu: Gpu) -> Reason | None:
        return None if gpu.has(Feature.MMA_BF16) else f"runs on GPUs, and this is a {gpu.name}"


@dataclass(frozen=True)
class RouteCase(_RoutingCase):
    kind: RouterKind
    tied: bool = False
    """All logits are equal: the lowest experts win."""

    def variant(self, gpu: Gpu) -> str:
        return "routing, route"

    def start(self, gpu: Gpu, device: str) -> Finish:
        logits = make_logits(self.tokens, self.num_experts, device)
        logits = torch.zeros_like(logits) if self.tied else logits
        scale = None
        if self.kind is RouterKind.SOFTMAX_TOPK:
            generator = torch.Generator().manual_seed(self.num_experts)
            scale = (torch.rand(self.num_experts, generator=generator) + 0.5).to(device)
        just_written(logits)
        actual = routing.route(logits, self.top_k, scale)

        def finish() -> Iterator[Compared]:
            want = reference_route(logits, self.top_k, self.kind, scale)
            yield same("expert ids", actual.expert_ids, want.expert_ids)
            room = WEIGHT_STEPS * step("float32")
            yield compare("weights", actual.weights, want.weights, Errors(room * spread(want.weights), room))

        return finish


@dataclass(frozen=True)
class DispatchCase(_RoutingCase):
    block: int

    def variant(self, gpu: Gpu) -> str:
        return "routing, dispatch"

    def start(self, gpu: Gpu, device: str) -> Finish:
        # Logits in bf16: many are equal.
        logits = make_logits(self.tokens, self.num_experts, device, torch.bfloat16)
        ids = reference_route(logits, self.top_k, RouterKind.TOPK_SOFTMAX).expert_ids
        just_written(ids)
        actual = routing.dispatch(ids, self.num_experts, self.block)
        return lambda: hold_dispatch(actual, reference_dispatch(ids, self.num_experts, self.block))


def cases() -> Iterator[KernelCase]:
    for sizes in SIZES:
        tokens, num_experts, top_k = sizes
        name = f"{tokens} tokens, {top_k} of {num_experts}"
        for kind in RouterKind:
            yield RouteCase(f"{name}, {kind}", *sizes, kind)
        yield DispatchCase(name, *sizes, 8 if tokens % 2 else 32)
    yield RouteCase("all equal", 150, 128, 4, RouterKind.TOPK_SOFTMAX, tied=True)

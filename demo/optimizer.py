"""Muon for matrices, AdamW for the rest: both decoupled from weight decay, both with an update of about the same size.

Muon replaces the averaged gradient of a matrix by the nearest orthogonal matrix (Newton-Schulz, five steps). Experts
are matrices of their own; all matrices of one shape go through it together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

MOMENTUM = 0.95
BETAS = (0.9, 0.98)
EPSILON = 1e-8
UPDATE_RMS = 0.2
"""The size that AdamW's updates tend to have, given to Muon's as well."""


@dataclass(frozen=True)
class Rates:
    matrices: float
    others: float
    decay: float


def orthogonal(matrices: Tensor) -> Tensor:
    """``[n, rows, columns]``: each matrix with all its singular values near 1."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x: Tensor = matrices.bfloat16() if matrices.is_cuda else matrices
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    result: Tensor = x.mT if tall else x
    return result.float()


class Optimizer:
    """``matrices`` by Muon, ``others`` by AdamW. Its state is plain tensors by the parameters' names."""

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        everything = dict(named)
        self.matrices = {name: p for name, p in everything.items() if is_matrix(name)}
        self.others = {name: p for name, p in everything.items() if not is_matrix(name)}
        self.step_idx = 0
        self.first = {name: torch.zeros_like(p) for name, p in everything.items()}
        self.second = {name: torch.zeros_like(p) for name, p in self.others.items()}

    @torch.no_grad()
    def step(self, rates: Rates) -> None:
        self.step_idx += 1
        self._muon(rates)
        self._adam(rates)
        for parameter in (*self.matrices.values(), *self.others.values()):
            parameter.grad = None

    def _muon(self, rates: Rates) -> None:
        by_shape: dict[tuple[int, ...], list[str]] = defaultdict(list)
        for name, parameter in self.matrices.items():
            by_shape[tuple(parameter.shape[-2:])].append(name)
        for (rows, columns), names in by_shape.items():
            grads = [_grad(self.matrices[name]) for name in names]
            moments = [self.first[name] for name in names]
            torch._foreach_lerp_(moments, grads, 1 - MOMENTUM)
            # Nesterov: one step ahead of the average.
            ahead = [torch.lerp(g, m, MOMENTUM) for g, m in zip(grads, moments, strict=True)]
            flat = torch.cat([grad.reshape(-1, rows, columns) for grad in ahead])
            updates = orthogonal(flat) * (UPDATE_RMS * max(rows, columns) ** 0.5)
            counts = [grad.numel() // (rows * columns) for grad in ahead]
            for name, update in zip(names, updates.split(counts), strict=True):
                parameter = self.matrices[name]
                parameter.mul_(1 - rates.matrices * rates.decay)
                parameter.sub_(update.view_as(parameter), alpha=rates.matrices)

    def _adam(self, rates: Rates) -> None:
        names = list(self.others)
        parameters = [self.others[name].data for name in names]
        grads = [_grad(self.others[name]) for name in names]
        first, second = [self.first[name] for name in names], [self.second[name] for name in names]
        torch._foreach_lerp_(first, grads, 1 - BETAS[0])
        torch._foreach_mul_(second, BETAS[1])
        torch._foreach_addcmul_(second, grads, grads, 1 - BETAS[1])
        roots = torch._foreach_div(second, 1 - BETAS[1] ** self.step_idx)
        torch._foreach_sqrt_(roots)
        torch._foreach_add_(roots, EPSILON)
        torch._foreach_addcdiv_(parameters, first, roots, -rates.others / (1 - BETAS[0] ** self.step_idx))

    def state(self) -> dict[str, Any]:
        return {"step": self.step_idx, "first": self.first, "second": self.second}

    def load(self, state: Mapping[str, Any]) -> None:
        self.step_idx = state["step"]
        for mine, theirs in ((self.first, state["first"]), (self.second, state["second"])):
            for name, tensor in mine.items():
                tensor.copy_(theirs[name])


def is_matrix(name: str) -> bool:
    """What Muon is for: products inside the layers, not look-ups, choices, biases and scales."""
    return name.rsplit(".", 1)[-1] in ("q", "k", "v", "o", "gate_up", "down")


def _grad(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad

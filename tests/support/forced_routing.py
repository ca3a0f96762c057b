"""Compares a model with the float32 reference row by row, with the reference's experts.

Where two experts nearly tie, a rounding chooses the other one, and that token is far off in any bf16 implementation. So
every token is given the experts that the reference chose for it. Where the model under test chose others, the test asks
whether that was a near tie; where it chose the same, its own weights stay. Then no row is an exception, and the worst
one is held.

What bf16 may cost is not a figure of one card: it is what the same model costs in plain bf16 arithmetic, the reference
implementation with bf16 activations, on the same tokens. That itself is held to the number of its roundings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from microscale.kernels.moe.spec import Routing
from microscale.kernels.small import reference
from microscale.kernels.small.spec import NormAddNorm, Router
from microscale.models.families import AnyModel
from support.forward import all_logits
from support.model_noise import model_noise

WORST = 2.0
"""How many times plain bf16's worst row a row may be off: other orders of sums are other roundings, and the largest of
some hundred rows varies by half."""
RMS = 1.5
TIE = 8.0
"""Standard deviations of one router logit: two logits differ by 1.4, and the largest of 10,000 draws is 4 times that;
the rest is room for other orders of sums."""


@dataclass
class Routings:
    """What each layer's router said of each token, counted over all prompts one after the other."""

    logits: dict[int, Tensor] = field(default_factory=dict)  # layer → float32 [tokens, experts]
    routing: dict[int, Routing] = field(default_factory=dict)  # layer → [tokens, top_k]


@dataclass(frozen=True)
class Run:
    """One model's logits, and how its routers differ from the reference's."""

    logits: Tensor  # float32 [tokens, vocabulary]
    routings: Routings
    ties: dict[int, Tensor]
    """Layer → for each token that would have gone elsewhere, by how much the reference preferred its own choice."""


def reference_run(model: AnyModel, prompts: list[list[int]], chunk: int) -> Run:
    """The truth: ``model`` computes in float32."""
    return _run(model, prompts, chunk, None)


def forced_run(model: AnyModel, prompts: list[list[int]], chunk: int, truth: Run) -> Run:
    """``model`` with the experts that the truth chose."""
    return _run(model, prompts, chunk, truth)


def row_errors(run: Run, truth: Run) -> Tensor:
    """Of each token, over the size of the truth's logits."""
    errors: Tensor = (run.logits - truth.logits).norm(dim=-1) / truth.logits.norm(dim=-1)
    return errors


def assert_as_good_as_bf16(run: Run, plain: Run, truth: Run) -> None:
    """No row of ``run`` is further off than ``plain``, the reference in bf16, allows; NaN fails."""
    mine, usual = row_errors(run, truth), row_errors(plain, truth)
    noise = model_noise(len(truth.routings.routing))
    assert float(usual.square().mean().sqrt()) <= 2 * noise, "plain bf16 arithmetic is off by more than its roundings"
    worst, allowed = float(mine.max()), WORST * float(usual.max())
    assert worst <= allowed, f"row {int(mine.argmax())} is off by {worst:.4f}, allowed are {allowed:.4f}"
    rms, usual_rms = (float(errors.square().mean().sqrt()) for errors in (mine, usual))
    assert rms <= RMS * usual_rms, f"the RMS error is {rms:.4f}, and {usual_rms:.4f} in plain bf16"
    for layer, margins in run.ties.items():
        noise = float((plain.routings.logits[layer] - truth.routings.logits[layer]).std())
        widest = float(margins.max()) if len(margins) else 0.0
        assert widest <= TIE * noise, f"layer {layer} chose an expert {widest:.4f} below, where noise is {noise:.4f}"


@contextmanager
def replaced(layer: object, name: str, part: object) -> Iterator[None]:
    """Meanwhile a layer has another part."""
    usual = getattr(layer, name)
    object.__setattr__(layer, name, part)
    try:
        yield
    finally:
        object.__setattr__(layer, name, usual)


class _WatchedSmall:
    """The small ops of one layer, with what its router says recorded, or replaced."""

    def __init__(self, small: Any, watch: Callable[[Routing, Callable[[], Tensor]], Routing]) -> None:
        self._small, self._watch = small, watch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._small, name)

    def add_norm_route(
        self, x: Tensor, residual: Tensor, weight: Tensor, epsilon: float, router: Router, top_k: int
    ) -> tuple[Tensor, Tensor, Routing]:
        normed, total, routing = self._small.add_norm_route(x, residual, weight, epsilon, router, top_k)
        return normed, total, self._watch(routing, lambda: _router_logits(normed, router))

    def norm_add_norm_route(
        self, x: Tensor, residual: Tensor, around: NormAddNorm, router: Router, top_k: int
    ) -> tuple[Tensor, Tensor, Routing]:
        given = x.clone(), residual.clone()
        normed, total, routing = self._small.norm_add_norm_route(x, residual, around, router, top_k)

        def logits() -> Tensor:
            return _router_logits(reference.norm_add_norm(given[0], None, given[1], around)[0][-1], router)

        return normed, total, self._watch(routing, logits)


def _router_logits(normed: Tensor, router: Router) -> Tensor:
    bias = None if router.bias is None else router.bias.float()
    return F.linear(normed.float(), router.weight.float(), bias)


def _run(model: AnyModel, prompts: list[list[int]], chunk: int, truth: Run | None) -> Run:
    found, rows = Routings(), torch.empty(0, dtype=torch.int64)
    ties: dict[int, list[Tensor]] = {layer: [] for layer in range(len(model.layers))}
    total = sum(map(len, prompts))

    def begin(step_rows: Sequence[int]) -> None:
        nonlocal rows
        rows = torch.tensor(step_rows, device=model.device)

    def watcher(layer: int) -> Callable[[Routing, Callable[[], Tensor]], Routing]:
        def watch(routing: Routing, logits: Callable[[], Tensor]) -> Routing:
            said = logits()
            found.logits.setdefault(layer, said.new_zeros(total, said.shape[1]))[rows] = said
            if truth is not None:
                routing, margins = _forced(routing, truth.routings, layer, rows)
                ties[layer].append(margins)
            kept = found.routing.setdefault(layer, _empty_like(routing, total))
            kept.expert_ids[rows], kept.weights[rows] = routing.expert_ids, routing.weights
            return routing

        return watch

    with ExitStack() as stack:
        for index, layer in enumerate(model.layers):
            small = getattr(layer, "small")  # noqa: B009 (not all that has layers says that they have it)
            stack.enter_context(replaced(layer, "small", _WatchedSmall(small, watcher(index))))
        logits = torch.cat(all_logits(model, prompts, chunk, begin))
    return Run(logits, found, {layer: torch.cat(margins) for layer, margins in ties.items() if margins})


def _empty_like(routing: Routing, total: int) -> Routing:
    ids, weights = routing.expert_ids, routing.weights
    return Routing(ids.new_zeros(total, ids.shape[1]), weights.new_zeros(total, weights.shape[1]))


def _forced(routing: Routing, truth: Routings, layer: int, rows: Tensor) -> tuple[Routing, Tensor]:
    """The routing with the truth's experts, and for each token that had others by how much those are worse."""
    wanted, logits = truth.routing[layer], truth.logits[layer][rows]
    ids, weights = wanted.expert_ids[rows], wanted.weights[rows]
    other = (routing.expert_ids.sort(dim=-1).values != ids.sort(dim=-1).values).any(-1)
    least = logits.gather(1, ids.long()).amin(-1)
    chosen = logits.gather(1, routing.expert_ids.long()).amin(-1)
    mixed = Routing(
        torch.where(other[:, None], ids, routing.expert_ids), torch.where(other[:, None], weights, routing.weights)
    )
    return mixed, (least - chosen)[other]

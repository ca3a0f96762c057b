"""Launches of ``triton_small``'s norms, alone and with the ops around them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from microscale.errors import Unsupported
from microscale.formats import BLOCK as GROUP
from microscale.formats import BlockScaled, block_format
from microscale.hardware import Gpu
from microscale.kernels import binding
from microscale.kernels.last_program import last_program_counters
from microscale.kernels.launch import launch
from microscale.kernels.linear import linear
from microscale.kernels.moe import routing
from microscale.kernels.moe.spec import Parts, Routing
from microscale.kernels.numbers import cdiv, next_power_of_2
from microscale.kernels.op import Reason, always
from microscale.kernels.small import norm_jit
from microscale.kernels.small.spec import NormAddNorm, NormAddNormRoutePath, Routed, RoutePath, Router, SmallSpec

if TYPE_CHECKING:
    from torch import Tensor

MAX_WIDTH = 16384
MAX_NORMS = 3
# Where sum, norm, router and top-k are one launch: columns up to a power of two, experts up to one, top k; and tokens.
ROUTED = ((4096, 32, 4), (4096, 64, 4), (4096, 128, 4), (2048, 128, 8))
# And one expert more that always runs, the last of top k.
ROUTED_ALWAYS = ((2048, 256, 9),)
# The same for norm, sum, norms, router and top-k, with this many readers apart from the router.
NORM_ADD_NORM_ROUTED = ((4096, 128, 8),)
NORM_ADD_NORM_READERS = 2
ROUTED_TOKENS = 16
ROUTER_ELEMENTS = 8192
ROUTER_WARPS = 4
"""Weights of the router that one program of ``add_norm_route`` holds, 64 a thread, and its warps."""
EARLY_BLOCK = 8192
"""Columns up to which ``norm_add_norm`` has registers for all its weights before it waits."""
NORM_ADD_NORM_ELEMENTS = 8192
NORM_ADD_NORM_WARPS = 4
"""The same for ``norm_add_norm_route``, and its warps (H200, 30 layers of Gemma 4: 16384 and 8 warps 67 us more)."""


def warps(block: int) -> int:
    """8 elements a thread up to 8 warps."""
    return max(1, min(8, block // 256))


def launch_small(
    fn: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], constants: dict[str, Any], num_warps: int, pdl: bool
) -> None:
    """Start one of the small kernels. ``pdl``: it waits for the kernel before it by itself.

    Left alone, ptxas stops at 40 or 64 registers in some and spills (8 and 16 bytes, SM 9.0).
    """
    pdl = pdl and not binding.PLAIN
    options: dict[str, Any] = {"num_warps": num_warps, "maxnreg": 255}
    if pdl:
        options["launch_pdl"] = True
    launch(fn, grid, arguments, {**constants, "PDL": pdl, "PLAIN": binding.PLAIN}, options)


def norm_block(width: int) -> int:
    """Columns of a program that has a whole row."""
    return max(256, next_power_of_2(width))


def norm(x: Tensor, residual: Tensor | None, weight: Tensor | None, epsilon: float, pdl: bool) -> tuple[Tensor, Tensor]:
    """The norm of ``x`` or of ``x + residual``, and what was normed."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = x if residual is None else out.new_empty(out.shape)
    _norm(x, residual, weight, total, out, None, epsilon, pdl)
    return out, total


def add_norm(x: Tensor | Parts, residual: Tensor, weight: Tensor, epsilon: float, pdl: bool) -> tuple[Tensor, Tensor]:
    """The norm of ``x + residual``, and the sum."""
    if not isinstance(x, Parts):
        return norm(x, residual, weight, epsilon, pdl)
    total, out = (torch.empty(residual.shape, dtype=residual.dtype, device=residual.device) for _ in range(2))
    _norm(x, residual, weight, total, out, None, epsilon, pdl)
    return out, total


def add_norm_mxfp8(
    x: Tensor | Parts, residual: Tensor, weight: Tensor, epsilon: float, pdl: bool
) -> tuple[BlockScaled, Tensor]:
    """As ``add_norm``, rounded to bf16 and then to MXFP8."""
    tokens, width = residual.shape
    if width % GROUP:
        raise Unsupported(f"MXFP8 needs a multiple of {GROUP} columns, not {width}.")
    codes = torch.empty((tokens, width), dtype=torch.uint8, device=residual.device)
    scales = torch.empty((tokens, width // GROUP), dtype=torch.uint8, device=residual.device)
    total = torch.empty((tokens, width), dtype=residual.dtype, device=residual.device)
    _norm(x, residual, weight, total, codes, scales, epsilon, pdl)
    return BlockScaled(codes, scales, block_format("mxfp8")), total


def _norm(
    x: Tensor | Parts,
    residual: Tensor | None,
    weight: Tensor | None,
    total: Tensor,
    out: Tensor,
    scales: Tensor | None,
    epsilon: float,
    pdl: bool,
) -> None:
    rows, top_k = (x.rows, x.top_k) if isinstance(x, Parts) else (x, 0)
    tokens, width = total.shape
    if not tokens:
        return
    block = norm_block(width)
    arguments = (
        rows, rows if residual is None else residual, rows if weight is None else weight, total, out,
        out if scales is None else scales, epsilon, width, rows.stride(0) * max(top_k, 1),
        0 if residual is None else residual.stride(0),
    )  # fmt: skip
    flags = {"ADD": residual is not None, "WEIGHTED": weight is not None, "MXFP8": scales is not None}
    # The warps are those without parts: the sum of squares is then the same bits.
    constants = {"BLOCK": block, "TOP_K": top_k, **flags}
    launch_small(norm_jit.rms_norm, (tokens,), arguments, constants, warps(block), pdl)


def norm_add_norm(
    x: Tensor, other: Tensor | None, residual: Tensor, around: NormAddNorm, pdl: bool
) -> tuple[Tensor, Tensor]:
    """What ``reference.norm_add_norm`` says, in one launch."""
    tokens, width = x.shape
    outputs = around.after.shape[0]
    if outputs > MAX_NORMS:
        raise Unsupported(f"One sum is normed with up to {MAX_NORMS} weights, not {outputs}.")
    normed = torch.empty((outputs, tokens, width), dtype=x.dtype, device=x.device)
    total = torch.empty((tokens, width), dtype=x.dtype, device=x.device)
    if tokens:
        block = norm_block(width)
        arguments = (
            x.contiguous(), around.before, x if other is None else other.contiguous(),
            *(around.before if w is None else w for w in (around.before_other, around.joined)),
            residual.contiguous(), around.after, total, normed, around.epsilon, around.scale, width,
        )  # fmt: skip
        constants = {"BLOCK": block, "JOIN": other is not None, "OUTPUTS": outputs, "EARLY": block <= EARLY_BLOCK}
        launch_small(norm_jit.norm_add_norm, (tokens,), arguments, constants, warps(block), pdl)
    return normed, total


def router_constants(block: int, e_pad: int, top_k: int) -> dict[str, int]:
    """64 weights of the router a thread, and at least four programs a token."""
    rows = max(1, min(ROUTER_ELEMENTS // block, e_pad // 4))
    return {"BLOCK": block, "ROWS": rows, "TOP_K": top_k, "E_PAD": e_pad}


def norm_add_norm_constants(block: int, e_pad: int, top_k: int) -> dict[str, int]:
    """As ``router_constants``. At least four programs a token are one for each of the readers, and one for the sum."""
    rows = max(1, min(NORM_ADD_NORM_ELEMENTS // block, e_pad // 8))
    return {"BLOCK": block, "READERS": NORM_ADD_NORM_READERS, "ROWS": rows, "TOP_K": top_k, "E_PAD": e_pad}


def _routes(shape: tuple[int, int, int], known: tuple[tuple[int, int, int], ...], tokens: int) -> Reason | None:
    """Why there is no kernel for this many tokens and this shape: columns and experts, up to powers of 2, and top k."""
    if not 0 < tokens <= ROUTED_TOKENS:
        return f"pays up to {ROUTED_TOKENS} tokens, not for {tokens}"
    if shape not in known:
        return f"has no kernel for {shape[0]} columns, {shape[1]} experts and top {shape[2]}"
    return None


def _shape(spec: SmallSpec) -> tuple[int, int, int]:
    return norm_block(spec.hidden), _experts(spec.num_experts), spec.top_k


def _experts(num_experts: int) -> int:
    return max(32, next_power_of_2(num_experts))


def _fuses_route(spec: SmallSpec, gpu: Gpu) -> Reason | None:
    if spec.router is not None and spec.router.expert_scale:
        return "takes routers without scales of experts"
    if spec.router is not None and spec.router.always:
        shape = norm_block(spec.hidden), _experts(spec.num_experts - 1), spec.top_k
        return _routes(shape, ROUTED_ALWAYS, spec.tokens)
    return _routes(_shape(spec), ROUTED, spec.tokens)


def _fuses_norm_add_norm_route(spec: SmallSpec, gpu: Gpu) -> Reason | None:
    router = spec.router
    if router is not None and (
        router.bias or not router.expert_scale or router.always or router.readers != NORM_ADD_NORM_READERS
    ):
        return f"takes routers without a bias, with scales of experts, behind {NORM_ADD_NORM_READERS} other norms"
    return _routes(_shape(spec), NORM_ADD_NORM_ROUTED, spec.tokens)


def _route_apart(
    x: Tensor, residual: Tensor, norm_weight: Tensor, epsilon: float, router: Router, top_k: int, pdl: bool
) -> Routed:
    """Sum and norm; the router's product; top-k."""
    normed, total = norm(x, residual, norm_weight, epsilon, pdl)
    logits = linear(normed, router.weight, router.bias)
    return normed, total, routing.route(logits, top_k, router.expert_scale, always=router.always)


def _route_fused(
    x: Tensor, residual: Tensor, norm_weight: Tensor, epsilon: float, router: Router, top_k: int, pdl: bool
) -> Routed:
    """Sum, norm, router and top-k."""
    (tokens, width), num_experts = x.shape, router.weight.shape[0]
    block, e_pad = norm_block(width), _experts(num_experts - router.always)
    normed = torch.empty((tokens, width), dtype=x.dtype, device=x.device)
    total = normed.new_empty(normed.shape)
    logits = torch.empty((tokens, num_experts), dtype=torch.float32, device=x.device)
    ids = torch.empty((tokens, top_k), dtype=torch.int32, device=x.device)
    weights = torch.empty((tokens, top_k), dtype=torch.float32, device=x.device)
    constants = router_constants(block, e_pad, top_k)
    constants |= {"BIAS": router.bias is not None, "ALWAYS": router.always, "K_PAD": next_power_of_2(top_k)}
    bias = router.weight if router.bias is None else router.bias  # not read where there is none
    arguments = (
        x, residual, norm_weight, router.weight, bias, total, normed, logits, ids, weights,
        last_program_counters(x.device, tokens), epsilon, width, num_experts, x.stride(0), residual.stride(0),
    )  # fmt: skip
    grid = (tokens, cdiv(num_experts, constants["ROWS"]))
    launch_small(norm_jit.add_norm_route, grid, arguments, constants, ROUTER_WARPS, pdl)
    return normed, total, Routing(ids, weights)


def _norm_add_norm_route_apart(
    x: Tensor, residual: Tensor, around: NormAddNorm, router: Router, top_k: int, pdl: bool
) -> Routed:
    """Norm, sum and norms; the router's product; top-k."""
    normed, total = norm_add_norm(x, None, residual, around, pdl)
    logits = linear(normed[-1], router.weight, router.bias)
    return normed[:-1], total, routing.route(logits, top_k, router.expert_scale, always=router.always)


def _norm_add_norm_route_fused(
    x: Tensor, residual: Tensor, around: NormAddNorm, router: Router, top_k: int, pdl: bool
) -> Routed:
    """Norm, sum, norms, router and top-k."""
    (tokens, width), num_experts, readers = x.shape, router.weight.shape[0], around.after.shape[0] - 1
    block, e_pad = norm_block(width), _experts(num_experts)
    normed = torch.empty((readers, tokens, width), dtype=x.dtype, device=x.device)
    total = torch.empty((tokens, width), dtype=x.dtype, device=x.device)
    logits = torch.empty((tokens, num_experts), dtype=torch.float32, device=x.device)
    ids = torch.empty((tokens, top_k), dtype=torch.int32, device=x.device)
    weights = torch.empty((tokens, top_k), dtype=torch.float32, device=x.device)
    constants = norm_add_norm_constants(block, e_pad, top_k)
    arguments = (
        x.contiguous(), around.before, residual.contiguous(), around.after, router.weight, router.expert_scale,
        total, normed, logits, ids, weights, last_program_counters(x.device, tokens),
        around.epsilon, around.scale, width, num_experts,
    )  # fmt: skip
    grid = (tokens, cdiv(num_experts, constants["ROWS"]))
    launch_small(norm_jit.norm_add_norm_route, grid, arguments, constants, NORM_ADD_NORM_WARPS, pdl)
    return normed, total, Routing(ids, weights)


ONE_LAUNCH = "three launches of so little work are mostly latency"
ROUTE_PATHS = (
    RoutePath("router in one launch", ONE_LAUNCH, _fuses_route, _route_fused),
    RoutePath("router apart", "it is the last", always, _route_apart),
)
NORM_ADD_NORM_ROUTE_PATHS = (
    NormAddNormRoutePath("router in one launch", ONE_LAUNCH, _fuses_norm_add_norm_route, _norm_add_norm_route_fused),
    NormAddNormRoutePath("router apart", "it is the last", always, _norm_add_norm_route_apart),
)

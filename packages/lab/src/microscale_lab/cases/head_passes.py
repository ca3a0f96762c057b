"""Cases of a draft head's pass, without its layer: two norms side by side before it, and the guess after it.

Rows of the table that no token asks for, columns behind the states and places behind the guesses hold ``NaN`` or
``POISON``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from microscale.hardware import Gpu
from microscale.kernels.small import reference
from microscale.kernels.small.spec import SmallOps
from microscale_lab.cases.case import Compared, Finish, KernelCase, compare, just_written, same
from microscale_lab.cases.small import Build, SmallCase, bf16_bound, normal, small_spec

if TYPE_CHECKING:
    from torch import Tensor

POISON = -(2**40)
VOCAB = 50


def norm_pair(tokens: int, width: int, guesses: int) -> Build:
    """Tokens that are ``guesses`` apart, as those of one place in several drafts do."""

    def build(ops: SmallOps, gpu: Gpu, device: str) -> Finish:
        draws = torch.Generator().manual_seed(tokens)
        asked = torch.randint(0, VOCAB, (tokens, guesses), generator=draws).to(device)
        ids = asked[:, guesses // 2]
        table = torch.full((VOCAB, width), math.nan).bfloat16().to(device)
        table[ids] = normal(VOCAB, width, device=device, size=5.0)[ids]
        padded = torch.full((tokens, width + 16), math.nan, device=device).bfloat16()
        padded[:, :width] = normal(tokens, width, device=device, seed=1)
        hidden = padded[:, :width]
        weights = normal(2, width, device=device, seed=2)
        just_written(ids, hidden)
        found = ops.norm_pair(table, ids, hidden, weights, 1e-5)

        def finish() -> Iterator[Compared]:
            want = reference.norm_pair(table, ids, hidden, weights, 1e-5)
            for part, at in (("embedding", slice(None, width)), ("hidden state", slice(width, None))):
                yield compare(f"norm of the {part}", found[:, at], want[:, at], bf16_bound(want[:, at]))

        return finish

    return build


def blocks_of(kind: str, tokens: int, blocks: int) -> Tensor:
    """The largest logit of each block."""
    found = torch.randn(tokens, blocks, generator=torch.Generator().manual_seed(blocks))
    if kind == "equals":
        found[:, blocks // 3 :: 3] = 7.5
    elif kind == "zeros of both signs":
        found = torch.where(torch.arange(blocks) % 2 == 0, -0.0, 0.0).expand(tokens, -1).contiguous()
    elif kind == "nothing but minus infinity":
        found[:] = -math.inf
    elif kind == "NaN above infinity":
        found[:, blocks // 2] = math.inf
        found[:, blocks - 2 :] = math.nan
    elif kind == "negative numbers":
        found = -found.abs() - 1
    return found


def likeliest(kind: str, tokens: int, blocks: int, mapped: bool) -> Build:
    def build(ops: SmallOps, gpu: Gpu, device: str) -> Finish:
        draws = torch.Generator().manual_seed(blocks)
        largest = blocks_of(kind, tokens, blocks).to(device)
        rows = (16 * torch.arange(blocks) + torch.randint(0, 16, (tokens, blocks), generator=draws)).int().to(device)
        ids = torch.randperm(16 * blocks, generator=draws).to(device) if mapped else None
        drafts = [torch.full((tokens, 3), POISON, device=device) for _ in range(2)]
        just_written(largest, rows)
        ops.likeliest(largest, rows, ids, drafts[0][:, 1])

        def finish() -> Iterator[Compared]:
            reference.likeliest(largest, rows, ids, drafts[1][:, 1])
            yield same("guesses", *drafts)

        return finish

    return build


KINDS = ("numbers", "equals", "zeros of both signs", "nothing but minus infinity", "NaN above infinity")


def cases() -> Iterator[KernelCase]:
    for tokens, width, guesses in ((1, 160, 1), (3, 300, 4), (0, 64, 2), (5, 2880, 3)):
        name = f"{tokens} tokens, {width} columns"
        yield SmallCase(name, "norm_pair", small_spec(width, tokens=tokens), norm_pair(tokens, width, guesses))
    sizes = [("numbers", 0, 4, False)]
    sizes += [(kind, 2, 1000, False) for kind in (*KINDS, "negative numbers")]
    sizes += [("numbers", 3, blocks, True) for blocks in (1, 7, 2048, 2049)]
    sizes += [("equals", 1, 5000, True)]
    for kind, tokens, blocks, mapped in sizes:
        name = f"{tokens} tokens, {blocks} blocks, {kind}{', other ids' if mapped else ''}"
        yield SmallCase(name, "likeliest", small_spec(64, tokens=tokens), likeliest(kind, tokens, blocks, mapped))

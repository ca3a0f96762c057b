"""Sampled tokens on their way from the device to the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from microscale.backends.ops import Sampled, Status
from microscale.errors import BadLogits, BadRequest

if TYPE_CHECKING:
    from torch import Tensor


class Choice(NamedTuple):
    """The next token of one request, or why there is none."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    status: Status = Status.OK
    fault: str | None = None
    """Why its grammar could not be followed."""

    def check(self) -> None:
        """Raise what the request must be told."""
        if self.fault is not None:
            raise BadRequest(self.fault)
        if self.status is Status.NON_FINITE:
            raise BadLogits("The model's logits are not finite; the weights or the activations are broken.")
        if self.status is Status.NOTHING_ALLOWED:
            raise BadRequest("logit_bias and the grammar together allow no token here.")


@dataclass(frozen=True)
class Found:
    """What was sampled, as plain lists, row by row. A ``Choice`` is made of a row that somebody wants."""

    tokens: list[int]
    logprobs: list[float]
    status: list[int]
    top: tuple[list[list[int]], list[list[float]]] | None

    def choice(self, row: int, wanted: int, fault: str | None = None) -> Choice:
        """``wanted``: likeliest tokens."""
        top: tuple[tuple[int, float], ...] = ()
        if self.top is not None and wanted:
            ids, values = self.top
            top = tuple(zip(ids[row][:wanted], values[row][:wanted], strict=True))
        status = self.status[row]
        return Choice(self.tokens[row], self.logprobs[row], top, Status(status) if status else Status.OK, fault)


class Reading:
    """What was sampled, on its way to the host. On a GPU by a stream of its own, ``side``: the next step, which does
    without what is read here, need not wait for the copies."""

    def __init__(self, sampled: Sampled, side: torch.cuda.Stream | None, drafts: Tensor | None = None) -> None:
        """``drafts``: that were verified, where the host does not know them."""
        self._there: torch.cuda.Event | None = None
        self._drafts: Tensor | None = None
        if side is None:
            self._copy(sampled, drafts)
            return
        side.wait_stream(torch.cuda.current_stream(side.device))
        with torch.cuda.stream(side):
            self._copy(sampled, drafts)
            self._there = torch.cuda.Event()
            self._there.record(side)

    def _copy(self, sampled: Sampled, drafts: Tensor | None) -> None:
        self._drafts = None if drafts is None else _to_host(drafts)
        top = () if sampled.top is None else (sampled.top.tokens, sampled.top.logprobs)
        rows = sampled.tokens.shape[0]
        if sampled.together is None:
            own = [_to_host(sampled.tokens), _to_host(sampled.logprobs), _to_host(sampled.status)]
        else:
            tokens, logprobs, status = _to_host(sampled.together)[:, :rows]
            own = [tokens, logprobs.view(torch.float32), status]
        self._tensors = own + [_to_host(t) for t in top]

    def found(self) -> Found:
        """The one place where sampling waits for the device."""
        if self._there is not None:
            self._there.synchronize()
        tokens, logprobs, status, *top = (tensor.tolist() for tensor in self._tensors)
        return Found(tokens, logprobs, status, (top[0], top[1]) if top else None)

    def drafts(self) -> list[list[int]]:
        """Of each request, filled up behind its own. What was sampled was ``found`` before."""
        assert self._drafts is not None  # whoever asks gave them
        found: list[list[int]] = self._drafts.tolist()
        return found

    def choices(self, wanted: Sequence[int]) -> list[Choice]:
        """Of all rows. ``wanted``: likeliest tokens of each."""
        found = self.found()
        return [found.choice(row, count) for row, count in enumerate(wanted)]


def _to_host(tensor: Tensor) -> Tensor:
    """A copy that the present stream makes: nobody else may have the memory before that."""
    if tensor.device.type == "cpu":
        return tensor
    tensor.record_stream(torch.cuda.current_stream(tensor.device))
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)

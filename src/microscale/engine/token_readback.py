"""Sampled tokens on their way from the device to the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from microscale.errors import BadLogits, BadRequest
from microscale.planning.ops import Sampled, SampleStatus

if TYPE_CHECKING:
    from torch import Tensor


class NextToken(NamedTuple):
    """The next token of one request, or why there is none."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    status: SampleStatus = SampleStatus.OK
    fault: str | None = None
    """Why its grammar could not be followed."""

    def check(self) -> None:
        """Raise the error that ends the request, if there is one."""
        if self.fault is not None:
            raise BadRequest(self.fault)
        if self.status is SampleStatus.NON_FINITE:
            raise BadLogits("The model's logits are not finite; the weights or the activations are broken.")
        if self.status is SampleStatus.NOTHING_ALLOWED:
            raise BadRequest("logit_bias and the grammar together allow no token here.")


@dataclass(frozen=True)
class SampledLists:
    """What was sampled, as plain lists, row by row. A ``NextToken`` is made only of rows that are used."""

    tokens: list[int]
    logprobs: list[float]
    status: list[int]
    top: tuple[list[list[int]], list[list[float]]] | None

    def next_token(self, row: int, wanted: int, fault: str | None = None) -> NextToken:
        """``wanted``: how many of the likeliest tokens."""
        top: tuple[tuple[int, float], ...] = ()
        if self.top is not None and wanted:
            ids, values = self.top
            top = tuple(zip(ids[row][:wanted], values[row][:wanted], strict=True))
        status = self.status[row]
        return NextToken(
            self.tokens[row], self.logprobs[row], top, SampleStatus(status) if status else SampleStatus.OK, fault
        )


class Reading:
    """What was sampled, on its way to the host. On a GPU another stream, ``side``, copies it: the next step does not
    need what is read here, and does not wait for the copies."""

    def __init__(self, sampled: Sampled, side: torch.cuda.Stream | None, drafts: Tensor | None = None) -> None:
        """``drafts``: those that were verified, where the host does not know them."""
        self._copied: torch.cuda.Event | None = None
        self._drafts = drafts
        parts: list[Tensor] = []
        if sampled.together is None:
            parts += [sampled.tokens, sampled.logprobs, sampled.status]
        if sampled.top is not None:
            parts += [sampled.top.tokens, sampled.top.logprobs]
        together = sampled.together
        if side is not None:
            side.wait_stream(torch.cuda.current_stream(side.device))
            with torch.cuda.stream(side):
                self._drafts = None if drafts is None else _to_host(drafts)
                together = None if together is None else _to_host(together)
                parts = [_to_host(part) for part in parts]
                self._copied = torch.cuda.Event()
                self._copied.record(side)
        if together is not None:
            tokens, logprobs, status = together[:, : sampled.tokens.shape[0]]
            parts = [tokens, logprobs.view(torch.float32), status, *parts]
        self._tensors = parts

    def lists(self) -> SampledLists:
        """The one place where sampling waits for the device."""
        if self._copied is not None:
            self._copied.synchronize()
        tokens, logprobs, status, *top = [tensor.tolist() for tensor in self._tensors]
        return SampledLists(tokens, logprobs, status, (top[0], top[1]) if top else None)

    def drafts(self) -> list[list[int]]:
        """The drafts of each request, padded. Call ``lists`` first: that waits for the copies."""
        assert self._drafts is not None  # the caller gave them
        drafts: list[list[int]] = self._drafts.tolist()
        return drafts

    def next_tokens(self, num_likeliest: Sequence[int]) -> list[NextToken]:
        """The token of every row, with this many of the likeliest ones."""
        lists = self.lists()
        return [lists.next_token(row, count) for row, count in enumerate(num_likeliest)]


def _to_host(tensor: Tensor) -> Tensor:
    """A copy that the current stream makes. The tensor's memory is not reused before that."""
    tensor.record_stream(torch.cuda.current_stream(tensor.device))
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)

"""A step between its launch and the reading of its tokens, and the log-probabilities of prompts that it computes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from microscale.engine.output import Output
from microscale.engine.request import Finish, Request
from microscale.engine.sampling_state import Drawn, Sampler
from microscale.engine.work import Work
from microscale.errors import MicroscaleError

if TYPE_CHECKING:
    from torch import Tensor


class PendingStep(Struct, frozen=True):
    """A step that was launched and whose tokens the host has not read."""

    schedule: list[Work]
    outputs: list[Output]
    """Known already: log-probabilities of prompts."""
    ready: list[tuple[Request, int]]
    """The requests whose next token it chooses, with their numbers in the sampler."""
    drawn: Drawn | None
    last: list[Output]
    """The last outputs of requests that end with it without a token."""
    drafted: bool = False
    """Some request has drafts in it: how far it was computed is known when it is read."""

    @property
    def requests(self) -> list[Request]:
        """Those whose next token it chooses."""
        return [request for request, _ in self.ready]

    def moved(self, accepted: Mapping[str, Sequence[int]]) -> PendingStep:
        """The same step, with positions that are known now that the step before it is read."""
        schedule = [
            replace(work, first=work.first + len(accepted.get(work.request.request_id, ())), slack=0)
            for work in self.schedule
        ]
        return replace(self, schedule=schedule)


def score_prompts(
    schedule: Sequence[Work], ends: Sequence[int], values: Tensor, sampler: Sampler
) -> tuple[list[Output], list[Output]]:
    """Log-probabilities of prompts, where they are wanted, and the end of those whose logits are broken.

    ``ends``: where each part of the schedule ends in the rows of the logits.
    """
    outputs: list[Output] = []
    broken: list[Output] = []
    for work, end in zip(schedule, ends, strict=True):
        if work.request.scoring and work.first + work.count > work.request.num_scored:
            try:
                outputs.append(_score(work, values[end - work.num_logits : end], sampler))
            except MicroscaleError as error:
                broken.append(Output(work.request.request_id, None, finish=Finish.ERROR, error=error))
    return outputs, broken


def _score(work: Work, values: Tensor, sampler: Sampler) -> Output:
    """The row of a token says how likely the one after it was."""
    request = work.request
    # A request that was preempted runs its prompt again; nothing is reported twice.
    first = max(work.first, request.num_scored)
    targets = request.prompt[first + 1 : work.first + work.count + 1]
    rows = values[first - work.first :][: len(targets)]
    tokens = sampler.prompt_logprobs(rows, targets, request.params.prompt_logprobs or 0)
    for token in tokens:
        token.check()
    request.num_scored = first + len(targets)
    scored = tuple((token.token, token.logprob, token.top) for token in tokens)
    return Output(request.request_id, None, prompt_logprobs=scored)

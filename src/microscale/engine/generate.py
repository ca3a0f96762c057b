"""Complete a fixed set of prompts together, with an engine of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from microscale.engine.limits import Limits
from microscale.engine.loading.build import assemble
from microscale.engine.output import Output
from microscale.engine.request import Request
from microscale.engine.runner import Model
from microscale.engine.sampling_params import SamplingParams
from microscale.engine.speculation.speculation import Speculation
from microscale.errors import BadRequest
from microscale.models.config import LayerKind
from microscale.models.families import ModelConfig

if TYPE_CHECKING:
    from microscale.engine.ranks.leader import RankTeam


@dataclass
class Completion:
    """What one prompt became."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str = ""
    """``stop`` (an end token, which is the last of ``token_ids``) or ``length``."""

    def take(self, output: Output) -> None:
        if output.error is not None:
            raise output.error
        if output.token is not None and output.logprob is not None:
            self.token_ids.append(output.token)
            self.logprobs.append(output.logprob)
        if output.finish is not None:
            self.finish_reason = output.finish.value


def check_prompt(prompt: Sequence[int], max_tokens: int, config: ModelConfig) -> None:
    """Refuse a prompt that the model cannot complete."""
    if not prompt:
        raise BadRequest("The prompt is empty; give at least one token id.")
    for token in prompt:
        if not 0 <= token < config.vocab_size:
            raise BadRequest(f"Token id {token} is not in the vocabulary of {config.vocab_size}.")
    if len(prompt) + max_tokens > config.max_context:
        raise BadRequest(
            f"{len(prompt)} prompt tokens and {max_tokens} new ones exceed the model's context of {config.max_context}."
        )


def check_budget(max_num_batched_tokens: int) -> None:
    """Refuse a step that holds no token."""
    if max_num_batched_tokens < 1:
        raise BadRequest(f"max_num_batched_tokens is {max_num_batched_tokens}; a step takes at least one token.")


class Generation:
    """One batch of prompts on its way. ``step()`` runs the model once; ``run()`` until every prompt is done."""

    def __init__(
        self,
        model: Model,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        max_num_batched_tokens: int = 2048,
        *,
        prefix_caching: bool = True,
        speculation: Speculation | None = None,
        team: RankTeam | None = None,
    ) -> None:
        check_budget(max_num_batched_tokens)
        for prompt in prompts:
            check_prompt(prompt, params.max_tokens, model.config)
        limits = Limits(
            page_size=model.page_size,
            window=model.config.sliding_window,
            max_num_seqs=min(len(prompts), max_num_batched_tokens) or 1,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=model.config.max_context,
            max_queue=max(1, len(prompts)),
            prefix_caching=prefix_caching,
        )
        totals = [len(prompt) + params.max_tokens for prompt in prompts]
        # A sliding layer holds its window and what one step adds.
        held = [min(total, limits.window + max_num_batched_tokens + 2 * model.page_size) for total in totals]
        pages = {LayerKind.FULL: _pages(totals, model.page_size), LayerKind.SLIDING: _pages(held, model.page_size)}
        self.engine = assemble(model, limits, pages, speculation=speculation, team=team)
        self._completions = {str(index): Completion() for index in range(len(prompts))}
        for index, prompt in enumerate(prompts):
            self.engine.submit(Request(str(index), prompt, params))

    def run(self, on_step: Callable[[int], None] = lambda tokens: None) -> list[Completion]:
        """All completions; ``on_step`` gets the number of tokens that each step produced."""
        while self.engine.has_work:
            on_step(self.step())
        return list(self._completions.values())

    def step(self) -> int:
        """Returns the number of tokens produced."""
        outputs = self.engine.step()
        for output in outputs:
            self._completions[output.request_id].take(output)
        return len(outputs)


def _pages(lengths: Sequence[int], page_size: int) -> int:
    return sum(-(-length // page_size) for length in lengths)

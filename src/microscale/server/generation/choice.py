"""One choice of a reply: the engine's tokens in, steps with text out.

Every token id is in exactly one step, in order, whether its text is shown immediately, later, or never.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, replace

from microscale.engine.output import Output, Scored
from microscale.engine.request import Finish
from microscale.server import error_texts
from microscale.text.events import Flaw, TextKind
from microscale.text.output import ChatOutput, Delta, PlainOutput, joined


@dataclass(frozen=True)
class ChoiceStep:
    """What a few tokens add to a choice."""

    delta: Delta
    outputs: Sequence[Output]
    """The engine's outputs for the delta's tokens, if log-probabilities are requested."""
    first: bool
    finish: Finish | None


class ChoiceOutput:
    """Turns the engine's outputs for one choice into steps."""

    def __init__(self, index: int, output: ChatOutput | PlainOutput, *, keep_outputs: bool = False) -> None:
        self.index = index
        self.output = output
        self.num_tokens = 0
        self.done = False
        self.scored: list[Scored] = []
        """Log-probabilities of the prompt's tokens from the second on, if requested."""
        self._keep_outputs = keep_outputs
        self._outputs: list[Output] = []
        self._skip = 0
        """How many ids at the start of the next delta were already sent, before their text was known."""

    def advance_all(self, outputs: Sequence[Output]) -> Iterator[ChoiceStep]:
        """The steps for outputs that arrived together: the same text in the same order as one at a time."""
        first = 0
        for end, output in enumerate(outputs, 1):
            if end < len(outputs) and (output.token is None or not self.output.ends_part(output.token)):
                continue
            step = self.advance(outputs[first:end])
            first = end
            if step is not None:
                yield step
            if self.done:
                return

    def advance(self, outputs: Sequence[Output]) -> ChoiceStep | None:
        """The step for outputs of one kind of text, or ``None`` if they show nothing yet."""
        ids = [output.token for output in outputs if output.token is not None]
        finish = _ending(outputs[-1])
        first = self.num_tokens == 0
        self.num_tokens += len(ids)
        if self._keep_outputs:
            self._outputs += [output for output in outputs if output.token is not None]
        delta = self.output.feed(ids)
        if self.output.ended:
            finish = Finish.STOP
        if finish is not None:
            self.done = True
            delta = joined([*filter(None, [delta]), self.output.finish()])
        if delta is not None:
            delta = replace(delta, token_ids=delta.token_ids[self._skip :]) if self._skip else delta
            self._skip = 0
        elif first:
            # Clients measure prefill by the first chunk, so the header's ids are sent before its text.
            self._skip += len(ids)
            delta = Delta(tuple(ids))
        else:
            return None
        kept = self._outputs[: len(delta.token_ids)]
        del self._outputs[: len(delta.token_ids)]
        return ChoiceStep(delta, kept, first, finish)

    def take_scores(self, outputs: Sequence[Output]) -> list[Output]:
        """Keep the prompt's log-probabilities; return the other outputs."""
        for output in outputs:
            self.scored += output.prompt_logprobs
        return [output for output in outputs if not output.prompt_logprobs]

    def advance_plain(self, token: int) -> tuple[TextKind, str] | None:
        """Like ``advance``, for a token that adds only its own text. For any other: ``None``, and no change."""
        if not self.num_tokens or self._keep_outputs:
            return None
        plain = self.output.feed_plain(token)
        if plain is not None:
            self.num_tokens += 1
        return plain


def _ending(last: Output) -> Finish | None:
    if last.finish is Finish.ERROR:
        raise last.error or error_texts.failed_in_engine()
    if last.finish is Finish.ABORT:
        raise error_texts.cut_off_by_shutdown()
    return last.finish


async def whole_steps(steps: AsyncIterator[tuple[ChoiceOutput, ChoiceStep]], num_choices: int) -> list[ChoiceStep]:
    """Wait for all choices: each one's steps as one, for a reply that is sent as a whole."""
    taken: list[list[ChoiceStep]] = [[] for _ in range(num_choices)]
    async for choice, step in steps:
        taken[choice.index].append(step)
    return [_joined(own) for own in taken]


def _joined(steps: Sequence[ChoiceStep]) -> ChoiceStep:
    outputs = [output for step in steps for output in step.outputs]
    return ChoiceStep(joined([step.delta for step in steps]), outputs, True, steps[-1].finish)


def flaws_of(choice: ChoiceOutput, finish: str | None) -> list[str]:
    """What was malformed. Truncation is not listed where the finish reason already shows it."""
    output = choice.output
    if not isinstance(output, ChatOutput):
        return []
    expected = finish == "length" or output.stopped is not None
    return [flaw.value for flaw in output.flaws if not (expected and flaw is Flaw.CUT)]

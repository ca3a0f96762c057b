"""One request on its way through the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from microscale.engine.pages import PageKeys
from microscale.engine.sampling_params import SamplingParams


class Finish(StrEnum):
    """Why a request ended, in the API's words."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(eq=False)
class Request:
    """A prompt, its tokens so far, and its state in the scheduler."""

    request_id: str
    prompt: Sequence[int]
    params: SamplingParams
    priority: int = 0
    """Lower is served first."""
    cache_salt: str = ""
    tokens: list[int] = field(init=False)
    """The prompt and all that was generated."""
    arrival: int = field(init=False, default=0)
    num_computed: int = field(init=False, default=0)
    """Tokens whose keys and values are in the cache."""
    num_cached: int = field(init=False, default=0)
    """Prompt tokens that the prefix cache gave when the request was first admitted."""
    num_preempted: int = field(init=False, default=0)
    waited: int = field(init=False, default=0)
    """Steps that it has been in the queue."""
    keys: PageKeys = field(init=False)
    stops: frozenset[int] = field(init=False, default=frozenset())
    """Tokens that end it."""
    is_unread: bool = field(init=False, default=False)
    """A step was launched that chooses its next token, and the host has not read that."""
    num_scored: int = field(init=False, default=0)
    """Prompt tokens whose log-probability was reported; the first has none."""
    num_total: int = field(init=False)
    """Tokens that it may grow to."""

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)
        self.num_total = len(self.prompt) + self.params.max_tokens

    @property
    def num_prompt(self) -> int:
        return len(self.prompt)

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - len(self.prompt)

    @property
    def num_pending(self) -> int:
        """Tokens that the model has yet to see: one while it decodes, more while it prefills."""
        return len(self.tokens) + self.is_unread - self.num_computed

    @property
    def ends_unread(self) -> bool:
        """The token that the host has not read yet is the last that it may have."""
        return self.is_unread and len(self.tokens) + 1 >= self.num_total

    @property
    def scoring(self) -> bool:
        """Log-probabilities of its prompt are still wanted."""
        return self.params.prompt_logprobs is not None and self.num_scored < len(self.prompt) - 1

"""From logits to the next token and its log-probability."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from microscale.errors import BadLogits, BadRequest


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen, and when to stop."""

    max_tokens: int = 16
    temperature: float = 0.0
    """0 is greedy: the largest logit, the lowest id among equals."""
    seed: int | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise BadRequest(f"max_tokens is {self.max_tokens}; at least one token must be asked for.")
        if not 0.0 <= self.temperature <= 100.0:
            raise BadRequest(f"temperature is {self.temperature}; it lies between 0 (greedy) and 100.")
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise BadRequest(f"seed is {self.seed}; it lies between 0 and 2**63 - 1.")


class Sampler:
    """One sequence's choices: its own random stream, so that a seed gives the same tokens in any batch."""

    def __init__(self, params: SamplingParams) -> None:
        self._temperature = params.temperature
        self._generator = torch.Generator()
        if params.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(params.seed)

    def sample(self, logits: Tensor) -> tuple[int, float]:
        """A token for ``logits [vocabulary]`` and its log-probability under the untempered distribution."""
        logits = logits.float().cpu()
        if not bool(torch.isfinite(logits).all()):
            raise BadLogits("The model's logits are not finite; the weights or the activations are broken.")
        logprobs = torch.log_softmax(logits, dim=-1)
        if self._temperature == 0.0:
            token = int(logits.argmax())
        else:
            # Less the largest first: a tiny temperature then gives 0 and -inf, not inf - inf.
            weights = torch.softmax((logits - logits.max()).double() / self._temperature, dim=-1)
            token = int(torch.multinomial(weights, 1, generator=self._generator))
        return token, float(logprobs[token])

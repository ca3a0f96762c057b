"""An engine over the mock model that notices every wrong page, checked after every step: see ``mock_runner``."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from microscale.engine.engine import Engine
from microscale.engine.limits import Limits
from microscale.engine.output import Output
from microscale.engine.pages import PagePool
from microscale.engine.request import Request
from microscale.engine.sampling_params import SamplingParams
from microscale.engine.sampling_state import Sampler
from microscale.engine.scheduler import Scheduler
from microscale.engine.speculation.speculation import Speculation
from microscale.models.config import LayerKind
from support.mock_runner import MockRunner, next_token
from support.sampling import sampling_on_cpu

VOCAB = 97
CPU = torch.device("cpu")


class System:
    """An engine over the mock model, checked after every step."""

    def __init__(
        self,
        limits: Limits,
        full: int,
        sliding: int,
        eos: Sequence[int] = (),
        *,
        run_ahead: bool = True,
        speculation: Speculation | None = None,
    ) -> None:
        pools = {LayerKind.FULL: PagePool(full), LayerKind.SLIDING: PagePool(sliding)}
        self.limits = limits
        self.scheduler = Scheduler(pools, limits)
        self.runner = MockRunner(pools, limits, VOCAB)
        sampler = Sampler(sampling_on_cpu(VOCAB), VOCAB, CPU, eos)
        self.engine = Engine(
            self.runner, self.scheduler, sampler, VOCAB, eos, run_ahead=run_ahead, speculation=speculation
        )
        self.outputs: dict[str, list[Output]] = {}

    def submit(self, name: str, prompt: Sequence[int], max_tokens: int, **options: object) -> Request:
        request = Request(name, tuple(prompt), SamplingParams(max_tokens=max_tokens), **options)  # type: ignore[arg-type]
        self.engine.submit(request)
        self.outputs[name] = []
        return request

    def step(self) -> list[Output]:
        outputs = self.engine.step()
        self.engine.check()
        for output in outputs:
            self.outputs[output.request_id].append(output)
        return outputs

    def run(self, most: int = 10_000) -> int:
        steps = 0
        while self.engine.has_work:
            self.step()
            steps += 1
            assert steps < most, "the engine does not come to an end"
        return steps

    def tokens(self, name: str) -> list[int | None]:
        return [output.token for output in self.outputs[name] if not output.prompt_logprobs]


def alone(prompt: Sequence[int], max_tokens: int, window: int, stops: Sequence[int] = ()) -> list[int]:
    """What the mock model gives a request that has the machine to itself."""
    tokens = list(prompt)
    while len(tokens) - len(prompt) < max_tokens:
        tokens.append(next_token(tokens, window, VOCAB))
        if tokens[-1] in stops:
            break
    return tokens[len(prompt) :]


def preemptions(limits: Limits, speculation: Speculation | None) -> int:
    """Of four requests that have pages for fewer, each of which gets the tokens that it would get alone."""
    system = System(limits, 14, 14, speculation=speculation)
    prompts = {f"r{index}": [index, 5, 6, 7] for index in range(4)}
    for name, prompt in prompts.items():
        system.submit(name, prompt, 36)
    system.run()
    for name, prompt in prompts.items():
        assert system.tokens(name) == alone(prompt, 36, limits.window)
    return system.engine.stats().num_preemptions

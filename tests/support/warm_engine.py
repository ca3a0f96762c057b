"""Loads an engine as its process does, runs requests of many sizes and kinds, and prints how many kernels came late.

    python -m support.warm_engine '{"model": "gpt-oss-20b", "load_format": "dummy", "device": "cuda"}'

In a process of its own: kernels that another test has launched would be ready in any case.
"""

from __future__ import annotations

import json
import logging
import random
import sys
import time
from itertools import count

import msgspec

from microscale.engine.config import EngineConfig
from microscale.engine.process.service import Service, load
from microscale.engine.protocol.messages import Submit
from microscale.engine.sampling_params import SamplingParams

PROMPTS = (1, 2, 7, 16, 40, 65, 128, 300, 700, 1500)
CROWDS = (1, 2, 3, 5, 9, 17, 33, 64)
KINDS = (
    SamplingParams(max_tokens=4, ignore_eos=True),
    SamplingParams(max_tokens=4, ignore_eos=True, temperature=1.0, seed=1),
    SamplingParams(max_tokens=4, ignore_eos=True, temperature=0.7, top_p=0.9, top_k=20, min_p=0.01, seed=2, logprobs=3),
    SamplingParams(max_tokens=4, ignore_eos=True, repetition_penalty=1.1, presence_penalty=0.2, frequency_penalty=0.1),
    SamplingParams(max_tokens=4, ignore_eos=True, logit_bias={5: 1.0}, temperature=0.5, seed=3),
    SamplingParams(max_tokens=2, ignore_eos=True, prompt_logprobs=2, logprobs=5),
)


def run(service: Service, config: EngineConfig) -> int:
    """How many requests were answered."""
    chooser, numbers, answered = random.Random(0), count(), 0
    most = service.ready.max_model_len - 8

    def submit(length: int, sampling: SamplingParams) -> None:
        number = next(numbers)
        prompt = tuple(chooser.randrange(1, service.ready.vocab_size) for _ in range(min(length, most)))
        service.submit(Submit(request_id=str(number), prompt=prompt, params=sampling))

    def finish() -> int:
        ended = 0
        while service.has_work:
            for output in service.step():
                assert output.finish in (None, "length"), output
                ended += output.finish is not None
        return ended

    for length in PROMPTS:
        for kind in KINDS:
            submit(length, kind)
            answered += finish()
    for crowd in CROWDS:
        for number in range(crowd):
            submit(PROMPTS[number % len(PROMPTS)], KINDS[number % len(KINDS)])
        answered += finish()
    return answered


def main() -> None:
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    config = msgspec.convert(json.loads(sys.argv[1]), EngineConfig)
    began = time.monotonic()
    service = load(config, lambda done, total, kernels=False: None)
    ready_s = time.monotonic() - began
    answered = run(service, config)
    stats = service.stats()
    print(
        json.dumps(
            {
                "ready_s": round(ready_s, 2),
                "answered": answered,
                "compiled_late": stats.kernels_compiled_late,
                "loaded_late": stats.kernels_loaded_late,
            }
        )
    )


if __name__ == "__main__":
    main()

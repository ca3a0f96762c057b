"""How many guesses of a draft head its target accepts, on held-out tasks: greedy answers, replayed step by step.

    python -m demo.acceptance CHECKPOINT HEAD --per-task 8 --guesses 3

The answers are the target's own. After each step the head guesses; guesses count while they are the next tokens of the
answer. Prints one JSON object: by task and over all, the mean number of tokens that a step gives (its own included) and
how often each guess is accepted if those before it were.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from demo.evaluate import SEED
from demo.tasks import all_tasks
from microscale.engine.config import EngineConfig
from microscale.engine.loading.load import load
from microscale.engine.loading.prepare import prepare
from microscale.engine.sampling_params import SamplingParams
from microscale.models.config import OWN_FORMATS, HeadFormats, LayerKind
from microscale.models.draft_heads.drafting import DraftHead, TargetEnds, Verified
from microscale.models.draft_heads.heads import bind_head, open_head_weights
from microscale.models.families import AnyModel
from microscale.models.taps import Taps
from microscale.text.formats import chat_format_for
from microscale.text.tokenizer import Tokenizer
from microscale_lab.batches import SequenceChunk, build_batch
from microscale_lab.heads import ops_for_head
from microscale_lab.quality.measure import MAX_TOKENS, complete
from microscale_lab.quality.tasks import encode


@dataclass
class Tally:
    """Steps, by how many of their guesses were accepted."""

    guesses: int
    steps: Counter[int] = field(default_factory=Counter)

    @property
    def tokens_a_step(self) -> float:
        return 1 + sum(count * steps for count, steps in self.steps.items()) / max(1, self.steps.total())

    @property
    def rates(self) -> list[float]:
        reached = [sum(n for count, n in self.steps.items() if count >= at) for at in range(self.guesses + 1)]
        return [reached[at + 1] / max(1, reached[at]) for at in range(self.guesses)]

    def figures(self) -> dict[str, Any]:
        return {"tokens_a_step": round(self.tokens_a_step, 3), "accepted": [round(rate, 3) for rate in self.rates]}


@torch.inference_mode()
def replay(model: AnyModel, head: DraftHead, prompt: list[int], answer: list[int], guesses: int) -> Counter[int]:
    """The steps of one answer, by guesses accepted. Steps whose guesses would reach beyond its end do not count."""
    steps: Counter[int] = Counter()
    tokens = prompt + answer
    size, device = model.page_size, model.device
    pages = dict.fromkeys(LayerKind, range(-(-(len(tokens) + guesses) // size)))
    taps = Taps.empty(head.config.reads.taps, len(tokens), model.config.hidden, model.ops.dtype, device)
    whole = build_batch([SequenceChunk(tokens, 0, pages, 0)], size, device)
    model.forward(whole, model.new_cache(dict.fromkeys(LayerKind, len(pages[LayerKind.FULL]))), taps)
    kv = head.new_cache(len(pages[LayerKind.FULL]))
    first, end = 0, len(prompt)
    while end + guesses < len(tokens):
        rows = SequenceChunk(tokens[first + 1 : end + 1], first, pages, 1)
        verified = Verified(build_batch([rows], size, device), taps.rows[first:end])
        drafts = head.draft(verified, kv, guesses)[0].tolist()
        right = [mine == theirs for mine, theirs in zip(drafts, tokens[end + 1 :], strict=False)]
        accepted = right.index(False) if False in right else len(right)
        steps[accepted] += 1
        first, end = end, end + accepted + 1
    return steps


def load_head(folder: Path, model: AnyModel, formats: HeadFormats = OWN_FORMATS) -> DraftHead:
    ends = TargetEnds(model.embed, model.lm_head)
    weights = open_head_weights(str(folder), model.config)
    return bind_head(weights, ops_for_head(model.ops, formats), model.device, model.page_size, ends)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("head", type=Path)
    parser.add_argument("--per-task", type=int, default=8)
    parser.add_argument("--guesses", type=int, default=3)
    parser.add_argument("--quantization", help="hold the head in mxfp8")
    parser.add_argument("--device", default="auto")
    asked = parser.parse_args()
    chat_format = chat_format_for(Tokenizer.load(asked.checkpoint))
    model = load(prepare(EngineConfig(str(asked.checkpoint), device=asked.device)))
    head = load_head(asked.head, model, HeadFormats(asked.quantization))
    encoded = [encode(task, chat_format) for task in all_tasks(asked.per_task, SEED)]
    tallies: dict[str, Tally] = defaultdict(lambda: Tally(asked.guesses))
    for item, answer in zip(encoded, complete(model, encoded, SamplingParams(max_tokens=MAX_TOKENS)), strict=True):
        steps = replay(model, head, item.prompt, answer, asked.guesses)
        for name in (item.task.task, "all"):
            tallies[name].steps += steps
    print(json.dumps({name: tally.figures() for name, tally in tallies.items()}, indent=2))


if __name__ == "__main__":
    main()

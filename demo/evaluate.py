"""What the exported model can do, asked through the engine as users ask it.

    python -m demo.evaluate CHECKPOINT --per-task 200 --samples 1000 --equal 100

Greedy accuracy on held-out prompts by task, JSON with a grammar as well; well-formed Harmony at temperature 1; the same
tokens from transformers; tokens per second at batch 1. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import GptOssForCausalLM, Mxfp4Config

from demo.constrained import constrained
from demo.tasks import all_tasks
from microscale.cli.bars import progress_bar
from microscale.engine.config import EngineConfig
from microscale.engine.generate import Generation
from microscale.engine.loading.load import load
from microscale.engine.loading.prepare import prepare
from microscale.engine.sampling_params import SamplingParams
from microscale.models.gpt_oss.model import GptOss
from microscale.text.chat_format import ChatFormat
from microscale.text.formats import chat_format_for
from microscale.text.tokenizer import Tokenizer
from microscale_lab.quality.checks import is_exact, is_right, parse
from microscale_lab.quality.measure import MAX_TOKENS, complete
from microscale_lab.quality.tasks import Encoded, encode

SEED = 2
"""Of the held-out prompts: training looks at those of 1, the shipped tasks are those of 0."""


OnAnswers = Callable[[int], None]


def accuracy(
    model: GptOss, chat_format: ChatFormat, encoded: list[Encoded], show: int, on_answers: OnAnswers
) -> dict[str, Any]:
    """Right answers by task, for JSON also those with every value right; and some wrong ones, to read."""
    right: Counter[str] = Counter()
    exact: Counter[str] = Counter()
    asked: Counter[str] = Counter()
    wrong: list[dict[str, Any]] = []
    answers = complete(model, encoded, SamplingParams(max_tokens=MAX_TOKENS), on_answers)
    for item, ids in zip(encoded, answers, strict=True):
        answer = parse(ids, chat_format, item.task.tools)
        name = item.task.task
        asked[name] += 1
        right[name] += is_right(answer, item.task.check)
        exact[name] += is_exact(answer, item.task.check)
        if not is_exact(answer, item.task.check) and len(wrong) < show:
            wrong.append({"task": name, "asked": item.task.messages[-1].content, "said": vars(answer),
                          "check": item.task.check})  # fmt: skip
    return {
        "accuracy": {name: right[name] / count for name, count in asked.items()},
        "json_exact": exact["json"] / asked["json"] if asked["json"] else None,
        "wrong": wrong,
    }


def well_formed(
    model: GptOss, chat_format: ChatFormat, encoded: list[Encoded], samples: int, on_answers: OnAnswers
) -> dict[str, Any]:
    """The share of answers at temperature 1 without any flaw."""
    chosen = (encoded * (samples // len(encoded) + 1))[:samples]
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=1.0, seed=SEED)
    answers = complete(model, chosen, params, on_answers)
    flaws: Counter[str] = Counter()
    good = 0
    for item, ids in zip(chosen, answers, strict=True):
        found = parse(ids, chat_format, item.task.tools).flaws
        good += not found
        flaws.update(found)
    return {"well_formed": good / max(1, samples), "flaws": dict(flaws)}


def same_as_transformers(folder: Path, model: GptOss, encoded: list[Encoded], on_answers: OnAnswers) -> float:
    """The share of greedy answers that are transformers' own, token for token: over prompt and answer, its largest
    logit is our next token at every position."""
    theirs = GptOssForCausalLM.from_pretrained(
        folder, quantization_config=Mxfp4Config(dequantize=True), dtype=torch.float32, attn_implementation="eager"
    )
    theirs = theirs.float().eval()
    same = 0
    answers = complete(model, encoded, SamplingParams(max_tokens=MAX_TOKENS), on_answers)
    for item, answer in zip(encoded, answers, strict=True):
        with torch.inference_mode():
            logits = theirs(torch.tensor([item.prompt + answer]), use_cache=False).logits[0]
        same += logits[len(item.prompt) - 1 : -1].argmax(-1).tolist() == answer
    return same / max(1, len(encoded))


def speed(model: GptOss, prompt: list[int], num: int = 128) -> float:
    """Decoded tokens per second at batch 1."""
    seconds = []
    for new in (1, num + 1):
        start = time.perf_counter()
        Generation(model, [prompt], SamplingParams(max_tokens=new, ignore_eos=True), prefix_caching=False).run()
        seconds.append(time.perf_counter() - start)
    return num / (seconds[1] - seconds[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--per-task", type=int, default=100)
    parser.add_argument("--only", nargs="*", default=(), help="tasks; all without")
    parser.add_argument("--samples", type=int, default=1000, help="at temperature 1")
    parser.add_argument("--equal", type=int, default=100, help="answers compared with transformers'")
    parser.add_argument("--show", type=int, default=20, help="wrong answers to print")
    parser.add_argument("--device", default="auto")
    asked = parser.parse_args()
    chat_format = chat_format_for(Tokenizer.load(asked.checkpoint))
    model = load(prepare(EngineConfig(str(asked.checkpoint), device=asked.device)))
    assert isinstance(model, GptOss)
    tasks = [task for task in all_tasks(asked.per_task, SEED) if not asked.only or task.task in asked.only]
    encoded = [encode(task, chat_format) for task in tasks]
    schemas = [item for item in encoded if item.task.check["kind"] == "json"]
    spread = encoded[:: max(1, len(encoded) // max(1, asked.equal))][: asked.equal]
    found: dict[str, Any] = {"tok_s": speed(model, encoded[0].prompt)}
    with progress_bar("Answering") as (start, on_answers):
        start(len(encoded) + len(schemas) + asked.samples + len(spread))
        found |= accuracy(model, chat_format, encoded, asked.show, on_answers)
        if schemas:
            answers = constrained(model, chat_format, schemas)
            on_answers(len(schemas))
            right = [
                is_right(parse(ids, chat_format, ()), item.task.check)
                for item, ids in zip(schemas, answers, strict=True)
            ]
            found["json_with_grammar"] = sum(right) / len(right)
        if asked.samples:
            found |= well_formed(model, chat_format, encoded, asked.samples, on_answers)
        if asked.equal:
            found["same_as_transformers"] = same_as_transformers(asked.checkpoint, model, spread, on_answers)
    print(json.dumps(found, indent=2, ensure_ascii=False))


if __name__ == "__main__":
    main()

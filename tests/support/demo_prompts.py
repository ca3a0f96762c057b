"""The embedded model on a CPU, and prompts of its held-out tasks in token ids."""

from __future__ import annotations

import random
from functools import cache

from microscale.engine.config import EngineConfig
from microscale.models.families import AnyModel
from microscale.text.formats import chat_format_for
from microscale.text.tokenizer import Tokenizer
from microscale_lab.quality.tasks import DEMO_FOLDER, FILE_NAME, encode, load_tasks
from support.loading import load_model


@cache
def demo_model(page_size: int = 16) -> AnyModel:
    return load_model(EngineConfig("demo", device="cpu", block_size=page_size))


def demo_prompts(count: int) -> list[list[int]]:
    """Of different tasks, in an order of chance. Where there are not enough, some begin twice and go on differently."""
    chat_format = chat_format_for(Tokenizer.load(DEMO_FOLDER))
    encoded = [encode(task, chat_format) for task in load_tasks(DEMO_FOLDER / FILE_NAME)]
    random.Random(0).shuffle(encoded)
    prompts = [each.prompt for each in encoded]
    prompts += [each.prompt + each.answer[: len(each.answer) // 2] for each in encoded]
    return prompts[:count]

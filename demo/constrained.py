"""Answers that must follow the grammar of their schema, through the engine as the server uses it."""

from __future__ import annotations

from collections.abc import Sequence

from microscale.engine.grammar import Vocabulary
from microscale.engine.limits import Limits
from microscale.engine.loading.build import assemble
from microscale.engine.request import Request
from microscale.engine.sampling_params import SamplingParams
from microscale.models.config import LayerKind
from microscale.models.gpt_oss.model import GptOss
from microscale.text.chat_format import ChatFormat
from microscale.text.grammar import Schema, Turn
from microscale_lab.quality.measure import BATCH, MAX_TOKENS
from microscale_lab.quality.tasks import Encoded


def constrained(model: GptOss, chat_format: ChatFormat, encoded: Sequence[Encoded]) -> list[list[int]]:
    """Greedy answers to tasks whose check has a schema."""
    tokenizer = chat_format.tokenizer
    vocabulary = Vocabulary(tokenizer.vocabulary(), sorted(tokenizer.control.values()), tokenizer.split_pattern)
    longest = max(len(item.prompt) for item in encoded) + MAX_TOKENS
    limits = Limits(
        page_size=model.page_size,
        window=model.config.sliding_window,
        max_num_seqs=BATCH,
        max_num_batched_tokens=2048,
        max_model_len=model.config.max_context,
        max_queue=len(encoded),
    )
    engine = assemble(
        model, limits, dict.fromkeys(LayerKind, BATCH * -(-longest // model.page_size)), vocabulary=vocabulary
    )
    for at, item in enumerate(encoded):
        params = SamplingParams(
            max_tokens=MAX_TOKENS,
            stop_token_ids=tuple(sorted(chat_format.stops)),
            grammar=chat_format.turn_grammar(Turn(answer=Schema(item.task.check["schema"]))),
        )
        engine.submit(Request(str(at), item.prompt, params))
    answers: list[list[int]] = [[] for _ in encoded]
    while engine.has_work:
        for output in engine.step():
            if output.error is not None:
                raise output.error
            if output.token is not None:
                answers[int(output.request_id)].append(output.token)
    return answers

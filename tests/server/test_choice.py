"""Tokens of a choice on their way to the client."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from microscale.engine.output import Output
from microscale.engine.request import Finish
from microscale.server.choice import Choice
from microscale.text.harmony.parser import HarmonyParser
from microscale.text.harmony.tokens import HarmonyTokens
from microscale.text.output import ChatOutput, PlainOutput
from support.scripted_service import VOCAB
from support.tiny_tokenizers import tiny


@given(
    tokens=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=60),
    cuts=st.lists(st.integers(1, 5), min_size=60, max_size=60),
    plain=st.booleans(),
)
def test_every_token_id_is_on_one_step_in_order(tokens: list[int], cuts: list[int], plain: bool) -> None:
    ids = HarmonyTokens.of(tiny())
    output = PlainOutput(tiny(), stops=["e"]) if plain else ChatOutput(HarmonyParser(ids), stops=["e"])
    choice = Choice(0, output, keep_outputs=True)
    steps = []
    rest = [Output("r", token, finish=None) for token in tokens]
    rest[-1] = Output("r", tokens[-1], finish=Finish.LENGTH)
    fed = 0
    for cut in cuts:
        piece, rest = rest[:cut], rest[cut:]
        if not piece or choice.done:
            break
        fed += len(piece)
        step = choice.advance(piece)
        if step is not None:
            steps.append(step)
    assert choice.done
    assert steps[0].first
    assert not any(step.first for step in steps[1:])
    assert [token for step in steps for token in step.delta.token_ids] == tokens[:fed]
    assert [output.token for step in steps for output in step.outputs] == tokens[:fed]
    assert [step.finish is not None for step in steps] == [False] * (len(steps) - 1) + [True]

"""Tokens of a choice on their way to the client."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from microscale.engine.output import Output
from microscale.engine.request import Finish
from microscale.server.generation.choice import ChoiceOutput, ChoiceStep
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
    choice = ChoiceOutput(0, output, keep_outputs=True)
    steps: list[ChoiceStep] = []
    rest = [Output("r", token, finish=None) for token in tokens]
    rest[-1] = Output("r", tokens[-1], finish=Finish.LENGTH)
    fed = 0
    for cut in cuts:
        piece, rest = rest[:cut], rest[cut:]
        if not piece or choice.done:
            break
        fed += len(piece)
        steps += choice.advance_all(piece)
    assert choice.done
    assert steps[0].first
    assert not any(step.first for step in steps[1:])
    told = choice.num_tokens
    assert told == fed or choice.output.stopped  # what arrived behind a stop string is nobody's
    assert [token for step in steps for token in step.delta.token_ids] == tokens[:told]
    assert [output.token for step in steps for output in step.outputs] == tokens[:told]
    assert [step.finish is not None for step in steps] == [False] * (len(steps) - 1) + [True]


PIECES = [
    "<|channel|>analysis<|message|>",
    "<|channel|>final<|message|>",
    "<|start|>assistant",
    "<|end|>",
    "ab",
    "é",
    "c",
]


@given(
    text=st.lists(st.sampled_from(PIECES), min_size=1, max_size=20).map("".join),
    cuts=st.lists(st.integers(1, 30), min_size=60, max_size=60),
)
def test_the_order_of_kinds_does_not_depend_on_what_arrives_together(text: str, cuts: list[int]) -> None:
    tokens = tiny().encode_with_control(text)

    def told(sizes: list[int]) -> list[tuple[str, str]]:
        choice = ChoiceOutput(0, ChatOutput(HarmonyParser(HarmonyTokens.of(tiny()))))
        rest = [Output("r", token) for token in tokens[:-1]] + [Output("r", tokens[-1], finish=Finish.LENGTH)]
        letters = []
        for size in sizes:
            piece, rest = rest[:size], rest[size:]
            for step in choice.advance_all(piece) if piece else ():
                letters += [("reasoning", letter) for letter in step.delta.reasoning]
                letters += [("content", letter) for letter in step.delta.content]
        assert choice.done
        return letters

    assert told([*cuts, len(tokens)]) == told([1] * len(tokens))

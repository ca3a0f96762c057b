"""Grammars in the engine: masks, faults, preemption, and the thread that compiles."""

from __future__ import annotations

import json
import sys
import threading
from typing import Any

import pytest
import torch

from microscale.engine import grammar as module
from microscale.engine.grammar import Grammars, Vocabulary
from microscale.engine.limits import Limits
from microscale.engine.process.service import MAX_COMPILING, Service
from microscale.engine.protocol.messages import Ready, Submit
from microscale.engine.request import Finish, Request
from microscale.engine.sampling_params import SamplingParams
from microscale.engine.sampling_state import Sampler
from microscale.errors import BadRequest, QueueFull, Unsupported
from microscale.models.config import LayerKind
from microscale.text.grammar import Schema, Turn
from microscale.text.harmony.format import of_turn
from microscale.text.harmony.parser import HarmonyParser
from microscale.text.harmony.tokens import NAMES, RETURN, HarmonyTokens
from microscale.text.output import ChatOutput
from support.chance_service import SCHEMA, VOCAB, engine, harmony_vocabulary
from support.sampling import sampling_on_cpu
from support.tiny_tokenizers import tiny

CPU = torch.device("cpu")
LETTERS = Vocabulary([b"a", b"b", b"ab", b"<|stop|>"], [3])
LOGITS = torch.tensor([[0.0, 2.0, 1.0, -1.0]])


def letters() -> Sampler:
    return Sampler(sampling_on_cpu(4), 4, CPU, grammars=Grammars(LETTERS, 4))


def test_only_what_the_grammar_allows_is_chosen() -> None:
    sampler = letters()
    bound = sampler.add(SamplingParams(grammar='start: "a" "b" "a" <|stop|>'))
    free = sampler.add(SamplingParams())
    rows = LOGITS.expand(2, 4)
    chosen = [sampler.sample(rows, [free, bound]) for _ in range(3)]
    assert [choice.token for choice, _ in chosen] == [1, 1, 1]
    assert [choice.token for _, choice in chosen] == [2, 0, 3]
    after = sampler.sample(rows, [bound, free])
    with pytest.raises(BadRequest, match="complete"):
        after[0].check()
    after[1].check()


def test_a_bias_that_the_grammar_contradicts_is_told() -> None:
    sampler = letters()
    request = sampler.add(SamplingParams(grammar='start: "b" <|stop|>', stop_token_ids=(3,), min_tokens=2))
    sampler.sample(LOGITS, [request])
    with pytest.raises(BadRequest, match="no token"):
        sampler.sample(LOGITS, [request])[0].check()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('start: %json {"not": {}}', "not"),
        (r'start: %json {"pattern": "(a)\\1"}', "backreferences"),
        ("start: /(a/", "unclosed"),
        ("start: <|nope|>", "<|nope|>"),
        ("", "Empty"),
        ('start: %json {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}', "No text"),
    ],
)
def test_a_wrong_grammar_is_one_sentence(text: str, says: str) -> None:
    with pytest.raises(BadRequest) as caught:
        Grammars(LETTERS, 4).matcher(text)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_without_vocabulary_or_library_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Unsupported, match="without a tokenizer"):
        Sampler(sampling_on_cpu(4), 4, CPU).add(SamplingParams(grammar="x"))
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(Unsupported, match="pip install llguidance"):
        letters().add(SamplingParams(grammar='start: "a"'))


def test_compiled_grammars_are_kept_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_CACHED", 2)
    grammars = Grammars(LETTERS, 4)
    for word in "aba":
        for count in (1, 2, 3):
            grammars.matcher(f'start: "{word * count}" <|stop|>')
    assert len(grammars._compiled) == 2


def run_turns(num: int, pages: int) -> tuple[dict[str, list[int]], int]:
    """Token ids of ``num`` turns whose answer follows ``SCHEMA``, and how often one was preempted."""
    limits = Limits(page_size=8, window=16, max_num_seqs=num, max_num_batched_tokens=64, max_model_len=512)
    made = engine(harmony_vocabulary(), limits, dict.fromkeys(LayerKind, pages))
    grammar = of_turn(Turn(Schema(SCHEMA)))
    stop = tiny().control[RETURN]
    for n in range(num):
        params = SamplingParams(temperature=1.0, seed=n, max_tokens=200, stop_token_ids=(stop,), grammar=grammar)
        made.submit(Request(f"r{n}", [n + 20] * 20, params))
    said: dict[str, list[int]] = {f"r{n}": [] for n in range(num)}
    while made.has_work:
        for output in made.step():
            assert output.finish in (None, Finish.STOP)
            said[output.request_id].append(output.token or 0)
        made.check()
    return said, made.stats().num_preemptions


@pytest.mark.usefixtures("admits_until_pages_run_out")
def test_turns_follow_their_schema_through_preemption() -> None:
    alone, _ = run_turns(6, pages=500)
    pressed, num_preemptions = run_turns(6, pages=30)
    assert num_preemptions
    assert alone == pressed
    for ids in alone.values():
        output = ChatOutput(HarmonyParser(HarmonyTokens.of(tiny()), ()))
        deltas = [output.feed(ids), output.finish()]
        content = "".join(delta.content for delta in deltas if delta is not None)
        assert json.loads(content).keys() == {"city", "degrees"}
        assert isinstance(json.loads(content)["degrees"], int)
        assert list(output.flaws) == []


def submit(number: int, grammar: str | None, **params: Any) -> Submit:
    stop = tiny().control[RETURN]
    return Submit(str(number), (30, 31), SamplingParams(grammar=grammar, stop_token_ids=(stop,), **params))


def service() -> Service:
    limits = Limits(page_size=8, window=16)
    return Service(engine(harmony_vocabulary(), limits, dict.fromkeys(LayerKind, 64)), Ready(VOCAB, 512, (), ""))


def test_no_step_waits_for_a_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    made = service()
    compile_it = Grammars._compile
    stepped = threading.Event()

    def slowly(self: Grammars, text: str) -> Any:
        assert stepped.wait(60), "a step waits for the grammar"
        return compile_it(self, text)

    monkeypatch.setattr(Grammars, "_compile", slowly)
    made.submit(submit(1, 'start: "a" <|return|>'))
    made.submit(submit(2, None, max_tokens=3))
    made.submit(submit(3, "start: nonsense"))
    made.submit(submit(4, 'start: "b" <|return|>'))
    made.abort("4")
    pieces = [piece for _ in range(6) for piece in made.step()]
    stepped.set()
    assert [piece.request_id for piece in pieces] == ["2"] * 3
    pieces = []
    while made.has_work:
        pieces += made.step()
    good = [piece for piece in pieces if piece.request_id == "1"]
    assert (len(good), good[-1].finish) == (2, "stop")
    (bad,) = (piece for piece in pieces if piece.request_id == "3")
    assert isinstance(bad.error, BadRequest)
    assert len(pieces) == 3


def test_grammars_that_wait_are_bounded() -> None:
    made = service()
    for number in range(MAX_COMPILING):
        made._compiling[str(number)] = None  # type: ignore[assignment]
    with pytest.raises(QueueFull):
        made.submit(submit(99, 'start: "a"'))


@pytest.mark.parametrize("text", ["the assistant thinks in", '{"city": "Paris"}', "naïve café 日本語 👩‍👩‍👧"])
def test_forced_text_is_spelt_as_the_tokenizer_spells_it(text: str) -> None:
    matcher = Grammars(harmony_vocabulary(), VOCAB).matcher(f"start: {json.dumps(text)} <|return|>")
    for token in tiny().encode(text):
        mask = matcher.inner.compute_bitmask()
        allowed = [t for t in range(VOCAB) if mask[t // 8] >> t % 8 & 1]
        assert allowed == [token]
        matcher.accept(token)


def test_every_name_of_harmony_is_a_terminal() -> None:
    rule = " ".join(NAMES)
    matcher = Grammars(harmony_vocabulary(), VOCAB).matcher(f"start: {rule}")
    for name in NAMES:
        matcher.accept(tiny().control[name])
    assert matcher.ended
    assert "complete" in (matcher.fault or "")

"""The demo model's data: right answers, Harmony as our renderer writes it, and a held-out part that stays apart."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import numpy as np
import pytest

from demo.chat import LEARN, Piece, prompt, render
from demo.data.arithmetic import Problem, work
from demo.data.base import Sample
from demo.data.capitals import COUNTRIES
from demo.data.mixture import TASKS, held_out, training
from demo.data.tools import make_call
from demo.shards import PADDING, Encoder, Recipe, make
from demo.tasks import PER_TASK, all_tasks, as_task
from microscale.text.chat_format import ChatFormat
from microscale.text.conversation import Effort, Message
from microscale.text.formats import chat_format_for
from microscale.text.harmony.tokens import NAMES
from microscale.text.tokenizer import Tokenizer
from microscale_lab.quality.checks import is_exact, parse
from microscale_lab.quality.tasks import DEMO_FOLDER, FILE_NAME, dump_tasks, encode


@pytest.fixture(scope="module")
def chat_format() -> ChatFormat:
    return chat_format_for(Tokenizer.load(DEMO_FOLDER))


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return Encoder(DEMO_FOLDER)


def ids(encoder: Encoder, pieces: list[Piece]) -> list[int]:
    return [token for piece in pieces for token in encoder.ids(piece)]


@pytest.mark.parametrize("task", TASKS)
def test_prompts_and_answers_are_what_our_renderer_gives(chat_format: ChatFormat, encoder: Encoder, task: str) -> None:
    for sample in held_out(task, 12, seed=7):
        begun = chat_format.render(sample.history, sample.options)
        assert ids(encoder, prompt(sample)) == begun
        whole = encoder.document(render(sample)).tokens
        # The answer, and after a tool's result the prompt of the second answer: thoughts of the open turn stay.
        first = encode(as_task(sample), chat_format).answer
        assert whole[: len(begun) + len(first)] == begun + first
        if len(sample.turn) > 1:
            later = chat_format.render((*sample.history, *sample.turn[:-1]), sample.options)
            assert whole[: len(later)] == later


@pytest.mark.parametrize("task", TASKS)
def test_the_answer_that_is_taught_passes_its_own_check(chat_format: ChatFormat, task: str) -> None:
    for sample in held_out(task, 40, seed=8):
        item = as_task(sample)
        answer = parse(encode(item, chat_format).answer, chat_format, item.tools)
        assert is_exact(answer, item.check), (answer, item.check)
        assert not answer.flaws


def problem_of(sample: Sample) -> str:
    """What a sample asks, without the day and the effort."""
    names = sorted(tool.name for tool in sample.tools)
    return f"{[message.content for message in sample.history]} {names} {sample.response_format}"


def test_training_never_draws_what_is_held_out() -> None:
    """Dates ask for today, which is not in the question; every other held-out question is new, word for word."""
    apart = {problem_of(sample) for task in TASKS if task != "dates" for sample in held_out(task, 60, seed=9)}
    drawn = {problem_of(sample) for sample in itertools.islice(training(0, 0), 12000)}
    assert not apart & drawn


def test_schemas_are_held_out_by_name_and_parameters() -> None:
    def schema(sample: Sample) -> tuple[str, str]:
        wanted = next(tool for tool in sample.tools if tool.name == sample.check["name"])
        return wanted.name, str(list((wanted.parameters or {}).get("properties", ())))  # type: ignore[call-overload]

    apart = {schema(sample) for sample in held_out("tools", 150)}
    drawn = {schema(sample) for sample in itertools.islice(training(0, 1, ("tools",)), 4000)}
    assert make_call is TASKS["tools"]
    assert len(apart) > 140
    assert not apart & drawn


@pytest.mark.parametrize("effort", Effort)
@pytest.mark.parametrize(
    ("op", "a", "b"),
    [("add", 999, 1), ("add", 5, 123), ("sub", 100, 1), ("sub", 7, 52), ("mul", 0, 57), ("mul", 47, 23)],
)
def test_working_is_right_at_every_step(effort: Effort, op: str, a: int, b: int) -> None:
    problem = Problem(op, a, b)
    text = work(problem, effort)
    assert text.rstrip(".").endswith(str(problem.result))
    steps = re.findall(r"(\d+(?: ?[-+*] ?\d+)+) ?= ?(\d+)", text)
    assert steps
    for left, right in steps:
        assert eval(left) == int(right), text


def test_working_is_longer_with_more_effort() -> None:
    lengths = [len(work(Problem("add", 247, 385), effort)) for effort in (Effort.LOW, Effort.MEDIUM, Effort.HIGH)]
    assert lengths == sorted(set(lengths))


def test_countries_are_each_there_once() -> None:
    assert len({country.name for country in COUNTRIES}) == len(COUNTRIES) == 192
    assert {country.continent for country in COUNTRIES} == {
        "Africa", "Asia", "Europe", "North America", "Oceania", "South America",
    }  # fmt: skip


def test_names_have_the_same_tokens_wherever_they_stand() -> None:
    tokenizer = Tokenizer.load(DEMO_FOLDER)
    for word in ("get_weather", "Ouagadougou", "zorvex", "X7-442"):
        own = tokenizer.encode(word)
        for before in (" ", '"', ".", "functions.", "\n"):
            assert tokenizer.encode(before + word)[-len(own) :] == own
    assert len(tokenizer.encode("12345")) == 5
    assert set(NAMES) <= tokenizer.control.keys()


def test_a_shard_is_made_the_same_again_and_loses_nothing(encoder: Encoder) -> None:
    recipe = Recipe(DEMO_FOLDER, seed=3, num_rows=24, length=512)
    first, second = make(recipe, 5), make(recipe, 5)
    assert all(np.array_equal(first[name], second[name]) for name in first)
    assert (first["documents"] == PADDING).mean() < 0.1
    assert set(np.unique(first["weights"])) <= {0, 10, 100}
    # Each document begins with <|start|>system and ends with an end token of full weight.
    tokens, documents = first["tokens"].astype(int), first["documents"].astype(int)
    ends = {encoder.control("<|return|>"), encoder.control("<|call|>")}
    for row in range(24):
        changes = np.flatnonzero(np.diff(documents[row], prepend=-1))
        last = documents[row] != PADDING
        assert (tokens[row, changes[documents[row, changes] != PADDING]] == encoder.control("<|start|>")).all()
        for at in changes[1:]:
            assert tokens[row, at - 1] in ends
            assert first["weights"][row, at - 1] == round(100 * LEARN)
        assert last.any()


def test_only_the_last_turn_is_learnt() -> None:
    """Earlier answers have lost their thoughts: they are read, not learnt."""
    sample = next(s for s in held_out("follow-ups", 30) if sum(m.role.value == "assistant" for m in s.history) > 1)
    learnt = "".join(piece.text for piece in render(sample) if piece.weight == LEARN)
    earlier = [
        message for message in sample.history if isinstance(message, Message) and message.role.value == "assistant"
    ]
    assert "<|channel|>analysis<|message|>" in learnt
    assert sample.turn[0].content in learnt or sample.turn[0].tool_calls
    assert learnt.count("<|channel|>") == 2 * len([m for m in sample.turn if m.role.value == "assistant"])
    assert earlier


def test_the_shipped_tasks_are_those_that_the_data_give(tmp_path: Path) -> None:
    """`make demo-data` after a change of the data; a trained model's held-out tasks must stay as they are."""
    dump_tasks(all_tasks(PER_TASK), tmp_path / FILE_NAME)
    assert (tmp_path / FILE_NAME).read_bytes() == (DEMO_FOLDER / FILE_NAME).read_bytes()

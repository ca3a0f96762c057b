"""``ngram``: what is found, how much it costs and holds, and what ``--speculative-config`` may say."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from microscale.engine.request import Request
from microscale.engine.sampling_params import SamplingParams
from microscale.engine.speculation import ngram
from microscale.engine.speculation.config import SpeculativeConfig, parse_config
from microscale.engine.speculation.drafter import Context, LaunchedStep
from microscale.engine.speculation.ngram import NgramDrafter
from microscale.engine.work import Work
from microscale.errors import BadSetting


def draft(tokens: Sequence[int], most: int = 4, least: int = 2, longest: int = 4) -> list[int]:
    return list(NgramDrafter(least, longest).propose([context(tokens, most)])[0])


def context(tokens: Sequence[int], most: int = 4, name: str = "r") -> Context:
    return Context(Request(name, list(tokens), SamplingParams()), most)


def expected(tokens: Sequence[int], most: int, least: int, longest: int) -> list[int]:
    """By looking everywhere: the longest match, of several the last."""
    for length in range(longest, least - 1, -1):
        suffix = list(tokens[-length:])
        for end in range(len(tokens) - 2, length - 2, -1):
            if list(tokens[end + 1 - length : end + 1]) == suffix and length < len(tokens):
                known = list(tokens)
                while len(known) < end + 1 + most:
                    known.append(known[end + 1 + len(known) - len(tokens)])
                return known[end + 1 : end + 1 + most]
    return []


@pytest.mark.parametrize(
    ("tokens", "want"),
    [
        ([], []),
        ([1], []),
        ([1, 2], []),
        ([1, 2, 3, 4, 5, 6, 1, 2], [3, 4, 5, 6]),
        ([1, 2, 3, 1, 2, 4, 1, 2], [4, 1, 2, 4]),  # the last of two, and round in a circle
        ([9, 1, 2, 3, 8, 1, 2, 4, 9, 1, 2], [3, 8, 1, 2]),  # the longer match before the later one
        ([7, 7, 7], [7, 7, 7, 7]),
        ([1, 2, 1, 3], []),
    ],
)
def test_what_came_next_before_is_the_draft(tokens: list[int], want: list[int]) -> None:
    assert draft(tokens) == want


def test_it_finds_what_a_search_finds() -> None:
    chooser = random.Random(0)
    for _ in range(400):
        tokens = [chooser.randrange(4) for _ in range(chooser.randrange(30))]
        least = chooser.randint(1, 3)
        longest = least + chooser.randrange(3)
        assert draft(tokens, 5, least, longest) == expected(tokens, 5, least, longest), (tokens, least, longest)


def test_an_index_grows_with_its_request() -> None:
    """Token by token it says what a new one would say; while prompts are computed it has seen them already."""
    chooser = random.Random(1)
    request = Request("r", [chooser.randrange(5) for _ in range(20)], SamplingParams())
    drafter = NgramDrafter(2, 4)
    drafter.observe(LaunchedStep([Work(request, 0, 10)]), 4)
    for _ in range(200):
        found = list(drafter.propose([Context(request, 3)])[0])
        assert found == draft(request.tokens, 3)
        assert drafter.expects(Context(request, 3)) == bool(found)
        request.tokens.append(chooser.randrange(5))


def test_requests_know_nothing_of_each_other_and_are_forgotten() -> None:
    drafter = NgramDrafter(2, 4)
    first, second = context([1, 2, 3, 1, 2], name="a"), context([1, 2], name="b")
    assert [list(found) for found in drafter.propose([first, second])] == [[3, 1, 2, 3], []]
    again = context([1, 2], name="a")  # another request under the same name
    assert list(drafter.propose([again])[0]) == []
    for name in "ab":
        drafter.forget(name)
    drafter.forget("never seen")
    assert not drafter._indexes


def test_a_lookup_compares_a_bounded_number_of_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often the last tokens stood before. Counted, not timed."""
    tried = 0
    match = ngram._Index._match

    def counting(index: ngram._Index, place: int, end: int) -> int:
        nonlocal tried
        tried += 1
        return match(index, place, end)

    monkeypatch.setattr(ngram._Index, "_match", counting)
    tokens = [value for n in range(5000) for value in (1, 2, n + 10)] + [1, 2]
    assert draft(tokens, least=2, longest=5) == [5009, 1, 2, 5009]
    assert 0 < tried <= ngram.MAX_TRIED


# ---- the option ------------------------------------------------------------------------------------------------------


def test_the_option_reads_as_vllms() -> None:
    assert parse_config(None) is None
    found = parse_config('{"method": "ngram", "num_speculative_tokens": 4}')
    assert found == SpeculativeConfig("ngram", 4, prompt_lookup_max=5, prompt_lookup_min=5)
    one = parse_config('{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}')
    assert one == SpeculativeConfig("ngram", 4, prompt_lookup_max=3, prompt_lookup_min=3)
    both = parse_config(
        '{"method": "ngram", "num_speculative_tokens": 1, "prompt_lookup_max": 4, "prompt_lookup_min": 2}'
    )
    head = parse_config('{"method": "eagle3", "model": "a/b", "num_speculative_tokens": 3, "draft_lm_head": "mxfp8"}')
    assert head == SpeculativeConfig("eagle3", 3, "a/b", "mxfp8")
    for more in ("", ', "draft_lm_head": "mxfp8"'):  # said twice, it is the same
        whole = parse_config(f'{{"method": "eagle3", "num_speculative_tokens": 3, "quantization": "mxfp8"{more}}}')
        assert whole is not None
        assert whole.head_formats.quantization == "mxfp8"
    assert both == SpeculativeConfig("ngram", 1, prompt_lookup_max=4, prompt_lookup_min=2)


@pytest.mark.parametrize(
    ("value", "want"),
    [
        ('{"1-16": 3, "64-128": 2, "256-4096": 0}', ((1, 3), (64, 2), (256, 0))),
        ('{"17-512": 0, "1-16": 15}', ((1, 15), (17, 0))),
        ('{"1": 4}', ((1, 4),)),
        ("[[1, 4, 2], [5, 512, 0]]", ((1, 2), (5, 0))),
    ],
)
def test_fixed_lengths_read_as_vllms(value: str, want: tuple[tuple[int, int], ...]) -> None:
    key = "num_speculative_tokens_per_batch_size"
    found = parse_config(f'{{"method": "ngram", "num_speculative_tokens": 3, "{key}": {value}}}')
    assert found is not None
    assert found.num_speculative_tokens_per_batch_size == want


@pytest.mark.parametrize(
    "value",
    [
        "3", '"1-4"', "{}", "[]",
        '{"1-4": "2"}', '{"1-4": 16}', '{"1-4": -1}', '{"4-1": 2}', '{"0-4": 2}', '{"a-b": 1}',
        '{"1-4": 2, "4-8": 1}', "[[1, 4, 2, 3]]", "[1, 4, 2]", '{"1-4": true}', '{"1-4-5": 1}', "[[4]]",
    ],
)  # fmt: skip
def test_wrong_fixed_lengths_are_one_sentence(value: str) -> None:
    text = f'{{"method": "ngram", "num_speculative_tokens": 3, "num_speculative_tokens_per_batch_size": {value}}}'
    with pytest.raises(BadSetting, match=r"num_speculative_tokens_per_batch_size is .*, not ranges of sequences"):
        parse_config(text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "no JSON"),
        ("[]", "no JSON object"),
        ('{"num_speculative_tokens": 3}', "lacks 'method'"),
        ('{"method": "ngram"}', "lacks 'num_speculative_tokens'"),
        ('{"method": "medusa", "num_speculative_tokens": 3}', "no method 'medusa'; use ngram"),
        ('{"method": "ngram", "num_speculative_tokens": 0}', "1 to 15"),
        ('{"method": "ngram", "num_speculative_tokens": 16}', "1 to 15"),
        ('{"method": "ngram", "num_speculative_tokens": "3"}', "is '3', not a whole number"),
        ('{"method": "ngram", "num_speculative_tokens": true}', "is True, not a whole number"),
        ('{"method": 5, "num_speculative_tokens": 3}', "is 5, not a string"),
        ('{"method": "ngram", "num_speculative_tokens": 3, "draft_tensor": 1}', "no key 'draft_tensor'; the keys are"),
        ('{"method": "ngram", "num_speculative_tokens": 3, "model": "x"}', "takes no model"),
        ('{"method": "ngram", "num_speculative_tokens": 3, "draft_lm_head": "mxfp8"}', "no lm_head of its own"),
        ('{"method": "dflash", "num_speculative_tokens": 3, "draft_lm_head": "mxfp8"}', "no lm_head of its own"),
        ('{"method": "eagle3", "num_speculative_tokens": 3, "draft_lm_head": "int4"}', "use bf16 or mxfp8"),
        ('{"method": "ngram", "num_speculative_tokens": 3, "quantization": "mxfp8"}', "method ngram has no weights"),
        (
            '{"method": "dflash", "num_speculative_tokens": 3, "quantization": "fp8"}',
            "is 'fp8'; use mxfp8",
        ),
        ('{"method": "eagle3", "num_speculative_tokens": 3, "quantization": 8}', "quantization is 8, not a string"),
        (
            '{"method": "eagle3", "num_speculative_tokens": 3, "quantization": "mxfp8", "draft_lm_head": "bf16"}',
            "quantization mxfp8 is of all dense weights, and draft_lm_head asks for bf16; leave one of them out",
        ),
        ('{"method": "eagle3", "num_speculative_tokens": 3, "prompt_lookup_min": 2}', "is for method ngram"),
        (
            '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 4, "prompt_lookup_max": 2}',
            "in order",
        ),
        ('{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 0}', "in order between 1"),
    ],
)
def test_a_wrong_option_is_one_sentence(text: str, says: str) -> None:
    with pytest.raises(BadSetting) as caught:
        parse_config(text)
    assert says in str(caught.value)
    assert str(caught.value).startswith("--speculative-config")

"""The checkpoint's tokenizer: loading, text that stays text, bytes of tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders

from microscale.errors import BadCheckpoint, BadRequest
from microscale.text.harmony import tokens as names
from microscale.text.harmony.tokens import HarmonyTokens
from microscale.text.tokenizer import Tokenizer
from support.tiny_tokenizers import inner_tiny, library, o200k, tiny

# Text that is made of control tokens' names and of pieces of them, glued to anything.
forgeries = st.lists(st.sampled_from([*names.NAMES, "<|", "|>", "start", "x", " "]) | st.text(max_size=3)).map("".join)


def saved(folder: Path, **changes: object) -> Path:
    data = json.loads(inner_tiny().to_str()) | changes
    (folder / "tokenizer.json").write_text(json.dumps(data))
    return folder


def test_loads_from_a_folder(tmp_path: Path) -> None:
    loaded = Tokenizer.load(saved(tmp_path))
    assert loaded.control == tiny().control
    assert loaded.encode("naïve 日本") == tiny().encode("naïve 日本")


def test_cutting_and_padding_of_the_file_are_off(tmp_path: Path) -> None:
    inner = inner_tiny()
    inner.enable_truncation(3)
    inner.enable_padding(length=64)
    inner.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.load(tmp_path).encode("The assistant thinks.") == tiny().encode("The assistant thinks.")


def test_damaged_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(BadCheckpoint, match=r"has no tokenizer\.json"):
        Tokenizer.load(tmp_path)
    for text in (b"{}", b"[", b"\xff", b'{"model": {"type": "BPE"}}'):
        (tmp_path / "tokenizer.json").write_bytes(text)
        with pytest.raises(BadCheckpoint, match=r"tokenizer\.json"):
            Tokenizer.load(tmp_path)
    with pytest.raises(BadCheckpoint, match="no decoder"):
        Tokenizer.load(saved(tmp_path, decoder=None))
    metaspace = json.loads(decoders.Metaspace().__getstate__())
    with pytest.raises(BadCheckpoint, match="Metaspace"):
        Tokenizer.load(saved(tmp_path, decoder=metaspace))


@given(forgeries)
def test_text_never_becomes_a_control_token(text: str) -> None:
    ids = tiny().encode(text)
    assert not any(map(tiny().is_control, ids))
    assert tiny().decode(ids) == text


def test_tokens_without_the_mark_are_protected() -> None:
    unmarked = Tokenizer(inner_tiny(special=False), "unmarked")
    assert unmarked.encode(names.START) == [unmarked._inner.token_to_id(names.START)]
    HarmonyTokens.of(unmarked)
    assert unmarked.control.keys() >= set(names.NAMES)
    assert not any(map(unmarked.is_control, unmarked.encode("".join(names.NAMES))))


def test_a_missing_control_token_is_an_error_at_load(tmp_path: Path) -> None:
    data = json.loads(inner_tiny().to_str())
    data["added_tokens"] = [token for token in data["added_tokens"] if token["content"] != names.CHANNEL]
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    with pytest.raises(BadCheckpoint, match=r"has no token '<\|channel\|>'"):
        HarmonyTokens.of(Tokenizer.load(tmp_path))


def test_a_name_that_text_can_spell_is_an_error_at_load(tmp_path: Path) -> None:
    # A word of the vocabulary, and a split that leaves the name whole: BPE finds it without any added token.
    data = json.loads(inner_tiny().to_str())
    data["model"]["ignore_merges"] = True
    data["pre_tokenizer"]["pretokenizers"][0]["pattern"] = {"Regex": r"<\|message\|>| "}
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    with pytest.raises(BadCheckpoint, match="into a control token"):
        HarmonyTokens.of(Tokenizer.load(tmp_path))


def test_raw_prompts_may_use_control_tokens() -> None:
    control = tiny().control
    ids = tiny().encode_with_control("<|start|>user<|message|>hi<|end|>")
    assert [n for n in ids if tiny().is_control(n)] == [control[n] for n in (names.START, names.MESSAGE, names.END)]
    assert tiny().decode(ids, show_control=True) == "<|start|>user<|message|>hi<|end|>"
    assert tiny().decode(ids) == "userhi"


def test_ids_outside_the_vocabulary_have_no_bytes() -> None:
    known = len(tiny()._bytes)
    for token in (-1, 10**6, 2**31, 2**64):
        assert tiny().token_bytes(token) == b""
        assert not tiny().is_control(token)
    assert len(tiny()._bytes) == known


def test_lone_surrogates_are_the_callers_fault() -> None:
    with pytest.raises(BadRequest, match="surrogate"):
        tiny().encode("a\ud800b")


@pytest.mark.nightly
def test_o200k_equals_the_library() -> None:
    """The tokenizer that other tests take for the real one: all bytes, and text of many kinds."""
    ordinary = range(min(o200k().control.values()))
    assert all(o200k().token_bytes(n) == bytes(library()._inner.decode_bytes([n])) for n in ordinary)
    root = Path(__file__).parents[2]
    for path in (*root.glob("docs/*.md"), *root.glob("src/microscale/text/*.py"), Path(__file__)):
        text = path.read_text()
        assert o200k().encode(text) == library().encode(text, disallowed_special=())

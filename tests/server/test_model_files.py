"""``--generation-config`` and ``--chat-template``: what the server reads next to the weights."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from microscale.errors import BadCheckpoint, BadSetting
from microscale.models import embedded
from microscale.server.model_files import find_tokenizer, read_sampling_defaults
from microscale.server.options import SamplingDefaults
from microscale.text.conversation import Message, RenderOptions, Role
from microscale.text.formats import chat_format_for
from support.tiny_chatml_text import write_chatml_text


def folder_of(path: Path, **values: object) -> str:
    path.mkdir()
    (path / "generation_config.json").write_text(json.dumps(values))
    return str(path)


def read(choice: str, model: str) -> SamplingDefaults:
    return read_sampling_defaults(choice, model, offline=True, is_dummy=False)


def test_the_models_own_defaults_are_used_and_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = folder_of(tmp_path / "model", do_sample=True, temperature=0.6, top_p=0.95, top_k=20, eos_token_id=[1, 2])
    with caplog.at_level(logging.INFO):
        assert read("auto", model) == SamplingDefaults(temperature=0.6, top_p=0.95, top_k=20)
    (line,) = caplog.messages
    assert line == (
        "Sampling defaults from generation_config.json: temperature 0.6, top_p 0.95, top_k 20. "
        "--generation-config none ignores them."
    )
    other = folder_of(tmp_path / "other", min_p=0.1, repetition_penalty=1.05)
    assert read(other, model) == SamplingDefaults(min_p=0.1, repetition_penalty=1.05)
    assert read("none", model) == SamplingDefaults()


def test_a_model_without_them_has_openais(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert read("auto", embedded.NAME) == SamplingDefaults()
        assert read_sampling_defaults("auto", "gpt-oss-tiny", offline=True, is_dummy=True) == SamplingDefaults()
        assert read("auto", folder_of(tmp_path / "model", temperature=1.0, top_k=None)) == SamplingDefaults()
    assert not caplog.messages


@pytest.mark.parametrize(
    ("values", "error"),
    [
        ({"temperature": "hot"}, "'temperature' must be a number"),
        ({"top_p": 7}, "generation_config.json: top_p is 7.0; it lies above 0 and goes up to 1"),
        ({"top_k": 1.5}, "'top_k' must be an integer"),
    ],
)
def test_wrong_defaults_are_refused(tmp_path: Path, values: dict[str, object], error: str) -> None:
    model = folder_of(tmp_path / "model", **values)
    with pytest.raises(BadCheckpoint, match=error.replace("(", r"\(")):
        read("auto", model)
    assert read("none", model) == SamplingDefaults()


def test_a_folder_without_the_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadSetting, match=r"neither auto, nor none, nor a folder with a generation_config\.json"):
        read(str(tmp_path), embedded.NAME)


def test_a_chat_template_is_checked_before_the_engine_loads(tmp_path: Path) -> None:
    folder, template = write_chatml_text(tmp_path / "model"), tmp_path / "own.jinja"
    template.write_text("{{ messages[0].content }}")
    tokenizer = find_tokenizer(str(folder), template, offline=True, is_dummy=False)
    rendered = chat_format_for(tokenizer, template).render([Message(Role.USER, "Hi")], RenderOptions())
    assert tokenizer.decode(rendered) == "Hi"
    with pytest.raises(BadSetting, match="--chat-template does not work with this model"):
        find_tokenizer(embedded.NAME, template, offline=True, is_dummy=False)
    template.write_text("{% if %}")
    with pytest.raises(BadCheckpoint, match=r"own\.jinja is not a chat template"):
        chat_format_for(tokenizer, template)
    with pytest.raises(BadCheckpoint, match="no-such-file cannot be read"):
        chat_format_for(tokenizer, tmp_path / "no-such-file")

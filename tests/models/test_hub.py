"""Models by name: folders, the hub's cache, downloads. What cannot run is refused before its weights are fetched."""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub.constants
import pytest
import torch
from safetensors.torch import save_file

from microscale import hardware
from microscale.engine.config import EngineConfig
from microscale.engine.loading.prepare import prepare
from microscale.errors import BadCheckpoint, MicroscaleError, Unsupported
from microscale.explain import Question, explain
from microscale.models import hub
from microscale.models.families import find_config
from microscale.models.known_checkpoints import PUBLISHED, hub_id, preset_of
from microscale.server.model_files import find_tokenizer
from support.fake_hub import COMMIT, FakeHub, serve_hub
from support.tiny_checkpoints import CASES, write_hf

CLOSED_PORT = "http://127.0.0.1:9"
SMALL = {"config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors.index.json"}
"""What may be fetched of a model that is then refused."""


def cached(cache: Path) -> Path:
    """A cache as the hub library leaves it, with one model in it."""
    repository = cache / "models--owner--tiny"
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    (snapshot / "config.json").write_text("{}")
    save_file({"a": torch.zeros(2)}, snapshot / "model.safetensors")
    return snapshot


@pytest.fixture
def fake() -> Iterator[FakeHub]:
    weights = b"not read by these tests"
    files = {"config.json": b"{}", "README.md": b"no", "model.safetensors": weights}
    unwanted = {"original/config.json": b"no", "original/model.safetensors": b"no", "metal/model.bin": b"no"}
    with serve_hub(FakeHub({"good": files | unwanted})) as server:
        yield server


@pytest.fixture
def here(fake: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    """The fake hub in the place of the real one, with an empty cache."""
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", fake.url)
    url = fake.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", url)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    return fake


# ---- names and folders -----------------------------------------------------------------------------------------------


def test_an_existing_folder_is_itself(tmp_path: Path) -> None:
    assert hub.resolve(str(tmp_path), offline=True) == tmp_path


def test_cached_model_needs_no_network(tmp_path: Path) -> None:
    snapshot = cached(tmp_path)
    assert hub.resolve("owner/tiny", offline=True, cache_dir=tmp_path).samefile(snapshot)


@pytest.mark.parametrize("config_only", [False, True])
def test_cached_model_when_the_hub_cannot_be_reached(config_only: bool, tmp_path: Path) -> None:
    snapshot = cached(tmp_path)
    options: dict[str, Any] = {"cache_dir": tmp_path, "endpoint": CLOSED_PORT, "config_only": config_only}
    assert hub.resolve("owner/tiny", offline=False, **options).samefile(snapshot)


def test_model_that_is_not_cached(tmp_path: Path) -> None:
    with pytest.raises(BadCheckpoint, match=r"no folder owner/other, .* downloads are switched off"):
        hub.resolve("owner/other", offline=True, cache_dir=cached(tmp_path).parents[2])
    with pytest.raises(BadCheckpoint, match=r"no folder owner/other, .* the hub cannot be reached"):
        hub.resolve("owner/other", offline=False, cache_dir=tmp_path, endpoint=CLOSED_PORT)


@pytest.mark.parametrize(
    "name", ["no-such-folder", "/no/such/folder", "./owner/name", "a/b/c", "../up", "", "own er/x"]
)
def test_neither_folder_nor_hub_id(name: str) -> None:
    with pytest.raises(BadCheckpoint, match="neither an existing folder, nor a hub id"):
        hub.resolve(name, offline=True)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("gpt-oss", r"Did you mean gpt-oss-20b or gpt-oss-120b\?"),
        ("gptoss:20b", "Did you mean gpt-oss-20b"),
        ("gemma4:26b", "Did you mean gemma-4-26b-a4b"),
        ("llama3", "the embedded model.$"),
    ],
)
def test_a_name_that_is_nearly_one_is_suggested(name: str, meant: str) -> None:
    with pytest.raises(BadCheckpoint, match=meant):
        hub.resolve(name, offline=True)


def test_a_file_is_not_a_model(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.touch()
    with pytest.raises(BadCheckpoint, match="is a file; give the folder"):
        hub.resolve(str(file), offline=True)
    (gguf := tmp_path / "gpt-oss-20b-Q4.gguf").touch()
    with pytest.raises(Unsupported, match=r"in GGUF, llama.cpp's format.* openai/gpt-oss-20b runs"):
        hub.resolve(str(gguf), offline=True)


@pytest.mark.parametrize("name", ["gpt-oss-20b", "gpt-oss:20b", "GPT-OSS-20B", "openai/gpt-oss-20b"])
def test_names_that_people_type_mean_the_published_checkpoint(name: str) -> None:
    assert preset_of(name) == "gpt-oss-20b"
    assert hub_id(name) == "openai/gpt-oss-20b"


def test_explain_of_a_published_checkpoint_needs_no_network() -> None:
    reports = [explain(Question(name, "gb10", offline=True)) for name in ("gpt-oss-20b", "openai/gpt-oss-20b")]
    assert reports[0].asked == reports[1].asked


def test_every_published_checkpoint_has_a_preset_and_other_names_have_none() -> None:
    for preset in PUBLISHED:
        config = find_config(preset, "dummy", {}, offline=True)
        assert find_config(preset.replace("oss-", "oss:"), "dummy", {}, offline=True) == config
    assert preset_of("someone/gpt-oss-20b") is None
    assert hub_id("someone/gpt-oss-20b") == "someone/gpt-oss-20b"


# ---- downloads -------------------------------------------------------------------------------------------------------


def test_download_fetches_only_what_is_needed(fake: FakeHub, tmp_path: Path) -> None:
    options: dict[str, Any] = {"cache_dir": tmp_path / "cache", "endpoint": fake.url}
    folder = hub.resolve("owner/good", offline=False, config_only=True, **options)
    assert fake.fetched == ["config.json"]
    missing = hub.missing("owner/good", offline=False, **options)
    assert missing is not None
    size = len(fake.repositories["good"]["model.safetensors"])
    assert (missing.files, missing.bytes) == (1, size)
    assert fake.fetched == ["config.json"]
    assert hub.resolve("owner/good", offline=False, **options) == folder
    assert fake.fetched == ["config.json", "model.safetensors"]
    assert hub.missing("owner/good", offline=False, **options) is None
    assert hub.resolve("owner/good", offline=True, **options) == folder


def test_half_a_download_is_not_a_model(fake: FakeHub, tmp_path: Path) -> None:
    options: dict[str, Any] = {"cache_dir": tmp_path / "cache", "endpoint": fake.url}
    hub.resolve("owner/good", offline=False, config_only=True, **options)
    with pytest.raises(BadCheckpoint, match="not in the cache as a whole"):
        hub.resolve("owner/good", offline=True, **options)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gated", "owner/gated is gated: accept its terms"),
        ("gone", "no folder owner/gone, and the hub has no such model"),
        ("broken", "no folder owner/broken, it is not in the cache as a whole, and the hub cannot be reached"),
    ],
)
def test_what_the_hub_refuses(name: str, message: str, fake: FakeHub, tmp_path: Path) -> None:
    with pytest.raises(BadCheckpoint, match=message):
        hub.resolve(f"owner/{name}", offline=False, cache_dir=tmp_path / "cache", endpoint=fake.url)


# ---- refused before anything large is fetched ------------------------------------------------------------------------


def tiny_repository(folder: Path) -> dict[str, bytes]:
    """A model that runs, as a repository."""
    folder.mkdir()
    write_hf(folder, next(iter(CASES.values())))
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def with_config(**changes: object) -> Callable[[dict[str, bytes]], None]:
    def change(files: dict[str, bytes]) -> None:
        files["config.json"] = json.dumps(json.loads(files["config.json"]) | changes).encode()

    return change


def only(**files: bytes) -> Callable[[dict[str, bytes]], None]:
    def change(old: dict[str, bytes]) -> None:
        old.clear()
        old.update({name.replace("__", "."): data for name, data in files.items()})

    return change


def quantised(**quantisation: object) -> Callable[[dict[str, bytes]], None]:
    return with_config(quantization_config=quantisation)


REFUSED = {
    "llama": (
        with_config(model_type="llama", architectures=["LlamaForCausalLM"]),
        r"'llama' \(LlamaForCausalLM\) is not supported",
    ),
    "mixtral": (with_config(model_type="mixtral", architectures=["MixtralForCausalLM"]), "MixtralForCausalLM"),
    "gpt-oss-20b-NVFP4": (
        quantised(quant_method="modelopt", quant_algo="NVFP4"),
        r"the weights are in NVFP4 \(modelopt\), which Microscale does not read.* openai/gpt-oss-20b runs",
    ),
    "compressed": (
        quantised(quant_method="compressed-tensors", format="nvfp4-pack-quantized"),
        r"in NVFP4 \(compressed-tensors\)",
    ),
    "pack": (
        quantised(quant_method="compressed-tensors", format="pack-quantized"),
        r"in compressed-tensors \(pack-quantized\)",
    ),
    "awq": (quantised(quant_method="awq", bits=4), "in AWQ, which Microscale does not read"),
    "gptq": (quantised(quant_method="gptq", bits=4), "in GPTQ"),
    "fp8": (quantised(quant_method="fp8", weight_block_size=[128, 128]), "in FP8"),
    "broken-config": (only(config__json=b'{"model_type": "gpt_oss",', model__safetensors=b"x"), "config.json"),
    "gpt-oss-120b-GGUF": (
        only(model__gguf=b"GGUF"),
        r"owner/gpt-oss-120b-GGUF is in GGUF, llama.cpp's format.* openai/gpt-oss-120b runs",
    ),
    "no-config": (only(README__md=b"#", model__safetensors=b"x"), "owner/no-config has no config.json"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_cannot_run_is_refused_before_its_weights_are_fetched(
    name: str, here: FakeHub, tmp_path: Path
) -> None:
    change, message = REFUSED[name]
    files = tiny_repository(tmp_path / "source")
    change(files)
    here.repositories[name] = files
    with pytest.raises(MicroscaleError, match=message) as raised:
        prepare(EngineConfig(f"owner/{name}", device="cpu"))
    assert set(here.fetched) <= SMALL, here.fetched
    assert "\n" not in str(raised.value)
    # The server asks for the tokenizer first, and says the same.
    with pytest.raises(MicroscaleError, match=message):
        find_tokenizer(f"owner/{name}", None, offline=False, is_dummy=False)
    assert set(here.fetched) <= SMALL, here.fetched


@pytest.mark.parametrize(
    ("tokenizer", "message"),
    [(None, r"has no tokenizer\.json, which turns text into tokens; --tokenizer"), (b"{", "is not a tokenizer")],
)
def test_a_model_without_a_tokenizer_is_refused_before_its_weights_are_fetched(
    tokenizer: bytes | None, message: str, here: FakeHub, tmp_path: Path
) -> None:
    extra = {} if tokenizer is None else {"tokenizer.json": tokenizer}
    here.repositories["tiny"] = tiny_repository(tmp_path / "source") | extra
    with pytest.raises(BadCheckpoint, match=message):
        find_tokenizer("owner/tiny", None, offline=False, is_dummy=False)
    assert set(here.fetched) <= SMALL


def test_a_repository_that_lacks_weights_is_refused_before_the_rest_is_fetched(here: FakeHub, tmp_path: Path) -> None:
    files = tiny_repository(tmp_path / "source")
    files["model-00001-of-00002.safetensors"] = files.pop("model.safetensors")
    weight_map = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    files["model.safetensors.index.json"] = json.dumps({"weight_map": weight_map}).encode()
    here.repositories["tiny"] = files
    with pytest.raises(BadCheckpoint, match=r"owner/tiny has no model-00002-of-00002\.safetensors, which its .* names"):
        prepare(EngineConfig("owner/tiny", device="cpu"))
    assert set(here.fetched) <= SMALL


def test_a_model_that_is_too_slow_here_is_refused_before_its_weights_are_fetched(
    here: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here.repositories["tiny"] = tiny_repository(tmp_path / "source")
    monkeypatch.setattr("microscale.engine.loading.prepare.decode_speed", lambda *_: 0.02)
    with pytest.raises(Unsupported, match=r"makes at most 0\.02 tokens per second on this CPU: .* Add --yes"):
        prepare(EngineConfig("owner/tiny", device="cpu", allow_slow=False))
    assert set(here.fetched) <= SMALL
    prepare(EngineConfig("owner/tiny", device="cpu", allow_slow=True))
    assert "model.safetensors" in here.fetched


@pytest.mark.parametrize("name", ["gated", "gone", "broken"])
def test_what_the_hub_refuses_is_refused_by_the_server_too(name: str, here: FakeHub) -> None:
    with pytest.raises(BadCheckpoint, match=f"owner/{name}"):
        find_tokenizer(f"owner/{name}", None, offline=False, is_dummy=False)
    assert not here.fetched


def test_only_one_bar_is_drawn_and_none_before_the_weights(
    here: FakeHub, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    here.repositories["tiny"] = tiny_repository(tmp_path / "source")
    here.repositories["gguf"] = {"model.gguf": b"GGUF"}
    hub.resolve("owner/tiny", offline=False, config_only=True)
    with pytest.raises(Unsupported):
        hub.resolve("owner/gguf", offline=False, config_only=True)
    assert capfd.readouterr() == ("", "")
    hub.resolve("owner/tiny", offline=False)
    assert "Fetching" not in capfd.readouterr().err


FOLDERS = {
    "empty": ((), "is empty; a model is a folder with config.json"),
    "gguf": (("gpt-oss-20b-Q4.gguf",), r"in GGUF, llama\.cpp's format.* openai/gpt-oss-20b runs"),
    "other": (("notes.txt",), r"has no config\.json, so it is not a model"),
    "broken": (("config.json", "model.safetensors"), "is not valid JSON"),
}


@pytest.mark.parametrize("kind", FOLDERS)
def test_a_folder_that_is_no_model_is_one_sentence(kind: str, tmp_path: Path) -> None:
    names, message = FOLDERS[kind]
    for name in names:
        (tmp_path / name).write_text("{")
    with pytest.raises(MicroscaleError, match=message) as raised:
        find_tokenizer(str(tmp_path), None, offline=True, is_dummy=False)
    assert "\n" not in str(raised.value)
    with pytest.raises(MicroscaleError, match=message):
        prepare(EngineConfig(str(tmp_path), device="cpu"))


def test_a_model_that_does_not_fit_is_refused_before_its_weights_are_fetched(
    here: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here.repositories["tiny"] = tiny_repository(tmp_path / "source")
    monkeypatch.setattr(hardware, "available_memory", lambda gpu, index: 1 << 10)
    with pytest.raises(Unsupported, match=r"owner/tiny needs .* GiB"):
        prepare(EngineConfig("owner/tiny", device="cpu"))
    assert set(here.fetched) <= SMALL


def test_a_disk_that_is_too_small_is_reported_with_both_sizes(
    here: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here.repositories["tiny"] = tiny_repository(tmp_path / "source")
    here.sizes["model.safetensors"] = 13_800_000_000
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=5_000_000_000))
    with pytest.raises(Unsupported, match=r"is 13\.8 GB to download, .* has 5\.0 GB free; make room, or set HF_HOME"):
        prepare(EngineConfig("owner/tiny", device="cpu"))
    assert set(here.fetched) <= SMALL


def test_what_is_downloaded_is_said_first(here: FakeHub, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    here.repositories["tiny"] = tiny_repository(tmp_path / "source")
    with caplog.at_level(logging.INFO, "microscale"):
        prepared = prepare(EngineConfig("owner/tiny", device="cpu"))
    assert "model.safetensors" in here.fetched
    assert prepared.weights.config == find_config("owner/tiny", "auto", {}, offline=True)
    (line,) = (line for line in caplog.messages if line.startswith("Downloading"))
    assert re.match(r"Downloading owner/tiny: [\d.]+ GB in 1 files to ", line)
    assert "tokens per second" not in line  # the plan's rates of a CPU promise no speed
    caplog.clear()
    with caplog.at_level(logging.INFO, "microscale"):
        prepare(EngineConfig("owner/tiny", device="cpu"))
    assert not [line for line in caplog.messages if line.startswith("Downloading")]

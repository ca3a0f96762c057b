"""What is read of a draft head's files, and what is refused: the sentence names the tensor or the key at fault."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from microscale.errors import BadCheckpoint, MicroscaleError, Unsupported
from microscale.models.draft_heads.config import PRESETS, DFlashConfig, Eagle3Config, Llama3Rope
from microscale.models.draft_heads.config_file import open_draft_head, read_head
from microscale.models.draft_heads.heads import open_head_weights
from microscale.models.families import PRESETS as MODELS
from microscale.models.json_object import JsonObject
from microscale.models.rope import PlainRope
from support.tiny_heads import HEADS, MASK, TARGET, TinyHead, layer_keys


@pytest.mark.parametrize("name", HEADS)
def test_taps_are_layers_run_before(tmp_path: Path, name: str) -> None:
    """However their publisher counts them."""
    weights = open_draft_head(HEADS[name].write(tmp_path), TARGET)
    assert weights.config.reads.taps == HEADS[name].taps


def test_what_each_layout_says(tmp_path: Path) -> None:
    found = {name: open_draft_head(head.write(tmp_path / name), TARGET).config for name, head in HEADS.items()}
    specforge, nvidia, speculators = found["specforge"], found["nvidia_v3"], found["speculators"]
    assert isinstance(specforge, Eagle3Config)
    assert isinstance(nvidia, Eagle3Config)
    assert isinstance(speculators, Eagle3Config)
    assert specforge.layer.rope == PlainRope(10000.0)
    assert (specforge.draft_vocab_size, specforge.maps_vocabulary, specforge.own_embedding) == (96, True, False)
    assert nvidia.layer.rope == Llama3Rope(5e5, 8.0, 1.0, 4.0, 256)
    assert (nvidia.draft_vocab_size, nvidia.maps_vocabulary, nvidia.norm_before_fc) == (TARGET.vocab_size, False, True)
    assert (speculators.norm_before_residual, speculators.own_embedding) == (True, True)
    dflash = found["dflash"]
    assert isinstance(dflash, DFlashConfig)
    assert (dflash.num_layers, dflash.block_size, dflash.mask_token) == (3, 6, MASK)


@pytest.mark.parametrize(("layers", "ids", "taps"), [(24, [1, 11, 21], (2, 12, 22)), (36, [24, 30, 36], (24, 30, 36))])
def test_published_taps_of_gpt_oss(layers: int, ids: list[int], taps: tuple[int, ...]) -> None:
    keys = layer_keys(architectures=["LlamaForCausalLMEagle3"])
    keys["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": ids}
    model = MODELS["gpt-oss-20b" if layers == 24 else "gpt-oss-120b"]
    assert model.num_layers == layers
    assert read_head(JsonObject("config.json", keys), ["lm_head.weight"], model).reads.taps == taps
    del keys["eagle_config"]
    assert read_head(JsonObject("config.json", keys), [], model).reads.taps == (2, layers // 2, layers - 3)


def refused(head: TinyHead, folder: Path, target: Any = TARGET) -> str:
    with pytest.raises(MicroscaleError) as caught:
        open_draft_head(head.write(folder), target).tensors(torch.device("cpu"))
    return str(caught.value)


def test_a_tensor_that_its_config_does_not_describe(tmp_path: Path) -> None:
    head = HEADS["specforge"]
    fc = replace(head, tensors={**head.tensors, "fc.weight": torch.zeros(160, 320, dtype=torch.bfloat16)})
    said = refused(fc, tmp_path / "fc")
    assert all(part in said for part in ("'fc.weight'", "[160, 320]", "[160, 480]"))
    missing = replace(head, tensors={name: t for name, t in head.tensors.items() if "q_proj" not in name})
    assert "lacks tensor 'midlayer.self_attn.q_proj.weight'" in refused(missing, tmp_path / "q")
    other = replace(head, tensors={**head.tensors, "input_norm.weight": torch.ones(480)})
    assert "'input_norm.weight' is no part of the model" in refused(other, tmp_path / "norm")


def test_a_head_of_another_target(tmp_path: Path) -> None:
    """Its width, its vocabulary, its depth."""
    wide, large = replace(TARGET, hidden=192), replace(TARGET, vocab_size=512)
    said = refused(HEADS["specforge"], tmp_path / "a", wide)
    assert all(part in said for part in ("'fc.weight'", "[160, 480]", "[160, 576]"))
    said = refused(HEADS["nvidia_v3"], tmp_path / "b", large)
    assert all(part in said for part in ("'lm_head.weight'", "[500, 160]", "[512, 160]"))
    said = refused(HEADS["speculators"], tmp_path / "c", large)
    assert all(part in said for part in ("'embed_tokens.weight'", "[500, 160]", "[512, 160]"))
    shallow = replace(TARGET, num_layers=2, layer_kinds=TARGET.layer_kinds[:2])
    assert "behind layer 3, and the target has 2 layers" in refused(HEADS["speculators"], tmp_path / "d", shallow)
    said = refused(HEADS["dflash"], tmp_path / "e", wide)
    assert all(part in said for part in ("'fc.weight'", "[160, 320]", "[160, 384]"))


def test_a_map_that_leaves_the_vocabulary(tmp_path: Path) -> None:
    head = HEADS["specforge"]
    d2t = head.tensors["d2t"].clone()
    d2t[7] = 1000
    said = refused(replace(head, tensors={**head.tensors, "d2t": d2t}), tmp_path)
    assert "'d2t' maps draft token 7 to 1007" in said


@pytest.mark.parametrize(
    ("name", "change", "word"),
    [
        ("specforge", {"num_hidden_layers": 2}, "one layer"),
        ("specforge", {"hidden_act": "gelu"}, "hidden_act"),
        ("specforge", {"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM"),
        ("specforge", {"model_type": "mistral"}, "mistral"),
        ("specforge", {"rope_scaling": {"rope_type": "longrope"}}, "longrope"),
        ("specforge", {"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state"),
        ("specforge", {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 1, 2]}}, "each once"),
        ("specforge", {"eagle_config": {"eagle_aux_hidden_state_layer_ids": "all"}}, "must be a list"),
        ("specforge", {"rms_norm_eps": None}, "rms_norm_eps"),
        ("specforge", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ("speculators", {"speculators_model_type": "mtp"}, "mtp"),
        ("speculators", {"fc_norm": True}, "exclude each other"),
        ("dflash", {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, "window"),
        ("dflash", {"block_size": 1}, "no token to draft"),
        ("dflash", {"dflash_config": {"target_layer_ids": [0, 2]}}, "mask_token_id"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused(
    tmp_path: Path, name: str, change: dict[str, object], word: str
) -> None:
    head = HEADS[name]
    assert word in refused(replace(head, config={**head.config, **change}), tmp_path)


def test_numbers_of_other_types_are_held_in_bf16(tmp_path: Path) -> None:
    head = HEADS["specforge"]
    wide = {name: t.float() if t.is_floating_point() else t for name, t in head.tensors.items()}
    found = open_draft_head(replace(head, tensors=wide).write(tmp_path), TARGET).tensors(torch.device("cpu"))
    assert isinstance(found.fc, torch.Tensor)
    assert found.fc.dtype == torch.bfloat16
    assert torch.equal(found.fc, head.tensors["fc.weight"])


def test_presets_fit_their_targets_and_no_others() -> None:
    for name in ("gpt-oss-20b", "gpt-oss-120b"):
        assert open_head_weights(f"{name}-eagle3", MODELS[name]).config == PRESETS[f"{name}-eagle3"]
    with pytest.raises(BadCheckpoint, match=r"behind layer 30, and the target has 24 layers"):
        open_head_weights("gpt-oss-120b-eagle3-v3", MODELS["gpt-oss-20b"])
    with pytest.raises(BadCheckpoint, match=r"'fc.weight' has shape \[2880, 8640\]"):
        open_head_weights("gpt-oss-20b-eagle3", MODELS["qwen3-30b-a3b"])


def test_a_folder_that_is_no_head(tmp_path: Path) -> None:
    head = HEADS["specforge"]
    with pytest.raises(Unsupported, match="no draft head that is supported"):
        open_draft_head(replace(head, config={**head.config, "architectures": None}).write(tmp_path), TARGET)

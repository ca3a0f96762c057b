"""Configs of every family: the published forms, consistency, overrides, presets, and one sentence for each fault."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma4TextConfig, Mxfp4Config
from transformers import GptOssConfig as TransformersConfig
from transformers import Qwen3MoeConfig as TheirQwen3Moe

from microscale.errors import BadCheckpoint, BadConfig, BadSetting, MicroscaleError, Unsupported
from microscale.hardware import cpu
from microscale.kernels.op import Activations
from microscale.models.config import LayerKind
from microscale.models.families import FAMILIES, PRESETS, build_model, open_weights, preset, read_model_config
from microscale.models.gemma4.config import Gemma4Config, LayerFormats
from microscale.models.gemma4.config_file import to_text_config
from microscale.models.gpt_oss.config import CheckpointLayout, GptOssConfig, alternating, read_config, to_hugging_face
from microscale.models.qwen3_moe.config import Qwen3MoeConfig
from microscale.models.qwen3_moe.config import to_hugging_face as qwen3_moe_json
from microscale.models.rope import YarnRope
from microscale.planning.ops import Ops, Preference
from support import tiny_gemma4, tiny_qwen3_moe
from support.families import gpt_oss_preset
from support.tiny_checkpoints import CASES, has_original_form, original_json

TINY = CASES["heads_4_2"]

PUBLISHED_20B = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "output_router_logits": False,
    "pad_token_id": 199999,
    "quantization_config": {
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"],
        "quant_method": "mxfp4",
    },
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "transformers_version": "4.55.0.dev0",
    "use_cache": True,
    "vocab_size": 201088,
}

ORIGINAL_20B = {
    "num_hidden_layers": 24,
    "num_experts": 32,
    "experts_per_token": 4,
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "swiglu_limit": 7.0,
    "head_dim": 64,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "sliding_window": 128,
    "initial_context_length": 4096,
    "rope_theta": 150000,
    "rope_scaling_factor": 32.0,
    "rope_ntk_alpha": 1,
    "rope_ntk_beta": 32,
}

END_TOKENS = [200002, 199999, 200012]


def write(folder: Path, data: object, generation: object = None) -> Path:
    (folder / "config.json").write_text(json.dumps(data))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


GEMMA4, QWEN3_MOE = tiny_gemma4.CASES["shared_kv"], tiny_qwen3_moe.CASES["as_published"]


def quantization(**values: object) -> dict[str, object]:
    """As modelopt writes it."""
    return {"quantization_config": {"quant_method": "modelopt", "quant_algo": "MXFP8", "ignore": [], **values}}


BASE: dict[str, dict[str, object]] = {
    "gpt_oss": to_hugging_face(TINY),
    "gemma4": to_text_config(GEMMA4) | quantization(ignore=tiny_gemma4.routers(GEMMA4)),
    "qwen3_moe": qwen3_moe_json(QWEN3_MOE),
}


def changed(family: str = "gpt_oss", **values: object) -> dict[str, object]:
    """A tiny config.json with some keys changed; ``...`` takes a key away."""
    return {key: value for key, value in {**BASE[family], **values}.items() if value is not ...}


def changed_rope(**values: object) -> dict[str, object]:
    rope = {**BASE["gpt_oss"]["rope_scaling"], **values}  # type: ignore[dict-item]
    return changed(rope_scaling={key: value for key, value in rope.items() if value is not ...})


def gemma4_rope(**full: object) -> dict[str, object]:
    sliding = {"rope_type": "default", "rope_theta": 1e4}
    return changed("gemma4", rope_parameters={"sliding_attention": sliding, "full_attention": full})


# -- the published forms


def test_published_form_is_the_20b_preset(tmp_path: Path) -> None:
    file = read_config(write(tmp_path, PUBLISHED_20B, {"eos_token_id": END_TOKENS, "do_sample": True}))
    assert file.layout is CheckpointLayout.HUGGING_FACE
    assert file.config == PRESETS["gpt-oss-20b"]


def test_original_form_is_the_20b_preset(tmp_path: Path) -> None:
    file = read_config(write(tmp_path, ORIGINAL_20B))
    assert file.layout is CheckpointLayout.ORIGINAL
    assert set(file.config.eos_token_ids) == set(END_TOKENS)
    assert replace(file.config, eos_token_ids=tuple(END_TOKENS)) == PRESETS["gpt-oss-20b"]


EVERY_CASE = {
    **{f"gpt_oss-{name}": config for name, config in CASES.items()},
    **{f"gemma4-{name}": config for name, config in tiny_gemma4.CASES.items()},
    **{f"qwen3_moe-{name}": config for name, config in tiny_qwen3_moe.CASES.items()},
}


def published_json(config: object) -> dict[str, object]:
    if isinstance(config, GptOssConfig):
        return to_hugging_face(config)
    return to_text_config(config) if isinstance(config, Gemma4Config) else qwen3_moe_json(config)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", EVERY_CASE)
def test_what_transformers_saves_and_what_we_write_is_read_back(name: str, tmp_path: Path) -> None:
    """transformers 5 writes ``rope_parameters``, and what Gemma 4's full layers differ in to ``per_layer_config``."""
    config = EVERY_CASE[name]
    data = published_json(config)
    assert read_model_config(write(tmp_path, data)) == config
    if isinstance(config, GptOssConfig):
        theirs: Any = TransformersConfig(**data | {"quantization_config": Mxfp4Config().to_dict()})
    else:
        theirs = (Gemma4TextConfig if isinstance(config, Gemma4Config) else TheirQwen3Moe)(**data)
    theirs.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert "rope_parameters" in saved
    assert ("num_local_experts" in saved) == (not isinstance(config, Gemma4Config))
    assert read_model_config(tmp_path) == config


def test_transformers_defaults_are_gpt_oss_120b(tmp_path: Path) -> None:
    TransformersConfig(quantization_config=Mxfp4Config().to_dict()).save_pretrained(tmp_path)
    assert read_config(tmp_path).config == replace(gpt_oss_preset("gpt-oss-120b"), eos_token_ids=())


@pytest.mark.parametrize("name", [name for name, config in CASES.items() if has_original_form(config)])
def test_original_round_trip(name: str, tmp_path: Path) -> None:
    assert read_config(write(tmp_path, original_json(CASES[name]))).config == CASES[name]


def test_keys_that_transformers_may_leave_out_have_its_defaults(tmp_path: Path) -> None:
    optional = ("attention_bias", "hidden_act", "layer_types", "swiglu_alpha", "swiglu_limit", "tie_word_embeddings")
    data = changed("gpt_oss", **dict.fromkeys(optional, ...), eos_token_id=...)
    assert read_config(write(tmp_path, data)).config == TINY


def test_truncate_defaults_to_what_transformers_computes(tmp_path: Path) -> None:
    assert read_config(write(tmp_path, changed_rope(truncate=...))).config.rope.truncate is True


def test_qwen3_moe_head_dim_defaults_to_what_the_format_defines(tmp_path: Path) -> None:
    config = read_model_config(write(tmp_path, changed("qwen3_moe", head_dim=..., num_attention_heads=4)))
    assert isinstance(config, Qwen3MoeConfig)
    assert config.head_dim == config.hidden // 4


def test_yarn_that_a_user_adds_stretches_the_context(tmp_path: Path) -> None:
    """As Qwen3's model card says: ``rope_scaling`` is added, and ``max_position_embeddings`` stays."""
    rope = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    config = read_model_config(write(tmp_path, changed("qwen3_moe", rope_scaling=rope)))
    assert isinstance(config, Qwen3MoeConfig)
    assert config.rope == YarnRope(1e6, 4.0, 32.0, 1.0, 128, truncate=True)
    assert config.max_context == 512
    assert read_model_config(tmp_path, {"max_position_embeddings": 300}).max_context == 300


def test_older_exports_have_their_quantization_in_a_file_of_its_own(tmp_path: Path) -> None:
    left_out = {"exclude_modules": tiny_gemma4.routers(GEMMA4), "quant_algo": "MXFP8", "kv_cache_quant_algo": None}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": left_out}))
    config = read_model_config(write(tmp_path, changed("gemma4", quantization_config=...)))
    assert isinstance(config, Gemma4Config)
    assert config.formats == (LayerFormats.all("mxfp8"),) * 3


@pytest.mark.parametrize("family", BASE)
@pytest.mark.parametrize(
    ("in_config", "in_generation", "expected"),
    [
        (7, None, (7,)),
        ([7, 9], None, (7, 9)),
        (None, None, ()),
        (7, {"eos_token_id": [8, 9]}, (8, 9)),
        (7, {"eos_token_id": None}, (7,)),
        (7, {}, (7,)),
        ([7, 200002], None, (7,)),
    ],
)
def test_end_tokens(
    family: str, in_config: object, in_generation: object, expected: tuple[int, ...], tmp_path: Path
) -> None:
    folder = write(tmp_path, changed(family, eos_token_id=in_config), in_generation)
    assert read_model_config(folder).eos_token_ids == expected
    assert read_model_config(folder, {"eos_token_id": [8]}).eos_token_ids == (8,)


# -- what is refused


REQUIRED = {
    "hidden_size": int,
    "intermediate_size": int,
    "num_hidden_layers": int,
    "num_attention_heads": int,
    "num_key_value_heads": int,
    "head_dim": int,
    "num_local_experts": int,
    "num_experts_per_tok": int,
    "vocab_size": int,
    "sliding_window": int,
    "max_position_embeddings": int,
    "rms_norm_eps": float,
    "rope_theta": float,
    "model_type": str,
}


@pytest.mark.parametrize("key", REQUIRED)
def test_missing_key_names_file_and_key(key: str, tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match=rf"config\.json.* has no key '{key}'"):
        read_config(write(tmp_path, changed("gpt_oss", **{key: ...})))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (key, value)
        for key, kind in REQUIRED.items()
        for value in ("64", True, None, [64], 1.5)
        if type(value) is not kind
    ],
)
def test_wrong_type_names_file_and_key(key: str, value: object, tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match=rf"config\.json.*'{key}' must be"):
        read_config(write(tmp_path, changed("gpt_oss", **{key: value})))


@pytest.mark.parametrize("key", sorted(set(ORIGINAL_20B) - {"swiglu_limit", "experts_per_token"}))
def test_original_missing_key(key: str, tmp_path: Path) -> None:
    data = {name: value for name, value in ORIGINAL_20B.items() if name != key}
    with pytest.raises(BadConfig, match=f"config.json has no key '{key}'"):
        read_config(write(tmp_path, data))


@pytest.mark.parametrize("key", ["factor", "original_max_position_embeddings", "rope_type"])
def test_missing_rope_key(key: str, tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match=f"'rope_scaling' has no key '{key}'"):
        read_config(write(tmp_path, changed_rope(**{key: ...})))


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        (changed(model_type="llama"), Unsupported, "'model_type' 'llama' (GptOssForCausalLM) is not supported"),
        (changed(quantization_config={"quant_method": "awq"}), Unsupported, "the weights are in AWQ"),
        (changed(quantization_config={}), BadConfig, "'quantization_config' has no key 'quant_method'"),
        (changed(quantization_config={"quant_method": 4}), BadConfig, "'quant_method' must be a string"),
        (changed(attention_bias=False), Unsupported, "'attention_bias' false"),
        (changed(tie_word_embeddings=True), Unsupported, "'tie_word_embeddings' true"),
        (changed(hidden_act="gelu"), Unsupported, "'hidden_act' 'gelu'"),
        (changed(rope_scaling=...), BadConfig, "has no key 'rope_scaling'"),
        (changed(rope_scaling=None), BadConfig, "'rope_scaling' must be an object"),
        (changed(rope_parameters={"rope_type": "yarn"}), BadConfig, "both 'rope_scaling' and 'rope_parameters'"),
        (changed_rope(rope_type="llama3"), Unsupported, "'rope_type' 'llama3' is not supported"),
        (changed_rope(mscale=0.7), Unsupported, "'mscale' is not supported"),
        (changed_rope(attention_factor=1.0), Unsupported, "'attention_factor' is not supported"),
        (changed_rope(factor=0.5), BadConfig, "factor 0.5 at least 1"),
        (changed_rope(beta_slow=64.0), BadConfig, "below beta_fast"),
        (changed(layer_types=["sliding_attention", "chunked"]), BadConfig, "'layer_types' may hold only"),
        (changed(layer_types=["full_attention", 3]), BadConfig, "'layer_types' may hold only"),
        (changed(layer_types=["full_attention"]), BadConfig, "1 layer kinds do not describe 2 layers"),
        (changed(num_hidden_layers=10**9, layer_types=...), BadConfig, "more than any model has"),
        (changed(num_hidden_layers=0, layer_types=[]), BadConfig, "num_layers is 0 and must be above 0"),
        (changed(num_key_value_heads=3), BadConfig, "4 heads cannot share 3 KV heads"),
        (changed(head_dim=15), BadConfig, "head_dim 15 is odd"),
        (changed(hidden_size=72), BadConfig, "hidden size 72 is not a multiple"),
        (changed(intermediate_size=40), BadConfig, "intermediate size 40 is not a multiple"),
        (changed(num_experts_per_tok=5), BadConfig, "5 experts per token cannot be chosen from 4"),
        (changed(sliding_window=-1), BadConfig, "sliding_window is -1"),
        (changed(eos_token_id="end"), BadConfig, "'eos_token_id' must be a token"),
        (changed(eos_token_id=[1, -2]), BadConfig, "'eos_token_id' must be a token"),
        ([1, 2], BadConfig, "must hold a JSON object"),
        (changed("gemma4", **quantization(quant_method="awq")), Unsupported, "the weights are in AWQ"),
        (changed("gemma4", **quantization()), Unsupported, "the router of layer 0 is in MXFP8"),
        (changed("gemma4", **quantization(ignore=[3])), BadConfig, "'ignore' must be a list of module names"),
        (
            changed("gemma4", **quantization(ignore=[*tiny_gemma4.routers(GEMMA4), "*.1.self_attn.k_proj"])),
            Unsupported,
            "layer 1 has self_attn.k_proj in BF16 and the rest of",
        ),
        (changed("gemma4", enable_moe_block=False), Unsupported, "without experts"),
        (
            changed("gemma4", hidden_size_per_layer_input=256),
            Unsupported,
            "'hidden_size_per_layer_input' 256 is not supported",
        ),
        (changed("gemma4", num_kv_shared_layers=2), Unsupported, "'num_kv_shared_layers' 2 is not supported"),
        (changed("gemma4", attention_bias=True), Unsupported, "'attention_bias' true"),
        (changed("gemma4", hidden_activation="silu"), Unsupported, "'hidden_activation' 'silu'"),
        (changed("gemma4", use_bidirectional_attention="all"), Unsupported, "'use_bidirectional_attention'"),
        (
            changed("gemma4", layer_types=["sliding_attention"] * 3),
            BadConfig,
            "'layer_types' must end with full_attention",
        ),
        (changed("gemma4", layer_types=["full_attention"] * 2), BadConfig, "'layer_types' names 2 layers, not 3"),
        (changed("gemma4", global_head_dim=...), BadConfig, "has no key 'global_head_dim'"),
        (changed("gemma4", top_k_experts=...), BadConfig, "has no key 'top_k_experts'"),
        (
            changed("gemma4", num_attention_heads=3),
            BadConfig,
            "3 heads of sliding layers cannot share 2 KV heads evenly",
        ),
        (changed("gemma4", moe_intermediate_size=40), BadConfig, "intermediate size 40 is not a multiple of the 32"),
        (changed("gemma4", per_layer_config={"0": {"head_dim": 64}}), Unsupported, "layer '0' is no full layer"),
        (
            changed("gemma4", per_layer_config={"2": {"sliding_window": 3}}),
            Unsupported,
            "'sliding_window' is not supported",
        ),
        (gemma4_rope(rope_type="yarn", rope_theta=1e6), Unsupported, "'rope_type' 'yarn'"),
        (
            changed("qwen3_moe", quantization_config={"quant_method": "gptq"}),
            Unsupported,
            "the weights are in GPTQ",
        ),
        (changed("qwen3_moe", attention_bias=True), Unsupported, "'attention_bias' true is not supported"),
        (changed("qwen3_moe", norm_topk_prob=False), Unsupported, "'norm_topk_prob' false is not supported"),
        (changed("qwen3_moe", norm_topk_prob=...), Unsupported, "'norm_topk_prob' false is not supported"),
        (changed("qwen3_moe", hidden_act="gelu"), Unsupported, "'hidden_act' 'gelu' is not supported"),
        (changed("qwen3_moe", use_sliding_window=True, sliding_window=64), Unsupported, "'use_sliding_window' true"),
        (
            changed("qwen3_moe", layer_types=["full_attention", "sliding_attention"]),
            Unsupported,
            "'layer_types' with sliding_attention",
        ),
        (changed("qwen3_moe", mlp_only_layers=[0]), Unsupported, "'mlp_only_layers' [0] is not supported"),
        (
            changed("qwen3_moe", decoder_sparse_step=2),
            Unsupported,
            "'decoder_sparse_step' 2 is not supported; supported is 1.",
        ),
        (
            changed("qwen3_moe", rope_scaling={"rope_type": "dynamic", "factor": 2.0}),
            Unsupported,
            "'rope_type' 'dynamic'",
        ),
        (
            changed("qwen3_moe", rope_scaling={"rope_type": "yarn", "factor": 2.0, "mscale": 0.7}),
            Unsupported,
            "'mscale' is not supported; it would change the frequencies",
        ),
        (
            changed("qwen3_moe", rope_scaling={"rope_type": "yarn", "factor": 2.0}),
            BadConfig,
            "'original_max_position_embeddings'",
        ),
        (
            changed("qwen3_moe", rope_parameters={"rope_type": "default"}, rope_theta=...),
            BadConfig,
            "has no key 'rope_theta'",
        ),
        (changed("qwen3_moe", num_experts=...), BadConfig, "has no key 'num_experts'"),
        (changed("qwen3_moe", num_local_experts=3), BadConfig, "and they differ"),
        (changed("qwen3_moe", moe_intermediate_size=...), BadConfig, "has no key 'moe_intermediate_size'"),
        (changed("qwen3_moe", moe_intermediate_size=40), BadConfig, "intermediate size 40 is not a multiple of the 32"),
        (changed("qwen3_moe", num_key_value_heads=3), BadConfig, "8 heads cannot share 3 KV heads evenly"),
        (changed("qwen3_moe", num_experts_per_tok=17), BadConfig, "17 experts per token cannot be chosen from 16"),
        (changed("qwen3_moe", rope_theta=0.5), BadConfig, "rope theta 0.5 must be above 1"),
    ],
)
def test_refused(data: object, error: type[MicroscaleError], message: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=re.escape(message)) as caught:
        read_model_config(write(tmp_path, data))
    assert str(tmp_path) in str(caught.value)
    assert str(caught.value).endswith(".")


@pytest.mark.parametrize(
    "text",
    ["", "{", '{"a": NaN}', '{"a": 1, "a": 2}', "\xff", "[" * 100_000],
    ids=["empty", "open", "nan", "twice", "latin1", "deep"],
)
def test_text_that_is_not_json(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("latin1"))
    with pytest.raises(BadConfig, match=r"config\.json is not valid JSON"):
        read_config(tmp_path)


@pytest.mark.parametrize("number", ["1e999", "-1e999", "1" + "0" * 400])
def test_numbers_beyond_float(number: str, tmp_path: Path) -> None:
    text = json.dumps(changed(rms_norm_eps="here")).replace('"here"', number)
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(BadConfig, match="'rms_norm_eps' must be a number"):
        read_config(tmp_path)


def test_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(BadCheckpoint, match="nowhere is not a folder"):
        read_config(tmp_path / "nowhere")


def test_folder_without_config(tmp_path: Path) -> None:
    with pytest.raises(BadCheckpoint, match=r"is empty; a model is a folder with config\.json"):
        read_config(tmp_path)
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(BadCheckpoint, match=r"has no config\.json"):
        read_config(tmp_path)


def test_overrides_change_keys(tmp_path: Path) -> None:
    overrides = {"num_hidden_layers": 1, "sliding_window": 9, "rope_scaling": {"factor": 2.0}, "eos_token_id": 5}
    folder = write(tmp_path, to_hugging_face(TINY), {"eos_token_id": 3})
    expected = replace(
        TINY,
        num_layers=1,
        layer_kinds=(LayerKind.SLIDING,),
        sliding_window=9,
        rope=replace(TINY.rope, factor=2.0),
        eos_token_ids=(5,),
    )
    assert read_config(folder, overrides).config == expected


def test_overrides_of_the_original_form(tmp_path: Path) -> None:
    config = read_config(write(tmp_path, ORIGINAL_20B), {"num_hidden_layers": 3, "rope_scaling_factor": 8}).config
    assert config.layer_kinds == alternating(3)
    assert (config.rope.factor, config.max_context) == (8.0, 32768)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"num_layers": 2}, "Unknown override 'num_layers'; known for this model are .*num_hidden_layers"),
        ({"use_cache": False}, "Unknown override 'use_cache'"),
        ({"rope_parameters": {}}, "Unknown override 'rope_parameters'"),
        ({"num_hidden_layers": "2"}, "the override of 'num_hidden_layers' must be an integer"),
        ({"num_hidden_layers": 3}, "asks for 3 layers of a model that has 2"),
        ({"sliding_window": None}, "the override of 'sliding_window' must be an integer"),
        ({"rope_scaling": {"factor": "x"}}, "the override of 'factor' must be a number"),
        ({"num_experts_per_tok": 9}, "9 experts per token cannot be chosen from 4"),
    ],
)
def test_bad_overrides_are_the_users(overrides: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises(BadSetting, match=message):
        read_config(write(tmp_path, to_hugging_face(TINY)), overrides)


def test_presets_have_the_published_sizes() -> None:
    small, large, tiny = (gpt_oss_preset(f"gpt-oss-{size}") for size in ("20b", "120b", "tiny"))
    assert (small.num_layers, small.num_experts) == (24, 32)
    assert (large.num_layers, large.num_experts) == (36, 128)
    assert large.qkv_rows == (64 + 8 + 8) * 64
    # The tiny one keeps what makes kernels fail: tails in every tile, grouped heads, more query width than hidden.
    assert tiny.hidden % 128
    assert tiny.num_heads // tiny.num_kv_heads == large.num_heads // large.num_kv_heads
    assert tiny.num_heads * tiny.head_dim > tiny.hidden


def test_the_qwen3_preset_is_the_published_model() -> None:
    """transformers' defaults have its sizes, except for layers, context and normed routing weights."""
    theirs, ours = TheirQwen3Moe(), PRESETS["qwen3-30b-a3b"]
    assert isinstance(ours, Qwen3MoeConfig)
    assert (ours.hidden, ours.intermediate) == (theirs.hidden_size, theirs.moe_intermediate_size)
    assert (ours.num_heads, ours.num_kv_heads) == (theirs.num_attention_heads, theirs.num_key_value_heads)
    assert (ours.num_experts, ours.top_k) == (theirs.num_experts, theirs.num_experts_per_tok)
    assert (ours.vocab_size, ours.rms_epsilon, ours.tied) == (151936, theirs.rms_norm_eps, theirs.tie_word_embeddings)
    numbers = ours.qkv_rows * ours.hidden + ours.hidden * ours.num_heads * ours.head_dim
    numbers += ours.num_experts * (3 * ours.intermediate * ours.hidden + ours.hidden)
    assert round((ours.num_layers * numbers + 2 * ours.vocab_size * ours.hidden) / 1e9, 1) == 30.5


def test_preset_overrides() -> None:
    fewer = {name: preset(name, {"num_hidden_layers": 2}) for name in ("gemma-4-26b-a4b", "qwen3-moe-tiny")}
    gemma4, qwen3_moe = fewer.values()
    assert isinstance(gemma4, Gemma4Config)
    assert isinstance(qwen3_moe, Qwen3MoeConfig)
    assert gemma4.formats == (LayerFormats.all("mxfp8"),) * 2
    assert (qwen3_moe.num_layers, qwen3_moe.expert_format) == (2, "mxfp8")
    config = preset("gpt-oss-120b", {"num_hidden_layers": 2})
    assert config == replace(gpt_oss_preset("gpt-oss-120b"), num_layers=2, layer_kinds=alternating(2))
    assert preset("gpt-oss-tiny", {"vocab_size": 100}).eos_token_ids == ()
    with pytest.raises(BadSetting, match="Preset gpt-oss-20b: the override of 'head_dim' must be an integer"):
        preset("gpt-oss-20b", {"head_dim": 1.5})


def test_records_refuse_on_their_own() -> None:
    with pytest.raises(BadConfig, match="end token 200 is not in the vocabulary"):
        replace(TINY, eos_token_ids=(TINY.vocab_size,))
    with pytest.raises(BadConfig, match="theta 0 must be above 1"):
        YarnRope(0, 32.0, 32.0, 1.0, 4096, False)


# -- the registry


def test_names_are_of_one_family_each() -> None:
    types = Counter(name for family in FAMILIES for name in family.model_types)
    presets = Counter(name for family in FAMILIES for name in family.presets)
    assert set(types.values()) == set(presets.values()) == {1}
    assert list(presets) == list(PRESETS)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_comes_back_from_its_own_family(name: str) -> None:
    config = preset(name, {})
    assert config == PRESETS[name]
    [family] = [family for family in FAMILIES if isinstance(config, family.config)]
    assert name in family.presets
    assert preset(name, {"max_position_embeddings": 4096}).max_context == 4096


@pytest.mark.parametrize("name", ["gpt-oss-tiny", "gemma-4-tiny", "qwen3-moe-tiny"])
def test_weights_know_their_model(name: str) -> None:
    weights = open_weights(name, load_format="dummy", overrides={"num_hidden_layers": 1})
    layers: list[int] = []
    model = build_model(
        weights, Ops(cpu(), Activations.BF16, Preference()), torch.device("cpu"), 16, lambda: layers.append(1)
    )
    assert model.config is weights.config
    assert len(layers) == weights.config.num_layers == 1


def test_an_unknown_model_type_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(Unsupported, match=r"'llama' is not supported\. Microscale runs gpt-oss, Gemma 4 26B-A4B,"):
        read_model_config(tmp_path)

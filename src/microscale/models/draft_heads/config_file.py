"""Reads the config.json of a draft head, and refuses what we would compute wrongly.

Heads are published in these forms; we read them as the programs that they were made for do.

- EAGLE's own, which SpecForge and LMSYS write: ``LlamaForCausalLMEagle3``, the taps under ``eagle_config`` as numbers
  of layers counted from 0, so that 1 is the stream behind two layers. Read as by SGLang (``llama_eagle3.py``,
  ``set_eagle3_layers_to_capture`` of its gpt-oss).
- NVIDIA's (Model-Optimizer): the same keys. In ``gpt-oss-120b-Eagle3-v3`` the last tap is the target's number of
  layers; all of its taps are then layers run before, as ours are. SGLang's pull request 32334 has the rule.
- The speculators library's: ``speculators_model_type`` and the layer under ``transformer_layer_config``. Its taps are
  layers run before. Read as by vLLM (``transformers_utils/configs/speculators``, ``llama_eagle3.py``).
- DFlash (z-lab/dflash): ``DFlashDraftModel``, ``dflash_config`` with layers counted from 0.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from microscale.errors import Unsupported
from microscale.models.checkpoint import Checkpoint
from microscale.models.config import CONFIG, KEYS, ModelConfig, build, read_fields, read_num_layers, refuse_others
from microscale.models.draft_heads.config import (
    DFlashConfig,
    Eagle3Config,
    HeadReads,
    HeadRope,
    LayerShape,
    Llama3Rope,
    SeparateHeadConfig,
)
from microscale.models.draft_heads.weights import D2T, EMBED, LM_HEAD, CheckpointHead, check_fit
from microscale.models.json_object import JsonObject, read_json_object
from microscale.models.rope import find_rope, read_plain, read_yarn

THETA = 10000.0
"""What Llama's and Qwen3's config formats define where a file has no ``rope_theta``."""

AUX = "eagle_aux_hidden_state_layer_ids"
SPECULATORS = "speculators_model_type"
_LAYER_KEYS = {name: KEYS[name] for name in ("hidden", "num_heads", "rms_epsilon", "max_context")} | {
    "intermediate": "intermediate_size"
}
_ONLY: dict[str, object] = {
    "hidden_act": "silu",
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "bias": False,
    "logit_scale": 1.0,
    "use_sliding_window": False,
    "quantization_config": None,
}
"""Values of keys without which the arithmetic would be another; absent keys have them."""
_ONLY_EAGLE: dict[str, object] = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "parallel_draft_step": 1,
}
_ONLY_DFLASH: dict[str, object] = {
    "use_swa": False,
    "causal": False,
    "attention_sink_bias": False,
    "use_aux_hidden_state": True,
}


def open_draft_head(folder: Path, target: ModelConfig) -> CheckpointHead:
    """The head in ``folder`` for this target: checked against its own config and against the target."""
    checkpoint = Checkpoint(folder)
    config = read_head(read_json_object(folder / CONFIG), list(checkpoint.entries), target)
    head = CheckpointHead(config, checkpoint)
    head.check()
    check_fit(config, target, str(folder), head.prefix)
    return CheckpointHead(replace(config, shard=target.shard), checkpoint)


def read_head(file: JsonObject, names: list[str], target: ModelConfig) -> SeparateHeadConfig:
    """``names``: the tensors of the checkpoint; whether a head has an embedding of its own is said nowhere else."""
    if "dflash_config" in file.data:
        return _dflash(file)
    kind = file.data.get(SPECULATORS)
    if kind not in (None, "eagle3"):
        raise Unsupported(f"{file.source}: {SPECULATORS!r} {kind!r} is not supported; supported is 'eagle3'.")
    architectures = file.optional("architectures", list, [])
    if kind is None and not any("Eagle3" in str(name) for name in architectures):
        raise Unsupported(
            f"{file.source}: architectures {architectures} are no draft head that is supported; supported are "
            f"LlamaForCausalLMEagle3, the speculators library's eagle3, and DFlashDraftModel."
        )
    return _eagle3(file, names, target)


def _eagle3(file: JsonObject, names: list[str], target: ModelConfig) -> Eagle3Config:
    speculators = SPECULATORS in file.data
    layers = file.nested("transformer_layer_config") if speculators else file
    eagle = file.nested("eagle_config") if isinstance(file.data.get("eagle_config"), dict) else None
    refuse_others(layers, _ONLY)
    if eagle is not None:
        refuse_others(eagle, _ONLY_EAGLE)
    if read_num_layers(layers) != 1:
        raise Unsupported(f"{layers.source}: EAGLE3 heads of one layer are supported, not of more.")
    _refuse_windows(layers)
    shape, vocab_size = _layer(layers), layers.require("vocab_size", int)
    taps = _eagle_taps(file, eagle, speculators, target)
    return build(
        file,
        Eagle3Config,
        layer=shape,
        reads=build(file, HeadReads, taps, file.optional("target_hidden_size", int, shape.hidden), vocab_size),
        draft_vocab_size=file.optional("draft_vocab_size", int, vocab_size),
        maps_vocabulary=D2T in names,
        norm_before_fc=_flag(file, eagle, "norm_before_fc"),
        norm_of_each_tap=_flag(file, eagle, "fc_norm"),
        # vLLM takes the speculators library's files for normed where they do not say.
        norm_before_residual=file.optional("norm_before_residual", bool, speculators),
        norm_output=_flag(file, eagle, "norm_output"),
        own_embedding=EMBED in names,
        own_lm_head=LM_HEAD in names,
    )


def _eagle_taps(file: JsonObject, eagle: JsonObject | None, speculators: bool, target: ModelConfig) -> tuple[int, ...]:
    """As layers run before; see above."""
    holder = file if file.data.get(AUX) is not None or eagle is None else eagle
    if holder.data.get(AUX) is None:
        # EAGLE's own rule, for heads that do not say: behind the second layer, in the middle, near the end.
        return 2, target.num_layers // 2, target.num_layers - 3
    ids = _numbers(holder, AUX)
    counted = speculators or max(ids, default=0) == target.num_layers
    return tuple(ids) if counted else tuple(layer + 1 for layer in ids)


def _dflash(file: JsonObject) -> DFlashConfig:
    refuse_others(file, _ONLY)
    _refuse_windows(file)
    dflash = file.nested("dflash_config")
    refuse_others(dflash, _ONLY_DFLASH)
    shape = _layer(file)
    taps = tuple(layer + 1 for layer in _numbers(dflash, "target_layer_ids"))
    holder = dflash if dflash.data.get("block_size") is not None else file
    return build(
        file,
        DFlashConfig,
        layer=shape,
        num_layers=read_num_layers(file),
        reads=build(file, HeadReads, taps, shape.hidden, file.require("vocab_size", int)),
        block_size=holder.require("block_size", int),
        mask_token=dflash.require("mask_token_id", int),
    )


def _layer(file: JsonObject) -> LayerShape:
    kind = file.require("model_type", str)
    if kind not in ("llama", "qwen3"):
        raise Unsupported(f"{file.source}: draft heads of 'model_type' {kind!r} are not supported; of llama and qwen3.")
    values = read_fields(file, LayerShape, _LAYER_KEYS)
    return build(
        file,
        LayerShape,
        **values,
        # Where these keys are absent, the format defines them so.
        num_kv_heads=file.optional("num_key_value_heads", int, values["num_heads"]),
        head_dim=file.optional("head_dim", int, values["hidden"] // max(values["num_heads"], 1)),
        rope=read_head_rope(file),
        head_norms=kind == "qwen3",
        attention_bias=file.optional("attention_bias", bool, False),
    )


def _flag(file: JsonObject, eagle: JsonObject | None, key: str) -> bool:
    """Next to the other keys, or under ``eagle_config``."""
    holder = eagle if eagle is not None and key in eagle.data else file
    return holder.optional(key, bool, False)


def _numbers(file: JsonObject, key: str) -> list[int]:
    numbers = file.require(key, list)
    if not numbers or not all(type(number) is int and number >= 0 for number in numbers):
        raise file.fault(key, "must be a list of layers")
    return numbers


def _refuse_windows(file: JsonObject) -> None:
    if "sliding_attention" in file.optional("layer_types", list, []):
        raise Unsupported(f"{file.source}: layers with a window are not supported in draft heads; full ones are.")


def read_head_rope(file: JsonObject) -> HeadRope:
    file = replace(file, data={"rope_theta": THETA, **file.data})
    found = find_rope(file)
    if found is None or found[0] == "default":
        return read_plain(file, None if found is None else found[1])
    kind, rope = found
    if kind == "yarn":
        return read_yarn(file, rope)
    if kind != "llama3":
        raise Unsupported(f"{rope.source}: rope type {kind!r} is not supported; supported are default, yarn, llama3.")
    return build(
        file,
        Llama3Rope,
        theta=(rope if "rope_theta" in rope.data else file).require("rope_theta", float),
        factor=rope.require("factor", float),
        low_freq_factor=rope.require("low_freq_factor", float),
        high_freq_factor=rope.require("high_freq_factor", float),
        original_context=rope.require("original_max_position_embeddings", int),
    )

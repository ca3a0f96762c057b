"""Which modules of a checkpoint are quantised, and in which format, by the config of the tool that wrote it.

| ``quant_method`` | where | what it names |
| --- | --- | --- |
| ``modelopt`` | config.json, or hf_quant_config.json | an algorithm and modules left out, or a list of layers |
| ``compressed-tensors`` | config.json | groups of targets with a scheme each, and modules to ignore |
| ``quark`` | config.json | one scheme, others for patterns of layers, and patterns left out |
| ``fp8`` | config.json | blocks of 128 x 128 or one scale, and modules not converted |

Without any of them the checkpoint is plain. A checkpoint that was calibrated for activations of 4 or 8 bits has the
same weights; of its activations is read only whether NVFP4 weights may meet NVFP4 ones. How each format is stored is in
``storage.py``, and a family knows its modules' names and which of them are held as one tensor, and so must have one
format. The tensors in the files are checked against all of this before any is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from microscale.errors import BadConfig, Unsupported
from microscale.models.json_object import JsonObject, read_json_object
from microscale.models.known_checkpoints import refuse_format
from microscale.models.module_patterns import any_match, expression, read_patterns, wildcards, within, without_prefix

HF_QUANT_CONFIG = "hf_quant_config.json"
KEY = "quantization_config"
PLAIN = "bf16"

MODELOPT = {
    "NVFP4": "nvfp4",
    "W4A16_NVFP4": "nvfp4",
    "MXFP8": "mxfp8",
    "FP8": "fp8",
    "FP8_PER_CHANNEL_PER_TOKEN": "fp8",
    "FP8_PB_WO": "fp8_block",
}
"""``quant_algo`` → format."""
MIXED = "MIXED_PRECISION"
COMPRESSED_TENSORS = {
    ("nvfp4-pack-quantized", "tensor_group"): "nvfp4",
    ("mxfp4-pack-quantized", "group"): "mxfp4",
    ("mxfp8-quantized", "group"): "mxfp8",
    ("float-quantized", "tensor"): "fp8",
    ("float-quantized", "channel"): "fp8",
    ("float-quantized", "block"): "fp8_block",
}
"""(``format``, ``strategy``) → format."""
MIXED_FORMAT = "mixed-precision"
"""Each group then has its own ``format``."""
GROUP_SIZES = {"nvfp4": 16, "mxfp4": 32, "mxfp8": 32}
SQUARE = [128, 128]

Scheme = Callable[[Sequence[str]], str]
"""A module's name, first without a prefix and then with each that the checkpoint may have → its format."""


@dataclass(frozen=True)
class Quantisation:
    """The formats of one checkpoint's modules."""

    container: str | None
    """``quant_method``; ``None``: nothing is quantised."""
    source: str
    scheme: Scheme
    prefixes: tuple[str, ...]
    """What may precede the names of layers in a pattern."""
    weights_only: bool = False
    """Whether some of the NVFP4 weights are published for wider activations than NVFP4, most often BF16 (W4A16)."""

    def module(self, name: str) -> str:
        """The format of ``name``, such as ``layers.0.mlp.down_proj``, without a prefix."""
        return self.scheme([prefix + name for prefix in ("", *self.prefixes)])

    def refuse(self, layer_idx: int, name: str, what: str) -> None:
        """Refuse a layer's module that is quantised and must not be."""
        fmt = self.module(f"layers.{layer_idx}.{name}")
        if fmt != PLAIN:
            raise Unsupported(
                f"{self.source}: the {what} of layer {layer_idx} is in {fmt.upper()}; supported is a BF16 {what}."
            )

    def format(self, layer_idx: int, names: Sequence[str]) -> str:
        """The one format of a layer's modules that are held as one tensor."""
        formats = {name: self.module(f"layers.{layer_idx}.{name}") for name in names}
        if len(set(formats.values())) > 1:
            first = next(iter(formats.values()))
            other = next(fmt for fmt in formats.values() if fmt != first)
            odd, rest = (first, other) if other != PLAIN else (other, first)
            which = ", ".join(name for name, fmt in formats.items() if fmt == odd)
            raise Unsupported(
                f"{self.source}: layer {layer_idx} has {which} in {odd.upper()} and the rest of {', '.join(names)} in "
                f"{rest.upper()}; they are held as one tensor, so they must have one format."
            )
        return formats[names[0]]

    def uniform(self, layers: Sequence[int], names: Sequence[str]) -> str:
        """The one format of these modules in all of these layers, for a family whose layers are alike."""
        formats = {layer_idx: self.format(layer_idx, names) for layer_idx in layers}
        first = formats[layers[0]]
        odd = next((layer_idx for layer_idx, fmt in formats.items() if fmt != first), None)
        if odd is not None:
            raise Unsupported(
                f"{self.source}: {', '.join(names)} are in {first.upper()} in layer {layers[0]} and in "
                f"{formats[odd].upper()} in layer {odd}; supported is one format for all layers."
            )
        return first


def read_quantisation(folder: Path | None, config: JsonObject, prefixes: Sequence[str]) -> Quantisation:
    """How the modules of the checkpoint in ``folder`` are quantised."""
    own = folder / HF_QUANT_CONFIG if folder is not None and (folder / HF_QUANT_CONFIG).is_file() else None
    if config.data.get(KEY) is not None:
        file = config.nested(KEY)
        method = file.require("quant_method", str)
        if method == "modelopt" and own is not None:
            _check_same_algorithm(file, read_json_object(own).nested("quantization"))
    elif own is not None:
        file, method = read_json_object(own).nested("quantization"), "modelopt"
    else:
        return Quantisation(None, config.source, lambda names: PLAIN, tuple(prefixes))
    if method not in READERS:
        refuse_format(file.source, config.data, method)
    scheme = READERS[method](file, config.data, prefixes)
    return Quantisation(method, file.source, scheme, tuple(prefixes), _weights_only(method, file))


def _weights_only(method: str, file: JsonObject) -> bool:
    if method == "modelopt":
        each = [file]
        if file.require("quant_algo", str).upper() == MIXED:
            layers = file.nested("quantized_layers")
            each = [layers.nested(name) for name in layers.data]
        return any(entry.optional("quant_algo", str, "").upper() == "W4A16_NVFP4" for entry in each)
    if method == "compressed-tensors":
        groups = file.nested("config_groups")
        outer = file.optional("format", str, "")
        return any(_has_wide_activations(groups.nested(name), outer) for name in groups.data)
    return False


def _has_wide_activations(group: JsonObject, outer: str) -> bool:
    """Whether a group has NVFP4 weights and activations of more than four bits."""
    if group.optional("format", str, outer) != "nvfp4-pack-quantized":
        return False
    key = "input_activations"
    return not group.data.get(key) or group.nested(key).optional("num_bits", int, 0) != 4


def _check_same_algorithm(file: JsonObject, own: JsonObject) -> None:
    here, there = (each.require("quant_algo", str).upper() for each in (file, own))
    if here != there:
        raise BadConfig(
            f"{file.source} says 'quant_algo' {here!r} and {HF_QUANT_CONFIG} {there!r}; "
            f"remove the one that does not describe the tensors."
        )


# ---- modelopt --------------------------------------------------------------------------------------------------------


def _modelopt(file: JsonObject, config: Mapping[str, object], prefixes: Sequence[str]) -> Scheme:
    algorithm = file.require("quant_algo", str).upper()
    layers: dict[str, str] = {}
    everywhere = PLAIN
    if algorithm == MIXED:
        listed = file.nested("quantized_layers")
        layers = {name: _modelopt_format(listed.nested(name), config) for name in listed.data}
        if not layers:
            raise file.fault("quantized_layers", "is empty, so 'MIXED_PRECISION' names no layer")
    else:
        everywhere = _modelopt_format(file, config)
    left_out = read_patterns(file, "ignore" if "ignore" in file.data else "exclude_modules")
    is_left_out = wildcards(left_out, prefixes)
    bare = {without_prefix(name, prefixes): fmt for name, fmt in layers.items()}

    def scheme(names: Sequence[str]) -> str:
        if is_left_out(names[0]):
            return PLAIN
        # An entry names a module or what it is in: ``mlp.experts`` for all matrices of all experts.
        return next((bare[each] for each in within(names[0]) if each in bare), everywhere)

    return scheme


def _modelopt_format(file: JsonObject, config: Mapping[str, object]) -> str:
    algorithm = file.require("quant_algo", str).upper()
    if algorithm not in MODELOPT:
        refuse_format(file.source, config, "modelopt", algorithm)
    fmt = MODELOPT[algorithm]
    _check_group(file, fmt)
    return fmt


def _check_group(file: JsonObject, fmt: str) -> None:
    size = file.optional("group_size", int, GROUP_SIZES.get(fmt, 0))
    if fmt in GROUP_SIZES and size != GROUP_SIZES[fmt]:
        raise file.fault("group_size", f"is {size}, but {fmt.upper()} has groups of {GROUP_SIZES[fmt]}")


# ---- compressed-tensors ----------------------------------------------------------------------------------------------


def _compressed_tensors(file: JsonObject, config: Mapping[str, object], prefixes: Sequence[str]) -> Scheme:
    status = file.optional("quantization_status", str, "compressed")
    if status != "compressed":
        raise file.fault("quantization_status", f"is {status!r}, so the weights are not compressed; save them again")
    for key in ("sparsity_config", "transform_config"):
        if file.data.get(key):
            raise Unsupported(f"{file.source}: {key!r} is not supported; only the format of the weights may change.")
    outer = file.optional("format", str, "")
    if outer not in {MIXED_FORMAT, "", *(written for written, _ in COMPRESSED_TENSORS)}:
        refuse_format(file.source, config, "compressed-tensors", outer)
    groups = file.nested("config_groups")
    targets: list[tuple[str, str]] = []
    for name in groups.data:
        group = groups.nested(name)
        fmt = _compressed_format(group, group.optional("format", str, outer), config)
        targets += [(target, fmt) for target in read_patterns(group, "targets", required=True)]
    if not targets:
        raise file.fault("config_groups", "has no group, so no module is quantised")
    # As in the library: names go before expressions, and those before classes.
    named = {target: fmt for target, fmt in targets if "." in target and not target.startswith("re:")}
    expressions = [(expression(file, "targets", t), fmt) for t, fmt in targets if t.startswith("re:")]
    by_class = next((fmt for target, fmt in targets if target == "Linear"), PLAIN)
    ignored = read_patterns(file, "ignore")
    ignored_names = {name for name in ignored if not name.startswith("re:")}
    ignored_expressions = [expression(file, "ignore", name) for name in ignored if name.startswith("re:")]

    def scheme(names: Sequence[str]) -> str:
        if not ignored_names.isdisjoint(names) or any_match(ignored_expressions, names):
            return PLAIN
        by_name = [named[name] for name in names if name in named]
        by_name += [fmt for pattern, fmt in expressions if any_match([pattern], names)]
        return by_name[0] if by_name else by_class

    return scheme


def _compressed_format(group: JsonObject, written: str, config: Mapping[str, object]) -> str:
    weights = group.nested("weights")
    strategy = weights.require("strategy", str)
    if (written, strategy) not in COMPRESSED_TENSORS or weights.require("type", str) != "float":
        refuse_format(group.source, config, "compressed-tensors", f"{written}, {strategy}")
    fmt = COMPRESSED_TENSORS[written, strategy]
    bits = 4 if fmt in ("nvfp4", "mxfp4") else 8
    if weights.require("num_bits", int) != bits:
        raise weights.fault("num_bits", f"is {weights.data['num_bits']}, but {written!r} has {bits}")
    if not weights.optional("symmetric", bool, True):
        raise Unsupported(f"{weights.source}: 'symmetric' false is not supported; formats of floats have no offset.")
    if strategy == "block" and weights.require("block_structure", list) != SQUARE:
        raise weights.fault("block_structure", f"is {weights.data['block_structure']}; supported is {SQUARE}")
    _check_group(weights, fmt)
    return fmt


# ---- Quark and FP8 ---------------------------------------------------------------------------------------------------


def _quark(file: JsonObject, config: Mapping[str, object], prefixes: Sequence[str]) -> Scheme:
    if file.data.get("layer_type_quant_config"):
        raise Unsupported(f"{file.source}: 'layer_type_quant_config' is not supported; name layers by patterns.")
    if file.data.get("export") is not None:
        written = file.nested("export").optional("weight_format", str, "real_quantized")
        if written != "real_quantized":
            raise Unsupported(f"{file.source}: 'weight_format' {written!r} is not supported; it is 'real_quantized'.")
    everywhere = _quark_format(file.nested("global_quant_config"), config)
    layers = file.nested("layer_quant_config") if file.data.get("layer_quant_config") else None
    own = [
        (wildcards([name], prefixes), _quark_format(layers.nested(name), config))
        for name in (layers.data if layers is not None else ())
        if layers is not None
    ]
    left_out = read_patterns(file, "exclude")
    is_left_out = wildcards([name for name in left_out if not name.startswith("re:")], prefixes)
    expressions = [expression(file, "exclude", name) for name in left_out if name.startswith("re:")]

    def scheme(names: Sequence[str]) -> str:
        if is_left_out(names[0]) or any_match(expressions, names):
            return PLAIN
        return next((fmt for matches, fmt in own if matches(names[0])), everywhere)

    return scheme


def _quark_format(file: JsonObject, config: Mapping[str, object]) -> str:
    if file.data.get("weight") is None:
        return PLAIN
    weight = file.nested("weight")
    wanted = {"dtype": "fp4", "qscheme": "per_group", "scale_format": "e8m0"}
    if any(weight.require(key, str) != value for key, value in wanted.items()):
        refuse_format(weight.source, config, "quark", " ".join(str(weight.data[key]) for key in wanted))
    _check_group(weight, "mxfp4")
    return "mxfp4"


def _fp8(file: JsonObject, config: Mapping[str, object], prefixes: Sequence[str]) -> Scheme:
    fmt = "fp8"
    if file.data.get("weight_block_size") is not None:
        fmt = "fp8_block"
        if file.require("weight_block_size", list) != SQUARE:
            raise file.fault("weight_block_size", f"is {file.data['weight_block_size']}; supported is {SQUARE}")
    if file.optional("fmt", str, "e4m3") != "e4m3":
        raise Unsupported(f"{file.source}: 'fmt' {file.data['fmt']!r} is not supported; supported is 'e4m3'.")
    is_left_out = wildcards(["lm_head", *read_patterns(file, "modules_to_not_convert")], prefixes)
    return lambda names: PLAIN if is_left_out(names[0]) else fmt


READERS: Mapping[str, Callable[[JsonObject, Mapping[str, object], Sequence[str]], Scheme]] = {
    "modelopt": _modelopt,
    "compressed-tensors": _compressed_tensors,
    "quark": _quark,
    "fp8": _fp8,
}

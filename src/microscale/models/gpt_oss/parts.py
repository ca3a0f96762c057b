"""What one rank reads of a gpt-oss checkpoint."""

from __future__ import annotations

from collections.abc import Mapping

from microscale.formats import BLOCK
from microscale.models import split
from microscale.models.gpt_oss.config import GptOssConfig
from microscale.models.gpt_oss.names import Names
from microscale.models.reading.parts import Part, zeros
from microscale.parallel.sharding import Shard, split_heads, split_width


def rank_parts(c: GptOssConfig, names: Names, shard: Shard) -> Mapping[str, Part]:
    """``c`` is the whole model's. Routers, norms and the embedding table are read by every rank; biases of what is
    summed over the ranks by the first alone."""
    found = {names.lm_head: split.vocabulary(c.vocab_size, shard)}
    for layer_idx in range(c.num_layers):
        of_layer = _attention(c, names, shard) | _experts(c, names, shard)
        prefix = names.layer.format(layer_idx)
        found |= {prefix + name: part for name, part in of_layer.items()}
    return found


def _attention(c: GptOssConfig, names: Names, shard: Shard) -> dict[str, Part]:
    share = split_heads(c.num_heads, c.num_kv_heads, shard)
    k_first, v_first = c.num_heads * c.head_dim, (c.num_heads + c.num_kv_heads) * c.head_dim
    if len(names.qkv) == 1:
        rows = [
            split.joined(
                split.heads(share.heads, c.head_dim),
                split.heads(share.kv_heads, c.head_dim, first=k_first),
                split.heads(share.kv_heads, c.head_dim, first=v_first),
            )
        ]
    else:
        rows = [split.heads(numbers, c.head_dim) for numbers in (share.heads, share.kv_heads, share.kv_heads)]
    found = {names.sinks: split.heads(share.heads, 1)}
    for name, part in zip(names.qkv, rows, strict=True):
        found |= {f"{name}.weight": part, f"{name}.bias": part}
    found[f"{names.o}.weight"] = split.heads(share.heads, c.head_dim, axis=1)
    if not shard.is_first:
        found[f"{names.o}.bias"] = zeros(c.hidden)
    return found


def _experts(c: GptOssConfig, names: Names, shard: Shard) -> dict[str, Part]:
    share = split_width(c.intermediate, BLOCK, shard)
    # Gate rows are even, up rows odd: a width is one run of twice as many rows.
    found = {f"{names.gate_up}{names.packed}{kind}": split.width(share, 1, each=2) for kind in ("blocks", "scales")}
    found[f"{names.gate_up}_bias"] = split.width(share, 1, each=2)
    for kind in ("blocks", "scales"):
        found[f"{names.down}{names.packed}{kind}"] = split.width(share, 2, per=BLOCK)
    if not shard.is_first:
        found[f"{names.down}_bias"] = zeros(c.hidden, axis=1)
    return found

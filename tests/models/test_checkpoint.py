"""Checkpoint files: what is whole is read bit for bit, what is damaged is named, file and tensor, in one sentence."""

from __future__ import annotations

import json
import os
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from microscale.errors import BadCheckpoint
from microscale.models.checkpoint import INDEX, Checkpoint, TensorSpec
from microscale.models.safetensors_header import MAX_HEADER_BYTES

TENSORS = {
    "a.weight": torch.arange(12, dtype=torch.bfloat16).view(3, 4),
    "b.bias": torch.tensor([1.5, -2.5]),
    "c_scales": torch.tensor([[0, 127, 254]], dtype=torch.uint8),
}
SPECS = [
    TensorSpec("a.weight", (3, 4), ("BF16",)),
    TensorSpec("b.bias", (2,), ("BF16", "F32")),
    TensorSpec("c_scales", (1, 3), ("U8",)),
]


def single(folder: Path, tensors: dict[str, torch.Tensor] | None = None) -> Path:
    save_file(TENSORS if tensors is None else tensors, folder / "model.safetensors")
    return folder


def sharded(folder: Path, index: bool = True) -> Path:
    files = {}
    for number, name in enumerate(TENSORS, start=1):
        files[name] = f"model-{number:05d}-of-00003.safetensors"
        save_file({name: TENSORS[name]}, folder / files[name])
    if index:
        (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 35}, "weight_map": files}))
    return folder


def raw(folder: Path, header: object, data: bytes = b"", length: int | None = None) -> Path:
    """A file with a header of our own making."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    length = len(text) if length is None else length
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", length) + text + data)
    return folder


def edit_index(folder: Path, **changes: str | None) -> None:
    """Change or (None) drop entries of the weight map."""
    index = json.loads((folder / INDEX).read_text())
    for name, file in changes.items():
        index["weight_map"].pop(name.replace("__", "."), None)
        if file is not None:
            index["weight_map"][name.replace("__", ".")] = file
    (folder / INDEX).write_text(json.dumps(index))


@pytest.mark.parametrize("write", [single, sharded, lambda folder: sharded(folder, index=False)])
def test_reads_every_tensor(write: Callable[[Path], Path], tmp_path: Path) -> None:
    checkpoint = Checkpoint(write(tmp_path))
    checkpoint.check(SPECS)
    for name, tensor in TENSORS.items():
        found = checkpoint.read(name, "cpu")
        assert found.dtype == tensor.dtype
        assert torch.equal(found, tensor)


def test_links_are_followed_as_the_hub_cache_needs(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    single(tmp_path / "blobs")
    os.symlink("../blobs/model.safetensors", tmp_path / "snapshot" / "model.safetensors")
    Checkpoint(tmp_path / "snapshot").check(SPECS)


def test_empty_tensor_is_a_tensor(tmp_path: Path) -> None:
    checkpoint = Checkpoint(single(tmp_path, {"empty": torch.zeros(0, 4), "full": torch.ones(2)}))
    assert checkpoint.read("empty", "cpu").shape == (0, 4)


# -- headers


def test_truncated_file_names_the_tensor(tmp_path: Path) -> None:
    path = single(tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(BadCheckpoint, match=r"model\.safetensors is truncated: tensor '\S+' ends at byte"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("size", range(0, 200, 13))
def test_every_shorter_file_is_refused(size: int, tmp_path: Path) -> None:
    path = single(tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(BadCheckpoint, match=r"model\.safetensors"):
        Checkpoint(tmp_path)


def entry(begin: int, end: int, shape: object = None, dtype: object = "U8") -> dict[str, object]:
    return {"dtype": dtype, "shape": [end - begin] if shape is None else shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"{", "the header is not valid JSON"),
        (b"\xff\xfe", "the header is not valid JSON"),
        (b"[" * 50_000, "the header is not valid JSON: it is nested too deeply"),
        (b'{"x": 1, "x": 2}', "key 'x' appears twice"),
        ([1], "the header must be a JSON object"),
        ({"x": 3}, "entry for 'x' must be an object"),
        ({"x": {"shape": [8], "data_offsets": [0, 8]}}, "tensor 'x' has no key 'dtype'"),
        ({"x": {"dtype": "U8", "data_offsets": [0, 8]}}, "tensor 'x' has no key 'shape'"),
        ({"x": {"dtype": "U8", "shape": [8]}}, "tensor 'x' has no key 'data_offsets'"),
        ({"x": entry(0, 8, dtype="U9")}, "tensor 'x': 'dtype' is 'U9', which is not a known type"),
        ({"x": entry(0, 8, dtype=8)}, "tensor 'x': 'dtype' must be a string"),
        ({"x": entry(0, 8, shape=8)}, "tensor 'x': 'shape' must be a list"),
        ({"x": entry(0, 8, shape=[2, "4"])}, "tensor 'x': 'shape' must be a list of sizes"),
        ({"x": entry(0, 8, shape=[-2, -4])}, "tensor 'x': 'shape' must be a list of sizes"),
        ({"x": entry(0, 8, shape=[True, 8])}, "tensor 'x': 'shape' must be a list of sizes"),
        ({"x": entry(0, 8, shape=[7])}, r"tensor 'x': 'data_offsets' span 8 bytes, but U8 \[7\] needs 7"),
        ({"x": entry(0, 8, shape=[8], dtype="BF16")}, r"span 8 bytes, but BF16 \[8\] needs 16"),
        ({"x": {**entry(0, 8), "data_offsets": [0, 4, 8]}}, "tensor 'x': 'data_offsets' must be two offsets"),
        ({"x": {**entry(0, 8), "data_offsets": [-8, 0]}}, "tensor 'x': 'data_offsets' must be two offsets"),
        ({"x": {**entry(0, 8), "data_offsets": [8, 0]}}, "span -8 bytes"),
        ({"x": entry(0, 6), "y": entry(4, 8)}, "tensor 'y' overlaps 'x'"),
        ({"x": entry(0, 8), "y": entry(0, 8)}, "tensor 'y' overlaps 'x'"),
        ({"x": entry(0, 2), "y": entry(4, 8)}, "2 unused bytes between 'x' and 'y'"),
        ({"x": entry(1, 8)}, "1 unused bytes between the header and 'x'"),
        ({"x": entry(0, 6)}, "2 bytes follow the last tensor, 'x'"),
        ({}, "8 bytes follow the last tensor, the header"),
        ({"x": entry(0, 9)}, "is truncated: tensor 'x' ends at byte 9 of the data, which has only 8"),
        ({"x": entry(0, 1 << 60)}, "is truncated: tensor 'x'"),
        ({"x": entry(0, 1 << 70)}, "must be a list of sizes"),
    ],
)
def test_bad_header(header: object, message: str, tmp_path: Path) -> None:
    with pytest.raises(BadCheckpoint, match=message) as caught:
        Checkpoint(raw(tmp_path, header, bytes(8)))
    assert str(tmp_path / "model.safetensors") in str(caught.value)


@pytest.mark.parametrize(
    ("length", "message"),
    [
        (MAX_HEADER_BYTES + 1, "claims a header of 100000001 bytes"),
        ((1 << 64) - 1, "claims a header of 18446744073709551615 bytes"),
        (1000, "ends within its header"),
        (0, "the header is not valid JSON"),
    ],
)
def test_bad_header_length(length: int, message: str, tmp_path: Path) -> None:
    with pytest.raises(BadCheckpoint, match=message):
        Checkpoint(raw(tmp_path, {"x": entry(0, 8)}, bytes(8), length=length))


def test_a_file_that_is_something_else(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n")
    with pytest.raises(BadCheckpoint, match="claims a header of"):
        Checkpoint(tmp_path)


def test_metadata_is_no_tensor(tmp_path: Path) -> None:
    checkpoint = Checkpoint(raw(tmp_path, {"__metadata__": {"format": "pt"}, "x": entry(0, 8)}, bytes(8)))
    assert set(checkpoint.entries) == {"x"}


def test_unaligned_tensors_are_read(tmp_path: Path) -> None:
    header = {"odd": entry(0, 3), "x": entry(3, 7, [2], "BF16")}
    data = bytes(3) + torch.tensor([1.0, -2.0], dtype=torch.bfloat16).view(torch.uint8).numpy().tobytes()
    assert Checkpoint(raw(tmp_path, header, data)).read("x", "cpu").tolist() == [1.0, -2.0]


@settings(max_examples=300, deadline=None)
@given(place=st.integers(0, 400), byte=st.integers(0, 255), cut=st.integers(0, 3))
def test_any_changed_byte_is_read_or_refused(place: int, byte: int, cut: int) -> None:
    complaint: str | None = None
    with tempfile.TemporaryDirectory() as folder:
        path = single(Path(folder)) / "model.safetensors"
        data = bytearray(path.read_bytes())
        data[place % len(data)] = byte
        path.write_bytes(data[: len(data) - cut])
        try:
            checkpoint = Checkpoint(Path(folder))
            shapes = {name: checkpoint.read(name, "cpu").shape for name in checkpoint.entries}
        except BadCheckpoint as exc:
            complaint = str(exc)
        else:
            assert shapes == {name: torch.Size(found.shape) for name, found in checkpoint.entries.items()}
    assert complaint is None or "model.safetensors" in complaint


# -- folders, shards and the index


def test_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(BadCheckpoint, match="nowhere is not a folder"):
        Checkpoint(tmp_path / "nowhere")


def test_folder_without_weights(tmp_path: Path) -> None:
    with pytest.raises(BadCheckpoint, match=r"has no \*\.safetensors file"):
        Checkpoint(tmp_path)


def test_single_file_and_index_is_ambiguous(tmp_path: Path) -> None:
    with pytest.raises(BadCheckpoint, match=r"both model\.safetensors and"):
        Checkpoint(single(sharded(tmp_path)))


def test_missing_shard(tmp_path: Path) -> None:
    (sharded(tmp_path) / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(BadCheckpoint, match=r"model-00002-of-00003\.safetensors is missing.*'b\.bias'"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("number", [1, 2, 3])
def test_missing_shard_without_index(number: int, tmp_path: Path) -> None:
    (sharded(tmp_path, index=False) / f"model-0000{number}-of-00003.safetensors").unlink()
    with pytest.raises(BadCheckpoint, match=f"lacks shard {number} of 3"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("last", [1, 2], ids=["0_to_1_of_2", "0_to_2_of_2"])
def test_shards_may_count_from_zero(last: int, tmp_path: Path) -> None:
    for number in range(last + 1):
        save_file({f"t{number}": torch.ones(1)}, tmp_path / f"model-0000{number}-of-00002.safetensors")
    assert len(Checkpoint(tmp_path).entries) == last + 1


def test_tensor_in_two_shards(tmp_path: Path) -> None:
    for name in ("x.safetensors", "y.safetensors"):
        save_file({"twice": torch.ones(1)}, tmp_path / name)
    with pytest.raises(BadCheckpoint, match=r"y\.safetensors: tensor 'twice' is also in x\.safetensors"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ghost": "model-00001-of-00003.safetensors"}, "00001-of-00003.safetensors lacks tensor 'ghost'"),
        ({"a__weight": "model-00002-of-00003.safetensors"}, "00002-of-00003.safetensors lacks tensor 'a.weight'"),
        ({"a__weight": None, "b__bias": None, "c_scales": None}, "lacks tensor 'a.weight'"),
    ],
)
def test_index_that_disagrees(changes: dict[str, str | None], message: str, tmp_path: Path) -> None:
    edit_index(sharded(tmp_path), **changes)
    with pytest.raises(BadCheckpoint, match=message):
        Checkpoint(tmp_path).check(SPECS)


def test_index_that_swaps_two_shards(tmp_path: Path) -> None:
    edit_index(
        sharded(tmp_path),
        a__weight="model-00002-of-00003.safetensors",
        b__bias="model-00001-of-00003.safetensors",
    )
    with pytest.raises(BadCheckpoint, match=r"holds tensor 'a\.weight', which .*index\.json puts it in model-00002"):
        Checkpoint(tmp_path)


def test_index_that_leaves_a_tensor_out(tmp_path: Path) -> None:
    folder = sharded(tmp_path)
    save_file({**TENSORS, "extra": torch.ones(1)}, folder / "all.safetensors")
    edit_index(folder, a__weight="all.safetensors", b__bias="all.safetensors", c_scales="all.safetensors")
    with pytest.raises(BadCheckpoint, match=r"holds tensor 'extra', which .*index\.json does not know"):
        Checkpoint(folder)


@pytest.mark.parametrize(
    "file",
    ["../x.safetensors", "/etc/x.safetensors", "sub/x.safetensors", "..\\x.safetensors", "..", ".", "", "config.json"],
)
def test_index_cannot_reach_outside(file: str, tmp_path: Path) -> None:
    inside = tmp_path / "inside"
    (inside / "sub").mkdir(parents=True)
    for place in (tmp_path, inside / "sub"):
        save_file({"a.weight": TENSORS["a.weight"]}, place / "x.safetensors")
    edit_index(sharded(inside), a__weight=file)
    with pytest.raises(BadCheckpoint, match=r"'a\.weight' names .* not a \*\.safetensors file of the same folder"):
        Checkpoint(inside)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "must hold a JSON object"),
        ("{}", "has no key 'weight_map'"),
        ('{"weight_map": []}', "'weight_map' must be an object"),
        ('{"weight_map": {"a": 1}}', "'a' must be a string"),
        ('{"weight_map"', "is not valid JSON"),
    ],
)
def test_bad_index(text: str, message: str, tmp_path: Path) -> None:
    (sharded(tmp_path) / INDEX).write_text(text)
    with pytest.raises(BadCheckpoint, match=message) as caught:
        Checkpoint(tmp_path)
    assert INDEX in str(caught.value)


# -- against what the model expects


def test_missing_tensor(tmp_path: Path) -> None:
    checkpoint = Checkpoint(single(tmp_path, {"a.weight": TENSORS["a.weight"]}))
    with pytest.raises(BadCheckpoint, match=r"lacks tensor 'b\.bias'"):
        checkpoint.check(SPECS)


def test_extra_tensor(tmp_path: Path) -> None:
    with pytest.raises(BadCheckpoint, match=r"model\.safetensors: tensor 'c_scales' is no part of the model"):
        Checkpoint(single(tmp_path)).check(SPECS[:2])


def test_wrong_shape(tmp_path: Path) -> None:
    spec = TensorSpec("a.weight", (4, 3), ("BF16",))
    message = r"model\.safetensors: tensor 'a\.weight' has shape \[3, 4\], but the config asks for \[4, 3\]"
    with pytest.raises(BadCheckpoint, match=message):
        Checkpoint(single(tmp_path)).check([spec, *SPECS[1:]])


def test_wrong_dtype(tmp_path: Path) -> None:
    spec = TensorSpec("b.bias", (2,), ("BF16", "F16"))
    with pytest.raises(BadCheckpoint, match=r"tensor 'b\.bias' has type F32, not BF16 or F16"):
        Checkpoint(single(tmp_path)).check([SPECS[0], spec, SPECS[2]])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weight_that_is_not_finite(value: float, dtype: torch.dtype, tmp_path: Path) -> None:
    weight = torch.ones(33, 65, dtype=dtype)
    weight[20, 7] = value
    checkpoint = Checkpoint(single(tmp_path, {"w": weight}))
    with pytest.raises(BadCheckpoint, match=r"model\.safetensors: tensor 'w' contains NaN or infinity"):
        checkpoint.read("w", "cpu")


@pytest.mark.parametrize("name", ["experts.gate_up_proj_scales", "mlp1_weight.scales"])
def test_scale_that_is_nan(name: str, tmp_path: Path) -> None:
    scales = torch.full((4, 9), 127, dtype=torch.uint8)
    scales[3, 8] = 255
    checkpoint = Checkpoint(single(tmp_path, {name: scales}))
    with pytest.raises(BadCheckpoint, match=f"model.safetensors: tensor '{name}' contains the scale byte 255"):
        checkpoint.read(name, "cpu")


def test_byte_255_is_fine_in_values(tmp_path: Path) -> None:
    checkpoint = Checkpoint(single(tmp_path, {"x_blocks": torch.full((4,), 255, dtype=torch.uint8)}))
    assert checkpoint.read("x_blocks", "cpu").tolist() == [255] * 4


def test_file_that_vanishes_after_the_check(tmp_path: Path) -> None:
    checkpoint = Checkpoint(single(tmp_path))
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(BadCheckpoint, match=r"model\.safetensors: tensor 'a\.weight' cannot be read"):
        checkpoint.read("a.weight", "cpu")

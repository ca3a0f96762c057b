"""``microscale bench load``: every row is measured, and what was read wrongly has no figure."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from microscale.cli import app
from microscale.engine.config import EngineConfig
from microscale.engine.loading.prepare import Prepared, prepare
from microscale.errors import BadSetting
from microscale.models.checkpoint import FromCheckpoint
from microscale.models.reading.chunks import READS, DiskReads
from microscale.models.reading.file import WeightFile
from microscale_lab.cli.bench_load import parse_reads
from microscale_lab.kernel_bench.rows import WrongResult
from microscale_lab.model_bench import load as bench_load
from microscale_lab.model_bench.random_checkpoint import write_random_checkpoint


def tiny(folder: Path) -> Prepared:
    write_random_checkpoint("gpt-oss-tiny", folder / "tiny", {})
    return prepare(EngineConfig(str(folder / "tiny"), device="cpu"))


def test_every_row_has_its_figures(tmp_path: Path) -> None:
    result = bench_load.run(tiny(tmp_path), repeats=2)
    own = str(READS["cpu"])
    names = ["raw", f"in flight {own}", f"buffers {own}", f"tensors {own}", "load"]
    assert [row.what for row in result.rows] == names
    assert result.num_bytes == (tmp_path / "tiny" / "model.safetensors").stat().st_size
    for row in result.rows:
        assert row.gbs == pytest.approx(result.num_bytes / row.seconds / 1e9)
        assert row.peak_resident >= result.resident_before // 2
        assert row.page_cache_growth <= 1 << 20
    assert result.rows[0].share_of_raw == 1.0
    text = bench_load.table(result)
    assert "resident without the weights" in text
    assert len(text.splitlines()) == 7
    assert bench_load.as_json(result)["beside_weights"] == result.beside_weights


def test_tensors_that_are_not_the_files_have_no_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = tiny(tmp_path)
    assert isinstance(prepared.weights, FromCheckpoint)
    right = prepared.weights.read_one
    monkeypatch.setattr(prepared.weights, "read_one", lambda name, device: torch.flip(right(name, device), (0,)))
    with pytest.raises(WrongResult, match="was not read as it is there"):
        bench_load.run(prepared, repeats=1)


def test_the_row_of_buffers_reads_every_byte_by_the_loaders_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared, read = tiny(tmp_path), list[int]()
    assert isinstance(prepared.weights, FromCheckpoint)
    read_into = WeightFile.read_into

    def counted(file: WeightFile, memory: memoryview, offset: int, end: int) -> None:
        assert threading.current_thread().name == "weights"
        read.append(end - offset)
        read_into(file, memory, offset, end)

    monkeypatch.setattr(WeightFile, "read_into", counted)
    device = prepared.device
    prepared.weights.read_through(device, DiskReads(2, 1 << 20), bench_load.OnlyBuffers(device))
    assert sum(read) >= sum(entry.num_bytes for entry in prepared.weights.entries)


@pytest.mark.parametrize("text", ["2", "0x8", "2x0", "2x8x1", "-1x8", "2 x 8"])
def test_reads_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(BadSetting, match="such as 2x8"):
        parse_reads(text)


def test_a_model_without_files_is_refused() -> None:
    prepared = prepare(EngineConfig("gpt-oss-tiny", load_format="dummy", device="cpu"))
    with pytest.raises(BadSetting, match="has no files to read; name a checkpoint, or write one with --make"):
        bench_load.run(prepared, repeats=1)


def test_the_command_writes_a_checkpoint_and_measures_it(tmp_path: Path) -> None:
    folder = tmp_path / "made"
    arguments = ["bench", "load", "gpt-oss-tiny", "--make", str(folder), "--layers", "2", "--repeats", "1"]
    found = CliRunner().invoke(app, [*arguments, "--device", "cpu", "--reads", "1x4", "--reads", "3x16"])
    assert found.exit_code == 0, found.output
    assert "of raw" in found.output
    for row in ("in flight", "buffers", "tensors"):
        assert f"{row} 1 x 4 MiB" in found.output
        assert f"{row} 3 x 16 MiB" in found.output
    assert (folder / "config.json").is_file()
    again = CliRunner().invoke(app, [*arguments, "--device", "cpu"])
    assert isinstance(again.exception, BadSetting)
    assert "is not empty" in str(again.exception)

"""Another card's kernels on the GPU at hand, on a machine without one: everything but the launch itself happens."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton import knobs
from triton.runtime.errors import OutOfResources

from microscale.errors import Unsupported
from microscale.hardware import Gpu, detect, known
from microscale.hardware.tiles.gemm import possible
from microscale.kernels.launch import launch, watching
from microscale.kernels.moe import grouped, small_batch
from microscale.kernels.moe.spec import MoeSpec
from microscale.kernels.op import Activations
from microscale_lab.cases.experts import ExpertsInput, ExpertsProblem
from microscale_lab.prove import bridge
from microscale_lab.prove.bridge import as_card, label
from ptxproof import TritonKernel
from ptxproof import play as module
from support.fake_driver import FakeDriver, faked

pytestmark = pytest.mark.timeout(300)
H200, A100, GB10 = known("h200"), known("a100"), known("gb10")


@triton.jit  # type: ignore[untyped-decorator]
def largest(x_ptr, y_ptr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, BLOCK)
    tl.store(y_ptr, tl.max(tl.load(x_ptr + at), axis=0))


@triton.jit  # type: ignore[untyped-decorator]
def copy(x_ptr, y_ptr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + at))


@triton.jit  # type: ignore[untyped-decorator]
def product(x_ptr, y_ptr, M: tl.constexpr, K: tl.constexpr):  # type: ignore[no-untyped-def]
    rows, columns = tl.arange(0, M), tl.arange(0, K)
    x = tl.load(x_ptr + rows[:, None] * K + columns[None, :])
    y = tl.load(x_ptr + columns[:, None] * M + rows[None, :])
    tl.store(y_ptr + rows[:, None] * M + rows[None, :], tl.dot(x, y))


X, Y = torch.zeros(1024), torch.zeros(1)


def start(fn: Any = largest, **options: Any) -> None:
    launch(fn, (1,), (X, Y), {"BLOCK": 1024}, options)


def start_product(size: int, depth: int) -> None:
    launch(product, (1,), (X.bfloat16(), Y), {"M": size, "K": depth}, {})


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeDriver]:
    """An H200, to Triton and to us, with a cold cache."""
    with knobs.cache.scope(), faked(H200) as driver:
        knobs.cache.dir = str(tmp_path)
        monkeypatch.setattr(bridge, "present", lambda: driver.gpu)
        yield driver


def play_on(driver: FakeDriver, gpu: Gpu) -> None:
    driver.gpu = driver.utils.gpu = gpu


@contextmanager
def refused(card: Gpu, reason: str) -> Iterator[None]:
    with pytest.raises(Unsupported, match=reason), as_card(card):
        yield


def machine_of(cubin: bytes) -> int:
    """The SM that an ELF file of machine code is for: a byte of its flags, which one depends on the ABI's version."""
    flags = int(struct.unpack_from("<I", cubin, 48)[0])
    return flags >> 8 & 0xFF if cubin[8] >= 8 else flags & 0xFF


def run_block_scaled(problem: ExpertsProblem) -> None:
    gpu = detect()
    tile = next(iter(possible(grouped.gemm_path(4, True, False), gpu)))
    case = problem.layer
    grouped.run(problem.packed, case.gate, problem.x, problem.routing, gpu, block_scaled=True, tile=tile)


def test_kernels_are_the_cards_and_their_machine_code_is_for_the_gpu_at_hand(here: FakeDriver) -> None:
    """Triton's and Gluon's, cold and warm; and jit functions hold none of it afterwards."""
    problem = ExpertsProblem.of(ExpertsInput("played", 1, hidden=352, intermediate=160), "mxfp4", "cpu")
    case = problem.layer
    sizes = (case.num_experts, case.top_k, case.hidden, case.intermediate)
    spec = MoeSpec(*sizes, "mxfp4", Activations.BF16, case.gate, case.bias, 1)
    counted = []
    for _ in range(2):
        here.utils.loaded.clear()
        with as_card(GB10) as executed:
            assert detect() is GB10
            run_block_scaled(problem)
            small_batch.run_direct(problem.packed, spec, detect(), problem.x, problem.routing)
        assert {"gate_up", "down", "gate_up_small", "down_direct"} <= {loaded.name for loaded in here.utils.loaded}
        assert {machine_of(loaded.cubin) for loaded in here.utils.loaded} == {90}
        assert len(here.utils.loaded) == executed.kernels
        counted.append(executed)
    cold, warm = counted
    assert cold.spelled["block-scaled mma"] > 0
    assert cold.spelled["pairs of float32"] > 0
    assert warm.by_kernel == cold.by_kernel
    assert detect() is not GB10
    assert f"as NVIDIA GB10 on NVIDIA H200: {cold.kernels} kernels" in cold.summary()
    assert label(GB10, cold) == "gb10's kernels on an NVIDIA H200; not gb10's speed"


def test_the_gpus_own_kernels_are_not_mixed_with_those_of_cards(here: FakeDriver, tmp_path: Path) -> None:
    """In memory and in the cache: the same function before, inside and after, and as the same SM."""
    start()
    for card in (GB10, A100, known("h100")):
        with as_card(card) as executed:
            start()
        assert executed.kernels == 1
    start()
    assert [metadata.target.arch for metadata in here.launched] == [90, 121, 80, 90, 90]
    assert len(here.utils.loaded) == 4  # the last is the first, which is still loaded
    assert {machine_of(loaded.cubin) for loaded in here.utils.loaded} == {90}
    kinds = {re.sub("^[A-Z0-9]+", "", folder.name).rpartition("-")[0] for folder in tmp_path.iterdir()}
    assert kinds == {"", "-sm121-on-sm90", "-sm80-on-sm90", "-sm90-on-sm90"}
    assert len(largest.device_caches) == 1


def test_another_translation_makes_other_kernels(here: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = []
    for version in ("one", "two", "one"):
        monkeypatch.setattr(module, "_version", lambda version=version: version)
        with as_card(GB10) as executed:
            keys.append(knobs.runtime.add_stages_inspection_hook())
            start()
        assert executed.kernels == 1
    assert keys[0] == keys[2] != keys[1]
    ours = [metadata for metadata in here.launched if metadata.name == "largest"]
    assert len(ours) == 3


def test_shared_memory_is_the_cards(here: FakeDriver) -> None:
    with pytest.raises(OutOfResources) as raised, as_card(GB10) as executed:
        start_product(32, 1024)
    assert raised.value.limit == GB10.shared_per_block == 101376
    assert raised.value.required > 101376
    assert not executed.kernels
    with as_card(A100) as executed:
        start_product(32, 1024)
    assert executed.kernels == 1
    play_on(here, GB10)
    with refused(A100, r"bytes of shared memory, which .*A100 80GB has and NVIDIA GB10, which runs"):
        start_product(32, 1024)


def test_launch_attributes_are_what_both_have(here: FakeDriver) -> None:
    """Programmatic dependent launch is dropped where it cannot be had, and refused where the card has none."""
    with as_card(GB10):
        start(launch_pdl=True)
    with refused(A100, r"asks for programmatic dependent launch, which NVIDIA A100 80GB does not"):
        start(launch_pdl=True)
    play_on(here, A100)
    with as_card(GB10):
        start(launch_pdl=True)
    assert [metadata.launch_pdl for metadata in here.launched] == [True, False]


def test_what_cannot_be_spelled_out_is_refused_by_name(here: FakeDriver) -> None:
    with refused(known("b200"), r"(tcgen05|mbarrier)\S* .*cannot be spelled out for SM 9\.0"):
        start_product(128, 64)
    play_on(here, A100)
    with refused(GB10, r"\.explicitcluster \(clusters\) cannot be spelled out for SM 8\.0"):
        start(copy, num_ctas=2)
    with refused(H200, r"\w+\.\S+ \(.*\) cannot be spelled out for SM 8\.0"):
        start_product(128, 64)


def test_an_edit_changes_what_runs_and_nothing_that_is_kept(here: FakeDriver, tmp_path: Path) -> None:
    seen: list[str] = []

    def edit(kernel: TritonKernel, ptx: str) -> str:
        seen.append(kernel.short_name)
        assert ".target sm_121a" in ptx
        return re.sub(r"max\S*\.f32", lambda found: found[0].replace("max", "min"), ptx)

    with as_card(GB10):
        start()
    before = sorted(tmp_path.iterdir())
    with as_card(GB10, edit), watching() as started:
        start()
        start()
    assert seen == ["largest"]
    assert [kernel.short_name for kernel in started] == ["largest"]
    assert sorted(tmp_path.iterdir()) == before
    with as_card(GB10):
        start()
    plain, edited, again = here.utils.loaded
    assert plain.cubin == again.cubin != edited.cubin


def test_a_card_inside_of_a_card(here: FakeDriver) -> None:
    with as_card(GB10) as outer, as_card(A100) as inner:
        assert detect() is A100
        start()
    assert (outer.kernels, inner.kernels) == (0, 1)


def test_a_machine_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(Unsupported, match="Running NVIDIA GB10's kernels needs a GPU to run them on"), as_card(GB10):
        pass

"""Kernels that are compiled ahead are those that a launch looks for; a cache is used or ignored, never wrong."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from textwrap import dedent

import pytest
import triton
import triton.compiler
from triton import knobs
from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.backends.compiler import GPUTarget
from triton.runtime.cache import get_cache_key

import microscale
from microscale.hardware import WARP_SIZE, known
from microscale.kernels.compiling import source as sources
from microscale.kernels.compiling.cache import use_cache
from microscale.kernels.compiling.job import (
    SLOW,
    CompileJob,
    is_compiled,
    missing,
    run_job,
    shared_missing,
    slowest_first,
    workers,
)
from microscale.kernels.compiling.pool import usable_cores
from microscale.kernels.compiling.source import cache_hash
from microscale.kernels.compiling.warming import LateKernels, Warming, load_kernels
from microscale.kernels.launch import launch
from microscale.models.config import MAX_DRAFT
from microscale.models.recorded import bind_shapes, record
from microscale.planning.ops import Activations, Kernel, Launch, Ops, Preference
from microscale.planning.precision import PRECISIONS
from microscale_lab.prove import inventory
from support.fake_driver import faked_anew

GB10 = known("gb10")
TARGET = GPUTarget("cuda", GB10.sm, WARP_SIZE)
SMALL = ("rms_norm", "combine")
"""Functions that compile in a second."""


@cache
def recorded(card: str = "gb10", name: str = "demo", precision: str = "exact") -> Mapping[Kernel, Launch]:
    ops = Ops(known(card), Activations.BF16, Preference(), PRECISIONS[precision])
    return record(bind_shapes(inventory.models()[name], ops))


def quick(count: int) -> dict[Kernel, Launch]:
    """A few small kernels, all different."""
    found = {kernel: launch for kernel, launch in recorded().items() if kernel.short_name in SMALL}
    assert len(found) >= count
    return dict(list(found.items())[:count])


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A cache of its own, in use."""
    with knobs.cache.scope(), knobs.compilation.scope():
        yield use_cache(tmp_path / "kernels")


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with three kernels, compiled once for all tests; they copy it."""
    path = tmp_path_factory.mktemp("filled")
    with knobs.cache.scope(), knobs.compilation.scope():
        results = list(run_job(CompileJob(list(quick(3)), TARGET, use_cache(path), 2)))
    assert [result.error for result in results] == [None] * 4, results
    return path


def launch_all(launches: Mapping[Kernel, Launch]) -> None:
    """The ordinary way."""
    for each in launches.values():
        launch(each.fn, each.grid, each.arguments, each.constants, each.options)


@pytest.mark.parametrize(
    ("card", "name", "precision"),
    [
        ("gb10", "gpt-oss-20b", "exact"),
        ("h200", "gpt-oss-20b", "balanced"),
        ("rtx4090", "gemma-4-26b-a4b", "fast"),
        ("b200", "qwen3-30b-a3b", "exact"),
    ],
)
def test_the_key_is_the_launchs(card: str, name: str, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kernel of a model: what ``cache_hash`` says of the record that another process reads, and what Triton's
    launch hands to its compiler."""
    found: list[str] = []

    def hear(src: triton.compiler.ASTSource, target: GPUTarget, options: dict[str, object]) -> None:
        backend = triton.compiler.make_backend(target)
        key = get_cache_key(
            src, backend, backend.parse_options(options | src.parse_options()), get_cache_invalidating_env_vars()
        )
        found.append(hashlib.sha256(key.encode()).hexdigest())

    monkeypatch.setattr(triton.compiler, "compile", hear)
    launches = recorded(card, name, precision)
    target = GPUTarget("cuda", known(card).sm, WARP_SIZE)
    job = json.loads(json.dumps(CompileJob(list(launches), target, Path("x"), 1).to_json()))
    read = CompileJob.from_json(job)
    assert list(read.kernels) == list(launches)
    assert len(launches) > 40
    with faked_anew(known(card)):
        for kernel, each in zip(read.kernels, launches.values(), strict=True):
            each.fn.run(*each.arguments, grid=each.grid, warmup=True, **each.constants, **each.options)
            assert cache_hash(kernel, target) == found[-1]
    assert len(set(found)) == len(launches)


ORDERS = """
import json, random, sys
from microscale.kernels.compiling.job import CompileJob
from microscale.kernels.compiling.source import cache_hash
job = CompileJob.from_json(json.load(open(sys.argv[1])))
order = list(range(len(job.kernels)))
random.Random(sys.argv[2]).shuffle(order)
found = {number: cache_hash(job.kernels[number], job.target) for number in order}
print(json.dumps(sorted(found.items())))
"""


def test_the_key_does_not_depend_on_what_came_before(tmp_path: Path) -> None:
    """Processes that come to the kernels in other orders find each other's."""
    kernels = list(recorded("gb10", "gpt-oss-20b"))
    (tmp_path / "job.json").write_text(json.dumps(CompileJob(kernels, TARGET, tmp_path, 1).to_json()))
    found = set()
    for seed in "ab":
        command = [sys.executable, "-c", ORDERS, str(tmp_path / "job.json"), seed]
        found.add(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    found.add(json.dumps([[number, cache_hash(kernel, TARGET)] for number, kernel in enumerate(kernels)]) + "\n")
    assert len(found) == 1
    assert len(json.loads(found.pop())) == len(kernels)


def test_a_launch_finds_what_was_compiled_ahead(folder: Path, filled: Path) -> None:
    shutil.copytree(filled, folder, dirs_exist_ok=True)
    launches = quick(3)
    late = LateKernels()
    late.watch()
    with faked_anew(GB10) as driver:
        launch_all(launches)
        assert (late.compiled, late.loaded) == (0, 3)
        assert [one.name for one in driver.launched] == [kernel.short_name for kernel in launches]


def test_nothing_is_left_for_later(folder: Path, filled: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Loaded ahead, a launch does nothing but launch; one that was forgotten is told by name."""
    shutil.copytree(filled, folder, dirs_exist_ok=True)
    launches = quick(4)
    ahead = dict(list(launches.items())[:3])
    announced: list[int] = []
    with faked_anew(GB10) as driver, knobs.runtime.scope():
        assert list(load_kernels(ahead.values())) == [None] * 3
        assert len(driver.utils.loaded) == 3
        assert driver.launched == []
        late = LateKernels()
        late.watch()
        late.announce(lambda: announced.append(late.compiled))
        launch_all(ahead)
        assert (late.compiled, late.loaded, len(driver.utils.loaded), len(driver.launched)) == (0, 0, 3, 3)
        assert announced == []
        launch_all(launches)
    assert (late.compiled, late.loaded) == (1, 0)
    assert announced == [0]  # before it was compiled
    name = list(launches)[3].short_name
    assert f"The kernel {name} was compiled in" in caplog.text


def test_a_folder_may_be_moved(folder: Path, filled: Path, tmp_path: Path) -> None:
    """As into an image, at another place; and another card's kernels are not taken for this one's."""
    kernels = list(quick(3))
    assert missing(kernels, TARGET) == kernels
    shutil.copytree(filled, folder, dirs_exist_ok=True)
    assert missing(kernels, TARGET) == []
    assert not shared_missing()
    assert missing(kernels, GPUTarget("cuda", known("rtx5090").sm, WARP_SIZE)) == kernels
    assert missing([replace(kernel, options=(("num_warps", 2),)) for kernel in kernels], TARGET) != []


@pytest.mark.parametrize("damage", ["cut", "emptied", "removed", "list cut", "list of nonsense", "other bytes"])
def test_a_damaged_entry_is_compiled_again(folder: Path, filled: Path, damage: str) -> None:
    shutil.copytree(filled, folder, dirs_exist_ok=True)
    kernels = list(quick(3))
    cubins = sorted(folder.rglob("*.cubin"))
    binary = cubins[0]
    entry = next(binary.parent.glob("__grp__*.json"))
    whole = binary.read_bytes()
    match damage:
        case "cut":
            binary.write_bytes(whole[: len(whole) // 2])
        case "emptied":
            binary.write_bytes(b"")
        case "removed":
            binary.unlink()
        case "list cut":
            entry.write_bytes(entry.read_bytes()[:40])
        case "list of nonsense":
            entry.write_text('["child_paths"]')
        case "other bytes":
            binary.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    lacking = missing(kernels, TARGET)
    assert len(lacking) == 1
    if damage in ("cut", "list cut"):  # the launch itself compiles it then
        with faked_anew(GB10) as driver:
            late = LateKernels()
            late.watch()
            launch_all(quick(3))
            assert (late.compiled, late.loaded) == (1, 2)
            assert len(driver.launched) == 3
        assert missing(kernels, TARGET) == []
        assert binary.read_bytes() == whole


def test_c_modules_are_built_without_a_driver(filled: Path) -> None:
    """They name the driver's library, and find it where they are loaded."""
    built = [*filled.rglob("cuda_utils*.so")]
    assert len(built) == 1
    assert b"libcuda.so.1\0" in built[0].read_bytes()
    assert (len([*filled.rglob("__triton_launcher*.so")]) > 0) == sources.MAKES_LAUNCHERS


def test_a_kernel_that_does_not_compile_is_named(folder: Path) -> None:
    """And costs itself alone."""
    good, other = quick(2)
    bad = replace(other, options=(("num_warps", 3),))
    unknown = replace(other, options=(("num_wraps", 4),))
    results = {result.name: result.error for result in run_job(CompileJob([bad, good, unknown], TARGET, folder, 1))}
    assert results.pop(good.label) is None
    assert results.pop("Triton's module for the driver") is None
    assert "power of 2" in str(results[bad.label])
    assert any("num_wraps" in str(error) for error in results.values())
    assert is_compiled(good, TARGET)


def children(pid: int) -> list[int]:
    try:
        return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def wait_for(condition: object, seconds: float = 60.0) -> None:
    until = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < until
        time.sleep(0.02)


def test_a_compiler_that_is_killed_costs_its_kernel(folder: Path) -> None:
    kernels = list(quick(2))
    run = run_job(CompileJob(kernels, TARGET, folder, 1))
    first = next(run)
    assert first.kernel is None
    helper = next(pid for pid in children(os.getpid()) if b"microscale.kernels.compiling" in command_of(pid))
    wait_for(lambda: children(helper))
    os.kill(children(helper)[0], signal.SIGKILL)
    rest = list(run)
    assert [result.kernel for result in rest] == kernels
    assert rest[0].error == "the compiler was ended by SIGKILL"
    assert rest[1].error is None


def test_a_helper_that_is_killed_ends_the_run(folder: Path) -> None:
    kernels = list(quick(2))
    run = run_job(CompileJob(kernels, TARGET, folder, 1))
    next(run)
    helper = next(pid for pid in children(os.getpid()) if b"microscale.kernels.compiling" in command_of(pid))
    wait_for(lambda: children(helper))
    compiler = children(helper)[0]
    os.kill(helper, signal.SIGKILL)
    assert {result.error for result in run} == {"the compiling process ended with status -9"}
    wait_for(lambda: not Path(f"/proc/{compiler}").exists() or command_of(compiler) == b"")


def command_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


OWNER = """
import sys
from pathlib import Path
from triton.backends.compiler import GPUTarget
from microscale.kernels.compiling.cache import use_cache
from microscale.kernels.compiling.job import CompileJob, run_job
import json
job = CompileJob.from_json(json.load(open(sys.argv[1])))
use_cache(job.folder)
for result in run_job(job):
    print(result.name, flush=True)
"""


@pytest.mark.nightly
def test_a_kill_at_any_moment_leaves_a_cache_that_is_used_or_ignored(
    folder: Path, filled: Path, tmp_path: Path
) -> None:
    """The owner is killed again and again. Its compilers end with it, and what they leave is whole or not seen."""
    kernels = list(quick(3))
    (tmp_path / "job.json").write_text(json.dumps(CompileJob(kernels, TARGET, folder, 2).to_json()))
    chance = random.Random(5)
    for _ in range(3):
        owner = subprocess.Popen([sys.executable, "-c", OWNER, str(tmp_path / "job.json")], stdout=subprocess.PIPE)
        assert owner.stdout is not None
        owner.stdout.readline()  # the compilers run
        time.sleep(chance.uniform(0.0, 1.5))
        family = [pid for helper in children(owner.pid) for pid in (helper, *children(helper))]
        owner.kill()
        owner.wait()
        owner.stdout.close()
        wait_for(lambda family=family: not any(command_of(pid) for pid in family), 10.0)
        for kernel in kernels:
            if is_compiled(kernel, TARGET):
                assert cubin(folder, kernel) == cubin(filled, kernel)
    lacking = missing(kernels, TARGET)
    assert [result.error for result in run_job(CompileJob(lacking, TARGET, folder, 2))] == [None] * (1 + len(lacking))
    assert [cubin(folder, kernel) for kernel in kernels] == [cubin(filled, kernel) for kernel in kernels]


def cubin(cache_folder: Path, kernel: Kernel) -> bytes:
    with knobs.cache.scope():
        use_cache(cache_folder)
        entry = triton.runtime.cache.get_cache_manager(cache_hash(kernel, TARGET))
        return Path(entry.get_group(f"{kernel.short_name}.json")[f"{kernel.short_name}.cubin"]).read_bytes()


def test_warming_beside_other_work(tmp_path: Path, filled: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Two kernels are there, one is compiled, one fails; what this thread launches meanwhile is started as usual."""
    caplog.set_level("INFO", "microscale")
    launches = quick(3)
    where = tmp_path / "kernels"
    shutil.copytree(filled, where)
    entry = sorted(where.rglob("*.cubin"))[0].parent
    shutil.rmtree(entry)
    kernel, launch = next(iter(launches.items()))
    bad = replace(kernel, options=(("num_warps", 3),))
    listed = launches | {bad: launch._replace(options={"num_warps": 3})}
    with knobs.cache.scope(), knobs.compilation.scope(), faked_anew(GB10) as driver:
        warming = Warming(lambda: listed, TARGET, where, 2)
        warming.start()
        seen: list[tuple[int, int]] = []
        warming.finish(lambda: seen.append((warming.done, warming.total)))
        late = LateKernels()
        late.watch()
        launch_all(launches)
        assert (late.compiled, late.loaded) == (0, 0)
        assert len(driver.launched) == 3
    assert seen[-1] == (2, 2)
    assert warming.loaded == 3
    assert list(warming.failed) == [bad]
    assert "power of 2" in caplog.text
    assert "3 kernels are ready, 2 of them compiled now" in caplog.text
    for part in ("listed", "looked up", "compiled", "loaded"):
        assert re.search(rf"\b{part} \d+\.\d\d[,.]", caplog.text), part


def test_warming_as_a_guest_leaves_triton_as_it_is(tmp_path: Path) -> None:
    """In vLLM's process: kernels go to the cache in use, and Triton reads them there in its own way."""
    launches = quick(1)
    with knobs.cache.scope(), knobs.compilation.scope(), faked_anew(GB10):
        knobs.cache.dir = str(tmp_path)
        before = knobs.cache.manager_class, knobs.compilation.store_binary_only
        warming = Warming(lambda: launches, TARGET, None, 1, is_guest=True)
        warming.start()
        warming.finish()
        assert (knobs.cache.manager_class, knobs.compilation.store_binary_only) == before
        late = LateKernels()
        late.watch()
        launch_all(launches)
        assert (late.compiled, late.loaded) == (0, 0)
    assert (warming.done, warming.loaded, warming.failed) == (1, 1, {})
    assert list(tmp_path.rglob("*.cubin"))


def test_warming_that_fails_is_told_and_not_fatal(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> Mapping[Kernel, Launch]:
        raise ValueError("no such layer")

    with knobs.cache.scope(), knobs.compilation.scope():
        warming = Warming(broken, TARGET, tmp_path, 1)
        warming.start()
        warming.finish()
    assert "no such layer" in caplog.text
    assert "compiled when it is first launched" in caplog.text


def test_what_compiles_longest_begins_first() -> None:
    ops = Ops(known("h200"), Activations.BF16, Preference(), PRECISIONS["exact"])
    kernels = list(record(bind_shapes(inventory.models()["gpt-oss-20b"], ops), draft_tokens=MAX_DRAFT))
    names = [kernel.name for kernel in kernels]
    assert set(SLOW) <= set(names)
    order = slowest_first(kernels)
    assert sorted(order) == list(range(len(kernels)))
    ordered = [names[place] for place in order]
    assert list(dict.fromkeys(ordered))[: len(SLOW)] == list(SLOW)
    # The others stay in the order in which they were listed.
    assert [name for name in ordered if name not in SLOW] == [name for name in names if name not in SLOW]


def test_workers_are_bounded_by_cores_and_memory() -> None:
    assert workers(1 << 40) == usable_cores()
    assert workers(1 << 40, spare_cores=1000) == 1
    assert workers(1 << 20) == 1
    assert workers(-5) == 1


def test_compilers_need_no_torch() -> None:
    """Half a second to start instead of several, and no way to touch the GPU."""
    source = Path(microscale.__file__).parent
    modules = sorted(
        f"microscale.{'.'.join(path.relative_to(source).parts).removesuffix('.py')}"
        for path in source.glob("kernels/**/*_jit.py")
    )
    assert len(modules) > 15
    code = f"""
        import importlib, sys
        import microscale.kernels.compiling.__main__
        for name in {modules!r}:
            importlib.import_module(name)
        print([name for name in ("torch", "fastapi", "numpy") if name in sys.modules])
    """
    found = subprocess.run([sys.executable, "-c", dedent(code)], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"

"""Compares the machine code of two trees, kernel by kernel, with no GPU: does a change of the source change what runs?

``record`` compiles what the models start (the lab's ``prove.inventory``) and keeps the result in a folder, without
names, line numbers and comments: PTX, or with ``--ir`` what the compiler makes of the source before it optimises,
which takes a tenth of the time. ``compare`` says for how many kernels two folders hold the same text: those compute
the same bits at the same speed. (Equal IR is the stronger claim: all that follows is computed from it.) Other PTX goes
through ptxas; equal SASS is as good, and for the rest it prints registers, spilled bytes and instructions of both.

    PYTHONPATH=<one tree>/src python tests/support/compare_machine_code.py record one --gpu h200 a100 gb10
    PYTHONPATH=<another>/src python tests/support/compare_machine_code.py record another --gpu h200 a100 gb10
    python tests/support/compare_machine_code.py compare one another

``--function`` records the kernels of some jit functions only. Kernels that are in the folder already are not compiled
again, so delete it when the source has changed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend, get_ptxas, sm_arch_from_capability

from microscale.hardware import WARP_SIZE, known
from microscale.kernels.compiling.pool import Died, run_forked
from microscale.kernels.compiling.source import source
from microscale.kernels.launch import Kernel
from microscale_lab.prove import inventory
from ptxproof import compiler

OF_LLIR = (
    "shared",
    "tmem_size",
    "global_scratch_size",
    "global_scratch_align",
    "profile_scratch_size",
    "profile_scratch_align",
)
"""What the skipped stages would say of the kernel."""
MODELS = ("gpt-oss-20b", "gpt-oss-120b", "gemma-4-26b-a4b", "qwen3-30b-a3b", "demo")


def stripped(ptx: str) -> str:
    """What ptxas reads of a PTX text: no comments, no names of ours, no debug sections."""
    ptx = re.sub(r"//.*", "", ptx)
    ptx = re.sub(r"^\s*\.(file|loc)\b.*$", "", ptx, flags=re.MULTILINE)
    ptx = re.sub(r"^\s*\.section\s+\.debug_\w+\s*\{.*?^\s*\}", "", ptx, flags=re.MULTILINE | re.DOTALL)
    name = re.search(r"\.entry (\w+)", ptx)
    assert name is not None
    ptx = re.sub(rf"\b{name[1]}(?=\b|_param_)", "kernel", ptx)
    return "\n".join(line.rstrip() for line in ptx.splitlines() if line.strip()) + "\n"


def renamed(ir: str) -> str:
    """IR without what says nothing to LLVM: locations, the names of values, the places of constants, casts to the same.

    Layouts and constants are written where they are used and the other values numbered as they appear.
    """
    ir = re.sub(r"^#loc.*$", "", ir, flags=re.MULTILINE)
    ir = re.sub(r" loc\((?:[^()]|\([^()]*\))*\)", "", ir)
    ir = re.sub(r"@\w+", "@kernel", ir)
    known: dict[str, str] = {}
    layouts: dict[str, str] = {}
    lines = []
    for written in filter(str.strip, ir.splitlines()):
        line = re.sub(r"(?<=.)#[a-z]\w*(?![\w.])", lambda name: layouts[name[0]], written)
        if layout := re.fullmatch(r"(#\w+) = (.*)", line):
            layouts[layout[1]] = layout[2]
        elif constant := re.fullmatch(r"\s*(%\S+) = arith\.constant (.*)", line):
            known[constant[1]] = f"<{constant[2]}>"
        elif cast := re.fullmatch(r"\s*(%\S+) = tt\.bitcast (%\S+) : (.*) -> \3", line):
            known[cast[1]] = known[cast[2]]
        else:
            lines.append(re.sub(r"%[\w.$-]+", lambda name: known.setdefault(name[0], f"%{len(known)}"), line))
    return _numbered("\n".join(lines))


def _numbered(ir: str) -> str:
    numbers: dict[str, str] = {}
    return re.sub(r"%[\w.$-]+", lambda name: numbers.setdefault(name[0], f"%{len(numbers)}"), ir)


def to_text(kernel: Kernel, sm: int, ir: bool, log: IO[bytes]) -> dict[str, Any]:
    """In a process of its own: the compiler's last stages are taken out."""
    CUDABackend.make_cubin = lambda *_: b""
    if ir:
        CUDABackend.make_llir = lambda _, src, metadata, *__: metadata.update(dict.fromkeys(OF_LLIR, 0)) or ""
        CUDABackend.make_ptx = lambda _, src, metadata, *__: metadata.update(name="kernel") or ""
    with compiler._own_folder(), knobs.compilation.scope():
        knobs.compilation.disable_line_info = True
        target = GPUTarget("cuda", sm, WARP_SIZE)
        made, options = source(kernel, target)
        compiled = triton.compile(made, target=target, options=options)
        if ir:
            return {"text": renamed(compiled.asm["ttgir"]), "shared": None}
        return {"text": stripped(compiled.asm["ptx"]), "shared": compiled.metadata.shared}


def record(chosen: argparse.Namespace) -> None:
    folder: Path = chosen.folder
    folder.mkdir(parents=True, exist_ok=True)
    settings = inventory.SETTINGS if chosen.setting is None else [inventory.SETTINGS[i] for i in chosen.setting]
    todo: dict[Path, tuple[Kernel, int]] = {}
    for gpu in map(known, chosen.gpu):
        compiler.warm_up(gpu.sm)
        for kernel in inventory.recorded(gpu, chosen.model, settings):
            if not chosen.function or kernel.short_name in chosen.function:
                # Names of the source's own are no part of it: two trees may name them differently.
                key = hashlib.sha256(repr((gpu.sm, kernel.name, kernel.specialisation, kernel.options)).encode())
                todo[folder / f"{key.hexdigest()[:24]}.json"] = kernel, gpu.sm
    todo = {path: work for path, work in todo.items() if not path.exists()}
    print(f"{len(todo)} kernels to compile", flush=True)
    work = [partial(to_text, kernel, sm, chosen.ir) for kernel, sm in todo.values()]
    paths = list(todo)
    for index, answer in run_forked(work, num_workers=chosen.jobs):
        kernel, sm = todo[paths[index]]
        if isinstance(answer, Died):
            print(f"sm_{sm} {kernel.name} {kernel.label}: the compiler {answer.how}\n{answer.log}", flush=True)
            continue
        row = {"sm": sm, "name": kernel.name, "label": kernel.label, **answer}
        paths[index].write_text(json.dumps(row))


def rows(folder: Path) -> Iterator[dict[str, Any]]:
    for path in sorted(folder.glob("*.json")):
        yield json.loads(path.read_text())


def assembled(row: dict[str, Any]) -> tuple[str, dict[str, int]]:
    """SASS, and what ptxas says of it."""
    with tempfile.TemporaryDirectory() as folder:
        source, cubin = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(row["text"])
        ptxas = get_ptxas(row["sm"]).path
        arch = sm_arch_from_capability(row["sm"])
        command = [ptxas, "-v", "--regAllocOptLevel=2", f"--gpu-name={arch}", str(source), "-o", str(cubin)]
        log = subprocess.run(command, check=True, capture_output=True, text=True).stderr
        text = subprocess.run(
            [knobs.nvidia.nvdisasm.path, "-c", str(cubin)], check=True, capture_output=True, text=True
        ).stdout
    sass = re.findall(r"^\s*/\*[0-9a-f]{4,}\*/\s*(.*?);", text, flags=re.MULTILINE)
    registers = re.search(r"Used (\d+) registers", log)
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", log)
    assert registers is not None
    facts = {"registers": int(registers[1]), "spilled": sum(map(int, spills)), "shared": row["shared"]}
    return "\n".join(sass), facts | {"instructions": len(sass)}


def compare(before: Path, after: Path) -> None:
    left: dict[tuple[int, str], list[dict[str, Any]]] = defaultdict(list)
    for row in rows(before):
        left[row["sm"], row["text"]].append(row)
    same: Counter[tuple[int, str]] = Counter()
    other = []
    for row in rows(after):
        equal = left[row["sm"], row["text"]]
        if equal:
            equal.pop()
            same[row["sm"], row["name"]] += 1
        else:
            other.append(row)
    gone = sorted((row for found in left.values() for row in found), key=_order)
    print(f"identical: {same.total()} of {same.total() + len(other)} kernels")
    for (sm, name), count in sorted(same.items()):
        different = sum((row["sm"], row["name"]) == (sm, name) for row in other)
        print(f"  sm_{sm} {name}: {count} of {count + different}")
    for row in sorted(other, key=_order):
        # The kernel that it was: same card, and most words of the label in common.
        candidates = [old for old in gone if old["sm"] == row["sm"]]
        print(f"sm_{row['sm']} {row['name']} {row['label']}")
        if row["shared"] is None:
            continue  # IR, which ptxas cannot read
        sass, facts = assembled(row)
        print(f"    after   {facts}")
        if candidates:
            old = max(candidates, key=lambda old: len(_words(old) & _words(row)))
            gone.remove(old)
            old_sass, old_facts = assembled(old)
            print(f"    before  {old_facts}{' (same SASS)' if sass and sass == old_sass else ''} {old['label']}")
    for row in gone:
        print(f"only before: sm_{row['sm']} {row['name']} {row['label']}")


def _order(row: dict[str, Any]) -> tuple[int, str, str]:
    return row["sm"], row["name"], row["label"]


def _words(row: dict[str, Any]) -> set[str]:
    return {row["name"].rpartition(".")[2], *row["label"].split()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("record")
    one.add_argument("folder", type=Path)
    one.add_argument("--gpu", nargs="*", default=["h200"])
    one.add_argument("--model", nargs="*", default=list(MODELS))
    one.add_argument("--setting", nargs="*", type=int, help="places in inventory.SETTINGS; all without it")
    one.add_argument("--function", nargs="*", default=[])
    one.add_argument("--jobs", type=int, default=1)
    one.add_argument("--ir", action="store_true")
    two = commands.add_parser("compare")
    two.add_argument("before", type=Path)
    two.add_argument("after", type=Path)
    chosen = parser.parse_args()
    if chosen.command == "record":
        record(chosen)
    else:
        compare(chosen.before, chosen.after)


if __name__ == "__main__":
    main()

"""Writes ``locks/``: the exact files that an installation may consist of, by version and SHA-256.

================  =========================================================================================
``dev.txt``       all that ``make`` installs besides torch, so all that CI installs
``server.txt``    the part of it that ``microscale`` itself needs: the image, and the test of the wheel
``ray.txt``       what ``microscale[ray]`` and its tests need, for ``make test-ray``
``cpu.txt``       torch's build for CPUs, where the machine's index has it
``cuda.txt``      torch's build for CUDA, with NVIDIA's libraries
``triton36.txt``  the oldest Triton that must work, in the place of the one in ``server.txt``
``docs.txt``      MkDocs and its theme, which turn the pages into the documentation site
================  =========================================================================================

One file serves x86-64 and aarch64, and Python 3.11 to 3.14. Versions stay as they are unless ``--upgrade`` says
otherwise. No file names where its packages come from: that is the business of the machine which installs them.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from packaging.markers import Marker

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "locks"
RAY_TESTS = ("pytest", "pytest-timeout", "hypothesis", "pyyaml", "setuptools")
"""What the tests of Ray need besides Ray."""
OLD_TRITON = "triton==3.6.0"
DOCS = "mkdocs==1.6.1\nmkdocs-material==9.8.1"
TORCH = "torch"
CUDA = re.compile(r"(nvidia|cuda)-|torch$")
CPU_BUILD = "+cpu"
ENTRY = re.compile(r"(?P<name>[a-z0-9][a-z0-9.-]*)==(?P<version>[^\s;]+)(?: ; (?P<marker>.+))?")
HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")
MACHINES = [
    {"sys_platform": "linux", "platform_system": "Linux", "os_name": "posix", "platform_machine": machine}
    | {"python_version": python, "python_full_version": f"{python}.0"}
    | {"implementation_name": "cpython", "platform_python_implementation": "CPython"}
    for machine in ("x86_64", "aarch64")
    for python in ("3.11", "3.12", "3.13", "3.14")
]
"""What the locks are for."""
HEADER = "# Written by `make lock`; do not edit. Install with: pip install --require-hashes --no-deps -r {name}\n"


class Entry:
    """One package: its line, and the digests of all of its files."""

    def __init__(self, text: str) -> None:
        line = text.splitlines()[0].removesuffix("\\").strip()
        found = ENTRY.fullmatch(line)
        if found is None:
            raise ValueError(f"not a locked package: {line!r}")
        self.name, self.version, self.marker = found["name"], found["version"], found["marker"]
        self.hashes = set(HASH.findall(text))

    @property
    def key(self) -> tuple[str, str]:
        return self.name, self.version

    @property
    def pin(self) -> str:
        return f"{self.name}=={self.version}" + (f" ; {self.marker}" if self.marker else "")

    def text(self) -> str:
        return " \\\n".join([self.pin, *(f"    --hash=sha256:{digest}" for digest in sorted(self.hashes))]) + "\n"


def parse(text: str) -> list[Entry]:
    """The packages of a lock, or of what uv printed."""
    blocks = re.split(r"\n(?=[a-z0-9])", re.sub(r"(?m)^\s*#.*\n", "", text).strip())
    return [Entry(block) for block in blocks if block]


def read(name: str) -> list[Entry]:
    path = FOLDER / name
    return parse(path.read_text()) if path.exists() else []


def write(name: str, entries: Iterable[Entry]) -> None:
    (FOLDER / name).write_text(HEADER.format(name=f"locks/{name}") + "".join(entry.text() for entry in entries))


def for_machines(entries: Iterable[Entry]) -> list[Entry]:
    """Without what no machine of ours needs, and without conditions that hold on all of them."""
    kept = []
    for entry in entries:
        holds = [Marker(entry.marker).evaluate(machine) for machine in MACHINES] if entry.marker else [True]
        if any(holds):
            entry.marker = None if all(holds) else entry.marker
            kept.append(entry)
    return kept


def compiled(uv: str, source: Sequence[str], pins: Sequence[Entry], options: Sequence[str]) -> list[Entry]:
    """What uv resolves: the versions in ``pins`` stay where they can."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "lock.txt"
        output.write_text("".join(entry.text() for entry in pins))
        command = [uv, "pip", "compile", *source, "--universal", "--python-version", "3.11", "--generate-hashes"]
        command += ["--no-header", "--no-annotate", "--quiet", "--output-file", str(output), *options]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        return for_machines(parse(output.read_text()))


def cpu_build(torch: Entry, wheels: Path | None) -> list[Entry]:
    """Torch for CPUs: the public index has none, so its digests come from wheels in a folder, and stay while its
    version does. Machines whose build is not here take the one for CUDA."""
    entry = Entry(f"{TORCH}=={torch.version}{CPU_BUILD}")
    entry.hashes = {digest for old in read("cpu.txt") if old.key == entry.key for digest in old.hashes}
    for path in sorted(wheels.glob(f"{TORCH}-{entry.version}-*.whl")) if wheels is not None else ():
        entry.hashes.add(hashlib.sha256(path.read_bytes()).hexdigest())
    return [entry] if entry.hashes else []


def main() -> None:
    parser = argparse.ArgumentParser(description="Write locks/ anew.")
    parser.add_argument("--uv", default="uv", help="the uv to resolve with")
    parser.add_argument("--upgrade", action="store_true", help="take the newest version of everything")
    parser.add_argument("--wheels", type=Path, help="a folder with torch's builds for CPUs")
    arguments = parser.parse_args()
    options = ["--upgrade"] if arguments.upgrade else []
    before = [*read("dev.txt"), *read("cuda.txt")]
    everything = compiled(arguments.uv, ["pyproject.toml", "--extra", "dev"], before, options)
    with tempfile.TemporaryDirectory() as folder:
        same = Path(folder) / "same.txt"
        same.write_text("".join(f"{entry.pin}\n" for entry in everything))
        bound = ["--constraint", str(same)]
        server = compiled(arguments.uv, ["pyproject.toml"], (), bound)
        wanted = Path(folder) / "wanted.in"
        wanted.write_text("".join(f"{name}\n" for name in RAY_TESTS))
        source = ["pyproject.toml", str(wanted), "--extra", "ray"]
        ray = compiled(arguments.uv, source, read("ray.txt"), [*bound, *options])
        wanted.write_text(OLD_TRITON + "\n")
        triton = compiled(arguments.uv, [str(wanted)], (), ["--no-deps"])
        wanted.write_text(DOCS + "\n")
        docs = compiled(arguments.uv, [str(wanted)], read("docs.txt"), options)
    FOLDER.mkdir(exist_ok=True)
    names = {entry.name for entry in server}
    usual = [entry for entry in everything if not CUDA.match(entry.name)]
    write("dev.txt", usual)
    write("server.txt", [entry for entry in usual if entry.name in names])
    write("ray.txt", [entry for entry in ray if not CUDA.match(entry.name)])
    write("cuda.txt", [entry for entry in everything if CUDA.match(entry.name)])
    write("cpu.txt", cpu_build(next(entry for entry in everything if entry.name == TORCH), arguments.wheels))
    write("triton36.txt", triton)
    write("docs.txt", docs)


if __name__ == "__main__":
    main()

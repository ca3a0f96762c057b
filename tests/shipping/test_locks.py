"""The locks: whole, hashed, free of addresses, for the dependencies that pyproject.toml names."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools.lock import FOLDER, TORCH, Entry, cpu_build, for_machines, parse, read

ROOT = Path(__file__).parents[2]
NAMES = ["dev.txt", "server.txt", "ray.txt", "cpu.txt", "cuda.txt", "triton36.txt", "docs.txt"]


def pins(name: str) -> dict[str, str]:
    return {entry.name: entry.version for entry in read(name)}


def wanted(*extras: str) -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = list(project["dependencies"])
    for extra in extras:
        lines += project["optional-dependencies"][extra]
    return [r for r in map(Requirement, lines) if r.name not in ("microscale", TORCH)]


def test_these_are_all() -> None:
    assert sorted(path.name for path in FOLDER.iterdir()) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_package_has_one_version_and_digests(name: str) -> None:
    entries = read(name)
    assert entries
    assert len({(entry.name, entry.marker) for entry in entries}) == len(entries)
    assert all(entry.hashes for entry in entries)


@pytest.mark.parametrize("name", NAMES)
def test_no_lock_says_where_packages_come_from(name: str) -> None:
    text = (FOLDER / name).read_text()
    assert not re.search(r"://|--(extra-)?index|--find-links|@|file:", text)


@pytest.mark.parametrize(("name", "extras"), [("dev.txt", ("dev",)), ("server.txt", ()), ("ray.txt", ("ray",))])
def test_what_pyproject_wants_is_locked_in_a_version_it_allows(name: str, extras: tuple[str, ...]) -> None:
    locked = pins(name)
    for requirement in wanted(*extras):
        version = locked.get(canonicalize_name(requirement.name))
        assert version is not None, f"{requirement.name}: run `make lock`"
        assert requirement.specifier.contains(version), f"{requirement}, and {version} is locked: run `make lock`"


def test_the_locks_agree() -> None:
    dev, cuda = pins("dev.txt"), pins("cuda.txt")
    assert pins("server.txt").items() <= dev.items()
    assert pins("cpu.txt") == {TORCH: f"{cuda[TORCH]}+cpu"}
    assert not dev.keys() & cuda.keys()
    ray = pins("ray.txt")
    assert {name: ray[name] for name in ray.keys() & dev.keys()} == {
        name: dev[name] for name in ray.keys() & dev.keys()
    }
    assert pins("server.txt").items() <= pins("ray.txt").items()


def test_a_lock_is_read_as_it_is_written() -> None:
    text = 'a==1.0 ; python_version < "3.12" \\\n    --hash=sha256:' + "0" * 64 + "\nb==2\n"
    first, second = parse("# a comment\n" + text)
    assert (first.name, first.version, first.marker, len(first.hashes)) == ("a", "1.0", 'python_version < "3.12"', 1)
    assert first.text() + second.text() == text
    with pytest.raises(ValueError, match="not a locked package: 'b>=2'"):
        parse("b>=2")


def test_conditions_are_judged_for_our_machines() -> None:
    lines = ["a==1 ; sys_platform == 'win32'", "b==1 ; sys_platform == 'linux'", "c==1 ; python_version < '3.12'"]
    assert [entry.pin for entry in for_machines(map(Entry, lines))] == ["b==1", lines[2]]


def test_the_build_for_cpus_stays_while_its_version_does(tmp_path: Path) -> None:
    (now,) = (entry for entry in read("cuda.txt") if entry.name == TORCH)
    (tmp_path / f"{TORCH}-{now.version}+cpu-cp311-cp311-manylinux_2_28_x86_64.whl").write_bytes(b"a wheel")
    (tmp_path / f"{TORCH}-1.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl").write_bytes(b"an old wheel")
    (before,), (after,) = cpu_build(now, None), cpu_build(now, tmp_path)
    assert len(after.hashes - before.hashes) == 1
    assert cpu_build(Entry(f"{TORCH}==99"), tmp_path) == []

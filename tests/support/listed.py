"""Holds kernels that were started against those that were recorded."""

from __future__ import annotations

from collections.abc import Collection

from microscale.kernels.launch import Kernel


def assert_listed(started: Collection[Kernel], recorded: Collection[Kernel]) -> None:
    """Fail with every kernel that was started and not recorded, and what the nearest recorded one has instead."""
    missing = [kernel for kernel in started if kernel not in recorded]
    if missing:
        lines = "\n".join(f"  {kernel.name}: {_difference(kernel, recorded)}" for kernel in missing)
        raise AssertionError(f"{len(missing)} kernels were started that are in no list; nobody proved them:\n{lines}")


def _difference(kernel: Kernel, recorded: Collection[Kernel]) -> str:
    mine = _parts(kernel)
    alike = [_parts(other) for other in recorded if other.name == kernel.name]
    if not alike:
        return "no kernel of this function is recorded"
    near = min(alike, key=lambda other: len(mine.items() ^ other.items()))
    differ = sorted(name for name in mine.keys() | near.keys() if mine.get(name) != near.get(name))
    return ", ".join(f"{name} is {mine.get(name)}, recorded {near.get(name)}" for name in differ)


def _parts(kernel: Kernel) -> dict[str, str]:
    arguments = zip(kernel.fn.arg_names, kernel.specialisation, strict=True)
    return {name: str(value) for name, value in (*arguments, *kernel.options)}

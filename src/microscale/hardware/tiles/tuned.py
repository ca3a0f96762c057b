"""The files of measured tiles, ``tuned/<family>.json``: one section for each kind of kernel, one row for each case.

A row says for what it was measured (``key``), the tile, and where the figure comes from (``measured``). ``microscale
tune`` writes rows; those that came from experiments by hand say what was run. Every tile fits every card of the family.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Generic, TypeVar

from microscale.errors import BadSetting
from microscale.hardware.cards import Family
from microscale.hardware.data_files import read_object, to_record

TUNED_DIR = Path(__file__).parents[1] / "tuned"
AGAIN = "run `microscale tune` to write it again"


class Kernels(StrEnum):
    """The sections of a file."""

    GROUPED_GEMM = "grouped_gemm"
    ATTENTION = "attention"
    SPLIT_KV = "split_kv"
    SMALL_BATCH_EXPERTS = "small_batch_experts"
    SMALL_BATCH_DENSE = "small_batch_dense"
    THRESHOLDS = "thresholds"


@dataclass(frozen=True)
class Measurement:
    """Where a row comes from."""

    gpu: str
    torch: str
    triton: str
    date: str
    run: str
    """What was timed, and how others did."""
    us: float | None
    """Microseconds of the case, where one figure says it."""


KeyT = TypeVar("KeyT")
TileT = TypeVar("TileT")


@dataclass(frozen=True)
class TunedTile(Generic[KeyT, TileT]):
    key: KeyT
    tile: TileT
    measured: Measurement


@dataclass(frozen=True)
class Section(Generic[KeyT, TileT]):
    """What the rows of one section hold. Where a key has ``up_to``, rows that differ in it alone are in its order,
    and the first that reaches the case serves it."""

    name: Kernels
    key: type[KeyT]
    tile: type[TileT]
    misfit: Callable[[KeyT, TileT, Family], str | None]
    """Why the tile cannot run on the family's cards, or ``None``."""


_KEPT: dict[tuple[Kernels, str], Mapping[Any, TunedTile[Any, Any]]] = {}


def measured(section: Section[KeyT, TileT], family: Family) -> Mapping[KeyT, TunedTile[KeyT, TileT]]:
    """What was measured on cards of this family; may be empty."""
    place = (section.name, family.name)
    found = _KEPT.get(place)
    if found is None:
        file = TUNED_DIR / f"{family.name}.json"
        found = _KEPT[place] = read(file, section, family) if file.exists() else {}
    return found


def forget() -> None:
    """Have files read again."""
    _KEPT.clear()


@contextmanager
def trial(section: Section[KeyT, TileT], family: Family, key: KeyT, tile: TileT) -> Iterator[None]:
    """Meanwhile ``tile`` is what was measured for ``key``, before all others: how ``tune`` runs its candidates."""
    others = [row for other, row in measured(section, family).items() if other != key]
    with in_effect(section, family, [TunedTile(key, tile, Measurement("", "", "", "", "a trial", None)), *others]):
        yield


@contextmanager
def in_effect(section: Section[KeyT, TileT], family: Family, rows: Sequence[TunedTile[KeyT, TileT]]) -> Iterator[None]:
    """Meanwhile these are all rows of the section: what ``tune`` found is used for what it measures next."""
    before = measured(section, family)
    _KEPT[section.name, family.name] = {row.key: row for row in rows}
    try:
        yield
    finally:
        _KEPT[section.name, family.name] = before


def read(file: Path, section: Section[KeyT, TileT], family: Family) -> dict[KeyT, TunedTile[KeyT, TileT]]:
    """One section of a file, checked."""
    data = _load(file, family).get(section.name, [])
    if not isinstance(data, list):
        raise BadSetting(f"{file} must hold a list of rows under {section.name!r}; {AGAIN}.")
    found: dict[KeyT, TunedTile[KeyT, TileT]] = {}
    kind: Any = TunedTile
    for item in data:
        row = to_record(file, kind[section.key, section.tile], item, AGAIN)
        reason = section.misfit(row.key, row.tile, family)
        if reason is not None:
            raise BadSetting(f"{file} holds a tile for {_text(row.key)} that {reason}.")
        if row.key in found:
            raise BadSetting(f"{file} holds two tiles for {_text(row.key)}.")
        found[row.key] = row
    _check_order(file, list(found))
    return found


def write(file: Path, family: Family, found: Mapping[Section[Any, Any], Sequence[TunedTile[Any, Any]]]) -> None:
    """``file`` with these sections in place of those that it had."""
    old = _load(file, family) if file.exists() else {}
    new = {section.name: [asdict(row) for row in of_section] for section, of_section in found.items()}
    parts = [f' "family": {json.dumps(family.name)}']
    for name in Kernels:
        if content := new.get(name, old.get(name)):
            lines = ",\n".join(f"  {json.dumps(row, ensure_ascii=False)}" for row in content)
            parts.append(f' "{name}": [\n{lines}\n ]')
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("{\n" + ",\n".join(parts) + "\n}\n")


def _load(file: Path, family: Family) -> dict[str, Any]:
    data = read_object(file, AGAIN)
    unknown = sorted(set(data) - {"family", *Kernels})
    if unknown:
        raise BadSetting(f"{file} has the unknown keys {', '.join(unknown)}; {AGAIN}.")
    if data.get("family") != family.name:
        raise BadSetting(f"{file} was measured for family {data.get('family')!r}, not {family.name!r}.")
    return data


def _check_order(file: Path, keys: Sequence[Any]) -> None:
    bounds: dict[Any, list[float]] = {}
    for key in keys:
        if any(field.name == "up_to" for field in fields(key)):
            bounds.setdefault(replace(key, up_to=0), []).append(key.up_to)
    for key, found in bounds.items():
        if found != sorted(found):
            raise BadSetting(f"{file} must list the tiles of {_text(key)} by ascending up_to, not {found}.")


def _text(key: Any) -> str:
    return ", ".join(f"{field.name} {getattr(key, field.name)}" for field in fields(key))

"""The files of measured tiles, ``tuned/<family>.json``: one section for each kind of kernel, one row for each case.

A row says for what it was measured (``key``), the tile, and where the figure comes from (``measured``). ``microscale
tune`` writes rows; those that came from experiments by hand say what was run. Files are read strictly: every key is
there and none is unknown, every tile fits every card of the family.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from enum import StrEnum
from pathlib import Path
from types import NoneType
from typing import Any, Generic, TypeVar, get_args, get_type_hints

from microscale.errors import BadSetting
from microscale.hardware.families import Family

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
    """What the rows of one section hold. Where a key has ``up_to``, rows that differ in it alone stand in its order,
    and the first that reaches the case serves it."""

    name: Kernels
    key: type[KeyT]
    tile: type[TileT]
    misfit: Callable[[KeyT, TileT, Family], str | None]
    """Why the tile cannot run on the family's cards, or ``None``."""


_KEPT: dict[tuple[Kernels, str], Mapping[Any, TunedTile[Any, Any]]] = {}


def measured(section: Section[KeyT, TileT], family: Family) -> Mapping[KeyT, TunedTile[KeyT, TileT]]:
    """What was measured on cards of this family; empty where nobody has measured."""
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
    for item in data:
        row = _row(file, section, item)
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
    try:
        data = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise BadSetting(f"{file} cannot be read as JSON ({error}); {AGAIN}.") from None
    if not isinstance(data, dict) or "family" not in data:
        raise BadSetting(f"{file} lacks the key 'family'; {AGAIN}.")
    _no_more(file, data, {"family", *Kernels})
    if data["family"] != family.name:
        raise BadSetting(f"{file} was measured for family {data['family']!r}, not {family.name!r}.")
    return data


def _row(file: Path, section: Section[KeyT, TileT], data: Any) -> TunedTile[KeyT, TileT]:
    if not isinstance(data, dict):
        raise BadSetting(f"{file} holds {data!r} where a row of {section.name} belongs; {AGAIN}.")
    _no_more(file, data, {"key", "tile", "measured"})
    parts = (section.key, data.get("key")), (section.tile, data.get("tile")), (Measurement, data.get("measured"))
    missing = [name for name in ("key", "tile", "measured") if name not in data]
    if missing:
        raise BadSetting(f"{file} lacks the key {missing[0]!r} in a row of {section.name}; {AGAIN}.")
    return TunedTile(*(_record(file, kind, part) for kind, part in parts))


def _record(file: Path, kind: type[Any], data: Any) -> Any:
    """A record of this type: each of its fields, and no others."""
    hints = get_type_hints(kind)
    if not isinstance(data, dict):
        raise BadSetting(f"{file} holds {data!r} where {', '.join(hints)} belong; {AGAIN}.")
    for name in hints:
        if name not in data:
            raise BadSetting(f"{file} lacks the key {name!r}; {AGAIN}.")
    _no_more(file, data, set(hints))
    return kind(**{name: _value(file, name, hint, data[name]) for name, hint in hints.items()})


def _value(file: Path, name: str, hint: Any, value: Any) -> Any:
    kinds = get_args(hint) or (hint,)
    if value is None and NoneType in kinds:
        return None
    kind = kinds[0]
    if issubclass(kind, StrEnum) and isinstance(value, str):
        if value not in list(kind):
            raise BadSetting(f"{file} has {value!r} for {name!r}; known are {', '.join(kind)}.")
        return kind(value)
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise BadSetting(f"{file} has {value!r} for {name!r}, which is of the wrong type.")
    return value


def _no_more(file: Path, data: Mapping[str, Any], keys: set[str]) -> None:
    unknown = sorted(set(data) - keys)
    if unknown:
        raise BadSetting(f"{file} has the unknown keys {', '.join(unknown)}; known are {', '.join(sorted(keys))}.")


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

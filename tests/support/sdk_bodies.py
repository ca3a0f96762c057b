"""Random JSON bodies of the form that an SDK's types describe: OpenAI's and Anthropic's documents, as installed."""

from __future__ import annotations

import collections.abc
import types
from functools import cache
from typing import (
    Annotated,
    Any,
    Literal,
    NotRequired,
    Required,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from hypothesis import strategies as st
from pydantic import BaseModel

LISTS = (list, collections.abc.Iterable, collections.abc.Sequence, set, tuple)
MAPS = (dict, collections.abc.Mapping)
ANYTHING: st.SearchStrategy[Any] = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
PLAIN: dict[Any, st.SearchStrategy[Any]] = {
    str: st.text(max_size=20),
    int: st.integers(-2, 2**40),
    float: st.floats(-5, 5) | st.floats(),
    bool: st.booleans(),
    type(None): st.none(),
    object: ANYTHING,
    Any: ANYTHING,
}


@cache
def bodies(hint: Any) -> st.SearchStrategy[Any]:
    """JSON of a type. Types that hold themselves are looked up when they are drawn."""
    if hint in PLAIN:
        return PLAIN[hint]
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Annotated, Required, NotRequired):
        return bodies(inner[0])
    if origin is Literal:
        return st.sampled_from(inner)
    if origin in (Union, types.UnionType):
        return st.one_of([st.deferred(lambda kind=kind: bodies(kind)) for kind in inner])  # type: ignore[misc]
    if origin in LISTS:
        return st.lists(st.deferred(lambda: bodies(inner[0])), max_size=3)
    if origin in MAPS:
        return st.dictionaries(st.text(max_size=8), st.deferred(lambda: bodies(inner[1])), max_size=3)
    if hasattr(hint, "__required_keys__"):
        # A TypedDict. Its own list of required keys lacks those whose annotations are still strings.
        hints = get_type_hints(hint, include_extras=True)
        made = {name: st.deferred(lambda kind=kind: bodies(kind)) for name, kind in hints.items()}  # type: ignore[misc]
        is_needed = {
            name: get_origin(kind) is Required or name in hint.__required_keys__ for name, kind in hints.items()
        }
        needed = {name: made[name] for name in made if is_needed[name]}
        return st.fixed_dictionaries(needed, optional={name: made[name] for name in made.keys() - needed.keys()})
    if isinstance(hint, type) and issubclass(hint, BaseModel):
        # A reply's class, as it is handed back.
        return st.fixed_dictionaries(
            {
                name: st.deferred(lambda kind=field.annotation: bodies(kind))  # type: ignore[misc]
                for name, field in hint.model_fields.items()
            }
        )
    return ANYTHING

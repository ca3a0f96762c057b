"""Small faults in the source of a jit function, one at a time: whether tests notice them says how good the tests are.

``mutants`` lists the faults of a function and changes nothing. ``apply`` gives a jit function the source of one; do so
in a forked process, since nothing undoes it. Each operator imitates a mistake that people make in kernels.
"""

from __future__ import annotations
import __future__

import ast
import hashlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from triton.runtime.jit import JITFunction

COMPARISON = "comparison"
OFF_BY_ONE = "off by one"
DROPPED_MASK = "dropped mask"
DROPPED_OTHER = "dropped other"
DROPPED_BARRIER = "dropped barrier"
DROPPED_WAIT = "dropped wait"
SWAPPED = "swapped operands"
NEIGHBOUR = "neighbouring index"
NARROWED = "64 to 32 bits"
TRUNCATED = "truncation"
CONSTANT = "constant 0 or 1"
OPERATORS = (
    COMPARISON, OFF_BY_ONE, DROPPED_MASK, DROPPED_OTHER, DROPPED_BARRIER, DROPPED_WAIT, SWAPPED, NEIGHBOUR, NARROWED,
    TRUNCATED, CONSTANT,
)  # fmt: skip

HOST_OPERATORS = (COMPARISON, OFF_BY_ONE, SWAPPED, NARROWED, CONSTANT)
"""Those that mean something in Python code that packs weights and launches kernels."""

_COMPARED = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
}  # fmt: skip
_OTHER_WAY = {"minimum": "maximum", "maximum": "minimum", "where": "where"}
_ACCESSES = ("load", "store", "atomic_add", "atomic_max", "atomic_min", "atomic_xchg", "atomic_cas")
_NARROW = {"int64": "int32", "uint64": "uint32"}
_ROUNDED = ("bfloat16", "float16", "float8e4nv")
_PROBE = "ptxproof_probe"
"""A name that is defined nowhere: a compiler that comes by fails."""


@dataclass(frozen=True)
class Mutant:
    """A function with one fault."""

    function: str
    """Module and name."""
    line: int
    """In the function's file."""
    operator: str
    before: str
    after: str
    source: str
    """Of the whole function."""
    probe: str
    """The function without the fault, which does not compile if the compiler meets the statement at all."""

    @property
    def key(self) -> str:
        """The same in every run, as long as the function stays as it is."""
        return hashlib.sha256(f"{self.function}\0{self.source}".encode()).hexdigest()[:16]


class HostFunction:
    """A Python function that jit functions are launched by, as ``mutants`` takes it."""

    def __init__(self, fn: FunctionType) -> None:
        self.fn = fn
        self.__module__, self.__name__ = fn.__module__, fn.__qualname__
        lines, self.starting_line_number = inspect.getsourcelines(fn)
        self.raw_src = textwrap.dedent("".join(lines)).splitlines(keepends=True)
        before = sum(1 for _ in _before_def(self))
        self.src = "".join(self.raw_src[before:])

    def apply(self, source: str) -> None:
        """From now on the function runs as ``source``, wherever it is referred to."""
        own: dict[str, Any] = {}
        flags = __future__.annotations.compiler_flag
        exec(compile(source, self.fn.__code__.co_filename, "exec", flags, dont_inherit=True), self.fn.__globals__, own)
        self.fn.__code__ = own[self.fn.__name__].__code__


def mutants(fn: JITFunction[Any] | HostFunction) -> Iterator[Mutant]:
    """Every fault of every operator that applies; two that give the same source count once."""
    operators = HOST_OPERATORS if isinstance(fn, HostFunction) else OPERATORS
    function = ast.parse(fn.src).body[0]
    assert isinstance(function, ast.FunctionDef)
    # The source begins at ``def``, and the line numbers of the file at the first decorator.
    first = fn.starting_line_number + sum(1 for _ in _before_def(fn))
    name, pieces = f"{fn.__module__}.{fn.__name__}", _Pieces(function)
    seen = {pieces.source()}
    for top, _ in enumerate(function.body):
        for statement, body, place in list(_statements(function, top)):
            body.insert(place, ast.Expr(ast.Name(_PROBE)))
            probe = pieces.source(top, 2 if body is function.body else 1)
            del body[place]
            for parent, field, at, node in list(_nodes(statement)):
                for operator, new in (fault for fault in _faults(node) if fault[0] in operators):
                    before = ast.unparse(node)
                    _put(parent, field, at, new, body, place)
                    source = pieces.source(top)
                    _put(parent, field, at, node, body, place)
                    if source not in seen:
                        seen.add(source)
                        line = first + getattr(node, "lineno", statement.lineno) - 1
                        yield Mutant(name, line, operator, before, ast.unparse(new), source, probe)


class _Pieces:
    """A function's text, of which one statement is written again: most of the time goes into writing."""

    def __init__(self, function: ast.FunctionDef) -> None:
        self._body = function.body
        self._texts = [self._text(statement) for statement in function.body]
        empty = ast.FunctionDef(**{**dict(ast.iter_fields(function)), "body": [ast.Pass()]})
        self._header = ast.unparse(ast.fix_missing_locations(empty)).rpartition("\n")[0]

    @staticmethod
    def _text(statement: ast.stmt) -> str:
        return textwrap.indent(ast.unparse(statement), "    ")

    def source(self, top: int = 0, num: int = 1) -> str:
        """The function with ``num`` statements from ``top`` on in place of the one that was there."""
        new = [self._text(statement) for statement in self._body[top : top + num]]
        return "\n".join([self._header, *self._texts[:top], *new, *self._texts[top + 1 :]])


def apply(fn: JITFunction[Any], source: str) -> None:
    """From now on ``fn`` compiles as ``source``, also where other functions call it."""
    fn._unsafe_update_src(source)


def callees(fn: JITFunction[Any]) -> set[JITFunction[Any]]:
    """The function itself and all jit functions that it calls, directly or not."""
    found, waiting = {fn}, [fn]
    while waiting:
        current = waiting.pop()
        names = current.fn.__globals__
        for node in ast.walk(ast.parse(current.src)):
            called = names.get(node.id) if isinstance(node, ast.Name) else None
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                called = getattr(names.get(node.value.id), node.attr, None)
            if isinstance(called, JITFunction) and called not in found:
                found.add(called)
                waiting.append(called)
    return found


def without_lines(ptx: str) -> str:
    """PTX without what depends on the source's lines alone: equal texts are the same program."""
    code = ptx.partition("\t.section\t.debug")[0]
    return re.sub(r"^(\s*\.(loc|file)\b.*|\$L__tmp\d+:|//.*)\n", "", code, flags=re.MULTILINE)


def _before_def(fn: JITFunction[Any] | HostFunction) -> Iterator[str]:
    for line in fn.raw_src:
        if re.match(r"\s*def\s", line):
            return
        yield line


def _statements(node: ast.AST, only: int | None = None) -> Iterator[tuple[ast.stmt, list[ast.stmt], int]]:
    """Each statement with the body that it is in; nested ones too, docstrings and assertions aside."""
    for field in ("body", "orelse"):
        body = getattr(node, field, [])
        for place, statement in enumerate(body):
            called = statement.value if isinstance(statement, ast.Expr) else None
            left_out = isinstance(called, ast.Constant) or _name_of(called) == "static_assert"
            if left_out or only not in (None, place):
                continue
            yield statement, body, place
            yield from _statements(statement)


def _nodes(statement: ast.stmt) -> Iterator[tuple[ast.AST | None, str, int | None, ast.AST]]:
    """The statement and its own expressions, each with where it hangs: parent, field and place in it."""
    yield None, "", None, statement
    waiting: list[ast.AST] = [statement]
    while waiting:
        parent = waiting.pop()
        for field, value in ast.iter_fields(parent):
            if field in ("body", "orelse", "annotation"):
                continue
            for at, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
                if isinstance(child, ast.AST) and not isinstance(child, ast.expr_context):
                    yield parent, field, at, child
                    waiting.append(child)


def _put(parent: ast.AST | None, field: str, at: int | None, new: ast.AST, body: list[ast.stmt], place: int) -> None:
    if parent is None:
        assert isinstance(new, ast.stmt)
        body[place] = new
    elif at is None:
        setattr(parent, field, new)
    else:
        getattr(parent, field)[at] = new


def _name_of(node: ast.AST | None) -> str:
    """What a call calls, without what is before the dot."""
    called = node.func if isinstance(node, ast.Call) else None
    return getattr(called, "attr", getattr(called, "id", ""))


def _faults(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Operators that apply to a node, and what takes its place."""
    match node:
        case ast.Expr(value=ast.Call() as call) if "wait" in _name_of(call):
            yield DROPPED_WAIT, ast.Pass()
        case ast.Expr(value=ast.Call() as call) if re.search("barrier|fence", _name_of(call)):
            yield DROPPED_BARRIER, ast.Pass()
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _COMPARED:
            yield COMPARISON, ast.Compare(left, [_COMPARED[type(op)]()], [right])
        case ast.Attribute(attr=name) if name in _NARROW:
            yield NARROWED, ast.Attribute(node.value, _NARROW[name])
        case ast.Constant(value=int() | float() as value) if value in (0, 1) and not isinstance(value, bool):
            yield CONSTANT, ast.Constant(type(value)(1 - value))
        case ast.BinOp():
            yield from _faults_of_arithmetic(node)
        case ast.Call():
            yield from _faults_of_call(node)


def _faults_of_arithmetic(node: ast.BinOp) -> Iterator[tuple[str, ast.AST]]:
    match node:
        case ast.BinOp(op=ast.Add() | ast.Sub(), right=ast.Constant(value=1)):
            yield OFF_BY_ONE, node.left
        case ast.BinOp(op=ast.Add() | ast.Mult()):
            yield CONSTANT, node.left
        case ast.BinOp(op=ast.Sub() | ast.Div() | ast.FloorDiv() | ast.Mod() | ast.LShift() | ast.RShift()):
            yield SWAPPED, ast.BinOp(node.right, node.op, node.left)


def _faults_of_call(call: ast.Call) -> Iterator[tuple[str, ast.AST]]:
    name, arguments = _name_of(call), call.args
    if name in ("range", "static_range"):
        stop = 0 if len(arguments) == 1 else 1
        less = ast.BinOp(arguments[stop], ast.Sub(), ast.Constant(1))
        yield OFF_BY_ONE, ast.Call(call.func, [*arguments[:stop], less, *arguments[stop + 1 :]], call.keywords)
    if name in _OTHER_WAY and len(arguments) in (2, 3):
        first, last = arguments[-2:]
        swapped = arguments if name != "where" else [*arguments[:-2], last, first]
        func = ast.Attribute(getattr(call.func, "value", call.func), _OTHER_WAY[name])
        yield SWAPPED, ast.Call(func, swapped, call.keywords)
    # A pointer comes first; a method of shared memory takes a layout instead.
    if name in _ACCESSES and arguments and getattr(getattr(call.func, "value", None), "id", "") in ("tl", "gl"):
        next_one = ast.BinOp(arguments[0], ast.Add(), ast.Constant(1))
        yield NEIGHBOUR, ast.Call(call.func, [next_one, *arguments[1:]], call.keywords)
    for operator, dropped in ((DROPPED_MASK, ("mask", "other")), (DROPPED_OTHER, ("other",))):
        if any(keyword.arg == dropped[0] for keyword in call.keywords):
            left = [keyword for keyword in call.keywords if keyword.arg not in dropped]
            yield operator, ast.Call(call.func, arguments, left)
    if name == "to" and arguments and ast.unparse(arguments[0]).endswith(_ROUNDED) and not call.keywords:
        truncated = ast.keyword("fp_downcast_rounding", ast.Constant("rtz"))
        yield TRUNCATED, ast.Call(call.func, arguments, [truncated])

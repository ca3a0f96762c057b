"""A checkpoint's own chat template, in a sandbox with limits.

Templates are programs in Jinja. They come only from the checkpoint's folder, never from a request. In the sandbox they
cannot reach modules or attributes that begin with an underscore, and cannot change their arguments. Runaway templates
are limited too: each iteration of a loop and each call of a macro counts against a budget and checks the clock, strings
and the result have a maximum length, and filters that pad text to a width are removed.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from microscale.errors import BadCheckpoint, BadRequest

FILE_NAME = "chat_template.jinja"
CONFIG_NAME = "tokenizer_config.json"
# Gemma 4's has 17 kB; the largest in use have about 60 kB.
MAX_TEMPLATE_BYTES = 1 << 20
MAX_CONFIG_BYTES = 64 << 20
MAX_CHARS = 64 << 20
"""Maximum length of the result and of any intermediate text."""
MAX_ITEMS = 1 << 20
MAX_STEPS = 10_000_000
TIMEOUT_S = 10.0
STEPS_PER_LOOK = 1024

FILTERS = frozenset({
    "capitalize", "count", "d", "default", "dictsort", "e", "escape", "first", "float", "groupby",
    "int", "items", "join", "last", "length", "list", "lower", "map", "max", "min", "reject", "rejectattr", "replace",
    "reverse", "round", "safe", "select", "selectattr", "sort", "string", "sum", "title", "tojson", "trim", "unique",
    "upper",
})  # fmt: skip
WIDE_METHODS = frozenset({"center", "expandtabs", "format", "format_map", "ljust", "rjust", "translate", "zfill"})
"""String methods that can make a long text from a short one."""
_STEP, _JOIN = "microscale_step", "microscale_join"


class TemplateRefusal(jinja2.TemplateError):
    """The template itself refuses a conversation."""


class ChatTemplate:
    """A compiled template. Rendering is re-entrant."""

    def __init__(self, source: str, origin: str) -> None:
        self.source = source
        self._origin = origin
        try:
            self._template = _Sandbox().from_string(source)
        except (jinja2.TemplateError, RecursionError) as exc:
            raise BadCheckpoint(f"{origin} is not a chat template: {exc}.") from exc

    @classmethod
    def read(cls, path: Path) -> ChatTemplate:
        """The template in a file."""
        return cls(_read(path, MAX_TEMPLATE_BYTES), str(path))

    @classmethod
    def load(cls, folder: Path) -> ChatTemplate:
        """The template of a checkpoint's folder: its own file, or a string in the tokenizer's config."""
        path = folder / FILE_NAME
        if path.is_file():
            return cls.read(path)
        path = folder / CONFIG_NAME
        if not path.is_file():
            raise BadCheckpoint(f"{folder} has neither {FILE_NAME} nor {CONFIG_NAME}, so it has no chat template.")
        try:
            config = json.loads(_read(path, MAX_CONFIG_BYTES))
            source = config.get("chat_template")
        except (ValueError, RecursionError, AttributeError) as exc:
            raise BadCheckpoint(f"{path} is not a JSON object: {exc}.") from exc
        if not isinstance(source, str) or len(source.encode()) > MAX_TEMPLATE_BYTES:
            raise BadCheckpoint(f"{path}: 'chat_template' must be a string of at most {MAX_TEMPLATE_BYTES} bytes.")
        return cls(source, str(path))

    def render(self, messages: Sequence[Mapping[str, Any]], **values: Any) -> str:
        """The prompt's text. If the template refuses the conversation, its message becomes a ``BadRequest``."""
        pieces: list[str] = []
        size = 0
        try:
            for piece in self._template.generate(messages=messages, **values, **{_STEP: _stepper(), _JOIN: _joined}):
                size += len(piece)
                _check_size(size)
                pieces.append(piece)
        except TemplateRefusal as exc:
            raise BadRequest(f"The model's chat template refuses the conversation: {exc}.") from exc
        except (
            jinja2.TemplateError,
            RecursionError,
            TypeError,
            LookupError,
            ValueError,
            ArithmeticError,
            AttributeError,
        ) as exc:
            # Templates assume things about schemas and messages that clients may not follow.
            raise BadRequest(
                f"The model's chat template ({self._origin}) cannot render the conversation or its tools: {exc}."
            ) from exc
        return "".join(pieces)


class _Sandbox(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        # transformers' settings, which templates are written for.
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
        self.filters = {name: made for name, made in self.filters.items() if name in FILTERS}
        self.filters |= {"tojson": _to_json, "join": _join_filter, "replace": _replace}
        self.globals |= {"raise_exception": _refuse, "strftime_now": _now}
        for name in ("lipsum", "cycler", "joiner"):
            self.globals.pop(name, None)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _StepCounter().visit(super()._parse(source, name, filename))
        return tree.set_environment(self)  # type: ignore[return-value]

    def wrap_str_format(self, value: Any) -> None:
        """No safe ``format`` either: it could still pad a text to any width."""
        return

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, str) and attr in WIDE_METHODS:
            return False
        return super().is_safe_attribute(obj, attr, value)

    def call(self, context: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Limit string methods that repeat one text in another; everything else is as in the sandbox."""
        owner, name = getattr(obj, "__self__", None), getattr(obj, "__name__", "")
        if isinstance(owner, str) and name == "join" and args:
            return _join_filter(args[0], owner)
        if isinstance(owner, str) and name == "replace":
            return _replace(owner, *args)
        return super().call(context, obj, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator in ("*", "**") and not (isinstance(left, int | float) and isinstance(right, int | float)):
            raise jinja2.TemplateRuntimeError("text and lists cannot be multiplied here")
        if operator == "**" or (operator == "%" and isinstance(left, str)):
            raise jinja2.TemplateRuntimeError(f"the operator {operator} is not available")
        result = super().call_binop(context, operator, left, right)
        if isinstance(result, str):
            _check_size(len(result))
        if isinstance(result, list | tuple) and len(result) > MAX_ITEMS:
            raise jinja2.TemplateRuntimeError(f"a list has more than {MAX_ITEMS} entries")
        return result


class _StepCounter(NodeTransformer):
    """Inserts a step at the beginning of every loop and macro, and limits ``a ~ b``."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        return self._with_step(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        return self._with_step(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        return self._with_step(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _called(_JOIN, node.nodes, node.lineno)

    def _with_step(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        step = nodes.ExprStmt(_called(_STEP, [], node.lineno), lineno=node.lineno)
        node.body.insert(0, step)
        return node  # type: ignore[no-any-return]


def _called(name: str, arguments: list[nodes.Expr], lineno: int) -> nodes.Call:
    return nodes.Call(nodes.Name(name, "load", lineno=lineno), arguments, [], None, None, lineno=lineno)


def _stepper() -> Callable[[], str]:
    """Counts one rendering's steps."""
    end = time.monotonic() + TIMEOUT_S
    steps = 0

    def step() -> str:
        nonlocal steps
        steps += 1
        if steps > MAX_STEPS or (steps % STEPS_PER_LOOK == 0 and time.monotonic() > end):
            raise jinja2.TemplateRuntimeError(f"it takes more than {TIMEOUT_S:g} s or {MAX_STEPS} steps")
        return ""

    return step


def _joined(*parts: Any) -> str:
    texts = [str(part) for part in parts]
    _check_size(sum(map(len, texts)))
    return "".join(texts)


def _check_size(size: int) -> None:
    if size > MAX_CHARS:
        raise jinja2.TemplateRuntimeError(f"a text has more than {MAX_CHARS} characters")


def _refuse(message: object) -> str:
    raise TemplateRefusal(str(message))


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Like Jinja's filter, but without HTML escapes."""
    if indent is not None and not 0 <= indent <= 16:
        raise jinja2.TemplateRuntimeError(f"an indentation of {indent} is not supported")
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    pieces: list[str] = []
    size = 0
    for piece in encoder.iterencode(value):
        size += len(piece)
        _check_size(size)
        pieces.append(piece)
    return "".join(pieces)


def _join_filter(values: Any, separator: str = "", attribute: str | None = None) -> str:
    if attribute is not None:
        raise jinja2.TemplateRuntimeError("join takes no attribute here")
    texts: list[str] = []
    size = 0
    for value in values:
        texts.append(str(value))
        size += len(texts[-1]) + len(separator)
        _check_size(size)
    return separator.join(texts)


def _replace(text: str, old: str, new: str, count: int = -1) -> str:
    times = str(text).count(old) if count < 0 else count
    _check_size(len(text) + times * len(new))
    return str(text).replace(old, new, count)


def _now(form: str) -> str:
    """Today's date in the template's format, but not padded to a width."""
    if len(form) > 64 or re.search(r"%[^A-Za-z%-]", form):
        raise jinja2.TemplateRuntimeError(f"the date format {form[:64]!r} is not supported")
    return time.strftime(form)


def _read(path: Path, most: int) -> str:
    try:
        if path.stat().st_size > most:
            raise BadCheckpoint(f"{path} is larger than {most} bytes, which is too large for such a file.")
        return path.read_bytes().decode()
    except OSError as exc:
        raise BadCheckpoint(f"{path} cannot be read: {exc.strerror}.") from exc
    except UnicodeDecodeError as exc:
        raise BadCheckpoint(f"{path} is not UTF-8.") from exc

"""Function calls over synthetic schemas: names, parameters, types and enumerations are drawn; schemas are held out.

A schema is held out by the name and the parameters of the function that is to be called.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

from demo.data import arithmetic, capitals, values
from demo.data.base import Sample, article, developer, draw_split, listed, some_date, some_effort, user
from demo.data.known_tools import known
from demo.data.lexicon import ADJECTIVES, NOUNS
from demo.data.schema import Parameter, arguments_json, parameter_schema
from microscale.text.conversation import Effort, Message, Role, Tool, ToolCall

VERBS = (
    "get", "find", "create", "delete", "update", "send", "book", "cancel", "list", "check", "add", "remove", "set",
    "start", "stop", "open", "close", "print", "copy", "move", "rename", "share", "order", "schedule", "track",
    "measure", "convert", "translate", "search", "read", "write", "play", "record", "upload", "download", "assign",
    "approve", "reject", "pay", "rent", "repair", "count", "sort", "merge", "split", "export", "import", "lock",
    "unlock", "register",
)  # fmt: skip
OBJECTS = (
    "weather", "invoice", "ticket", "meeting", "alarm", "account", "report", "order", "message", "document", "user",
    "task", "event", "reminder", "flight", "hotel", "room", "table", "car", "train", "payment", "product", "recipe",
    "playlist", "photo", "file", "folder", "note", "contact", "calendar", "server", "database", "device", "light",
    "door", "camera", "robot", "package", "delivery", "contract", "project", "lesson", "course", "book", "movie",
    "song", "game", "score", "price", "stock", "temperature", "distance", "route", "map", "parcel", "license", "permit",
    "survey", "poll",
)  # fmt: skip
DONE = ("ok", "done", "success", "accepted", "confirmed")


@dataclass(frozen=True)
class Drawn:
    """A function, and what one says about it."""

    tool: Tool
    parameters: tuple[Parameter, ...]
    request: str
    """``create the invoice``."""


def make(rng: random.Random, held_out: bool) -> Sample:
    kind = rng.choices((_call, _natural, _no_tool, _ask), (11, 4, 2, 1))[0]
    return kind(rng, held_out)


def make_call(rng: random.Random, held_out: bool) -> Sample:
    """Only calls of schemas never seen: the bar that the model must clear."""
    return _call(rng, held_out)


def draw_tool(rng: random.Random, num: int | None = None) -> Drawn:
    verb, noun = rng.choice(VERBS), rng.choice(OBJECTS) if rng.random() < 0.6 else rng.choice(NOUNS)
    extra = rng.choice(ADJECTIVES) if rng.random() < 0.25 else ""
    words = [verb, *([extra] if extra else []), noun]
    name = "_".join(words)
    if rng.random() < 0.15:
        name = verb + "".join(word.capitalize() for word in words[1:])
    count = rng.choices((0, 1, 2, 3, 4), (1, 5, 6, 4, 2))[0] if num is None else num
    picked: dict[str, Parameter] = {}
    while len(picked) < count:
        parameter = draw_parameter(rng)
        picked.setdefault(parameter.name, parameter)
    subject = f"{extra} {noun}".strip()
    parameters = tuple(picked.values())
    description = rng.choice((f"{verb.capitalize()} {article(subject)}.", f"{verb.capitalize()} the {subject}",
                              f"Use this to {verb} {article(subject)}.", ""))  # fmt: skip
    schema = parameter_schema(parameters)
    tool = Tool(name, description, None if not parameters and rng.random() < 0.5 else schema)
    return Drawn(tool, parameters, f"{verb} {rng.choice(('the', 'a'))} {subject}")


def draw_parameter(rng: random.Random) -> Parameter:
    """A parameter; a second noun makes names that were never seen: ``invoice_date``."""
    kind = rng.choices(("string", "integer", "number", "boolean", "enum", "array"), (9, 4, 2, 1.5, 3, 1))[0]
    pools = {"string": tuple(values.STRINGS), "integer": values.INTEGERS, "number": values.DECIMALS,
             "boolean": values.FLAGS,
             "enum": tuple(values.ENUMS), "array": ("tags", "items", "names", "words", "labels")}  # fmt: skip
    base = rng.choice(pools[kind])
    name = (
        base if rng.random() < 0.5 or kind in ("array", "boolean") else f"{rng.choice((*OBJECTS, *NOUNS[::7]))}_{base}"
    )
    enum: tuple[str, ...] = ()
    if kind == "enum":
        enum = values.ENUMS[base] if rng.random() < 0.5 else tuple(dict.fromkeys(rng.choice(NOUNS) for _ in range(3)))
    described = rng.random() < 0.4
    words = name.replace("_", " ")
    return Parameter(name, kind, base, f"The {words}." if described else "", rng.random() < 0.75, enum)


def value_of(rng: random.Random, parameter: Parameter) -> Any:
    if parameter.kind == "enum":
        return rng.choice(parameter.enum)
    if parameter.kind == "integer":
        return values.integer(rng)
    if parameter.kind == "number":
        return values.decimal(rng)
    if parameter.kind == "boolean":
        return rng.random() < 0.7
    if parameter.kind == "array":
        return [rng.choice((values.made_up(rng), rng.choice(NOUNS))) for _ in range(rng.randint(1, 3))]
    return values.STRINGS[parameter.base](rng)


def mention(rng: random.Random, parameter: Parameter, value: Any) -> str:
    """How a user says a parameter's value."""
    words = parameter.name.replace("_", " ")
    if parameter.kind == "boolean":
        return rng.choice((f"{words} {'on' if value else 'off'}", f"{words} {'true' if value else 'false'}",
                           f"{'with' if value else 'without'} {words}"))  # fmt: skip
    said = listed(value) if isinstance(value, list) else str(value)
    if rng.random() < 0.15:
        return f'{words} "{said}"' if isinstance(value, str) else f"{words}={said}"
    return rng.choice(
        (f"{words} {said}", f"{words} {said}", f"{words}: {said}", f"the {words} is {said}", f"{words} = {said}")
    )


def _call(rng: random.Random, held_out: bool) -> Sample:
    wanted = draw_split(lambda: draw_tool(rng), lambda d: (d.tool.name, [p.name for p in d.parameters]), held_out)
    given = {p: value_of(rng, p) for p in wanted.parameters if p.required or rng.random() < 0.5}
    said = [mention(rng, parameter, value) for parameter, value in given.items()]
    if rng.random() < 0.3:
        rng.shuffle(said)
    request = rng.choice(
        (wanted.request, f"please {wanted.request}", f"can you {wanted.request}", f"I want to {wanted.request}")
    )
    request = request[0].upper() + request[1:]
    if rng.random() < 0.15:
        request = rng.choice((f"Call {wanted.tool.name}", f"Use {wanted.tool.name}", f"Run {wanted.tool.name}"))
    tail = f" {rng.choice(('with', 'with', 'using'))} {listed(said)}" if said else ""
    if said and rng.random() < 0.3:
        tail = f", {', '.join(said)}"
    text = f"{request}{tail}{rng.choice(('.', '.', ''))}"
    arguments = {parameter.name: value for parameter, value in given.items()}
    return _sample(rng, wanted.tool, text, arguments, "tools")


def _sample(rng: random.Random, tool: Tool, text: str, arguments: dict[str, Any], task: str) -> Sample:
    others = [draw_tool(rng).tool for _ in range(rng.choices((0, 1, 2, 3, 4), (3, 3, 2, 1, 1))[0])]
    tools = [tool, *(other for other in others if other.name != tool.name)]
    tools = list({each.name: each for each in tools}.values())
    rng.shuffle(tools)
    effort = some_effort(rng)
    coded = arguments_json(arguments)
    call = Message(Role.ASSISTANT, reasoning=_thought(effort, tool.name, arguments),
                   tool_calls=(ToolCall("call", tool.name, coded),))  # fmt: skip
    turn: tuple[Message, ...] = (call, *_result(rng, tool.name))
    if rng.random() < 0.08:
        # A caller may want a certain function: the turn then begins with the call.
        turn = (Message(Role.ASSISTANT, tool_calls=call.tool_calls), *turn[1:])
    history = (*([developer(rng.choice(SYSTEM))] if rng.random() < 0.3 else []), user(text))
    check = {"kind": "call", "name": tool.name, "arguments": arguments}
    date = some_date(rng).isoformat()
    return Sample(task, history, turn, check, tuple(tools), effort=effort, date=date)


SYSTEM = ("You are a helpful assistant.", "Use the tools where they help.", "Be brief.", "You work for a small firm.")


def _thought(effort: Effort, name: str, arguments: dict[str, Any]) -> str:
    if effort is Effort.LOW:
        return f"{name}."
    if not arguments:
        return f"I call {name}, which takes nothing here."
    if effort is Effort.MEDIUM:
        return f"I call {name} with {listed(list(arguments))}."
    return f"The tool for this is {name}. " + " ".join(f"{key}: {value}." for key, value in arguments.items())


def _result(rng: random.Random, name: str) -> tuple[Message, Message]:
    """What the function gives, and the answer that is made of it."""
    kind = rng.randrange(4)
    if kind == 0:
        word = rng.choice(DONE)
        result, final, thought = json.dumps({"status": word}), f"Done: the status is {word}.", f"The status is {word}."
    elif kind == 1:
        key, value = rng.choice(values.INTEGERS), values.integer(rng)
        result, final, thought = json.dumps({key: value}), f"The {key} is {value}.", f"The result has {key} {value}."
    elif kind == 2:
        parameter = draw_parameter(rng)
        value = value_of(rng, Parameter(parameter.name, "string", rng.choice(tuple(values.STRINGS)), "", True, ()))
        words = parameter.name.replace("_", " ")
        result = json.dumps({parameter.name: value})
        final, thought = f"The {words} is {value}.", f"The result has {words} {value}."
    else:
        problem = values.phrase(rng)
        result, final = json.dumps({"error": problem}), f"That did not work: {problem}."
        thought = f"{name} gave an error."
    return Message(Role.TOOL, result, call_id="call"), Message(Role.ASSISTANT, final, thought)


def _natural(rng: random.Random, held_out: bool) -> Sample:
    """Functions that everybody tries first, in everyday words. Their names are taught; the wordings are held out."""
    tool, text, arguments = known(rng, held_out)
    return _sample(rng, tool, text, arguments, "everyday tools")


def _no_tool(rng: random.Random, held_out: bool) -> Sample:
    """Tools are there and none is needed."""
    sample = rng.choice((arithmetic.make, capitals.make))(rng, held_out)
    tools = {drawn.tool.name: drawn.tool for drawn in (draw_tool(rng) for _ in range(rng.randint(1, 3)))}
    return Sample(**{**vars(sample), "tools": tuple(tools.values()), "task": "no tool"})


def _ask(rng: random.Random, held_out: bool) -> Sample:
    """What a function requires is not said: the model asks for it."""

    def draw() -> Drawn:
        return draw_tool(rng, rng.randint(1, 3))

    wanted = draw_split(draw, lambda d: ("ask", d.tool.name, [p.name for p in d.parameters]), held_out)
    needed = [parameter for parameter in wanted.parameters if parameter.required]
    if not needed:
        return _call(rng, held_out)
    missing = listed([parameter.name.replace("_", " ") for parameter in needed])
    text = rng.choice((f"Please {wanted.request}.", f"Can you {wanted.request}?", f"I want to {wanted.request}."))
    thought = f"{wanted.tool.name} needs {missing}, which {'is' if len(needed) == 1 else 'are'} not given. I ask."
    final = f"Please tell me the {missing}."
    return Sample(
        "asking back",
        (user(text),),
        (Message(Role.ASSISTANT, final, thought),),
        {"kind": "contains", "value": missing},
        (wanted.tool,),
        effort=some_effort(rng),
        date=some_date(rng).isoformat(),
    )

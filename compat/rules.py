"""What the scripted engine says to whom: pairs of a pattern in the prompt and a turn of the model as Harmony has it."""

from __future__ import annotations

import json
from typing import Any


def call(name: str, arguments: dict[str, Any], thought: str = "I need a tool for this.") -> str:
    return (
        f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant<|channel|>commentary to=functions.{name} "
        f"<|constrain|>json<|message|>{json.dumps(arguments, ensure_ascii=False)}<|call|>"
    )


def answer(text: str) -> str:
    return (
        f"<|channel|>analysis<|message|>Now I know.<|end|><|start|>assistant<|channel|>final<|message|>{text}<|return|>"
    )


def after(name: str) -> str:
    """A prompt that ends with the result of a call."""
    return rf"<\|start\|>functions\.{name}<\|channel\|>(?!.*<\|start\|>user)"


PATCH = "*** Begin Patch\n*** Add File: hello.txt\n+Hello from the patch.\n*** End Patch\n"

FILES = answer("There is one file: first-file.txt.")
LIST = r".*List the files of this folder"

AGENTS = [
    # Codex.
    (after("exec_command"), FILES),
    (after("apply_patch"), answer("The patch is in.")),
    (r"apply_patch.*Add a file by a patch", call("apply_patch", {"input": PATCH})),
    (r"exec_command" + LIST, call("exec_command", {"cmd": "ls"})),
    (after("close_agent") + r".*unsupported", answer("That tool is not known.")),
    (after("close_agent"), answer("The agent is closed.")),
    (r"close_agent.*Close the agent", call("close_agent", {"target": "nobody"})),
    # Claude Code.
    (after("Bash"), FILES),
    (r"Bash" + LIST, call("Bash", {"command": "ls", "description": "List files"})),
    # aider.
    (r"Change the greeting to good morning", answer("Done:\n\ngreeting.txt\n```\ngood morning\n```\n")),
    # Vercel's SDK.
    (after("weather"), answer("It is 21 degrees.")),
    (r"weather" + LIST, call("weather", {"city": "Paris"})),
]

JOKE = {"setup": "Why did the cat sit on the keyboard?", "punchline": "To keep an eye on the mouse."}


def customer(name: str) -> str:
    return call("unicode_customer", {"customer_name": name, "description": "A company"})


# LangChain's standard tests, which ask what only a large model can answer.
LANGCHAIN = [
    (r"magic_function_no_args\(\)\?", call("magic_function_no_args", {})),
    (r"magic_function\(3\)\?", call("magic_function", {"input": 3})),
    (r"magic_function.*Hello!", call("magic_function", {"input": 3})),
    (r"generate a Pirate greeting", call("greeting_generator", {"answer_style": "Pirate"})),
    (r"type Joke = .* about cats", call("Joke", JOKE)),
    (r"about cats", answer(json.dumps(JOKE))),
    (after("get_weather"), answer("It is sunny.")),
    (r"weather in San Francisco", call("get_weather", {"location": "San Francisco, CA"})),
    (r"你好啊集团", customer("你好啊集团")),
    (r"こんにちは株式会社", customer("こんにちは株式会社")),
    (r"haikus", answer("Old pond, a frog jumps. Autumn moonlight, a worm digs.")),
]

OTHERS = [
    (r"What is 12 \+ 30\?", answer("It is 42.")),
    (r"Ann is 30 years old", answer(json.dumps({"name": "Ann", "age": 30}))),
]

RULES = [*AGENTS, *LANGCHAIN, *OTHERS]
MORE_NAMES = ["gpt-5.5"]
"""A name that Codex knows: it then offers a tool of free text as well."""

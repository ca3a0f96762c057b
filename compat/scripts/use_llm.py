"""Simon Willison's llm: a model of extra-openai-models.yaml, asked from its command line."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from checks import KEY, MODEL, SUM, V1, check, main, run, tool

MODELS = f"""
- model_id: microscale
  model_name: {MODEL}
  api_base: {V1}
  api_key_name: microscale
  supports_schema: true
  supports_tools: true
"""


def llm(*arguments: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "extra-openai-models.yaml").write_text(MODELS)
        command = [tool("llm"), "-m", "microscale", "--key", KEY, "-o", "temperature", "0", "-o", "max_tokens", "400"]
        return run([*command, *arguments], LLM_USER_PATH=folder, HOME=folder)


@check("a prompt, streamed and not")
def prompt() -> None:
    assert "42" in llm(SUM)
    assert "42" in llm("--no-stream", SUM)


@check("--schema")
def schema() -> None:
    told = llm("--no-stream", "--schema", "name, age int", "Ann is 30 years old. Name and age as JSON.")
    assert isinstance(json.loads(told)["age"], int)


@check("a tool given as Python")
def tools() -> None:
    function = 'def get_weather(city: str) -> str:\n    "The weather in a city"\n    return \'{"temperature": 21}\''
    assert "21" in llm("--functions", function, "What is the weather in Paris?")


main()

"""instructor: structured output by tools, by JSON schema and streamed in parts."""

from __future__ import annotations

from typing import Any

import instructor
import openai
from checks import KEY, MODEL, SCRIPTED_MODEL, SCRIPTED_V1, V1, check, main
from pydantic import BaseModel

said: list[Any] = [{"role": "user", "content": "Ann is 30 years old. Name and age as JSON."}]


class Person(BaseModel):
    name: str
    age: int


def client(mode: instructor.Mode, v1: str = V1) -> Any:
    return instructor.from_openai(openai.OpenAI(base_url=v1, api_key=KEY, max_retries=0), mode=mode)


for mode in (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA):

    @check(f"response_model, mode {mode.value}")
    def create(mode: instructor.Mode = mode) -> None:
        found = client(mode).chat.completions.create(
            model=MODEL, response_model=Person, messages=said, temperature=0, max_tokens=400, max_retries=1
        )
        assert isinstance(found, Person)


@check("response_model, mode json_mode, on the scripted engine: a schema in prose is too hard for the embedded model")
def json_mode() -> None:
    found = client(instructor.Mode.JSON, SCRIPTED_V1).chat.completions.create(
        model=SCRIPTED_MODEL, response_model=Person, messages=said
    )
    assert (found.name, found.age) == ("Ann", 30)


@check("create_partial, streamed")
def partial() -> None:
    parts = list(
        client(instructor.Mode.TOOLS).chat.completions.create_partial(
            model=MODEL, response_model=Person, messages=said, temperature=0, max_tokens=400
        )
    )
    assert isinstance(parts[-1].age, int), parts[-1:]


main()

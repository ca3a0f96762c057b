"""dspy: its language model over chat, plain and streamed, and a program with typed output."""

from __future__ import annotations

import dspy
from checks import KEY, MODEL, SCRIPTED_MODEL, SCRIPTED_V1, SUM, V1, check, main


def model(v1: str, name: str, kind: str) -> dspy.LM:
    options = {"temperature": 0, "max_tokens": 400, "cache": False, "num_retries": 0}
    return dspy.LM(f"openai/{name}", api_base=v1, api_key=KEY, model_type=kind, **options)


@check("LM, over chat and Responses")
def ask() -> None:
    for kind in ("chat", "responses"):
        assert "42" in str(model(V1, MODEL, kind)(SUM))


@check("a program with typed output, on the scripted engine")
def program() -> None:
    with dspy.context(lm=model(SCRIPTED_V1, SCRIPTED_MODEL, "chat"), adapter=dspy.JSONAdapter()):
        found = dspy.Predict("text -> name: str, age: int")(text="Ann is 30 years old.")
        assert (found.name, found.age) == ("Ann", 30)


main()

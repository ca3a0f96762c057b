"""dspy: its language model over chat, plain and streamed, and a program with typed output."""

from __future__ import annotations

import dspy
from checks import KEY, MODEL, SUM, V1, check, main

model = dspy.LM(f"openai/{MODEL}", api_base=V1, api_key=KEY, temperature=0, max_tokens=400, cache=False, num_retries=0)


@check("LM, over chat and Responses")
def ask() -> None:
    assert "42" in str(model(SUM))
    responses = dspy.LM(
        f"openai/{MODEL}",
        api_base=V1,
        api_key=KEY,
        temperature=0,
        max_tokens=400,
        cache=False,
        num_retries=0,
        model_type="responses",
    )
    assert "42" in str(responses(SUM))


@check("structured output by a JSON schema")
def program() -> None:
    with dspy.context(lm=model, adapter=dspy.JSONAdapter()):
        found = dspy.Predict("text -> name: str, age: int")(text="Ann is 30 years old.")
        assert isinstance(found.age, int)


main()

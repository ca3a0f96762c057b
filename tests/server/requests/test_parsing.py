"""Any JSON is a request or an error that names a field; no field is both read and passed over."""

from __future__ import annotations

import contextlib
import json

from hypothesis import given
from hypothesis import strategies as st

from microscale.server.error_texts import BadField
from microscale.server.openai.chat.schema import ChatRequest
from microscale.server.openai.completions.schema import CompletionRequest
from microscale.server.requests.base import Body
from microscale.server.requests.fields import MARKS, ONLY
from microscale.server.requests.parsing import parse

FIELDS = [*ChatRequest.model_fields, "prompt", "role", "content", "type", "text", "name", "function", "unknown"]


def test_no_field_is_both_read_and_passed_over() -> None:
    read = set(ChatRequest.model_fields) | set(CompletionRequest.model_fields)
    assert not read & (set(MARKS) | set(ONLY))
    assert not set(MARKS) & set(ONLY)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(["user", "text"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(FIELDS), inner, max_size=5),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=6), st.sampled_from([ChatRequest, CompletionRequest]))
def test_any_json_is_a_request_or_a_named_fault(body: object, kind: type[Body]) -> None:
    with contextlib.suppress(BadField):
        parse(kind, json.dumps(body).encode())

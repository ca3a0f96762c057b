"""LangChain's own standard tests of a chat model, run by pytest in langchain's environment. The classes say what the
embedded model cannot do; nothing that is the server's is left out."""

from __future__ import annotations

from typing import Any

from checks import KEY, MODEL, OTHER_MODEL, V1
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests


class Standard(ChatModelIntegrationTests):
    """What both APIs share. A toy of 30 million parameters reads no images, audio or files."""

    @property
    def chat_model_class(self) -> type[ChatOpenAI]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": MODEL, "base_url": V1, "api_key": KEY, "temperature": 0, "max_tokens": 500} | {
            "max_retries": 0,
            "stream_usage": True,  # its default for OpenAI's own address
        }

    @property
    def model_override_value(self) -> str:
        return OTHER_MODEL

    @property
    def has_tool_choice(self) -> bool:
        return True

    @property
    def supports_image_inputs(self) -> bool:
        return False

    @property
    def supports_json_mode(self) -> bool:
        return True


class TestChat(Standard):
    pass


class TestResponses(Standard):
    @property
    def chat_model_params(self) -> dict[str, Any]:
        return super().chat_model_params | {"use_responses_api": True}

"""Renders ChatML's prompts with the checkpoint's own chat template, and turns as the model writes them.

A template may end the prompt inside the assistant's turn: with empty reasoning if none is wanted, or with open
reasoning for models that always think. That part is ``Rendered.begun``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from microscale.text.chat_template import ChatTemplate
from microscale.text.chatml import tokens as names
from microscale.text.chatml.tokens import ChatmlTokens
from microscale.text.conversation import (
    Effort,
    Message,
    PromptEnd,
    Rendered,
    RenderOptions,
    ToolCall,
    open_message,
)
from microscale.text.template_prompt import TemplatePrompt
from microscale.text.tokenizer import Tokenizer


class ChatmlRenderer:
    """Renders for one checkpoint."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        self.tokens = ChatmlTokens.of(tokenizer)
        self._tokenizer = tokenizer
        self._prompt = TemplatePrompt(tokenizer, template)

    def rendered(self, conversation: Sequence[Message], options: RenderOptions) -> Rendered:
        """The prompt, ending where ``options.end`` says."""
        if options.end is PromptEnd.OPEN:
            return self._continued(*open_message(conversation), options)
        ids = self._render(conversation, options)
        begun = [] if options.end is PromptEnd.CLOSED else self._begun(ids)
        return Rendered(ids, tuple(begun))

    def _render(self, conversation: Sequence[Message], options: RenderOptions) -> list[int]:
        return self._prompt.render(
            conversation,
            options,
            # Reasoning is on or off; there are no levels.
            enable_thinking=options.effort in (Effort.MEDIUM, Effort.HIGH),
            bos_token="",
            eos_token=names.END,
        )

    def _continued(self, before: Sequence[Message], last: Message, options: RenderOptions) -> Rendered:
        """A prompt that ends inside ``last``, an incomplete assistant message."""
        ids = self._render(before, options)
        begun = self._begun(ids)
        ids = ids[: len(ids) - len(begun)]
        if last.reasoning:
            begun = self._thoughts(last.reasoning, closed=bool(last.content))
        elif is_thinking(begun, self.tokens):
            begun = self._thoughts("", closed=True)
        # Without trailing line breaks: the parser would hold them back and show them with the first token.
        shown = self._tokenizer.encode(last.content.rstrip("\n"))
        return Rendered([*ids, *begun, *self._tokenizer.encode(last.content)], (*begun, *shown))

    def _begun(self, ids: Sequence[int]) -> list[int]:
        """The reasoning that the template wrote in the prompt's last turn."""
        begin = max((at for at, token in enumerate(ids) if token == self.tokens.start), default=len(ids))
        turn = list(ids[begin:])
        return turn[turn.index(self.tokens.think) :] if self.tokens.think in turn else []

    def turn(self, message: Message) -> list[int]:
        """An assistant's message as the model writes it after a prompt."""
        ids = self._thoughts(message.reasoning, closed=True) if message.reasoning else []
        ids += self._tokenizer.encode(message.content)
        for number, call in enumerate(message.tool_calls):
            ids += self._tokenizer.encode("\n") if number or message.content else []
            ids += [self.tokens.call, *self._tokenizer.encode(f"\n{call_text(call)}\n"), self.tokens.end_call]
        return [*ids, self.tokens.end]

    def _thoughts(self, text: str, *, closed: bool) -> list[int]:
        encode = self._tokenizer.encode
        if not closed:
            return [self.tokens.think, *encode(f"\n{text}")]
        return [self.tokens.think, *encode(f"\n{text}\n"), self.tokens.end_think, *encode("\n\n")]


def is_thinking(begun: Sequence[int], tokens: ChatmlTokens) -> bool:
    """Whether the part of the turn in the prompt ends inside unclosed reasoning."""
    marks = [token for token in begun if token in (tokens.think, tokens.end_think)]
    return bool(marks) and marks[-1] == tokens.think


def call_text(call: ToolCall) -> str:
    """A call as the model writes it, with unchanged arguments."""
    return f'{{"name": {json.dumps(call.name, ensure_ascii=False)}, "arguments": {call.arguments or "{}"}}}'

"""Renders Gemma 4's prompts with the checkpoint's own chat template, and turns as the model writes them."""

from __future__ import annotations

from collections.abc import Sequence

from microscale.text.chat_template import ChatTemplate
from microscale.text.conversation import Effort, Message, PromptEnd, Rendered, RenderOptions, open_message
from microscale.text.gemma import tokens as names
from microscale.text.gemma.call import QUOTE, call_text
from microscale.text.gemma.parser import THOUGHT
from microscale.text.gemma.tokens import GemmaTokens
from microscale.text.template_prompt import TemplatePrompt
from microscale.text.tokenizer import Tokenizer


class GemmaRenderer:
    """Renders for one checkpoint."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        self.tokens = GemmaTokens.of(tokenizer)
        self._tokenizer = tokenizer
        self._prompt = TemplatePrompt(tokenizer, template)

    def render(self, conversation: Sequence[Message], options: RenderOptions) -> list[int]:
        """The prompt, ending where ``options.end`` says."""
        return self.rendered(conversation, options).tokens

    def rendered(self, conversation: Sequence[Message], options: RenderOptions) -> Rendered:
        if options.end is not PromptEnd.OPEN:
            return Rendered(self._render(conversation, options))
        before, last = open_message(conversation)
        begun = self._thoughts(last.reasoning, closed=bool(last.content)) if last.reasoning else []
        begun += self._tokenizer.encode(last.content)
        return Rendered(self._render(before, options) + begun, tuple(begun))

    def _render(self, conversation: Sequence[Message], options: RenderOptions) -> list[int]:
        return self._prompt.render(
            conversation,
            options,
            # Reasoning is on or off; there are no levels.
            enable_thinking=options.effort in (Effort.MEDIUM, Effort.HIGH),
            bos_token=names.BOS if names.BOS in self._tokenizer.control else "",
            eos_token=names.EOS if names.EOS in self._tokenizer.control else "",
        )

    def turn(self, message: Message) -> list[int]:
        """An assistant's message as the model writes it after a prompt."""
        ids = self._thoughts(message.reasoning, closed=True) if message.reasoning else []
        ids += self._tokenizer.encode(message.content)
        for call in message.tool_calls:
            ids += [self.tokens.call, *self._quoted(call_text(call.name, call.arguments)), self.tokens.end_call]
        return [*ids, self._tokenizer.control[names.RESPONSE] if message.tool_calls else self.tokens.end_turn]

    def _quoted(self, text: str) -> list[int]:
        """Encode text in which ``QUOTE`` represents the quote token."""
        first, *others = text.split(QUOTE)
        ids = self._tokenizer.encode(first)
        for other in others:
            ids += [self.tokens.quote, *self._tokenizer.encode(other)]
        return ids

    def _thoughts(self, text: str, *, closed: bool) -> list[int]:
        if not closed:
            return [self.tokens.channel, *self._tokenizer.encode(f"{THOUGHT}\n{text}")]
        return [self.tokens.channel, *self._tokenizer.encode(f"{THOUGHT}\n{text}\n"), self.tokens.end_channel]

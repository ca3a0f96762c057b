"""The interface of a chat format: how a model and its users exchange messages.

A format renders a conversation as a prompt, parses what the model writes, and makes the grammar of a turn. Each is a
folder of ``text`` with one subclass of ``ChatFormat``; ``formats`` chooses it by the tokenizer. The rest of the program
uses only this class and never asks which format it is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import ClassVar, Self

from microscale.text.conversation import Message, Rendered, RenderOptions, Tool
from microscale.text.detokenize import Detokenizer
from microscale.text.events import Begin, Event, Flaw, Flawed, Header, TextKind
from microscale.text.grammar import Form, Schema, Turn, alone
from microscale.text.tokenizer import Tokenizer


class OutputParser(ABC):
    """Parses one output. Feed it every token that the model produced, including the stop token, then call ``finish``.

    It never raises: malformed output keeps its text and is reported as a ``Flaw``. A format's parser adds the events of
    text (``_add``), of control tokens (``_control``), and of what is still open at the end (``_end_output``).
    """

    def __init__(self, tokenizer: Tokenizer, tools: Collection[Tool] | None) -> None:
        """``tools``: functions that may be called; ``None`` means all."""
        self.is_control = tokenizer.is_control
        """Whether a token is a control token, which has no visible text."""
        self.flaws: list[Flaw] = []
        """Each kind once, in order of first appearance."""
        self._tools = None if tools is None else frozenset(tool.name for tool in tools)
        self._token_bytes = tokenizer.token_bytes
        self._detokenizer = Detokenizer(tokenizer)
        self._events: list[Event] = []
        self._num_calls = 0
        self._has_content = False

    def feed(self, token: int) -> list[Event]:
        """What this token adds. A token of a header, or part of a character, adds nothing yet."""
        self._events = []
        if self.is_control(token):
            self._add(self._detokenizer.flush())
            self._control(token)
        else:
            text = self._detokenizer.feed(token)
            if text:
                self._add(text)
            elif not self._token_bytes(token):
                self._flag(Flaw.STRAY_TOKEN)
        return self._events

    @abstractmethod
    def feed_plain(self, token: int) -> tuple[TextKind, str] | None:
        """The fast path, for a token that only adds text outside of calls. For any other: ``None``, and no change.

        Nearly all tokens take it.
        """

    def finish(self) -> list[Event]:
        """The remaining events; no token follows."""
        self._events = []
        self._add(self._detokenizer.flush())
        self._end_output()
        if not self._has_content and not self._num_calls:
            self._flag(Flaw.NO_CONTENT)
        return self._events

    @property
    @abstractmethod
    def body_kind(self) -> TextKind | None:
        """The kind of the message that the last token was in; ``None`` in a header and between messages."""

    @abstractmethod
    def _add(self, text: str) -> None:
        """Add text between control tokens; it may be empty."""

    @abstractmethod
    def _control(self, token: int) -> None: ...

    @abstractmethod
    def _end_output(self) -> None: ...

    def _begin_call(self, function: str, header: Header) -> None:
        self._events.append(Begin(TextKind.CALL, header, function, self._num_calls))
        self._num_calls += 1

    def _flag(self, flaw: Flaw, text: str = "") -> None:
        if flaw not in self.flaws:
            self.flaws.append(flaw)
        self._events.append(Flawed(flaw, text))


class ChatFormat(ABC):
    """The chat format of one checkpoint. Creating it may take a second: create it once and keep it."""

    MARK: ClassVar[str]
    """A control token that no other format has."""
    CONTROL: ClassVar[tuple[str, ...]]
    """Names of its control tokens, in the order of the byte tokenizer's ids."""
    ANSWER_END: ClassVar[str]
    """The control token that ends an answer, and with it the turn."""
    CALL_END: ClassVar[str]
    """The control token that ends a call."""

    def __init__(self, tokenizer: Tokenizer, stops: Collection[int]) -> None:
        """Subclasses protect their control tokens first (``Tokenizer.protect``), so that no text can spell them."""
        self.tokenizer = tokenizer
        self.stops = frozenset(stops)
        """Tokens that end the model's turn, and with it generation."""
        self.answer_end = tokenizer.control[self.ANSWER_END]
        self.call_end = tokenizer.control[self.CALL_END]

    @classmethod
    def fits(cls, tokenizer: Tokenizer) -> bool:
        return cls.MARK in tokenizer.control

    @classmethod
    @abstractmethod
    def of(cls, tokenizer: Tokenizer) -> Self:
        """The format of a tokenizer's checkpoint. Raises ``BadCheckpoint`` if it does not fit."""

    # ---- prompts -----------------------------------------------------------------------------------------------------

    @abstractmethod
    def rendered(self, conversation: Sequence[Message], options: RenderOptions) -> Rendered:
        """The prompt, ending where ``options.end`` says. No client's text becomes a control token."""

    def render(self, conversation: Sequence[Message], options: RenderOptions) -> list[int]:
        """The tokens of ``rendered``."""
        return self.rendered(conversation, options).tokens

    def added_to(self, text: str) -> tuple[int, ...]:
        """Tokens that the model expects before a raw text prompt, unless the text already has them."""
        return ()

    def encode_text(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Encode a raw text prompt, which may contain control tokens by name."""
        return [*(self.added_to(text) if add_special_tokens else ()), *self.tokenizer.encode_with_control(text)]

    # ---- outputs -----------------------------------------------------------------------------------------------------

    @abstractmethod
    def parser(self, tools: Collection[Tool] | None = None) -> OutputParser:
        """A parser for one output. ``tools``: functions that may be called (``None``: all). Other calls are text."""

    @abstractmethod
    def turn(self, message: Message) -> list[int]:
        """An assistant's message as the model writes it after a prompt, end token included."""

    @abstractmethod
    def shows(self, prompt: str, question: str) -> bool:
        """Whether a decoded prompt is what ``render`` makes of one question."""

    # ---- grammars ----------------------------------------------------------------------------------------------------

    @abstractmethod
    def turn_grammar(self, turn: Turn) -> str:
        """The grammar of what the model writes after a prompt that ends in its turn."""

    @abstractmethod
    def text_grammar(self, form: Form) -> str:
        """The grammar of a raw prompt's continuation that consists only of ``form``."""

    def answer_grammar(self, form: Form) -> str:
        """The grammar of an answer alone, to check a form without the rest of the turn."""
        return alone(form, [self.ANSWER_END])

    def arguments_grammar(self, form: Schema) -> str:
        """The grammar of a call's arguments alone, as JSON: it checks the form."""
        return alone(form, [self.CALL_END])

    def why_not_strict(self, form: Schema) -> str | None:
        """Why a schema cannot constrain a call's arguments; ``None`` if it can."""
        return None

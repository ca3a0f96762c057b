"""The contract of a chat format: one way in which a model and its users talk.

A format lays a conversation out as a prompt, parses what the model writes, and knows the grammar of a turn. Each is a
folder of ``text`` with one subclass of ``ChatFormat``; ``formats`` chooses it by the tokenizer. The rest of the program
asks this class and never which format it is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from typing import ClassVar, Self

from microscale.text.conversation import Message, Rendered, RenderOptions
from microscale.text.events import Event, Flaw, Kind
from microscale.text.grammar import Form, Turn, alone
from microscale.text.tokenizer import Tokenizer


class OutputParser(ABC):
    """Parses one output. Feed it every token that the model produced, the stop token too, then call ``finish``.

    It never raises: what is malformed keeps its text and is told as a ``Flaw``.
    """

    is_control: Callable[[int], bool]
    """Whether a token is a control token, which shows nothing."""
    flaws: list[Flaw]
    """Each kind once, in the order of their first appearance."""

    @abstractmethod
    def feed(self, token: int) -> list[Event]:
        """What this token adds."""

    @abstractmethod
    def feed_plain(self, token: int) -> tuple[Kind, str] | None:
        """As ``feed``, for a token that only adds text that is not a call's. For any other: ``None``, and no change.

        The fast path: nearly all tokens are such.
        """

    @abstractmethod
    def finish(self) -> list[Event]:
        """No token follows."""

    @property
    @abstractmethod
    def body_kind(self) -> Kind | None:
        """Of the message whose text the last token was in; ``None`` in a header and between messages."""


class ChatFormat(ABC):
    """One checkpoint's. Making one may take a second: make it once and keep it."""

    CONTROL: ClassVar[tuple[str, ...]]
    """Its control tokens by name, in the order in which a tokenizer that is made for it has them."""
    ANSWER_END: ClassVar[str]
    """The control token that ends an answer, and with it the turn."""
    CALL_END: ClassVar[str]
    """The control token that ends a call."""
    FREE_ARGUMENTS: ClassVar[str | None] = None
    """Why no schema can bind a call's arguments; ``None`` where one can."""

    def __init__(self, tokenizer: Tokenizer, stops: Collection[int]) -> None:
        """Subclasses have protected their control tokens by now (``Tokenizer.protect``): no text can spell them."""
        self.tokenizer = tokenizer
        self.stops = frozenset(stops)
        """Tokens after which the model's turn is over: generation ends there."""
        self.answer_end = tokenizer.control[self.ANSWER_END]
        self.call_end = tokenizer.control[self.CALL_END]

    @classmethod
    @abstractmethod
    def fits(cls, tokenizer: Tokenizer) -> bool:
        """Whether the tokenizer has this format's control tokens."""

    @classmethod
    @abstractmethod
    def of(cls, tokenizer: Tokenizer) -> Self:
        """For the checkpoint that a tokenizer belongs to; one that does not fit is a ``BadCheckpoint``."""

    # ---- in ----------------------------------------------------------------------------------------------------------

    @abstractmethod
    def rendered(self, conversation: Sequence[Message], options: RenderOptions) -> Rendered:
        """The prompt, up to where ``options.end`` says. No text of a client's becomes a control token."""

    def render(self, conversation: Sequence[Message], options: RenderOptions) -> list[int]:
        """The tokens of ``rendered``."""
        return self.rendered(conversation, options).tokens

    def added_to(self, text: str) -> tuple[int, ...]:
        """What the model expects before a raw text prompt, unless the text brings it."""
        return ()

    def encode_text(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """A raw text prompt, in which control tokens stand by name."""
        return [*(self.added_to(text) if add_special_tokens else ()), *self.tokenizer.encode_with_control(text)]

    # ---- out ---------------------------------------------------------------------------------------------------------

    @abstractmethod
    def parser(self, tools: Collection[str] | None = None) -> OutputParser:
        """For one output. ``tools``: the functions that were offered. A call of another is text; ``None`` takes all."""

    @abstractmethod
    def turn(self, message: Message) -> list[int]:
        """An assistant's message as the model writes it after a prompt, end token included."""

    @abstractmethod
    def shows(self, prompt: str, question: str) -> bool:
        """Whether a prompt, decoded with its control tokens by name, is what ``render`` made of one question."""

    # ---- grammars ----------------------------------------------------------------------------------------------------

    @abstractmethod
    def turn_grammar(self, turn: Turn) -> str:
        """Of what the model writes after a prompt that ends in its turn."""

    @abstractmethod
    def text_grammar(self, form: Form) -> str:
        """Of the continuation of a raw prompt that is nothing but ``form``."""

    def answer_grammar(self, form: Form) -> str:
        """Of an answer alone: whether a form can be kept is known without the rest of the turn."""
        return alone(form, [self.ANSWER_END])

    def arguments_grammar(self, form: Form) -> str:
        """Of a call's arguments alone."""
        return alone(form, [self.CALL_END])

"""What a client gets of one output: text by kind, calls, and every token id in exactly one delta.

Tokens without visible text yet (in a header, half a character, the possible beginning of a stop string) are kept: their
ids go out with the next delta that shows something, and ``finish`` returns those that are left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

from microscale.text.chat_format import OutputParser
from microscale.text.detokenize import Detokenizer
from microscale.text.events import Begin, End, Event, Flaw, Text, TextKind
from microscale.text.stop import StopStrings
from microscale.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A call that begins (with a ``function``) or continues (without)."""

    call_idx: int
    function: str | None
    arguments: str


@dataclass(frozen=True, slots=True)
class Delta:
    """What a few tokens add. Only the last delta may be empty."""

    token_ids: tuple[int, ...]
    reasoning: str = ""
    content: str = ""
    calls: tuple[CallDelta, ...] = ()

    @property
    def shows(self) -> bool:
        return bool(self.reasoning or self.content or self.calls)


@dataclass(slots=True)
class _DeltaParts:
    """Texts of events, by kind."""

    reasoning: list[str] = field(default_factory=list)
    content: list[str] = field(default_factory=list)
    calls: list[CallDelta] = field(default_factory=list)


class ChatOutput:
    """A parser's messages as deltas. Stop strings apply to the content, never to reasoning or arguments.

    The texts of several messages of one kind are joined by a line break.
    """

    def __init__(
        self,
        parser: OutputParser,
        *,
        stops: Sequence[str] = (),
        keep_stop: bool = False,
        begun: Sequence[int] = (),
        one_call: bool = False,
    ) -> None:
        """``begun``: tokens of the prompt that belong to the message that the output continues; they are not shown.

        ``one_call``: the output ends with its first call.
        """
        self._parser = parser
        self._one_call = one_call
        self._is_control = parser.is_control
        self._stops = StopStrings(stops, keep=keep_stop)
        self._pending: list[int] = []
        self._seen: set[TextKind] = set()
        self._breaks: set[TextKind] = set()
        self._call_idx = -1
        self._is_over = False
        """The only allowed call has ended."""
        self.kinds: list[TextKind | None] | None = None
        """If set to a list, it collects the kind of each token; ``None`` for headers and other control tokens."""
        for token in begun:
            self._parser.feed(token)
        self._parser.flaws.clear()

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the content; later tokens show nothing."""
        return self._stops.matched

    @property
    def ended(self) -> bool:
        """Whether nothing that follows can be shown, so that generation can end."""
        return self._is_over or self._stops.matched is not None

    @property
    def flaws(self) -> Sequence[Flaw]:
        return self._parser.flaws

    @property
    def num_calls(self) -> int:
        return self._call_idx + 1

    def ends_part(self, token: int) -> bool:
        """Whether text after this token may be of another kind. The kinds in a delta have no order, so several tokens
        must be fed only up to such a token."""
        return self._is_control(token)

    def feed(self, token_ids: Sequence[int]) -> Delta | None:
        """The delta for these tokens, or ``None`` while there is nothing to show."""
        self._pending += token_ids
        if self.ended:
            return None
        parts = _DeltaParts()
        for token in token_ids:
            self._sort(self._parser.feed(token), parts)
            if self.kinds is not None:
                self.kinds.append(None if self._is_control(token) else self._parser.body_kind)
            if self._is_over or self._stops.matched is not None:
                break
        return self._delta(parts) if any(parts.reasoning) or any(parts.content) or parts.calls else None

    def feed_plain(self, token: int) -> tuple[TextKind, str] | None:
        """The fast path, for a token that shows only its own text. For any other: ``None``, and no change.

        Nearly all tokens take it; it saves creating a delta per token.
        """
        if self._pending or self._breaks or self._stops.watches:
            return None
        plain = self._parser.feed_plain(token)
        if plain is not None:
            self._seen.add(plain[0])
        return plain

    def finish(self) -> Delta:
        """The rest: text that was held back, and ids that were in no delta."""
        parts = _DeltaParts()
        if not self.ended:
            self._sort(self._parser.finish(), parts)
        return self._delta(parts)

    def _delta(self, parts: _DeltaParts) -> Delta:
        calls = _merged(parts.calls) if parts.calls else ()
        delta = Delta(tuple(self._pending), "".join(parts.reasoning), "".join(parts.content), calls)
        self._pending = []
        return delta

    def _sort(self, events: Sequence[Event], parts: _DeltaParts) -> None:
        for event in events:
            if isinstance(event, Text):
                if event.kind is TextKind.CALL:
                    parts.calls.append(CallDelta(self._call_idx, None, event.text))
                elif event.kind is TextKind.REASONING:
                    parts.reasoning.append(self._spaced(event) + event.text)
                else:
                    parts.content.append(self._spaced(event) + self._stops.feed(event.text))
            elif isinstance(event, Begin):
                if event.function is not None:
                    self._call_idx += 1
                    parts.calls.append(CallDelta(self._call_idx, event.function, ""))
                elif event.kind in self._seen:
                    self._breaks.add(event.kind)
            elif isinstance(event, End) and event.kind is TextKind.CONTENT:
                # A stop string does not match across messages.
                parts.content.append(self._stops.flush())
            elif isinstance(event, End) and event.kind is TextKind.CALL and self._one_call:
                self._is_over = True
                return

    def _spaced(self, event: Text) -> str:
        """The line break between this text and an earlier message of its kind."""
        self._seen.add(event.kind)
        if event.kind not in self._breaks:
            return ""
        self._breaks.remove(event.kind)
        return "\n"


class PlainOutput:
    """Text as the model wrote it, for completions of a raw prompt. Control tokens are omitted or shown by name."""

    def __init__(
        self, tokenizer: Tokenizer, *, stops: Sequence[str] = (), keep_stop: bool = False, show_control: bool = False
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._shown_name = tokenizer.control_name if show_control else tokenizer.plain_name
        self._stops = StopStrings(stops, keep=keep_stop)
        self._pending: list[int] = []

    @property
    def stopped(self) -> str | None:
        return self._stops.matched

    @property
    def ended(self) -> bool:
        return self._stops.matched is not None

    def ends_part(self, token: int) -> bool:
        """See ``ChatOutput.ends_part``: everything is content."""
        return False

    def feed(self, token_ids: Sequence[int]) -> Delta | None:
        self._pending += token_ids
        if self.stopped is not None:
            return None
        content = self._stops.feed("".join(map(self._text, token_ids)))
        if not content:
            return None
        delta = Delta(tuple(self._pending), content=content)
        self._pending = []
        return delta

    def _text(self, token: int) -> str:
        name = self._shown_name(token)
        return self._detokenizer.feed(token) if name is None else self._detokenizer.flush() + name

    def feed_plain(self, token: int) -> tuple[TextKind, str] | None:
        """See ``ChatOutput.feed_plain``."""
        if self._pending or self._stops.watches:
            return None
        text = self._detokenizer.whole(token)
        return (TextKind.CONTENT, text) if text else None

    def finish(self) -> Delta:
        content = self._stops.feed(self._detokenizer.flush()) + self._stops.flush()
        delta = Delta(tuple(self._pending), content=content)
        self._pending = []
        return delta


def joined(deltas: Sequence[Delta]) -> Delta:
    """Deltas that follow each other, as one."""
    return Delta(
        tuple(token for delta in deltas for token in delta.token_ids),
        "".join(delta.reasoning for delta in deltas),
        "".join(delta.content for delta in deltas),
        _merged([call for delta in deltas for call in delta.calls]),
    )


def _merged(calls: Sequence[CallDelta]) -> tuple[CallDelta, ...]:
    """One delta per call: its pieces are adjacent."""
    pieces = [list(group) for _, group in groupby(calls, key=lambda call: call.call_idx)]
    return tuple(
        CallDelta(group[0].call_idx, group[0].function, "".join(piece.arguments for piece in group)) for group in pieces
    )

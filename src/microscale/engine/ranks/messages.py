"""Messages between rank 0 and the other ranks, and the connection that carries them.

    rank 0                                   another rank
      Join ───────────────────────────────────►          its rank, where ranks meet, which model
      ◄──────────────────────────── Prepared              versions, checkpoint, how many KV pages fit
      Load ───────────────────────────────────►
      ◄────────────────────────────── Loaded
      Assemble ───────────────────────────────►          limits, and pages that every rank has room for
      ◄─────────────────────────── Assembled
      Step, Draft, Prepare, Idle ─────────────►
      Stop ───────────────────────────────────►
      ◄──────────────────────────── Alive …               every second
      ◄──────────────────────────── Fault                 the last message of a rank that cannot go on

Every message is bounded and rejects unknown fields. Nothing is pickled, and nothing here imports torch.
"""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Iterable
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta, Struct

from microscale.engine.config import EngineConfig, Natural, Positive, Text, Token
from microscale.engine.limits import Limits
from microscale.engine.protocol.frames import FrameReader, frame
from microscale.engine.protocol.messages import Id
from microscale.errors import BadMessage

MAX_ROWS = 2**16
MAX_CHUNK = 2**20
MAX_PAGES = 2**20
READ_BYTES = 2**18
Pages = Annotated[tuple[Annotated[int, Meta(ge=-1, lt=2**31)], ...], Meta(max_length=MAX_PAGES)]


class RankMessage(Struct, frozen=True, tag_field="type", forbid_unknown_fields=True):
    """The root of all messages. The class's name is the tag."""


class Join(RankMessage, frozen=True):
    """The first message. Nothing in it comes from a request."""

    version: Text
    """Microscale's. All ranks must run the same one."""
    rank: Natural
    world: Positive
    config: EngineConfig
    """The model, in the command line's names."""
    device: Text
    sharing: Positive
    """Ranks that share this one's device."""
    store: Text = ""
    """A file in a private folder, through which ranks of one machine find each other."""
    address: Text = ""
    """Otherwise ranks of several machines find each other at this address and port of rank 0."""
    port: Annotated[int, Meta(ge=0, lt=2**16)] = 0


class RankLoad(RankMessage, frozen=True):
    """All ranks agree: connect to each other and read the weights."""


class Assemble(RankMessage, frozen=True):
    """The pages of each kind of layer, and the other arguments of ``ModelRunner``."""

    limits: Limits
    pages: Annotated[dict[str, Natural], Meta(max_length=16)]
    enforce_eager: bool
    fill_up_prompts: bool | None
    draft_tokens: Natural
    head: bool
    """Drafts come from the draft head."""


class HeldPages(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """How a sequence's pages of one kind changed: those before ``left`` are released, those from ``left`` to ``kept``
    are unchanged, and ``fresh`` ones follow."""

    left: Natural
    kept: Natural
    fresh: Pages


class RankRow(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The work of one sequence in a step."""

    number: Natural
    """Identifies the sequence. A sequence gets a new number after each preemption."""
    first: Natural
    count: Positive
    tokens: Annotated[tuple[Token, ...], Meta(max_length=MAX_CHUNK)]
    """Empty where the previous step has sampled the token and rank 0 has not read it yet."""
    drafts: Annotated[tuple[Token, ...], Meta(max_length=64)]
    logits: Natural
    scoring: bool
    held: Annotated[tuple[HeldPages, ...], Meta(max_length=16)]
    """In the order of ``Assemble.pages``."""
    following: Token | None = None
    """The prompt's next token after this chunk; ``None`` where the chunk ends the prompt."""


class RankStep(RankMessage, frozen=True):
    """Run one step. ``ahead``: rank 0 broadcasts its tokens from the device. ``greedy``: the largest logits suffice."""

    rows: Annotated[tuple[RankRow, ...], Meta(max_length=MAX_ROWS)]
    gone: Annotated[tuple[Natural, ...], Meta(max_length=MAX_ROWS)] = ()
    """Sequences that have ended."""
    ahead: bool = False
    greedy: bool = False


class Draft(RankMessage, frozen=True):
    """Run the draft head after the last step. Rank 0 broadcasts the sampled tokens from its device."""

    first_rows: Annotated[tuple[Natural | None, ...], Meta(max_length=MAX_ROWS)]
    """For each sequence of the step, the index of the first token sampled for it; ``None``: none was."""
    num_tokens: Annotated[int, Meta(ge=0, le=MAX_ROWS * 65)]
    """Sampled tokens in all."""
    most: Natural
    """Maximum number of tokens to draft for a sequence."""


class Prepare(RankMessage, frozen=True):
    """Capture what the first requests need, of the model or of the draft head. ``stand_ins``: see ``ModelRunner``."""

    drafts: bool = False
    stand_ins: bool = False


class Idle(RankMessage, frozen=True):
    """Capture one more graph."""


class Stop(RankMessage, frozen=True):
    """End the process."""


# ---- to rank 0 -------------------------------------------------------------------------------------------------------


class RankPrepared(RankMessage, frozen=True):
    pages: Annotated[dict[str, Natural], Meta(max_length=16)]
    fingerprint: Annotated[dict[str, Text], Meta(max_length=64)]
    """What must be the same on all ranks, by name."""
    memory: Annotated[dict[str, Natural], Meta(max_length=256)]
    """Bytes that this rank needs, by purpose."""


class Loaded(RankMessage, frozen=True):
    """The weights are on the device."""


class Assembled(RankMessage, frozen=True):
    """The runner is ready."""


class Alive(RankMessage, frozen=True):
    """The heartbeat."""


class Fault(RankMessage, frozen=True):
    """``kind`` is a class of ``microscale.errors``."""

    kind: Id
    text: Text


ToFollower: TypeAlias = Join | RankLoad | Assemble | RankStep | Draft | Prepare | Idle | Stop
FromFollower: TypeAlias = RankPrepared | Loaded | Assembled | Alive | Fault

_encoder = msgspec.msgpack.Encoder()
_to_follower: msgspec.msgpack.Decoder[ToFollower] = msgspec.msgpack.Decoder(ToFollower)
_from_follower: msgspec.msgpack.Decoder[FromFollower] = msgspec.msgpack.Decoder(FromFollower)


def encode(message: ToFollower | FromFollower) -> bytes:
    return frame(_encoder.encode(message))


def decode_for_follower(payload: bytes) -> ToFollower:
    try:
        return _to_follower.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadMessage(
            f"A message of {len(payload)} bytes from rank 0 cannot be read: {error}; run the same Microscale on all "
            f"machines."
        ) from None


def decode_for_leader(payload: bytes) -> FromFollower:
    try:
        return _from_follower.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadMessage(f"a message of {len(payload)} bytes cannot be read: {error}.") from None


class LinkClosed(Exception):
    """The other end is gone."""


class RankLink:
    """One end of a connection. One thread reads; any thread may send."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._reader = FrameReader()
        self._unread: deque[bytes] = deque()
        self._sending = threading.Lock()

    def send(self, message: ToFollower | FromFollower) -> None:
        data = encode(message)
        try:
            with self._sending:
                self.sock.sendall(data)
        except OSError as error:
            raise LinkClosed from error

    def next(self) -> ToFollower:
        """A follower's next message from rank 0."""
        while not self._unread:
            self._unread.extend(self.read())
        return decode_for_follower(self._unread.popleft())

    def read(self) -> Iterable[bytes]:
        """Wait for data, and return the messages that it completes."""
        try:
            data = self.sock.recv(READ_BYTES)
        except OSError as error:
            raise LinkClosed from error
        if not data:
            raise LinkClosed
        return self._reader.feed(data)

    def close(self) -> None:
        self.sock.close()

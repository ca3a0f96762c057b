"""What rank 0 and the other ranks say to each other, beside sums.

    rank 0                                   another rank
      Join ───────────────────────────────────►          who it is, where the ranks meet, which model
      ◄──────────────────────────── Prepared              what it found, how many KV pages it has room for
      Load ───────────────────────────────────►
      ◄────────────────────────────── Loaded
      Assemble ───────────────────────────────►          limits and pages that all agree on
      ◄─────────────────────────── Assembled
      Step, Draft, Prepare, Idle ─────────────►
      ◄──────────────────────────── Done                  after each
      ◄──────────────────────────── Alive …               every second, whatever it does
      ◄──────────────────────────── Fault                 the last message of one that cannot go on

Every message is bounded and refuses what it does not know; nothing is pickled.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta, Struct

from microscale.engine.config import EngineConfig, Natural, Positive, Text, Token
from microscale.engine.protocol.frames import frame
from microscale.engine.protocol.messages import Id
from microscale.errors import BadMessage

VERSION = 2
"""Counts up with every change of a message that an older peer would misread."""
MAX_ROWS = 2**16
MAX_CHUNK = 2**20
MAX_PAGES = 2**20
Pages = Annotated[tuple[Annotated[int, Meta(ge=-1, lt=2**31)], ...], Meta(max_length=MAX_PAGES)]


class Message(Struct, frozen=True, tag_field="type", forbid_unknown_fields=True):
    """The root of all messages; the class's name is the tag."""


class Join(Message, frozen=True):
    """The first message. Paths and addresses are rank 0's own words; nothing of a request is among them."""

    version: Natural
    rank: Natural
    world: Positive
    transport: Text
    store: Text
    """A file in a folder of this user's alone through which ranks of one machine find each other; none for ranks of
    several machines."""
    config: EngineConfig
    """Which model, in the command line's names."""
    device: Text
    port: Annotated[int, Meta(ge=0, lt=2**16)]
    """At which ranks of several machines find each other, at rank 0's address."""
    sharing: Positive
    """Ranks that share this one's device."""


class Load(Message, frozen=True):
    """All ranks fit: read the weights."""


class Assemble(Message, frozen=True):
    """``Limits``, the pages of each kind of layer, and what the runner must know beside them."""

    page_size: Positive
    window: Positive
    max_num_seqs: Positive
    max_num_batched_tokens: Positive
    max_model_len: Positive
    pages: Annotated[dict[str, Natural], Meta(max_length=16)]
    enforce_eager: bool
    fill_up_prompts: bool | None
    draft_tokens: Natural
    head: bool
    """Drafts come from the draft head."""


class Held(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A sequence's pages of one kind, by what changed: those before ``left`` are nobody's, those before ``kept`` are as
    before, then come ``fresh`` ones."""

    left: Natural
    kept: Natural
    fresh: Pages


class Row(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The work of one sequence in a step."""

    number: Natural
    """Of the sequence; another one after each preemption."""
    first: Natural
    count: Positive
    tokens: Annotated[tuple[Token, ...], Meta(max_length=MAX_CHUNK)]
    """Its own; none where the step before has chosen the token and rank 0 has not read it."""
    drafts: Annotated[tuple[Token, ...], Meta(max_length=64)]
    logits: Natural
    scoring: bool
    held: Annotated[tuple[Held, ...], Meta(max_length=16)]
    """In the order of ``LayerKind``."""
    following: Token | None = None
    """The token after those that run, where the prompt goes on; ``None``: that token is due."""


class Step(Message, frozen=True):
    """One step. ``ahead``: its tokens come from rank 0's device. ``likeliest``: of its logits the largest suffices."""

    number: Natural
    rows: Annotated[tuple[Row, ...], Meta(max_length=MAX_ROWS)]
    gone: Annotated[tuple[Natural, ...], Meta(max_length=MAX_ROWS)] = ()
    """Sequences that will not come again."""
    ahead: bool = False
    likeliest: bool = False


class Draft(Message, frozen=True):
    """Let the draft head take in the last step and guess on. What was drawn in it comes from rank 0's device."""

    number: Natural
    drew: Annotated[tuple[Natural | None, ...], Meta(max_length=MAX_ROWS)]
    """Of each row of the step, the first of the tokens that were drawn for it; ``None``: none was."""
    drawn: Annotated[int, Meta(ge=0, le=MAX_ROWS * 65)]
    """How many tokens."""
    most: Natural
    """Tokens that any row may be drafted next."""


class Prepare(Message, frozen=True):
    """Make ready what the first requests will want; or what the draft head will want. ``stand_ins``: see the
    runner."""

    number: Natural
    drafts: bool = False
    stand_ins: bool = False


class Idle(Message, frozen=True):
    """Do one thing of what may be wanted later."""

    number: Natural


class Stop(Message, frozen=True):
    pass


# ---- to rank 0 -------------------------------------------------------------------------------------------------------


class Prepared(Message, frozen=True):
    pages: Annotated[dict[str, Natural], Meta(max_length=16)]
    found: Annotated[dict[str, Text], Meta(max_length=64)]
    """What all ranks must have alike, by what it is."""
    memory: Annotated[dict[str, Natural], Meta(max_length=256)]
    """Bytes that this rank takes, by what they hold."""


class Loaded(Message, frozen=True):
    pass


class Assembled(Message, frozen=True):
    pass


class Done(Message, frozen=True):
    """``calls``: sums and gathers since the ranks met."""

    number: Natural
    calls: Natural


class Alive(Message, frozen=True):
    number: Natural
    calls: Natural


class Fault(Message, frozen=True):
    """``kind`` is a class of ``microscale.errors``. ``lost``: not its own fault, another rank went away."""

    kind: Id
    text: Text
    lost: bool = False


ToFollower: TypeAlias = Join | Load | Assemble | Step | Draft | Prepare | Idle | Stop
FromFollower: TypeAlias = Prepared | Loaded | Assembled | Done | Alive | Fault

_encoder = msgspec.msgpack.Encoder()
_to_follower: msgspec.msgpack.Decoder[ToFollower] = msgspec.msgpack.Decoder(ToFollower)
_from_follower: msgspec.msgpack.Decoder[FromFollower] = msgspec.msgpack.Decoder(FromFollower)


def encode(message: ToFollower | FromFollower) -> bytes:
    return frame(_encoder.encode(message))


def decode_for_follower(payload: bytes) -> ToFollower:
    try:
        return _to_follower.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadMessage(f"A message of {len(payload)} bytes from rank 0 cannot be read: {error}.") from None


def decode_for_leader(payload: bytes) -> FromFollower:
    try:
        return _from_follower.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadMessage(f"A message of {len(payload)} bytes cannot be read: {error}.") from None

"""What an engine returns: the outputs of its steps, and statistics. Both go over the socket as they are."""

from __future__ import annotations

from msgspec import Struct

from microscale.engine.request import Finish
from microscale.errors import MicroscaleError

Scored = tuple[int, float, tuple[tuple[int, float], ...]]
"""A prompt token, its log-probability, and the likeliest tokens in its place, all of the untempered distribution."""


class Output(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What one step made of one request: a token, or its end without one, or log-probabilities of its prompt.

    It is a list on the wire, since there are thousands a second."""

    request_id: str
    token: int | None
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()
    finish: Finish | None = None
    error: MicroscaleError | None = None
    """Why it ended, with ``Finish.ERROR``."""
    num_cached: int = 0
    """Prompt tokens that the prefix cache had."""
    prompt_logprobs: tuple[Scored, ...] = ()
    """The next prompt tokens after the first of all, and how likely each was given those before it. A step reports
    those that it ran, in outputs that hold nothing else and come before the request's first token, or its end."""
    drafted: int = 0
    """With the first token of a step that had drafts: how many drafted tokens there were …"""
    accepted: int = 0
    """… and how many of them were accepted. These, and one token more, are outputs of the same step."""


class Stats(Struct, frozen=True, forbid_unknown_fields=True):
    """Counters of the engine, and its state now."""

    num_waiting: int
    num_running: int
    num_preemptions: int
    prefix_queries: int
    """Tokens of admitted prompts that were looked up in the prefix cache."""
    prefix_hits: int
    """Those of them that it had."""
    pages: dict[str, tuple[int, int]]
    """Pages in use and in all, by kind of layer."""
    kernels_compiled_late: int = 0
    """After the engine was ready. A request waited for each; there should be none."""
    kernels_loaded_late: int = 0
    """Compiled before, and loaded to the GPU after the engine was ready."""
    graphs: int = 0
    """Kinds of step that are captured as CUDA graphs."""
    graphs_waited_for: int = 0
    """Steps since "ready" that no captured graph could hold: their kernels were launched one by one."""
    graph_stand_ins: int = 0
    """Steps that ran in a larger graph, because that of their own size was not captured yet."""
    num_drafts: int = 0
    """Times that a request had drafts in a step."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    drafted_per_pos: tuple[int, ...] = ()
    """How many drafts had a first token, a second, …; empty without speculation."""
    accepted_per_pos: tuple[int, ...] = ()
    """How often the first token of a draft was accepted, the second, …; empty without speculation."""
    draft_length: float = 0.0
    """Recent mean length of drafts over decoding sequences, those without drafts included."""

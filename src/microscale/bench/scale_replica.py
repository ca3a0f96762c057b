"""One simulated replica: a queue, chunked prompts, a decoding batch, a KV cache. Time passes in runs of equal steps.

    idle ─ arrival ─► prompt steps: a chunk of one prompt, and a token for every decoding sequence
                      decode steps: a token for every decoding sequence, until one ends or a prompt arrives

Between two such events all steps of a replica are alike, so a run of them is one event, whatever their number.
Simpler than the engine in four ways: one prompt runs at a time, contexts count as they were when the run began, prompts
are kept whole in the cache until they are the least recently used, and nothing is preempted.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict, deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from microscale.bench.scale_steps import Steps
from microscale.bench.scale_trace import SYSTEM_TOKENS

PAGE_TOKENS = 16
BINS_PER_OCTAVE = 16
LEAST_S = 1e-5
NUM_BINS = BINS_PER_OCTAVE * 24


class Gaps:
    """Times between tokens, counted in logarithmic bins of 4 %."""

    def __init__(self) -> None:
        self.counts: NDArray[np.float64] = np.zeros(NUM_BINS)

    def add(self, seconds: float, count: int) -> None:
        self.counts[min(int(BINS_PER_OCTAVE * math.log2(max(seconds / LEAST_S, 1.0))), NUM_BINS - 1)] += count

    def copy(self) -> Gaps:
        other = Gaps()
        other.counts[:] = self.counts
        return other

    def quantile(self, share: float) -> float:
        """In seconds; the middle of the bin."""
        if not self.counts.sum():
            return 0.0
        found = int(np.searchsorted(np.cumsum(self.counts), share * self.counts.sum()))
        return LEAST_S * float(2.0 ** ((found + 0.5) / BINS_PER_OCTAVE))


@dataclass
class Job:
    """One request."""

    number: int
    session: int
    arrival_s: float
    input_len: int
    shared_len: int
    output_len: int
    missing: int = 0
    """Tokens of the prompt that are still to be computed."""
    cached: int = 0
    """Tokens of it that are there: found, or computed."""
    hit: int = 0
    """Tokens of it that were found."""
    first_s: float = math.nan


class PrefixCache:
    """Sessions whose tokens are kept, least recently used first."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._sessions: OrderedDict[int, int] = OrderedDict()
        self._used = 0
        self._warm = False
        """Whether what all requests share is there."""

    def find(self, job: Job) -> int:
        """Tokens of the prompt that need not be computed. At least one is: its logits are wanted."""
        system = min(SYSTEM_TOKENS, job.shared_len) if self._warm else 0
        held = min(self._sessions.get(job.session, 0), job.shared_len)
        found = max(system, held) // PAGE_TOKENS * PAGE_TOKENS
        return max(min(found, (job.input_len - 1) // PAGE_TOKENS * PAGE_TOKENS), 0)

    def keep(self, session: int, tokens: int, in_use: float) -> None:
        """``in_use``: tokens of requests that run, which nothing can take the place of."""
        self._warm = True
        self._used += tokens - self._sessions.pop(session, 0)
        self._sessions[session] = tokens
        while self._sessions and self._used + in_use > self._capacity:
            self._used -= self._sessions.popitem(last=False)[1]


class Replica:
    """Whoever drives it calls ``arrive`` and, at ``ends_s``, ``end_run``."""

    def __init__(self, steps: Steps, gaps: Gaps) -> None:
        self.cache = PrefixCache(steps.cache_tokens)
        self.ends_s = math.inf
        """When the run ends that is under way; infinite where nothing runs."""
        self.busy_s = 0.0
        self._steps = steps
        self._gaps = gaps
        self._waiting: deque[Job] = deque()
        self._prompt: Job | None = None
        self._decoding: list[tuple[int, int, Job]] = []
        """Heap by the number of the step that ends a request."""
        self._context = 0.0
        self._step = 0
        self._began_s, self._step_s, self._num_steps, self._chunk = 0.0, 0.0, 0, 0

    def arrive(self, job: Job, now_s: float) -> None:
        self._waiting.append(job)
        if self.ends_s == math.inf:
            self._begin_run(now_s)
        elif self._prompt is None and len(self._decoding) < self._steps.max_num_seqs:
            # Decode steps: the prompt begins after the one that runs.
            self._num_steps = max(1, math.ceil((now_s - self._began_s) / self._step_s - 1e-9))
            self.ends_s = self._began_s + self._num_steps * self._step_s

    def end_run(self) -> list[Job]:
        """Take what the run computed, and begin the next; the requests that have ended."""
        now_s = self.ends_s
        self.busy_s += now_s - self._began_s
        batch = len(self._decoding)
        if batch:
            self._gaps.add(self._step_s, self._num_steps * batch)
            self._context += self._num_steps * batch
        self._step += self._num_steps
        ended = []
        while self._decoding and self._decoding[0][0] <= self._step:
            job = heapq.heappop(self._decoding)[2]
            self._leave(job)
            ended.append(job)
        if self._prompt is not None and self._take_chunks(self._prompt, now_s):
            ended.append(self._prompt)
            self._prompt = None
        elif self._prompt is not None and not self._prompt.missing:
            self._prompt = None
        self._begin_run(now_s)
        return ended

    def _take_chunks(self, job: Job, now_s: float) -> bool:
        """Whether the answer has ended with its first token."""
        computed = min(self._num_steps * self._chunk, job.missing)
        job.missing -= computed
        job.cached += computed
        if job.missing:
            return False
        job.first_s = now_s
        self.cache.keep(job.session, job.input_len, self._context)
        if job.output_len == 1:
            return True
        self._context += job.input_len
        heapq.heappush(self._decoding, (self._step + job.output_len - 1, job.number, job))
        return False

    def _leave(self, job: Job) -> None:
        self._context -= job.input_len + job.output_len - 1
        self.cache.keep(job.session, job.input_len + job.output_len, self._context)

    def _begin_run(self, now_s: float) -> None:
        steps, batch = self._steps, len(self._decoding)
        if self._prompt is None and self._waiting and batch < steps.max_num_seqs:
            job = self._prompt = self._waiting.popleft()
            job.hit = job.cached = self.cache.find(job)
            job.missing = job.input_len - job.hit
        self._began_s = now_s
        until_end = self._decoding[0][0] - self._step if batch else 0
        if self._prompt is not None:
            room = steps.step_tokens - batch
            missing = self._prompt.missing
            # Whole chunks, then the tail. What was computed before is read again by each.
            self._chunk, num = (room, missing // room) if missing >= room else (missing, 1)
            self._num_steps = min(num, until_end) if batch else num
            middle = self._prompt.cached + 0.5 * (self._num_steps - 1) * self._chunk
            self._step_s = steps.mixed(self._chunk, middle, batch, self._context)
        elif batch:
            self._num_steps = until_end
            self._step_s = steps.decode(batch, self._context)
        else:
            self.ends_s = math.inf
            return
        self.ends_s = now_s + self._num_steps * self._step_s

"""Token ids in, token ids out: the step loop.

``submit`` requests, call ``step`` as long as there is work, hand its outputs on. One thread; no text, no sockets.

While the same requests decode, a step is launched before the tokens of the one before are read: they go into it on the
device, and the GPU never waits for the host. A request that turns out to have ended has run one step too many, whose
token is dropped.

With a drafter (``speculation``) a step may carry drafts. Which of them were accepted decides where the next one begins.

    drafts on the device (a draft head)    the device moves the next step on by what was accepted (``step.ahead``), so
                                           that one is launched before the tokens are read, as without drafts
    drafts on the host (ngram)             the tokens are read before the next step is scheduled; all that it does not
                                           need, outputs first of all, is made after it is launched

A step without drafts runs ahead as ever, unless a drafter of the second kind expects to have one next.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from microscale.backends.ops import Logits
from microscale.engine.grammar import Grammars, Matcher
from microscale.engine.output import Output, Stats
from microscale.engine.request import Finish, Request
from microscale.engine.speculation.drafter import Launched
from microscale.engine.speculation.speculation import Speculation
from microscale.engine.step.ahead import Ahead
from microscale.engine.step.decode import take_rows
from microscale.engine.step.flight import Flight
from microscale.engine.step.graphs import GraphCounts
from microscale.engine.step.reading import Choice
from microscale.engine.step.sampler import Sampler
from microscale.engine.step.scheduler import NO_DRAFTS, Scheduler
from microscale.engine.step.scoring import score_prompts
from microscale.engine.step.work import Work
from microscale.errors import BadRequest, MicroscaleError

if TYPE_CHECKING:
    from torch import Tensor


class Runner(Protocol):
    """What the engine needs of a model: see ``runner.ModelRunner``."""

    def forward(self, schedule: Sequence[Work], tokens: Tensor | None = None) -> Logits: ...

    def prepare(self, *, stand_ins: bool) -> None: ...

    def idle(self, is_due: Callable[[], bool]) -> bool: ...

    def graphs(self) -> GraphCounts: ...


@runtime_checkable
class AheadRunner(Runner, Protocol):
    """One that also runs steps with drafts before the last one is read. That of several ranks does not."""

    def forward_ahead(self, schedule: Sequence[Work], ahead: Ahead) -> Logits: ...


_Said = tuple[Any, ...]
"""What an ``Output`` is made of, in its order. A step with drafts has hundreds, which are made when the next runs."""


class Engine:
    """A scheduler, a runner and a sampler, one step at a time."""

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        sampler: Sampler,
        vocab: int,
        eos_token_ids: Sequence[int] = (),
        *,
        run_ahead: bool = True,
        speculation: Speculation | None = None,
    ) -> None:
        """``run_ahead``: launch a decoding step before the last one's tokens are read. ``speculation``: who drafts."""
        self._runner = runner
        self._scheduler = scheduler
        self._sampler = sampler
        self._vocab = vocab
        self._eos = tuple(eos_token_ids)
        self._run_ahead = run_ahead
        self._speculation = speculation
        on_device = run_ahead and speculation is not None and speculation.drafts_ahead
        self._ahead = runner if on_device and isinstance(runner, AheadRunner) else None
        """Runs steps with drafts before the last one is read."""
        self._rows: dict[str, int] = {}
        """Request → its number in the sampler, never given twice."""
        self._flight: Flight | None = None

    @property
    def has_work(self) -> bool:
        return bool(self._rows)

    @property
    def grammars(self) -> Grammars | None:
        """Where the grammars of its requests are compiled, if it knows its vocabulary."""
        return self._sampler.grammars

    def submit(self, request: Request, matcher: Matcher | None = None) -> None:
        """Queue a request, or raise why it can never be served, or not now. ``matcher``: of a grammar that was compiled
        elsewhere; here it may take a second, and the others would wait."""
        if not request.prompt:
            raise BadRequest("The prompt is empty; give at least one token id.")
        for token in request.prompt:
            if not 0 <= token < self._vocab:
                raise BadRequest(f"Token id {token} is not in the vocabulary of {self._vocab}.")
        request.params.check_vocab(self._vocab)
        request.stops = request.params.stop_tokens(self._eos)
        self._scheduler.add(request)
        try:
            self._rows[request.request_id] = self._sampler.add(request.params, request.prompt, matcher)
        except BaseException:
            self._scheduler.remove(request.request_id)
            raise

    def abort(self, request_id: str) -> bool:
        """Forget a request; its pages are free at once. Whether it was here."""
        if request_id not in self._rows:
            return False
        self._finish(request_id)
        return True

    def step(self) -> list[Output]:
        """Schedule, run, sample. An output for each request whose next token was due, or whose prompt is scored.
        Those of a step with drafts, or after which the next can run ahead, come with the next call."""
        outputs: list[Output] = []
        said: list[_Said] = []
        flight, self._flight = self._flight, None
        if flight is not None and (flight.drafted or any(map(self._alive, flight.ready))):
            later = self._launch_after(flight)
            if flight.drafted:
                said, later = self._land_drafts(flight, later)
                outputs = flight.outputs + flight.last
            else:
                outputs = self._land(flight)
            if later is not None:
                return outputs + [Output(*each) for each in said] + self._keep_or_land(later)
        schedule = self._scheduler.schedule(self._drafts())
        flight = self._launch(schedule) if schedule else None
        outputs += [Output(*each) for each in said]
        return outputs if flight is None else outputs + self._keep_or_land(flight)

    def _drafts(self) -> Mapping[str, Sequence[int]]:
        """Drafts for the next step, of requests whose tokens are all read."""
        if self._speculation is None:
            return NO_DRAFTS

        def cut(request: Request, draft: Sequence[int]) -> Sequence[int]:
            return self._sampler.cut(self._rows[request.request_id], draft)

        return self._speculation.propose(self._scheduler.drafted(), cut)

    def _keep_or_land(self, flight: Flight) -> list[Output]:
        """Leave a step in the air if it has drafts, or while another can follow it unread; else wait for its tokens."""
        if flight.drafted:
            self._flight = flight
            return []
        self._scheduler.computed(flight.schedule)
        waits = self._ahead is None and self._expects_drafts(flight)
        if self._run_ahead and self._can_follow(flight) and not waits:
            self._flight = flight
            return []
        return self._land(flight)

    def _expects_drafts(self, flight: Flight) -> bool:
        return self._speculation is not None and self._speculation.expects([request for request, _ in flight.ready])

    def _alive(self, ready: tuple[Request, int]) -> bool:
        """The request has not ended since its step was launched."""
        request, number = ready
        return self._rows.get(request.request_id) == number

    def _launch(self, schedule: list[Work], tokens: Tensor | None = None, ahead: Ahead | None = None) -> Flight:
        if ahead is not None and self._ahead is not None:
            logits = self._ahead.forward_ahead(schedule, ahead)
        else:
            logits = self._runner.forward(schedule, tokens)
        # Before the prompts are scored: after that they want fewer rows.
        ends = list(accumulate(work.num_logits for work in schedule))
        outputs, last = score_prompts(schedule, ends, logits.values, self._sampler)
        ready: list[tuple[Request, int]] = []
        first_rows: dict[str, int] = {}
        rows: list[int] = []
        drafts: list[Sequence[int]] = []
        ended = {output.request_id for output in last}
        for work, end in zip(schedule, ends, strict=True):
            request = work.request
            if not work.wants_logits or request.request_id in ended:
                continue
            if not request.params.max_tokens:
                last.append(Output(request.request_id, None, finish=Finish.LENGTH, num_cached=request.num_cached))
                continue
            ready.append((request, self._rows[request.request_id]))
            first_rows[request.request_id] = len(rows)
            rows.extend(range(end - 1 - len(work.drafts), end))
            drafts.append(work.drafts)
        if ready and len(rows) < len(logits.values):
            logits = take_rows(logits, rows)
        numbers = [number for _, number in ready]
        drawn = self._sampler.draw(logits.values, numbers, logits, drafts, ahead) if ready else None
        if self._speculation is not None:
            self._speculation.observe(Launched(schedule, None if drawn is None else drawn.tokens, first_rows, ahead))
        return Flight(schedule, outputs, ready, drawn, last, drafted=any(drafts))

    def _launch_after(self, flight: Flight) -> Flight | None:
        """The step after ``flight``, if it can do without knowing its tokens."""
        if flight.drawn is None or not self._can_follow(flight):
            return None
        ahead = None
        if self._speculation is not None and self._ahead is not None:
            found = self._speculation.ahead(flight.schedule)
            if found is None and self._expects_drafts(flight):
                return None
            ahead = found
        if ahead is None and flight.drafted:
            return None
        schedule = self._scheduler.schedule_ahead(flight.schedule, () if ahead is None else ahead[1])
        if schedule is None:
            return None
        if ahead is None:
            return self._launch(schedule, flight.drawn.tokens)
        return self._launch(schedule, ahead=self._sampler.after(flight.drawn, *ahead))

    def _can_follow(self, flight: Flight) -> bool:
        """All requests of a decoding step are still there, and none of them must end with it or know its tokens. One
        may end with it, by a stop token or the drafts that are accepted: what follows of it is dropped."""
        if flight.last or not flight.decodes or len(flight.ready) < len(flight.schedule):
            return False
        for work, (request, number) in zip(flight.schedule, flight.ready, strict=True):
            ends = request.num_generated + 1 >= request.params.max_tokens
            if ends or not self._alive((request, number)) or self._sampler.must_read(number, len(work.drafts)):
                return False
        return True

    def _land(self, flight: Flight) -> list[Output]:
        """Read the tokens of a step and hand them to the requests that are still there."""
        for output in flight.last:
            self._finish(output.request_id)
        outputs = flight.outputs + flight.last
        if flight.drawn is None:
            return outputs
        choices = zip(flight.ready, self._sampler.read(flight.drawn), strict=True)
        if self._speculation is not None:
            self._speculation.ended(flight.schedule)
        return outputs + [Output(*self._advance(ready[0], choice)) for ready, [choice] in choices if self._alive(ready)]

    def _land_drafts(self, flight: Flight, later: Flight | None) -> tuple[list[_Said], Flight | None]:
        """The same for a step with drafts: first of all pages and counts follow what was accepted, and the step that
        was launched meanwhile."""
        assert flight.drawn is not None  # who has drafts is ready
        found = self._sampler.read(flight.drawn)
        each = list(zip(flight.ready, found, strict=True))
        accepted = {request.request_id: [choice.token for choice in choices[:-1]] for (request, _), choices in each}
        if self._speculation is not None:
            self._speculation.ended(flight.schedule)
        self._scheduler.computed(flight.schedule, accepted, () if later is None else later.schedule)
        drafted = {work.request.request_id: work for work in flight.schedule if work.drafts}
        for output in flight.last:
            if self._rows.get(output.request_id) is not None:
                self._finish(output.request_id)
        said: list[_Said] = []
        for ready, choices in each:
            if not self._alive(ready):
                continue
            first, request = len(said), ready[0]
            for choice in choices:
                said.append(self._advance(request, choice))
                if not self._alive(ready):
                    break  # drafts on the device may go on behind a stop token
            work = drafted.get(request.request_id)
            if work is not None and self._speculation is not None:
                used = min(len(choices) - 1, len(said) - first)
                self._speculation.landed(work, used)
                said[first] = (*said[first][:-2], len(work.drafts), used)
        return said, None if later is None else later.moved(accepted)

    def _advance(self, request: Request, choice: Choice) -> _Said:
        """Append a request's next token, and end it where that was its last."""
        try:
            choice.check()
        except MicroscaleError as error:
            self._finish(request.request_id)
            return request.request_id, None, None, (), Finish.ERROR, error, 0, (), 0, 0
        request.tokens.append(choice.token)
        finish = None
        if choice.token in request.stops:
            finish = Finish.STOP
        elif request.num_generated == request.params.max_tokens:
            finish = Finish.LENGTH
        if finish is not None:
            self._finish(request.request_id)
        return request.request_id, choice.token, choice.logprob, choice.top, finish, None, request.num_cached, (), 0, 0

    def _finish(self, request_id: str) -> None:
        self._scheduler.remove(request_id)
        self._sampler.remove(self._rows.pop(request_id))
        if self._speculation is not None:
            self._speculation.forget(request_id)

    def prepare(self, *, stand_ins: bool = False) -> None:
        """Make ready what the first requests will want, before they come. ``stand_ins``: a server's steps need not wait
        for graphs of their own size; in a benchmark of steps they would be timed."""
        self._runner.prepare(stand_ins=stand_ins)
        if self._speculation is not None:
            self._speculation.prepare()

    def idle(self, is_due: Callable[[], bool] = lambda: False) -> bool:
        """Prepare a little of what steps may need later, while there is no work, and stop once something ``is_due``.
        Whether there is more of it."""
        return not self.has_work and self._runner.idle(is_due)

    def stats(self) -> Stats:
        pages = {
            kind.value: (pool.num_pages - pool.num_free, pool.num_pages) for kind, pool in self._scheduler.pools.items()
        }
        scheduler = self._scheduler
        graphs = self._runner.graphs()
        stats = Stats(
            scheduler.num_waiting,
            scheduler.num_running,
            scheduler.num_preemptions,
            scheduler.prefix_queries,
            scheduler.prefix_hits,
            pages,
            graphs=graphs.captured,
            graphs_waited_for=graphs.waited_for,
            graph_stand_ins=graphs.stand_ins,
        )
        return stats if self._speculation is None else self._speculation.counts.added_to(stats)

    def check(self) -> None:
        """Pages, requests and sampler agree, or an AssertionError says how not."""
        flight = self._flight
        self._scheduler.check(flight.schedule if flight is not None and flight.drafted else ())
        if self._rows.keys() != {request.request_id for request in self._scheduler.requests()}:
            raise AssertionError("scheduler and sampler hold different requests")

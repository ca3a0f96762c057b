"""Token ids in, token ids out: the step loop.

``submit`` requests, call ``step`` as long as there is work, hand its outputs on. One thread; no text, no sockets.

A step is launched before the tokens of the last one are read: the device passes them on, and the GPU never waits for
the host. A request that turns out to have ended has run one step too many, whose token is dropped. Where the host must
know the tokens (a grammar, pages that run out, a prompt that is scored), they are read first.

With a drafter (``speculation``) a step may carry drafts. Which of them were accepted decides where the next one begins.

    drafts on the device (a draft head)    the device moves the next step on by what was accepted (``ahead``), so the
                                           next step is launched before the tokens are read, as without drafts
    drafts on the host (ngram)             the tokens are read before the next step is scheduled

A step without drafts runs ahead, unless a drafter of the second kind expects to have one next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from msgspec.structs import replace

from microscale.engine.ahead import Ahead
from microscale.engine.grammar import Grammars, Matcher
from microscale.engine.graphs import GraphCounts
from microscale.engine.output import Output, Stats
from microscale.engine.pending_step import PendingStep, score_prompts
from microscale.engine.request import Finish, Request
from microscale.engine.runner import take_rows
from microscale.engine.sampling_state import Drawn, Sampler
from microscale.engine.scheduler import NO_DRAFTS, Scheduler
from microscale.engine.speculation.drafter import LaunchedStep
from microscale.engine.speculation.speculation import Speculation
from microscale.engine.token_readback import NextToken
from microscale.engine.work import Work
from microscale.errors import BadRequest, MicroscaleError
from microscale.planning.ops import Logits

if TYPE_CHECKING:
    from torch import Tensor


class Runner(Protocol):
    """What the engine needs of a model: see ``runner.ModelRunner``."""

    def forward(self, schedule: Sequence[Work], tokens: Tensor | None = None) -> Logits: ...

    def prepare(self, *, stand_ins: bool) -> None: ...

    def idle(self) -> bool: ...

    def graphs(self) -> GraphCounts: ...


@runtime_checkable
class AheadRunner(Runner, Protocol):
    """A runner that also runs steps with drafts before the last one is read. With several ranks there is none."""

    def forward_ahead(self, schedule: Sequence[Work], ahead: Ahead) -> Logits: ...


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
        """``run_ahead``: launch a step before the last one's tokens are read. ``speculation``: the drafter."""
        self._runner = runner
        self._scheduler = scheduler
        self._sampler = sampler
        self._vocab = vocab
        self._eos = tuple(eos_token_ids)
        self.run_ahead = run_ahead
        self._speculation = speculation
        on_device = run_ahead and speculation is not None and speculation.drafts_ahead
        self._ahead = runner if on_device and isinstance(runner, AheadRunner) else None
        """Runs steps with drafts before the last one is read."""
        self._rows: dict[str, int] = {}
        """Request → its number in the sampler, never given twice."""
        self._pending: PendingStep | None = None

    @property
    def has_work(self) -> bool:
        return bool(self._rows)

    @property
    def grammars(self) -> Grammars | None:
        """Compiles the grammars of requests; ``None`` without a tokenizer's vocabulary."""
        return self._sampler.grammars

    def submit(self, request: Request, matcher: Matcher | None = None) -> None:
        """Queue a request, or raise why it can never be served, or not now. ``matcher``: of its grammar, if that was
        compiled elsewhere. To compile it here may take a second, during which all others wait."""
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
        """Schedule, run, sample. Gives an output for each request whose next token was due, or whose prompt is scored.
        Those of a step with drafts, or after which the next can run ahead, come with the next call."""
        outputs: list[Output] = []
        pending, self._pending = self._pending, None
        if pending is not None and (pending.drafted or any(map(self._alive, pending.ready))):
            later = self._launch_after(pending)
            if pending.drafted:
                outputs, later = self._read_drafts(pending, later)
            else:
                outputs = self._read(pending)
            if later is not None:
                return outputs + self._keep_or_read(later)
        schedule = self._scheduler.schedule(self._drafts())
        return outputs + self._keep_or_read(self._launch(schedule)) if schedule else outputs

    def _drafts(self) -> Mapping[str, Sequence[int]]:
        """Drafts for the next step, of requests whose tokens are all read."""
        if self._speculation is None:
            return NO_DRAFTS

        def cut(request: Request, draft: Sequence[int]) -> Sequence[int]:
            return self._sampler.cut(self._rows[request.request_id], draft)

        return self._speculation.propose(self._scheduler.drafted(), cut)

    def _keep_or_read(self, step: PendingStep) -> list[Output]:
        """Leave a step pending if it has drafts, or while another can follow it unread; else wait for its tokens."""
        if step.drafted:
            self._pending = step
            return []
        self._scheduler.computed(step.schedule)
        if self.run_ahead and self._can_follow(step):
            speculation = self._speculation
            if speculation is None or self._ahead is not None or not speculation.expects(step.requests):
                self._pending = step
                for request, _ in step.ready:
                    request.is_unread = speculation is None
                return []
        return self._read(step)

    def _alive(self, ready: tuple[Request, int]) -> bool:
        """The request has not ended since its step was launched."""
        request, number = ready
        return self._rows.get(request.request_id) == number

    def _launch(self, schedule: list[Work], tokens: Tensor | None = None, ahead: Ahead | None = None) -> PendingStep:
        if ahead is not None and self._ahead is not None:
            logits = self._ahead.forward_ahead(schedule, ahead)
        else:
            logits = self._runner.forward(schedule, tokens)
        # Before the prompts are scored: after that they want fewer rows.
        ends = list(accumulate([work.num_logits for work in schedule]))
        outputs, last = score_prompts(schedule, ends, logits.values, self._sampler)
        ready: list[tuple[Request, int]] = []
        numbers: list[int] = []
        first_rows: dict[str, int] = {}
        rows: list[int] = []
        drafts: list[Sequence[int]] = []
        ended = {output.request_id for output in last} if last else ()
        for work, end in zip(schedule, ends, strict=True):
            request = work.request
            if not work.wants_logits or request.request_id in ended:
                continue
            if not request.params.max_tokens:
                last.append(Output(request.request_id, None, finish=Finish.LENGTH, num_cached=request.num_cached))
                continue
            numbers.append(self._rows[request.request_id])
            ready.append((request, numbers[-1]))
            first_rows[request.request_id] = len(rows)
            rows.extend(range(end - 1 - len(work.drafts), end))
            drafts.append(work.drafts)
        if ready and len(rows) < logits.values.shape[0]:
            logits = take_rows(logits, rows)
        drawn = self._sampler.draw(logits.values, numbers, logits, drafts, ahead) if ready else None
        if self._speculation is not None:
            self._speculation.observe(
                LaunchedStep(schedule, None if drawn is None else drawn.tokens, first_rows, ahead)
            )
        return PendingStep(schedule, outputs, ready, drawn, last, drafted=any(drafts))

    def _launch_after(self, step: PendingStep) -> PendingStep | None:
        """The step after ``step``, if it can do without knowing its tokens."""
        # A step without drafts is pending because another can follow it, and the scheduler sees who has left since.
        if step.drawn is None or (step.drafted and not self._can_follow(step)):
            return None
        ahead = None
        if self._speculation is not None and self._ahead is not None:
            ahead = self._speculation.ahead(step.schedule)
            if ahead is None and self._speculation.expects(step.requests):
                return None
        if ahead is None and step.drafted:
            return None
        schedule: list[Work] | None
        if self._speculation is None:
            schedule = self._scheduler.schedule()
        else:
            schedule = self._scheduler.schedule_ahead(step.schedule, () if ahead is None else ahead[1])
        if not schedule or self._scheduler.scores:
            return None  # to score a prompt, the launch waits for the device
        if ahead is None:
            return self._launch(schedule, self._unread(step, step.drawn, schedule))
        return self._launch(schedule, ahead=self._sampler.after(step.drawn, *ahead))

    def _unread(self, step: PendingStep, drawn: Drawn, schedule: Sequence[Work]) -> Tensor | None:
        """The tokens of a step that those who run on in ``schedule`` begin with, in its order."""
        ready, going = step.requests, [work.request for work in schedule if work.ahead]
        if going == ready:
            return drawn.tokens
        rows = {request.request_id: row for row, request in enumerate(ready)}
        return self._sampler.take(drawn.tokens, [rows[request.request_id] for request in going]) if going else None

    def _can_follow(self, step: PendingStep) -> bool:
        """A step can be launched before this one is read: nobody needs its tokens on the host. A request may end with
        it all the same, by a stop token or the drafts that are accepted: what follows is dropped. With drafts, all must
        decode and be there still, and nobody may be known to end with it."""
        if step.last or step.outputs:
            return False
        for request, number in step.ready:
            if self._rows.get(request.request_id) != number:
                if self._speculation is not None:
                    return False
            elif self._sampler.needs_host(number):
                return False
        if self._speculation is None:
            return True
        if len(step.ready) < len(step.schedule):
            return False
        for work, (request, number) in zip(step.schedule, step.ready, strict=True):
            ends = len(request.tokens) + 1 >= request.num_total
            if ends or not work.verifies or self._sampler.needs_host(number, len(work.drafts)):
                return False
        return True

    def _read(self, step: PendingStep) -> list[Output]:
        """Read the tokens of a step and hand them to the requests that are still there."""
        for output in step.last:
            self._finish(output.request_id)
        outputs = step.outputs + step.last
        if step.drawn is None:
            return outputs
        drawn = self._sampler.read(step.drawn)
        if self._speculation is not None:
            self._speculation.ended(step.schedule)
        for (request, number), [token] in zip(step.ready, drawn, strict=True):
            request.is_unread = False
            if self._rows.get(request.request_id) == number:
                outputs.append(self._advance(request, token))
        return outputs

    def _read_drafts(self, step: PendingStep, later: PendingStep | None) -> tuple[list[Output], PendingStep | None]:
        """The same for a step with drafts: first pages and counts follow what was accepted, and so does the step that
        was launched meanwhile."""
        assert step.drawn is not None  # requests with drafts are ready
        drawn = list(zip(step.ready, self._sampler.read(step.drawn), strict=True))
        accepted = {request.request_id: [token.token for token in tokens[:-1]] for (request, _), tokens in drawn}
        if self._speculation is not None:
            self._speculation.ended(step.schedule)
        self._scheduler.computed(step.schedule, accepted, () if later is None else later.schedule)
        drafted = {work.request.request_id: work for work in step.schedule if work.drafts}
        for output in step.last:
            if self._rows.get(output.request_id) is not None:
                self._finish(output.request_id)
        outputs = step.outputs + step.last
        for ready, tokens in drawn:
            if not self._alive(ready):
                continue
            first, request = len(outputs), ready[0]
            for token in tokens:
                outputs.append(self._advance(request, token))
                if not self._alive(ready):
                    break  # drafts on the device may go on after a stop token
            work = drafted.get(request.request_id)
            if work is not None and self._speculation is not None:
                used = min(len(tokens) - 1, len(outputs) - first)
                self._speculation.landed(work, used)
                outputs[first] = replace(outputs[first], drafted=len(work.drafts), accepted=used)
        return outputs, None if later is None else later.moved(accepted)

    def _advance(self, request: Request, drawn: NextToken) -> Output:
        """Append a request's next token, and end it if that was its last."""
        try:
            drawn.check()
        except MicroscaleError as error:
            self._finish(request.request_id)
            return Output(request.request_id, None, finish=Finish.ERROR, error=error)
        request.tokens.append(drawn.token)
        finish = None
        if drawn.token in request.stops:
            finish = Finish.STOP
        elif len(request.tokens) == request.num_total:
            finish = Finish.LENGTH
        if finish is not None:
            self._finish(request.request_id)
        return Output(request.request_id, drawn.token, drawn.logprob, drawn.top, finish, None, request.num_cached)

    def _finish(self, request_id: str) -> None:
        self._scheduler.remove(request_id)
        self._sampler.remove(self._rows.pop(request_id))
        if self._speculation is not None:
            self._speculation.forget(request_id)

    def prepare(self, *, stand_ins: bool = False) -> None:
        """Make ready what the first requests will need. ``stand_ins``: steps run in larger graphs until their own are
        captured, as in a server; a benchmark of steps must not time those."""
        self._runner.prepare(stand_ins=stand_ins)
        if self._speculation is not None:
            self._speculation.prepare()

    def idle(self) -> bool:
        """Prepare a little of what steps may need later, while there is no work. Whether there is more of it."""
        return not self.has_work and self._runner.idle()

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
        pending = self._pending
        self._scheduler.check(pending.schedule if pending is not None and pending.drafted else ())
        if self._rows.keys() != {request.request_id for request in self._scheduler.requests()}:
            raise AssertionError("scheduler and sampler hold different requests")

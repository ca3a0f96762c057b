"""What the tests of speculation do, at length: 200,000 draws for every sampling option against the exact distribution,
and 500 prompts of the embedded model, greedy, with every kind of drafter. Run by ``make speculation``: half an hour on
two cores. An argument is the number of prompts, 0 for none; names of drafters after it leave the draws and the other
drafters out."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from microscale.engine.engine import Engine
from microscale.engine.limits import Limits
from microscale.engine.loading.build import assemble
from microscale.engine.request import Request
from microscale.engine.sampling_params import SamplingParams
from microscale.engine.speculation.config import SpeculativeConfig
from microscale.engine.speculation.head import HeadDrafter
from microscale.engine.speculation.speculation import Speculation
from microscale.models.config import LayerKind
from support.demo_prompts import demo_model, demo_prompts
from support.drafters import Uneven, replaying
from support.draws import EVERY, UNREAD, check_distribution
from support.heads import random_head, trained_head

DRAWS = 200_000
NEW = 16


def say(sentence: str) -> None:
    print(sentence, flush=True)


def make_engine(speculation: Speculation | None) -> Engine:
    """With pages for half of the sequences: somebody is preempted all the time."""
    model = demo_model()
    limits = Limits(model.page_size, model.config.sliding_window, 16, 256, 512)
    return assemble(model, limits, {LayerKind.FULL: 64, LayerKind.SLIDING: 64}, speculation=speculation)


def run(prompts: list[list[int]], speculation: Speculation | None) -> list[list[int]]:
    engine = make_engine(speculation)
    requests = [Request(str(at), prompt, SamplingParams(max_tokens=NEW)) for at, prompt in enumerate(prompts)]
    for request in requests:
        engine.submit(request)
    began = time.monotonic()
    steps = 0
    while engine.has_work:
        engine.step()
        engine.check()
        steps += 1
    stats = engine.stats()
    say(
        f"  {steps} steps in {time.monotonic() - began:.0f} s, {stats.num_preemptions} preemptions, "
        f"{stats.num_accepted_tokens} of {stats.num_draft_tokens} drafted tokens accepted"
    )
    return [request.tokens[request.num_prompt :] for request in requests]


def main(count: int, chosen: Sequence[str] = ()) -> None:
    for options in () if chosen else EVERY:
        check_distribution(options, DRAWS)
        say(f"{options.name}: {DRAWS} draws have the exact distribution")
    for options in () if chosen else UNREAD:
        check_distribution(options, DRAWS, ahead=True)
        say(f"{options.name}, drafts on the device: {DRAWS} draws have the exact distribution")
    prompts = demo_prompts(count)
    if not prompts:
        return
    say(f"{len(prompts)} prompts without drafts")
    want = run(prompts, None)
    pairs, vocab = list(zip(prompts, want, strict=True)), demo_model().config.vocab_size
    uneven = replaying(pairs, vocab, 4, luck=0.7)
    uneven._length = Uneven(4)
    drafters = {
        "ngram": Speculation.of(SpeculativeConfig("ngram", 3, prompt_lookup_min=2, prompt_lookup_max=4)),
        "perfect": replaying(pairs, vocab, 4),
        "random": replaying(pairs, vocab, 1, luck=0.0),
        "uneven": uneven,
        "eagle3": Speculation(HeadDrafter(trained_head(), 3), 3),
        "random eagle3": Speculation(HeadDrafter(random_head("eagle3", demo_model()), 1), 1),
        "random dflash": Speculation(HeadDrafter(random_head("dflash", demo_model()), 2), 2),
    }
    for name, speculation in drafters.items():
        if chosen and name not in chosen:
            continue
        say(name)
        found = run(prompts, speculation)
        differ = sum(ours != theirs for ours, theirs in zip(found, want, strict=True))
        say(f"  {differ} of {len(prompts)} outputs differ")
        if differ:
            sys.exit(1)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 500, sys.argv[2:])

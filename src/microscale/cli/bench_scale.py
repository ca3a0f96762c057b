"""``microscale bench scale``: many replicas on paper."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from microscale import settings
from microscale.bench import scale_report
from microscale.bench.scale import Routing
from microscale.bench.scale_report import Study
from microscale.bench.scale_steps import measured_steps
from microscale.cli.console import err, parse_numbers, print_json
from microscale.errors import BadSetting
from microscale.integrations.prefix_routing import MAX_ENTRIES


def bench_scale(
    model: Annotated[str, typer.Argument(help="A preset: gpt-oss-20b, gpt-oss-120b …")] = "gpt-oss-20b",
    gpu: Annotated[str, typer.Option(help="The card of each replica.")] = "h200",
    precision: Annotated[str, typer.Option(help="exact, balanced or fast.")] = "exact",
    replicas: Annotated[str, typer.Option(help="How many, such as 1,10,100,1000.")] = "1,10,100",
    routing: Annotated[str, typer.Option(help="Of random, load (the idler of two) and prefix.")] = ",".join(Routing),
    rate: Annotated[str, typer.Option(help="Requests a second for each replica, such as 2.5,3.")] = "2.5",
    seconds: Annotated[float, typer.Option(help="Of traffic that is measured.")] = 120.0,
    warm_up: Annotated[float, typer.Option(help="Seconds of traffic before that fill caches and tables.")] = 400.0,
    fronts: Annotated[int, typer.Option(help="Routers that know nothing of each other.")] = 1,
    table_entries: Annotated[int, typer.Option(help="Beginnings of prompts that each router remembers.")] = MAX_ENTRIES,
    cache_tokens: Annotated[
        int | None, typer.Option(help="Tokens that a replica's KV cache holds; what fits the card without.")
    ] = None,
    max_num_seqs: Annotated[int, typer.Option(help="Most sequences that are computed together.", min=1)] = 64,
    max_num_batched_tokens: Annotated[int, typer.Option(help="Most tokens in one step.", min=1)] = 2048,
    price: Annotated[float, typer.Option(help="Dollars for an hour of one GPU; an assumption.")] = 3.0,
    seed: Annotated[int, typer.Option(help="Of the requests.", min=0)] = 0,
    plot: Annotated[Path | None, typer.Option(help="Draw the outcomes here, as SVG.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one object per row as JSON.")] = False,
) -> None:
    """Simulate replicas behind one address with the statistics of a public trace. Needs no GPU; see docs/scale.md."""
    settings.load()
    try:
        routings = tuple(Routing(name.strip()) for name in routing.split(","))
        rates = tuple(float(number) for number in rate.split(","))
    except ValueError as error:
        raise BadSetting(f"--routing is of {', '.join(Routing)}, and --rate has numbers: {error}.") from None
    steps = measured_steps(model, gpu, precision, max_num_seqs, max_num_batched_tokens)
    study = Study(
        scale_report.with_cache(steps, cache_tokens),
        tuple(parse_numbers("--replicas", replicas)),
        routings,
        rates,
        seconds,
        warm_up,
        fronts,
        table_entries,
        seed,
    )
    study.check()
    if not as_json:
        print(f"{steps.name}, room for {study.steps.cache_tokens:,} tokens; {rate} requests a second each")
        print(scale_report.HEAD)
    outcomes = []
    for outcome in scale_report.run(study):
        outcomes.append(outcome)
        if as_json:
            print_json(outcome.to_json())
        else:
            print(scale_report.line(outcome, price), flush=True)
    if plot is not None:
        plot.write_text(scale_report.plot(outcomes, f"{steps.name}, {rate} requests a second for each replica"))
        err.print(f"Wrote {plot}", soft_wrap=True)

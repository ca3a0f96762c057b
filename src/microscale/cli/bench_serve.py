"""``microscale bench serve``, or ``bench MODEL --serve``: measure a server over HTTP."""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import typer  # noqa: TC002 (typer evaluates the annotation of the context)

from microscale import settings
from microscale.bench import serve_figures, serve_load, serve_rate
from microscale.bench.serve_process import OURS, serving
from microscale.bench.serve_rate import RatePlan
from microscale.cli.bars import progress_bar
from microscale.cli.console import err, parse_numbers, print_json
from microscale.cli.help import measurement_option, output_option, sampling_option
from microscale.errors import BadSetting
from microscale.version import __version__

FULL = serve_load.LoadPlan()
KERNEL_CACHE = "--kernel-cache"


class Cache(StrEnum):
    """The kernel cache with which the server starts."""

    FRESH = "fresh"
    WARM = "warm"
    BOTH = "both"


def bench_serve(
    context: typer.Context,
    cache: Annotated[
        Cache,
        measurement_option(help="Kernel cache: fresh (empty), warm (this machine's), or both (empty, then filled)."),
    ] = Cache.BOTH,
    prompt_lens: Annotated[str | None, measurement_option(help="Prompt lengths in tokens, such as 16,512.")] = None,
    repeats: Annotated[int | None, measurement_option(help="Requests per prompt length.", min=1)] = None,
    streams: Annotated[
        str | None, measurement_option(help="Numbers of streams that run together, such as 1,8,64.")
    ] = None,
    output_len: Annotated[int | None, measurement_option(help="Tokens per stream.", min=8)] = None,
    request_rate: Annotated[
        str | None,
        measurement_option(
            help="Instead, send requests at random times, this many per second on average: 4,8,inf. inf sends all at "
            "once."
        ),
    ] = None,
    num_prompts: Annotated[int, measurement_option(help="With --request-rate: requests at each rate.", min=2)] = 200,
    input_len: Annotated[int, measurement_option(help="With --request-rate: tokens per prompt.", min=1)] = 512,
    range_ratio: Annotated[
        float,
        measurement_option(
            help="With --request-rate: lengths vary by up to this share, up or down.", min=0.0, max=0.95
        ),
    ] = 0.0,
    burstiness: Annotated[
        float,
        measurement_option(
            help="With --request-rate: 1 is a Poisson process; lower gives bursts, higher a steadier flow.", min=0.01
        ),
    ] = 1.0,
    temperature: Annotated[float, sampling_option(help="Sampling temperature. 0 is greedy.", min=0)] = FULL.temperature,
    quick: Annotated[bool, measurement_option(help="Send a few small requests, to see whether it works.")] = False,
    server_log: Annotated[
        Path | None, output_option(help="File for the server's log. Default: a temporary file.")
    ] = None,
    as_json: Annotated[bool, output_option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Start a server and measure it over HTTP: time to ready, first tokens by prompt length, gaps between tokens.

    MODEL and all other options are passed on to `microscale serve`. This needs no files:
    `microscale bench gpt-oss-20b --serve --load-format dummy`
    """
    arguments = list(context.args)
    reserved = [name for name in OURS for given in arguments if given.split("=")[0] == name]
    if reserved:
        raise BadSetting(f"{reserved[0]} is set by the benchmark; leave it out.")
    if cache is not Cache.WARM and any(given.split("=")[0] == KERNEL_CACHE for given in arguments):
        raise BadSetting(f"{KERNEL_CACHE} needs --cache warm.")
    plan = _plan(quick=quick, prompt_lens=prompt_lens, repeats=repeats, streams=streams, output_len=output_len)
    plan = replace(plan, temperature=temperature)
    rates = None
    if request_rate is not None:
        fixed = {"--quick": quick, "--prompt-lens": prompt_lens, "--streams": streams, "--repeats": repeats}
        if unused := [name for name, value in fixed.items() if value]:
            raise BadSetting(f"{unused[0]} has no meaning with --request-rate; leave it out.")
        tokens = RatePlan.output_len if output_len is None else output_len
        found = parse_rates(request_rate)
        rates = RatePlan(found, num_prompts, input_len, tokens, range_ratio, burstiness, temperature)
    settings.load()
    log = server_log or Path(tempfile.mkdtemp(prefix="microscale-bench-")) / "server.log"
    about = {"command": shlex.join(["microscale", "serve", *arguments]), **_machine(), "server_log": str(log)}
    runs: dict[str, Any] = {}
    err.print(f"The server's log: {log}", soft_wrap=True)
    with _caches(cache) as caches, progress_bar("Measuring") as (start, advance):
        start(len(caches) * (plan if rates is None else rates).steps)
        for seed, (name, folder) in enumerate(caches):
            with serving([*arguments, *folder], log) as server:
                about |= {key: server.plan[key] for key in ("model", "gpu", "precision") if key in server.plan}
                runs[name] = (
                    serve_load.measure(server, plan, seed, advance)
                    if rates is None
                    else serve_rate.measure(server, rates, seed, advance)
                )
            # Each table is printed at once, so an error later loses nothing.
            if not as_json:
                text = serve_figures.table(name, runs[name]) if rates is None else serve_rate.table(rates, runs[name])
                print(*([] if len(runs) > 1 else [_title(about)]), text, sep="\n")
                print(flush=True)
    if as_json:
        print_json(serve_figures.as_json(about, runs) if rates is None else serve_rate.as_json(about, rates, runs))


def parse_rates(text: str) -> tuple[float, ...]:
    try:
        rates = tuple(float(each) for each in text.split(","))
    except ValueError:
        rates = ()
    if not rates or not all(rate > 0 for rate in rates):
        raise BadSetting(f"--request-rate {text!r} is not a list of rates above 0, such as 4,8,inf.")
    return rates


def _plan(
    *, quick: bool, prompt_lens: str | None, repeats: int | None, streams: str | None, output_len: int | None
) -> serve_load.LoadPlan:
    plan = serve_load.QUICK if quick else FULL
    lens = plan.prompt_lens if prompt_lens is None else tuple(parse_numbers("--prompt-lens", prompt_lens))
    together = plan.streams if streams is None else tuple(parse_numbers("--streams", streams))
    if min(lens) < 1 or min(together) < 1:
        raise BadSetting("--prompt-lens and --streams take numbers of 1 or more.")
    return replace(
        plan,
        prompt_lens=lens,
        streams=together,
        repeats=plan.repeats if repeats is None else repeats,
        stream_tokens=plan.stream_tokens if output_len is None else output_len,
    )


@contextmanager
def _caches(cache: Cache) -> Iterator[list[tuple[str, list[str]]]]:
    """Names of the kernel caches and the options of ``serve`` for each. A fresh cache is deleted at the end."""
    if cache is Cache.WARM:
        yield [(Cache.WARM.value, [])]
        return
    folder = Path(tempfile.mkdtemp(prefix="microscale-kernels-"))
    try:
        names = [Cache.FRESH] if cache is Cache.FRESH else [Cache.FRESH, Cache.WARM]
        yield [(name.value, [KERNEL_CACHE, str(folder)]) for name in names]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _machine() -> dict[str, object]:
    return {
        "machine": f"{platform.machine()}, {os.cpu_count()} CPU cores",
        "versions": {"microscale": __version__, "python": platform.python_version()}
        | {name: _version(name) for name in ("torch", "triton")},
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _title(about: dict[str, object]) -> str:
    versions = about["versions"]
    assert isinstance(versions, dict)
    listed = ", ".join(f"{name} {number}" for name, number in versions.items())
    precision = f", precision {about['precision']}" if "precision" in about else ""
    where = f"{about['model']} on {about.get('gpu', 'an unnamed device')}{precision} ({about['machine']})"
    return f"{where}\n{listed}\n{about['command']}\n"

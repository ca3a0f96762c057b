"""``microscale bench MODEL --speculative-acceptance 0.7``: what drafts cost and give."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from microscale import settings
from microscale.cli.bars import progress_bar
from microscale.cli.bench import ACCEPTANCE
from microscale.cli.console import err, parse_numbers, print_json, show_log
from microscale.cli.help import measurement_option, output_option, speculation_option
from microscale.cli.options import (
    MODEL_HELP,
    DeviceOption,
    KvCacheDtypeOption,
    LoadFormatOption,
    OverridesOption,
    PrecisionOption,
    ThreadsOption,
    UtilizationOption,
    parse_overrides,
)
from microscale.errors import BadSetting
from microscale.models.config import LoadFormat

if TYPE_CHECKING:
    from microscale.engine.loading.prepare import Prepared
    from microscale.models.families import AnyModel
    from microscale_lab.model_bench import speculative

TOKENS = "--speculative-tokens"
MOST = 7
"""Drafts of the longest row by default."""


def bench_speculative(
    model: Annotated[str, typer.Argument(help=f"{MODEL_HELP}.")] = "gpt-oss-20b",
    acceptance: Annotated[
        float,
        speculation_option(
            ACCEPTANCE, help="Chance that a drafted token is accepted after accepted ones.", min=0.0, max=1.0
        ),
    ] = 0.7,
    tokens: Annotated[
        str | None,
        speculation_option(
            TOKENS,
            help="Drafts per sequence: 0..7, or 0,1,3, or auto (the engine's choice). Default: 0..7, or as many as the "
            "model verifies.",
        ),
    ] = None,
    load_format: LoadFormatOption = LoadFormat.AUTO,
    speculative_config: Annotated[
        str | None,
        speculation_option(
            help='Use this draft head, and include its time: \'{"method": "eagle3", "model": "DIR", '
            '"num_speculative_tokens": 7}\'. Default: random drafts that take no time.'
        ),
    ] = None,
    concurrency: Annotated[str, measurement_option(help="Numbers of sequences that decode together.")] = "1,4,16,64",
    depth: Annotated[int, measurement_option(help="Tokens of context before decoding.", min=1)] = 128,
    steps: Annotated[
        int, measurement_option(help="Timed steps per request. Each row has four requests; auto has 300 steps.", min=1)
    ] = 32,
    precision: PrecisionOption = "exact",
    kv_cache_dtype: KvCacheDtypeOption = "auto",
    gpu_memory_utilization: UtilizationOption = 0.9,
    hf_overrides: OverridesOption = None,
    device: DeviceOption = "auto",
    threads: ThreadsOption = None,
    as_json: Annotated[bool, output_option("--json", help="Print one object per row as JSON.")] = False,
) -> None:
    """Measure decoding steps with drafts of which a fixed share is accepted, next to the predicted times.

    Without files: microscale bench gpt-oss-20b --load-format dummy --speculative-acceptance 0.7
    """
    import torch
    import triton

    from microscale.cli.bars import load_with_progress
    from microscale.engine.config import EngineConfig
    from microscale.engine.limits import drafted_sequences
    from microscale.engine.loading.prepare import prepare
    from microscale.engine.speculation.config import parse_config
    from microscale.models.families import find_config
    from microscale.models.outline import outline
    from microscale.models.recorded import PAGE_SIZE
    from microscale.planning.ops import Activations
    from microscale_lab.model_bench import speculative, speculative_table

    env = settings.load()
    overrides = parse_overrides(hf_overrides)
    config = find_config(model, load_format, overrides, env.offline)
    shape = outline(model, config, Activations.BF16, PAGE_SIZE, config.max_context)
    drafts = range(min(MOST, shape.most_drafts) + 1) if tokens is None else parse_drafts(tokens)
    plan = speculative.DraftBenchPlan(acceptance, tuple(drafts), depth, steps)
    shape.check_drafts(plan.most)
    batches, states = parse_numbers("--concurrency", concurrency), shape.state_bytes > 0
    if too_many := [count for count in batches if drafted_sequences(count, states=states) < count]:
        err.print(f"Left out: {', '.join(map(str, too_many))} sequences. Layers with states limit how many get drafts.")
        batches = [count for count in batches if count not in too_many]
    drafter = parse_config(speculative_config)
    if drafter is not None:
        drafter = replace(drafter, num_speculative_tokens=plan.most)
    options = EngineConfig(
        model=model,
        load_format=load_format.value,
        device=device,
        precision=precision,
        kv_cache_dtype=kv_cache_dtype,
        max_num_seqs=max(1, *batches),
        max_num_batched_tokens=speculative.STEP_TOKENS,
        gpu_memory_utilization=gpu_memory_utilization,
        hf_overrides=overrides,
        offline=env.offline,
        threads=threads,
        speculative=drafter,
    )
    show_log()
    prepared = prepare(options, draft_tokens=plan.most)
    if plan.longest > prepared.config.max_context:
        needs = f"{depth} tokens and the steps after them need {plan.longest} positions"
        raise BadSetting(f"{needs}; the model has {prepared.config.max_context}.")
    loaded = load_with_progress(prepared)
    head = load_drafter(prepared, loaded)
    if not as_json:
        versions = f"torch {torch.__version__}, triton {triton.__version__}"
        who = "free drafts" if head is None or drafter is None else f"{drafter.method} {drafter.model or ''}".strip()
        setup = prepared.setup
        print(f"{model} on {setup.gpu.name}, precision {setup.precision}, acceptance {acceptance:g}, {who}, {versions}")
        print(speculative_table.header(), flush=True)
    rows = []
    with progress_bar("Measuring") as (start, advance):
        start(len(batches) * len(plan.drafts))
        for row in speculative.run(loaded, prepared.outline, prepared.setup, plan, batches, head):
            rows.append(row)
            if not as_json:
                print(speculative_table.line(row), flush=True)
            advance(1)
    if as_json:
        print_json(speculative_table.as_json(rows))
    else:
        print(speculative_table.summary(rows, acceptance))


def load_drafter(prepared: Prepared, model: AnyModel) -> speculative.BenchHead | None:
    """The draft head that was asked for, if one was."""
    from microscale.engine.loading.drafting import draft_costs, load_head
    from microscale.engine.speculation.head import HeadDrafter
    from microscale_lab.model_bench import speculative

    if prepared.head is None:
        return None
    own, head = prepared.head, load_head(prepared.head, model)
    costs = draft_costs(prepared.outline, prepared.plan, prepared.setup, own)
    return speculative.BenchHead(partial(HeadDrafter, head), costs)


def parse_drafts(text: str) -> tuple[int | str, ...]:
    """``0..7``, ``0,1,3`` and ``auto``, also with commas between them."""
    from microscale.models.config import MAX_DRAFT
    from microscale_lab.model_bench import speculative

    found: list[int | str] = []
    for part in text.split(","):
        span = re.fullmatch(r"\s*([0-9]{1,3})(?:\.\.([0-9]{1,3}))?\s*", part, re.ASCII)
        if span is not None:
            found += range(int(span[1]), int(span[2] or span[1]) + 1)
        elif part.strip() == speculative.AUTO:
            found.append(speculative.AUTO)
        else:
            raise BadSetting(f"{TOKENS} takes numbers, spans and auto, such as 0..7,auto, not {text[:80]!r}.")
    wrong = [count for count in found if isinstance(count, int) and count > MAX_DRAFT]
    if wrong or not found:
        raise BadSetting(f"{TOKENS} {text[:80]}: a draft has up to {MAX_DRAFT} tokens.")
    return tuple(dict.fromkeys(found))

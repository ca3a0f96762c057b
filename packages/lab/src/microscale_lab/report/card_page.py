"""A card's report as a page of Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def page(report: Mapping[str, Any]) -> str:
    """The page that goes with the JSON."""
    return (
        "\n".join([*_head(report), *_kernels(report), *_models(report), *_telemetry(report), *_machine(report)]) + "\n"
    )


def _head(report: Mapping[str, Any]) -> Iterator[str]:
    gpu, software = report["gpu"], report["software"]
    yield f"# {gpu['name']}"
    yield ""
    unified = " unified" if gpu["unified"] else ""
    yield (
        f"SM {gpu['capability']}, {gpu['num_sms']} SMs, {gpu['memory_gib']} GiB{unified}. Microscale "
        f"{report['microscale']}, torch {software['torch']}, Triton {software['triton']}, {report['date']}."
    )
    if not report["measured"]:
        yield ""
        yield "Nothing was timed: the kernels were executed on a CPU as this card's."


def _kernels(report: Mapping[str, Any]) -> Iterator[str]:
    executed = report["kernels"]
    yield from ("", "## Kernels", "")
    if "missing" in executed:
        yield f"Not executed: {executed['missing']}."
    else:
        right = "all as float32 says" if not executed["failed"] else f"{len(executed['failed'])} wrong"
        yield f"{executed['cases']} cases executed on {executed['executed_on']}: {right}."
    for entry in executed["failed"]:
        yield f"- {entry['op']} {entry['variant']}: {entry['reason']}"
    if report["rows"]:
        yield from ("", "| op | case | path | us | GB/s |", "| --- | --- | --- | --- | --- |")
        for row in report["rows"]:
            rate = row["bytes"] / row["us"] / 1e3
            yield f"| {row['op']} {row['implementation']} | {row['case']} | {row['path']} | {row['us']} | {rate:.0f} |"
    for fault in report["row_faults"]:
        yield f"- not timed: {fault}"


def _models(report: Mapping[str, Any]) -> Iterator[str]:
    if not report["models"]:
        return
    yield from ("", "## Models", "")
    yield "| model | precision | work | tok/s | predicted | interval | inside |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for row in report["models"]:
        if "missing" in row:
            yield f"| {row['model']} | | {row['missing']} | | | | |"
            continue
        work = row["context"] if row["kind"] == "prefill" else row["batch"]
        what = f"prefill {row['context']}" if row["kind"] == "prefill" else f"decode, {row['batch']} x {row['context']}"
        rates = ["" if row[name] is None else f"{work / row[name] * 1e6:.1f}" for name in ("us", "predicted_us")]
        interval = " | "
        if row["low_us"] is not None:
            slow, fast = (f"{work / row[name] * 1e6:.1f}" for name in ("high_us", "low_us"))
            interval = f"{slow} to {fast} | {'yes' if row['low_us'] <= row['us'] <= row['high_us'] else 'no'}"
        figures = f"{rates[0]} | {rates[1]} | {interval}"
        yield f"| {row['model']} | {row['precision']} | {what} | {figures} |"


def _telemetry(report: Mapping[str, Any]) -> Iterator[str]:
    seen = report["telemetry"]
    yield from ("", "## Clocks and power", "")
    if not seen["samples"]:
        yield f"Not seen: {seen.get('missing', 'no samples')}."
        return
    for name in ("sm_mhz", "memory_mhz", "power_w", "temperature_c"):
        if name in seen:
            found = seen[name]
            yield f"- {name}: {found['least']:.0f} to {found['most']:.0f}, median {found['median']:.0f}"
    throttled = ", ".join(f"{name} {count}" for name, count in seen["throttled_samples"].items()) or "never"
    yield f"- throttled, of {seen['samples']} samples: {throttled}"


def _machine(report: Mapping[str, Any]) -> Iterator[str]:
    yield from ("", "## Machine", "")
    for finding in report["doctor"]:
        yield f"- {finding['status']} {finding['name']}: {finding['value']}"

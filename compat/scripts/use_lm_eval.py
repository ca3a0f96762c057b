"""lm-eval over ``local-completions`` and ``local-chat-completions``, on tiny tasks of our own: no dataset is fetched.

Log-likelihoods must be transformers' own of the same checkpoint (``reference_logprobs.py``).
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from checks import KEY, MODEL, TOKENIZER, V1, check, main, run, tool

PYTHON = os.environ["MICROSCALE_PYTHON"]
REFERENCE = Path(__file__).parent / "reference_logprobs.py"
# Sums over some tens of tokens in float32, in two orders; a wrong token or position changes them by far more.
TOLERANCE = 2e-3

SUMS = [{"question": f"What is {a} + {b}?", "answer": str(a + b)} for a, b in ((12, 30), (7, 8), (20, 5), (31, 44))]
CHOICES = [
    {"question": "What is the capital of France?", "choices": ["Paris", "Rome", "Berlin"], "label": 0},
    {"question": "What is the capital of Italy?", "choices": ["Madrid", "Rome", "Oslo"], "label": 1},
    {"question": "What is 2 + 3?", "choices": ["4", "5", "The answer is six."], "label": 1},
]
TEXTS = [
    {"text": "The capital of France is Paris, and the capital of Italy is Rome."},
    {"text": "Two and two are four. Größe, naïve café: not every text is plain."},
    {"text": "A long one. " + " ".join(f"The sum of {n} and {n + 1} is {2 * n + 1}." for n in range(40))},
]

GENERATION = """
task: own_sums
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["\\n\\n"], do_sample: false, max_gen_toks: 200}}
filter_list:
  - name: last-number
    filter: [{{function: regex, regex_pattern: '(\\d+)', group_select: -1}}, {{function: take_first}}]
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""
MULTIPLE_CHOICE = """
task: own_choices
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_target: label
doc_to_choice: choices
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""
ROLLING = """
task: own_texts
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list: [{{metric: bits_per_byte}}]
"""


def evaluate(task: str, docs: list[dict[str, Any]], model: str, route: str, *more: str) -> tuple[Any, list[Any]]:
    """The results of a task and its samples."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = folder / "docs.jsonl"
        data.write_text("".join(json.dumps(doc) + "\n" for doc in docs))
        (folder / "task.yaml").write_text(task.format(data=data))
        told = (
            f"model={MODEL},base_url={V1}{route},tokenizer={TOKENIZER},num_concurrent=2,max_retries=1,max_length=4096"
        )
        named = task.split("task: ")[1].split()[0]
        command = [tool("lm-eval"), "run", "--model", model, "--model_args", told, "--tasks", named, "--log_samples"]
        command += ["--include_path", name, "--output_path", str(folder / "out"), *more]
        run(command, cwd=folder, HOME=name, OPENAI_API_KEY=KEY, HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")
        (results,) = (folder / "out").rglob("results_*.json")
        (samples,) = (folder / "out").rglob("samples_*.jsonl")
        lines = [json.loads(line) for line in samples.read_text().splitlines()]
        lines.sort(key=lambda line: line["doc_id"])
        return json.loads(results.read_text())["results"][named], lines


def reference(pairs: list[list[str]]) -> list[tuple[float, bool]]:
    command = [PYTHON, str(REFERENCE), TOKENIZER]
    done = subprocess.run(command, input=json.dumps(pairs), capture_output=True, text=True, check=True)
    return [(total, greedy) for total, greedy in json.loads(done.stdout)]


def largest(got: list[float], truth: list[float]) -> str:
    difference = max(abs(a - b) for a, b in zip(got, truth, strict=True))
    return f"largest difference {difference:.0e} of sums down to {min(truth):.0f}"


@check("generate_until over chat completions")
def chat() -> None:
    results, _ = evaluate(GENERATION, SUMS, "local-chat-completions", "/chat/completions", "--apply_chat_template")
    assert results["exact_match,last-number"] == 1.0, results


@check("generate_until over completions")
def completions() -> None:
    _, samples = evaluate(GENERATION, SUMS, "local-completions", "/completions")
    assert len(samples) == len(SUMS)
    assert all(sample["resps"][0][0] for sample in samples), samples


@check("multiple_choice: log-likelihoods are transformers' own")
def multiple_choice() -> str:
    _, samples = evaluate(MULTIPLE_CHOICE, CHOICES, "local-completions", "/completions")
    pairs = [[doc["question"], f" {choice}"] for doc in CHOICES for choice in doc["choices"]]
    truth = reference(pairs)
    got = [response[0] for sample in samples for response in sample["resps"]]
    assert len(got) == len(truth)
    for pair, (total, is_greedy), (wanted, greedy) in zip(pairs, got, truth, strict=True):
        assert math.isclose(float(total), wanted, abs_tol=TOLERANCE), (pair, total, wanted)
        assert str(is_greedy) == str(greedy), (pair, is_greedy, greedy)
    return largest([float(total) for total, _ in got], [wanted for wanted, _ in truth])


@check("loglikelihood_rolling: log-likelihoods are transformers' own")
def rolling() -> str:
    results, samples = evaluate(ROLLING, TEXTS, "local-completions", "/completions")
    truth = reference([["", doc["text"]] for doc in TEXTS])
    sums = [float(sample["resps"][0][0]) for sample in samples]
    for doc, got, (wanted, _) in zip(TEXTS, sums, truth, strict=True):
        assert math.isclose(got, wanted, abs_tol=TOLERANCE), (doc, got, wanted)
    num_bytes = sum(len(doc["text"].encode()) for doc in TEXTS)
    bits = -sum(wanted for wanted, _ in truth) / num_bytes / math.log(2)
    assert math.isclose(results["bits_per_byte,none"], bits, rel_tol=1e-4), (results, bits)
    return largest(sums, [wanted for wanted, _ in truth])


main()

"""Greedy tokens from vLLM itself, in a process of its own: ``python generate.py JOB.json OUT.json``.

A job is the model's folder, prompts as token ids, how many tokens to make, and options for ``vllm.LLM``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from vllm import LLM, SamplingParams


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    engine = LLM(
        model=job["folder"],
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=128,
        max_num_seqs=4,
        enable_prefix_caching=False,
        **job["options"],
    )
    params = SamplingParams(temperature=0.0, max_tokens=job["tokens"], ignore_eos=True, detokenize=False)
    outputs = engine.generate([{"prompt_token_ids": ids} for ids in job["prompts"]], params, use_tqdm=False)
    Path(sys.argv[2]).write_text(json.dumps([list(output.outputs[0].token_ids) for output in outputs]))


if __name__ == "__main__":
    main()

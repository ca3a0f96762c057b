"""Log-likelihoods of the embedded model by transformers alone, in float32: the truth for what lm-eval reports.

Reads ``[[context, continuation], …]`` from standard input, writes ``[[sum, whether it is greedy], …]``. An empty
context is the tokenizer's first token, as lm-eval has it. Runs in the project's environment; imports nothing of ours.
"""

from __future__ import annotations

import json
import sys

import torch
from transformers import AutoTokenizer, GptOssForCausalLM, Mxfp4Config


def main() -> None:
    folder = sys.argv[1]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = GptOssForCausalLM.from_pretrained(
        folder,
        quantization_config=Mxfp4Config(dequantize=True),
        dtype=torch.float32,
        attn_implementation="eager",
    )
    model = model.float().eval()  # without it BF16 and float32 would mix
    results = []
    for context, continuation in json.load(sys.stdin):
        whole = tokenizer.encode(context + continuation, add_special_tokens=False)
        known = tokenizer.encode(context, add_special_tokens=False)
        if not known:
            known = [tokenizer.bos_token_id]
            whole = known + whole
        with torch.no_grad():
            logits = model(torch.tensor([whole])).logits[0, len(known) - 1 : -1].log_softmax(-1)
        wanted = torch.tensor(whole[len(known) :])
        total = logits.gather(1, wanted[:, None]).double().sum().item()
        results.append([total, bool((logits.argmax(-1) == wanted).all())])
    json.dump(results, sys.stdout)


main()

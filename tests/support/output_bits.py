"""Prints a hash of the logits of a set of steps, in every precision, on the GPU at hand.

Two commits that compute the same, bit for bit, print the same:

    PYTHONPATH=<one tree>/src:<one tree>/tests python tests/support/output_bits.py > one
    PYTHONPATH=<another>/src:<another>/tests python tests/support/output_bits.py > another
    diff one another

The weights are random, of real widths and few layers. The same prompts run whole, in chunks and token by token, one
sequence and many, so that every path of every op takes part, merged kernels included.
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor

from microscale.hardware import cpu, detect
from microscale.models.families import build_model, open_weights
from microscale.planning.ops import Activations, Ops, Preference
from microscale.planning.precision import make_precision
from support.forward import all_logits
from support.launch_list import LAYERS, PRECISIONS

VOCAB = 8192


def prompt(length: int, seed: int) -> list[int]:
    return torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def cases() -> Iterator[tuple[str, list[list[int]], int]]:
    """A label, prompts, and how many tokens of each run together."""
    yield "1 sequence, token by token", [prompt(24, 1)], 1
    for num in (2, 3, 8, 16, 40, 64, 100):
        yield f"{num} sequences, token by token", [prompt(4 + at % 5, at) for at in range(num)], 1
    yield "a prompt in chunks of 2", [prompt(10, 2)], 2
    yield "a prompt in chunks of 20, others beside it", [prompt(200, 3), prompt(7, 4), prompt(61, 5)], 20
    yield "prompts of 300, 3 and 170", [prompt(300, 6), prompt(3, 7), prompt(170, 8)], 4096
    yield "a prompt of 2048", [prompt(2048, 9)], 2048
    yield "four prompts of 2048", [prompt(2048, 10 + at) for at in range(4)], 2048


def digest(logits: list[Tensor]) -> str:
    whole = hashlib.sha256()
    for part in logits:
        assert not part.isnan().any()
        whole.update(part.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", nargs="*", default=list(LAYERS))
    parser.add_argument("--precision", nargs="*", default=list(PRECISIONS))
    chosen = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    gpu, activations = (detect(), Activations.BF16) if device.type == "cuda" else (cpu(), Activations.FLOAT32)
    for name in chosen.model:
        for label in chosen.precision:
            overrides = {"num_hidden_layers": LAYERS[name], "vocab_size": VOCAB}
            weights = open_weights(name, load_format="dummy", overrides=overrides)
            ops = Ops(gpu, activations, Preference(), make_precision(**PRECISIONS[label]))  # type: ignore[arg-type]
            model = build_model(weights, ops, device, 16, lambda: None)
            for case, prompts, chunk in cases():
                print(name, label, case, digest(all_logits(model, prompts, chunk)), flush=True)


if __name__ == "__main__":
    main()

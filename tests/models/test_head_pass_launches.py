"""What a pass of a draft head starts, counted on tensors without memory: few kernels, and of torch nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from microscale.hardware import known
from microscale.kernels import launch as launching
from microscale.models.config import OWN_FORMATS, HeadFormats
from microscale.models.draft_heads import chain
from microscale.models.draft_heads.config import PRESETS
from microscale.models.draft_heads.drafting import guess
from microscale.models.draft_heads.eagle3 import Eagle3
from microscale.models.draft_heads.heads import bind_head_shapes
from microscale.models.draft_heads.layer import Steps, join
from microscale.models.dummy_weights import META
from microscale.models.recorded import Step
from microscale.planning.ops import Activations, Ops, Preference
from microscale.planning.precision import make_precision

FREE = {
    "empty", "new_empty", "view", "_unsafe_view", "reshape", "flatten", "slice", "select", "unsqueeze", "transpose",
    "t", "detach",
}  # fmt: skip
"""What starts nothing on a GPU."""


class Torch(TorchDispatchMode):
    """Which operations of torch start something."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.started: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name not in FREE:
            self.started.append(name)
        return func(*args, **(kwargs or {}))


def bound(name: str, formats: HeadFormats, embed: str = "bf16") -> Eagle3:
    precision = make_precision(layer_formats=(f"embed={embed}",))
    own = Ops(known("h200"), Activations.BF16, Preference(), precision)
    ops = Ops(own.gpu, own.activations, own.preference, precision.of_draft_head(formats.quantization, formats.lm_head))
    head = bind_head_shapes(PRESETS[name], ops)
    assert isinstance(head, Eagle3)
    head.embed = own.embed(torch.empty((201088, 2880), dtype=torch.bfloat16, device=META))
    return head


def one_pass(head: Eagle3, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], list[str]]:
    """Kernels and operations of torch of a later pass, one sequence."""
    kernels: list[str] = []
    batch = Step(1, 1, 1, 64, None).batch()
    last, kv = batch.attention[next(iter(batch.attention))], head.new_cache(4)
    steps = Steps(last, 1, head.page_size)
    drafts = torch.empty((1, 2), dtype=torch.int64, device=META)
    hidden = torch.empty((1, head.config.layer.hidden), dtype=torch.bfloat16, device=META)
    step = steps.batch(0, drafts[:, 0])
    made = launching.Launch.kernel

    def named(self: launching.Launch) -> launching.Kernel:
        kernels.append(self.fn.__name__)
        return made(self)

    with launching.recording():
        head.forward(step, kv, hidden)  # what is made once is made here
    monkeypatch.setattr(launching.Launch, "kernel", named)

    def joined(first: Tensor, second: Tensor, dim: int = 0) -> Tensor:
        torches.started.append("cat")  # without memory it is a shape alone
        return join(first, second, dim)

    monkeypatch.setattr(chain, "join", joined)
    with launching.recording(), Torch() as torches:
        logits, _ = head.forward(step, kv, hidden)
        guess(logits, head, head.layer.small, drafts[:, 1], head.target_ids)
    return kernels, torches.started


@pytest.mark.parametrize("formats", [OWN_FORMATS, HeadFormats("mxfp8")], ids=["own", "mxfp8"])
@pytest.mark.parametrize("name", ["gpt-oss-20b-eagle3", "gpt-oss-120b-eagle3-v3"])
def test_a_pass_starts_eleven_kernels(name: str, formats: HeadFormats, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels, torches = one_pass(bound(name, formats), monkeypatch)
    attention = kernels[2:-8]
    assert kernels == [
        "norm_pair", "small_batch", *attention, "small_batch", "rms_norm", "small_batch", "gated", "small_batch",
        "rms_norm", "small_batch_logits", "likeliest",
    ]  # fmt: skip
    assert 1 <= len(attention) <= 2
    assert torches == []


def test_a_coded_embedding_is_looked_up_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels, torches = one_pass(bound("gpt-oss-20b-eagle3", OWN_FORMATS, embed="mxfp8"), monkeypatch)
    assert kernels[:3] == ["rms_norm", "rms_norm", "small_batch"]
    assert kernels[-1] == "likeliest"
    assert torches == ["cat"]

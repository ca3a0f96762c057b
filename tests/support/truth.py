"""transformers' own gpt-oss in pure float32, which is what ours is compared with."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import GptOssForCausalLM, Mxfp4Config


def load_transformers(folder: Path) -> GptOssForCausalLM:
    """The checkpoint in ``folder``, decoded. Without ``.float()`` the model would mix BF16 and float32."""
    model = GptOssForCausalLM.from_pretrained(
        folder,
        quantization_config=Mxfp4Config(dequantize=True),
        dtype=torch.float32,
        attn_implementation="eager",
    )
    return model.float().eval()

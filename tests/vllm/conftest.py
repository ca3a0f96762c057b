"""Most of these tests run vLLM itself, in the environment of ``make test-vllm``; elsewhere they are left out."""

from __future__ import annotations

import importlib.util

# This folder is called vllm too: without the package, the name means the folder, which has no file of its own.
spec = importlib.util.find_spec("vllm")
collect_ignore = (
    [] if spec is not None and spec.origin is not None else ["test_engine.py", "test_installed.py", "test_layers.py"]
)

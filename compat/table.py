"""Which clients are run: where they come from, in which version, and the script that drives each."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

# For clients that pull torch in: the version in locks/, so that one wheel serves them all.
TORCH = "torch==2.13.0"


class Kind(Enum):
    PYTHON = "python"
    NODE = "node"


@dataclass(frozen=True)
class Client:
    """One row. ``packages`` are pinned; the version of the first is the client's."""

    name: str
    kind: Kind
    packages: tuple[str, ...]
    script: str
    timeout_s: float = 300.0
    note: str = ""
    """What a reader of the table must know besides."""

    @property
    def version(self) -> str:
        return self.packages[0].rpartition("@" if self.kind is Kind.NODE else "==")[2]


def python(name: str, *packages: str, script: str = "", **rest: object) -> Client:
    return Client(name, Kind.PYTHON, packages, script or f"use_{name.replace('-', '_')}.py", **rest)  # type: ignore[arg-type]


def node(name: str, *packages: str, script: str = "", **rest: object) -> Client:
    return Client(name, Kind.NODE, packages, script or f"use_{name.replace('-', '_')}.mjs", **rest)  # type: ignore[arg-type]


SCRIPTED = "on the scripted engine: its prompt is longer than the embedded model's context"
STANDARD = (
    "langchain-tests 1.1.9, over chat and Responses; skipped are images, audio, files, Anthropic's inputs and a "
    "recording of HTTP; left out on the embedded model is what 30 million parameters do not know"
)
CHROMIUM = "the page in the system's Chromium, its direct connection on the scripted engine"

CLIENTS = (
    python("openai-python", "openai==2.54.0", script="use_openai.py"),
    node("openai-node", "openai@6.49.0", "zod@4.6.7"),
    node("vercel-ai", "ai@6.0.326", "@ai-sdk/openai@3.0.139", "@ai-sdk/openai-compatible@2.0.87", "zod@4.6.7"),
    python("openai-agents", "openai-agents==0.24.0"),
    python("langchain", "langchain-openai==1.7.3", "langchain-tests==1.1.9", timeout_s=900, note=STANDARD),
    python("litellm", "litellm==1.106.2", "mcp==2.3.0"),
    python("llama-index", "llama-index-llms-openai-like==0.8.1"),
    python("pydantic-ai", "pydantic-ai-slim[openai]==2.66.0"),
    python("anthropic", "anthropic==2.8.0"),
    node("codex", "@openai/codex@0.166.0", script="use_codex.py", note=SCRIPTED),
    node("claude-code", "@anthropic-ai/claude-code@2.1.197", script="use_claude_code.py", note=SCRIPTED),
    python("lm-eval", "lm-eval[api]==0.4.13", "transformers==5.22.2", TORCH, timeout_s=600),
    python("guidellm", "guidellm==0.8.1", TORCH, timeout_s=600),
    python("llama-benchy", "llama-benchy==0.4.0", TORCH),
    python("aiperf", "aiperf==0.13.0", TORCH, timeout_s=600),
    python("genai-bench", "genai-bench==0.0.5", TORCH),
    python("open-webui", "open-webui==0.12.4", "playwright==1.65.0", TORCH, timeout_s=600, note=CHROMIUM),
    python("instructor", "instructor==1.17.0"),
    python("dspy", "dspy==3.4.1"),
    python("smolagents", "smolagents[openai]==1.26.0", TORCH),
    python("llm", "llm==0.36"),
    python("aider", "aider-chat==0.86.2", note="on the scripted engine: the task is too hard for the embedded model"),
)

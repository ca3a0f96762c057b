"""The entry point of the vLLM plug-in (group ``vllm.general_plugins``): whether to take part at all.

vLLM calls ``register`` in each of its processes. Only if all checks pass is ``vllm_experts`` imported, which builds on
vLLM's own classes. Whatever goes wrong, vLLM stays as it was, and one warning says why.
"""

from __future__ import annotations

import importlib
import logging
import re

from microscale import settings
from microscale.errors import MicroscaleError, Unsupported

FIRST, LAST = (0, 26), (0, 32)
"""The versions of vLLM that the plug-in was tested with."""
EXPERTS = "microscale.integrations.vllm_experts"

# Below vLLM's own logger, whose handlers print it among vLLM's lines.
logger = logging.getLogger("vllm.microscale")


def register() -> None:
    """Let Microscale run vLLM's MXFP4 and MXFP8 experts, or log why not. May be called again."""
    try:
        if not settings.load().vllm:
            logger.info("MICROSCALE_VLLM=off: Microscale leaves vLLM's experts alone.")
            return
        _check_version(importlib.import_module("vllm").__version__)
        importlib.import_module(EXPERTS).register()
    except MicroscaleError as error:
        logger.warning("Microscale leaves vLLM's experts alone: %s", error)
    except Exception as error:
        logger.warning("Microscale leaves vLLM's experts alone: %s: %s", type(error).__name__, error)


def _check_version(version: str) -> None:
    """Refuse a version outside the range: vLLM does not promise to keep the interface that we use."""
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None or not FIRST <= (int(match[1]), int(match[2])) <= LAST:
        first, last = (".".join(map(str, end)) for end in (FIRST, LAST))
        raise Unsupported(f"this is vLLM {version}, and the plug-in is made for {first} to {last}.")

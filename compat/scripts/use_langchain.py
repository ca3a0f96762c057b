"""LangChain's standard tests of a chat model, over chat and over Responses.

All of them run on the scripted engine, which answers as a large model would. On the embedded model those are left out
that ask for what 30 million parameters do not know.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from checks import report

TESTS = Path(__file__).parent / "standard_langchain.py"
# To call a function that it never saw with the right number, to end a joke, to write Chinese.
TOO_HARD = "test_tool_calling or test_tool_calling_async or structured_output or json_mode or unicode_tool_call"
RUNS = {
    "the scripted engine": ("MICROSCALE_SCRIPTED_", ""),
    "the embedded model": ("MICROSCALE_", f"not ({TOO_HARD}) or no_arguments"),
}


def run(where: str, prefix: str, chosen: str) -> bool:
    env = os.environ | {f"MICROSCALE_{name}": os.environ[f"{prefix}{name}"] for name in ("ADDRESS", "MODEL")}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-c", os.devnull, "--noconftest", "-q"]
    command += ["--rootdir", str(TESTS.parent), "--asyncio-mode=auto", "--tb=line", "-rf", "-k", chosen, str(TESTS)]
    # It keeps one connection pool for all models, which must not outlive its event loop.
    command += [f"--override-ini=asyncio_default_{kind}_loop_scope=session" for kind in ("test", "fixture")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    counts = re.findall(r"\d+ (?:passed|failed|skipped|deselected|error)", done.stdout.splitlines()[-1])
    is_good = done.returncode == 0 and any("passed" in count for count in counts)
    report(f"standard tests on {where}: {', '.join(counts)}", ok=is_good, detail="" if is_good else done.stdout)
    return is_good


if __name__ == "__main__":
    results = [run(where, *told) for where, told in RUNS.items()]
    sys.exit(not all(results))

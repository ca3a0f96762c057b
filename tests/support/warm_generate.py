"""Runs a command of the command line, and prints how many kernels were compiled or loaded after its model was.

    python -m support.warm_generate generate gpt-oss-20b --load-format dummy --prompt-ids 1,2,3

In a process of its own: kernels that another test has launched would be ready in any case.
"""

from __future__ import annotations

import json
import sys
from typing import Any
from unittest.mock import patch

from microscale import cli
from microscale.cli import bars as loading
from microscale.kernels.compiling.warming import LateKernels


def main() -> None:
    late, load = LateKernels(), loading.load_with_progress

    def watched_load(*arguments: Any) -> Any:
        model = load(*arguments)
        late.watch()
        return model

    sys.argv[0] = "microscale"
    try:
        with patch.object(loading, "load_with_progress", watched_load):
            cli.main()
    except SystemExit as ended:
        if ended.code:
            raise
    print(json.dumps({"compiled": late.compiled, "loaded": late.loaded}))


if __name__ == "__main__":
    main()

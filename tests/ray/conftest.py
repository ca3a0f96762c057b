"""These tests run Ray itself, in the environment of ``make test-ray``; elsewhere they are left out."""

from __future__ import annotations

import importlib.util

# This folder is called ray too: without the package, the name means the folder, which has no file of its own.
spec = importlib.util.find_spec("ray")
collect_ignore_glob = [] if spec is not None and spec.origin is not None else ["test_*.py"]

"""What tests of the server share."""

from __future__ import annotations

from httpx2 import _config

# httpx gives up after five seconds, and on a busy machine a server may need more.
for _part in ("connect", "read", "write", "pool"):
    setattr(_config.DEFAULT_TIMEOUT_CONFIG, _part, 60.0)

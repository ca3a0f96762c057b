"""What tests of the server share: an httpx for many small requests to servers of this machine."""

from __future__ import annotations

from functools import cache

from httpx2 import _config
from httpx2._transports import default

# httpx gives up after five seconds, and on a busy machine a server may need more.
for _part in ("connect", "read", "write", "pool"):
    setattr(_config.DEFAULT_TIMEOUT_CONFIG, _part, 60.0)
# It reads the system's certificates for every ``httpx.get``, 30 ms each, and these servers speak no TLS.
vars(default)["create_ssl_context"] = cache(_config.create_ssl_context)

"""What a request may ask of sampling at most. Without torch: the server's process reads it too."""

from __future__ import annotations

MAX_TOP_LOGPROBS = 20
